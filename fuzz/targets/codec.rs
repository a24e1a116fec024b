//! Fuzzes chunks of compressed weights. All instructions must decode a chunk to the same weights, or refuse it. Weights that are encoded must
//! come back.
//!
//! The first byte chooses the type, the next two the number of weights, 21 the table.

#![no_main]

use forebay_codec::{CHUNK_WEIGHTS, Float, Isa, Table, decode_chunk_with, encode_chunk};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    forebay_fuzz::bounded(data, |data| {
        let Some((head, chunk)) = data.split_first_chunk::<24>() else { return };
        let float = Float::ALL[usize::from(head[0]) % Float::ALL.len()];
        let count = 1 + usize::from(u16::from_le_bytes([head[1], head[2]])) % CHUNK_WEIGHTS;
        let Ok(table) = Table::from_bytes(&head[3..]) else { return };
        let decode = |isa, chunk: &[u8], count: usize| {
            let mut weights = vec![0; count * float.bytes()];
            decode_chunk_with(isa, float, &table, chunk, &mut weights).map(|()| weights)
        };
        let decoded = decode(Isa::Portable, chunk, count);
        for isa in [Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.is_available()) {
            assert_eq!(decode(isa, chunk, count), decoded);
        }
        let whole = chunk.len().min(CHUNK_WEIGHTS) / float.bytes();
        if whole > 0 {
            let weights = &chunk[..whole * float.bytes()];
            let mut encoded = Vec::new();
            encode_chunk(float, &table, weights, &mut encoded).expect("whole weights");
            assert_eq!(decode(Isa::best(), &encoded, whole).as_deref(), Ok(weights));
        }
    });
});
