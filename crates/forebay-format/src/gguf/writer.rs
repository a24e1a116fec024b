//! Writing GGUF files.
