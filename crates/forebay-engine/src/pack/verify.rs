//! Reads a whole pack and verifies every checksum.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use forebay_codec::{Codec, Decoder};
use forebay_format::pack::{Chunk, ChunkIndex, PackSpan, checksum};
use forebay_format::{Catalog, Extent, FileIndex, FormatError};
use forebay_store::{CopyJob, FileSet, Sink, StoreError, copy};
use serde::Serialize;

use super::PackError;
use super::writer::slice;
use super::{PackOptions, Progress};
use crate::statistics::ReadPath;

/// Largest number of damaged chunks that are listed. All of them are counted.
const LISTED_MAX: usize = 100;

/// Report of [`verify`].
#[derive(Clone, Debug, Serialize)]
pub struct VerifyReport {
    pub path: PathBuf,
    pub bytes: u64,
    pub blocks: usize,
    pub chunks: u64,
    pub damaged_chunks: u64,
    /// First damaged chunks.
    pub damage: Vec<Damage>,
    pub seconds: f64,
    pub bytes_per_second: f64,
    pub io_engine: ReadPath,
}

/// Chunk whose bytes differ from those that were written, or cannot be decoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Position of the chunk in bytes from the start of the file.
    pub offset: u64,
    pub bytes: u64,
    /// Name of the chunk's block, in words.
    pub block: String,
    /// Names of the tensors with bytes in the chunk. Empty if it has only padding.
    pub tensors: Vec<String>,
}

/// Reads all of a pack. Damage in the tables is an error. Damage in blocks is listed in the report.
///
/// # Errors
/// Returns [`PackError::NoPack`] if the file is not a pack. Returns an error if the tables are damaged or a read
/// fails. Returns [`PackError::Interrupted`] if `options` or `progress` stop the work.
pub fn verify(
    path: &Path,
    options: impl Into<PackOptions>,
    progress: &mut Progress<'_>,
) -> Result<VerifyReport, PackError> {
    let started = Instant::now();
    let PackOptions { io, interrupt, .. } = options.into();
    let _span = tracing::debug_span!("verify_pack", path = %path.display()).entered();
    let catalog = Catalog::open(path)?;
    let Some(pack) = &catalog.pack else {
        return Err(PackError::NoPack { path: path.to_path_buf() });
    };
    let index = &pack.chunks;
    // The bytes in the file, which are not decoded.
    let files = FileSet::open(&catalog.files)?.interruptible(&interrupt);
    let range = index.stored_range();
    let file_bytes = catalog.file_bytes[0];
    if files.file_bytes(FileIndex(0)) != Some(file_bytes) || range.end != file_bytes {
        let what = "the file changed while it was opened".to_owned();
        return Err(
            FormatError::PackDamaged { path: path.to_path_buf(), offset: range.end, what }.into()
        );
    }
    let from = Extent { file: FileIndex(0), offset: range.start, length: range.end - range.start };
    let sink = Comparing { index, bad: Mutex::new(Vec::new()) };
    let job = CopyJob {
        spans: vec![PackSpan { to: range.start, from, tensor: 0, conversion: None }],
        refused: &|_| {},
        range,
        header: &[],
        chunk_at: Some(&|at| {
            index.stored_chunk_at(at).map(|chunk| chunk.stored_offset..chunk.stored_end())
        }),
    };
    let report = copy(&files, &job, io, &sink, progress)?;

    let mut bad = sink.bad.into_inner().unwrap_or_else(PoisonError::into_inner);
    bad.sort_by_key(|chunk| chunk.offset);
    let seconds = started.elapsed().as_secs_f64();
    Ok(VerifyReport {
        path: path.to_path_buf(),
        bytes: file_bytes,
        blocks: index.blocks().len(),
        chunks: index.len(),
        damaged_chunks: bad.len() as u64,
        damage: bad.iter().take(LISTED_MAX).map(|chunk| damage(&catalog, index, chunk)).collect(),
        seconds,
        bytes_per_second: file_bytes as f64 / seconds,
        io_engine: report.engine.into(),
    })
}

fn damage(catalog: &Catalog, index: &ChunkIndex, chunk: &Chunk) -> Damage {
    let there = |extent: Extent| extent.offset < chunk.end() && extent.end() > chunk.offset;
    let tensors = catalog.tensors().iter().filter(|tensor| {
        // Tests the whole range first, because a stack has a piece for every expert.
        there(tensor.extent) && tensor.extents().any(there)
    });
    Damage {
        offset: chunk.stored_offset,
        bytes: chunk.stored_bytes,
        block: index.block_at(chunk.offset).map(ToString::to_string).unwrap_or_default(),
        tensors: tensors.map(|tensor| tensor.name.clone()).collect(),
    }
}

thread_local! {
    /// Memory for decoding, kept from chunk to chunk.
    static MEMORY: RefCell<(Decoder, Vec<u8>)> = RefCell::default();
}

struct Comparing<'a> {
    index: &'a ChunkIndex,
    bad: Mutex<Vec<Chunk>>,
}

impl Sink for Comparing<'_> {
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        for chunk in self.index.stored_chunks(offset, offset + bytes.len() as u64) {
            let stored = slice(bytes, offset, chunk.stored_offset..chunk.stored_end());
            if checksum(stored) != chunk.checksum || !is_decodable(&chunk, stored) {
                self.bad.lock().unwrap_or_else(PoisonError::into_inner).push(chunk);
            }
        }
        Ok(())
    }
}

/// Returns true if the bytes of a chunk in the file can be decoded.
fn is_decodable(chunk: &Chunk, stored: &[u8]) -> bool {
    if chunk.codec == Codec::Raw {
        return true;
    }
    MEMORY.with_borrow_mut(|(decoder, decoded)| {
        decoded.resize(chunk.bytes as usize, 0);
        decoder.decode(chunk.codec, chunk.encoded(stored), decoded).is_ok()
    })
}
