//! Fuzzes chunks of all codecs. A decoder takes at most a constant in addition to input and output. Bytes that are encoded must come back.
//!
//! The first byte chooses the codec and the encoding, the next three the bytes after decoding.

#![no_main]

use forebay_codec::{Codec, Decoder, Encoder, Encoding, Weights};
use libfuzzer_sys::fuzz_target;

/// Most bytes after decoding: more than two tiles of GDeflate.
const DECODED: usize = 1 << 18;

/// Bytes that a decoder may allocate: its tables.
const ALLOWANCE_BYTES: usize = 1 << 18;

fuzz_target!(|data: &[u8]| {
    let Some((&[choice, a, b, c], encoded)) = data.split_first_chunk::<4>() else { return };
    let bytes = u32::from_le_bytes([a, b, c, 0]) as usize % DECODED;
    let codec = Codec::ALL[usize::from(choice) % Codec::ALL.len()];
    let mut decoded = vec![0; bytes];
    forebay_fuzz::within(ALLOWANCE_BYTES, || {
        let _ = Decoder::default().decode(codec, encoded, &mut decoded);
    });

    let encoding = match codec {
        Codec::Raw => Encoding::Raw,
        Codec::Exponents => {
            Encoding::Exponents(Weights::ALL[usize::from(choice) / 4 % Weights::ALL.len()])
        }
        Codec::Zstd => Encoding::Zstd { level: i32::from(choice) / 32 },
        Codec::Gdeflate => Encoding::Gdeflate,
    };
    let mut again = Vec::new();
    Encoder::new(encoding).encode(encoded, &mut again).expect("a small chunk");
    assert!(again.len() <= codec.encoded_bytes_max(encoded.len()));
    let mut back = vec![0; encoded.len()];
    codec.decode(&again, &mut back).expect("what was encoded");
    assert_eq!(back, encoded);
});
