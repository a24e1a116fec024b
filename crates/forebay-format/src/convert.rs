//! Converts weights into the layouts that other files use for the same values.

use half::f16;

use crate::TensorType;
use crate::quant::dequantize;

/// Selection of every `step`-th row of a tensor, from row `first` on.
#[derive(Debug, Clone, Copy)]
pub struct RowsTaken {
    pub first: usize,
    pub step: usize,
}

impl RowsTaken {
    pub const ALL: RowsTaken = RowsTaken { first: 0, step: 1 };
}

/// Bytes of a block of gpt-oss's `*_blocks` without its scale, and of a block of
/// `TensorType::MXFP4`. Both hold 32 elements.
const NIBBLES: usize = 16;
pub(crate) const BLOCK: usize = 17;

/// Converts gpt-oss's MXFP4 as safetensors files hold it into [`crate::TensorType::MXFP4`].
/// `blocks` is `[rows, row_blocks, 16]`, and `scales` is `[rows, row_blocks]`.
///
/// Scales and elements are the same, but in another order. In `blocks`, byte `j` of a block holds
/// the elements `2j` (low) and `2j + 1`. In `out`, it holds `j` and `j + 16`. The rows `taken`
/// become adjacent, and `out` receives as many as fit. gpt-oss stores gate and up in one tensor,
/// with gate in the even rows.
///
/// # Panics
/// Panics if `out` is not a whole number of rows, or if there are too few rows.
pub fn mxfp4_blocks(
    blocks: &[u8],
    scales: &[u8],
    row_blocks: usize,
    taken: RowsTaken,
    out: &mut [u8],
) {
    assert!(out.len().is_multiple_of(row_blocks * BLOCK), "mxfp4_blocks: no whole rows");
    for (index, out) in out.chunks_exact_mut(row_blocks * BLOCK).enumerate() {
        let at = (taken.first + index * taken.step) * row_blocks;
        let blocks = &blocks[at * NIBBLES..][..row_blocks * NIBBLES];
        let blocks = blocks.as_chunks::<NIBBLES>().0;
        let scales = &scales[at..][..row_blocks];
        let out = out.as_chunks_mut::<BLOCK>().0;
        for ((block, scale), out) in blocks.iter().zip(scales).zip(out) {
            out[0] = *scale;
            let (first, second) = block.split_at(NIBBLES / 2);
            for i in 0..NIBBLES / 2 {
                out[1 + 2 * i] = (first[i] & 15) | second[i] << 4;
                out[2 + 2 * i] = first[i] >> 4 | (second[i] & 0xf0);
            }
        }
    }
}

/// Writes the transpose of `from` to `to`, converted to [`TensorType::F16`]. `from` is `[rows,
/// cols]` of type `ty`, and `to` is `[cols, rows]`. Each value is decoded and rounded to the
/// nearest f16.
///
/// # Panics
/// Panics if `ty` has no decoder, if rows are not whole blocks, or if a length does not match.
pub fn halves_transposed(ty: TensorType, from: &[u8], rows: usize, cols: usize, to: &mut [u8]) {
    let mut values = vec![0.0; rows * cols];
    dequantize(ty, from, &mut values).expect("whole rows of weights");
    let halves: Vec<u8> =
        values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
    transpose(&halves, rows, cols, 2, to);
}

/// Side of a tile in elements. The tile's lines of both matrices fit in the L1 cache.
const TILE: usize = 32;

/// Writes the transpose of `from` `[rows, cols]` to `to` `[cols, rows]`. Elements have `size`
/// bytes.
///
/// # Panics
/// Panics if `size` is not 2 or 4, or if a length does not match.
pub fn transpose(from: &[u8], rows: usize, cols: usize, size: usize, to: &mut [u8]) {
    assert!(
        to.len() == from.len(),
        "transpose: {} and {} bytes are not {rows} x {cols} of {size}",
        from.len(),
        to.len()
    );
    transposed_rows(from, rows, cols, size, 0, to);
}

