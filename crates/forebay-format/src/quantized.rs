//! Matrices of quantised safetensors files: tensors of codes, scales and zero points, which become
//! blocks of one type when they are read. Values stay the same, bit for bit.

use std::ops::Range;

use half::{bf16, f16};

use crate::TensorType;
use crate::block::row_bytes;
use crate::quant::fp4::half_of_e8m0;
use crate::quant::scaled::{E4M3, ZERO_BITS};

/// A matrix `[rows, cols]` that is stored as several tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantized {
    pub form: Form,
    /// Type of the blocks that are made.
    pub ty: TensorType,
    pub rows: usize,
    pub cols: usize,
}

/// The tensors that hold a matrix, in the order of a block's extents. Words are I32 tensors with
/// eight codes of four bits in each element, the first in the lowest bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// E4M3 `[rows, cols]`, and their scales unless there is one only.
    Fp8 { scales: Scales },
    /// E2M1 `[rows, cols / 2]`, two in a byte with the first in the low half, and E4M3 scales
    /// `[rows, cols / 16]`. `factor` holds the bits of an F32 that multiplies all of them.
    Nvfp4 { factor: u32 },
    /// Words `[rows, cols / 8]` with the zero point 8, and scales `[rows, cols / group]`.
    Int4 { group: usize, scale: TensorType },
    /// Words `[cols / 8, rows]`, scales `[cols / group, rows]`, and zero points in words
    /// `[cols / group, rows / 8]`, to which `zero_offset` is added.
    Gptq { group: usize, scale: TensorType, zero_offset: u32 },
    /// Words `[cols, rows / 8]`, scales `[cols / group, rows]`, and zero points in words
    /// `[cols / group, rows / 8]`. A word holds the even rows of eight before the odd ones.
    Awq { group: usize, scale: TensorType },
}

/// Scales of 8-bit codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// Bits of the F32 scale of the whole matrix.
    One(u32),
    /// A tensor of type `ty` with a scale for every tile of `rows` rows and `cols` columns.
    Tiles { ty: TensorType, rows: usize, cols: usize },
}

impl Scales {
    /// Returns the scale of an element as F32.
    fn at(&self, scales: &[u8], row: usize, col: usize, all_cols: usize) -> f32 {
        match *self {
            Scales::One(bits) => f32::from_bits(bits),
            Scales::Tiles { ty, rows, cols } => {
                scale_at(ty, scales, row / rows * all_cols.div_ceil(cols) + col / cols)
            }
        }
    }
}

/// Returns true if scales may have this type.
pub fn is_scale(ty: TensorType) -> bool {
    use TensorType as T;
    matches!(ty, T::F32 | T::F16 | T::BF16 | T::F8_E8M0 | T::F8_E4M3)
}

