//! Random weights, made directly in their encoded form: random bits everywhere, then sane scales.
//! Quantising floats would be a hundred times slower and say nothing more about speed.

use crate::quant::scaled::{E4M3, ZERO_BITS};
use crate::{TensorType, dequantize};
use half::{bf16, f16};

/// Returns the output of SplitMix64 (Steele, Lea, Flood, 2014) at a position, so that any thread
/// can make any part of a stream.
fn bits_at(seed: u64, position: u64) -> u64 {
    let mut z = seed.wrapping_add(position.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Returns the seed of one tensor's stream.
pub fn tensor_seed(seed: u64, name: &str) -> u64 {
    let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
    bits_at(name.bytes().fold(0xCBF2_9CE4_8422_2325, fnv), seed)
}

/// Number of blocks whose multiples a piece of a tensor may begin at. Eight blocks fill whole
/// words, so the bytes do not depend on how a tensor is cut.
pub const PIECE_BLOCKS: usize = 8;

const VARIANTS: usize = 16;
const SCALE_BYTES_MAX: usize = 8;

/// Recipe for the weights of one tensor.
#[derive(Clone, Debug)]
pub enum Content {
    /// Floats, uniform in `center` plus or minus `spread`.
    Floats { ty: TensorType, center: f32, spread: f32 },
    /// These exact values, as F32.
    Exactly(Vec<f32>),
    /// Rows of `count` different I32 numbers below `of`: consecutive ones from a random one on.
    Choices { of: u32, count: u32 },
    /// Random blocks whose scale is overwritten.
    Blocks(ScaledBlocks),
    /// Rows of `row_blocks` blocks that all begin with the same `alike` blocks.
    RowsAlike { rows: Box<Content>, ty: TensorType, row_blocks: usize, alike: usize },
}

/// Blocks of a quantised type with one of sixteen scales. The random bits at the scale's position
/// choose which.
#[derive(Clone, Debug)]
pub struct ScaledBlocks {
    ty: TensorType,
    at: usize,
    length: usize,
    /// Bits that belong to the scale.
    mask: [u8; SCALE_BYTES_MAX],
    variants: [[u8; SCALE_BYTES_MAX]; VARIANTS],
}

/// Location and encoding of the scale by which a type multiplies all other numbers of a block.
#[derive(Clone, Copy)]
enum Scale {
    /// An f16.
    Half { at: usize },
    /// An f16, and a second one for the offset. The second is `minimum` times the first, so that
    /// the mean is zero.
    HalfAndMinimum { at: usize, minimum: f32 },
    /// An f16 spread over the upper four bits of four words.
    ScatteredHalf { at: usize },
    /// A power of two, biased by 127.
    Exponent { at: usize },
    /// Four unsigned E4M3 floats.
    FourE4M3 { at: usize },
    /// An F32.
    Float { at: usize },
    /// A BF16.
    Brain { at: usize },
    /// An F32 with a zero point of 7 or 8 in its lowest bits.
    FloatAndZero { at: usize },
    /// The lowest exponent of a compact block, and two exceptions: a zero or subnormal number, and a number below all others.
    Compact { at: usize },
}

fn scale_of(ty: TensorType) -> Option<Scale> {
    Some(match ty {
        TensorType::Q4_1 => Scale::HalfAndMinimum { at: 0, minimum: -7.5 },
        TensorType::Q5_1 => Scale::HalfAndMinimum { at: 0, minimum: -15.5 },
        TensorType::Q2_K => Scale::HalfAndMinimum { at: 80, minimum: 1.5 },
        TensorType::Q4_K => Scale::HalfAndMinimum { at: 0, minimum: 7.5 },
        TensorType::Q5_K => Scale::HalfAndMinimum { at: 0, minimum: 15.5 },
        TensorType::Q3_K => Scale::Half { at: 108 },
        TensorType::Q6_K => Scale::Half { at: 208 },
        TensorType::TQ1_0 => Scale::Half { at: 52 },
        TensorType::TQ2_0 => Scale::Half { at: 64 },
        TensorType::IQ1_M => Scale::ScatteredHalf { at: 48 },
        TensorType::MXFP4 => Scale::Exponent { at: 0 },
        TensorType::NVFP4 => Scale::FourE4M3 { at: 0 },
        TensorType::F8_B128 => Scale::Float { at: 128 },
        TensorType::F8_B32 => Scale::Float { at: 32 },
        TensorType::NVFP4_F32 => Scale::Float { at: 0 },
        TensorType::I4_BF16 => Scale::Brain { at: 0 },
        TensorType::I4_Z32 | TensorType::I4_Z128 => Scale::FloatAndZero { at: 0 },
        TensorType::BF16_C2048 => Scale::Compact { at: 3072 },
        TensorType::BF16_C256 => Scale::Compact { at: 384 },
        TensorType::Q4_0
        | TensorType::Q5_0
        | TensorType::Q8_0
        | TensorType::IQ4_NL
        | TensorType::IQ4_XS
        | TensorType::IQ2_XXS
        | TensorType::IQ2_XS
        | TensorType::IQ2_S
        | TensorType::IQ3_XXS
        | TensorType::IQ3_S
        | TensorType::IQ1_S
        | TensorType::Q1_0
        | TensorType::Q2_0 => Scale::Half { at: 0 },
        _ => return None,
    })
}

impl Content {
    /// Returns a recipe for weights of type `ty` with a standard deviation of about `deviation`.
    /// Returns `None` for types that are not used for weights.
    pub fn weights(ty: TensorType, deviation: f32) -> Option<Self> {
        if matches!(ty, TensorType::F32 | TensorType::F16 | TensorType::BF16) {
            let spread = deviation * 3f32.sqrt();
            return Some(Self::Floats { ty, center: 0.0, spread });
        }
        let scale = scale_of(ty)?;
        let trial = ScaledBlocks::new(ty, scale, 1.0);
        Some(Self::Blocks(ScaledBlocks::new(ty, scale, deviation / trial.measured_deviation())))
    }

    /// Fills `out`, which begins `first_block` blocks into the tensor. `first_block` must be a
    /// multiple of [`PIECE_BLOCKS`].
    pub fn fill(&self, seed: u64, first_block: u64, out: &mut [u8]) {
        match self {
            Self::Floats { ty, center, spread } => {
                fill_floats(*ty, *center, *spread, seed, first_block, out);
            }
            Self::Exactly(values) => {
                let values = &values[first_block as usize..];
                for (bytes, value) in out.chunks_exact_mut(4).zip(values) {
                    bytes.copy_from_slice(&value.to_le_bytes());
                }
            }
            Self::Choices { of, count } => {
                let (of, count) = (u64::from(*of), u64::from(*count));
                for (index, bytes) in (first_block..).zip(out.as_chunks_mut().0) {
                    let (row, place) = (index / count, index % count);
                    *bytes = (((bits_at(seed, row) % of + place) % of) as i32).to_le_bytes();
                }
            }
            Self::Blocks(blocks) => blocks.fill(seed, first_block, out),
            Self::RowsAlike { rows, ty, row_blocks, alike } => {
                rows.fill(seed, first_block, out);
                let mut front = vec![0; alike.next_multiple_of(PIECE_BLOCKS) * ty.block_bytes()];
                rows.fill(seed, 0, &mut front);
                for (index, block) in out.chunks_exact_mut(ty.block_bytes()).enumerate() {
                    let in_row = (first_block as usize + index) % row_blocks;
                    if in_row < *alike {
                        let from = in_row * ty.block_bytes();
                        block.copy_from_slice(&front[from..from + ty.block_bytes()]);
                    }
                }
            }
        }
    }
}

/// Fills `out` with floats. Each element takes one word of the stream, so that a piece may begin
/// anywhere.
fn fill_floats(ty: TensorType, center: f32, spread: f32, seed: u64, first: u64, out: &mut [u8]) {
    let step = spread / 2f32.powi(31);
    let value = |index: usize| {
        let bits = bits_at(seed, first + index as u64) as u32 as i32;
        center + bits as f32 * step
    };
    match ty {
        TensorType::F32 => {
            for (index, bytes) in out.chunks_exact_mut(4).enumerate() {
                bytes.copy_from_slice(&value(index).to_le_bytes());
            }
        }
        TensorType::F16 => {
            for (index, bytes) in out.chunks_exact_mut(2).enumerate() {
                bytes.copy_from_slice(&f16::from_f32(value(index)).to_le_bytes());
            }
        }
        _ => {
            for (index, bytes) in out.chunks_exact_mut(2).enumerate() {
                bytes.copy_from_slice(&bf16::from_f32(value(index)).to_le_bytes());
            }
        }
    }
}

impl ScaledBlocks {
    /// Creates blocks whose scale is within a quarter of `scale`.
    fn new(ty: TensorType, place: Scale, scale: f32) -> Self {
        let mut blocks = Self {
            ty,
            at: 0,
            length: 0,
            mask: [0xFF; SCALE_BYTES_MAX],
            variants: Default::default(),
        };
        for variant in 0..VARIANTS {
            let scale = scale * (0.75 + 0.5 * (variant as f32 + 0.5) / VARIANTS as f32);
            let bytes = &mut blocks.variants[variant];
            let half = f16::from_f32(scale).to_bits();
            (blocks.at, blocks.length) = match place {
                Scale::Half { at } => {
                    bytes[..2].copy_from_slice(&half.to_le_bytes());
                    (at, 2)
                }
                Scale::HalfAndMinimum { at, minimum } => {
                    bytes[..2].copy_from_slice(&half.to_le_bytes());
                    bytes[2..4].copy_from_slice(&f16::from_f32(scale * minimum).to_le_bytes());
                    (at, 4)
                }
                Scale::ScatteredHalf { at } => {
                    for (word, nibble) in bytes.chunks_exact_mut(2).zip([0, 4, 8, 12]) {
                        word[1] = ((half >> nibble & 0xF) as u8) << 4;
                    }
                    blocks.mask = [0, 0xF0, 0, 0xF0, 0, 0xF0, 0, 0xF0];
                    (at, 8)
                }
                Scale::Exponent { at } => {
                    bytes[0] = (127.0 + scale.log2().round()).clamp(1.0, 253.0) as u8;
                    (at, 1)
                }
                Scale::FourE4M3 { at } => {
                    bytes[..4].fill(nearest_e4m3(scale));
                    (at, 4)
                }
                Scale::Float { at } => {
                    bytes[..4].copy_from_slice(&scale.to_le_bytes());
                    (at, 4)
                }
                Scale::Brain { at } => {
                    bytes[..2].copy_from_slice(&bf16::from_f32(scale).to_le_bytes());
                    (at, 2)
                }
                Scale::FloatAndZero { at } => {
                    let word = (scale.to_bits() & !ZERO_BITS) | (7 + variant as u32 % 2);
                    bytes[..4].copy_from_slice(&word.to_le_bytes());
                    (at, 4)
                }
                Scale::Compact { at } => {
                    let base = (112.0 + scale.log2().round()).clamp(1.0, 240.0);
                    bytes[..6].copy_from_slice(&[base as u8, 2, 0, 0, 0, 3 << 3]);
                    // The columns of the two are random, and differ by their lowest bit.
                    blocks.mask = [0xFF, 0xFF, 1, 0xF8, 1, 0xF8, 0, 0];
                    bytes[4] = 1;
                    (at, 6)
                }
            };
        }
        blocks
    }

    fn fill(&self, seed: u64, first_block: u64, out: &mut [u8]) {
        let block_bytes = self.ty.block_bytes();
        let first_word = first_block * block_bytes as u64 / 8;
        let mut words = out.chunks_exact_mut(8);
        let mut position = first_word;
        for word in &mut words {
            word.copy_from_slice(&bits_at(seed, position).to_le_bytes());
            position += 1;
        }
        let rest = words.into_remainder();
        let last = bits_at(seed, position).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);

        for block in out.chunks_exact_mut(block_bytes) {
            match self.ty {
                TensorType::TQ2_0 | TensorType::Q2_0 => make_ternary(block),
                // E4M3 below 2: no NaN.
                TensorType::F8_B128 | TensorType::F8_B32 => {
                    block.iter_mut().for_each(|code| *code &= 0xbf);
                }
                TensorType::NVFP4_F32 => {
                    block[4..8].iter_mut().for_each(|scale| *scale = *scale & 0x0f | 0x30);
                }
                _ => {}
            }
            let scale = &mut block[self.at..self.at + self.length];
            let variant = &self.variants[usize::from(scale[self.length - 1]) % VARIANTS];
            for ((byte, value), mask) in scale.iter_mut().zip(variant).zip(self.mask) {
                *byte = *byte & !mask | value;
            }
        }
    }

    /// Returns the standard deviation of a few thousand values.
    fn measured_deviation(&self) -> f32 {
        const BLOCKS: usize = 256;
        let mut data = vec![0; BLOCKS * self.ty.block_bytes()];
        self.fill(1, 0, &mut data);
        let mut values = vec![0.0; BLOCKS * self.ty.block_elements()];
        if dequantize(self.ty, &data, &mut values).is_err() {
            return 1.0;
        }
        let sum: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
        (sum / values.len() as f64).sqrt() as f32
    }
}

/// Replaces code 3 of the two-bit fields, which is above the ternary values, by code 1, which
/// stands for zero. Half of the values are then zero, and the mean is zero.
fn make_ternary(block: &mut [u8]) {
    for byte in block {
        *byte &= !((*byte & 0x55) << 1);
    }
}

/// Returns the code closest to `value` in unsigned floats with four exponent and three mantissa
/// bits.
fn nearest_e4m3(value: f32) -> u8 {
    let distance = |code: &u8| (E4M3[usize::from(*code)] - value).abs();
    (1..=126).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(ty: TensorType, content: &Content, blocks: usize) -> Vec<f32> {
        let mut data = vec![0; blocks * ty.block_bytes()];
        content.fill(7, 0, &mut data);
        let mut values = vec![0.0; blocks * ty.block_elements()];
        dequantize(ty, &data, &mut values).unwrap();
        values
    }

    #[test]
    fn every_type_has_the_deviation_asked_for_and_no_bias() {
        for ty in TensorType::all() {
            let deviation = 1.0 / 64.0;
            let Some(content) = Content::weights(*ty, deviation) else { continue };
            let blocks = (1 << 18) / ty.block_elements();
            let values = values(*ty, &content, blocks);
            assert!(values.iter().all(|value| value.is_finite()), "{ty}");
            let count = values.len() as f64;
            let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / count;
            let square = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>() / count;
            let found = square.sqrt() as f32 / deviation;
            // Scales that are powers of two cannot come closer.
            let in_powers = *ty == TensorType::MXFP4 || ty.compact().is_some();
            let tolerance = if in_powers { 0.45 } else { 0.15 };
            assert!((found - 1.0).abs() < tolerance, "{ty}: deviation {found} of what was asked");
            assert!(mean.abs() < 0.2 * f64::from(deviation), "{ty}: mean {mean}");
        }
    }

    #[test]
    fn pieces_do_not_depend_on_how_a_tensor_is_cut() {
        for ty in [TensorType::Q6_K, TensorType::Q8_0, TensorType::F32, TensorType::BF16] {
            let content = Content::weights(ty, 0.02).unwrap();
            let bytes = ty.block_bytes();
            let mut whole = vec![0; 40 * bytes];
            content.fill(3, 0, &mut whole);
            let cut = 3 * PIECE_BLOCKS;
            let (mut front, mut back) = (vec![0; cut * bytes], vec![0; (40 - cut) * bytes]);
            content.fill(3, 0, &mut front);
            content.fill(3, cut as u64, &mut back);
            assert_eq!(whole, [front, back].concat(), "{ty}");
        }
    }

    #[test]
    fn rows_alike_begin_alike_and_go_on_differently_however_they_are_cut() {
        for ty in [TensorType::Q4_K, TensorType::Q8_0, TensorType::F32] {
            let (row_blocks, alike, rows) = (6, 3, 12);
            let plain = Content::weights(ty, 0.5).unwrap();
            let content =
                Content::RowsAlike { rows: Box::new(plain.clone()), ty, row_blocks, alike };
            let bytes = ty.block_bytes();
            let (mut whole, mut random) = (vec![0; rows * row_blocks * bytes], Vec::new());
            random.resize(whole.len(), 0);
            content.fill(5, 0, &mut whole);
            plain.fill(5, 0, &mut random);
            let split = alike * bytes;
            for (row, source) in
                whole.chunks_exact(row_blocks * bytes).zip(random.chunks_exact(row_blocks * bytes))
            {
                assert_eq!(row[..split], random[..split], "{ty}");
                assert_eq!(row[split..], source[split..], "{ty}");
            }
            let cut = 2 * PIECE_BLOCKS;
            let mut back = vec![0; whole.len() - cut * bytes];
            content.fill(5, cut as u64, &mut back);
            assert_eq!(whole[cut * bytes..], back, "{ty}");
        }
    }

    #[test]
    fn seeds_and_names_matter() {
        let seeds = [tensor_seed(0, "a"), tensor_seed(1, "a"), tensor_seed(0, "b")];
        assert!(seeds[0] != seeds[1] && seeds[0] != seeds[2] && seeds[1] != seeds[2]);
    }

    #[test]
    fn codes_are_nearest() {
        assert_eq!(nearest_e4m3(1.0), 0x38);
        assert_eq!(nearest_e4m3(1e-9), 1);
        assert_eq!(nearest_e4m3(1e9), 126);
    }
}