/// Writes rows of the transpose of `from` `[rows, cols]` to `to`: as many as it has room for, from row `first` on. Elements
/// have `size` bytes.
///
/// # Panics
/// Panics if `size` is not 2 or 4, or if a length does not match.
pub fn transposed_rows(
    from: &[u8],
    rows: usize,
    cols: usize,
    size: usize,
    first: usize,
    to: &mut [u8],
) {
    match size {
        2 => transpose_columns::<2>(from, rows, cols, first, to),
        4 => transpose_columns::<4>(from, rows, cols, first, to),
        _ => panic!("transpose: elements of {size} bytes"),
    }
}

fn transpose_columns<const SIZE: usize>(
    from: &[u8],
    rows: usize,
    cols: usize,
    first: usize,
    to: &mut [u8],
) {
    let count = to.len() / (rows * SIZE).max(1);
    assert!(
        from.len() == rows * cols * SIZE
            && to.len() == count * rows * SIZE
            && first + count <= cols,
        "transpose: {} and {} bytes are not {rows} x {cols} of {SIZE}",
        from.len(),
        to.len()
    );
    let (from, to) = (from.as_chunks::<SIZE>().0, to.as_chunks_mut::<SIZE>().0);
    for row in (0..rows).step_by(TILE) {
        for col in (0..count).step_by(TILE) {
            let end = (row + TILE).min(rows);
            for c in col..(col + TILE).min(count) {
                let out = &mut to[c * rows..][row..end];
                for (out, r) in out.iter_mut().zip(row..end) {
                    *out = from[r * cols + first + c];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TensorType, dequantize};

    #[test]
    fn mxfp4_elements_keep_their_places() {
        let row_blocks = 3;
        let blocks: Vec<u8> = (0..6 * row_blocks * 16).map(|i| (i * 37 % 251) as u8).collect();
        let scales: Vec<u8> = (0..6 * row_blocks).map(|i| 120 + i as u8).collect();
        let magnitudes = [0.0_f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let value = |row: usize, col: usize| {
            let block = row * row_blocks + col / 32;
            let nibble = blocks[block * 16 + col % 32 / 2] >> (4 * (col % 2)) & 15;
            let sign = if nibble < 8 { 1.0 } else { -1.0 };
            let scale = f32::powi(2.0, i32::from(scales[block]) - 127);
            sign * magnitudes[usize::from(nibble & 7)] * scale
        };
        for (taken, rows) in [
            (RowsTaken::ALL, 6),
            (RowsTaken { first: 1, step: 2 }, 3),
            (RowsTaken { first: 4, step: 1 }, 2),
        ] {
            let mut out = vec![0; rows * row_blocks * 17];
            mxfp4_blocks(&blocks, &scales, row_blocks, taken, &mut out);
            let mut values = vec![0.0; rows * row_blocks * 32];
            dequantize(TensorType::MXFP4, &out, &mut values).unwrap();
            for (i, got) in values.iter().enumerate() {
                let (row, col) = (i / (row_blocks * 32), i % (row_blocks * 32));
                assert_eq!(*got, value(taken.first + row * taken.step, col), "row {row}, {col}");
            }
        }
    }

    #[test]
    fn a_transpose_of_every_shape() {
        for (rows, cols) in [(1, 1), (128, 512), (33, 70), (5, 1), (0, 3)] {
            for size in [2, 4] {
                let from: Vec<u8> = (0..rows * cols * size).map(|i| (i * 7 % 253) as u8).collect();
                let mut to = vec![0; from.len()];
                transpose(&from, rows, cols, size, &mut to);
                for (r, c) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
                    let (at, from_at) = ((c * rows + r) * size, (r * cols + c) * size);
                    assert_eq!(to[at..at + size], from[from_at..from_at + size]);
                }
            }
        }
    }
}
