//! All codecs, behind their one interface: what is decoded equals what was encoded, and damaged chunks do no harm.

use forebay_codec::{
    CHUNK_BYTES, CHUNK_WEIGHTS, Codec, CodecError, Compact, Container, Decoder, Encoder, Encoding,
    Float, Weights, decode_chunk,
};
use proptest::prelude::*;

#[path = "support/contents.rs"]
mod contents;
mod support;

use support::{compact, gaussian, normal};

const TILE: usize = 1 << 16;

fn encodings() -> Vec<Encoding> {
    let mut all = vec![Encoding::Raw, Encoding::Gdeflate];
    all.extend(Weights::ALL.map(Encoding::Exponents));
    all.extend([-5, 0, 1, 3, 19].map(|level| Encoding::Zstd { level }));
    all
}

fn encode(encoding: Encoding, bytes: &[u8]) -> Vec<u8> {
    // What was in the buffer stays.
    let mut encoded = b"before".to_vec();
    Encoder::new(encoding).encode(bytes, &mut encoded).unwrap();
    assert_eq!(encoded[..6], *b"before");
    encoded.split_off(6)
}

fn round_trip(encoding: Encoding, bytes: &[u8]) -> usize {
    let encoded = encode(encoding, bytes);
    let codec = encoding.codec();
    assert!(encoded.len() <= codec.encoded_bytes_max(bytes.len()), "{encoding:?}");
    let mut decoded = vec![0xa5; bytes.len()];
    codec.decode(&encoded, &mut decoded).unwrap_or_else(|error| panic!("{encoding:?}: {error}"));
    assert!(decoded == bytes, "{encoding:?}, {} bytes", bytes.len());
    encoded.len()
}

/// Returns bytes of several kinds.
fn kinds(bytes: usize) -> Vec<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(bytes as u64);
    let text = include_bytes!("../../../docs/codec.md");
    let sparse = |random: &mut fastrand::Rng| if random.u8(..) < 9 { random.u8(..) } else { 0 };
    vec![
        vec![0; bytes],
        vec![0xee; bytes],
        (0..bytes).map(|_| random.u8(..)).collect(),
        text.iter().copied().cycle().take(bytes).collect(),
        (0..bytes).map(|_| sparse(&mut random)).collect(),
        // Few symbols occur much more often than others, so that code words are long.
        (0..bytes).map(|_| random.u64(..).trailing_zeros() as u8).collect(),
        (0..bytes).map(|i| (i / 7) as u8).collect(),
    ]
}

#[test]
fn all_sizes_come_back() {
    let borders = [TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 3];
    let small = (0..40).chain([255, 256, 257, 258, 259, 300, 4095, 4096, 8191, 8192, 8193, 8194]);
    for bytes in small.chain(borders) {
        for content in kinds(bytes) {
            for encoding in encodings() {
                round_trip(encoding, &content);
            }
        }
    }
}

#[test]
fn weights_of_all_types_come_back() {
    for (name, weights, bytes) in contents::all(200_000) {
        let mut ratios = Vec::new();
        for encoding in encodings() {
            let ratio = bytes.len() as f64 / round_trip(encoding, &bytes) as f64;
            ratios.push((encoding, ratio));
        }
        let of = |encoding| ratios.iter().find(|(of, _)| *of == encoding).map(|(_, ratio)| *ratio);
        if name.starts_with("BF16, half of the tensor") {
            assert!(of(Encoding::Gdeflate) > Some(2.2), "{name}: {ratios:?}");
        }
        if let Some(weights) = weights {
            let least = if matches!(weights, Weights::Compact(_)) { 1.11 } else { 1.15 };
            assert!(of(Encoding::Exponents(weights)) > Some(least), "{name}: {ratios:?}");
        }
    }
}

/// Text becomes small, and so do zeros.
#[test]
fn gdeflate_compresses() {
    let text: Vec<u8> = include_bytes!("../../../docs/pack-format.md").repeat(8);
    assert!(round_trip(Encoding::Gdeflate, &text[..TILE]) * 3 < TILE);
    assert!(round_trip(Encoding::Gdeflate, &vec![0; CHUNK_BYTES]) < 12_000);
}

