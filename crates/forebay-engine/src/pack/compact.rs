//! Chooses the tensors of a pack that become compact BF16.

use std::collections::{BTreeSet, HashMap};

use forebay_codec::Compact;
use forebay_format::{Block, Catalog, Extent, TensorType};
use forebay_model::Weights;
use forebay_model::weights::{AttentionWeights, FeedForwardWeights, PartMatrix};
use serde::Serialize;

use super::blocks::tensor_at;
use crate::inspect::{KINDS, block_kind};

/// What a pack does to weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Codec {
    /// Every BF16 matrix that products read as it is becomes compact, unless its exponents lie too far apart.
    #[default]
    Auto,
    /// All tensors are stored as they are.
    None,
}

/// Bytes of one kind of block in the source and in the pack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Saved {
    pub kind: &'static str,
    pub source_bytes: u64,
    pub bytes: u64,
}

/// The blocks of each tensor that becomes compact.
#[derive(Debug)]
pub struct Choice {
    compact: Vec<Option<Compact>>,
    /// Number of each tensor's group. Products take the tensors of a group together, so they must have one type.
    groups: Vec<usize>,
    /// Number of tensors that stay BF16 because a tensor of their group cannot become compact.
    left_out: usize,
}

impl Choice {
    /// Chooses no tensor.
    pub fn none(catalog: &Catalog) -> Choice {
        let count = catalog.tensors().len();
        Choice { compact: vec![None; count], groups: (0..count).collect(), left_out: 0 }
    }

    /// Chooses every BF16 matrix that products or the embedding read as the file has it. Left out are routers, the matrices of single
    /// heads, and what is converted when it is read.
    pub fn all(catalog: &Catalog, weights: &Weights) -> Choice {
        let mut choice = Choice::none(catalog);
        choice.add(catalog, [weights.embedding.extent]);
        let layers = weights.layers.len();
        for (layer, block) in weights.layers.iter().zip(&weights.blocks.dense) {
            let mut plain = Vec::new();
            let mut together = Vec::new();
            if let AttentionWeights::Latent(of) = &layer.attention {
                plain.extend([of.k_b.matrix, of.v_b.matrix]);
            }
            match &layer.feed_forward {
                FeedForwardWeights::Dense { gate, up, .. } => together.extend([*gate, *up]),
                FeedForwardWeights::Experts { router, shared, .. } => {
                    plain.push(*router);
                    together.extend(shared.iter().flat_map(|[gate, up, _]| [*gate, *up]));
                }
            }
            let plain: Vec<Extent> =
                plain.iter().filter_map(|matrix| extent_of(block, matrix)).collect();
            choice.add(catalog, as_they_are(block).filter(|of| !plain.contains(of)));
            choice.join(catalog, together.iter().filter_map(|matrix| extent_of(block, matrix)));
        }
        for experts in &weights.blocks.experts {
            if experts.iter().any(|block| block.relayout.is_some()) {
                continue;
            }
            // Gate and up, then down.
            for parts in [0..2, 2..3] {
                let of_expert = |block: &Block| block.extents[parts.clone()].to_vec();
                let extents = || experts.iter().flat_map(of_expert);
                choice.add(catalog, extents());
                choice.join(catalog, extents());
            }
        }
        for block in weights.blocks.dense.iter().skip(layers) {
            choice.add(catalog, as_they_are(block));
        }
        choice
    }

    /// Adds the tensors that contain these extents, if they can become compact.
    fn add(&mut self, catalog: &Catalog, extents: impl IntoIterator<Item = Extent>) {
        for tensor in extents.into_iter().filter_map(|extent| tensor_at(catalog, &extent)) {
            let of = &catalog.tensors()[tensor];
            let is_matrix = of.ty == TensorType::BF16 && of.shape.len() > 1;
            let columns = of.shape.last().copied().unwrap_or(0);
            self.compact[tensor] = Compact::of_row(columns).filter(|_| is_matrix);
        }
    }

    /// Makes one group of the tensors that contain these extents.
    fn join(&mut self, catalog: &Catalog, extents: impl Iterator<Item = Extent>) {
        let mut first = None;
        for tensor in extents.filter_map(|extent| tensor_at(catalog, &extent)) {
            self.groups[tensor] = *first.get_or_insert(tensor);
        }
    }

    /// Leaves out the tensors that cannot become compact, and their groups.
    pub fn leave_out(&mut self, tensors: &BTreeSet<usize>) {
        let groups: BTreeSet<usize> = tensors.iter().map(|&tensor| self.groups[tensor]).collect();
        for (compact, group) in self.compact.iter_mut().zip(&self.groups) {
            if groups.contains(group) && compact.take().is_some() {
                self.left_out += 1;
            }
        }
    }

    pub fn compact(&self) -> &[Option<Compact>] {
        &self.compact
    }

    /// Returns the number of tensors that stay BF16 because their exponents lie too far apart, or those of tensors beside them.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Returns what was saved, by kind of block.
    pub fn saved(&self, catalog: &Catalog) -> Vec<Saved> {
        let mut bytes = HashMap::new();
        for (tensor, compact) in catalog.tensors().iter().zip(&self.compact) {
            let Some(of) = compact else { continue };
            let (source, packed) = bytes.entry(block_kind(tensor)).or_insert((0, 0));
            *source += tensor.bytes();
            let ty = TensorType::from_compact(*of);
            *packed += ty.tensor_bytes(&tensor.shape).unwrap_or(0);
        }
        let of_kind = |kind| {
            let &(source_bytes, bytes) = bytes.get(kind)?;
            Some(Saved { kind, source_bytes, bytes })
        };
        KINDS.into_iter().filter_map(of_kind).collect()
    }
}

/// Returns the extents of a block that are its parts without a conversion.
fn as_they_are(block: &Block) -> impl Iterator<Item = Extent> + '_ {
    let converted = block.relayout.as_ref().map_or(0..0, |relayout| relayout.extents.clone());
    let extents = block.extents.iter().enumerate();
    extents.filter(move |(index, _)| !converted.contains(index)).map(|(_, extent)| *extent)
}

/// Returns the extent of a matrix of a block, if the matrix is not made of others when it is read.
fn extent_of(block: &Block, matrix: &PartMatrix) -> Option<Extent> {
    let Some(relayout) = &block.relayout else { return block.extents.get(matrix.part).copied() };
    let (first, made) = (relayout.extents.start, relayout.parts());
    let index = match matrix.part {
        part if part < first => part,
        part if part < first + made => return None,
        part => part - made + relayout.extents.len(),
    };
    block.extents.get(index).copied()
}
