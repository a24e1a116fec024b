//! Model files, read as far as their tables: bytes in, a [`Catalog`] out.
//!
//! A catalog lists a model's tensors, how their elements are encoded, and where their bytes lie on
//! disk ([`Extent`]). The crate knows three containers: GGUF (single files and split sets, see
//! [`gguf`]), Hugging Face folders with safetensors ([`huggingface`]), and forebay's own container,
//! made for streaming ([`pack`]). Opening a model reads only headers and the small files beside
//! them, never weights.
//!
//! The crate also defines the block layouts of all tensor types and their exact values
//! ([`dequantize`]), the reference for every faster kernel.
//!
//! Everything in a file is treated as hostile. A count or length is trusted only as far as the
//! file's own size can back it. Every refusal is a [`FormatError`] that holds the location as data.
//!
//! All crates write sizes and the system's errors for people with [`at_least`], [`at_most`] and [`in_words`].

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
pub mod quantized;
pub mod random_weights;
mod seems;
mod storage;
mod tensor_type;
mod weights_table;
mod words;

pub use block::{Block, Relayout, RelayoutShare, Step, StepGroup};
pub use catalog::{Absent, Catalog, Extent, FileIndex, Source, TensorInfo};
pub use error::FormatError;
pub use gguf::metadata::GgufMetadata;
pub use gguf::parse::{GgufHeader, parse_gguf_bytes};
pub use gguf::value::{Array, ByteStrings, Value, ValueType};
pub use huggingface::safetensors::{SafetensorsHeader, parse_safetensors_bytes};
pub use huggingface::{ChatTemplates, Document, HfMetadata, TemplateSource, parse_config_bytes};
pub use model_files::{model_files, split_stem};
pub use quant::{can_dequantize, dequantize};
pub use storage::{Disk, PathKind, Storage, open_regular};
pub use tensor_type::TensorType;
pub use weights_table::{StoredTensor, StoredType, WeightsTable};
pub use words::{at_least, at_most, in_words};
