//! Reads chunks as `docs/codec.md` describes them, bit by bit and without the decoder's code.

use forebay_codec::{Encoder, Encoding, Float, Table, encode_chunk};

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
    let base = chunk[0];
    let number = |at: usize| usize::from(chunk[at]) + 256 * usize::from(chunk[at + 1]);
    let (second, third, raw) = (number(2), number(4), number(6));
    let words = |items: usize| items.div_ceil(32) * 4;

    let mut at = 8;
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
        let mantissa_bits = rest_bits - 1;
        let sign = rest >> mantissa_bits;
        let mantissa = rest & ((1 << mantissa_bits) - 1);
        let weight = sign << (8 * bytes - 1) | usize::from(exponent) << mantissa_bits | mantissa;
        weights.extend(&weight.to_le_bytes()[..bytes]);
    }
    assert_eq!((seconds.next(), thirds.next()), (Some(second), Some(third)));
    weights
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
            Encoder::new(Encoding::Exponents(float)).encode(&bytes, &mut container).unwrap();
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
