//! Decoding of a tile.

use super::LANES;
use super::huffman::{
    Decoding, END, Entry, LENGTH_ORDER, LENGTHS, LITERAL, MATCH, distance_of, fixed_literal_lengths,
};

/// Why a tile is no tile.
type Reason = &'static str;

const CUT_OFF: Reason = "it is cut off";
const TOO_LONG: Reason = "it has more bytes than it may";
const TOO_SHORT: Reason = "it has fewer bytes than it must";
const NO_CODE: Reason = "its code lengths are those of no code";
const NO_WORD: Reason = "bits are no code word";

/// Symbols of the code for literals and lengths.
const LITERALS: usize = 288;
const DISTANCES: usize = 32;

/// Most blocks of a tile. Encoders write a few; thousands of empty ones would only take time.
const BLOCKS: usize = 1024;

/// Tables in which code words are looked up. A second table belongs to two symbols at least.
pub(crate) struct TileDecoder {
    literals: Decoding<11, { 2048 + LITERALS / 2 * 16 }>,
    distances: Decoding<8, { 256 + DISTANCES / 2 * 128 }>,
    lengths: Decoding<7, 128>,
}

impl Default for TileDecoder {
    fn default() -> TileDecoder {
        TileDecoder {
            literals: Decoding::new(),
            distances: Decoding::new(),
            lengths: Decoding::new(),
        }
    }
}

/// A lane: bits that were read from the tile, and the match whose distance comes next.
#[derive(Debug, Clone, Copy, Default)]
struct Lane {
    bits: u64,
    count: u32,
    length: u32,
    to: usize,
}

/// A tile's words, dealt to the lanes as these need them.
struct Lanes<'a> {
    words: &'a [[u8; 4]],
    next: usize,
    lanes: [Lane; LANES],
}

impl<'a> Lanes<'a> {
    fn new(words: &'a [[u8; 4]]) -> Lanes<'a> {
        let mut lanes = Lanes { words, next: 0, lanes: [Lane::default(); LANES] };
        (0..LANES).for_each(|lane| lanes.refill(lane));
        lanes
    }

    /// Gives the lane another word if it has fewer than 32 bits. Behind the end of the tile, words are zeros, and [`Lanes::check`] fails.
    #[inline(always)]
    fn refill(&mut self, lane: usize) {
        let lane = &mut self.lanes[lane % LANES];
        // Without a branch, because no processor could predict it.
        let needed = u32::from(lane.count < 32);
        let word = self.words.get(self.next).map_or(0, |word| u32::from_le_bytes(*word));
        lane.bits |= u64::from(word & needed.wrapping_neg()) << lane.count;
        lane.count += 32 * needed;
        self.next += needed as usize;
    }

    fn check(&self) -> Result<(), Reason> {
        if self.next > self.words.len() { Err(CUT_OFF) } else { Ok(()) }
    }

    /// Takes up to 31 bits of a lane, which had 32 or more after its last refill.
    #[inline(always)]
    fn take(&mut self, lane: usize, bits: u32) -> u32 {
        let lane = &mut self.lanes[lane % LANES];
        let taken = lane.bits as u32 & ((1 << bits) - 1);
        lane.bits >>= bits;
        lane.count -= bits;
        taken
    }
}

impl TileDecoder {
    /// Decodes a tile to `out`, which it must fill.
    pub fn decode(&mut self, tile: &[u8], out: &mut [u8]) -> Result<(), Reason> {
        let (words, []) = tile.as_chunks::<4>() else {
            return Err("its length is no multiple of 4");
        };
        let mut lanes = Lanes::new(words);
        let mut filled = 0;
        for _ in 0..BLOCKS {
            lanes.check()?;
            let last = lanes.take(0, 1) == 1;
            let kind = lanes.take(0, 2);
            lanes.refill(0);
            filled = match kind {
                0 => stored(&mut lanes, out, filled)?,
                1 => {
                    if !self.fill(&fixed_literal_lengths(), &[5; DISTANCES]) {
                        return Err(NO_CODE);
                    }
                    self.coded(&mut lanes, out, filled)?
                }
                2 => {
                    self.read_codes(&mut lanes)?;
                    self.coded(&mut lanes, out, filled)?
                }
                _ => return Err("a block is of no kind"),
            };
            if last {
                lanes.check()?;
                return if filled == out.len() { Ok(()) } else { Err(TOO_SHORT) };
            }
        }
        Err("it has too many blocks")
    }

