//! Assigns tensors to the blocks of a pack, following the blocks that the decoder streams.
//!
//! Nothing here depends on a model family. The model's description says which extents form a block, and tensors are
//! found by their position in the file.

use std::collections::HashMap;

use forebay_format::pack::{BlockKind, PlannedBlock, PlannedPiece};
use forebay_format::{Block, Catalog, Extent, TensorInfo};
use forebay_model::Weights;

/// Returns the blocks of a pack of `catalog`, in execution order.
pub fn blocks(catalog: &Catalog, weights: &Weights) -> Vec<PlannedBlock> {
    let mut order = Order { catalog, placed: vec![false; catalog.tensors().len()], blocks: vec![] };
    let tables = [Some(weights.embedding), weights.layer_embeddings];
    let mut tables: Vec<Extent> = tables.into_iter().flatten().map(|table| table.extent).collect();
    tables.extend(weights.ngram_tables());
    order.dense(BlockKind::Embedding, None, &tables);
    let layers = weights.layers.len();
    for (layer, block) in weights.blocks.dense.iter().take(layers).enumerate() {
        let (index, experts) = (Some(layer as u32), &weights.blocks.experts[layer]);
        if experts.is_empty() {
            // Attention and feed-forward get a block each. A GPU streams these sub-layers one by one, and data with a
            // single checksum must be read as a whole.
            let (first, all) = (weights.layers[layer].attention_parts, block.part_bytes().len());
            for parts in [0..first, first..all].into_iter().filter(|parts| !parts.is_empty()) {
                order.dense(BlockKind::Layer, index, &block.slice(parts).extents);
            }
        } else {
            order.dense(BlockKind::Layer, index, &block.extents);
            order.experts(layer as u32, experts);
        }
    }
    // The head is stored as row ranges of its tensors, or is the embedding.
    let head = weights.blocks.dense.iter().skip(layers).flat_map(|block| &block.extents);
    let head: Vec<Extent> = head.copied().collect();
    order.dense(BlockKind::Head, None, &head);
    let rest: Vec<Extent> = catalog.tensors().iter().map(|tensor| tensor.extent).collect();
    order.dense(BlockKind::Other, None, &rest);
    order.blocks
}

struct Order<'a> {
    catalog: &'a Catalog,
    placed: Vec<bool>,
    blocks: Vec<PlannedBlock>,
}

impl Order<'_> {
    /// Adds a block of the tensors that contain `extents`. Each tensor is added whole, unless a block already has it.
    fn dense(&mut self, kind: BlockKind, layer: Option<u32>, extents: &[Extent]) {
        let mut pieces = Vec::new();
        for extent in extents {
            let Some(tensor) = tensor_at(self.catalog, extent) else { continue };
            if !std::mem::replace(&mut self.placed[tensor], true) {
                pieces.push(PlannedPiece { tensor, entry: None });
            }
        }
        self.blocks.push(PlannedBlock { kind, layer, expert: None, pieces });
    }

    /// Adds a block for every expert of a layer, in order. It has the expert's entries of stacked tensors and the
    /// tensors that belong to this expert alone.
    fn experts(&mut self, layer: u32, experts: &[Block]) {
        let stacks = self.stacks(experts);
        for (expert, block) in experts.iter().enumerate() {
            let mut pieces: Vec<PlannedPiece> = Vec::with_capacity(block.extents.len());
            for extent in &block.extents {
                let Some(tensor) = tensor_at(self.catalog, extent) else { continue };
                let entry = match stacks.get(&tensor) {
                    Some(true) => Some(expert as u64),
                    // The tensor does not have one entry for each expert, so it is stored whole after everything else.
                    Some(false) => continue,
                    None if self.placed[tensor] => continue,
                    None => None,
                };
                self.placed[tensor] = true;
                let piece = PlannedPiece { tensor, entry };
                // Gate and up may be two parts of one entry.
                if !pieces.contains(&piece) {
                    pieces.push(piece);
                }
            }
            let (kind, expert) = (BlockKind::Expert, Some(expert as u32));
            self.blocks.push(PlannedBlock { kind, layer: Some(layer), expert, pieces });
        }
    }

    /// Returns the tensors that experts share. The value is true if the tensor has an entry for every expert, in order.
    fn stacks(&self, experts: &[Block]) -> HashMap<usize, bool> {
        let mut stacks = HashMap::new();
        for (expert, block) in experts.iter().enumerate() {
            for extent in &block.extents {
                let Some(index) = tensor_at(self.catalog, extent) else { continue };
                let tensor = &self.catalog.tensors()[index];
                if tensor.extent == *extent {
                    continue;
                }
                let own = tensor.outer_slice(expert as u64, 1);
                let fits = tensor.shape.first() == Some(&(experts.len() as u64))
                    && own.is_some_and(|own| holds(&own, extent));
                *stacks.entry(index).or_insert(true) &= fits && !self.placed[index];
            }
        }
        stacks
    }
}

/// Returns the index of the tensor that contains an extent.
pub fn tensor_at(catalog: &Catalog, extent: &Extent) -> Option<usize> {
    let tensors: &[TensorInfo] = catalog.tensors();
    let start = |tensor: &TensorInfo| (tensor.extent.file, tensor.extent.offset);
    let after = tensors.partition_point(|tensor| start(tensor) <= (extent.file, extent.offset));
    let index = after.checked_sub(1)?;
    holds(&tensors[index].extent, extent).then_some(index)
}

fn holds(outer: &Extent, inner: &Extent) -> bool {
    outer.file == inner.file && outer.offset <= inner.offset && inner.end() <= outer.end()
}
