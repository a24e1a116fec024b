//! The heart: which block of a model is in memory, who may be evicted, what is read next.
//!
//! ```text
//! blocks.rs      names of blocks, and where their bytes lie on disk
//! plan/          memory plan of a model under a RAM budget (pure)
//! policy.rs      who is evicted: rankings (pure)
//! cache/         the cache state machine that the residency and the replay share (pure)
//! routing/       traces of which experts were chosen: recording, the file, the CSV form
//! replay/        recorded routing through that state machine (pure)
//! slots.rs       slots of the arena and the leases that pin them
//! residency/     blocks in flight, resident and leased; the only part that talks to a read engine
//! tier.rs        slots of a tier whose memory others own, as a GPU's (pure)
//! statistics.rs  counters, per token and in total
//! ```
//!
//! This crate knows no arithmetic and no file format: a block is a list of extents, an expert is a number.

#![forbid(unsafe_code)]

mod blocks;
mod cache;
mod error;
mod plan;
mod policy;
mod replay;
mod residency;
pub mod routing;
mod slots;
mod statistics;
mod tier;

pub use blocks::{BlockId, ExpertIndex, LayerIndex, ModelBlocks};
pub use cache::{CacheCounters, CacheShape, CacheState, LayerShape};
pub use error::StreamError;
pub use forebay_store::{Block, Extent, FileIndex, Relayout, Step, TensorType};
pub use plan::{Budget, DensePlan, ExpertPool, MemoryPlan};
pub use policy::{PolicyKind, Ranking, Rule, Scope};
pub use replay::{
    BatchOutcome, Capacity, Lookups, ReplayCounters, replay, replay_observed, replay_through,
};
pub use residency::{Residency, Returning};
pub use routing::{Phase, RoutingTrace};
pub use slots::Lease;
pub use statistics::{FaultedExperts, PeakBytes, PrefetchCounters, StreamStatistics, TokenRecord};
pub use tier::{ExpertTier, GoneExpert, TierBatch, TierStatistics};
