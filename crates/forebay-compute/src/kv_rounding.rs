//! Blocks of keys and values as q8_0: for every 32 adjacent halves of a block, a half as their scale and 32 signed bytes.
//!
//! A plane of a block has a multiple of 128 elements, so no 32 of them belong to keys and values, or to two layers. They may
//! belong to two rows, if a row's length is not a multiple of 32.

use forebay_format::{TensorType, dequantize};
use half::f16;
use half::slice::{HalfBitsSliceExt as _, HalfFloatSliceExt as _};

/// Halves with one scale.
const GROUP: usize = 32;
/// Bytes of a group: the scale, then the codes.
const ROUNDED: usize = 2 + GROUP;
/// Values that are converted at once.
const AT_ONCE: usize = 64 * GROUP;
/// Values that the compiler puts in one register.
const LANES: usize = 8;
/// 1.5 * 2^23: sums with it are integers.
const NEAREST: f32 = 12_582_912.0;

/// How far rounded values are from the original ones.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RoundingError {
    /// Sums of the squares of all values, and of their errors.
    squares: f64,
    errors: f64,
}

impl RoundingError {
    /// Returns the root mean square of the errors as a share of that of the values.
    pub fn relative(self) -> f64 {
        if self.squares > 0.0 { (self.errors / self.squares).sqrt() } else { 0.0 }
    }

    pub fn add(&mut self, other: RoundingError) {
        self.squares += other.squares;
        self.errors += other.errors;
    }
}

/// Returns the bytes of a rounded block of `bytes` bytes of halves.
pub fn rounded_bytes(bytes: usize) -> usize {
    (bytes / 2).div_ceil(GROUP) * ROUNDED
}

/// Rounds halves, which are native-endian words, to `out`, which has [`rounded_bytes`]. Returns `None` if a value is not finite:
/// such a block cannot be rounded.
///
/// # Panics
/// Panics if `out` has another length.
pub fn round(halves: &[u8], out: &mut [u8]) -> Option<RoundingError> {
    assert_eq!(out.len(), rounded_bytes(halves.len()), "{} bytes of halves", halves.len());
    let mut error = RoundingError::default();
    let (mut bits, mut values) = ([0_u16; AT_ONCE], [0.0_f32; AT_ONCE]);
    let parts = halves.chunks(2 * AT_ONCE).zip(out.chunks_mut(AT_ONCE / GROUP * ROUNDED));
    for (halves, out) in parts {
        // A last group may be shorter; the rest of it is 0.
        bits.fill(0);
        for (bits, bytes) in bits.iter_mut().zip(halves.as_chunks().0) {
            *bits = u16::from_ne_bytes(*bytes);
        }
        bits.reinterpret_cast::<f16>().convert_to_f32_slice(&mut values);
        for (values, out) in values.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
            error.add(round_group(values, out)?);
        }
    }
    Some(error)
}

fn round_group(values: &[f32; GROUP], out: &mut [u8; ROUNDED]) -> Option<RoundingError> {
    // Every step is a loop of its own, so that the compiler uses vectors. Bits without the sign are ordered like magnitudes, with
    // infinity and NaN above all.
    let magnitudes = values.map(|x| x.to_bits() & 0x7fff_ffff);
    let largest = f32::from_bits(magnitudes.into_iter().fold(0, u32::max));
    if !largest.is_finite() {
        return None;
    }
    // The scale as it is stored decides the codes, so that its own rounding adds no error.
    let scale = f16::from_f32(largest / 127.0);
    let step = scale.to_f32();
    let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
    // A scale that was rounded down may leave the largest value beyond 127. Adding 1.5 * 2^23 rounds to the nearest integer,
    // whose two's complement is then in the last byte.
    let shifted = values.map(|x| (x * inverse).clamp(-127.0, 127.0) + NEAREST);
    let (first, codes) = out.split_at_mut(2);
    first.copy_from_slice(&scale.to_bits().to_le_bytes());
    codes.copy_from_slice(&shifted.map(|x| x.to_bits() as u8));
    let mut distances = shifted.map(|x| (x - NEAREST) * step);
    for (distance, x) in distances.iter_mut().zip(values) {
        *distance = x - *distance;
    }
    Some(RoundingError { squares: sum_of_squares(values), errors: sum_of_squares(&distances) })
}

