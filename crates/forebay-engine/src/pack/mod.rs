//! Makes packs from other containers, verifies them, and restores their sources.

mod blocks;
mod restore;
mod verify;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use forebay_format::Catalog;
use forebay_format::pack::{Chunk, ChunkIndex, PackPlan, checksum, source_documents};
use forebay_model::{Architecture, Weights};
use forebay_store::{
    CopyJob, FileSet, Interrupt, IoKind, OutputFile, Sink, Span, StoreError, copy,
};
use serde::Serialize;

use crate::EngineError;
use crate::statistics::ReadPath;

pub use restore::{RestoreReport, to_gguf, to_hugging_face};
pub use verify::{Damage, VerifyReport, verify};

/// Callback that gets the bytes done and the bytes in total. If it returns false, the work stops and unfinished files
/// are removed.
pub type Progress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

/// Options for reading and writing packs.
#[derive(Clone, Debug, Default)]
pub struct PackOptions {
    pub io: IoKind,
    /// Interrupt that ends the work early. Unfinished files are removed.
    pub interrupt: Interrupt,
}

impl From<IoKind> for PackOptions {
    fn from(io: IoKind) -> PackOptions {
        PackOptions { io, ..PackOptions::default() }
    }
}

/// Report of [`pack`].
#[derive(Clone, Debug, Serialize)]
pub struct PackReport {
    pub path: PathBuf,
    /// Path of the model that the pack was made from.
    pub source: PathBuf,
    pub bytes: u64,
    pub source_bytes: u64,
    pub blocks: usize,
    pub experts: usize,
    pub chunks: u64,
    /// Seconds from opening the source until the file is durable.
    pub seconds: f64,
    pub bytes_per_second: f64,
    /// Bytes of memory for reads and writes in flight.
    pub buffer_bytes: u64,
    pub io_engine: ReadPath,
    /// True if blocks were written past the page cache.
    pub direct_writes: bool,
}

/// Makes the pack `out` from the model at `source`. The file appears when it is complete and on the disk.
///
/// # Errors
/// Returns an error if the model cannot be opened or is not known, if the source is a pack, if the disk is full, or if
/// a read or write fails. Returns [`EngineError::Interrupted`] if `options` or `progress` stop the work. No file is
/// left behind in these cases.
pub fn pack(
    source: &Path,
    out: OutputFile,
    options: impl Into<PackOptions>,
    progress: &mut Progress<'_>,
) -> Result<PackReport, EngineError> {
    let started = Instant::now();
    let PackOptions { io, interrupt } = options.into();
    let _span = tracing::debug_span!("pack", from = %source.display(), to = %out.path().display())
        .entered();
    let catalog = Catalog::open(source)?;
    if catalog.pack.is_some() {
        return Err(EngineError::IsPack { path: source.to_path_buf() });
    }
    let architecture = Architecture::from_catalog(&catalog)?;
    let files = FileSet::of_catalog(&catalog, true)?.interruptible(&interrupt);
    let weights = Weights::new(&catalog, &architecture, &files)?;
    let documents = source_documents(&catalog)?;
    let plan = PackPlan::new(&catalog, &blocks::blocks(&catalog, &weights), documents)?;

    out.reserve(plan.file_bytes())?;
    let index = plan.chunk_index();
    let sink = Packing { file: &out, index: &index, checksums: zeros(index.len()) };
    let job = CopyJob {
        range: plan.data_offset()..plan.file_bytes(),
        header: &[],
        spans: plan.spans().iter().map(|&(to, from)| Span { to, from }).collect(),
        chunks: Some(&index),
    };
    let report = copy(&files, &job, io, &sink, progress)?;
    let checksums: Vec<u64> =
        sink.checksums.iter().map(|sum| sum.load(Ordering::Relaxed)).collect();
    out.write_at(0, &plan.front(&checksums))?;
    let direct_writes = out.is_past_cache();
    let path = out.path().to_path_buf();
    out.commit()?;

    let seconds = started.elapsed().as_secs_f64();
    Ok(PackReport {
        path,
        source: source.to_path_buf(),
        bytes: plan.file_bytes(),
        source_bytes: catalog.file_bytes.iter().sum(),
        blocks: plan.blocks().len(),
        experts: plan.blocks().iter().filter(|block| block.expert.is_some()).count(),
        chunks: index.len(),
        seconds,
        bytes_per_second: plan.file_bytes() as f64 / seconds,
        buffer_bytes: report.memory_bytes,
        io_engine: report.engine.into(),
        direct_writes,
    })
}

fn zeros(count: u64) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Sink that writes the pack and computes the checksums of what it writes.
struct Packing<'a> {
    file: &'a OutputFile,
    index: &'a ChunkIndex,
    checksums: Vec<AtomicU64>,
}

impl Sink for Packing<'_> {
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        for chunk in self.index.chunks(offset, offset + bytes.len() as u64) {
            let sum = checksum(slice(bytes, offset, &chunk));
            self.checksums[chunk.number as usize].store(sum, Ordering::Relaxed);
        }
        Ok(self.file.write_at(offset, bytes)?)
    }
}

/// Returns the bytes of a chunk in a window that begins at `offset`.
fn slice<'b>(bytes: &'b [u8], offset: u64, chunk: &Chunk) -> &'b [u8] {
    let start = (chunk.offset - offset) as usize;
    &bytes[start..start + chunk.bytes as usize]
}
