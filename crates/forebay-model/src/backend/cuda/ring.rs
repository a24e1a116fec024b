//! A ring of device memory for pieces of different sizes. Pieces are placed in order and released in order.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::sharing::ALIGNMENT;

/// Allocation state of the ring. `M` marks when the readers of a piece have finished. From then on the piece may be
/// overwritten.
pub struct Ring<M> {
    bytes: u64,
    /// Offset of the next piece, if it fits there.
    head: u64,
    /// Placed pieces, oldest first.
    pieces: VecDeque<Piece<M>>,
    /// Number of released pieces, which are the oldest in `pieces`.
    released: usize,
}

struct Piece<M> {
    place: Range<u64>,
    done: Option<Arc<M>>,
}

/// Offset of a new piece, and what must finish before the piece is written.
#[derive(Debug, PartialEq, Eq)]
pub struct Taken<M> {
    pub at: u64,
    pub after: Option<Arc<M>>,
}

impl<M> Ring<M> {
    pub fn new(bytes: u64) -> Ring<M> {
        Ring { bytes, head: 0, pieces: VecDeque::new(), released: 0 }
    }

    /// Places a piece after the last one. Returns `None` until older pieces are released. A group of pieces always
    /// fits once all others are released, if the ring is as large as the group plus its largest piece.
    pub fn take(&mut self, bytes: u64) -> Option<Taken<M>> {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        let behind = self.head + bytes <= self.bytes;
        let at = if behind { self.head } else { 0 };
        let place = at..at + bytes;
        let overlaps =
            |piece: &Piece<M>| piece.place.start < place.end && place.start < piece.place.end;
        let in_the_way = self.pieces.iter().rposition(overlaps);
        let over = in_the_way.map_or(0, |last| last + 1);
        if place.end > self.bytes || over > self.released {
            return None;
        }
        // Pieces finish in the order of their release, so the last of them is enough.
        let after = self.pieces.drain(..over).next_back().and_then(|piece| piece.done);
        self.released -= over;
        self.head = place.end;
        self.pieces.push_back(Piece { place, done: None });
        Some(Taken { at, after })
    }

    /// Releases the oldest `count` pieces that are in use. They may be overwritten once `done` is reached.
    ///
    /// # Panics
    /// Panics if fewer are in use.
    pub fn release(&mut self, count: usize, done: M) {
        let done = Arc::new(done);
        for piece in self.pieces.range_mut(self.released..self.released + count) {
            piece.done = Some(Arc::clone(&done));
        }
        self.released += count;
    }

    /// Removes the `count` pieces that were placed last. Nothing may have read them.
    ///
    /// # Panics
    /// Panics if fewer are in use.
    pub fn forget_last(&mut self, count: usize) {
        let left = self.pieces.len() - count;
        assert!(left >= self.released, "released pieces are still read");
        if let Some(first) = self.pieces.drain(left..).next() {
            self.head = first.place.start;
        }
    }

    /// Removes all pieces. Nothing may still read any of them.
    pub fn clear(&mut self) {
        self.pieces.clear();
        (self.head, self.released) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = ALIGNMENT;

    fn at(ring: &mut Ring<u32>, pieces: u64) -> Option<(u64, Option<u32>)> {
        ring.take(pieces * K).map(|taken| (taken.at / K, taken.after.map(|after| *after)))
    }

    #[test]
    fn pieces_wait_for_what_they_write_over() {
        let mut ring = Ring::new(10 * K);
        assert_eq!(at(&mut ring, 4), Some((0, None)));
        assert_eq!(at(&mut ring, 4), Some((4, None)));
        assert_eq!(at(&mut ring, 4), None, "the first is in use");
        assert_eq!(at(&mut ring, 2), Some((8, None)), "behind the second");
        ring.release(1, 7);
        assert_eq!(at(&mut ring, 5), None, "the second is in use");
        assert_eq!(at(&mut ring, 3), Some((0, Some(7))));
        ring.release(2, 8);
        assert_eq!(at(&mut ring, 3), Some((3, Some(8))), "over the second");
        assert_eq!(at(&mut ring, 3), Some((6, Some(8))), "over the second and what was behind it");
        ring.forget_last(2);
        assert_eq!(at(&mut ring, 7), Some((3, None)), "nothing is left there");
        assert_eq!(at(&mut ring, 1), None);
        ring.clear();
        assert_eq!(at(&mut ring, 10), Some((0, None)));
        assert_eq!(at(&mut ring, 11), None, "larger than the ring");
    }

    /// Sub-layers with the sizes of a real model, in the smallest ring that is guaranteed to be enough, from every
    /// start offset.
    #[test]
    fn a_sub_layer_always_has_room_when_it_is_alone() {
        let sub_layers: [&[u64]; 2] = [&[38, 5, 7, 38], &[132, 132, 193]];
        let mut ring = Ring::new((457 + 193) * K);
        let mut written = 0;
        for round in 0..400_u32 {
            for sub_layer in sub_layers {
                for piece in sub_layer {
                    let taken = at(&mut ring, *piece).expect("all others are released");
                    written = written.max(taken.0 + piece);
                }
                ring.release(sub_layer.len(), round);
            }
        }
        assert!(written <= 650);
    }
}
