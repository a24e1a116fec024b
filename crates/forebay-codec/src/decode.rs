//! Decoding of chunks: the same result on every processor.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use crate::bits::ByBmi2;
use crate::bits::{ByByte, Moves, spread};
use crate::blocks::{Ends, Piece, join_piece};
#[cfg(target_arch = "x86_64")]
use crate::blocks::{join_piece_avx2, join_piece_avx512};
use crate::compact::{Coded, PIECE, PIECE_BYTES};
use crate::layout::{HEADER, Header, Layout, bitmap_bytes};
use crate::steps::{Bytes, NO_BYTES};
use crate::table::{CODES, SECOND, THIRD};
use crate::{CodecError, Compact, Float, Isa, Table, Weights};

/// Decodes one chunk to `decoded`, whose length says how many weights it has.
///
/// # Errors
/// Returns an error if `decoded` has no whole weights or blocks, too many or none, or if the chunk is not one of so many weights.
/// `decoded` then holds anything.
pub fn decode_chunk(
    weights: impl Into<Weights>,
    table: &Table,
    chunk: &[u8],
    decoded: &mut [u8],
) -> Result<(), CodecError> {
    decode_chunk_with(Isa::best(), weights, table, chunk, decoded)
}

/// Decodes like [`decode_chunk`] with the instructions of `isa`.
///
/// # Errors
/// Returns the errors of [`decode_chunk`].
///
/// # Panics
/// Panics if the processor has no such instructions.
pub fn decode_chunk_with(
    isa: Isa,
    weights: impl Into<Weights>,
    table: &Table,
    chunk: &[u8],
    decoded: &mut [u8],
) -> Result<(), CodecError> {
    assert!(isa.is_available(), "{isa:?} on a processor without it");
    let weights = weights.into();
    let count = weights.in_chunk(decoded.len())?;
    let header = Header::read(chunk)?;
    let blocks = match weights {
        Weights::Plain(float) => Blocks::None(float),
        Weights::Compact(of) => {
            Blocks::Compact(of, Ends::read(of, count / of.weights(), &chunk[HEADER..])?)
        }
    };
    let ends = if let Blocks::Compact(_, ends) = blocks { ends.bytes() } else { 0 };
    let layout = Layout::of(weights, count, ends, header.follow);
    if chunk.len() != layout.bytes() {
        return Err(CodecError::ChunkLength { bytes: chunk.len(), needed: layout.bytes() });
    }
    let exponents = table.exponents(header.base);
    let parts = Parts { blocks, count, header, layout, chunk, exponents };
    match isa {
        Isa::Portable => parts.decode::<Eights<ByByte>>(decoded),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the check above.
        Isa::Avx2 => unsafe { decode_avx2(&parts, decoded) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions, by the check above.
        Isa::Avx512 => unsafe { decode_avx512(&parts, decoded) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("it is not available"),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
fn decode_avx2(parts: &Parts<'_>, decoded: &mut [u8]) -> Result<(), CodecError> {
    parts.decode::<Eights<ByBmi2>>(decoded)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
fn decode_avx512(parts: &Parts<'_>, decoded: &mut [u8]) -> Result<(), CodecError> {
    parts.decode::<Avx512>(decoded)
}

/// Bitmaps to bytes.
trait Fill {
    /// Writes a byte for each of `count` items to `out`: `of[code]` for the codes 0 to 2 in the bitmaps `low` and `high`, and the
    /// next of `escaped` for code 3. `escaped` has as many bytes as there are such codes, and 64 more.
    fn codes(low: &[u8], high: &[u8], of: [u8; 3], escaped: &[u8], out: &mut [u8]);

    /// Adds `1 << bit` to a byte of `out` for every one in `bitmap`.
    fn add_bit(bitmap: &[u8], bit: usize, out: &mut [u8]);

    /// Puts a piece of a compact block together, like [`join_piece`].
    fn piece(exponents: &Piece, rest: &Piece, first: u8, piece: &mut Coded) -> u8;
}

/// Fills eight bytes at a time.
struct Eights<M>(std::marker::PhantomData<M>);

impl<M: Moves> Fill for Eights<M> {
    #[inline(always)]
    fn codes(low: &[u8], high: &[u8], of: [u8; 3], escaped: &[u8], out: &mut [u8]) {
        let of = of.map(|byte| u64::from(byte) * 0x0101_0101_0101_0101);
        let mut at = 0;
        let eights = out.as_chunks_mut::<8>().0;
        for ((low, high), out) in low.iter().zip(high).zip(eights) {
            let (l, h) = (spread(*low), spread(*high));
            let next = escaped[at..].first_chunk::<8>().map_or(0, |next| u64::from_le_bytes(*next));
            let codes = !(l | h) & of[0] | l & !h & of[1] | h & !l & of[2];
            *out = (codes | M::expand(next, l & h)).to_le_bytes();
            at += (low & high).count_ones() as usize;
        }
    }

    #[inline(always)]
    fn add_bit(bitmap: &[u8], bit: usize, out: &mut [u8]) {
        let of = 0x0101_0101_0101_0101_u64 << bit;
        for (bits, out) in bitmap.iter().zip(out.as_chunks_mut::<8>().0) {
            *out = (u64::from_le_bytes(*out) | spread(*bits) & of).to_le_bytes();
        }
    }

    #[inline(always)]
    fn piece(exponents: &Piece, rest: &Piece, first: u8, piece: &mut Coded) -> u8 {
        #[cfg(target_arch = "x86_64")]
        if M::HAS_AVX2 {
            // SAFETY: the type says that the processor has AVX2, and that only functions compiled for it use the type.
            return unsafe { join_piece_avx2(exponents, rest, first, piece) };
        }
        join_piece(exponents, rest, first, piece)
    }
}

#[cfg(target_arch = "x86_64")]
struct Avx512;

#[cfg(target_arch = "x86_64")]
impl Fill for Avx512 {
    #[inline(always)]
    fn codes(low: &[u8], high: &[u8], of: [u8; 3], escaped: &[u8], out: &mut [u8]) {
        use std::arch::x86_64::*;
        let mut at = 0;
        let words = out.as_chunks_mut::<64>().0.iter_mut();
        for (index, out) in words.enumerate().take(low.len().div_ceil(8)) {
            let (l, h) = (word_at(low, index), word_at(high, index));
            let left = &escaped[at..at + 64];
            // SAFETY: only `decode_avx512` calls this, on a processor with these instructions. 64 bytes are read from `left` at
            // most, and 64 written to `out`.
            unsafe {
                let [a, b, c] = of.map(|byte| _mm512_set1_epi8(byte as i8));
                let codes = _mm512_mask_mov_epi8(_mm512_mask_mov_epi8(a, l, b), h, c);
                let next = _mm512_loadu_epi8(left.as_ptr().cast());
                let all = _mm512_mask_expand_epi8(codes, l & h, next);
                _mm512_storeu_epi8(out.as_mut_ptr().cast(), all);
            }
            at += (l & h).count_ones() as usize;
        }
    }

    #[inline(always)]
    fn add_bit(bitmap: &[u8], bit: usize, out: &mut [u8]) {
        use std::arch::x86_64::*;
        let words = out.as_chunks_mut::<64>().0.iter_mut();
        for (index, out) in words.enumerate().take(bitmap.len().div_ceil(8)) {
            let bits = word_at(bitmap, index);
            // SAFETY: only `decode_avx512` calls this, on a processor with these instructions. 64 bytes of `out` are read and written.
            unsafe {
                let add = _mm512_maskz_set1_epi8(bits, 1 << bit);
                let from = _mm512_loadu_epi8(out.as_ptr().cast());
                _mm512_storeu_epi8(out.as_mut_ptr().cast(), _mm512_or_si512(from, add));
            }
        }
    }

    #[inline(always)]
    fn piece(exponents: &Piece, rest: &Piece, first: u8, piece: &mut Coded) -> u8 {
        // SAFETY: only `decode_avx512` calls this, on a processor with these instructions.
        unsafe { join_piece_avx512(exponents, rest, first, piece) }
    }
}

/// Returns bits `64 * index ..` of a bitmap; those beyond its end are 0.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn word_at(bitmap: &[u8], index: usize) -> u64 {
    match bitmap[8 * index..].first_chunk::<8>() {
        Some(word) => u64::from_le_bytes(*word),
        None => {
            let mut word = [0; 8];
            let rest = &bitmap[8 * index..];
            word[..rest.len()].copy_from_slice(rest);
            u64::from_le_bytes(word)
        }
    }
}

/// What the weights of a chunk are.
#[derive(Clone, Copy)]
enum Blocks {
    /// Numbers of a type.
    None(Float),
    /// Compact blocks.
    Compact(Compact, Ends),
}

/// A chunk with its parts.
struct Parts<'a> {
    blocks: Blocks,
    count: usize,
    header: Header,
    layout: Layout,
    chunk: &'a [u8],
    exponents: [u8; CODES],
}

impl<'a> Parts<'a> {
    /// Returns bitmap number `number` of a part with bitmaps of `items` items.
    #[inline(always)]
    fn bitmap(&self, part: &Range<usize>, items: usize, number: usize) -> &'a [u8] {
        let bytes = bitmap_bytes(items);
        &self.chunk[part.clone()][number * bytes..][..bytes]
    }

    #[inline(always)]
    fn decode<F: Fill>(&self, decoded: &mut [u8]) -> Result<(), CodecError> {
        let (layout, [second, third, raw]) = (&self.layout, self.header.follow);
        let bitmap = |part, items, number| self.bitmap(part, items, number);
        let (low, high) =
            (bitmap(&layout.first, self.count, 0), bitmap(&layout.first, self.count, 1));
        expect(second, both(low, high))?;
        let (second_low, second_high) =
            (bitmap(&layout.second, second, 0), bitmap(&layout.second, second, 1));
        expect(third, both(second_low, second_high))?;

        // Exponents of the last level first, because each level takes those of the next.
        let mut of_third = NO_BYTES;
        for bit in 0..4 {
            F::add_bit(bitmap(&layout.third, third, bit), bit, &mut of_third);
        }
        let mut known = [0; 16];
        known[..15].copy_from_slice(&self.exponents[THIRD..]);
        let mut raws = self.chunk[layout.raw.clone()][..raw].iter();
        let mut found = 0;
        for byte in &mut of_third[..third] {
            let code = *byte & 15;
            *byte = known[usize::from(code)];
            if code == 15 {
                found += 1;
                *byte = raws.next().copied().unwrap_or(0);
            }
        }
        expect(raw, found)?;
        let [a, b, c] = [0, 1, 2].map(|code| self.exponents[SECOND + code]);
        let mut of_second = NO_BYTES;
        F::codes(second_low, second_high, [a, b, c], &of_third, &mut of_second);
        let [a, b, c] = [0, 1, 2].map(|code| self.exponents[code]);
        let mut exponents = NO_BYTES;
        F::codes(low, high, [a, b, c], &of_second, &mut exponents);
        match self.blocks {
            Blocks::None(float) => self.join::<F>(float, &exponents, decoded),
            Blocks::Compact(of, ends) => self.join_blocks::<F>(of, ends, &exponents, decoded),
        }
    }

    /// Puts numbers together.
    #[inline(always)]
    fn join<F: Fill>(
        &self,
        float: Float,
        exponents: &Bytes,
        decoded: &mut [u8],
    ) -> Result<(), CodecError> {
        let most = ((1_u16 << float.exponent_bits()) - 1) as u8;
        let largest = match most {
            u8::MAX => 0,
            _ => exponents[..self.count].iter().copied().max().unwrap_or(0),
        };
        if largest > most {
            let exponents = 1 << float.exponent_bits();
            return Err(CodecError::Exponent { exponent: largest, exponents });
        }
        let mut bits = NO_BYTES;
        for number in 0..float.rest_bits() as usize % 8 {
            let bitmap = self.bitmap(&self.layout.rest_bits, self.count, number);
            F::add_bit(bitmap, number, &mut bits);
        }
        let bytes = &self.chunk[self.layout.rest_bytes.clone()];
        match float {
            Float::Bf16 => join_two(Float::Bf16, decoded, exponents, |i| u16::from(bytes[i])),
            Float::F16 => join_two(Float::F16, decoded, exponents, |i| {
                u16::from(bytes[i]) | u16::from(bits[i]) << 8
            }),
            Float::F8E4M3 => join_one(Float::F8E4M3, decoded, exponents, &bits),
            Float::F8E5M2 => join_one(Float::F8E5M2, decoded, exponents, &bits),
        }
        Ok(())
    }

    /// Puts compact blocks together.
    #[inline(always)]
    fn join_blocks<F: Fill>(
        &self,
        of: Compact,
        ends: Ends,
        exponents: &Bytes,
        decoded: &mut [u8],
    ) -> Result<(), CodecError> {
        let listed = &self.chunk[self.layout.ends.clone()];
        let rest = self.chunk[self.layout.rest_bytes.clone()].as_chunks::<PIECE>().0.iter();
        let mut parts = exponents.as_chunks::<PIECE>().0.iter().zip(rest);
        for (index, block) in decoded.chunks_exact_mut(of.bytes()).enumerate() {
            let (pieces, end) = block.split_at_mut(of.header());
            let first = ends.copy(index, listed, end);
            let mut all = 0;
            let pieces = pieces.as_chunks_mut::<PIECE_BYTES>().0.iter_mut();
            for (piece, (exponents, rest)) in pieces.zip(&mut parts) {
                all |= F::piece(exponents, rest, first, piece);
            }
            if all > 15 {
                return Err(CodecError::Window { block: index });
            }
        }
        Ok(())
    }
}

/// Puts weights of two bytes together.
#[inline(always)]
fn join_two(float: Float, weights: &mut [u8], exponents: &Bytes, rest: impl Fn(usize) -> u16) {
    for (index, weight) in weights.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        *weight = float.join(exponents[index], rest(index)).to_le_bytes();
    }
}

/// Puts weights of one byte together.
#[inline(always)]
fn join_one(float: Float, weights: &mut [u8], exponents: &Bytes, rest: &Bytes) {
    for ((weight, exponent), rest) in weights.iter_mut().zip(exponents).zip(rest) {
        *weight = float.join(*exponent, u16::from(*rest)) as u8;
    }
}

/// Returns the number of items whose code is 3.
#[inline(always)]
fn both(low: &[u8], high: &[u8]) -> usize {
    let (low_words, low_rest) = low.as_chunks::<8>();
    let (high_words, high_rest) = high.as_chunks::<8>();
    let words = low_words.iter().zip(high_words);
    let of_words: u32 = words
        .map(|(low, high)| (u64::from_le_bytes(*low) & u64::from_le_bytes(*high)).count_ones())
        .sum();
    let of_rest: u32 = low_rest.iter().zip(high_rest).map(|(l, h)| (l & h).count_ones()).sum();
    (of_words + of_rest) as usize
}

fn expect(counted: usize, found: usize) -> Result<(), CodecError> {
    if counted == found { Ok(()) } else { Err(CodecError::Counts { counted, found }) }
}
