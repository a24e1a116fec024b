//! The key/value cache: blocks and the form of elements.

/// Number of positions in a block of the key/value cache. Kernels for GPUs have the same number.
pub const KV_BLOCK: usize = 16;

/// Storage type of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    F16,
    F32,
    /// One byte per element, and a half-precision scale for every 32 elements of a row: their
    /// largest magnitude divided by 127.
    Q8_0,
    /// Four bits per element, with a scale for every 32 elements: the element farthest from 0
    /// divided by -8. Codes are 0 to 15 and stand for -8 to 7, as in GGUF's blocks of the same
    /// name.
    Q4_0,
}

impl KvType {
    /// Returns true if elements are rounded to integers with a scale.
    pub fn rounds(self) -> bool {
        matches!(self, KvType::Q8_0 | KvType::Q4_0)
    }
}
