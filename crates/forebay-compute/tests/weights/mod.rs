//! Random weights of every type, with finite scales.

use forebay_format::TensorType;

/// A small generator of reproducible numbers (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// Returns a number in `-1.0..1.0`.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Returns a number from an approximately normal distribution, with an occasional large one.
    pub fn gaussian(&mut self) -> f32 {
        let sum: f32 = (0..6).map(|_| self.unit()).sum();
        sum * 0.7 * if self.next().is_multiple_of(64) { 8.0 } else { 1.0 }
    }

    pub fn gaussians(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.gaussian()).collect()
    }
}

/// Returns the positions of a block's F16 scales. Every other byte may have any value.
fn f16_fields(ty: TensorType) -> &'static [usize] {
    use TensorType as T;
    match ty {
        T::Q4_0 | T::Q5_0 | T::Q8_0 | T::IQ4_NL | T::IQ4_XS => &[0],
        T::IQ2_XXS | T::IQ2_XS | T::IQ2_S | T::IQ3_XXS | T::IQ3_S | T::IQ1_S => &[0],
        T::Q4_1 | T::Q5_1 | T::Q4_K | T::Q5_K => &[0, 2],
        T::Q6_K => &[208],
        T::Q2_K => &[80, 82],
        T::Q3_K => &[108],
        T::TQ1_0 => &[52],
        T::TQ2_0 => &[64],
        T::Q1_0 | T::Q2_0 => &[0],
        _ => &[],
    }
}

/// Returns `elements` random weights in whole blocks of `ty`.
pub fn random_weights(ty: TensorType, elements: usize, random: &mut Random) -> Vec<u8> {
    let blocks = elements / ty.block_elements();
    let mut data = Vec::with_capacity(blocks * ty.block_bytes());
    for _ in 0..blocks {
        let start = data.len();
        data.extend((0..ty.block_bytes()).map(|_| random.next() as u8));
        let block = &mut data[start..];
        match ty {
            TensorType::F64 => block.copy_from_slice(&f64::from(random.gaussian()).to_le_bytes()),
            TensorType::F32 => block.copy_from_slice(&random.gaussian().to_le_bytes()),
            TensorType::F16 => {
                block.copy_from_slice(&half::f16::from_f32(random.gaussian()).to_le_bytes());
            }
            TensorType::BF16 => {
                block.copy_from_slice(&half::bf16::from_f32(random.gaussian()).to_le_bytes());
            }
            TensorType::F8_E4M3 | TensorType::F8_E5M2 => block[0] &= 0xbf,
            TensorType::F8_E8M0 => block[0] = 118 + block[0] % 12,
            TensorType::MXFP4 => block[0] = 118 + block[0] % 12,
            // Four scales of 8 bits: keep sign and the top exponent bit clear.
            TensorType::NVFP4 => block[..4].iter_mut().for_each(|scale| *scale &= 0x3f),
            TensorType::F8_B128 | TensorType::F8_B32 => {
                block.iter_mut().for_each(|code| *code &= 0xbf);
                let at = block.len() - 4;
                block[at..].copy_from_slice(&(0.01 + 0.05 * random.unit().abs()).to_le_bytes());
            }
            TensorType::NVFP4_F32 => {
                block[4..8].iter_mut().for_each(|scale| *scale &= 0xbf);
                block[..4].copy_from_slice(&(0.01 + 0.05 * random.unit().abs()).to_le_bytes());
            }
            TensorType::I4_BF16 => {
                let scale = half::bf16::from_f32(0.01 + 0.05 * random.unit().abs());
                block[..2].copy_from_slice(&scale.to_le_bytes());
            }
            // A zero point of any value up to 16.
            TensorType::I4_Z32 | TensorType::I4_Z128 => {
                let word = (0.01 + 0.05 * random.unit().abs()).to_bits() & !31;
                block[..4].copy_from_slice(&(word | (random.next() % 17)).to_le_bytes());
            }
            // The lowest exponent, and how many exceptions are in the list.
            TensorType::BF16_C2048 | TensorType::BF16_C256 => {
                let (header, most) = if block.len() > 392 { (3072, 7) } else { (384, 3) };
                block[header] = 100 + block[header] % 16;
                block[header + 1] %= most + 1;
            }
            // The F16 scale is in the top halves of four words.
            TensorType::IQ1_M => block[55] = block[55] & 0x0f | 0x20,
            _ => {
                for &at in f16_fields(ty) {
                    let scale = half::f16::from_f32(0.01 + 0.05 * random.unit().abs());
                    block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
    }
    data
}

/// Returns weights of a compact type like those of trained models, in whole blocks.
pub fn gaussian_bf16(ty: TensorType, elements: usize, random: &mut Random) -> Vec<u8> {
    let of = ty.compact().expect("a compact type");
    let values = (0..elements).map(|_| half::bf16::from_f32(0.02 * random.gaussian()));
    let plain: Vec<u8> = values.flat_map(half::bf16::to_le_bytes).collect();
    let mut data = vec![0; elements / of.weights() * of.bytes()];
    assert_eq!(forebay_codec::encode_compact(of, &plain, &mut data), Ok(true));
    data
}

/// Sets everything but the F16 scales (and MXFP4's exponent) to `byte`.
pub fn fill_codes(ty: TensorType, data: &mut [u8], byte: u8) {
    for block in data.chunks_mut(ty.block_bytes()) {
        let keep: Vec<usize> = match ty {
            TensorType::MXFP4 => vec![0],
            _ => f16_fields(ty).iter().flat_map(|&at| [at, at + 1]).collect(),
        };
        for (i, target) in block.iter_mut().enumerate() {
            if !keep.contains(&i) {
                *target = byte;
            }
        }
    }
}