    fn fill(&mut self, literals: &[u8], distances: &[u8]) -> bool {
        let literal_filled = self.literals.fill(literals, |symbol| match symbol {
            0..256 => Some(Entry::new(LITERAL, symbol as u16, 0)),
            256 => Some(Entry::new(END, 0, 0)),
            _ => LENGTHS.get(symbol - 257).map(|(value, extra)| Entry::new(MATCH, *value, *extra)),
        });
        let distances_filled = self.distances.fill(distances, |symbol| {
            let (value, extra) = distance_of(symbol);
            Some(Entry::new(MATCH, value, extra))
        });
        literal_filled && distances_filled
    }

    /// Reads the codes of a block that has its own.
    fn read_codes(&mut self, lanes: &mut Lanes<'_>) -> Result<(), Reason> {
        let literals = lanes.take(0, 5) as usize + 257;
        let distances = lanes.take(0, 5) as usize + 1;
        let stored = lanes.take(0, 4) as usize + 4;
        lanes.refill(0);
        if literals > LITERALS {
            return Err(NO_CODE);
        }
        let mut of_lengths = [0_u8; 19];
        for (lane, symbol) in LENGTH_ORDER.into_iter().enumerate().take(stored) {
            of_lengths[symbol] = lanes.take(lane, 3) as u8;
            lanes.refill(lane);
        }
        if !self.lengths.fill(&of_lengths, |symbol| Some(Entry::new(LITERAL, symbol as u16, 0))) {
            return Err(NO_CODE);
        }
        let mut lengths = [0_u8; LITERALS + DISTANCES];
        let (all, mut known, mut lane) = (literals + distances, 0, 0);
        while known < all {
            let entry = self.lengths.entry(lanes.lanes[lane].bits);
            if entry.bits() == 0 {
                return Err(NO_WORD);
            }
            lanes.take(lane, entry.bits());
            let (length, times) = match entry.value() {
                16 if known == 0 => return Err("its first code length repeats one"),
                16 => (lengths[known - 1], 3 + lanes.take(lane, 2)),
                17 => (0, 3 + lanes.take(lane, 3)),
                18 => (0, 11 + lanes.take(lane, 7)),
                length => (length as u8, 1),
            };
            let end = known + times as usize;
            if end > all {
                return Err("it has more code lengths than symbols");
            }
            lengths[known..end].fill(length);
            known = end;
            lanes.refill(lane);
            lane = (lane + 1) % LANES;
        }
        lanes.check()?;
        let (literals, distances) = lengths[..all].split_at(literals);
        if self.fill(literals, distances) { Ok(()) } else { Err(NO_CODE) }
    }

