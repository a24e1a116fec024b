//! Merging of neighbours, the step that byte pair encoding and SentencePiece have in common.
//!
//! A word starts as its smallest pieces. While two neighbours form a token, the best pair is
//! joined: the lowest key first, then the leftmost. With a heap of candidate pairs, a word of n
//! pieces takes O(n log n). This matters because some tokenizers do not split text into words.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A piece of the word: a range of its bytes and its token, if it is one.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    pub start: u32,
    /// Length in bytes; 0 once the piece was joined to its left neighbour.
    pub bytes: u32,
    pub token: Option<u32>,
    previous: u32,
    next: u32,
}

/// Index that means "no neighbour".
const NONE: u32 = u32::MAX;

/// A pair of neighbours that could be joined. The order of the fields is the order of joining.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    key: u32,
    left: u32,
    right: u32,
    /// Length of both pieces when the pair was found. If it differs now, one of them has changed
    /// since.
    bytes: u32,
    token: u32,
}

/// Pieces of one word and the memory to merge them, reused from word to word.
#[derive(Default)]
pub struct Merger {
    pieces: Vec<Piece>,
    candidates: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Forgets the previous word.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.candidates.clear();
    }

    /// Appends a smallest piece of `bytes` bytes.
    pub fn push(&mut self, bytes: u32, token: Option<u32>) {
        let index = self.pieces.len() as u32;
        let start = self.pieces.last().map_or(0, |piece| piece.start + piece.bytes);
        if let Some(last) = self.pieces.last_mut() {
            last.next = index;
        }
        let previous = index.checked_sub(1).unwrap_or(NONE);
        self.pieces.push(Piece { start, bytes, token, previous, next: NONE });
    }

    /// Joins pieces until no two neighbours form a token. `join` returns the key and the token of a
    /// pair of neighbours.
    pub fn merge(&mut self, join: impl Fn(&Piece, &Piece) -> Option<(u32, u32)>) {
        for left in 0..self.pieces.len().saturating_sub(1) as u32 {
            self.consider(left, left + 1, &join);
        }
        while let Some(Reverse(pair)) = self.candidates.pop() {
            let (left, right) = (self.pieces[pair.left as usize], self.pieces[pair.right as usize]);
            let is_current = left.bytes > 0
                && right.bytes > 0
                && left.next == pair.right
                && left.bytes + right.bytes == pair.bytes;
            if !is_current {
                continue;
            }
            self.pieces[pair.right as usize].bytes = 0;
            let joined = &mut self.pieces[pair.left as usize];
            joined.bytes = pair.bytes;
            joined.token = Some(pair.token);
            joined.next = right.next;
            if right.next != NONE {
                self.pieces[right.next as usize].previous = pair.left;
                self.consider(pair.left, right.next, &join);
            }
            if left.previous != NONE {
                self.consider(left.previous, pair.left, &join);
            }
        }
    }

    fn consider(
        &mut self,
        left: u32,
        right: u32,
        join: impl Fn(&Piece, &Piece) -> Option<(u32, u32)>,
    ) {
        let pieces = (&self.pieces[left as usize], &self.pieces[right as usize]);
        if let Some((key, token)) = join(pieces.0, pieces.1) {
            let bytes = pieces.0.bytes + pieces.1.bytes;
            self.candidates.push(Reverse(Candidate { key, left, right, bytes, token }));
        }
    }

    /// Returns the pieces that are left, in the order of the word.
    pub fn finished(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.iter().filter(|piece| piece.bytes > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Merges `word` with `ranks`, a list of pairs of texts with the best first.
    fn merged(word: &str, ranks: &[(&str, &str)]) -> Vec<String> {
        let mut merger = Merger::default();
        word.chars().for_each(|c| merger.push(c.len_utf8() as u32, None));
        let text = |piece: &Piece| &word[piece.start as usize..][..piece.bytes as usize];
        merger.merge(|left, right| {
            let rank = ranks.iter().position(|pair| *pair == (text(left), text(right)))?;
            Some((rank as u32, 0))
        });
        merger.finished().map(|piece| text(piece).to_owned()).collect()
    }

    #[test]
    fn best_pair_first_then_leftmost() {
        assert_eq!(merged("aaa", &[("a", "a")]), ["aa", "a"]);
        assert_eq!(merged("aaaa", &[("a", "a"), ("aa", "aa")]), ["aaaa"]);
        assert_eq!(merged("abc", &[("b", "c"), ("a", "b")]), ["a", "bc"]);
        assert_eq!(merged("abc", &[("a", "b"), ("ab", "c"), ("b", "c")]), ["abc"]);
        assert_eq!(merged("", &[("a", "a")]), Vec::<String>::new());
        assert_eq!(merged("é€x", &[("€", "x"), ("é", "€x")]), ["é€x"]);
    }
}
