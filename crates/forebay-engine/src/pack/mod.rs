//! Makes packs from other containers, verifies them, and restores their sources.

mod blocks;
mod compact;
mod restore;
mod verify;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use forebay_format::Catalog;
use forebay_format::pack::{Chunk, ChunkIndex, PackPlan, checksum, source_documents};
use forebay_model::{Architecture, Weights};
use forebay_store::{CopyJob, FileSet, Interrupt, IoKind, OutputFile, Sink, StoreError, copy};
use serde::Serialize;

use self::compact::Choice;
use crate::EngineError;
use crate::statistics::ReadPath;

pub use compact::{Codec, Saved};
pub use restore::{RestoreReport, to_gguf, to_hugging_face};
pub use verify::{Damage, VerifyReport, verify};

/// Callback that gets the bytes done and the bytes in total. If it returns false, the work stops and unfinished files
/// are removed.
pub type Progress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

/// Options for reading and writing packs.
#[derive(Clone, Debug, Default)]
pub struct PackOptions {
    pub io: IoKind,
    /// How a new pack stores weights.
    pub codec: Codec,
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
    /// What compact BF16 saved, by kind of block.
    pub saved: Vec<Saved>,
    /// Number of tensors that stay BF16 because their exponents lie too far apart for compact blocks, or those of tensors that
    /// products take together with them.
    pub left_plain: usize,
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

/// Makes the pack `out` from the model at `source`. The file appears when it is complete and on the disk. The model is read twice
/// if tensors turn out not to fit compact blocks.
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
    let PackOptions { io, codec, interrupt } = options.into();
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
    let planned = blocks::blocks(&catalog, &weights);
    let mut choice = match codec {
        Codec::Auto => Choice::all(&catalog, &weights),
        Codec::None => Choice::none(&catalog),
    };
    let (plan, index, report, checksums) = loop {
        let plan = PackPlan::new(&catalog, &planned, documents.clone(), choice.compact())?;
        out.reserve(plan.file_bytes())?;
        let index = plan.chunk_index();
        let refused = Mutex::new(BTreeSet::new());
        let checksums = zeros(index.len());
        let sink = Packing { file: &out, index: &index, checksums, refused: &refused };
        let job = CopyJob {
            range: plan.data_offset()..plan.file_bytes(),
            header: &[],
            spans: plan.spans().to_vec(),
            refused: &|tensor| {
                refused.lock().unwrap_or_else(PoisonError::into_inner).insert(tensor);
            },
            chunks: Some(&index),
        };
        let report = copy(&files, &job, io, &sink, progress)?;
        let checksums = sink.checksums.into_iter().map(AtomicU64::into_inner).collect::<Vec<_>>();
        let refused = refused.into_inner().unwrap_or_else(PoisonError::into_inner);
        if refused.is_empty() {
            break (plan, index, report, checksums);
        }
        // The whole model was read, so all tensors that do not fit are known.
        choice.leave_out(&refused);
    };
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
        saved: choice.saved(&catalog),
        left_plain: choice.left_out(),
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
    /// Tensors that cannot become compact. If there are any, the file must be written again.
    refused: &'a Mutex<BTreeSet<usize>>,
}

impl Sink for Packing<'_> {
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        for chunk in self.index.chunks(offset, offset + bytes.len() as u64) {
            let sum = checksum(slice(bytes, offset, &chunk));
            self.checksums[chunk.number as usize].store(sum, Ordering::Relaxed);
        }
        if !self.refused.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            return Ok(());
        }
        Ok(self.file.write_at(offset, bytes)?)
    }
}

/// Returns the bytes of a chunk in a window that begins at `offset`.
fn slice<'b>(bytes: &'b [u8], offset: u64, chunk: &Chunk) -> &'b [u8] {
    let start = (chunk.offset - offset) as usize;
    &bytes[start..start + chunk.bytes as usize]
}
