//! Compact blocks in chunks of codec `exponents`: the exponents of their weights, and the bytes behind the weights.
//!
//! A weight of a block has four bits of code, three of them in a word, and eight other bits. The *nibble* of a weight is the four bits of its
//! word whose lower three are of its code. The fourth is the sign of another weight. Whatever the block, codes and other bits are coded
//! like exponents, and like sign and mantissa.

#[cfg(target_arch = "x86_64")]
use crate::compact::SELECT;
use crate::compact::{BASE_MAX, Coded, LANE, PIECE};
use crate::{CHUNK_WEIGHTS, CodecError, Compact};

/// Number of the nibble of each of the eight weights of a word, from the lowest bits on.
const NIBBLE: [u8; LANE] = [2, 6, 1, 5, 0, 4, 7, 3];

/// The weight of each nibble.
const OF_NIBBLE: [u8; LANE] = [4, 2, 0, 7, 5, 3, 1, 6];

/// Bytes of the mask of blocks whose ends are listed.
const MASK: usize = 2;

/// Most blocks of a chunk.
const BLOCKS: usize = CHUNK_WEIGHTS / Compact::C256.weights();
const _: () = assert!(BLOCKS <= 8 * MASK, "the mask has a bit for each block");

/// A byte for each weight of a piece.
pub(crate) type Piece = [u8; PIECE];

/// Returns the exponent of code 0 of a block whose lowest exponent is `base`. Only damaged blocks have one above [`BASE_MAX`].
#[inline(always)]
pub(crate) fn first_exponent(base: u8) -> u8 {
    base.min(BASE_MAX as u8)
}

/// The ends of the blocks of a chunk: a mask, lowest exponents, and ends that hold more than a lowest exponent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ends {
    of: Compact,
    blocks: usize,
    listed: u16,
}

impl Ends {
    /// Returns the bytes of the end of a block.
    const fn end_bytes(of: Compact) -> usize {
        of.bytes() - of.header()
    }

    /// Returns the most bytes that the ends of `blocks` blocks need.
    pub fn bytes_max(of: Compact, blocks: usize) -> usize {
        let listed = ((1_u32 << blocks) - 1) as u16;
        Ends { of, blocks, listed }.bytes()
    }

    pub fn bytes(self) -> usize {
        let list = self.listed.count_ones() as usize * Ends::end_bytes(self.of);
        (MASK + self.blocks).next_multiple_of(4) + list
    }

    /// Reads which of `blocks` blocks have listed ends, from the first bytes of all ends.
    ///
    /// # Errors
    /// Returns an error if there are no such bytes, or if the mask has other blocks.
    pub fn read(of: Compact, blocks: usize, ends: &[u8]) -> Result<Ends, CodecError> {
        let Some((mask, _)) = ends.split_first_chunk::<MASK>() else {
            return Err(CodecError::ChunkLength { bytes: ends.len(), needed: MASK });
        };
        let listed = u16::from_le_bytes(*mask);
        match u32::from(listed) >> blocks {
            0 => Ok(Ends { of, blocks, listed }),
            _ => Err(CodecError::NotZero),
        }
    }

    /// Appends the ends of blocks to `out`, as many bytes as [`Ends::bytes`] says.
    pub fn write(of: Compact, blocks: &[u8], out: &mut Vec<u8>) -> Ends {
        let all = || blocks.chunks_exact(of.bytes()).map(|block| &block[of.header()..]);
        let is_listed = |end: &[u8]| end[1..].iter().any(|byte| *byte != 0);
        let mut listed = 0;
        for (index, end) in all().enumerate() {
            listed |= u16::from(is_listed(end)) << index;
        }
        let start = out.len();
        out.extend(listed.to_le_bytes());
        out.extend(all().map(|end| end[0]));
        while !(out.len() - start).is_multiple_of(4) {
            out.push(0);
        }
        all().filter(|end| is_listed(end)).for_each(|end| out.extend(end));
        Ends { of, blocks: all().len(), listed }
    }

