//! Errors of codecs.

/// Why weights cannot be encoded, or a chunk cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    #[error("{bytes} bytes are no whole number of weights of {weight_bytes} bytes")]
    PartOfAWeight { bytes: usize, weight_bytes: usize },
    #[error("{bytes} bytes are no whole number of blocks of {block_bytes} bytes")]
    PartOfABlock { bytes: usize, block_bytes: usize },
    #[error("a block is damaged: lowest exponent {base}, with {exceptions} weights elsewhere")]
    Block { base: u8, exceptions: u8 },
    #[error("{weights} weights in a chunk, which holds 1 to {most}")]
    ChunkSize { weights: usize, most: usize },
    #[error("a chunk of {bytes} bytes is cut off or damaged: it needs {needed}")]
    ChunkLength { bytes: usize, needed: usize },
    #[error(
        "a chunk is damaged: its header counts {counted} codes that others follow, its bits {found}"
    )]
    Counts { counted: usize, found: usize },
    #[error("a chunk is damaged: exponent {exponent} of a type that has {exponents}")]
    Exponent { exponent: u8, exponents: u16 },
    #[error("a chunk is damaged: block {block} has an exponent that its codes cannot say")]
    Window { block: usize },
    #[error("a table of {bytes} bytes, instead of {needed}")]
    TableLength { bytes: usize, needed: usize },
    #[error("a table names exponent offset {offset} twice")]
    TableRepeats { offset: u8 },
    #[error("codec {number} is unknown")]
    UnknownCodec { number: u16 },
    #[error("a chunk of {bytes} bytes; the most is {most}")]
    ChunkBytes { bytes: usize, most: usize },
    #[error("a chunk has {bytes} bytes after decoding, instead of {expected}")]
    DecodedBytes { bytes: usize, expected: usize },
    #[error("a chunk names type {number}, which is unknown")]
    FloatNumber { number: u8 },
    #[error("a chunk is damaged: bytes that must be zeros are not")]
    NotZero,
    #[error("a chunk is damaged: part {part} begins or ends at byte {at}")]
    PartPlace { part: usize, at: usize },
    #[error("zstd: {reason}")]
    Zstd { reason: String },
    #[error("a GDeflate stream is damaged: {reason}")]
    Stream { reason: &'static str },
    #[error("tile {tile} of a GDeflate stream is damaged: {reason}")]
    Tile { tile: usize, reason: &'static str },
}
