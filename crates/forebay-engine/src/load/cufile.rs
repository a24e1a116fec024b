//! The way of weights to a GPU by cuFile, NVIDIA's library: threads that ask it for spans of files, straight to where
//! they belong. It reads past the page cache and knows no checksums.

use std::io;
use std::sync::Arc;

use forebay_cuda::{CuFile, CuFileError, CuFileHandle, CuFileMemory, CuFileMode, DevicePtr, Gpu};
use forebay_store::{
    DeviceReader, DeviceSpan, EngineInfo, FileIndex, FileSet, LoadStatistics, StoreError,
    StraightOptions, UploadPlan, load_straight,
};

use super::request::{CuFileRequests, CuFileUse};
use crate::EngineError;
use crate::doctor::CuFileChoice;

/// What errors and statistics call it.
const NAME: &str = "cufile";

/// Files and device memory that cuFile knows. Clones share them.
#[derive(Clone)]
pub(crate) struct CuFileReader {
    known: Arc<Known>,
    mode: CuFileMode,
    version: Option<String>,
}

struct Known {
    files: Vec<CuFileHandle>,
    memory: CuFileMemory,
}

impl DeviceReader for Known {
    fn name(&self) -> &'static str {
        NAME
    }

    fn read(&self, span: DeviceSpan) -> io::Result<usize> {
        let file = self.files.get(span.file.0 as usize);
        let file = file.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        self.memory.read(file, span.offset, span.length, span.to)
    }
}

impl CuFileReader {
    /// Starts the library, makes all files known and takes `bytes` of device memory.
    ///
    /// # Errors
    /// No library, a file that cannot be read past the page cache or that the library refuses, not enough memory.
    pub fn open(gpu: &Gpu, files: &FileSet, bytes: usize) -> Result<CuFileReader, EngineError> {
        let library = CuFile::open(gpu)?;
        let known = |index| {
            let file = files.direct_descriptor(index, NAME)?;
            let refused = |error: CuFileError| StoreError::Unavailable {
                engine: NAME,
                why: format!("{}: {error}", files.path(index).unwrap_or_default().display()),
            };
            Ok::<_, EngineError>(library.register_file(file).map_err(refused)?)
        };
        let files = (0..files.len() as u32).map(FileIndex).map(known).collect::<Result<_, _>>()?;
        let memory = library.allocate(gpu, bytes)?;
        let known = Arc::new(Known { files, memory });
        Ok(CuFileReader { known, mode: library.mode(), version: library.version() })
    }

    pub fn ptr(&self) -> DevicePtr<u8> {
        self.known.memory.ptr()
    }

    pub fn mode(&self) -> CuFileMode {
        self.mode
    }

    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    pub fn memory_is_registered(&self) -> bool {
        self.known.memory.is_registered()
    }

    /// Brings everything of `plan`, whose addresses are of this memory, from the files that this was opened with.
    ///
    /// # Errors
    /// The first read that failed; files with checksums to compare with.
    pub fn fill(
        &self,
        files: &FileSet,
        plan: &UploadPlan,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<LoadStatistics, StoreError> {
        let reader: Arc<dyn DeviceReader> = self.known.clone();
        let options = StraightOptions { threads, ..StraightOptions::default() };
        load_straight(&reader, files, plan, options, progress)
    }

    pub fn engine(&self) -> EngineInfo {
        EngineInfo {
            name: NAME,
            direct: true,
            registered_buffers: self.memory_is_registered(),
            why: self.mode.to_string(),
        }
    }
}

/// Whether a load with `wanted` goes by cuFile, and how it is asked; where it might have but does not, why.
///
/// # Errors
/// What rules it out where nothing else was to be used.
pub(super) fn choose(
    wanted: CuFileUse,
    found: Option<&CuFileChoice>,
    gpu: &Gpu,
    files: &FileSet,
    cold: bool,
) -> Result<Result<CuFileRequests, String>, EngineError> {
    let found = found.filter(|found| found.gpu == gpu.name());
    match wanted {
        CuFileUse::Never => Ok(Err(String::new())),
        CuFileUse::Always if files.is_checked() => Err(EngineError::BadOption {
            name: "--io",
            value: NAME.to_owned(),
            expected: "what it reads of a pack cannot be compared with the checksums: give --no-verify, too, or \
                       another --io"
                .to_owned(),
        }),
        CuFileUse::Always => Ok(Ok(found.map(|found| found.requests).unwrap_or_default())),
        CuFileUse::WhereFaster => {
            let Some(found) = found.filter(|found| found.wins) else {
                return Ok(Err(String::new()));
            };
            if files.is_checked() {
                return Ok(Err("cuFile, the faster way here, cannot compare checksums".to_owned()));
            }
            if let Some(why) = files.why_not_direct() {
                return Ok(Err(format!("cuFile, the faster way here, reads directly: {why}")));
            }
            let bytes = (0..files.len() as u32).filter_map(|file| files.file_bytes(FileIndex(file)));
            let (bytes, cached) = (bytes.sum::<u64>(), files.cached_bytes()?.0);
            let absent = bytes.saturating_sub(if cold { 0 } else { cached });
            // cuFile reads all of it from the disk, the ring only what the page cache has not.
            if (absent as f64) < bytes as f64 / found.gain() {
                return Ok(Err("the page cache, which cuFile does not use, is faster".to_owned()));
            }
            Ok(Ok(found.requests))
        }
    }
}
