//! Identity of a block: its rows, and a hash of them and of everything before them.

use forebay_kv::{BlockHash, Link};
use forebay_ops::{KV_BLOCK, RowKind};

/// The token of one position, and how it was computed.
///
/// Keys and values of a prompt row and of a generated row differ by rounding, so the kind is part of the identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub token: u32,
    pub kind: RowKind,
}

impl Row {
    /// Returns a row for every token of a prompt.
    pub fn of_prompt(tokens: &[u32]) -> Vec<Row> {
        tokens.iter().map(|&token| Row { token, kind: RowKind::Prompt }).collect()
    }
}

/// Returns the hashes of the full blocks of a sequence with these rows.
pub(super) fn hashes(root: BlockHash, rows: &[Row]) -> impl Iterator<Item = BlockHash> {
    rows.chunks_exact(KV_BLOCK).scan(root, move |hash, rows| {
        let link = Link { previous: *hash, index: 0 };
        *hash = Content::new(link, rows).hash;
        Some(*hash)
    })
}

/// Rows of a block and their hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Content {
    pub hash: BlockHash,
    pub link: Link,
    /// Unused entries are 0.
    tokens: [u32; KV_BLOCK],
    /// Bit `i` is set if row `i` was generated.
    generated: u16,
    rows: u8,
}

impl Content {
    /// Returns the content of a block with 1 to 16 `rows`.
    pub fn new(link: Link, rows: &[Row]) -> Content {
        let (tokens, generated) = Self::pack(rows);
        let mut bytes = [0; 4 * KV_BLOCK + 3];
        for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        let [.., low, high, count] = &mut bytes;
        [*low, *high] = generated.to_le_bytes();
        *count = rows.len() as u8;
        let hash = link.previous.then(&bytes);
        Content { hash, link, tokens, generated, rows: rows.len() as u8 }
    }

    /// Returns true if these are the block's rows.
    ///
    /// This is a second check of the block's own rows. The rows before the block are covered by the hash only.
    pub fn holds(&self, rows: &[Row]) -> bool {
        usize::from(self.rows) == rows.len() && (self.tokens, self.generated) == Self::pack(rows)
    }

    fn pack(rows: &[Row]) -> ([u32; KV_BLOCK], u16) {
        let (mut tokens, mut generated) = ([0; KV_BLOCK], 0);
        for (index, row) in rows.iter().enumerate() {
            tokens[index] = row.token;
            generated |= u16::from(row.kind == RowKind::Decode) << index;
        }
        (tokens, generated)
    }

    #[cfg(test)]
    pub fn row(&self, index: usize) -> Row {
        let decode = self.generated >> index & 1 == 1;
        let kind = if decode { RowKind::Decode } else { RowKind::Prompt };
        Row { token: self.tokens[index], kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_covers_the_previous_block_tokens_kinds_and_count() {
        let row = |token, kind| Row { token, kind };
        let rows = [row(0, RowKind::Prompt); KV_BLOCK];
        let link = |previous| Link { previous: BlockHash([previous; 16]), index: 1 };
        let hash = |previous, rows: &[Row]| Content::new(link(previous), rows).hash;
        let reference = hash(2, &rows);
        assert_eq!(reference, hash(2, &rows));
        let mut others = vec![hash(3, &rows), hash(2, &rows[..15])];
        for index in 0..KV_BLOCK {
            for other in [row(1, RowKind::Prompt), row(0, RowKind::Decode)] {
                let mut rows = rows;
                rows[index] = other;
                others.push(hash(2, &rows));
                assert!(!Content::new(link(2), &rows).holds(&[row(0, RowKind::Prompt); 16]));
            }
        }
        for (index, other) in others.iter().enumerate() {
            assert_ne!(*other, reference);
            assert!(!others[..index].contains(other));
        }
    }
}
