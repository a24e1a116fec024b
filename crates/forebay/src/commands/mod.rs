//! The commands, one file for each.

pub mod assess;
pub mod batch;
pub mod bench;
pub mod completions;
pub mod config;
pub mod doctor;
pub mod inspect;
pub mod kv;
pub mod list;
pub mod load;
pub mod logits;
pub mod man;
pub mod pack;
pub mod plan;
pub mod ps;
pub mod pull;
pub mod render;
pub mod replay;
pub mod rm;
pub mod run;
pub mod serve;
pub mod synth;
pub mod tokenize;
pub mod trace_io;
pub mod verify;
