//! Sessions that turn prompts into tokens with one model, its budgets and its key/value cache. Also planning, loading,
//! packing and measuring.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "what sessions on a GPU share with others has no other user")
)]

mod arrival;
mod device;
pub mod doctor;
pub mod engine;
mod error;
mod features;
mod followed;
mod generate;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(not(feature = "cuda"))]
#[path = "no_gpu.rs"]
mod gpu;
mod gpu_error;
mod identity;
mod inspect;
#[allow(
    dead_code,
    unused_imports,
    reason = "forks and statistics are tested, and have no caller yet"
)]
mod kv;
mod kv_file;
mod kv_tiers;
pub mod load;
mod memory;
mod mtp;
mod options;
pub mod pack;
mod parallel;
mod pass_logits;
mod passage;
mod placed;
pub mod plan;
mod prefix;
mod quantization;
mod routing_error;
mod routing_log;
mod runner;
mod session;
mod statistics;
mod text;
mod traced;

pub use arrival::{ARRIVAL_PROMPT, ArrivalRun};
pub use device::DeviceChoice;
pub use engine::Engine;
pub use error::EngineError;
pub use features::Feature;
pub use followed::RoutingSource;
pub use forebay_compute::run_promptly;
pub use forebay_kv::{
    Access as KvAccess, DiskError as KvDiskError, DiskFaults as KvDiskFaults,
    DiskOptions as KvDiskOptions, DiskStatistics as KvDiskStatistics, DiskStore as KvDiskStore,
    DiskWatch as KvDiskWatch, Operation as KvDiskOperation, Secret as KvSecret,
    Transfer as KvTransfer,
};
pub use forebay_model::KvInVram;
pub use forebay_store::{Interrupt, give_back_free_memory, keep_little_free_memory, reached};
pub use forebay_stream::LayerUses;
pub use generate::{BenchRun, GenerateOptions, Generation, StopReason};
pub use gpu_error::GpuError;
pub use identity::digest;
pub use inspect::{BlockKindBytes, Inspection, ModelInfo, TypeBytes, block_kind, inspect};
pub use kv_file::KvFileError;
pub use kv_tiers::{
    KvDisk, KvDiskType, KvFolder, KvFolderError, KvFolderNote, KvTierStatistics, OpenedKvFolder,
    kv_secret,
};
pub use memory::{DoesNotFit, default_budget_bytes, free_bytes, peak_resident_bytes};
pub use mtp::MtpStatistics;
pub use options::{CpuOffload, KvCacheType, SessionOptions};
pub use parallel::ParallelRun;
pub use passage::RecordedPassage;
pub use placed::GpuStart;
pub use prefix::{OWN_TOKENS, PrefixRun};
pub use routing_error::RoutingError;
pub use session::{PromptWatch, Session};
pub use statistics::{Checks, ReadPath, SessionStatistics, SubLayerStatistics, WeightUse, median};
pub use text::ModelText;
pub use traced::TracedModel;
