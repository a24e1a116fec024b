//! Batches: a file of requests, and a file of their answers.

pub mod journal;
pub mod openai;
