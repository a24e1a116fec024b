//! Forms of which no block type has the values, or not always. Their elements become F32. Integers of 8 bits are blocks of
//! Q8_0 where F16 holds their scales.

use std::ops::Range;

use half::f16;

use super::{Nf4Scales, Quantized, scale_at, u32_at};
use crate::TensorType;

impl Quantized {
    pub(super) fn gptq_ordered(
        &self,
        groups: usize,
        scale: TensorType,
        zero_offset: u32,
        from: &[&[u8]],
        rows: Range<usize>,
        out: &mut [u8],
    ) {
        // The model's reader has compared the groups with their number.
        let group_of = |col: usize| (u32_at(from[3], col) as usize).min(groups - 1);
        let mut factors = vec![(0.0, 0); groups];
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes())) {
            for (group, (factor, zero)) in factors.iter_mut().enumerate() {
                let word = u32_at(from[2], group * (self.rows / 8) + row / 8);
                *factor = scale_at(scale, from[1], group * self.rows + row);
                *zero = (word >> (4 * (row % 8)) & 15) + zero_offset;
            }
            for (word, out) in out.chunks_exact_mut(32).enumerate() {
                let codes = u32_at(from[0], word * self.rows + row);
                for (i, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let (factor, zero) = factors[group_of(word * 8 + i)];
                    let code = (codes >> (4 * i) & 15) as i32 - zero as i32;
                    *out = (factor * code as f32).to_le_bytes();
                }
            }
        }
    }

    pub(super) fn int8(
        &self,
        group: usize,
        scale: TensorType,
        zero: u8,
        from: &[&[u8]],
        rows: Range<usize>,
        out: &mut [u8],
    ) {
        let groups = self.cols / group;
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes())) {
            let codes = from[0][row * self.cols..][..self.cols].iter();
            let codes = codes.map(|code| code.wrapping_sub(zero));
            let scale_of = |col: usize| scale_at(scale, from[1], row * groups + col / group);
            if self.ty == TensorType::F32 {
                let out = out.as_chunks_mut::<4>().0.iter_mut();
                for (col, (code, out)) in codes.zip(out).enumerate() {
                    *out = (scale_of(col) * f32::from(code as i8)).to_le_bytes();
                }
                continue;
            }
            let mut codes = codes;
            for (index, out) in out.chunks_exact_mut(self.ty.block_bytes()).enumerate() {
                let scale = f16::from_f32(scale_of(index * self.ty.block_elements()));
                out[..2].copy_from_slice(&scale.to_le_bytes());
                out[2..].iter_mut().zip(&mut codes).for_each(|(out, code)| *out = code);
            }
        }
    }

    pub(super) fn nf4(
        &self,
        block: usize,
        scales: Nf4Scales,
        from: &[&[u8]],
        rows: Range<usize>,
        out: &mut [u8],
    ) {
        let float = |of: &[u8], index: usize| scale_at(TensorType::F32, of, index);
        let values: [f32; 16] = std::array::from_fn(|code| float(from[2], code));
        let scale_of = |index: usize| match scales {
            Nf4Scales::Plain => float(from[1], index),
            Nf4Scales::Nested { block, offset } => {
                let code = usize::from(from[1][index]);
                float(from[4], code) * float(from[3], index / block) + f32::from_bits(offset)
            }
        };
        let (mut scale, mut of) = (0.0, None);
        let first = rows.start * self.cols;
        for (index, out) in (first..).zip(out.as_chunks_mut::<4>().0) {
            if of != Some(index / block) {
                of = Some(index / block);
                scale = scale_of(index / block);
            }
            let code = from[0][index / 2] >> (4 * (1 - index % 2)) & 15;
            *out = (values[usize::from(code)] * scale).to_le_bytes();
        }
    }
}
