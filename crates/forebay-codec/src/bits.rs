//! Bitmaps and bytes, eight items at a time. Item 0 is the lowest bit, and the lowest byte of a word.

const ONES: u64 = 0x0101_0101_0101_0101;

/// Returns word number `index` of a table of words of 32 bits, or 0 behind its end.
pub(crate) fn table_word(table: &[u8], index: usize) -> usize {
    table.as_chunks().0.get(index).map_or(0, |word| u32::from_le_bytes(*word) as usize)
}

/// Returns eight bytes that are 0xff where `bits` has a one, and 0 elsewhere.
#[inline(always)]
pub(crate) fn spread(bits: u8) -> u64 {
    // Byte i keeps bit i, and becomes 0x80 if that is set.
    let own = (u64::from(bits) * ONES) & 0x8040_2010_0804_0201;
    let set = (own + 0x7f7f_7f7f_7f7f_7f7f) & (0x80 * ONES);
    (set >> 7) * 0xff
}

/// Returns the lowest bits of eight bytes.
#[inline(always)]
pub(crate) fn gather(bytes: u64) -> u8 {
    ((bytes & ONES).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8
}

/// Moves bytes within a word of eight.
pub(crate) trait Moves {
    /// Says that the processor has AVX2, and that all code that uses the type is compiled for it.
    const HAS_AVX2: bool;

    /// Returns the lowest bytes of `next`, in order, where `mask` has 0xff, and 0 where it has 0.
    fn expand(next: u64, mask: u64) -> u64;
}

/// One byte after the other.
pub(crate) struct ByByte;

impl Moves for ByByte {
    const HAS_AVX2: bool = false;

    #[inline(always)]
    fn expand(next: u64, mask: u64) -> u64 {
        let (mut next, mut left, mut out) = (next, mask, 0);
        while left != 0 {
            let at = left.trailing_zeros();
            out |= (next & 0xff) << at;
            next >>= 8;
            left &= !(0xff << at);
        }
        out
    }
}

/// With instructions of BMI2. Only functions that are compiled for BMI2 and AVX2 may use this.
#[cfg(target_arch = "x86_64")]
pub(crate) struct ByBmi2;

#[cfg(target_arch = "x86_64")]
impl Moves for ByBmi2 {
    const HAS_AVX2: bool = true;

    #[inline(always)]
    fn expand(next: u64, mask: u64) -> u64 {
        // SAFETY: the processor has this instruction, as the type says.
        unsafe { std::arch::x86_64::_pdep_u64(next, mask) }
    }
}

/// Returns eight bytes that are 0x80 where `word` has the byte `byte`, and 0 elsewhere.
#[inline(always)]
pub(crate) fn equal(word: u64, byte: u8) -> u64 {
    const LOW: u64 = 0x7f * ONES;
    let other = word ^ (u64::from(byte) * ONES);
    !(((other & LOW) + LOW) | other) & !LOW
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_become_bytes_and_back() {
        for bits in 0..=255_u8 {
            let bytes = spread(bits);
            for (item, byte) in bytes.to_le_bytes().into_iter().enumerate() {
                assert_eq!(byte, if bits >> item & 1 == 1 { 255 } else { 0 });
            }
            assert_eq!(gather(bytes), bits);
            assert_eq!(gather(bytes & 0x0303_0303_0303_0303), bits);
        }
    }

    #[test]
    fn bytes_move() {
        let mut random = fastrand::Rng::with_seed(1);
        for bits in 0..=255_u8 {
            let (word, mask) = (random.u64(..), spread(bits));
            let mut next = word.to_le_bytes().into_iter();
            let expanded =
                mask.to_le_bytes().map(|of| if of > 0 { next.next().unwrap() } else { 0 });
            assert_eq!(ByByte::expand(word, mask).to_le_bytes(), expanded);
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("bmi2") {
                assert_eq!(ByBmi2::expand(word, mask).to_le_bytes(), expanded);
            }
            let byte = (word >> 16) as u8;
            for (own, found) in word.to_le_bytes().into_iter().zip(equal(word, byte).to_le_bytes())
            {
                assert_eq!(found, if own == byte { 0x80 } else { 0 });
            }
        }
    }
}