    /// Writes the end of block number `block` to `end`, and returns the exponent of its code 0. `ends` has the bytes of all.
    pub fn copy(self, block: usize, ends: &[u8], end: &mut [u8]) -> u8 {
        let base = ends[MASK + block];
        if self.listed >> block & 1 == 1 {
            let below = (self.listed & ((1_u16 << block) - 1)).count_ones() as usize;
            let list = &ends[(MASK + self.blocks).next_multiple_of(4)..];
            end.copy_from_slice(&list[below * end.len()..][..end.len()]);
        } else {
            end.fill(0);
            end[0] = base;
        }
        first_exponent(base)
    }
}

/// Takes a piece of a block apart: the exponents of the weights, without regard to exceptions, and their other bits. `first` is the exponent
/// of code 0.
#[inline(always)]
pub(crate) fn split_piece(piece: &Coded, first: u8, exponents: &mut Piece, rest: &mut Piece) {
    let first = u64::from(first) * 0x0101_0101_0101_0101;
    let (low, words) = piece.split_at(PIECE);
    let eights = low.as_chunks::<LANE>().0.iter().zip(words.as_chunks().0);
    let to = exponents.as_chunks_mut::<LANE>().0.iter_mut().zip(rest.as_chunks_mut::<LANE>().0);
    for ((low, word), (exponents, rest)) in eights.zip(to) {
        let (low, word) = (u64::from_le_bytes(*low), u32::from_le_bytes(*word));
        let nibbles = u64::from_le_bytes(NIBBLE.map(|at| (word >> (4 * at)) as u8 & 15));
        let codes = nibbles << 1 & 0x0e0e_0e0e_0e0e_0e0e | low >> 7 & 0x0101_0101_0101_0101;
        // No sum has more than eight bits.
        *exponents = (codes + first).to_le_bytes();
        let signs = nibbles << 4 & 0x8080_8080_8080_8080;
        *rest = (signs | low & 0x7f7f_7f7f_7f7f_7f7f).to_le_bytes();
    }
}

/// Does the same with AVX2.
///
/// # Safety
/// The processor must have AVX2, and the caller must be compiled for it.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn split_piece_avx2(
    piece: &Coded,
    first: u8,
    exponents: &mut Piece,
    rest: &mut Piece,
) {
    use std::arch::x86_64::*;
    let (low, words) = piece.split_at(PIECE);
    let parts = low.as_chunks::<32>().0.iter().zip(words.as_chunks::<16>().0);
    let to = exponents.as_chunks_mut::<32>().0.iter_mut().zip(rest.as_chunks_mut::<32>().0);
    // SAFETY: the processor has the instructions, as the caller promises. Reads and writes are within the arrays of 32 and 16 bytes.
    unsafe {
        let order = _mm256_set1_epi64x(i64::from_le_bytes(NIBBLE));
        let order = _mm256_add_epi8(order, _mm256_set_epi64x(EIGHTS, 0, EIGHTS, 0));
        let first = _mm256_set1_epi8(first as i8);
        for ((low, words), (exponents, rest)) in parts.zip(to) {
            let low = _mm256_loadu_si256(low.as_ptr().cast());
            // Two nibbles in each 16 bits, then one in each byte.
            let words = _mm256_cvtepu8_epi16(_mm_loadu_si128(words.as_ptr().cast()));
            let nibbles = _mm256_or_si256(words, _mm256_slli_epi16(words, 4));
            let nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
            let nibbles = _mm256_shuffle_epi8(nibbles, order);
            let upper = _mm256_and_si256(_mm256_slli_epi16(nibbles, 1), _mm256_set1_epi8(14));
            let lowest = _mm256_and_si256(_mm256_srli_epi16(low, 7), _mm256_set1_epi8(1));
            let codes = _mm256_add_epi8(_mm256_or_si256(upper, lowest), first);
            _mm256_storeu_si256(exponents.as_mut_ptr().cast(), codes);
            let signs = _mm256_and_si256(_mm256_slli_epi16(nibbles, 4), _mm256_set1_epi8(-128));
            let mantissas = _mm256_and_si256(low, _mm256_set1_epi8(0x7f));
            _mm256_storeu_si256(rest.as_mut_ptr().cast(), _mm256_or_si256(signs, mantissas));
        }
    }
}

