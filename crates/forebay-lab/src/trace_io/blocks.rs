//! Maps reads to the parts of the model that they belong to.

use std::fmt;

use forebay_engine::block_kind;
use forebay_format::{Catalog, TensorInfo};
use forebay_store::{Block, BlockLabel, Extent};
use forebay_stream::ModelBlocks;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A part of the model whose reads are reported together.
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
    /// Blocks of keys and values, which are no part of the model.
    Kv,
}

impl Component {
    pub const ALL: [Component; 9] = [
        Component::Embedding,
        Component::Attention,
        Component::FeedForward,
        Component::Router,
        Component::Experts,
        Component::Head,
        Component::Vectors,
        Component::Other,
        Component::Kv,
    ];

    /// Returns the name for display.
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
            Component::Kv => "kv",
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

/// A tensor and its extent.
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

/// A block and its extents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockEntry {
    pub block: BlockName,
    pub component: Component,
    /// File, offset and length of each extent.
    pub extents: Vec<(u32, u64, u64)>,
}

pub(super) fn tensors(catalog: &Catalog) -> Vec<TensorEntry> {
    // Reads are recorded by their place in the stored file.
    let of_stored = |tensor: &TensorInfo, extent: Extent| TensorEntry {
        name: tensor.name.clone(),
        ty: tensor.ty.name().to_owned(),
        component: Component::of_tensor(tensor),
        file: extent.file.0,
        offset: extent.offset,
        length: extent.length,
    };
    let entry = |tensor: &TensorInfo, extent| of_stored(tensor, catalog.stored(extent));
    // In a pack the experts of a stack are not contiguous, so each gets an entry.
    let all = catalog.tensors().iter();
    let mut tensors: Vec<TensorEntry> = all
        .flat_map(|tensor| tensor.extents().map(|extent| entry(tensor, extent)).collect::<Vec<_>>())
        .collect();
    tensors.sort_by_key(|tensor| (tensor.file, tensor.offset));
    tensors
}

pub(super) fn blocks(catalog: &Catalog, blocks: &ModelBlocks) -> Vec<BlockEntry> {
    let layers = blocks.experts.len();
    let entry = |label, component, of: &Block| BlockEntry {
        block: BlockName(label),
        component,
        extents: of
            .extents
            .iter()
            .map(|extent| catalog.stored(*extent))
            .map(|stored| (stored.file.0, stored.offset, stored.length))
            .collect(),
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

/// Name of a block in a trace: `dense.3`, `expert.4.17` or `other.5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockName(pub BlockLabel);

impl fmt::Display for BlockName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            BlockLabel::Dense(index) => write!(out, "dense.{index}"),
            BlockLabel::Expert { layer, expert } => write!(out, "expert.{layer}.{expert}"),
            BlockLabel::Other(index) => write!(out, "other.{index}"),
        }
    }
}

impl BlockName {
    fn parse(text: &str) -> Option<BlockName> {
        let (kind, rest) = text.split_once('.')?;
        Some(BlockName(match kind {
            "dense" => BlockLabel::Dense(rest.parse().ok()?),
            "other" => BlockLabel::Other(rest.parse().ok()?),
            "expert" => {
                let (layer, expert) = rest.split_once('.')?;
                BlockLabel::Expert { layer: layer.parse().ok()?, expert: expert.parse().ok()? }
            }
            _ => return None,
        }))
    }
}

impl Serialize for BlockName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BlockName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<BlockName, D::Error> {
        let text = String::deserialize(deserializer)?;
        BlockName::parse(&text).ok_or_else(|| D::Error::custom(format!("no block is {text:?}")))
    }
}
