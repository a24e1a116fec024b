use super::*;
use crate::FileIndex;
use crate::quantized::Scales;

fn extent(length: u64) -> Extent {
    Extent { file: FileIndex(0), offset: 0, length }
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|i| (i * 31 % 251) as u8).collect()
}

/// Makes all parts, share by share.
fn made(relayout: &Relayout, from: &[&[u8]], share_bytes: usize) -> Vec<u8> {
    let (mut out, mut end) = (vec![0; relayout.bytes()], 0);
    for share in relayout.shares(share_bytes) {
        assert_eq!(share.out.start, end, "shares follow one another");
        end = share.out.end;
        relayout.make(&share, from, &mut out[share.out.clone()]);
    }
    assert_eq!(end, out.len());
    out
}

#[test]
fn an_expert_of_gpt_oss_becomes_gate_up_and_down() {
    let (rows, row_blocks) = (6, 2);
    let (blocks, scales) = (bytes(rows * row_blocks * 16), bytes(rows * row_blocks));
    let mut block = Block::default();
    let steps = vec![
        Step::Mxfp4 { blocks: 0, scales: 2, rows, row_blocks, turns: 2 },
        Step::Mxfp4 { blocks: 1, scales: 3, rows, row_blocks, turns: 1 },
    ];
    let lengths = [blocks.len(), blocks.len(), scales.len(), scales.len()];
    let part = block.push_relayout(&lengths.map(|length| extent(length as u64)), steps);
    let relayout = block.relayout.clone().unwrap();
    assert_eq!(part, 0);
    assert_eq!(block.part_bytes(), [102, 102, 204]);
    assert_eq!(block.bytes(), 408);
    assert!(std::panic::catch_unwind(move || block.push(extent(7))).is_err());
    let from = [&blocks[..], &blocks[..], &scales[..], &scales[..]];
    let whole = made(&relayout, &from, usize::MAX);
    let mut expected = vec![0; 408];
    let taken = |first, step| RowsTaken { first, step };
    mxfp4_blocks(&blocks, &scales, row_blocks, taken(0, 2), &mut expected[..102]);
    mxfp4_blocks(&blocks, &scales, row_blocks, taken(1, 2), &mut expected[102..204]);
    mxfp4_blocks(&blocks, &scales, row_blocks, RowsTaken::ALL, &mut expected[204..]);
    assert!(whole == expected);
    for share_bytes in [1, 35, 100] {
        assert!(made(&relayout, &from, share_bytes) == expected, "{share_bytes}");
    }
}

#[test]
fn quantised_heads_become_a_stack_of_halves_and_one_of_rows() {
    let (heads, plain, value, rank) = (2, 3, 2, 64);
    let row = 2 * 34;
    // Scales of 1, 2 and 0.5.
    let mut from = bytes(heads * (plain + value) * row);
    for (index, block) in from.chunks_exact_mut(34).enumerate() {
        block[..2].copy_from_slice(&[0x3c00_u16, 0x4000, 0x3800][index % 3].to_le_bytes());
    }
    let step = Step::Heads { extent: 0, heads, plain, value, rank, ty: TensorType::Q8_0 };
    assert_eq!(step.part_bytes(0), heads * rank * plain * 2);
    let mut block = Block::default();
    block.push_relayout(&[extent(from.len() as u64)], vec![step]);
    let relayout = block.relayout.unwrap();
    assert!(relayout.bytes() > from.len());
    let mut expected = Vec::<u8>::new();
    for head in from.chunks_exact((plain + value) * row) {
        for col in 0..rank {
            for row in head.chunks_exact(row).take(plain) {
                let block = &row[col / 32 * 34..][..34];
                let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
                let value = scale * f32::from(block[2 + col % 32] as i8);
                expected.extend(half::f16::from_f32(value).to_le_bytes());
            }
        }
    }
    for head in from.chunks_exact((plain + value) * row) {
        expected.extend(&head[plain * row..]);
    }
    for share_bytes in [usize::MAX, 1, 400] {
        assert!(made(&relayout, &[&from], share_bytes) == expected, "{share_bytes}");
    }
}

#[test]
fn heads_become_two_stacks() {
    let (heads, plain, value, rank, size) = (3, 4, 5, 2, 2);
    let step = Step::Heads { extent: 0, heads, plain, value, rank, ty: TensorType::BF16 };
    let from = bytes(heads * (plain + value) * rank * size);
    let relayout = Relayout { extents: 0..1, steps: vec![step] };
    let element = |head: usize, row: usize, col: usize| {
        let at = ((head * (plain + value) + row) * rank + col) * size;
        &from[at..at + size]
    };
    let mut expected = Vec::<u8>::new();
    for head in 0..heads {
        for col in 0..rank {
            (0..plain).for_each(|row| expected.extend(element(head, row, col)));
        }
    }
    for head in 0..heads {
        for row in plain..plain + value {
            (0..rank).for_each(|col| expected.extend(element(head, row, col)));
        }
    }
    for share_bytes in [usize::MAX, 1, 40] {
        assert!(made(&relayout, &[&from], share_bytes) == expected, "{share_bytes}");
    }
}

#[test]
fn a_transposed_matrix_is_divided_into_parts() {
    let (rows, cols, size) = (70, 6, 2);
    let from = bytes(rows * cols * size);
    let step = Step::Transposed { extent: 0, rows, cols, parts: 2, ty: TensorType::BF16 };
    let relayout = Relayout { extents: 0..1, steps: vec![step] };
    let mut block = Block::default();
    block.push_relayout(&[extent(from.len() as u64)], relayout.steps.clone());
    assert_eq!(block.part_bytes(), [420, 420]);
    let mut expected = Vec::<u8>::new();
    for col in 0..cols {
        (0..rows).for_each(|row| expected.extend(&from[(row * cols + col) * size..][..size]));
    }
    for share_bytes in [usize::MAX, 1, 300] {
        assert!(made(&relayout, &[&from], share_bytes) == expected, "{share_bytes}");
    }
}

