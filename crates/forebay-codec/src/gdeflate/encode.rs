//! Encoding of a tile.

use super::LANES;
use super::huffman::{
    LENGTH_ORDER, LENGTHS, code_words, distance_of, fixed_literal_lengths, lengths_of,
};
use super::matches::{Item, Matches};

const END: usize = 256;
const LITERALS: usize = 286;
const DISTANCES: usize = 32;

/// Most bytes of a stored block.
const STORED: usize = u16::MAX as usize;

/// Finds matches and codes them. It keeps its memory from tile to tile.
#[derive(Default)]
pub(crate) struct TileEncoder {
    matches: Matches,
    items: Vec<Item>,
}

impl TileEncoder {
    /// Appends one tile to `out`: whole words of 32 bits. It has one block with codes, or stored blocks if these are shorter.
    pub fn encode(&mut self, tile: &[u8], out: &mut Vec<u8>) {
        self.matches.find(tile, &mut self.items);
        let own = Codes::of(&self.items);
        let fixed = Codes::fixed();
        let (own_bits, fixed_bits) = (own.bits(&self.items), fixed.bits(&self.items));
        let stored_bits = 19 * tile.len().div_ceil(STORED).max(1) + 8 * tile.len();
        let mut lanes = Lanes::new(out);
        if stored_bits <= own_bits.min(fixed_bits) {
            write_stored(&mut lanes, tile);
        } else {
            let codes = if fixed_bits <= own_bits { &fixed } else { &own };
            codes.write(&mut lanes, &self.items);
        }
        lanes.finish();
    }
}

fn write_stored(lanes: &mut Lanes<'_>, tile: &[u8]) {
    let mut left = tile;
    loop {
        let (block, rest) = left.split_at(left.len().min(STORED));
        left = rest;
        lanes.put(0, u64::from(left.is_empty()), 3);
        lanes.refill(0);
        lanes.put(0, block.len() as u64, 16);
        for (index, byte) in block.iter().enumerate() {
            lanes.put(index % LANES, u64::from(*byte), 8);
            lanes.refill(index % LANES);
        }
        lanes.refill(0);
        if left.is_empty() {
            return;
        }
    }
}

/// A lane: bits that do not fill a word yet, and where its words are.
#[derive(Debug, Clone, Copy, Default)]
struct Lane {
    bits: u64,
    count: u32,
    /// Bits that a decoder has read for this lane, but not used yet.
    unread: u32,
    /// Places of the word that is being filled, and of the one after it.
    word: usize,
    next: usize,
}

/// Words of a tile. A word is appended when a decoder reads it, and filled when its bits are known.
struct Lanes<'a> {
    out: &'a mut Vec<u8>,
    lanes: [Lane; LANES],
}

