//! End to end, by the real binary.

mod assess;
mod bad_input;
mod bench_scripts;
mod chat;
mod cufile;
mod harness;
mod help;
mod load;
mod logits;
mod models;
mod packs;
mod plan;
mod replay;
mod run;
mod text;
mod trace_io;
