//! The streaming container `.fbay`. It stores blocks in the order in which they are used. Each
//! block is contiguous and aligned, and every byte has a checksum.
//!
//! `docs/pack-format.md` describes the file byte by byte.
//!
//! ```text
//! mod.rs       contents of a pack: blocks, embedded documents
//! chunks.rs    which bytes each checksum covers
//! parse.rs     file to tables; section.rs reads one section of it
//! tensors.rs   the tensor table, with a check that no two tensors share a byte
//! plan.rs      layout of a new pack
//! encode.rs    tables to bytes
//! restore.rs   puts the files that a pack was made from together again
//! ```

mod chunks;
mod conversion;
mod encode;
mod parse;
mod plan;
pub(crate) mod restore;
mod section;
mod tensors;

use std::fmt;
use std::ops::Range;
use std::path::{Component, Path};
use std::sync::Arc;

use crate::Extent;

pub use chunks::{Chunk, ChunkIndex, StoredChunk};
pub use conversion::{Conversion, PackSpan};
pub use parse::{front_bytes, is_pack, open, parse_pack_bytes};
pub use plan::{PackPlan, PlannedBlock, PlannedPiece, TensorStorage};
pub use restore::{RestoredFile, restore_gguf, restore_hugging_face, source_documents};

/// Extension of the file names of packs.
pub const EXTENSION: &str = "fbay";

/// First bytes of every pack. The line ends and the end-of-file character reveal a transfer that
/// treated the file as text.
pub(crate) const MAGIC: [u8; 8] = *b"FBAY\r\n\x1a\n";

/// Version of packs whose blocks are all stored as they are. A higher minor version adds only what readers may ignore.
pub(crate) const VERSION_PLAIN: (u16, u16) = (1, 0);

/// Version of packs with coded blocks.
pub(crate) const VERSION_CODED: (u16, u16) = (2, 0);

/// Number of bytes of the header. Sections and blocks start at multiples of this.
pub const PAGE_BYTES: u64 = 4096;

/// Alignment of tensors inside their block, in bytes.
pub const TENSOR_ALIGNMENT: u64 = 256;

/// Largest chunk of a block that is read whole, in bytes: one read request.
pub const CHUNK_BYTES_MAX: u64 = 128 << 10;

/// Largest chunk that a reader accepts, in bytes.
pub(crate) const CHUNK_BYTES_LIMIT: u64 = 4 << 20;

/// Most bytes of a chunk of a coded block, after decoding. Larger ones are coded hardly better, and a block of several is decoded by several
/// threads while others are being read.
pub const CODED_CHUNK_BYTES_MAX: u64 = 256 << 10;

pub(crate) const NO_INDEX: u32 = u32::MAX;

/// Target size in bytes of what is read of the output projection at a time. It is small enough that the projection fits two slots
/// of a small budget, and large enough to read at full speed.
const HEAD_BYTES: u64 = 8 << 20;

/// Returns the number of rows of the output projection that are read at a time, for rows of so many bytes. They are whole panels of
/// the matrix kernels, which have 16 rows. Chunks of coded blocks end with them.
pub fn head_rows(row_bytes: u64) -> u64 {
    (HEAD_BYTES / row_bytes.max(1)).max(1).next_multiple_of(16)
}

/// Returns XXH3-64 (seed 0) of `bytes`, the checksum of everything in a pack.
pub fn checksum(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

/// Kind of model that a pack was made from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    Gguf = 1,
    HuggingFace = 2,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Gguf => "GGUF",
            Origin::HuggingFace => "a Hugging Face folder",
        })
    }
}

/// Contents of a pack beside its tensors.
#[derive(Clone, Debug)]
pub struct Pack {
    /// Major and minor version of the format.
    pub version: (u16, u16),
    pub origin: Origin,
    pub documents: Vec<Embedded>,
    /// Blocks, and the checksums of their bytes.
    pub chunks: Arc<ChunkIndex>,
}