impl<'a> Lanes<'a> {
    fn new(out: &'a mut Vec<u8>) -> Lanes<'a> {
        let start = out.len();
        out.resize(start + 4 * LANES, 0);
        let lane = |index: usize| Lane { unread: 32, word: start + 4 * index, ..Lane::default() };
        Lanes { out, lanes: std::array::from_fn(lane) }
    }

    /// Gives up to 31 bits to a lane.
    #[inline(always)]
    fn put(&mut self, lane: usize, bits: u64, count: u32) {
        let lane = &mut self.lanes[lane % LANES];
        lane.bits |= bits << lane.count;
        lane.count += count;
        lane.unread -= count;
        if lane.count >= 32 {
            let word = (lane.bits as u32).to_le_bytes();
            self.out[lane.word..lane.word + 4].copy_from_slice(&word);
            lane.bits >>= 32;
            lane.count -= 32;
            lane.word = lane.next;
        }
    }

    /// Does what a decoder does after a symbol: a lane with fewer than 32 bits gets another word.
    #[inline(always)]
    fn refill(&mut self, lane: usize) {
        let lane = &mut self.lanes[lane % LANES];
        if lane.unread < 32 {
            lane.unread += 32;
            lane.next = self.out.len();
            self.out.extend([0; 4]);
        }
    }

    fn finish(self) {
        for lane in self.lanes.iter().filter(|lane| lane.count > 0) {
            let word = (lane.bits as u32).to_le_bytes();
            self.out[lane.word..lane.word + 4].copy_from_slice(&word);
        }
    }
}

/// The codes of a block.
struct Codes {
    own: bool,
    literals: [u8; LITERALS],
    distances: [u8; DISTANCES],
}

/// One code length as it is stored: its symbol, and extra bits.
struct Length {
    symbol: usize,
    extra: u64,
    extra_bits: u32,
}

/// Returns the symbol of a length, its extra bits and their number.
fn length_symbol(length: usize) -> (usize, u64, u32) {
    let index = match length {
        3..11 => length - 3,
        11..259 => {
            // Four symbols for every power of two.
            let power = (length - 3).ilog2() as usize;
            4 * (power - 1) + ((length - 3) >> (power - 2)) % 4
        }
        _ => LENGTHS.len() - 1,
    };
    let (value, extra) = LENGTHS[index];
    (END + 1 + index, (length - usize::from(value)) as u64, u32::from(extra))
}

/// Returns the symbol of a distance, its extra bits and their number.
fn distance_symbol(distance: usize) -> (usize, u64, u32) {
    let symbol = match distance {
        0..5 => distance - 1,
        _ => {
            // Two symbols for every power of two.
            let power = (distance - 1).ilog2() as usize;
            2 * power + ((distance - 1) >> (power - 1)) % 2
        }
    };
    let (value, extra) = distance_of(symbol);
    (symbol, (distance - usize::from(value)) as u64, u32::from(extra))
}

impl Codes {
    fn fixed() -> Codes {
        let all = fixed_literal_lengths();
        let literals = std::array::from_fn(|symbol| all[symbol]);
        Codes { own: false, literals, distances: [5; DISTANCES] }
    }

    /// Returns the best codes for `items`.
    fn of(items: &[Item]) -> Codes {
        let (mut literals, mut distances) = ([0_u32; LITERALS], [0_u32; DISTANCES]);
        literals[END] = 1;
        for item in items {
            match *item {
                Item::Literal(byte) => literals[usize::from(byte)] += 1,
                Item::Match { length, distance } => {
                    literals[length_symbol(length as usize).0] += 1;
                    distances[distance_symbol(distance as usize).0] += 1;
                }
            }
        }
        let (literals, distances) = (lengths_of(&literals, 15), lengths_of(&distances, 15));
        Codes { own: true, literals, distances }
    }

    /// Returns the bits of a block with these codes.
    fn bits(&self, items: &[Item]) -> usize {
        let mut bits = 3 + usize::from(self.literals[END]);
        for item in items {
            bits += match *item {
                Item::Literal(byte) => usize::from(self.literals[usize::from(byte)]),
                Item::Match { length, distance } => {
                    let (symbol, _, extra) = length_symbol(length as usize);
                    let (far, _, more) = distance_symbol(distance as usize);
                    usize::from(self.literals[symbol] + self.distances[far])
                        + (extra + more) as usize
                }
            };
        }
        if self.own {
            let (lengths, stored, of_lengths) = self.lengths();
            let words = lengths.iter().map(|l| u32::from(of_lengths[l.symbol]) + l.extra_bits);
            bits += 14 + 3 * stored + words.sum::<u32>() as usize;
        }
        bits
    }

    /// Returns the numbers of literals and distances up to the last that occurs.
    fn used(&self) -> (usize, usize) {
        let last = |lengths: &[u8]| lengths.iter().rposition(|&length| length > 0).unwrap_or(0) + 1;
        (last(&self.literals).max(257), last(&self.distances))
    }

