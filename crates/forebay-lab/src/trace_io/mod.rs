//! I/O traces: the file format, the report on how a model was read, its HTML page, and export to Chrome trace events.

mod analysis;
mod blocks;
mod chrome;
mod format;
mod header;
mod html;
mod pattern;
mod report;
mod timeline;

pub use analysis::analyse;
pub use blocks::{BlockEntry, BlockName, Component, TensorEntry};
pub use chrome::write_chrome;
pub use format::{Trace, TraceError, open, read, write};
pub use header::{EngineEntry, FileEntry, TraceHeader};
pub use html::page;
pub use pattern::{Pattern, RANDOM_MAX, SEQUENTIAL_MIN, WINDOW};
pub use report::{
    ComponentReport, ExpertReads, Limit, PageReport, Quantiles, ReasonReport, Report, SizeClass,
    Stalls, Timeline, Utilisation,
};

#[cfg(test)]
mod tests;