/// Returns element `index` of a tensor of scales.
fn scale_at(ty: TensorType, scales: &[u8], index: usize) -> f32 {
    let bytes = &scales[index * ty.block_bytes()..][..ty.block_bytes()];
    match ty {
        TensorType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        TensorType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        TensorType::F8_E4M3 => E4M3[usize::from(bytes[0])],
        TensorType::F8_E8M0 => 2.0 * half_of_e8m0(bytes[0]),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

impl Quantized {
    /// Returns the number of tensors that hold the matrix.
    pub fn extents(&self) -> usize {
        match self.form {
            Form::Fp8 { scales: Scales::One(_) } => 1,
            Form::Fp8 { .. } | Form::Nvfp4 { .. } | Form::Int4 { .. } => 2,
            Form::Gptq { .. } | Form::Awq { .. } => 3,
        }
    }

    /// Returns the number of bytes of a row of blocks.
    pub fn row_bytes(&self) -> usize {
        row_bytes(self.ty, self.cols)
    }

    /// Returns the offset in a row of blocks with a zero point of the nibbles of 32 columns, those of group `group`.
    fn nibbles_at(&self, group: usize) -> usize {
        let (block, first) = (self.ty.block_elements(), group * 32);
        first / block * self.ty.block_bytes() + 4 + first % block / 2
    }

    /// Makes rows from the bytes of the tensors.
    ///
    /// # Panics
    /// Panics if a tensor has too few bytes, or `out` is not as long as these rows.
    pub fn make(&self, from: &[&[u8]], rows: Range<usize>, out: &mut [u8]) {
        assert_eq!(out.len(), rows.len() * self.row_bytes(), "rows have their place");
        match self.form {
            Form::Fp8 { scales } => self.fp8(scales, from, rows, out),
            Form::Nvfp4 { factor } => self.nvfp4(factor, from, rows, out),
            Form::Int4 { group, scale } => self.int4(group, scale, from, rows, out),
            Form::Gptq { group, scale, zero_offset } => {
                self.gptq(group, scale, zero_offset, from, rows, out);
            }
            Form::Awq { group, scale } => self.awq(group, scale, from, rows, out),
        }
    }

    fn fp8(&self, scales: Scales, from: &[&[u8]], rows: Range<usize>, out: &mut [u8]) {
        let (block, bytes) = (self.ty.block_elements(), self.ty.block_bytes());
        let stored = from.get(1).copied().unwrap_or_default();
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes())) {
            let codes = from[0][row * self.cols..][..self.cols].chunks_exact(block);
            for (index, (codes, out)) in codes.zip(out.chunks_exact_mut(bytes)).enumerate() {
                let scale = scales.at(stored, row, index * block, self.cols);
                out[..block].copy_from_slice(codes);
                out[block..].copy_from_slice(&scale.to_le_bytes());
            }
        }
    }

    fn nvfp4(&self, factor: u32, from: &[&[u8]], rows: Range<usize>, out: &mut [u8]) {
        let (half, sixteenth) = (self.cols / 2, self.cols / 16);
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes())) {
            let codes = from[0][row * half..][..half].as_chunks::<32>().0;
            let scales = from[1][row * sixteenth..][..sixteenth].as_chunks::<4>().0;
            for ((codes, scales), out) in codes.iter().zip(scales).zip(out.as_chunks_mut::<40>().0)
            {
                out[..4].copy_from_slice(&factor.to_le_bytes());
                out[4..8].copy_from_slice(scales);
                for (codes, out) in
                    codes.as_chunks::<8>().0.iter().zip(out[8..].as_chunks_mut::<8>().0)
                {
                    let [a, b, c, d, e, f, g, h] = *codes;
                    let low = spread(u32::from_le_bytes([a, b, c, d]));
                    let high = spread(u32::from_le_bytes([e, f, g, h]));
                    *out = (low | high << 4).to_le_bytes();
                }
            }
        }
    }

    fn int4(
        &self,
        group: usize,
        scale: TensorType,
        from: &[&[u8]],
        rows: Range<usize>,
        out: &mut [u8],
    ) {
        let (block, bytes) = (self.ty.block_elements(), self.ty.block_bytes());
        let (half, groups) = (self.cols / 2, self.cols / group);
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes())) {
            let words = from[0][row * half..][..half].chunks_exact(block / 2);
            for (index, (words, out)) in words.zip(out.chunks_exact_mut(bytes)).enumerate() {
                let at = row * groups + index * block / group;
                let header = out.len() - block / 2;
                match self.ty {
                    // The scale is copied, as its type is the block's.
                    TensorType::I4_BF16 => out[..2].copy_from_slice(&from[1][2 * at..][..2]),
                    _ => out[..4].copy_from_slice(&word(scale_at(scale, from[1], at), 8)),
                }
                let (words, out) = (words.as_chunks::<16>().0, out[header..].as_chunks_mut().0);
                for (words, out) in words.iter().zip(out) {
                    *out = nibbles(words.as_chunks::<4>().0);
                }
            }
        }
    }

    fn gptq(
        &self,
        group: usize,
        scale: TensorType,
        zero_offset: u32,
        from: &[&[u8]],
        rows: Range<usize>,
        out: &mut [u8],
    ) {
        let zero = |group: usize, row: usize| {
            let word = u32_at(from[2], group * (self.rows / 8) + row / 8);
            (word >> (4 * (row % 8)) & 15) + zero_offset
        };
        self.headers(group, scale, zero, from[1], rows.clone(), out);
        for group in 0..self.cols / 32 {
            let at = self.nibbles_at(group);
            for (row, out) in rows.clone().zip(out.chunks_exact_mut(self.row_bytes())) {
                let words: [u32; 4] =
                    std::array::from_fn(|i| u32_at(from[0], (group * 4 + i) * self.rows + row));
                out[at..at + 16].copy_from_slice(&nibbles(&words.map(u32::to_le_bytes)));
            }
        }
    }

    fn awq(
        &self,
        group: usize,
        scale: TensorType,
        from: &[&[u8]],
        rows: Range<usize>,
        out: &mut [u8],
    ) {
        let in_row = self.rows / 8;
        // Rows 0, 2, 4 and 6 of eight come first.
        let shift = |row: usize| 4 * (row % 8 / 2 + row % 2 * 4);
        let zero =
            |group: usize, row: usize| u32_at(from[2], group * in_row + row / 8) >> shift(row) & 15;
        self.headers(group, scale, zero, from[1], rows.clone(), out);
        for group in 0..self.cols / 32 {
            let at = self.nibbles_at(group);
            let mut words = [0; 32];
            for (row, out) in rows.clone().zip(out.chunks_exact_mut(self.row_bytes())) {
                if row == rows.start || row % 8 == 0 {
                    words = std::array::from_fn(|i| {
                        u32_at(from[0], (group * 32 + i) * in_row + row / 8)
                    });
                }
                let code = |i: usize| (words[i] >> shift(row) & 15) as u8;
                for (i, out) in out[at..at + 16].iter_mut().enumerate() {
                    *out = code(i) | code(i + 16) << 4;
                }
            }
        }
    }

    /// Writes scale and zero point of every block of some rows. `scales` is `[groups, rows]`.
    fn headers(
        &self,
        group: usize,
        scale: TensorType,
        zero: impl Fn(usize, usize) -> u32,
        scales: &[u8],
        rows: Range<usize>,
        out: &mut [u8],
    ) {
        let (block, bytes) = (self.ty.block_elements(), self.ty.block_bytes());
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes())) {
            for (index, out) in out.chunks_exact_mut(bytes).enumerate() {
                let group = index * block / group;
                let scale = scale_at(scale, scales, group * self.rows + row);
                out[..4].copy_from_slice(&word(scale, zero(group, row)));
            }
        }
    }
}

