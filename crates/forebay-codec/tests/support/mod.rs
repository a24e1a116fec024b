//! Weights for tests, like those of trained models.

use forebay_codec::{Compact, Float, Weights, encode_compact};

/// Returns `rows` rows of Gaussian weights with a scale of their own each, as BF16, F16 or FP8.
pub fn gaussian(float: Float, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut weights = Vec::new();
    for _ in 0..rows {
        let scale = 0.02 * (0.5 + random.f64());
        for _ in 0..cols {
            let x = scale * normal(&mut random);
            match float {
                Float::Bf16 => weights.extend(half::bf16::from_f64(x).to_le_bytes()),
                Float::F16 => weights.extend(half::f16::from_f64(x).to_le_bytes()),
                // Checkpoints scale FP8 so that the largest weight of a block is near the largest number.
                Float::F8E4M3 => weights.push(small(x * 448.0 / (5.0 * scale), 3, 7, 15)),
                Float::F8E5M2 => weights.push(small(x * 57344.0 / (5.0 * scale), 2, 15, 30)),
            }
        }
    }
    weights
}

/// Returns such weights in compact blocks. Rows must be whole blocks.
pub fn compact(of: Compact, rows: usize, cols: usize, seed: u64) -> Vec<u8> {
    let plain = gaussian(Float::Bf16, rows, cols, seed);
    let mut blocks = vec![0; Weights::from(of).bytes_of(rows * cols)];
    assert_eq!(encode_compact(of, &plain, &mut blocks), Ok(true));
    blocks
}

/// Returns a number of the standard normal distribution.
pub fn normal(random: &mut fastrand::Rng) -> f64 {
    let (u, v) = (1.0 - random.f64(), random.f64());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// Rounds to a float of 8 bits.
fn small(x: f64, mantissa: i32, bias: i32, largest: i32) -> u8 {
    let sign = if x < 0.0 { 0x80 } else { 0 };
    let magnitude = x.abs();
    if magnitude == 0.0 {
        return sign;
    }
    let exponent = (magnitude.log2().floor() as i32).clamp(1 - bias, largest - bias);
    let steps = (magnitude / f64::powi(2.0, exponent - mantissa)).round() as i32;
    let one = 1 << mantissa;
    // Fewer steps than one is a subnormal number; twice as many is the next exponent.
    let bits = if steps < one { steps } else { (exponent + bias - 1) * one + steps };
    sign | bits.min(largest * one + one - 2) as u8
}
