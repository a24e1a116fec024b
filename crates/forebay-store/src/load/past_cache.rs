//! Copies with non-temporal stores, for memory that is not read soon. The destination need not be fetched into the
//! CPU cache first, and does not push the ring out of it. Reading is the bottleneck, so computing a checksum during
//! the copy costs almost nothing.

use forebay_format::pack::checksum;

/// Copies bytes past the CPU cache.
///
/// # Panics
/// Panics if the lengths differ.
pub fn copy(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy has one length");
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        let head = to.as_ptr().align_offset(x86::ALIGNMENT).min(to.len());
        let (to_head, to) = to.split_at_mut(head);
        let (from_head, from) = from.split_at(head);
        to_head.copy_from_slice(from_head);
        let whole = to.len() / x86::STRIPE * x86::STRIPE;
        to[whole..].copy_from_slice(&from[whole..]);
        if whole > 0 {
            // SAFETY: the CPU has AVX2, as checked above.
            unsafe { x86::copy(&mut to[..whole], &from[..whole]) };
        }
        return;
    }
    to.copy_from_slice(from);
}

/// Copies bytes past the CPU cache and returns their [`checksum`].
///
/// # Panics
/// Panics if the lengths differ.
pub(super) fn copy_with_checksum(to: &mut [u8], from: &[u8]) -> u64 {
    assert_eq!(to.len(), from.len(), "a copy has one length");
    #[cfg(target_arch = "x86_64")]
    if from.len() > x86::SHORT
        && to.as_ptr().addr().is_multiple_of(x86::ALIGNMENT)
        && std::arch::is_x86_feature_detected!("avx2")
    {
        // SAFETY: the CPU has AVX2, as checked above.
        return unsafe { x86::copy_with_checksum(to, from) };
    }
    copy(to, from);
    checksum(from)
}

