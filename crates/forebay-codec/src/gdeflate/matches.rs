//! Matches in a tile: LZ77 with chains of equal hashes, and one position of delay.

use crate::table::counts_of;

/// A part of a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Item {
    Literal(u8),
    Match { length: u32, distance: u32 },
}

/// Fewest bytes of a match. The format has matches of three bytes, but in weights these cost more than literals.
const LENGTH_MIN: usize = 4;
/// Most bytes of a match: those of the last length symbol, within a tile.
const LENGTH_MAX: usize = 65535;
const HASH_BITS: u32 = 16;
/// Positions that are compared, at most.
const TRIES: usize = 32;
/// A match of so many bytes is taken without a look at the next position.
const GOOD: usize = 64;

/// A match of so many bytes is never compared with its literals.
const SURE: usize = 24;

/// Sixteenths of a bit that the symbols of length and distance have together, about.
const MATCH_COST: u32 = 16 * 11;

/// Positions of the tile by the hash of their first bytes.
pub(super) struct Matches {
    /// The last position with a hash, plus one.
    last: Vec<u32>,
    /// For every position, the one before it with the same hash, plus one.
    before: Vec<u32>,
    /// Sixteenths of a bit that every literal costs, if there were no matches.
    costs: [u32; 256],
}

impl Default for Matches {
    fn default() -> Matches {
        Matches { last: vec![0; 1 << HASH_BITS], before: Vec::new(), costs: [0; 256] }
    }
}

impl Matches {
    /// Cuts a tile into literals and matches.
    pub fn find(&mut self, tile: &[u8], items: &mut Vec<Item>) {
        items.clear();
        self.last.fill(0);
        self.before.clear();
        self.before.resize(tile.len(), 0);
        self.costs = costs_of(tile);
        let mut at = 0;
        let mut found = (0, 0);
        while at < tile.len() {
            let (length, distance) = match found {
                (0, _) => self.longest(tile, at, 0),
                found => found,
            };
            found = (0, 0);
            if length < LENGTH_MIN {
                items.push(Item::Literal(tile[at]));
                self.insert(tile, at);
                at += 1;
                continue;
            }
            self.insert(tile, at);
            if length < GOOD {
                let next = self.longest(tile, at + 1, length);
                if next.0 > length {
                    items.push(Item::Literal(tile[at]));
                    at += 1;
                    found = next;
                    continue;
                }
            }
            items.push(Item::Match { length: length as u32, distance: distance as u32 });
            // Positions inside a long match would only lengthen the chains.
            let inside = if length > 4 * GOOD { at + length - GOOD } else { at + 1 };
            (inside..at + length).for_each(|inside| self.insert(tile, inside));
            at += length;
        }
    }

    fn insert(&mut self, tile: &[u8], at: usize) {
        if let Some(hash) = hash_of(tile, at) {
            self.before[at] = self.last[hash];
            self.last[hash] = at as u32 + 1;
        }
    }

    /// Returns whether a match takes fewer bits than literals.
    #[inline(always)]
    fn pays(&self, bytes: &[u8], distance: usize) -> bool {
        if bytes.len() >= SURE {
            return true;
        }
        let literals: u32 = bytes.iter().map(|byte| self.costs[usize::from(*byte)].max(16)).sum();
        // Far distances have more extra bits.
        literals > MATCH_COST + 16 * distance.ilog2().saturating_sub(1)
    }

    /// Returns length and distance of the longest match with more than `least` bytes, or zeros.
    fn longest(&self, tile: &[u8], at: usize, least: usize) -> (usize, usize) {
        let Some(hash) = hash_of(tile, at) else { return (0, 0) };
        let (mut best, mut distance) = (least.max(LENGTH_MIN - 1), 0);
        let most = (tile.len() - at).min(LENGTH_MAX);
        let here = &tile[at..at + most];
        let mut candidate = self.last[hash];
        for _ in 0..TRIES {
            if candidate == 0 || best >= most {
                break;
            }
            let from = candidate as usize - 1;
            // A longer match has this byte, too.
            if tile[from + best] == here[best] {
                let length = equal_bytes(&tile[from..from + most], here);
                if length > best && self.pays(&here[..length], at - from) {
                    (best, distance) = (length, at - from);
                    if best >= GOOD * 2 {
                        break;
                    }
                }
            }
            candidate = self.before[from];
        }
        if distance == 0 { (0, 0) } else { (best, distance) }
    }
}

/// Returns what every byte costs as a literal, in sixteenths of a bit.
fn costs_of(tile: &[u8]) -> [u32; 256] {
    let all = log2_sixteenths(tile.len() as u32);
    counts_of(tile).map(|count| all - log2_sixteenths(count))
}

/// Returns about 16 times the logarithm to base 2. Integers give the same result on every processor.
fn log2_sixteenths(number: u32) -> u32 {
    let whole = number.max(1).ilog2();
    16 * whole + ((u64::from(number) << 4 >> whole) & 15) as u32
}

fn hash_of(tile: &[u8], at: usize) -> Option<usize> {
    let bytes = tile.get(at..)?.first_chunk::<LENGTH_MIN>()?;
    let word = u32::from_le_bytes(*bytes);
    Some((word.wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS)) as usize)
}

/// Returns how many bytes are equal from the start on.
#[inline(always)]
fn equal_bytes(a: &[u8], b: &[u8]) -> usize {
    let (a_words, b_words) = (a.as_chunks::<8>().0, b.as_chunks::<8>().0);
    for (index, (a, b)) in a_words.iter().zip(b_words).enumerate() {
        let differ = u64::from_le_bytes(*a) ^ u64::from_le_bytes(*b);
        if differ != 0 {
            return 8 * index + differ.trailing_zeros() as usize / 8;
        }
    }
    let start = 8 * a_words.len().min(b_words.len());
    start + a[start..].iter().zip(&b[start..]).take_while(|(a, b)| a == b).count()
}
