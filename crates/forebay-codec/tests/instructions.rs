//! Encoders write the same bytes with all instructions of the processor.

use forebay_codec::{
    CHUNK_WEIGHTS, Compact, Float, Isa, Table, Weights, decode_chunk, decode_compact_with,
    encode_chunk_with, encode_compact_with,
};
use proptest::prelude::*;

mod support;

fn instructions() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// Encodes whole blocks with all instructions, of which each must say and write the same.
fn compact(of: Compact, weights: &[u8]) -> Option<Vec<u8>> {
    let bytes = Weights::from(of).bytes_of(weights.len() / 2);
    let encoded = instructions().map(|isa| {
        let mut coded = vec![0xa5; bytes];
        encode_compact_with(isa, of, weights, &mut coded).unwrap().then_some(coded)
    });
    let encoded = the_same(encoded.collect())?;
    assert!(decode_compact_the_same(of, &encoded).as_deref() == Some(weights), "{of:?}");
    Some(encoded)
}

/// Decodes whole blocks with all instructions, of which each must say and write the same.
fn decode_compact_the_same(of: Compact, coded: &[u8]) -> Option<Vec<u8>> {
    let decoded = instructions().map(|isa| {
        let mut weights = vec![0x5a; coded.len() / of.bytes() * of.plain_bytes()];
        decode_compact_with(isa, of, coded, &mut weights).ok().map(|()| weights)
    });
    the_same(decoded.collect())
}

/// Encodes a chunk with all instructions, of which each must write the same, and decodes it.
fn chunk(weights: Weights, table: &Table, bytes: &[u8]) {
    let encoded = instructions().map(|isa| {
        let mut out = vec![1, 2, 3];
        encode_chunk_with(isa, weights, table, bytes, &mut out).unwrap();
        out
    });
    let encoded = the_same(encoded.collect());
    let mut decoded = vec![0x5a; bytes.len()];
    decode_chunk(weights, table, &encoded[3..], &mut decoded).unwrap();
    assert!(decoded == bytes, "{weights:?}");
}

fn the_same<T: PartialEq + Clone>(all: Vec<T>) -> T {
    let first = all[0].clone();
    for (isa, other) in instructions().zip(all) {
        assert!(first == other, "{isa:?}");
    }
    first
}

fn bytes_of(weights: impl IntoIterator<Item = u16>) -> Vec<u8> {
    weights.into_iter().flat_map(u16::to_le_bytes).collect()
}

#[test]
fn compact_blocks_are_the_same() {
    for of in Compact::ALL {
        assert!(compact(of, &support::gaussian(Float::Bf16, 16, 4096, 3)).is_some());
        // All exponents, each for a whole block and beside others.
        for exponent in 0..=255_u16 {
            let of_block = |other: u16| {
                let exponents =
                    (0..of.weights()).map(move |i| if i == 77 { other } else { exponent });
                bytes_of(exponents.zip(0_u16..).map(|(of, i)| of << 7 | (i * 7919) & 0x807f))
            };
            assert!(compact(of, &of_block(exponent)).is_some(), "{exponent}");
            for other in [0, 1, exponent.saturating_sub(16), (exponent + 16).min(255), 240, 255] {
                compact(of, &of_block(other));
            }
        }
    }
}

#[test]
fn exceptions_are_the_same_in_every_column() {
    for of in Compact::ALL {
        for column in 0..of.weights() {
            // One above and as many below as there is room for, and one more.
            for below in [1, of.exceptions_max(), of.exceptions_max() + 1] {
                let mut weights = vec![0x3c12_u16; of.weights()];
                for i in 0..below {
                    weights[(column + 31 * i) % of.weights()] = [0x8000, 0x3312][i % 2];
                }
                let fits = compact(of, &bytes_of(weights)).is_some();
                assert_eq!(fits, below <= of.exceptions_max(), "{of:?}, {column}, {below}");
            }
        }
    }
}

#[test]
fn chunks_of_all_lengths_are_the_same() {
    let mut random = fastrand::Rng::with_seed(5);
    for weights in Weights::ALL {
        for spread in [0, 1, 40, 255] {
            let mut bytes = vec![0; weights.chunk_bytes()];
            bytes.iter_mut().for_each(|byte| *byte = random.u8(..=spread));
            let table = Table::of(weights, &bytes).unwrap();
            let around = [1, 7, 8, 31, 32, 33, 63, 64, 65, 255, 256, 1000, 1024, 2048, 2049];
            for count in around.into_iter().chain([CHUNK_WEIGHTS - 1, CHUNK_WEIGHTS]) {
                let bytes = &bytes[..weights.bytes_of(count)];
                if !bytes.is_empty() {
                    chunk(weights, &table, bytes);
                }
            }
        }
    }
}

#[test]
fn chunks_like_those_of_models_are_the_same() {
    for weights in Weights::ALL {
        let bytes = match weights {
            Weights::Plain(float) => support::gaussian(float, 8, 4096, 9),
            Weights::Compact(of) => support::compact(of, 8, 4096, 9),
        };
        let table = Table::of(weights, &bytes).unwrap();
        bytes.chunks(weights.chunk_bytes()).for_each(|bytes| chunk(weights, &table, bytes));
    }
}

proptest! {
    #[test]
    fn any_compact_blocks_are_the_same(
        weights in prop::collection::vec(prop_oneof![
            2000 => 0x3b00_u16..0x3f00,
            2000 => 0xb800_u16..0xbf00,
            1 => any::<u16>(),
            1 => Just(0_u16),
            1 => prop_oneof![Just(0x7f80_u16), Just(0xffc1), Just(0x0001), Just(0x3780)],
        ], 4096),
        hostile in prop::collection::vec(any::<u16>(), 2048),
    ) {
        for of in Compact::ALL {
            for block in bytes_of(weights.iter().copied()).chunks(of.plain_bytes()) {
                compact(of, block);
            }
            compact(of, &bytes_of(hostile.iter().copied()));
        }
    }

    #[test]
    fn any_weights_of_compact_blocks_are_the_same(
        coded in prop::collection::vec(any::<u8>(), 392),
        base in any::<u8>(),
        exceptions in prop::collection::vec(any::<u8>(), 7),
    ) {
        let mut coded = coded;
        (coded[384], coded[385]) = (base, exceptions[0] % 5);
        coded[386..].copy_from_slice(&exceptions[1..]);
        decode_compact_the_same(Compact::C256, &coded);
        coded[385] = 0;
        decode_compact_the_same(Compact::C256, &coded);
        coded.resize(3072, 0x93);
        coded.extend([base; 1]);
        coded.extend([0; 15]);
        decode_compact_the_same(Compact::C2048, &coded);
    }

    #[test]
    fn any_chunks_are_the_same(
        bytes in prop::collection::vec(any::<u8>(), 1..2 * CHUNK_WEIGHTS),
        table in prop::collection::btree_set(any::<u8>(), 21),
        mask in any::<u8>(),
    ) {
        // A table that does not fit, in any order.
        let mut offsets: Vec<u8> = table.into_iter().collect();
        offsets.rotate_left(usize::from(mask) % 21);
        let table = Table::from_bytes(&offsets).unwrap();
        let bytes: Vec<u8> = bytes.into_iter().map(|byte| byte & mask).collect();
        for weights in Weights::ALL {
            let whole = weights.bytes_of(weights.whole_weights(bytes.len()).min(CHUNK_WEIGHTS));
            if whole > 0 {
                chunk(weights, &table, &bytes[..whole]);
            }
        }
    }
}
