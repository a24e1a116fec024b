//! Which part of the model a read belongs to.

use forebay_format::{Catalog, TensorInfo};
use forebay_store::{Block, BlockLabel, Extent, ReadRecord};
use forebay_stream::ModelBlocks;
use serde::{Deserialize, Serialize};

use super::format::{BlockName, TraceHeader};
use crate::inspect::block_kind;

/// A part of the model whose reads are looked at together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Component {
    Embedding,
    Attention,
    FeedForward,
    Router,
    Experts,
    Head,
    /// Vectors: norms and biases.
    Vectors,
    Other,
}

impl Component {
    pub const ALL: [Component; 8] = [
        Component::Embedding,
        Component::Attention,
        Component::FeedForward,
        Component::Router,
        Component::Experts,
        Component::Head,
        Component::Vectors,
        Component::Other,
    ];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Component::Embedding => "embedding",
            Component::Attention => "attention",
            Component::FeedForward => "feed-forward",
            Component::Router => "router",
            Component::Experts => "experts",
            Component::Head => "head",
            Component::Vectors => "vectors",
            Component::Other => "other",
        }
    }

    fn of_tensor(tensor: &TensorInfo) -> Component {
        match block_kind(tensor) {
            "experts" => Component::Experts,
            _ if tensor.shape.len() < 2 => Component::Vectors,
            "embeddings" => Component::Embedding,
            "attention" => Component::Attention,
            "feed-forward" => Component::FeedForward,
            "router" => Component::Router,
            "head" => Component::Head,
            _ => Component::Other,
        }
    }
}

/// A tensor and its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    pub name: String,
    #[serde(rename = "type")]
    pub ty: String,
    pub component: Component,
    pub file: u32,
    pub offset: u64,
    pub length: u64,
}

/// A block and the extents that it is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockEntry {
    pub block: BlockName,
    pub component: Component,
    /// File, offset and length of each.
    pub extents: Vec<(u32, u64, u64)>,
}

pub(super) fn tensors(catalog: &Catalog) -> Vec<TensorEntry> {
    let entry = |tensor: &TensorInfo, extent: Extent| TensorEntry {
        name: tensor.name.clone(),
        ty: tensor.ty.name().to_owned(),
        component: Component::of_tensor(tensor),
        file: extent.file.0,
        offset: extent.offset,
        length: extent.length,
    };
    // In a pack the experts of a stack lie apart: an entry for each.
    let all = catalog.tensors().iter();
    let mut tensors: Vec<TensorEntry> =
        all.flat_map(|tensor| tensor.extents().map(move |extent| entry(tensor, extent))).collect();
    tensors.sort_by_key(|tensor| (tensor.file, tensor.offset));
    tensors
}

pub(super) fn blocks(blocks: &ModelBlocks) -> Vec<BlockEntry> {
    let layers = blocks.experts.len();
    let entry = |label, component, of: &Block| BlockEntry {
        block: BlockName(label),
        component,
        extents: of.extents.iter().map(|e| (e.file.0, e.offset, e.length)).collect(),
    };
    let mut entries = Vec::new();
    for (index, block) in blocks.dense.iter().enumerate() {
        let component = if index < layers { Component::Attention } else { Component::Head };
        entries.push(entry(BlockLabel::Dense(index as u32), component, block));
    }
    for (layer, experts) in blocks.experts.iter().enumerate() {
        for (expert, block) in experts.iter().enumerate() {
            let label = BlockLabel::Expert { layer: layer as u32, expert: expert as u32 };
            entries.push(entry(label, Component::Experts, block));
        }
    }
    entries
}

impl TraceHeader {
    /// The component of a read. Blocks of experts and of the output projection say it themselves;
    /// else it is the component of the tensor that has most of the bytes.
    pub fn component(&self, read: &ReadRecord) -> Component {
        match read.block {
            Some(BlockLabel::Expert { .. }) => return Component::Experts,
            Some(BlockLabel::Dense(index)) if index >= self.layers => return Component::Head,
            _ => {}
        }
        let (file, start) = (read.file.0, read.offset);
        let end = start.saturating_add(u64::from(read.length));
        let tensor_end = |tensor: &TensorEntry| tensor.offset.saturating_add(tensor.length);
        let first = self
            .tensors
            .partition_point(|tensor| (tensor.file, tensor_end(tensor)) <= (file, start));
        let met = self.tensors[first..]
            .iter()
            .take_while(|tensor| tensor.file == file && tensor.offset < end);
        let overlap = |tensor: &&TensorEntry| {
            tensor_end(tensor).min(end).saturating_sub(tensor.offset.max(start))
        };
        // The first of several that have as much.
        met.rev_max_by_key(overlap).map_or(Component::Other, |tensor| tensor.component)
    }
}

trait FirstMaximum: Iterator + Sized {
    fn rev_max_by_key<K: Ord>(self, key: impl Fn(&Self::Item) -> K) -> Option<Self::Item> {
        self.reduce(|best, next| if key(&next) > key(&best) { next } else { best })
    }
}

impl<I: Iterator> FirstMaximum for I {}