/// Does the same with AVX-512.
///
/// # Safety
/// The processor must have AVX-512 F, BW and VL, and the caller must be compiled for them.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn split_piece_avx512(
    piece: &Coded,
    first: u8,
    exponents: &mut Piece,
    rest: &mut Piece,
) {
    use std::arch::x86_64::*;
    let (low, words) = piece.split_at(PIECE);
    let parts = low.as_chunks::<64>().0.iter().zip(words.as_chunks::<32>().0);
    let to = exponents.as_chunks_mut::<64>().0.iter_mut().zip(rest.as_chunks_mut::<64>().0);
    // SAFETY: the processor has the instructions, as the caller promises. Reads and writes are within the arrays of 64 and 32 bytes.
    unsafe {
        let order = _mm512_set1_epi64(i64::from_le_bytes(NIBBLE));
        let order =
            _mm512_add_epi8(order, _mm512_set_epi64(EIGHTS, 0, EIGHTS, 0, EIGHTS, 0, EIGHTS, 0));
        let first = _mm512_set1_epi8(first as i8);
        for ((low, words), (exponents, rest)) in parts.zip(to) {
            let low = _mm512_loadu_epi8(low.as_ptr().cast());
            // Two nibbles in each 16 bits, then one in each byte.
            let words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(words.as_ptr().cast()));
            let nibbles = _mm512_or_si512(words, _mm512_slli_epi16(words, 4));
            let nibbles = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
            let nibbles = _mm512_shuffle_epi8(nibbles, order);
            let (upper, lowest) = (_mm512_slli_epi16(nibbles, 1), _mm512_srli_epi16(low, 7));
            let lowest = _mm512_and_si512(lowest, _mm512_set1_epi8(1));
            let codes = _mm512_ternarylogic_epi64(_mm512_set1_epi8(14), upper, lowest, SELECT);
            _mm512_storeu_epi8(exponents.as_mut_ptr().cast(), _mm512_add_epi8(codes, first));
            let signs = _mm512_slli_epi16(nibbles, 4);
            let rests = _mm512_ternarylogic_epi64(_mm512_set1_epi8(-128), signs, low, SELECT);
            _mm512_storeu_epi8(rest.as_mut_ptr().cast(), rests);
        }
    }
}

/// Puts a piece together. Returns bits above the lowest four if an exponent is none of the sixteen from `first` on.
#[inline(always)]
pub(crate) fn join_piece(exponents: &Piece, rest: &Piece, first: u8, piece: &mut Coded) -> u8 {
    let (low, words) = piece.split_at_mut(PIECE);
    let places = low.as_chunks_mut::<LANE>().0.iter_mut().zip(words.as_chunks_mut().0);
    let eights = exponents.as_chunks::<LANE>().0.iter().zip(rest.as_chunks::<LANE>().0);
    let mut all = 0;
    for ((exponents, rest), (low, word)) in eights.zip(places) {
        let codes = u64::from_le_bytes(exponents.map(|exponent| exponent.wrapping_sub(first)));
        let rest = u64::from_le_bytes(*rest);
        all |= codes;
        let lowest = codes << 7 & 0x8080_8080_8080_8080;
        *low = (lowest | rest & 0x7f7f_7f7f_7f7f_7f7f).to_le_bytes();
        let nibbles = codes >> 1 & 0x0707_0707_0707_0707 | rest >> 4 & 0x0808_0808_0808_0808;
        let ordered = nibbles.to_le_bytes().into_iter().zip(NIBBLE);
        let joined = ordered.fold(0, |word, (nibble, at)| word | u32::from(nibble) << (4 * at));
        *word = joined.to_le_bytes();
    }
    all.to_le_bytes().into_iter().fold(0, |all, byte| all | byte)
}

