//! End-to-end tests of the real binary.

mod assess;
mod bad_input;
mod batch;
mod bench_scripts;
mod chat;
mod cufile;
mod doctor;
mod harness;
mod help;
mod interrupts;
mod load;
mod logging;
mod logits;
mod models;
mod mtp;
mod outputs;
mod packs;
mod parallel;
mod plan;
mod pull;
mod replay;
mod run;
mod serve;
mod serve_batches;
mod serve_clients;
mod serve_hostile;
mod serve_infill;
mod serve_kv;
mod serve_models;
mod serve_reports;
mod templates;
mod terminal;
mod text;
mod trace_io;
#[cfg(not(feature = "cuda"))]
mod without_cuda;
