//! Lossless codecs for weights, on the CPU. What is decoded equals what was encoded, to the byte.
//!
//! [`Codec`], [`Encoder`] and [`Decoder`] are the interface to all codecs of chunks of bytes:
//!
//! ```
//! use forebay_codec::{Decoder, Encoder, Encoding};
//!
//! let bytes = b"weights ".repeat(100);
//! let mut encoder = Encoder::new(Encoding::Zstd { level: 3 });
//! let mut chunk = Vec::new();
//! encoder.encode(&bytes, &mut chunk)?;
//! let mut decoded = vec![0; bytes.len()];
//! Decoder::default().decode(encoder.encoding().codec(), &chunk, &mut decoded)?;
//! assert_eq!(decoded, bytes);
//! # Ok::<(), forebay_codec::CodecError>(())
//! ```
//!
//! Floating-point weights of a tensor have few exponents: most lie within some factors of two. Codec `exponents` stores sign and mantissa as
//! they are and codes the exponents, so that BF16 takes about 10.7 bits a weight instead of 16: also zeros, subnormal numbers, infinities and
//! NaNs. It does the same for the codes of [`Compact`] blocks. [`Container`] holds a chunk of it. Below that, a caller cuts a tensor into pieces of up to [`CHUNK_WEIGHTS`] weights, and keeps the
//! [`Table`] of the tensor and the lengths of the pieces. Each is decoded without the others.
//!
//! The crate knows no files and no tensors. `docs/codec.md` describes the bytes.
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
mod blocks;
mod codec;
mod compact;
mod container;
mod decode;
mod encode;
mod error;
mod float;
mod gdeflate;
mod isa;
mod layout;
mod steps;
mod table;
mod weights;

pub use codec::{CHUNK_BYTES, Codec, Decoder, Encoder, Encoding};
pub use compact::{
    Compact, compact_exceptions, decode_compact, decode_compact_block, decode_compact_with,
    encode_compact, encode_compact_with,
};
pub use container::Container;
pub use decode::{decode_chunk, decode_chunk_with};
pub use encode::{encode_chunk, encode_chunk_with};
pub use error::CodecError;
pub use float::Float;
pub use isa::Isa;
pub use layout::{CHUNK_WEIGHTS, chunk_bytes_max};
pub use table::Table;
pub use weights::Weights;