/// Writes the transpose of E4M3 `[rows, cols]` as blocks of type `ty`, `[cols, rows]`. The rows begin
/// at row `first` of a matrix with these `scales`, and all rows of a block have the same scale.
///
/// # Panics
/// Panics if a length does not match.
pub(crate) fn fp8_transposed(
    ty: TensorType,
    scales: Scales,
    from: &[&[u8]],
    rows: Range<usize>,
    cols: usize,
    out: &mut [u8],
) {
    let (block, bytes) = (ty.block_elements(), ty.block_bytes());
    assert_eq!(out.len(), cols * rows.len() / block * bytes, "a transpose has its place");
    let stored = from.get(1).copied().unwrap_or_default();
    let in_row = rows.len() / block;
    for index in 0..in_row {
        let first = rows.start + index * block;
        for col in 0..cols {
            let out = &mut out[(col * in_row + index) * bytes..][..bytes];
            for (row, code) in out[..block].iter_mut().enumerate() {
                *code = from[0][(first + row) * cols + col];
            }
            let scale = scales.at(stored, first, col, cols);
            out[block..].copy_from_slice(&scale.to_le_bytes());
        }
    }
}

/// Returns the first word of a block with a zero point.
fn word(scale: f32, zero: u32) -> [u8; 4] {
    (scale.to_bits() & !ZERO_BITS | zero).to_le_bytes()
}

fn u32_at(words: &[u8], index: usize) -> u32 {
    let [a, b, c, d] = words.as_chunks::<4>().0[index];
    u32::from_le_bytes([a, b, c, d])
}

