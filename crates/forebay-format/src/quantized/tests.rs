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
    let of = |scales| Quantized { form: Form::Fp8 { scales }, ty: TensorType::F8_B32, rows, cols };
    let ty = TensorType::F32;
    let tiles = of(Scales::Tiles { ty, rows: 4, cols: 64 });
    check(&tiles, &[&codes, &stored], |row, col| code(row, col) * scales[row / 4 * 2 + col / 64]);
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
fn int8_of_every_group() {
    let (rows, cols) = (5, 96);
    let codes = bytes(rows * cols, 1);
    for (ty, group, zero) in [
        (TensorType::Q8_0, 96, 0),
        (TensorType::Q8_0, 32, 128),
        (TensorType::F32, 96, 128),
        (TensorType::F32, 8, 0),
    ] {
        let groups = cols / group;
        let number = |i: usize| bf16::from_f32(0.003 * (1 + i) as f32);
        let scales: Vec<u8> = (0..rows * groups).flat_map(|i| number(i).to_le_bytes()).collect();
        let form = Form::Int8 { group, scale: TensorType::BF16, zero };
        check(&Quantized { form, ty, rows, cols }, &[&codes, &scales], |row, col| {
            let code = i32::from(codes[row * cols + col]);
            let code = if zero == 0 { code as i8 as i32 } else { code - 128 };
            number(row * groups + col / group).to_f32() * code as f32
        });
    }
}

#[test]
fn numbers_of_bf16_may_be_too_small_for_f16() {
    let stored = |value: f32| bf16::from_f32(value).to_le_bytes();
    let of = |value: f32| are_halves(TensorType::BF16, &[stored(0.5), stored(value)].concat());
    assert!(of(0.0037) && of(f32::powi(2.0, -17)) && of(0.0));
    assert!(!of(3e-6) && !of(1e5) && !of(f32::powi(2.0, -30)));
}

#[test]
fn gptq_with_columns_in_any_order() {
    let (rows, cols, groups) = (16, 64, 3);
    let (codes, scales) = (bytes(rows * cols / 2, 1), halves(groups * rows));
    let zeros = bytes(groups * rows / 2, 9);
    let group_of = |col: usize| col * 7 % 11 % groups;
    let order: Vec<u8> =
        (0..cols as u32).flat_map(|col| (group_of(col as usize) as u32).to_le_bytes()).collect();
    for zero_offset in [0, 1] {
        let scale = TensorType::F16;
        let form = Form::GptqOrdered { groups, scale, zero_offset };
        let of = Quantized { form, ty: TensorType::F32, rows, cols };
        check(&of, &[&codes, &scales, &zeros, &order], |row, col| {
            let group = group_of(col);
            let code = nibble(&codes, col / 8 * rows + row, col % 8);
            let zero = nibble(&zeros, group * (rows / 8) + row / 8, row % 8);
            let zero = zero + zero_offset as f32;
            scale_at(scale, &scales, group * rows + row) * (code - zero)
        });
    }
}

#[test]
fn nf4_with_scales_of_both_kinds() {
    // A block of 64 elements goes on across the end of a row.
    let (rows, cols, block) = (10, 48, 64);
    let floats = |count: usize, first: f32| -> Vec<u8> {
        (0..count).flat_map(|i| (first + 0.01 * i as f32).to_le_bytes()).collect()
    };
    let codes = bytes(rows * cols / 2, 1);
    let (values, of_code, outer) = (floats(16, -0.1), floats(256, -1.0), floats(2, 0.3));
    let code = |at: usize| {
        let byte = codes[at / 2];
        usize::from(if at.is_multiple_of(2) { byte >> 4 } else { byte & 15 })
    };
    let float = |of: &[u8], index: usize| scale_at(TensorType::F32, of, index);
    let plain = floats(8, 0.5);
    let form = Form::Nf4 { block, scales: Nf4Scales::Plain };
    let of = Quantized { form, ty: TensorType::F32, rows, cols };
    check(&of, &[&codes, &plain, &values], |row, col| {
        let at = row * cols + col;
        float(&values, code(at)) * float(&plain, at / block)
    });
    let (nested, offset) = (bytes(8, 5), 0.07_f32);
    let scales = Nf4Scales::Nested { block: 4, offset: offset.to_bits() };
    let of = Quantized { form: Form::Nf4 { block, scales }, ..of };
    check(&of, &[&codes, &nested, &values, &outer, &of_code], |row, col| {
        let at = row * cols + col;
        let scale = at / block;
        let inner = float(&of_code, usize::from(nested[scale]));
        float(&values, code(at)) * (inner * float(&outer, scale / 4) + offset)
    });
}

#[test]
fn awq_by_rows() {
    let (rows, cols, scale) = (5, 256, TensorType::F16);
    let codes = bytes(rows * cols / 2, 1);
    for (ty, group) in [
        (TensorType::I4_Z128, 128),
        (TensorType::I4_Z32, 64),
        (TensorType::I4_Z32, 32),
        (TensorType::F32, 128),
        (TensorType::F32, 16),
    ] {
        // There are more places than groups.
        let width = (cols / group).div_ceil(8) + 1;
        let (scales, zeros) = (halves(rows * 8 * width), bytes(rows * width * 4, 9));
        let form = Form::AwqRows { group, scale, width };
        check(&Quantized { form, ty, rows, cols }, &[&codes, &scales, &zeros], |row, col| {
            let code = nibble(&codes, row * cols / 8 + col / 8, col % 8);
            let zero = nibble(&zeros, row * width + col / group / 8, col / group % 8);
            scale_at(scale, &scales, row * 8 * width + col / group) * (code - zero)
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
        let scale_of = |row: usize, col: usize| scale_at(scale, &scales, col / group * rows + row);
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
