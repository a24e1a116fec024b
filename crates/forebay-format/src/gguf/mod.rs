//! GGUF: one file with typed metadata, a tensor table and aligned tensor data, or a split set.
//!
//! The layout follows the GGUF specification (ggml, `docs/gguf.md`), versions 2 and 3,
//! little-endian. A file holds magic, version, counts, key-value pairs, tensor infos, padding and
//! data, in this order.

mod encode;
pub mod metadata;
pub mod outline;
pub mod parse;
mod reader;
mod split;
pub mod value;
pub mod writer;

pub use split::open;

/// First four bytes of every file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";

/// Alignment of tensor data in bytes, unless the metadata sets another.
pub(crate) const DEFAULT_ALIGNMENT: u64 = 32;

/// Largest accepted `general.alignment`, in bytes. Real files use 32 to 4096. The limit keeps a
/// hostile file from padding itself to absurd sizes.
pub(crate) const ALIGNMENT_MAX: u64 = 1 << 20;

pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";
