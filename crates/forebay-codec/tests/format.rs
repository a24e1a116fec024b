//! Reads chunks as `docs/codec.md` describes them, bit by bit and without the decoder's code.

use forebay_codec::{Compact, Encoder, Encoding, Float, Table, encode_chunk};

mod support;

/// Reads the chunk of `count` weights.
fn read(float: Float, table: &[u8], chunk: &[u8], count: usize) -> Vec<u8> {
    let (bytes, exponent_bits) = match float {
        Float::Bf16 => (2, 8),
        Float::F16 => (2, 5),
        Float::F8E4M3 => (1, 4),
        Float::F8E5M2 => (1, 5),
    };
    let rest_bits = 8 * bytes - exponent_bits;
    let mut weights = Vec::new();
    for (exponent, rest) in read_parts(rest_bits, 0, table, chunk, count) {
        let mantissa_bits = rest_bits - 1;
        let sign = rest >> mantissa_bits;
        let mantissa = rest & ((1 << mantissa_bits) - 1);
        let weight = sign << (8 * bytes - 1) | usize::from(exponent) << mantissa_bits | mantissa;
        weights.extend(&weight.to_le_bytes()[..bytes]);
    }
    weights
}

/// Reads exponents, and the other bits of each weight. `ends` is the number of bytes between the header and the weights.
fn read_parts(
    rest_bits: usize,
    ends: usize,
    table: &[u8],
    chunk: &[u8],
    count: usize,
) -> Vec<(u8, usize)> {
    let base = chunk[0];
    let number = |at: usize| usize::from(chunk[at]) + 256 * usize::from(chunk[at + 1]);
    let (second, third, raw) = (number(2), number(4), number(6));
    let words = |items: usize| items.div_ceil(32) * 4;

    let mut at = 8 + ends;
    let mut part = |bytes: usize| {
        at += bytes;
        &chunk[at - bytes..at]
    };
    let rest_bytes = part(if rest_bits >= 8 { count.div_ceil(32) * 32 } else { 0 });
    let rest_maps: Vec<&[u8]> = (0..rest_bits % 8).map(|_| part(words(count))).collect();
    let first: Vec<&[u8]> = (0..2).map(|_| part(words(count))).collect();
    let of_second: Vec<&[u8]> = (0..2).map(|_| part(words(second))).collect();
    let of_third: Vec<&[u8]> = (0..4).map(|_| part(words(third))).collect();
    let raws = part(raw.div_ceil(4) * 4);
    assert_eq!(at, chunk.len());

    let code = |maps: &[&[u8]], item: usize| -> usize {
        maps.iter()
            .enumerate()
            .map(|(bit, map)| usize::from(map[item / 8] >> (item % 8) & 1) << bit)
            .sum()
    };
    let (mut seconds, mut thirds, mut raws) = (0.., 0.., raws.iter());
    let mut weights = Vec::new();
    for item in 0..count {
        let offset = |code: usize| base.wrapping_add(table[code]);
        let exponent = match code(&first, item) {
            3 => match code(&of_second, seconds.next().unwrap()) {
                3 => match code(&of_third, thirds.next().unwrap()) {
                    15 => *raws.next().unwrap(),
                    code => offset(6 + code),
                },
                code => offset(3 + code),
            },
            code => offset(code),
        };
        let low = rest_bytes.get(item).copied().unwrap_or(0);
        let rest = usize::from(low) | code(&rest_maps, item) << if rest_bits >= 8 { 8 } else { 0 };
        weights.push((exponent, rest));
    }
    assert_eq!((seconds.next(), thirds.next()), (Some(second), Some(third)));
    weights
}

/// Reads the chunk of `blocks` compact blocks.
fn read_blocks(of: Compact, table: &[u8], chunk: &[u8], blocks: usize) -> Vec<u8> {
    let (block_weights, end_bytes) = match of {
        Compact::C2048 => (2048, 16),
        Compact::C256 => (256, 8),
    };
    let mask = u32::from(chunk[8]) | u32::from(chunk[9]) << 8;
    let list = 8 + (2 + blocks).div_ceil(4) * 4;
    let ends = list - 8 + mask.count_ones() as usize * end_bytes;
    let weights = read_parts(8, ends, table, chunk, blocks * block_weights);
    let mut listed = chunk[list..].chunks(end_bytes);
    let mut decoded = Vec::new();
    for (block, weights) in weights.chunks(block_weights).enumerate() {
        let lowest = chunk[10 + block];
        for piece in weights.chunks(256) {
            let codes: Vec<u32> =
                piece.iter().map(|weight| u32::from(weight.0 - lowest.min(240))).collect();
            assert!(codes.iter().all(|code| *code < 16));
            let low = piece.iter().zip(&codes);
            decoded.extend(low.map(|(weight, code)| (code << 7) as u8 | weight.1 as u8 & 0x7f));
            for (weights, codes) in piece.chunks(8).zip(codes.chunks(8)) {
                // Where the upper bits of the code of each weight are in the word, and above them the bit from bit 7.
                let at = [8, 24, 4, 20, 0, 16, 28, 12];
                let word = (0..8).fold(0, |word, j| {
                    word | codes[j] >> 1 << at[j] | (weights[j].1 as u32 >> 7) << (at[j] + 3)
                });
                decoded.extend(word.to_le_bytes());
            }
        }
        if mask >> block & 1 == 1 {
            decoded.extend(listed.next().unwrap());
        } else {
            decoded.push(lowest);
            decoded.extend(vec![0; end_bytes - 1]);
        }
    }
    decoded
}

