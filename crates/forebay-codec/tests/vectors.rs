//! Chunks that other programs wrote.
//!
//! The GDeflate streams are those of the reference encoder: libdeflate with GDeflate, as DirectStorage uses it. The first two zstd frames
//! follow RFC 8878 by hand, the others are those of the program `zstd` 1.5.4.

use forebay_codec::{Codec, CodecError};

/// A fixed code, one match. Zeros follow, up to 152 bytes.
const ZEROS: (usize, &str) = (152, "04fb0100910100008c0000006300000074");

/// Two tiles, and the last length symbol with its 16 extra bits. Zeros follow, up to 296 bytes.
const TWO_TILES: (usize, &str) = (
    296,
    "04fb0200010000008c0000008c00000063000000a3fcff00000000000000000000000000000000000000000000000\
     000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000\
     000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000\
     00000000000000000000000000000000063000000a3fcff",
);

/// A stored block. Zeros follow, up to 272 bytes.
const STORED: (usize, &str) = (
    272,
    "04fb0100a1000000040100004101000025c500004aea00006f0f000094340000b9590000de7e000003a3000028000\
     0004d0000007200000097000000bc000000e1000000060000002b00000050000000750000009a000000bf000000e4\
     000000090000002e00000053000000780000009d000000c2000000e70000000c00000031000000560000007b00000\
     005",
);

/// A code of its own. Zeros follow, up to 412 bytes.
const OWN_CODE: (usize, &str) = (
    412,
    "04fb01006109000090010000dd50811a14b5cbd004200ef108282a3154cccf690c5a981cb086e03a2b9f4899002a0\
     b154b68257b284019371a243883f0ca05ff2af08e96e924625a23d0abf7ff47ac0bbfa5d032bb3d3c3068dcb411b9\
     6040c825c2b0d0ebb2e9afbfc88c84e3fe27ca8108be4c27e6d13809bdddd2228ccb33c6d6dad192f71ce0740af07\
     5ddefc30e9535ce9553e6c26f6e93fc01b44f450265f00d004e2e5f0091b70000d24a0000162d0e00f8ef1c00da0d\
     0000eab13100a5d3190214b60f008a68000026bec2f1103e10002bc3160163410000ba5d00008a060000dd8b00004\
     2f28d00ce300b005f5c000012997576841a0000eab10100f69e00008c0500000ea100000900000000000000a40b00\
     00000000000000000000000000000000000000000001",
);

/// Matches of many distances. Zeros follow, up to 252 bytes.
const MANY_MATCHES: (usize, &str) = (
    252,
    "04fb010061090000f0000000630000008c0000000c0000004c0000000c0000008c0000000c000000cc0000000c000\
     000101a00002c0000000c000000a87c0000ac0000000c000000f8e501006c0000000c00000094e90700ec0000000c\
     000000036b3f001c0000000c00000023dbff009c000000b4b21f",
);

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
