//! Matrices of quantised safetensors files: tensors of codes, scales and zero points, which become
//! blocks of one type when they are read. Values stay the same, bit for bit.

use std::ops::Range;

use half::{bf16, f16};

use crate::TensorType;
use crate::block::row_bytes;
use crate::quant::fp4::half_of_e8m0;
use crate::quant::scaled::{E4M3, ZERO_BITS};

mod floats;

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
    /// The tensors of [`Form::Gptq`] with `groups` groups of columns, and I32 `[cols]` with the group of every
    /// column. Columns of a group need not be adjacent, so elements become F32.
    GptqOrdered { groups: usize, scale: TensorType, zero_offset: u32 },
    /// Words `[cols, rows / 8]`, scales `[cols / group, rows]`, and zero points in words
    /// `[cols / group, rows / 8]`. A word holds the even rows of eight before the odd ones.
    Awq { group: usize, scale: TensorType },
    /// Words `[rows, cols / 8]`, scales `[rows, 8 * width]`, and zero points in words `[rows, width]`, of which the first
    /// `cols / group` are used. Elements become F32 if blocks would take fewer bytes.
    AwqRows { group: usize, scale: TensorType, width: usize },
    /// Bytes `[rows, cols]` and scales `[rows, cols / group]`. A code is the signed byte that is left after `zero`
    /// was subtracted. Blocks of Q8_0 need scales that F16 holds exactly; see [`are_halves`]. Otherwise elements
    /// become F32.
    Int8 { group: usize, scale: TensorType, zero: u8 },
    /// NF4: bytes of two codes each, the first in the high half; a scale for every `block` elements; and F32 `[16]` with
    /// the value of each code. Blocks go on across the ends of rows. Elements become F32, because no block type has
    /// these values.
    Nf4 { block: usize, scales: Nf4Scales },
}

/// Scales of [`Form::Nf4`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nf4Scales {
    /// F32.
    Plain,
    /// U8, then in two more tensors an F32 for every `block` scales, and F32 `[256]` with the value of each U8. A scale is
    /// the product of both, and `offset`, which holds the bits of an F32.
    Nested { block: usize, offset: u32 },
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

/// Returns true if F16 holds every number of a tensor of scales exactly.
pub fn are_halves(ty: TensorType, scales: &[u8]) -> bool {
    let mut numbers = (0..scales.len() / ty.block_bytes()).map(|i| scale_at(ty, scales, i));
    numbers.all(|scale| f16::from_f32(scale).to_f32().to_bits() == scale.to_bits())
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
            Form::Fp8 { .. } | Form::Nvfp4 { .. } | Form::Int4 { .. } | Form::Int8 { .. } => 2,
            Form::Gptq { .. } | Form::Awq { .. } | Form::AwqRows { .. } => 3,
            Form::GptqOrdered { .. } => 4,
            Form::Nf4 { scales: Nf4Scales::Plain, .. } => 3,
            Form::Nf4 { .. } => 5,
        }
    }

    /// Returns the fewest rows whose codes and scales are contiguous in every tensor, or `None` if a tensor holds a row
    /// in several pieces.
    pub fn rows_apart(&self) -> Option<usize> {
        match self.form {
            Form::Fp8 { scales: Scales::Tiles { rows, .. } } => Some(rows),
            Form::Fp8 { .. }
            | Form::Nvfp4 { .. }
            | Form::Int4 { .. }
            | Form::Int8 { .. }
            | Form::AwqRows { .. } => Some(1),
            Form::Gptq { .. } | Form::Awq { .. } | Form::GptqOrdered { .. } | Form::Nf4 { .. } => {
                None
            }
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
            Form::AwqRows { group, scale, width } => {
                self.awq_rows(group, scale, width, from, rows, out);
            }
            Form::GptqOrdered { groups, scale, zero_offset } => {
                self.gptq_ordered(groups, scale, zero_offset, from, rows, out);
            }
            Form::Int8 { group, scale, zero } => self.int8(group, scale, zero, from, rows, out),
            Form::Nf4 { block, scales } => self.nf4(block, scales, from, rows, out),
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

    fn awq_rows(
        &self,
        group: usize,
        scale: TensorType,
        width: usize,
        from: &[&[u8]],
        rows: Range<usize>,
        out: &mut [u8],
    ) {
        let (in_row, block) = (self.cols / 8, self.ty.block_elements());
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes())) {
            let factor = |group: usize| {
                let zero = u32_at(from[2], row * width + group / 8) >> (4 * (group % 8)) & 15;
                (scale_at(scale, from[1], row * 8 * width + group), zero)
            };
            let words = |first: usize| u32_at(from[0], row * in_row + first);
            if self.ty == TensorType::F32 {
                for (col, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let (scale, zero) = factor(col / group);
                    let code = words(col / 8) >> (4 * (col % 8)) & 15;
                    *out = (scale * (code as i32 - zero as i32) as f32).to_le_bytes();
                }
                continue;
            }
            for (index, out) in out.chunks_exact_mut(self.ty.block_bytes()).enumerate() {
                let (scale, zero) = factor(index * block / group);
                out[..4].copy_from_slice(&word(scale, zero));
                for (i, out) in out[4..].as_chunks_mut::<16>().0.iter_mut().enumerate() {
                    let first = index * block / 8 + 4 * i;
                    let four: [u32; 4] = std::array::from_fn(|i| words(first + i));
                    *out = nibbles(&four.map(u32::to_le_bytes));
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
mod tests;
