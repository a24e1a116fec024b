//! What compact BF16 and codecs saved in a pack, by kind of block.

use std::collections::HashMap;

use forebay_format::Catalog;
use forebay_format::pack::{PackPlan, StoredChunk};
use serde::Serialize;

use crate::inspect::{KINDS, block_kind};

/// Bytes of the tensors of one kind of block that became smaller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Saved {
    pub kind: &'static str,
    pub source_bytes: u64,
    /// Bytes in memory: of compact BF16, and of what is decoded when it is read.
    pub memory_bytes: u64,
    /// Bytes in the pack.
    pub bytes: u64,
}

/// Returns what was saved in a pack of `catalog`, whose chunks were stored as `chunks`.
pub fn saved(catalog: &Catalog, plan: &PackPlan, chunks: &[StoredChunk]) -> Vec<Saved> {
    let mut sums: HashMap<&str, Saved> = HashMap::new();
    let index = plan.chunk_index();
    for span in plan.spans() {
        let is_coded = index.block_at(span.to).is_some_and(|block| block.is_coded());
        let bytes = match is_coded {
            // Each tensor begins with a chunk of its own.
            true => index
                .chunks(span.to, span.end())
                .map(|chunk| u64::from(chunks[chunk.number as usize].bytes))
                .sum(),
            false => span.bytes(),
        };
        if bytes >= span.from.length {
            continue;
        }
        let kind = block_kind(&catalog.tensors()[span.tensor]);
        let none = Saved { kind, source_bytes: 0, memory_bytes: 0, bytes: 0 };
        let sum = sums.entry(kind).or_insert(none);
        sum.source_bytes += span.from.length;
        sum.memory_bytes += span.bytes();
        sum.bytes += bytes;
    }
    KINDS.into_iter().filter_map(|kind| sums.remove(kind)).collect()
}
