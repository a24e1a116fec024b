//! A ring of device memory that pieces of different sizes go round in: placed in order, released in order.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::sharing::ALIGNMENT;

/// Which bytes are in use. `M` says when what read a piece is done: it may be written over from then on.
pub struct Ring<M> {
    bytes: u64,
    /// Where the next piece goes, if it fits there.
    head: u64,
    /// Oldest first.
    pieces: VecDeque<Piece<M>>,
    /// Of the pieces, those that were released: the oldest.
    released: usize,
}

struct Piece<M> {
    place: Range<u64>,
    done: Option<Arc<M>>,
}

/// A place, and what has to be done before it is written.
#[derive(Debug, PartialEq, Eq)]
pub struct Taken<M> {
    pub at: u64,
    pub after: Option<Arc<M>>,
}

impl<M> Ring<M> {
    pub fn new(bytes: u64) -> Ring<M> {
        Ring { bytes, head: 0, pieces: VecDeque::new(), released: 0 }
    }

    /// Places a piece behind the last one; `None` until older ones are released. Pieces that lie within
    /// [`Ring::new`]'s bytes together with the largest of them always have room when all others are released.
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
        // What was released last among them was done last.
        let after = self.pieces.drain(..over).next_back().and_then(|piece| piece.done);
        self.released -= over;
        self.head = place.end;
        self.pieces.push_back(Piece { place, done: None });
        Some(Taken { at, after })
    }

    /// The oldest `count` pieces that are in use may be written over once `done` says so.
    ///
    /// # Panics
    /// When fewer are in use.
    pub fn release(&mut self, count: usize, done: M) {
        let done = Arc::new(done);
        for piece in self.pieces.range_mut(self.released..self.released + count) {
            piece.done = Some(Arc::clone(&done));
        }
        self.released += count;
    }

    /// Forgets the `count` pieces that were placed last. Nothing has read them.
    ///
    /// # Panics
    /// When fewer are in use.
    pub fn forget_last(&mut self, count: usize) {
        let left = self.pieces.len() - count;
        assert!(left >= self.released, "released pieces are still read");
        if let Some(first) = self.pieces.drain(left..).next() {
            self.head = first.place.start;
        }
    }

    /// Forgets all pieces: nothing reads any.
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

    /// Units as layers have them, in the least ring that is promised to be enough, from every beginning.
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
