//! Tools that measure a model, a machine or a policy. Running a model does not need them.

#![forbid(unsafe_code)]

pub mod assess;
pub mod csv;
mod page;
pub mod replay;
pub mod synth;
pub mod trace_io;
