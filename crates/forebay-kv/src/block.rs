//! Identity of a KV block.

use std::fmt;

use sha2::{Digest as _, Sha256};

/// Hash of a block's rows and of all rows before them, and of everything else that determines keys and values.
///
/// It is the first half of SHA-256. Equal hashes mean equal keys and values, bit for bit, in every layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// Returns the hash "before" the first block of a sequence. `parts` are the things beside rows on which keys and values
    /// depend, such as the model. Different lists of parts have different hashes.
    pub fn root(parts: &[&[u8]]) -> BlockHash {
        let mut hash = Sha256::new();
        hash.update(b"forebay KV root 1");
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        BlockHash::first_half(hash)
    }

    /// Returns the hash of a block with these `rows` behind the block with this hash.
    pub fn then(self, rows: &[u8]) -> BlockHash {
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(rows);
        BlockHash::first_half(hash)
    }

    fn first_half(hash: Sha256) -> BlockHash {
        let mut half = [0; 16];
        half.copy_from_slice(&hash.finalize()[..16]);
        BlockHash(half)
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// A block of a layer group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey {
    pub hash: BlockHash,
    /// Index of the layer group.
    pub group: u32,
}

/// Where a block stands in its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Link {
    /// Hash of the block before it, or the root.
    pub previous: BlockHash,
    /// Index of the block in the sequence.
    pub index: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_tell_lists_of_parts_apart() {
        let parts: [&[&[u8]]; 5] = [&[], &[b""], &[b"ab"], &[b"a", b"b"], &[b"b", b"a"]];
        let roots = parts.map(BlockHash::root);
        for (index, root) in roots.iter().enumerate() {
            assert!(!roots[..index].contains(root));
        }
        assert_ne!(roots[0].then(b"x"), roots[1].then(b"x"));
        assert_eq!(format!("{:?}", BlockHash([1; 16])), "01".repeat(16));
    }
}
