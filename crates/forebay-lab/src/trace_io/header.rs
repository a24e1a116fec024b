//! The first line of a trace, which describes the model and the run.

use forebay_engine::TracedModel;
use forebay_store::{BlockLabel, ReadRecord};
use forebay_stream::ModelBlocks;
use serde::{Deserialize, Serialize};

use super::blocks::{self, BlockEntry, Component, TensorEntry};

pub(super) const FORMAT: &str = "forebay-io-trace";
pub(super) const VERSION: u32 = 1;

/// First line of a trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceHeader {
    pub format: String,
    pub version: u32,
    /// Version of the program that wrote the trace.
    pub forebay: String,
    /// Command that was run, such as "run" or "bench".
    pub command: String,
    pub model: String,
    pub architecture: String,
    pub files: Vec<FileEntry>,
    pub engine: EngineEntry,
    /// Number of layers of the model. Dense blocks from this number on are the output projection.
    pub layers: u32,
    /// Largest number of experts in a layer.
    pub experts_per_layer: u32,
    /// Tensors sorted by file and offset.
    pub tensors: Vec<TensorEntry>,
    pub blocks: Vec<BlockEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub path: String,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineEntry {
    pub name: String,
    pub direct: bool,
    pub registered_buffers: bool,
    pub why: String,
}

impl TraceHeader {
    /// Describes a model and how it was read. Without `blocks`, only the tensors that a read
    /// touches determine its component.
    pub fn new(traced: &TracedModel) -> TraceHeader {
        let TracedModel { catalog, architecture, blocks, engine } = traced;
        let blocks = blocks.as_ref();
        let files = catalog.files.iter().zip(&catalog.file_bytes);
        let model = match catalog.files.as_slice() {
            [file] => file,
            _ => &catalog.root,
        };
        let experts = |blocks: &ModelBlocks| blocks.experts.iter().map(Vec::len).max().unwrap_or(0);
        TraceHeader {
            format: FORMAT.to_owned(),
            version: VERSION,
            forebay: env!("CARGO_PKG_VERSION").to_owned(),
            command: String::new(),
            model: model.display().to_string(),
            architecture: (*architecture).to_owned(),
            files: files
                .map(|(path, &bytes)| FileEntry { path: path.display().to_string(), bytes })
                .collect(),
            engine: EngineEntry {
                name: engine.name.to_owned(),
                direct: engine.direct,
                registered_buffers: engine.registered_buffers,
                why: engine.why.clone(),
            },
            layers: blocks.map_or(u32::MAX, |blocks| blocks.experts.len() as u32),
            experts_per_layer: blocks.map_or(0, experts) as u32,
            tensors: blocks::tensors(catalog),
            blocks: blocks.map(|of| blocks::blocks(catalog, of)).unwrap_or_default(),
        }
    }

    /// Returns the component of a read. Blocks of experts and of the output projection determine it
    /// themselves. Otherwise it is the component of the tensor that has most of the read's bytes.
    pub fn component(&self, read: &ReadRecord) -> Component {
        if read.why.is_kv() {
            return Component::Kv;
        }
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
        // If several tensors have equally many bytes, the first one counts.
        met.rev_max_by_key(overlap).map_or(Component::Other, |tensor| tensor.component)
    }
}

trait FirstMaximum: Iterator + Sized {
    fn rev_max_by_key<K: Ord>(self, key: impl Fn(&Self::Item) -> K) -> Option<Self::Item> {
        self.reduce(|best, next| if key(&next) > key(&best) { next } else { best })
    }
}

impl<I: Iterator> FirstMaximum for I {}
