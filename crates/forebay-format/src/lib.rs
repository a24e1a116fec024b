//! Model files, read as far as their tables: bytes in, a [`Catalog`] out.
//!
//! A catalog says which tensors a model has, how their elements are encoded and where their bytes
//! lie on disk ([`Extent`]). Three containers are known: GGUF (single files and split sets, see
//! [`gguf`]), Hugging Face folders with safetensors ([`huggingface`]), and our own that is made for
//! streaming ([`pack`]). Opening a model never reads weights; only headers and the small files
//! beside them.
//!
//! The crate also defines the block layouts of all tensor types and their exact values
//! ([`dequantize`]), the reference for every faster kernel.
//!
//! Everything in a file is treated as hostile: a count or length is believed only as far as the
//! file's own size can back it, and every refusal is a [`FormatError`] with its place as data.

#![forbid(unsafe_code)]

mod block;
mod catalog;
pub mod convert;
mod error;
pub mod gguf;
pub mod huggingface;
mod model_files;
pub mod pack;
pub mod quant;
pub mod random_weights;
mod seems;
mod tensor_type;

pub use block::{Block, Relayout, RelayoutShare, Step};
pub use catalog::{Catalog, Extent, FileIndex, Source, TensorInfo};
pub use error::FormatError;
pub use gguf::metadata::GgufMetadata;
pub use gguf::parse::{GgufHeader, parse_gguf_bytes};
pub use gguf::value::{Array, ByteStrings, Value, ValueType};
pub use huggingface::safetensors::{SafetensorsHeader, parse_safetensors_bytes};
pub use huggingface::{Document, HfMetadata};
pub use model_files::model_files;
pub use quant::{can_dequantize, dequantize};
pub use tensor_type::TensorType;