    /// Returns the code lengths as they are stored, and the code for them: how many of its lengths are stored, and these lengths.
    fn lengths(&self) -> (Vec<Length>, usize, [u8; 19]) {
        let (literals, distances) = self.used();
        let all = [&self.literals[..literals], &self.distances[..distances]].concat();
        let mut lengths = Vec::with_capacity(all.len());
        for run in all.chunk_by(|a, b| a == b) {
            let (length, mut left) = (run[0], run.len());
            let mut push = |symbol: usize, extra: usize, extra_bits| {
                lengths.push(Length { symbol, extra: extra as u64, extra_bits });
            };
            if length == 0 {
                while left >= 11 {
                    let times = left.min(138);
                    push(18, times - 11, 7);
                    left -= times;
                }
                if left >= 3 {
                    push(17, left - 3, 3);
                    left = 0;
                }
            } else if left >= 4 {
                push(usize::from(length), 0, 0);
                left -= 1;
                while left >= 3 {
                    let times = left.min(6);
                    push(16, times - 3, 2);
                    left -= times;
                }
            }
            (0..left).for_each(|_| push(usize::from(length), 0, 0));
        }
        let mut counts = [0_u32; 19];
        lengths.iter().for_each(|length| counts[length.symbol] += 1);
        let of_lengths = lengths_of(&counts, 7);
        let stored = LENGTH_ORDER.iter().rposition(|&symbol| of_lengths[symbol] > 0);
        (lengths, (stored.unwrap_or(0) + 1).max(4), of_lengths)
    }

    fn write(&self, lanes: &mut Lanes<'_>, items: &[Item]) {
        lanes.put(0, 1 | if self.own { 2 } else { 1 } << 1, 3);
        lanes.refill(0);
        if self.own {
            self.write_lengths(lanes);
        }
        let (literal_words, distance_words) =
            (code_words(&self.literals_of_code()), code_words(&self.distances));
        // A match's distance goes to the lane of its length, when it is this lane's turn again.
        let mut open = [(0_u64, 0_u32); LANES];
        let mut lane = 0;
        for item in items {
            while open[lane].1 > 0 {
                let (bits, count) = std::mem::take(&mut open[lane]);
                lanes.put(lane, bits, count);
                lanes.refill(lane);
                lane = (lane + 1) % LANES;
            }
            match *item {
                Item::Literal(byte) => {
                    let symbol = usize::from(byte);
                    let bits = u32::from(self.literals[symbol]);
                    lanes.put(lane, u64::from(literal_words[symbol]), bits);
                }
                Item::Match { length, distance } => {
                    let (symbol, extra, extra_bits) = length_symbol(length as usize);
                    let bits = u32::from(self.literals[symbol]);
                    let word = u64::from(literal_words[symbol]) | extra << bits;
                    lanes.put(lane, word, bits + extra_bits);
                    let (symbol, extra, extra_bits) = distance_symbol(distance as usize);
                    let bits = u32::from(self.distances[symbol]);
                    let word = u64::from(distance_words[symbol]) | extra << bits;
                    open[lane] = (word, bits + extra_bits);
                }
            }
            lanes.refill(lane);
            lane = (lane + 1) % LANES;
        }
        let mut end = Some((u64::from(literal_words[END]), u32::from(self.literals[END])));
        // The end of the block is a symbol like others. After it, lanes whose turn comes write what is left.
        let mut after = 0;
        while after < LANES {
            let now = match std::mem::take(&mut open[lane]) {
                (_, 0) => end.take(),
                distance => Some(distance),
            };
            if let Some((bits, count)) = now {
                lanes.put(lane, bits, count);
                lanes.refill(lane);
            }
            after += usize::from(end.is_none());
            lane = (lane + 1) % LANES;
        }
    }

    /// Returns the lengths with which code words are numbered: the fixed code has two symbols that never occur.
    fn literals_of_code(&self) -> [u8; 288] {
        if !self.own {
            return fixed_literal_lengths();
        }
        std::array::from_fn(|symbol| self.literals.get(symbol).copied().unwrap_or(0))
    }

    fn write_lengths(&self, lanes: &mut Lanes<'_>) {
        let (literals, distances) = self.used();
        let (lengths, stored, of_lengths) = self.lengths();
        let counts = (literals - 257) | (distances - 1) << 5 | (stored - 4) << 10;
        lanes.put(0, counts as u64, 14);
        lanes.refill(0);
        for (lane, symbol) in LENGTH_ORDER.into_iter().enumerate().take(stored) {
            lanes.put(lane, u64::from(of_lengths[symbol]), 3);
            lanes.refill(lane);
        }
        let words = code_words(&of_lengths);
        for (index, length) in lengths.iter().enumerate() {
            let bits = u32::from(of_lengths[length.symbol]);
            let word = u64::from(words[length.symbol]) | length.extra << bits;
            lanes.put(index % LANES, word, bits + length.extra_bits);
            lanes.refill(index % LANES);
        }
    }
}
