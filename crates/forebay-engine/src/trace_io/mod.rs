//! I/O traces: the file, what it says about how a model was read, and the page that shows it.

mod analysis;
mod blocks;
mod format;
mod html;
mod pattern;
mod report;
mod timeline;

use forebay_format::Catalog;
use forebay_store::EngineInfo;
use forebay_stream::ModelBlocks;

pub use analysis::analyse;
pub use blocks::{BlockEntry, Component, TensorEntry};
pub use format::{
    BlockName, EngineEntry, FileEntry, Trace, TraceError, TraceHeader, open, read, write,
};
pub use html::page;
pub use pattern::{Pattern, RANDOM_AT_MOST, SEQUENTIAL_AT_LEAST, WINDOW};
pub use report::{
    ComponentReport, ExpertReads, Limit, PageReport, Quantiles, ReasonReport, Report, SizeClass,
    Stalls, Timeline, Utilisation,
};

impl TraceHeader {
    /// Describes a model and how it was read. Without `blocks` the reads are told apart by the
    /// tensors that they touch.
    pub fn new(
        catalog: &Catalog,
        architecture: &str,
        blocks: Option<&ModelBlocks>,
        engine: &EngineInfo,
    ) -> TraceHeader {
        let files = catalog.files.iter().zip(&catalog.file_bytes);
        let model = match catalog.files.as_slice() {
            [file] => file,
            _ => &catalog.root,
        };
        let experts = |blocks: &ModelBlocks| blocks.experts.iter().map(Vec::len).max().unwrap_or(0);
        TraceHeader {
            format: format::FORMAT.to_owned(),
            version: format::VERSION,
            forebay: env!("CARGO_PKG_VERSION").to_owned(),
            command: String::new(),
            model: model.display().to_string(),
            architecture: architecture.to_owned(),
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
            blocks: blocks.map(blocks::blocks).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests;