    /// Decodes a block with codes. Returns how many bytes of `out` are then filled.
    fn coded(
        &self,
        lanes: &mut Lanes<'_>,
        out: &mut [u8],
        mut filled: usize,
    ) -> Result<usize, Reason> {
        // Lanes with a match whose distance comes next.
        let mut open = 0_u32;
        'rounds: loop {
            lanes.check()?;
            for index in 0..LANES {
                let lane = &mut lanes.lanes[index];
                if open >> index & 1 == 1 {
                    self.finish(lane, out)?;
                    open &= !(1 << index);
                    lanes.refill(index);
                    continue;
                }
                let entry = self.literals.entry(lane.bits);
                let bits = entry.bits();
                if entry.kind() == LITERAL {
                    if bits == 0 {
                        return Err(NO_WORD);
                    }
                    *out.get_mut(filled).ok_or(TOO_LONG)? = entry.value() as u8;
                    filled += 1;
                    lane.bits >>= bits;
                    lane.count -= bits;
                } else if entry.kind() == MATCH {
                    let length = of_extra(lane, entry);
                    if length as usize > out.len() - filled {
                        return Err(TOO_LONG);
                    }
                    (lane.length, lane.to) = (length, filled);
                    filled += length as usize;
                    open |= 1 << index;
                } else {
                    lane.bits >>= bits;
                    lane.count -= bits;
                    lanes.refill(index);
                    // Distances that are left: first those of later lanes, from the round before.
                    for later in (index + 1..LANES).chain(0..index) {
                        if open >> later & 1 == 1 {
                            self.finish(&mut lanes.lanes[later], out)?;
                            lanes.refill(later);
                        }
                    }
                    break 'rounds;
                }
                lanes.refill(index);
            }
        }
        Ok(filled)
    }

    /// Reads a distance, and copies the match.
    #[inline(always)]
    fn finish(&self, lane: &mut Lane, out: &mut [u8]) -> Result<(), Reason> {
        let entry = self.distances.entry(lane.bits);
        if entry.bits() == 0 {
            return Err(NO_WORD);
        }
        let distance = of_extra(lane, entry) as usize;
        if distance > lane.to {
            return Err("a match begins before the tile");
        }
        copy(out, lane.to, distance, lane.length as usize);
        Ok(())
    }
}

/// Takes a code word and the extra bits behind it. Returns the value.
#[inline(always)]
fn of_extra(lane: &mut Lane, entry: Entry) -> u32 {
    let (bits, extra) = (entry.bits(), entry.extra());
    let more = (lane.bits >> bits) as u32 & ((1 << extra) - 1);
    lane.bits >>= bits + extra;
    lane.count -= bits + extra;
    entry.value() + more
}

/// Copies `length` bytes from `distance` bytes before `to`. The match may overlap itself. Bytes behind it are already filled.
#[inline(always)]
fn copy(out: &mut [u8], to: usize, distance: usize, length: usize) {
    let from = to - distance;
    if distance >= length {
        let (before, behind) = out.split_at_mut(to);
        let (source, target) = (&before[from..from + length], &mut behind[..length]);
        // Most matches are short, and a call would take longer than the copy.
        if length >= 32 {
            target.copy_from_slice(source);
        } else if let (Some((a, _)), Some((_, z))) =
            (source.split_first_chunk::<8>(), source.split_last_chunk::<8>())
        {
            let mut at = 0;
            while at + 8 < length {
                target[at..at + 8].copy_from_slice(if at == 0 { a } else { &source[at..at + 8] });
                at += 8;
            }
            target[length - 8..].copy_from_slice(z);
        } else {
            target.iter_mut().zip(source).for_each(|(target, source)| *target = *source);
        }
    } else if distance == 1 {
        let byte = out[from];
        out[to..to + length].fill(byte);
    } else {
        // What was copied can be copied again, so the pieces double.
        let mut done = 0;
        while done < length {
            let piece = (distance + done).min(length - done);
            out.copy_within(from..from + piece, to + done);
            done += piece;
        }
    }
}

/// Copies a stored block. Returns how many bytes of `out` are then filled.
fn stored(lanes: &mut Lanes<'_>, out: &mut [u8], filled: usize) -> Result<usize, Reason> {
    let bytes = lanes.take(0, 16) as usize;
    let target = out.get_mut(filled..filled + bytes).ok_or(TOO_LONG)?;
    for round in target.chunks_mut(LANES) {
        for (lane, byte) in round.iter_mut().enumerate() {
            *byte = lanes.take(lane, 8) as u8;
            lanes.refill(lane);
        }
        lanes.check()?;
    }
    // A block without bytes has not refilled the lane yet.
    lanes.refill(0);
    Ok(filled + bytes)
}
