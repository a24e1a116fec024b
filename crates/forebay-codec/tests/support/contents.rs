//! Bytes like those of tensors of many kinds.

use forebay_codec::{Compact, Float, Weights};

use super::{compact, gaussian, normal};

/// Returns names, and about `bytes` bytes of each kind. Those for codec `exponents` say what its weights are.
pub fn all(bytes: usize) -> Vec<(&'static str, Option<Weights>, Vec<u8>)> {
    let weights = |float: Float| gaussian(float, bytes / float.bytes() / 4096, 4096, 1);
    let blocks_of = |of: Compact| compact(of, bytes / 2 / 4096, 4096, 1);
    let mut random = fastrand::Rng::with_seed(4);
    let mut pruned = weights(Float::Bf16);
    pruned.chunks_exact_mut(2).filter(|_| random.bool()).for_each(|weight| weight.fill(0));
    let mut padded = weights(Float::Bf16);
    let half = padded.len() / 2;
    padded[half..].fill(0);
    vec![
        ("BF16", Some(Float::Bf16.into()), weights(Float::Bf16)),
        ("F16", Some(Float::F16.into()), weights(Float::F16)),
        ("F8_E4M3", Some(Float::F8E4M3.into()), weights(Float::F8E4M3)),
        ("F8_E5M2", Some(Float::F8E5M2.into()), weights(Float::F8E5M2)),
        ("BF16_C2048", Some(Compact::C2048.into()), blocks_of(Compact::C2048)),
        ("BF16_C256", Some(Compact::C256.into()), blocks_of(Compact::C256)),
        ("BF16, half of the weights pruned", Some(Float::Bf16.into()), pruned),
        ("BF16, half of the tensor is padding", Some(Float::Bf16.into()), padded),
        ("INT8, a scale per row", None, int8(bytes, 5.0)),
        ("INT8, quantisation-aware training", None, int8(bytes, 16.0)),
        ("Q8_0", None, blocks(bytes, q8_0)),
        ("Q6_K", None, blocks(bytes, q6_k)),
        ("Q4_K", None, blocks(bytes, q4_k)),
        ("IQ4_NL", None, blocks(bytes, iq4_nl)),
        ("IQ2_XS", None, blocks(bytes, iq2_xs)),
    ]
}

fn blocks(bytes: usize, block: fn(&mut fastrand::Rng, &mut Vec<u8>)) -> Vec<u8> {
    let (mut random, mut out) = (fastrand::Rng::with_seed(2), Vec::new());
    while out.len() < bytes {
        block(&mut random, &mut out);
    }
    out
}

/// Rows of 4096; the largest number is so many standard deviations away.
fn int8(bytes: usize, deviations: f64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(3);
    (0..bytes).map(|_| int(&mut random, 127.0 / deviations, 127) as u8).collect()
}

/// Returns a Gaussian integer, cut at `most`.
fn int(random: &mut fastrand::Rng, scale: f64, most: i32) -> i32 {
    ((normal(random) * scale).round() as i32).clamp(-most, most)
}

fn scale(random: &mut fastrand::Rng, around: f64) -> [u8; 2] {
    half::f16::from_f64(around * (0.7 + 0.6 * random.f64())).to_le_bytes()
}

fn q8_0(random: &mut fastrand::Rng, out: &mut Vec<u8>) {
    let weights: [f64; 32] = std::array::from_fn(|_| normal(random));
    let largest = weights.iter().fold(0.0_f64, |most, weight| most.max(weight.abs()));
    out.extend(half::f16::from_f64(0.02 * largest / 127.0).to_le_bytes());
    out.extend(weights.map(|weight| (127.0 * weight / largest).round() as i8 as u8));
}

fn q6_k(random: &mut fastrand::Rng, out: &mut Vec<u8>) {
    let codes: [u8; 256] = std::array::from_fn(|_| (int(random, 14.0, 31) + 32).clamp(0, 63) as u8);
    out.extend((0..128).map(|i| codes[2 * i] & 15 | codes[2 * i + 1] << 4));
    out.extend((0..64).map(|i| (0..4).fold(0, |byte, j| byte | codes[4 * i + j] >> 4 << (2 * j))));
    out.extend((0..16).map(|_| (90 + random.i32(-30..38)) as u8));
    out.extend(scale(random, 2e-5));
}

fn q4_k(random: &mut fastrand::Rng, out: &mut Vec<u8>) {
    out.extend(scale(random, 1e-4));
    out.extend(scale(random, 5e-4));
    // Packed numbers of six bits look like random bytes.
    out.extend((0..12).map(|_| random.u8(..)));
    let code = |random: &mut fastrand::Rng| (int(random, 3.6, 8) + 8).clamp(0, 15) as u8;
    out.extend((0..128).map(|_| code(random) | code(random) << 4));
}

fn iq4_nl(random: &mut fastrand::Rng, out: &mut Vec<u8>) {
    out.extend(scale(random, 1e-4));
    // The table of values has about the distribution of weights, so codes are used almost equally.
    let code = |random: &mut fastrand::Rng| (int(random, 4.5, 8) + 8).clamp(0, 15) as u8;
    out.extend((0..16).map(|_| code(random) | code(random) << 4));
}

fn iq2_xs(random: &mut fastrand::Rng, out: &mut Vec<u8>) {
    out.extend(scale(random, 1e-4));
    // Numbers of grid points and signs.
    out.extend((0..64).map(|_| random.u8(..)));
    out.extend((0..8).map(|_| random.u8(0x55..0xbb)));
}