fn sum_of_squares(values: &[f32; GROUP]) -> f64 {
    let mut sums = [0.0_f32; LANES];
    for eight in values.as_chunks::<LANES>().0 {
        for (sum, x) in sums.iter_mut().zip(eight) {
            *sum += x * x;
        }
    }
    f64::from(sums.iter().sum::<f32>())
}

/// Makes halves again of what [`round`] returned. Returns false if the length is another one.
pub fn unround(rounded: &[u8], halves: &mut [u8]) -> bool {
    if rounded.len() != rounded_bytes(halves.len()) {
        return false;
    }
    let (mut values, mut bits) = ([0.0_f32; AT_ONCE], [0_u16; AT_ONCE]);
    let parts = rounded.chunks(AT_ONCE / GROUP * ROUNDED).zip(halves.chunks_mut(2 * AT_ONCE));
    for (rounded, halves) in parts {
        let values_of_part = &mut values[..rounded.len() / ROUNDED * GROUP];
        if dequantize(TensorType::Q8_0, rounded, values_of_part).is_err() {
            return false;
        }
        bits.reinterpret_cast_mut::<f16>().convert_from_f32_slice(&values);
        for (to, bits) in halves.as_chunks_mut().0.iter_mut().zip(bits) {
            *to = bits.to_ne_bytes();
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::random;

    fn bytes_of(values: impl Iterator<Item = f32>) -> Vec<u8> {
        values.flat_map(|x| f16::from_f32(x).to_bits().to_ne_bytes()).collect()
    }

    fn values_of(bytes: &[u8]) -> Vec<f32> {
        let halves = bytes.as_chunks().0.iter().map(|two| f16::from_bits(u16::from_ne_bytes(*two)));
        halves.map(f16::to_f32).collect()
    }

    #[test]
    fn values_come_back_within_half_a_step() {
        // 130 values, so that the last group is not full. Some groups have tiny values, one has only zeroes.
        let random = random(3, 130);
        let values: Vec<f32> =
            (0..130).map(|i| [1.0, 1e-6, 0.0, 60_000.0, 3.0][i / 32] * random[i]).collect();
        let halves = bytes_of(values.iter().copied());
        let mut rounded = vec![0xff; rounded_bytes(halves.len())];
        let error = round(&halves, &mut rounded).unwrap();
        assert_eq!(rounded.len(), 5 * 34);
        let mut back = vec![0xff; halves.len()];
        assert!(unround(&rounded, &mut back));
        let (before, after) = (values_of(&halves), values_of(&back));
        let (mut squares, mut errors) = (0.0_f64, 0.0_f64);
        for (group, (before, after)) in before.chunks(32).zip(after.chunks(32)).enumerate() {
            let largest = before.iter().fold(0.0_f32, |a, x| a.max(x.abs()));
            for (x, y) in before.iter().zip(after) {
                // Half a step, and the rounding of scale and result to halves, whose smallest step is 6e-8.
                let bound = largest / 127.0 * 0.5 * 1.13 + largest * 1e-3 + 6e-8 * 127.0;
                assert!((x - y).abs() <= bound, "group {group}: {x} became {y}");
                squares += f64::from(x * x);
                errors += f64::from((x - y) * (x - y));
            }
        }
        let relative = (errors / squares).sqrt();
        assert!((error.relative() / relative - 1.0).abs() < 0.1, "{} {relative}", error.relative());
        assert!((0.001..0.01).contains(&relative), "{relative}");
        assert!(!unround(&rounded[1..], &mut back));
    }

    #[test]
    fn rounding_again_changes_nothing() {
        let halves = bytes_of(random(4, 256).into_iter());
        let [mut first, mut second] = [0, 1].map(|_| vec![0; rounded_bytes(halves.len())]);
        round(&halves, &mut first).unwrap();
        let mut back = vec![0; halves.len()];
        unround(&first, &mut back);
        round(&back, &mut second).unwrap();
        let mut again = vec![0; halves.len()];
        unround(&second, &mut again);
        let close =
            values_of(&back).iter().zip(values_of(&again)).all(|(a, b)| (a - b).abs() < 1e-3);
        assert!(close);
    }

    #[test]
    fn values_that_are_not_finite_are_refused() {
        for bad in [f32::NAN, f32::INFINITY] {
            let halves = bytes_of([1.0, bad, 2.0].into_iter());
            assert_eq!(round(&halves, &mut [0; 34]), None);
        }
    }
}
