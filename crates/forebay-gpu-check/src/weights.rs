//! Random weights of every type, on both sides.

use anyhow::Result;
use forebay_cuda::{CudaError, DeviceMemory, DevicePtr, supports_weights, weight_alignment};
use forebay_format::{TensorType, dequantize};

use crate::harness::Context;
use crate::random::Random;

/// Every type that products take.
pub fn types() -> impl Iterator<Item = TensorType> {
    TensorType::all().iter().copied().filter(|&ty| supports_weights(ty))
}

/// Where a block holds F16 scales; every other byte may be anything.
fn f16_fields(ty: TensorType) -> &'static [usize] {
    use TensorType as T;
    match ty {
        T::Q4_0 | T::Q5_0 | T::Q8_0 | T::IQ4_NL | T::IQ4_XS | T::Q1_0 | T::Q2_0 => &[0],
        T::IQ2_XXS | T::IQ2_XS | T::IQ2_S | T::IQ3_XXS | T::IQ3_S | T::IQ1_S => &[0],
        T::Q4_1 | T::Q5_1 | T::Q4_K | T::Q5_K => &[0, 2],
        T::Q6_K => &[208],
        T::Q2_K => &[80, 82],
        T::Q3_K => &[108],
        T::TQ1_0 => &[52],
        T::TQ2_0 => &[64],
        _ => &[],
    }
}

/// `elements` weights in whole blocks of `ty`, with scales that are finite and of one size.
pub fn random_weights(ty: TensorType, elements: usize, random: &mut Random) -> Vec<u8> {
    let mut data: Vec<u8> = (0..elements / ty.block_elements() * ty.block_bytes())
        .map(|_| random.next() as u8)
        .collect();
    for block in data.chunks_exact_mut(ty.block_bytes()) {
        match ty {
            TensorType::F64 => block.copy_from_slice(&f64::from(random.gaussian()).to_le_bytes()),
            TensorType::F32 => block.copy_from_slice(&random.gaussian().to_le_bytes()),
            TensorType::F16 => {
                block.copy_from_slice(&half::f16::from_f32(random.gaussian()).to_le_bytes());
            }
            TensorType::BF16 => {
                block.copy_from_slice(&half::bf16::from_f32(random.gaussian()).to_le_bytes());
            }
            // Neither infinite nor not a number.
            TensorType::F8_E4M3 | TensorType::F8_E5M2 => block[0] &= 0xbf,
            TensorType::MXFP4 => block[0] = 118 + block[0] % 12,
            // Four scales of 8 bits: keep sign and the top exponent bit clear.
            TensorType::NVFP4 => block[..4].iter_mut().for_each(|scale| *scale &= 0x3f),
            // The F16 scale lies in the top halves of four words.
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

/// A matrix `[rows, cols]` on both sides.
pub struct Weights {
    pub rows: usize,
    pub cols: usize,
    pub data: Vec<u8>,
    /// Exact values.
    pub values: Vec<f32>,
    _memory: DeviceMemory,
    pub ptr: DevicePtr<u8>,
}

impl Weights {
    /// Lies as badly aligned as its type may lie, with the margin that kernels may read.
    pub fn random(
        context: &Context,
        ty: TensorType,
        rows: usize,
        cols: usize,
        random: &mut Random,
    ) -> Result<Weights> {
        let data = random_weights(ty, rows * cols, random);
        let mut values = vec![0.0; rows * cols];
        dequantize(ty, &data, &mut values)?;
        let (_memory, ptr) = place(context, &data, 16 + weight_alignment(ty) % 16)?;
        Ok(Weights { rows, cols, data, values, _memory, ptr })
    }

    /// Exact product of row `row` with `x`, and the product of their norms.
    pub fn dot(&self, row: usize, x: &[f64]) -> (f64, f64) {
        let row = &self.values[row * self.cols..][..self.cols];
        let (mut sum, mut row_norm, mut x_norm) = (0.0, 0.0, 0.0);
        for (w, x) in row.iter().zip(x) {
            let w = f64::from(*w);
            sum += w * x;
            row_norm += w * w;
            x_norm += x * x;
        }
        (sum, (row_norm * x_norm).sqrt())
    }
}

/// `data` at byte `offset` of memory whose every other byte is 0xff.
pub fn place(
    context: &Context,
    data: &[u8],
    offset: usize,
) -> Result<(DeviceMemory, DevicePtr<u8>), CudaError> {
    let bytes = offset + data.len() + 16;
    let memory = context.gpu.allocate(bytes)?;
    context.gpu.fill(memory.ptr(), 0xff, bytes)?;
    let ptr = memory.ptr::<u8>().offset(offset);
    context.gpu.upload(data, ptr)?;
    Ok((memory, ptr))
}