#[test]
fn chunks_of_blocks_are_as_described() {
    for of in Compact::ALL {
        for count in [1, 2, 16] {
            let count = count.min(4096 / of.weights());
            let mut blocks = support::compact(of, count, of.weights(), 3);
            // Bytes without sense in every other block: also its end.
            for block in blocks.chunks_mut(of.bytes()).step_by(2) {
                fastrand::Rng::with_seed(2).fill(&mut block[of.bytes() - 40..]);
            }
            let table = Table::of(of, &blocks).unwrap();
            let mut chunk = Vec::new();
            encode_chunk(of, &table, &blocks, &mut chunk).unwrap();
            assert!(read_blocks(of, &table.to_bytes(), &chunk, count) == blocks, "{of:?}");
        }
    }
}

#[test]
fn chunks_are_as_described() {
    for float in Float::ALL {
        let mut weights = support::gaussian(float, 1, 1000, 11);
        // Numbers that are seldom: infinities, NaNs, zeros and subnormal numbers.
        let end = weights.len();
        fastrand::Rng::with_seed(2).fill(&mut weights[end - 200..]);
        let table = Table::of(float, &weights).unwrap();
        let mut chunk = Vec::new();
        encode_chunk(float, &table, &weights, &mut chunk).unwrap();
        let count = weights.len() / float.bytes();
        assert_eq!(read(float, &table.to_bytes(), &chunk, count), weights, "{float:?}");
    }
}

/// Reads a container as `docs/codec.md` describes it.
#[test]
fn containers_are_as_described() {
    for (number, float) in Float::ALL.into_iter().enumerate() {
        let width = if number < 2 { 2 } else { 1 };
        for (weights, rest) in [(0, 0), (0, width - 1), (1, 0), (4096, width - 1), (9000, 0)] {
            let mut bytes = support::gaussian(float, 1, weights, 3);
            bytes.extend(vec![0x77; rest]);
            let mut container = Vec::new();
            Encoder::new(Encoding::Exponents(float.into())).encode(&bytes, &mut container).unwrap();
            let word =
                |at: usize| u32::from_le_bytes(container[at..at + 4].try_into().unwrap()) as usize;
            assert_eq!(container[..4], [number as u8, 0, 0, 0]);
            assert_eq!(word(4), bytes.len());
            assert_eq!(container[29..32], [0; 3]);
            let parts = weights.div_ceil(4096);
            assert_eq!(word(32), 36 + 4 * parts);
            let mut decoded = Vec::new();
            for part in 0..parts {
                let stored = &container[word(32 + 4 * part)..word(36 + 4 * part)];
                let count = 4096.min(weights - 4096 * part);
                decoded.extend(read(float, &container[8..29], stored, count));
            }
            decoded.extend(&container[word(32 + 4 * parts)..]);
            assert_eq!(decoded, bytes, "{float:?}, {weights} weights");
        }
    }
}

/// Containers of compact blocks, of which some are in the last sub-chunk, and one is not whole.
#[test]
fn containers_of_blocks_are_as_described() {
    for (number, of) in [(4, Compact::C2048), (5, Compact::C256)] {
        let in_a_part = 4096 / of.weights();
        for (blocks, rest) in [(0, 0), (0, 9), (1, 1), (in_a_part, of.bytes() - 1), (37, 0)] {
            let mut bytes = support::compact(of, blocks, of.weights(), 3);
            bytes.extend(vec![0x77; rest]);
            let mut container = Vec::new();
            let mut encoder = Encoder::new(Encoding::Exponents(of.into()));
            encoder.encode(&bytes, &mut container).unwrap();
            let word =
                |at: usize| u32::from_le_bytes(container[at..at + 4].try_into().unwrap()) as usize;
            assert_eq!((container[0], word(4)), (number, bytes.len()));
            let mut decoded = Vec::new();
            for part in 0..blocks.div_ceil(in_a_part) {
                let stored = &container[word(32 + 4 * part)..word(36 + 4 * part)];
                let count = in_a_part.min(blocks - in_a_part * part);
                decoded.extend(read_blocks(of, &container[8..29], stored, count));
            }
            decoded.extend(&container[word(32 + 4 * blocks.div_ceil(in_a_part))..]);
            assert!(decoded == bytes, "{of:?}, {blocks} blocks");
        }
    }
}

/// The bytes of the example in `docs/codec.md`.
#[test]
fn the_example_is_true() {
    // 1.5, -0.5, 2.0 and 0.0 as BF16.
    let weights: Vec<u8> =
        [0x3fc0_u16, 0xbf00, 0x4000, 0].iter().flat_map(|w| w.to_le_bytes()).collect();
    let table = Table::of(Float::Bf16, &weights).unwrap();
    let mut chunk = Vec::new();
    encode_chunk(Float::Bf16, &table, &weights, &mut chunk).unwrap();
    assert_eq!(table.to_bytes()[..5], [0x00, 0x7e, 0x7f, 0x80, 0x01]);
    assert_eq!(chunk.len(), 8 + 32 + 8 + 8);
    assert_eq!(chunk[..8], [0, 0, 1, 0, 0, 0, 0, 0], "base 0, one code of the first level is 3");
    assert_eq!(chunk[8..12], [0x40, 0x80, 0, 0], "sign and mantissa");
    assert_eq!(chunk[40..48], [0b0110, 0, 0, 0, 0b0101, 0, 0, 0], "codes 2, 1, 3, 0");
    assert_eq!(chunk[48..56], [0; 8], "code 0 of the second level");
}