/// Does the same with AVX2.
///
/// # Safety
/// The processor must have AVX2, and the caller must be compiled for it.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn join_piece_avx2(
    exponents: &Piece,
    rest: &Piece,
    first: u8,
    piece: &mut Coded,
) -> u8 {
    use std::arch::x86_64::*;
    let (low, words) = piece.split_at_mut(PIECE);
    let places = low.as_chunks_mut::<64>().0.iter_mut().zip(words.as_chunks_mut::<32>().0);
    let parts = exponents.as_chunks::<64>().0.iter().zip(rest.as_chunks::<64>().0);
    // SAFETY: the processor has the instructions, as the caller promises. Reads and writes are within the arrays of 64 and 32 bytes.
    unsafe {
        // Closures would not be compiled for AVX2.
        let order = _mm256_set1_epi64x(i64::from_le_bytes(OF_NIBBLE));
        let order = _mm256_add_epi8(order, _mm256_set_epi64x(EIGHTS, 0, EIGHTS, 0));
        let first = _mm256_set1_epi8(first as i8);
        let mut all = _mm256_setzero_si256();
        for ((exponents, rest), (low, words)) in parts.zip(places) {
            let mut pairs = [_mm256_setzero_si256(); 2];
            for (half, pairs) in pairs.iter_mut().enumerate() {
                let at = 32 * half;
                let exponents = _mm256_loadu_si256(exponents.as_ptr().add(at).cast());
                let codes = _mm256_sub_epi8(exponents, first);
                let rest = _mm256_loadu_si256(rest.as_ptr().add(at).cast());
                all = _mm256_or_si256(all, codes);
                let lowest = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi8(-128));
                let mantissas = _mm256_and_si256(rest, _mm256_set1_epi8(0x7f));
                let bytes = _mm256_or_si256(lowest, mantissas);
                _mm256_storeu_si256(low.as_mut_ptr().add(at).cast(), bytes);
                let signs = _mm256_and_si256(_mm256_srli_epi16(rest, 4), _mm256_set1_epi8(8));
                let upper = _mm256_and_si256(_mm256_srli_epi16(codes, 1), _mm256_set1_epi8(7));
                let ordered = _mm256_shuffle_epi8(_mm256_or_si256(signs, upper), order);
                // The lower nibble once, the upper 16 times.
                *pairs = _mm256_maddubs_epi16(ordered, _mm256_set1_epi16(0x1001));
            }
            let packed = _mm256_packus_epi16(pairs[0], pairs[1]);
            let packed = _mm256_permute4x64_epi64(packed, 0b1101_1000);
            _mm256_storeu_si256(words.as_mut_ptr().cast(), packed);
        }
        if _mm256_testz_si256(all, _mm256_set1_epi8(-16)) == 1 { 0 } else { 0xf0 }
    }
}

/// Added to an order of the lower eight bytes, gives that of the upper ones.
#[cfg(target_arch = "x86_64")]
const EIGHTS: i64 = 0x0808_0808_0808_0808;