#[test]
fn rows_that_take_turns_go_to_different_parts() {
    let (rows, row_bytes, turns) = (12, 5, 2);
    let from = bytes(rows * row_bytes);
    let relayout =
        Relayout { extents: 0..1, steps: vec![Step::Turns { extent: 0, rows, row_bytes, turns }] };
    let mut block = Block::from(vec![extent(7)]);
    let part = block.push_quantized(&[extent(from.len() as u64)], relayout.steps[0].clone());
    assert_eq!((part, block.part_bytes()), (1, vec![7, 30, 30]));
    let rows = || from.chunks_exact(row_bytes);
    let expected: Vec<u8> =
        rows().step_by(2).chain(rows().skip(1).step_by(2)).flatten().copied().collect();
    for share_bytes in [usize::MAX, 1, 11] {
        assert!(made(&relayout, &[&from], share_bytes) == expected, "{share_bytes}");
    }
}

#[test]
fn a_slice_keeps_the_extents_of_one_relayout_together() {
    let step =
        Step::Heads { extent: 0, heads: 1, plain: 1, value: 1, rank: 4, ty: TensorType::BF16 };
    let mut block = Block::from(vec![extent(1), extent(2)]);
    block.push_relayout(&[extent(16)], vec![step]);
    block.push(extent(3));
    block.push(extent(4));
    // Parts: 1, 2, 8, 8, 3, 4.
    let attention = block.slice(0..5);
    assert_eq!(attention.part_bytes(), [1, 2, 8, 8, 3]);
    assert_eq!(attention.relayout, block.relayout);
    let behind = block.slice(4..6);
    assert_eq!((behind.part_bytes(), behind.relayout), (vec![3, 4], None));
    let later = block.slice(1..4);
    assert_eq!(later.part_bytes(), [2, 8, 8]);
    assert_eq!(later.relayout.unwrap().extents, 1..2);
    let before = block.slice(0..2);
    assert_eq!((before.part_bytes(), before.relayout), (vec![1, 2], None));
    assert!(std::panic::catch_unwind(|| block.slice(0..3)).is_err());
}

fn fp8(rows: usize, cols: usize) -> Quantized {
    let scales = Scales::Tiles { ty: TensorType::F32, rows: 32, cols: 32 };
    Quantized { form: Form::Fp8 { scales }, ty: TensorType::F8_B32, rows, cols }
}

#[test]
fn quantised_matrices_and_others_are_parts_of_one_block() {
    let (heads, plain, value, rank) = (2, 32, 32, 64);
    let of_heads = Step::Heads { extent: 0, heads, plain, value, rank, ty: TensorType::BF16 };
    let of = fp8(2 * 64, 32);
    let transposed = TensorType::F8_B32;
    let quantised = Step::QuantizedHeads { first: 0, of: of.clone(), transposed, heads, plain };
    let mut block = Block::from(vec![extent(7)]);
    assert_eq!(block.push_relayout(&[extent(2 * 64 * 64 * 2)], vec![of_heads]), 1);
    let step = Step::Quantized { first: 0, of: fp8(64, 64) };
    assert_eq!(block.push_quantized(&[extent(64 * 64), extent(16)], step), 3);
    assert_eq!(block.push(extent(10)), 4);
    assert_eq!(block.push_quantized(&[extent(128 * 32), extent(16)], quantised), 5);
    let bytes = [7, 8192, 8192, 64 * 72, 10, 2304, 2304];
    assert_eq!(block.part_bytes(), bytes);
    // Every step has extents and parts of its own, and every slice at a step's border is a block.
    let relayout = block.relayout.clone().unwrap();
    let groups = relayout.groups();
    let ends: Vec<_> = groups.iter().map(|of| (of.extents.clone(), of.parts.clone())).collect();
    assert_eq!(ends, [(0..1, 0..1), (1..2, 1..3), (2..4, 3..4), (4..5, 4..5), (5..7, 5..7)]);
    let lengths = block.extents.iter().map(|extent| extent.length as usize);
    let read: Vec<Vec<u8>> = lengths.map(bytes_below_nan).collect();
    let from: Vec<&[u8]> = read.iter().map(Vec::as_slice).collect();
    let whole = made(&relayout, &from, 1000);
    let at = |part: usize| bytes[..part].iter().sum::<u64>() as usize;
    for first in [0, 1, 3, 4, 5] {
        for end in [1, 3, 4, 5, 7].into_iter().filter(|end| *end > first) {
            let slice = block.slice(first..end);
            assert_eq!(slice.part_bytes(), bytes[first..end]);
            let start = groups.iter().find(|of| of.parts.start == first).unwrap();
            let from = &from[start.extents.start..][..slice.extents.len()];
            let expected = &whole[at(first)..at(end)];
            match slice.relayout {
                Some(of) if of.extents == (0..from.len()) => {
                    assert!(made(&of, from, 100) == expected, "{first}..{end}");
                }
                Some(of) => assert_eq!(of.parts(), 2, "the heads of plain weights alone"),
                None => assert!(from.concat() == expected, "{first}..{end}"),
            }
        }
    }
    assert!(std::panic::catch_unwind(|| block.slice(0..2)).is_err());
}

fn bytes_below_nan(count: usize) -> Vec<u8> {
    bytes(count).iter().map(|byte| byte & 0xbf).collect()
}