/// Spreads eight codes of four bits to eight bytes.
fn spread(codes: u32) -> u64 {
    let x = u64::from(codes);
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

/// Packs 32 codes in four words as blocks have them: byte `i` has codes `i` and `i + 16`.
fn nibbles(words: &[[u8; 4]]) -> [u8; 16] {
    let word = |i: usize| spread(u32::from_le_bytes(words[i]));
    let pair = |i: usize| u128::from(word(i) | word(i + 2) << 4);
    (pair(0) | pair(1) << 64).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dequantize;

    fn bytes(count: usize, seed: usize) -> Vec<u8> {
        (0..count).map(|i| ((i + seed) * 31 % 251) as u8).collect()
    }

    fn halves(count: usize) -> Vec<u8> {
        (0..count).flat_map(|i| f16::from_f32(0.01 * (1 + i) as f32).to_le_bytes()).collect()
    }

    /// Makes a matrix in shares of three rows, and compares it with `value(row, col)`.
    fn check(of: &Quantized, from: &[&[u8]], value: impl Fn(usize, usize) -> f32) {
        let mut made = vec![0; of.rows * of.row_bytes()];
        for (index, out) in made.chunks_mut(3 * of.row_bytes()).enumerate() {
            of.make(from, 3 * index..(3 * index + 3).min(of.rows), out);
        }
        let mut values = vec![0.0; of.rows * of.cols];
        dequantize(of.ty, &made, &mut values).unwrap();
        for (i, found) in values.into_iter().enumerate() {
            let (row, col) = (i / of.cols, i % of.cols);
            assert_eq!(found.to_bits(), value(row, col).to_bits(), "{:?} {row} {col}", of.ty);
        }
    }

    fn nibble(words: &[u8], index: usize, shift: usize) -> f32 {
        (u32_at(words, index) >> (4 * shift) & 15) as f32
    }

    #[test]
    fn scales_of_e8m0_are_powers_of_two() {
        let bits = |e| scale_at(TensorType::F8_E8M0, &[e], 0).to_bits();
        // The lowest is subnormal, and the highest is infinite.
        assert_eq!(bits(0), 0x0040_0000);
        (1..=255).for_each(|e| assert_eq!(bits(e), u32::from(e) << 23, "{e}"));
    }

    #[test]
    fn fp8_with_scales_of_every_kind() {
        let (rows, cols) = (10, 96);
        let codes: Vec<u8> = bytes(rows * cols, 3).iter().map(|code| code & 0xbf).collect();
        let scales: Vec<f32> = (0..30).map(|i| 0.3 + i as f32).collect();
        let stored: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let code = |row: usize, col: usize| E4M3[usize::from(codes[row * cols + col])];
        let of =
            |scales| Quantized { form: Form::Fp8 { scales }, ty: TensorType::F8_B32, rows, cols };
        let ty = TensorType::F32;
        let tiles = of(Scales::Tiles { ty, rows: 4, cols: 64 });
        check(&tiles, &[&codes, &stored], |row, col| {
            code(row, col) * scales[row / 4 * 2 + col / 64]
        });
        let channels = of(Scales::Tiles { ty, rows: 1, cols });
        check(&channels, &[&codes, &stored], |row, col| code(row, col) * scales[row]);
        check(&of(Scales::One(0.7_f32.to_bits())), &[&codes], |row, col| code(row, col) * 0.7);
        // E8M0: a power of two.
        let powers: Vec<u8> = (0..10).map(|i| 120 + i).collect();
        let powers_of = of(Scales::Tiles { ty: TensorType::F8_E8M0, rows: 1, cols });
        check(&powers_of, &[&codes, &powers], |row, col| {
            code(row, col) * f32::powi(2.0, row as i32 - 7)
        });
    }

    #[test]
    fn a_transpose_of_fp8_keeps_values() {
        let (rows, cols) = (64, 5);
        let codes: Vec<u8> = bytes(rows * cols, 3).iter().map(|code| code & 0xbf).collect();
        let scales = [0.5_f32, 3.0];
        let stored: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let tiles = Scales::Tiles { ty: TensorType::F32, rows: 32, cols: 128 };
        let mut made = vec![0; cols * rows / 32 * 36];
        fp8_transposed(TensorType::F8_B32, tiles, &[&codes, &stored], 0..rows, cols, &mut made);
        let mut values = vec![0.0; rows * cols];
        dequantize(TensorType::F8_B32, &made, &mut values).unwrap();
        for (i, value) in values.into_iter().enumerate() {
            let (col, row) = (i / rows, i % rows);
            assert_eq!(value, E4M3[usize::from(codes[row * cols + col])] * scales[row / 32]);
        }
    }

    #[test]
    fn nvfp4_elements_keep_their_places() {
        let (rows, cols) = (4, 128);
        let codes = bytes(rows * cols / 2, 1);
        let scales: Vec<u8> = bytes(rows * cols / 16, 7).iter().map(|code| code & 0xbf).collect();
        let factor = 0.013_f32;
        let of = Quantized {
            form: Form::Nvfp4 { factor: factor.to_bits() },
            ty: TensorType::NVFP4_F32,
            rows,
            cols,
        };
        check(&of, &[&codes, &scales], |row, col| {
            let code = codes[row * 64 + col / 2] >> (4 * (col % 2)) & 15;
            let element = crate::quant::scaled::E2M1[usize::from(code)];
            element * (E4M3[usize::from(scales[row * 8 + col / 16])] * factor)
        });
    }

    #[test]
    fn int4_of_every_group() {
        let (rows, cols) = (5, 256);
        let codes = bytes(rows * cols / 2, 1);
        for (ty, group) in [
            (TensorType::I4_BF16, 32),
            (TensorType::I4_BF16, 64),
            (TensorType::I4_Z32, 32),
            (TensorType::I4_Z128, 128),
            (TensorType::I4_Z128, 256),
        ] {
            let scale = if ty == TensorType::I4_BF16 { TensorType::BF16 } else { TensorType::F16 };
            let number = |i: usize| 0.01 * (1 + i) as f32;
            let scales: Vec<u8> = (0..rows * cols / group)
                .flat_map(|i| match scale {
                    TensorType::BF16 => bf16::from_f32(number(i)).to_le_bytes(),
                    _ => f16::from_f32(number(i)).to_le_bytes(),
                })
                .collect();
            let of = Quantized { form: Form::Int4 { group, scale }, ty, rows, cols };
            check(&of, &[&codes, &scales], |row, col| {
                let code = nibble(&codes, (row * cols + col) / 8, col % 8);
                scale_at(scale, &scales, row * (cols / group) + col / group) * (code - 8.0)
            });
        }
    }

    #[test]
    fn gptq_and_awq_are_transposed() {
        let (rows, cols) = (16, 256);
        let codes = bytes(rows * cols / 2, 1);
        for (ty, group) in
            [(TensorType::I4_Z32, 32), (TensorType::I4_Z128, 128), (TensorType::I4_Z32, 64)]
        {
            let groups = cols / group;
            let (scales, zeros) = (halves(groups * rows), bytes(groups * rows / 2, 9));
            let scale = TensorType::F16;
            let from = [&codes[..], &scales, &zeros];
            let scale_of =
                |row: usize, col: usize| scale_at(scale, &scales, col / group * rows + row);
            let form = Form::Gptq { group, scale, zero_offset: 1 };
            check(&Quantized { form, ty, rows, cols }, &from, |row, col| {
                let code = nibble(&codes, col / 8 * rows + row, col % 8);
                let zero = nibble(&zeros, col / group * (rows / 8) + row / 8, row % 8) + 1.0;
                scale_of(row, col) * (code - zero)
            });
            let form = Form::Awq { group, scale };
            check(&Quantized { form, ty, rows, cols }, &from, |row, col| {
                let place = [0, 4, 1, 5, 2, 6, 3, 7][row % 8];
                let code = nibble(&codes, col * (rows / 8) + row / 8, place);
                let zero = nibble(&zeros, col / group * (rows / 8) + row / 8, place);
                scale_of(row, col) * (code - zero)
            });
        }
    }
}
