//! Chunks that other programs wrote.
//!
//! The GDeflate streams are those of the reference encoder: libdeflate with GDeflate, as DirectStorage uses it. The first two zstd frames
//! follow RFC 8878 by hand, the others are those of the program `zstd` 1.5.4.

#[path = "vectors/gdeflate.rs"]
mod gdeflate;

use forebay_codec::{Codec, CodecError};
use gdeflate::{MANY_MATCHES, OWN_CODE, STORED, TWO_TILES, ZEROS};

/// The lowest ones of the numbers 1 to 600.
fn skew() -> Vec<u8> {
    (1..=600_u32).map(|number| number.trailing_zeros() as u8).collect()
}

/// Pseudorandom numbers of four bits, of which the last repeat earlier ones.
fn dynamic() -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8 & (state >> 16) as u8 & 15
    };
    let mut bytes: Vec<u8> = (0..400).map(|_| next()).collect();
    (0..200).for_each(|index| bytes.push(bytes[index + 50]));
    bytes
}

fn bytes_of((total, hex): (usize, &str)) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2).map(|two| std::str::from_utf8(two).unwrap());
    let mut bytes: Vec<u8> = digits.map(|two| u8::from_str_radix(two, 16).unwrap()).collect();
    bytes.resize(total.max(bytes.len()), 0);
    bytes
}

fn decode(codec: Codec, chunk: (usize, &str), expected: &[u8]) {
    let mut decoded = vec![0xa5; expected.len()];
    codec.decode(&bytes_of(chunk), &mut decoded).unwrap();
    assert!(decoded == expected, "{codec:?}, {} bytes", expected.len());
}

#[test]
fn gdeflate_of_the_reference() {
    decode(Codec::Gdeflate, ZEROS, &[0; 100]);
    decode(Codec::Gdeflate, TWO_TILES, &[0; 131_072]);
    let counted: Vec<u8> = (0..40_u8).map(|number| number.wrapping_mul(37)).collect();
    decode(Codec::Gdeflate, STORED, &counted);
    decode(Codec::Gdeflate, OWN_CODE, &dynamic());
    decode(Codec::Gdeflate, MANY_MATCHES, &skew());
}

#[test]
fn gdeflate_of_another_kind_is_refused() {
    let refused = |at: usize, byte: u8| {
        let mut stream = bytes_of(TWO_TILES);
        stream[at] = byte;
        Codec::Gdeflate.decode(&stream, &mut [0; 131_072]).unwrap_err()
    };
    let stream = |error| matches!(error, CodecError::Stream { .. });
    assert!(stream(refused(0, 3)) && stream(refused(1, 0xff)), "identifiers");
    assert!(stream(refused(4, 0)) && stream(refused(7, 0x80)), "tiles of another size");
    assert!(matches!(refused(2, 1), CodecError::DecodedBytes { bytes: 65_536, .. }));
    assert!(matches!(refused(4, 5), CodecError::DecodedBytes { bytes: 65_537, .. }));
    assert!(matches!(refused(11, 0xff), CodecError::Tile { tile: 1, .. }), "the last length");
    assert!(matches!(refused(15, 0xff), CodecError::Tile { tile: 0, .. }), "an offset");
    assert!(matches!(refused(12, 0x8d), CodecError::Tile { tile: 0, .. }), "a broken word");
    assert!(matches!(refused(16, 7), CodecError::Tile { tile: 0, .. }), "a block of no kind");
}

#[test]
fn zstd_of_others() {
    // A single segment with its size in one byte; one block, the last: stored, and a run.
    decode(Codec::Zstd, (0, "28b52ffd200529000068656c6c6f"), b"hello");
    decode(Codec::Zstd, (0, "28b52ffd2064230300ab"), &[0xab; 100]);
    decode(
        Codec::Zstd,
        (
            0,
            "28b52ffd0048c5010002c609883115321110051404b4e2ce2d77aeb873c79d2bee5c72e78a3b77dcb9e2c\
             e092808a88082800248a411e0efbf01e0d704c0484b55",
        ),
        &skew(),
    );
    decode(
        Codec::Zstd,
        (
            0,
            "28b52ffd00682d010070000100020001000304050607080907000593f007963a3eb0947108920cd5dcccc\
             e66370e",
        ),
        &skew(),
    );
}
