//! Fuzzes chunks of compressed weights. All instructions must decode a chunk to the same weights, or refuse it. Weights that are encoded must
//! come back.
//!
//! The first byte chooses the type, the next two the number of weights, 21 the table.

#![no_main]

use forebay_codec::{CHUNK_WEIGHTS, Isa, Table, Weights, decode_chunk_with, encode_chunk};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    forebay_fuzz::bounded(data, |data| {
        let Some((head, chunk)) = data.split_first_chunk::<24>() else { return };
        let weights = Weights::ALL[usize::from(head[0]) % Weights::ALL.len()];
        let count = 1 + usize::from(u16::from_le_bytes([head[1], head[2]])) % CHUNK_WEIGHTS;
        let Ok(table) = Table::from_bytes(&head[3..]) else { return };
        let decode = |isa, chunk: &[u8], count: usize| {
            let mut decoded = vec![0; weights.bytes_of(count)];
            decode_chunk_with(isa, weights, &table, chunk, &mut decoded).map(|()| decoded)
        };
        let decoded = decode(Isa::Portable, chunk, count);
        for isa in [Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.is_available()) {
            assert_eq!(decode(isa, chunk, count), decoded);
        }
        let whole = weights.whole_weights(chunk.len()).min(CHUNK_WEIGHTS);
        if whole > 0 {
            let plain = &chunk[..weights.bytes_of(whole)];
            let mut encoded = Vec::new();
            encode_chunk(weights, &table, plain, &mut encoded).expect("whole weights");
            assert_eq!(decode(Isa::best(), &encoded, whole).as_deref(), Ok(plain));
        }
    });
});