#[test]
fn the_largest_chunk_comes_back_and_a_larger_one_is_refused() {
    let weights = gaussian(Float::Bf16, CHUNK_BYTES / 2 / 4096, 4096, 5);
    for encoding in [Encoding::Exponents(Float::Bf16.into()), Encoding::Zstd { level: 1 }] {
        round_trip(encoding, &weights);
    }
    let more = vec![0; CHUNK_BYTES + 1];
    let refused = CodecError::ChunkBytes { bytes: more.len(), most: CHUNK_BYTES };
    for encoding in encodings() {
        let mut encoded = Vec::new();
        assert_eq!(Encoder::new(encoding).encode(&more, &mut encoded), Err(refused.clone()));
        assert!(encoded.is_empty());
        let mut decoded = more.clone();
        assert_eq!(encoding.codec().decode(&[], &mut decoded), Err(refused.clone()));
    }
}

#[test]
fn names_and_numbers_are_those_of_packs() {
    let expected = [(0, "raw"), (1, "exponents"), (2, "zstd"), (3, "gdeflate")];
    for (codec, (number, name)) in Codec::ALL.into_iter().zip(expected) {
        assert_eq!((codec.number(), codec.name()), (number, name));
        assert_eq!(Codec::from_number(number), Ok(codec));
        assert_eq!(Codec::from_name(name), Some(codec));
    }
    assert_eq!(Codec::from_number(4), Err(CodecError::UnknownCodec { number: 4 }));
    assert_eq!(Codec::from_name("lz4"), None);
    assert_eq!(encodings().len(), 13);
    for encoding in encodings() {
        assert_eq!(Encoder::new(encoding).encoding(), encoding);
    }
}

#[test]
fn chunks_of_another_length_are_refused() {
    for encoding in encodings() {
        let encoded = encode(encoding, &kinds(1000)[3]);
        for other in [0, 1, 999, 1001, 70_000] {
            let mut decoded = vec![0; other];
            assert!(encoding.codec().decode(&encoded, &mut decoded).is_err(), "{encoding:?}");
        }
    }
}

#[test]
fn chunks_that_are_cut_off_are_refused() {
    for encoding in encodings() {
        for content in kinds(700) {
            let encoded = encode(encoding, &content);
            let mut decoded = vec![0; content.len()];
            for len in 0..encoded.len() {
                let result = encoding.codec().decode(&encoded[..len], &mut decoded);
                assert!(result.is_err(), "{encoding:?}: {len} of {} bytes", encoded.len());
            }
        }
    }
}

/// A byte behind the chunk is an error, too.
#[test]
fn chunks_with_more_bytes_are_refused() {
    for encoding in encodings() {
        for content in kinds(700) {
            let mut encoded = encode(encoding, &content);
            encoded.push(0);
            let mut decoded = vec![0; content.len()];
            assert!(encoding.codec().decode(&encoded, &mut decoded).is_err(), "{encoding:?}");
        }
    }
}

#[test]
fn sub_chunks_are_decoded_independently() {
    let weights = gaussian(Float::F16, 3, 5000, 8);
    let mut bytes = weights.clone();
    bytes.push(9);
    let encoded = encode(Encoding::Exponents(Float::F16.into()), &bytes);
    let container = Container::read(&encoded, bytes.len()).unwrap();
    assert_eq!((container.weights(), container.parts()), (Float::F16.into(), 4));
    assert_eq!(container.rest(), [9]);
    let mut decoded = vec![0; bytes.len() - 1];
    for part in (0..container.parts()).rev() {
        let (stored, place) = container.part(part);
        assert_eq!(place.start, 2 * CHUNK_WEIGHTS * part);
        let (weights, table) = (container.weights(), container.table());
        decode_chunk(weights, table, stored, &mut decoded[place]).unwrap();
    }
    assert_eq!(decoded, weights);
    assert!(container.decode(&mut [0; 5]).is_err());
}

/// Blocks that lie in a sub-chunk, alone or with others, and bytes behind the last whole block.
#[test]
fn sub_chunks_of_blocks_are_decoded_independently() {
    for (of, in_a_part) in [(Compact::C2048, 2), (Compact::C256, 16)] {
        let mut bytes = compact(of, in_a_part + 1, of.weights(), 8);
        bytes.extend([7; 100]);
        let encoded = encode(Encoding::Exponents(of.into()), &bytes);
        let container = Container::read(&encoded, bytes.len()).unwrap();
        assert_eq!((container.weights(), container.parts()), (of.into(), 2));
        assert_eq!(container.rest(), [7; 100]);
        let mut decoded = vec![0; bytes.len() - 100];
        for part in (0..2).rev() {
            let (stored, place) = container.part(part);
            assert_eq!(place.start, in_a_part * of.bytes() * part);
            let (weights, table) = (container.weights(), container.table());
            decode_chunk(weights, table, stored, &mut decoded[place]).unwrap();
        }
        assert_eq!(decoded, bytes[..bytes.len() - 100]);
    }
}

