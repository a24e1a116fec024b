//! What measures a model, a machine or a policy, and is not needed to run a model.

#![forbid(unsafe_code)]

pub mod assess;
mod page;
pub mod replay;
pub mod synth;
pub mod trace_io;
