//! Vocabulary of the operations that language models are made of: what every device computes, whatever memory it has.
//!
//! This crate has no operations, and needs no other crate of forebay. `forebay-compute` computes on the CPU what is named here, `forebay-cuda` on NVIDIA GPUs.

mod chosen_keys;
mod gating;
mod kv;
mod pools;
mod recurrent;
mod router;
mod rows;
mod streams;

pub use chosen_keys::ChosenKeys;
pub use gating::{GateFunction, Gating};
pub use kv::{KV_BLOCK, KvType};
pub use pools::Pools;
pub use recurrent::{DeltaRule, DeltaShape, HeadColumns};
pub use router::{NEAR_LOGITS, RouterGroups, Scoring};
pub use rows::RowKind;
pub use streams::StreamMixing;
