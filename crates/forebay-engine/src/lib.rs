//! A session: one model, its budgets and its key/value cache, from prompt to tokens, with the
//! figures that say how it went.

#![forbid(unsafe_code)]

pub mod assess;
mod device;
pub mod doctor;
mod error;
mod features;
mod followed;
mod generate;
mod inspect;
pub mod load;
mod memory;
pub mod pack;
mod page;
mod placed;
pub mod plan;
mod random;
mod recording;
mod session;
mod statistics;
pub mod synth;
pub mod trace_io;

pub use device::DeviceChoice;
pub use error::EngineError;
pub use features::Feature;
pub use followed::RoutingSource;
pub use generate::{BenchRun, GenerateOptions, Generation, StopReason};
pub use inspect::{BlockKindBytes, Inspection, ModelInfo, TypeBytes, inspect};
pub use memory::{default_budget_bytes, free_bytes, peak_resident_bytes};
pub use placed::GpuStart;
pub use session::{CpuHelp, KvCacheType, Session, SessionOptions};
pub use statistics::{Checks, ReadPath, SessionStatistics, UnitStatistics};
