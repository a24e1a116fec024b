//! Loads weights to a GPU with cuFile, NVIDIA's library. Threads ask cuFile for spans of files, which it writes
//! straight to their final addresses. It bypasses the page cache and does not verify checksums.

use std::io;
use std::sync::Arc;

use forebay_cuda::{CuFile, CuFileError, CuFileHandle, CuFileMemory, CuFileMode, DevicePtr, Gpu};
use forebay_options::{BadOption, OptionName};
use forebay_store::{
    DeviceReader, DeviceSpan, EngineInfo, FileIndex, FileSet, LoadStatistics, StoreError,
    StraightOptions, UploadPlan, load_straight,
};

use super::request::{CuFileRequests, CuFileUse};
use crate::doctor::CuFileChoice;
use crate::load::error::LoadError;

/// Name of the engine in errors and statistics.
const NAME: &str = "cufile";

/// Files and device memory that are registered with cuFile. Clones share them.
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
    /// Starts the library, registers all files and allocates `bytes` of device memory.
    ///
    /// # Errors
    /// Returns an error if there is no library, if a file cannot be read with direct I/O or the library refuses it, or
    /// if there is not enough memory.
    pub fn open(gpu: &Gpu, files: &FileSet, bytes: usize) -> Result<CuFileReader, LoadError> {
        let library = CuFile::open(gpu)?;
        let known = |index| {
            let file = files.direct_descriptor(index, NAME)?;
            let refused = |error: CuFileError| StoreError::Unavailable {
                engine: NAME,
                why: format!("{}: {error}", files.path(index).unwrap_or_default().display()),
            };
            Ok::<_, LoadError>(library.register_file(file).map_err(refused)?)
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

    /// Loads everything in `plan` from the files that this was opened with. The plan's addresses must lie in this
    /// memory.
    ///
    /// # Errors
    /// Returns the error of the first read that failed. Returns an error if the files have checksums to verify.
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

/// Decides if a load with `wanted` uses cuFile. Returns the requests to cuFile, or the reason why it is not used
/// although it might have been. The reason is empty if there is none.
///
/// # Errors
/// Returns an error if `wanted` allows nothing but cuFile and cuFile cannot be used.
pub(super) fn choose(
    wanted: CuFileUse,
    found: Option<&CuFileChoice>,
    gpu: &Gpu,
    files: &FileSet,
    cold: bool,
) -> Result<Result<CuFileRequests, String>, LoadError> {
    let found = found.filter(|found| found.gpu == gpu.name());
    match wanted {
        CuFileUse::Never => Ok(Err(String::new())),
        CuFileUse::Always if files.is_coded() => Err(LoadError::Option(BadOption {
            name: OptionName::Io,
            value: NAME.to_owned(),
            expected: format!(
                "cuFile cannot decode the blocks of this pack: use another {}, or a pack made with {} or none",
                OptionName::Io,
                OptionName::Codec.with("compact")
            ),
        })),
        CuFileUse::Always if files.is_checked() => Err(LoadError::Option(BadOption {
            name: OptionName::Io,
            value: NAME.to_owned(),
            expected: format!(
                "cuFile cannot verify the checksums of a pack: add {}, or use another {}",
                OptionName::NoVerify,
                OptionName::Io
            ),
        })),
        CuFileUse::Always => Ok(Ok(found.map(|found| found.requests).unwrap_or_default())),
        CuFileUse::WhereFaster => {
            let Some(found) = found.filter(|found| found.wins) else {
                return Ok(Err(String::new()));
            };
            if files.is_coded() {
                return Ok(Err("cuFile, the faster way here, cannot decode blocks".to_owned()));
            }
            if files.is_checked() {
                return Ok(Err("cuFile, the faster way here, cannot compare checksums".to_owned()));
            }
            if let Some(why) = files.why_not_direct() {
                return Ok(Err(format!("cuFile, the faster way here, reads directly: {why}")));
            }
            let bytes =
                (0..files.len() as u32).filter_map(|file| files.file_bytes(FileIndex(file)));
            let (bytes, cached) = (bytes.sum::<u64>(), files.cached_bytes()?.0);
            let absent = bytes.saturating_sub(if cold { 0 } else { cached });
            // cuFile reads all bytes from the disk. The ring reads only those that are not in the page cache.
            if (absent as f64) < bytes as f64 / found.gain() {
                return Ok(Err("the page cache, which cuFile does not use, is faster".to_owned()));
            }
            Ok(Ok(found.requests))
        }
    }
}