impl Pack {
    /// Returns the extent of the file that stores an extent of the decoded file.
    pub fn stored(&self, extent: Extent) -> Extent {
        match self.chunks.stored_for(extent.offset, extent.end()) {
            Some(Range { start, end }) => {
                Extent { file: extent.file, offset: start, length: end - start }
            }
            None => extent,
        }
    }
}

/// Kind of an embedded document.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DocumentKind {
    /// A whole file that lay beside the weights.
    File = 1,
    /// Everything in front of the tensor data of a file that held weights.
    Header = 2,
}

/// Document inside a pack.
#[derive(Clone, Debug)]
pub struct Embedded {
    pub kind: DocumentKind,
    /// File name without a folder.
    pub name: String,
    pub content: Arc<[u8]>,
    /// Size in bytes of the file that a header was cut from.
    pub source_bytes: u64,
}

impl Embedded {
    /// Returns true if this is the whole file called `name`.
    pub fn is_file(&self, name: &str) -> bool {
        self.kind == DocumentKind::File && self.name == name
    }
}

/// Returns true if `name` is a file name that cannot lead out of a folder.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
        && !name.contains(['/', '\\', '\0'])
}

/// Purpose of a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockKind {
    /// The embedding table, which is read in single rows.
    Embedding = 1,
    /// The matrices of a layer that every token needs.
    Layer = 2,
    /// One expert of one layer.
    Expert = 3,
    /// The output projection, read in ranges of rows.
    Head = 4,
    /// Tensors that are read at the start or not at all: norms, biases, and those that the decoder
    /// does not use.
    Other = 5,
}

impl BlockKind {
    /// Returns true if the block is read as a whole, so that its chunks can be as large as read
    /// requests. Other blocks are read in parts and have a checksum for every page.
    pub(crate) fn is_read_whole(self) -> bool {
        matches!(self, BlockKind::Layer | BlockKind::Expert)
    }

    /// Returns true if the block may be coded. Single rows of the embedding are read, and tensors of other blocks are small.
    pub(crate) fn may_be_coded(self) -> bool {
        self.is_read_whole() || self == BlockKind::Head
    }

    pub(crate) fn from_id(id: u32) -> BlockKind {
        use BlockKind::*;
        // A newer minor version may know more kinds. Their bytes can be read all the same.
        [Embedding, Layer, Expert, Head]
            .into_iter()
            .find(|kind| *kind as u32 == id)
            .unwrap_or(Other)
    }
}

/// Block of a pack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    pub kind: BlockKind,
    pub layer: Option<u32>,
    pub expert: Option<u32>,
    /// Offset after decoding, in bytes, a multiple of 4096.
    pub offset: u64,
    /// Number of bytes after decoding, with the padding at the end, a multiple of 4096.
    pub bytes: u64,
    /// Offset from the start of the file in bytes, a multiple of 4096.
    pub stored_offset: u64,
    /// Number of bytes in the file, a multiple of 4096.
    pub stored_bytes: u64,
    /// Number of bytes of every chunk but the last, which may be shorter. 0 if the block is coded: its chunks then have sizes of their own.
    pub chunk_bytes: u32,
    /// Index of the first chunk in the chunk table.
    pub first_chunk: u64,
    /// Number of chunks.
    pub chunks: u64,
    /// Number of chunks of coded blocks before this block.
    pub(crate) first_coded: u64,
}

impl Block {
    /// Returns the offset of the byte after the block, after decoding.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }

    /// Returns the offset in the file of the byte after the block.
    pub fn stored_end(&self) -> u64 {
        self.stored_offset + self.stored_bytes
    }

    /// Returns true if chunks of the block may be coded.
    pub fn is_coded(&self) -> bool {
        self.chunk_bytes == 0
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.kind, self.layer, self.expert) {
            (BlockKind::Embedding, ..) => f.write_str("the embedding"),
            (BlockKind::Layer, Some(layer), _) => write!(f, "the dense block of layer {layer}"),
            (BlockKind::Expert, Some(layer), Some(expert)) => {
                write!(f, "expert {expert} of layer {layer}")
            }
            (BlockKind::Head, ..) => f.write_str("the head"),
            _ => f.write_str("the block of norms and other tensors"),
        }
    }
}
