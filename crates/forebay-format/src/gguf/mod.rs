//! GGUF: one file with typed metadata, a tensor table and aligned tensor data, or a split set.
//!
//! The layout is that of the GGUF specification (ggml, `docs/gguf.md`), versions 2 and 3,
//! little-endian: magic, version, counts, key-value pairs, tensor infos, padding, data.

mod encode;
pub mod metadata;
pub mod parse;
mod reader;
mod split;
pub mod value;
pub mod writer;

pub use split::open;

/// The four bytes at the start of every file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";

/// Alignment of tensor data where the metadata does not say otherwise, in bytes.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;

/// Largest accepted `general.alignment`, in bytes. Real files use 32 to 4096; the limit only keeps
/// a hostile one from padding a small file to absurd sizes.
pub(crate) const ALIGNMENT_MAX: u64 = 1 << 20;

pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";
