//! Lossless codecs for weights, on the CPU.
//!
//! Floating-point weights of a tensor have few exponents: most lie within some factors of two. A codec here stores sign and mantissa as
//! they are and codes the exponents, so that BF16 takes about 10.7 bits a weight instead of 16. What is decoded equals what was encoded, to
//! the byte, with zeros, subnormal numbers, infinities and NaNs.
//!
//! The crate knows no files and no tensors. A caller cuts a tensor into chunks of up to [`CHUNK_WEIGHTS`] weights, and keeps the
//! [`Table`] of the tensor and the lengths of the chunks. Each chunk is decoded without the others. `docs/codec.md` describes the bytes.
//!
//! ```
//! use forebay_codec::{Float, Table, decode_chunk, encode_chunk};
//!
//! let numbers = [0.5, -0.25, 0.0, f32::INFINITY].map(half::bf16::from_f32);
//! let weights = numbers.map(half::bf16::to_le_bytes).concat();
//! let table = Table::of(Float::Bf16, &weights)?;
//! let mut chunk = Vec::new();
//! encode_chunk(Float::Bf16, &table, &weights, &mut chunk)?;
//! let mut decoded = vec![0; weights.len()];
//! decode_chunk(Float::Bf16, &table, &chunk, &mut decoded)?;
//! assert_eq!(decoded, weights);
//! # Ok::<(), forebay_codec::CodecError>(())
//! ```

mod bits;
mod codec;
mod compact;
mod container;
mod decode;
mod encode;
mod error;
mod float;
mod gdeflate;
mod layout;
mod table;

pub use codec::{CHUNK_BYTES, Codec, Decoder, Encoder, Encoding};
pub use compact::{
    Compact, compact_exceptions, decode_compact, decode_compact_block, encode_compact,
};
pub use container::Container;
pub use decode::{Isa, decode_chunk, decode_chunk_with};
pub use encode::encode_chunk;
pub use error::CodecError;
pub use float::Float;
pub use layout::{CHUNK_WEIGHTS, chunk_bytes_max};
pub use table::Table;
