//! Compact blocks give back what was encoded, have the bytes that `docs/codec.md` describes, and damaged ones give errors.

use forebay_codec::{CodecError, Compact, Float, decode_compact, encode_compact};
use proptest::prelude::*;

mod support;

/// Encodes whole blocks. Returns `None` if they do not fit.
fn encode(of: Compact, weights: &[u8]) -> Option<Vec<u8>> {
    let mut coded = vec![0xa5; weights.len() / 2 / of.weights() * of.bytes()];
    encode_compact(of, weights, &mut coded).unwrap().then_some(coded)
}

fn decode(of: Compact, coded: &[u8]) -> Result<Vec<u8>, CodecError> {
    let mut weights = vec![0x5a; coded.len() / of.bytes() * of.weights() * 2];
    decode_compact(of, coded, &mut weights).map(|()| weights)
}

/// Returns the weights of a block as `docs/codec.md` describes it, without the decoder's code.
fn by_the_description(of: Compact, block: &[u8]) -> Vec<u16> {
    let header = of.weights() * 3 / 2;
    let (base, count) = (i32::from(block[header]), usize::from(block[header + 1]));
    let mut weights: Vec<u16> = (0..of.weights())
        .map(|column| {
            // 256 weights have their bytes, then their words.
            let piece = column / 256 * 384;
            let (word, j) = (piece + 256 + column % 256 / 8 * 4, column % 8);
            let word = u32::from_le_bytes(block[word..word + 4].try_into().unwrap());
            // Bit b of the upper byte of an even weight is bit b + 8 - 2 j of the word, and of an odd one 16 bits above, modulo 32.
            let bit = |b: usize| {
                let at = (b + 8 + 16 * (j % 2) + 32 - 4 * (j / 2)) % 32;
                i32::from(word >> at & 1 == 1)
            };
            let low = i32::from(block[piece + column % 256]);
            let code = bit(2) << 3 | bit(1) << 2 | bit(0) << 1 | low >> 7;
            (bit(7) << 15 | (base + code) << 7 | low & 127) as u16
        })
        .collect();
    for i in 0..count {
        let entry = u16::from_le_bytes([block[header + 2 + 2 * i], block[header + 3 + 2 * i]]);
        let (column, code) = (usize::from(entry % 2048), i32::from(entry / 2048));
        let exponent = match code {
            0 => 0,
            1..25 => base - code,
            _ => base + 16 + code - 25,
        };
        weights[column] = weights[column] & 0x807f | (exponent << 7) as u16;
    }
    weights
}

#[test]
fn gaussian_weights_come_back_and_are_smaller() {
    for (of, columns, least) in [(Compact::C2048, 4096, 1.32), (Compact::C256, 768, 1.30)] {
        let weights = support::gaussian(Float::Bf16, 256, columns, 7);
        let coded = support::compact(of, 256, columns, 7);
        assert_eq!(decode(of, &coded).unwrap(), weights, "{of:?}");
        let ratio = weights.len() as f64 / coded.len() as f64;
        assert!(ratio >= least, "{of:?}: {ratio}");
        let described: Vec<u8> = coded
            .chunks(of.bytes())
            .flat_map(|block| by_the_description(of, block))
            .flat_map(u16::to_le_bytes)
            .collect();
        assert!(described == weights, "{of:?}");
    }
}

#[test]
fn rows_have_the_largest_blocks_that_fit() {
    assert_eq!(Compact::of_row(4096), Some(Compact::C2048));
    assert_eq!(Compact::of_row(768), Some(Compact::C256));
    assert_eq!((Compact::of_row(100), Compact::of_row(0)), (None, None));
    assert_eq!(Compact::C2048.bytes(), 3088);
    assert_eq!(Compact::C256.bytes(), 392);
}

#[test]
fn exceptions_are_exact_up_to_the_room_for_them() {
    let ordinary = 0x3c12u16;
    // Zero, a subnormal number, far below, far above, negative ones.
    let rare = [0x0000u16, 0x0003, 0x8000, 0x3000, 0x4512, 0xb011, 0x8005, 0x3080];
    for of in Compact::ALL {
        for count in 0..=rare.len() {
            let mut weights = vec![ordinary; of.weights()];
            for (i, rare) in rare.iter().take(count).enumerate() {
                weights[(i * 37 + 5) % of.weights()] = *rare;
            }
            let weights: Vec<u8> = weights.into_iter().flat_map(u16::to_le_bytes).collect();
            match encode(of, &weights) {
                Some(coded) => assert_eq!(decode(of, &coded).unwrap(), weights, "{of:?} {count}"),
                None => assert!(count > of.exceptions_max(), "{of:?} {count}"),
            }
        }
        // No entry says infinity beside small numbers.
        let mut weights = vec![ordinary; of.weights()];
        weights[9] = 0x7f80;
        let weights: Vec<u8> = weights.into_iter().flat_map(u16::to_le_bytes).collect();
        assert_eq!(encode(of, &weights), None);
    }
}

#[test]
fn lengths_and_headers_are_checked() {
    let of = Compact::C256;
    let weights = support::gaussian(Float::Bf16, 1, 256, 1);
    let coded = encode(of, &weights).unwrap();
    let mut out = vec![0; 512];
    assert!(matches!(
        decode_compact(of, &coded[1..], &mut out),
        Err(CodecError::ChunkLength { .. })
    ));
    assert!(matches!(
        decode_compact(of, &coded, &mut out[1..]),
        Err(CodecError::PartOfABlock { .. })
    ));
    for (at, value) in [(384, 241), (385, 4), (385, 255)] {
        let mut damaged = coded.clone();
        damaged[at] = value;
        assert!(matches!(decode(of, &damaged), Err(CodecError::Block { .. })), "{at} {value}");
    }
    // Two entries for one column.
    let mut damaged = coded;
    damaged[385..390].copy_from_slice(&[2, 7, 0, 7, 0]);
    assert!(matches!(decode(of, &damaged), Err(CodecError::Block { .. })));
}

proptest! {
    #[test]
    fn whatever_is_encoded_comes_back(
        weights in prop::collection::vec(prop_oneof![
            20 => (0x3a00u16..0x3f00).prop_map(|bits| bits | 0x8000),
            40 => 0x3b00u16..0x3f00,
            1 => any::<u16>(),
            1 => Just(0u16),
        ], 2048),
    ) {
        let weights: Vec<u8> = weights.into_iter().flat_map(u16::to_le_bytes).collect();
        for of in Compact::ALL {
            if let Some(coded) = encode(of, &weights) {
                prop_assert_eq!(decode(of, &coded).unwrap(), weights.clone());
            }
        }
    }

    #[test]
    fn hostile_blocks_give_weights_or_errors(coded in prop::collection::vec(any::<u8>(), 3088), header in any::<[u8; 16]>()) {
        let mut coded = coded;
        coded[3072..].copy_from_slice(&header);
        let _ = decode(Compact::C2048, &coded);
        let _ = decode(Compact::C256, &coded[..392]);
    }
}
