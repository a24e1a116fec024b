//! End to end, by the real binary.

mod bad_input;
mod harness;
mod help;
mod load;
mod logits;
mod models;
mod run;
mod text;
mod trace_io;
