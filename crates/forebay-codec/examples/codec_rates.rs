//! Ratios and rates of the codec, and of compact BF16, for Gaussian weights, on one core.
//!
//! `cargo run --release -p forebay-codec --example codec_rates`
//!
//! Rates are of decoded bytes. Decoding is measured from chunks that are in the cache of the second level, so memory does not limit it.

use std::time::Instant;

use forebay_codec::{
    CHUNK_WEIGHTS, Compact, Float, Isa, Table, decode_chunk_with, decode_compact, encode_chunk,
    encode_compact,
};

#[path = "../tests/support/mod.rs"]
mod support;

/// Repetitions of a measurement, of which the fastest counts.
const ROUNDS: usize = 20;

fn main() {
    println!("| type | ratio | encode GB/s | decode GB/s: portable | AVX2 | AVX-512 |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for float in Float::ALL {
        let weights = support::gaussian(float, 32, 4096, 1);
        let table = Table::of(float, &weights).expect("whole weights");
        let mut chunks = Vec::new();
        let encode = fastest(weights.len(), || {
            chunks.clear();
            for weights in weights.chunks(CHUNK_WEIGHTS * float.bytes()) {
                let mut chunk = Vec::with_capacity(weights.len());
                encode_chunk(float, &table, weights, &mut chunk).expect("a chunk");
                chunks.push(chunk);
            }
        });
        let stored: usize = chunks.iter().map(Vec::len).sum();
        let decode = [Isa::Portable, Isa::Avx2, Isa::Avx512].map(|isa| {
            if !isa.is_available() {
                return "-".to_string();
            }
            let mut decoded = vec![0; CHUNK_WEIGHTS * float.bytes()];
            let rate = fastest(weights.len(), || {
                for chunk in &chunks {
                    decode_chunk_with(isa, float, &table, chunk, &mut decoded).expect("a chunk");
                }
            });
            format!("{rate:.2}")
        });
        let ratio = weights.len() as f64 / stored as f64;
        println!("| {float:?} | {ratio:.3} | {encode:.2} | {} |", decode.join(" | "));
    }
    for of in Compact::ALL {
        let mut weights = support::gaussian(Float::Bf16, 32, 4096, 1);
        let mut coded = vec![0; weights.len() / 2 / of.weights() * of.bytes()];
        let encode = fastest(weights.len(), || {
            assert_eq!(encode_compact(of, &weights, &mut coded), Ok(true));
        });
        let decode = fastest(weights.len(), || {
            decode_compact(of, &coded, &mut weights).expect("blocks");
        });
        let ratio = weights.len() as f64 / coded.len() as f64;
        println!("| compact {of:?} | {ratio:.3} | {encode:.2} | {decode:.2} | | |");
    }
}

/// Returns GB/s for work on `bytes` bytes.
fn fastest(bytes: usize, mut work: impl FnMut()) -> f64 {
    let seconds = (0..ROUNDS).map(|_| {
        let began = Instant::now();
        work();
        began.elapsed().as_secs_f64()
    });
    bytes as f64 / seconds.fold(f64::INFINITY, f64::min) / 1e9
}