/// XXH3-64 for long inputs, computed in the same pass as the copy, with seed 0 and the default secret. It follows the
/// xxHash specification (doc/xxhash_spec.md, version 0.2.0, "Long inputs").
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_add_epi64, _mm256_loadu_si256,
        _mm256_mul_epu32, _mm256_set1_epi32, _mm256_shuffle_epi32, _mm256_slli_epi64,
        _mm256_srli_epi64, _mm256_storeu_si256, _mm256_stream_si256, _mm256_xor_si256,
    };

    /// Address alignment in bytes that non-temporal stores need.
    pub const ALIGNMENT: usize = 32;
    /// Number of bytes that one step of either copy handles.
    pub const STRIPE: usize = 64;
    /// Longest input, in bytes, for which XXH3 uses a different algorithm.
    pub const SHORT: usize = 240;
    /// Bytes of the stripes between two scrambles. Each stripe uses the secret 8 bytes further on, until its end.
    const BLOCK: usize = (SECRET.len() - STRIPE) / 8 * STRIPE;
    /// Prefetch distance in bytes. It is needed because the hardware prefetcher stops at the end of a page.
    const AHEAD: usize = 2048;

    const PRIME32: [u64; 3] = [0x9E37_79B1, 0x85EB_CA77, 0xC2B2_AE3D];
    const PRIME64: [u64; 5] = [
        0x9E37_79B1_85EB_CA87,
        0xC2B2_AE3D_27D4_EB4F,
        0x1656_67B1_9E37_79F9,
        0x85EB_CA77_C2B2_AE63,
        0x27D4_EB2F_1656_67C5,
    ];
    #[rustfmt::skip]
    const SECRET: [u8; 192] = [
        0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
        0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
        0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
        0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
        0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
        0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
        0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
        0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
        0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
        0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
        0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
        0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
    ];

    /// # Panics
    /// Panics if the lengths differ or are not a whole number of stripes, or if `to` is not aligned.
    #[target_feature(enable = "avx2")]
    pub fn copy(to: &mut [u8], from: &[u8]) {
        assert!(to.len() == from.len() && from.len().is_multiple_of(STRIPE));
        assert!(to.as_ptr().addr().is_multiple_of(ALIGNMENT));
        for (to, from) in to.chunks_exact_mut(STRIPE).zip(from.chunks_exact(STRIPE)) {
            move_stripe(to, from);
        }
        // Non-temporal stores are weakly ordered: other threads must see them before any later store.
        _mm_sfence();
    }

    /// Copies a stripe and returns its bytes.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn move_stripe(to: &mut [u8], from: &[u8]) -> [__m256i; 2] {
        let ahead = from.as_ptr().wrapping_add(AHEAD);
        let halves = [load(&from[..32]), load(&from[32..64])];
        // SAFETY: a prefetch accesses no memory, so its address may be out of bounds. Both callers have checked that
        // `to` is aligned, and it has the 64 bytes of a stripe.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
            _mm256_stream_si256(to.as_mut_ptr().cast(), halves[0]);
            _mm256_stream_si256(to.as_mut_ptr().add(32).cast(), halves[1]);
        }
        halves
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn load(bytes: &[u8]) -> __m256i {
        assert!(bytes.len() >= 32);
        // SAFETY: the assertion above guarantees 32 readable bytes, and the load needs no alignment.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    }

    /// # Panics
    /// Panics if the lengths differ or are at most 240, or if `to` is not aligned.
    #[target_feature(enable = "avx2")]
    pub fn copy_with_checksum(to: &mut [u8], from: &[u8]) -> u64 {
        assert!(to.len() == from.len() && from.len() > SHORT);
        assert!(to.as_ptr().addr().is_multiple_of(ALIGNMENT));
        let start: [u64; 8] = [
            PRIME32[2], PRIME64[0], PRIME64[1], PRIME64[2], PRIME64[3], PRIME32[1], PRIME64[4],
            PRIME32[0],
        ];
        // SAFETY: eight 64-bit numbers are exactly two vectors, and the loads need no alignment.
        let mut sums = unsafe {
            let start = start.as_ptr().cast::<__m256i>();
            [_mm256_loadu_si256(start), _mm256_loadu_si256(start.add(1))]
        };
        // The last stripe ends where the input ends and may overlap the one before. It never completes a block.
        let blocks = (from.len() - 1) / BLOCK;
        let (from_blocks, from_rest) = from.split_at(blocks * BLOCK);
        let (to_blocks, to_rest) = to.split_at_mut(blocks * BLOCK);
        for (to, from) in to_blocks.chunks_exact_mut(BLOCK).zip(from_blocks.chunks_exact(BLOCK)) {
            let stripes = to.chunks_exact_mut(STRIPE).zip(from.chunks_exact(STRIPE));
            for (index, (to, from)) in stripes.enumerate() {
                let bytes = move_stripe(to, from);
                take(&mut sums, bytes, &SECRET[8 * index..]);
            }
            scramble(&mut sums);
        }
        let whole = (from_rest.len() - 1) / STRIPE * STRIPE;
        let (to_stripes, to_tail) = to_rest.split_at_mut(whole);
        let stripes = to_stripes.chunks_exact_mut(STRIPE).zip(from_rest.chunks_exact(STRIPE));
        for (index, (to, from)) in stripes.enumerate() {
            let bytes = move_stripe(to, from);
            take(&mut sums, bytes, &SECRET[8 * index..]);
        }
        to_tail.copy_from_slice(&from_rest[whole..]);
        let last = &from[from.len() - STRIPE..];
        take(&mut sums, [load(last), load(&last[32..])], &SECRET[SECRET.len() - STRIPE - 7..]);
        // Non-temporal stores are weakly ordered: other threads must see them before any later store.
        _mm_sfence();
        merge(&sums, from.len() as u64)
    }

    /// Accumulates a stripe into the sums.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn take(sums: &mut [__m256i; 2], stripe: [__m256i; 2], secret: &[u8]) {
        let keys = [load(secret), load(&secret[32..])];
        for ((sum, bytes), key) in sums.iter_mut().zip(stripe).zip(keys) {
            let keyed = _mm256_xor_si256(bytes, key);
            let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed));
            let swapped = _mm256_shuffle_epi32::<0b01_00_11_10>(bytes);
            *sum = _mm256_add_epi64(product, _mm256_add_epi64(*sum, swapped));
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn scramble(sums: &mut [__m256i; 2]) {
        let secret = &SECRET[SECRET.len() - STRIPE..];
        let prime = _mm256_set1_epi32(PRIME32[0] as i32);
        for (sum, key) in sums.iter_mut().zip([load(secret), load(&secret[32..])]) {
            let mixed = _mm256_xor_si256(*sum, _mm256_srli_epi64::<47>(*sum));
            let keyed = _mm256_xor_si256(mixed, key);
            let low = _mm256_mul_epu32(keyed, prime);
            let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(keyed), prime);
            *sum = _mm256_add_epi64(low, _mm256_slli_epi64::<32>(high));
        }
    }

    #[target_feature(enable = "avx2")]
    fn merge(sums: &[__m256i; 2], length: u64) -> u64 {
        let mut numbers = [0_u64; 8];
        for (four, sum) in numbers.chunks_exact_mut(4).zip(sums) {
            // SAFETY: four 64-bit numbers are 32 writable bytes, and the store needs no alignment.
            unsafe { _mm256_storeu_si256(four.as_mut_ptr().cast(), *sum) };
        }
        let key = |at: usize| {
            let bytes = SECRET[at..].first_chunk().expect("the secret has 192 bytes");
            u64::from_le_bytes(*bytes)
        };
        let mut result = length.wrapping_mul(PRIME64[0]);
        for (index, pair) in numbers.chunks_exact(2).enumerate() {
            let at = 11 + 16 * index;
            let wide = u128::from(pair[0] ^ key(at)) * u128::from(pair[1] ^ key(at + 8));
            result = result.wrapping_add(wide as u64 ^ (wide >> 64) as u64);
        }
        result ^= result >> 37;
        result = result.wrapping_mul(0x1656_6791_9E37_79F9);
        result ^ (result >> 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_every_length_and_alignment_are_exact() {
        let from: Vec<u8> = (0..400).map(|i| (i * 7 % 251) as u8).collect();
        for start in 0..40 {
            for length in (0..300).step_by(7) {
                let mut to = vec![255; 400];
                copy(&mut to[start..start + length], &from[3..3 + length]);
                assert_eq!(to[start..start + length], from[3..3 + length]);
                assert!(to[..start].iter().chain(&to[start + length..]).all(|&byte| byte == 255));
            }
        }
    }

    #[test]
    fn checksums_on_the_way_are_those_of_the_bytes() {
        let noise = |i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8;
        let from: Vec<u8> = (0..70_000).map(noise).collect();
        let mut room = vec![0; from.len() + 64];
        let aligned = room.as_ptr().align_offset(32);
        let lengths = (0..3200).chain([4096, 16_384, 65_535, 65_536, 65_537, 69_999]);
        for length in lengths {
            // Aligned like the blocks of a pack, and unaligned.
            for shift in [0, 5] {
                let to = &mut room[aligned + shift..][..length];
                to.fill(0);
                let found = copy_with_checksum(to, &from[..length]);
                assert_eq!(found, checksum(&from[..length]), "{length} bytes, shifted by {shift}");
                assert_eq!(*to, from[..length]);
            }
        }
    }
}
