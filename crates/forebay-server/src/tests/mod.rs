//! Tests of the whole server with several callers.

mod ends;
mod prompts;
mod two_keys;
