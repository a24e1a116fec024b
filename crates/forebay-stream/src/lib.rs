//! Decides which blocks of a model are in memory, which one is evicted, and which one is read next.
//!
//! ```text
//! blocks.rs      names of blocks, and where their bytes lie on disk
//! plan/          memory plan of a model under a RAM budget (pure)
//! policy.rs      eviction policies: rankings (pure)
//! cache/         the cache state machine that the residency and the replay share (pure)
//! routing/       traces of chosen experts: recording, the binary file, the CSV form
//! replay/        runs recorded routing through that state machine (pure)
//! slots.rs       slots of the arena, and the leases that pin them
//! residency/     blocks in flight, resident and leased; the only part that calls a read engine
//! tier.rs        slots of a tier whose memory the caller owns, such as VRAM (pure)
//! statistics.rs  counters, per token and in total
//! ```
//!
//! This crate contains no arithmetic and no file formats: a block is a list of extents, and an expert is a number.

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
pub use cache::{CacheCounters, CacheShape, CacheState, LayerShape, LayerUses};
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
pub use tier::{BatchPart, ExpertTier, GoneExpert, TierBatch, TierStatistics};