#[test]
fn damaged_headers_of_containers_are_refused() {
    let weights = gaussian(Float::Bf16, 2, 5000, 8);
    let encoded = encode(Encoding::Exponents(Float::Bf16.into()), &weights);
    let refused = |at: usize, byte: u8| {
        let mut encoded = encoded.clone();
        encoded[at] = byte;
        Container::read(&encoded, weights.len()).map(|_| ()).unwrap_err()
    };
    assert_eq!(refused(0, 6), CodecError::FloatNumber { number: 6 });
    for zero in [1, 2, 3, 29, 30, 31] {
        assert_eq!(refused(zero, 1), CodecError::NotZero);
    }
    let expected = weights.len();
    assert_eq!(refused(4, 0x21), CodecError::DecodedBytes { bytes: expected + 1, expected });
    assert!(matches!(refused(9, encoded[8]), CodecError::TableRepeats { .. }));
    // Starts that are odd, descending, or outside.
    assert!(matches!(refused(32, 0), CodecError::PartPlace { part: 0, .. }));
    assert!(matches!(refused(36, encoded[36] ^ 1), CodecError::PartPlace { part: 1, .. }));
    assert!(matches!(refused(41, 0), CodecError::PartPlace { part: 2, .. }));
    assert!(matches!(refused(39, 0xff), CodecError::PartPlace { part: 1, .. }));
}

/// A decoder must not depend on what it decoded before, with or without error.
#[test]
fn decoders_keep_nothing_but_memory() {
    let (mut decoder, mut random) = (Decoder::default(), fastrand::Rng::with_seed(1));
    let contents = kinds(5000);
    for _ in 0..300 {
        let encoding = encodings()[random.usize(..encodings().len())];
        let content = &contents[random.usize(..contents.len())];
        let mut encoded = encode(encoding, content);
        let mut decoded = vec![0; content.len()];
        decoder.decode(encoding.codec(), &encoded, &mut decoded).unwrap();
        assert_eq!(&decoded, content);
        let at = random.usize(..encoded.len());
        encoded[at] ^= 1 << random.u8(..8);
        let _ = decoder.decode(encoding.codec(), &encoded, &mut decoded);
    }
}

/// The scale of Gaussian bytes decides how many symbols are frequent.
#[test]
fn gaussian_bytes_come_back() {
    let mut random = fastrand::Rng::with_seed(3);
    for scale in [0.2, 1.0, 5.0, 30.0] {
        let bytes: Vec<u8> =
            (0..100_000).map(|_| (normal(&mut random) * scale) as i8 as u8).collect();
        for encoding in encodings() {
            round_trip(encoding, &bytes);
        }
    }
}

fn any_encoding() -> impl Strategy<Value = Encoding> {
    prop::sample::select(encodings())
}

/// Bytes with runs, repeated parts and random parts.
fn any_content() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..300),
        (any::<u8>(), 0..2000_usize).prop_map(|(byte, times)| vec![byte; times]),
        (prop::collection::vec(0..8_u8, 1..20), 1..60_usize).prop_map(|(b, times)| b.repeat(times)),
    ];
    prop::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn any_bytes_come_back(encoding in any_encoding(), content in any_content()) {
        round_trip(encoding, &content);
    }

    #[test]
    fn damaged_chunks_do_no_harm(
        encoding in any_encoding(),
        content in any_content(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut encoded = encode(encoding, &content);
        prop_assume!(!encoded.is_empty());
        for (at, byte) in changes {
            let at = at.index(encoded.len());
            encoded[at] = byte;
        }
        let _ = encoding.codec().decode(&encoded, &mut vec![0; content.len()]);
    }

    #[test]
    fn any_bytes_are_no_chunk_or_one(
        codec in prop::sample::select(Codec::ALL.to_vec()),
        encoded in prop::collection::vec(any::<u8>(), 0..400),
        bytes in 0..1000_usize,
    ) {
        let _ = codec.decode(&encoded, &mut vec![0; bytes]);
    }
}

/// Threads have a decoder or an encoder each, and may hand them on.
#[test]
fn decoders_and_encoders_move_between_threads() {
    fn check<T: Send>(_: T) {}
    check(Decoder::default());
    check(Encoder::new(Encoding::Gdeflate));
}