/// Does the same with AVX-512.
///
/// # Safety
/// The processor must have AVX-512 F, BW and VL, and the caller must be compiled for them.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) unsafe fn join_piece_avx512(
    exponents: &Piece,
    rest: &Piece,
    first: u8,
    piece: &mut Coded,
) -> u8 {
    use std::arch::x86_64::*;
    let (low, words) = piece.split_at_mut(PIECE);
    let places = low.as_chunks_mut::<64>().0.iter_mut().zip(words.as_chunks_mut::<32>().0);
    let parts = exponents.as_chunks::<64>().0.iter().zip(rest.as_chunks::<64>().0);
    // SAFETY: the processor has the instructions, as the caller promises. Reads and writes are within the arrays of 64 and 32 bytes.
    unsafe {
        // Closures would not be compiled for AVX-512.
        let order = _mm512_set1_epi64(i64::from_le_bytes(OF_NIBBLE));
        let order =
            _mm512_add_epi8(order, _mm512_set_epi64(EIGHTS, 0, EIGHTS, 0, EIGHTS, 0, EIGHTS, 0));
        let first = _mm512_set1_epi8(first as i8);
        let mut all = _mm512_setzero_si512();
        for ((exponents, rest), (low, words)) in parts.zip(places) {
            let codes = _mm512_sub_epi8(_mm512_loadu_epi8(exponents.as_ptr().cast()), first);
            let rest = _mm512_loadu_epi8(rest.as_ptr().cast());
            all = _mm512_or_si512(all, codes);
            let lowest = _mm512_slli_epi16(codes, 7);
            let bytes = _mm512_ternarylogic_epi64(_mm512_set1_epi8(-128), lowest, rest, SELECT);
            _mm512_storeu_epi8(low.as_mut_ptr().cast(), bytes);
            let (signs, upper) = (_mm512_srli_epi16(rest, 4), _mm512_srli_epi16(codes, 1));
            let nibbles = _mm512_ternarylogic_epi64(_mm512_set1_epi8(8), signs, upper, SELECT);
            let ordered =
                _mm512_shuffle_epi8(_mm512_and_si512(nibbles, _mm512_set1_epi8(15)), order);
            // The lower nibble once, the upper 16 times.
            let pairs = _mm512_maddubs_epi16(ordered, _mm512_set1_epi16(0x1001));
            _mm256_storeu_epi8(words.as_mut_ptr().cast(), _mm512_cvtepi16_epi8(pairs));
        }
        if _mm512_test_epi8_mask(all, _mm512_set1_epi8(-16)) == 0 { 0 } else { 0xf0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compact::PIECE_BYTES;

    #[test]
    fn nibbles_and_weights_agree() {
        for (weight, nibble) in NIBBLE.into_iter().enumerate() {
            assert_eq!(usize::from(OF_NIBBLE[usize::from(nibble)]), weight);
        }
    }

    /// Any piece is its parts, with any base.
    #[test]
    fn pieces_come_back() {
        let mut random = fastrand::Rng::with_seed(4);
        for base in [0, 1, 100, 239, 240, 241, 255] {
            let mut block = vec![0; Compact::C256.bytes()];
            random.fill(&mut block);
            block[Compact::C256.header()] = base;
            let (mut exponents, mut rest) = ([0; PIECE], [0; PIECE]);
            let coded = block.first_chunk().unwrap();
            split_piece(coded, first_exponent(base), &mut exponents, &mut rest);
            #[cfg(target_arch = "x86_64")]
            for (isa, wide) in SPLIT.into_iter().filter(|(isa, _)| isa.is_available()) {
                let mut same = ([0; PIECE], [0; PIECE]);
                // SAFETY: the processor has the instructions.
                unsafe { wide(coded, first_exponent(base), &mut same.0, &mut same.1) };
                assert_eq!(same, (exponents, rest), "{isa:?}");
            }
            for other in [0_u8, 1] {
                let first = first_exponent(base).wrapping_sub(other);
                let mut piece = [0; PIECE_BYTES];
                let all = join_piece(&exponents, &rest, first, &mut piece);
                if other == 0 {
                    assert_eq!((&piece[..], all & 0xf0), (&block[..PIECE_BYTES], 0));
                } else {
                    assert!(all & 0xf0 != 0, "code 15 is beyond the window");
                }
                #[cfg(target_arch = "x86_64")]
                for (isa, wide) in WIDE.into_iter().filter(|(isa, _)| isa.is_available()) {
                    let mut same = [0; PIECE_BYTES];
                    // SAFETY: the processor has the instructions.
                    let found = unsafe { wide(&exponents, &rest, first, &mut same) };
                    assert_eq!((same, found & 0xf0 == 0), (piece, all & 0xf0 == 0), "{isa:?}");
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    type Join = unsafe fn(&Piece, &Piece, u8, &mut Coded) -> u8;

    #[cfg(target_arch = "x86_64")]
    const WIDE: [(crate::Isa, Join); 2] =
        [(crate::Isa::Avx2, join_avx2), (crate::Isa::Avx512, join_avx512)];

    #[cfg(target_arch = "x86_64")]
    type Split = unsafe fn(&Coded, u8, &mut Piece, &mut Piece);

    #[cfg(target_arch = "x86_64")]
    const SPLIT: [(crate::Isa, Split); 2] =
        [(crate::Isa::Avx2, split_avx2), (crate::Isa::Avx512, split_avx512)];

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn split_avx2(piece: &Coded, first: u8, exponents: &mut Piece, rest: &mut Piece) {
        // SAFETY: this function is compiled for AVX2.
        unsafe { split_piece_avx2(piece, first, exponents, rest) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn split_avx512(piece: &Coded, first: u8, exponents: &mut Piece, rest: &mut Piece) {
        // SAFETY: this function is compiled for AVX-512.
        unsafe { split_piece_avx512(piece, first, exponents, rest) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn join_avx2(exponents: &Piece, rest: &Piece, first: u8, piece: &mut Coded) -> u8 {
        // SAFETY: this function is compiled for AVX2.
        unsafe { join_piece_avx2(exponents, rest, first, piece) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn join_avx512(exponents: &Piece, rest: &Piece, first: u8, piece: &mut Coded) -> u8 {
        // SAFETY: this function is compiled for AVX-512.
        unsafe { join_piece_avx512(exponents, rest, first, piece) }
    }
}
