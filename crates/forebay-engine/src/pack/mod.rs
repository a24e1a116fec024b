//! Makes packs from other containers, verifies them, and restores their sources.

mod blocks;
mod choice;
mod error;
mod restore;
mod saved;
mod verify;
mod writer;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use forebay_format::Catalog;
use forebay_format::pack::{PackPlan, source_documents};
use forebay_model::{Architecture, Weights};
use forebay_store::{CopyJob, FileSet, Interrupt, IoKind, OutputFile, copy};
use serde::Serialize;

use self::choice::Choice;
use self::saved::saved;
use self::writer::Packing;
use crate::statistics::ReadPath;

pub use choice::Codec;
pub use error::PackError;
pub use restore::{RestoreReport, to_gguf, to_hugging_face};
pub use saved::Saved;
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
    /// What compact BF16 and codecs saved, by kind of block.
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
/// a read or write fails. Returns [`PackError::Interrupted`] if `options` or `progress` stop the work. No file is
/// left behind in these cases.
pub fn pack(
    source: &Path,
    out: OutputFile,
    options: impl Into<PackOptions>,
    progress: &mut Progress<'_>,
) -> Result<PackReport, PackError> {
    let started = Instant::now();
    let PackOptions { io, codec, interrupt } = options.into();
    let _span = tracing::debug_span!("pack", from = %source.display(), to = %out.path().display())
        .entered();
    let catalog = Catalog::open(source)?;
    if catalog.pack.is_some() {
        return Err(PackError::IsPack { path: source.to_path_buf() });
    }
    let architecture = Architecture::from_catalog(&catalog)?;
    let files = FileSet::of_catalog(&catalog, true)?.interruptible(&interrupt);
    let weights = Weights::new(&catalog, &architecture, &files)?;
    let documents = source_documents(&catalog)?;
    let planned = blocks::blocks(&catalog, &weights);
    let mut choice = Choice::new(&catalog, &weights, codec, &files)?;
    let (plan, report, chunks, bytes, write_bytes) = loop {
        let storage = choice.storage(&catalog);
        let plan = PackPlan::new(&catalog, &planned, documents.clone(), &storage)?;
        out.reserve(plan.decoded_bytes())?;
        let index = plan.chunk_index();
        let refused = Mutex::new(BTreeSet::new());
        let sink = Packing::new(&out, &plan, &refused)?;
        let job = CopyJob {
            range: index.range(),
            header: &[],
            spans: plan.spans().to_vec(),
            refused: &|tensor| {
                refused.lock().unwrap_or_else(PoisonError::into_inner).insert(tensor);
            },
            chunk_at: Some(&|at| index.chunk_at(at).map(|chunk| chunk.offset..chunk.end())),
        };
        let report = copy(&files, &job, io, &sink, progress)?;
        let write_bytes = sink.memory_bytes();
        let (chunks, bytes) = sink.finish()?;
        let refused = refused.into_inner().unwrap_or_else(PoisonError::into_inner);
        if refused.is_empty() {
            break (plan, report, chunks, bytes, write_bytes);
        }
        // The whole model was read, so all tensors that do not fit are known.
        choice.leave_out(&refused);
    };
    out.write_at(0, &plan.front(&chunks))?;
    out.truncate(bytes)?;
    let direct_writes = out.is_past_cache();
    let path = out.path().to_path_buf();
    out.commit()?;

    let seconds = started.elapsed().as_secs_f64();
    Ok(PackReport {
        path,
        source: source.to_path_buf(),
        bytes,
        source_bytes: catalog.file_bytes.iter().sum(),
        saved: saved(&catalog, &plan, &chunks),
        left_plain: choice.left_out(),
        blocks: plan.blocks().len(),
        experts: plan.blocks().iter().filter(|block| block.expert.is_some()).count(),
        chunks: chunks.len() as u64,
        seconds,
        bytes_per_second: bytes as f64 / seconds,
        buffer_bytes: report.memory_bytes + write_bytes,
        io_engine: report.engine.into(),
        direct_writes,
    })
}
