//! Model architectures as data. They are read from a catalog's metadata and drive the decoder.

mod architecture;
mod catalog;
mod check;
mod compressed;
mod config;
mod deepseek4;
mod families;
mod family;
mod feed_forward_width;
mod gguf;
mod gguf_experts;
mod gguf_indexer;
mod gguf_keys;
mod gguf_layers;
mod gguf_recurrent;
mod gguf_rope;
mod gguf_windows;
mod harmless;
mod head;
mod huggingface;
mod huggingface_attention;
mod huggingface_experts;
mod huggingface_indexer;
mod huggingface_recurrent;
mod huggingface_rotation;
mod huggingface_variants;
mod huggingface_windows;
mod indexer;
mod keys_read;
mod layers;
mod mtp;
mod mtp_shape;
mod multipliers;
mod names;
mod ngrams;
mod norms;
mod quantization;
mod recurrent;
mod roots;
mod rope_parameters;
mod shapes;
mod streams;
mod unrotated;
mod validation;

pub use architecture::{
    Architecture, Attention, AttentionBias, EmbeddingNorm, Experts, FeedForward, Gatings,
    KvCapacity, KvInVram, Latent, Layer, LayerEmbeddings, Mixer, Naming, OutputGate, QkNorm, Rope,
    RopeFactors, Values,
};
pub(crate) use architecture::{LONG_FACTORS, SHORT_FACTORS};
pub(crate) use families::by_name;
pub use families::known_families;
pub use family::Family;
pub(crate) use indexer::INDEXER_NORM_EPSILON;
pub use layers::KvGroup;
pub use mtp_shape::{MTP_ROWS_MAX, Mtp};
pub(crate) use names::Names;
pub use quantization::{Method, Quantization};
pub(crate) use recurrent::PRODUCTS_MAX;
pub use recurrent::{HeadOrder, Recurrent, STATES_PER_SEQUENCE};
pub use shapes::{
    Convolved, EntryIndexer, EntryShape, ExpertInput, HashConstants, Indexer, IndexerRule,
    LatentExperts, LatentNorm, NGrams, NormLayout, RelativeBias, SharedKeys, StreamForm,
    StreamRule, Streams, StreamsEnd,
};
