//! Ratios and rates of codecs, and of compact BF16, on one core: for synthetic tensors, and for the bytes of files.
//!
//! `cargo run --release -p forebay-codec --example codec_rates -- [FILE...]`
//!
//! Rates and ratios are of decoded bytes. The first table takes the bytes as BF16 for compact blocks. Decoding is measured from chunks that are in the cache of the second level, so memory does not limit it.

use std::time::Instant;

use forebay_codec::{
    Compact, Decoder, Encoder, Encoding, Float, Isa, Table, Weights, decode_chunk_with,
    decode_compact_with, encode_chunk_with, encode_compact_with,
};

#[path = "../tests/support/contents.rs"]
mod contents;
#[path = "../tests/support/mod.rs"]
mod support;

use support::{compact, gaussian, normal};

/// Repetitions of a short measurement, of which the fastest counts.
const ROUNDS: usize = 20;

/// Bytes of a chunk of a pack.
const PACK_CHUNK: usize = 128 << 10;

/// Bytes of a synthetic tensor, and most bytes of a file, in tables of chunks of packs.
const TENSOR: usize = 1 << 20;
const FILE: usize = 64 << 20;

fn main() {
    pieces();
    println!("\nChunks of {} KiB:\n", PACK_CHUNK >> 10);
    println!("| bytes | codec | ratio | encode MB/s | decode MB/s |");
    println!("| --- | --- | --- | --- | --- |");
    for (name, weights, bytes) in contents::all(TENSOR) {
        chunks(name, weights, &bytes, ROUNDS);
    }
    for path in std::env::args().skip(1) {
        let mut bytes = std::fs::read(&path).expect("a file");
        bytes.truncate(FILE);
        chunks(&path, None, &bytes, 3);
    }
}

/// Prints the lines of all codecs for `bytes`.
fn chunks(name: &str, weights: Option<Weights>, bytes: &[u8], rounds: usize) {
    // Whole blocks.
    let chunk_bytes = match weights {
        Some(Weights::Compact(of)) => PACK_CHUNK / of.bytes() * of.bytes(),
        _ => PACK_CHUNK,
    };
    let general = [Encoding::Zstd { level: 3 }, Encoding::Gdeflate];
    for encoding in weights.map(Encoding::Exponents).into_iter().chain(general) {
        let (mut encoder, mut decoder) = (Encoder::new(encoding), Decoder::default());
        // Vectors that are used again, because the first use of their memory takes longer than encoding.
        let mut encoded: Vec<_> = bytes.chunks(chunk_bytes).map(|chunk| (chunk, vec![])).collect();
        let encode = fastest(rounds.min(3), bytes.len(), || {
            for (chunk, out) in &mut encoded {
                out.clear();
                encoder.encode(chunk, out).expect("a chunk");
            }
        });
        let mut decoded = vec![0; PACK_CHUNK];
        let decode = fastest(rounds, bytes.len(), || {
            for (chunk, encoded) in &encoded {
                let decoded = &mut decoded[..chunk.len()];
                decoder.decode(encoding.codec(), encoded, decoded).expect("a chunk");
            }
        });
        let stored: usize = encoded.iter().map(|(_, encoded)| encoded.len()).sum();
        let ratio = bytes.len() as f64 / stored as f64;
        let (codec, encode, decode) = (encoding.codec().name(), 1e3 * encode, 1e3 * decode);
        println!("| {name} | {codec} | {ratio:.3} | {encode:.0} | {decode:.0} |");
    }
}

/// Prints the table of codec `exponents` and compact BF16.
fn pieces() {
    println!(
        "| weights | ratio | encode GB/s: portable | AVX2 | AVX-512 | decode GB/s: portable | AVX2 | AVX-512 |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for weights in Weights::ALL {
        let (name, bytes, plain_bytes) = match weights {
            Weights::Plain(float) => {
                let bytes = support::gaussian(float, 32, 4096, 1);
                (format!("{float:?}"), bytes.clone(), bytes.len())
            }
            Weights::Compact(of) => {
                (format!("blocks {of:?}"), support::compact(of, 32, 4096, 1), 32 * 8192)
            }
        };
        let table = Table::of(weights, &bytes).expect("whole weights");
        let mut chunks: Vec<_> =
            bytes.chunks(weights.chunk_bytes()).map(|bytes| (bytes, vec![])).collect();
        let encode = with_all(|isa| {
            fastest(ROUNDS, plain_bytes, || {
                for (bytes, chunk) in &mut chunks {
                    chunk.clear();
                    encode_chunk_with(isa, weights, &table, bytes, chunk).expect("a chunk");
                }
            })
        });
        let stored: usize = chunks.iter().map(|(_, chunk)| chunk.len()).sum();
        let mut decoded = vec![0; weights.chunk_bytes()];
        let decode = with_all(|isa| {
            fastest(ROUNDS, plain_bytes, || {
                for (_, chunk) in &chunks {
                    decode_chunk_with(isa, weights, &table, chunk, &mut decoded).expect("a chunk");
                }
            })
        });
        let ratio = plain_bytes as f64 / stored as f64;
        println!("| {name} | {ratio:.3} | {encode} | {decode} |");
    }
    for of in Compact::ALL {
        let mut weights = support::gaussian(Float::Bf16, 32, 4096, 1);
        let mut coded = vec![0; weights.len() / 2 / of.weights() * of.bytes()];
        let encode = with_all(|isa| {
            fastest(ROUNDS, weights.len(), || {
                assert_eq!(encode_compact_with(isa, of, &weights, &mut coded), Ok(true));
            })
        });
        let decode = with_all(|isa| {
            fastest(ROUNDS, weights.len(), || {
                decode_compact_with(isa, of, &coded, &mut weights).expect("blocks");
            })
        });
        let ratio = weights.len() as f64 / coded.len() as f64;
        println!("| compact {of:?} | {ratio:.3} | {encode} | {decode} |");
    }
}

/// Returns the rates with all instructions, as columns of a table.
fn with_all(mut rate: impl FnMut(Isa) -> f64) -> String {
    let rates = Isa::ALL.map(|isa| match isa.is_available() {
        true => format!("{:.2}", rate(isa)),
        false => "-".to_string(),
    });
    rates.join(" | ")
}

/// Returns GB/s for work on `bytes` bytes.
fn fastest(rounds: usize, bytes: usize, mut work: impl FnMut()) -> f64 {
    let seconds = (0..rounds).map(|_| {
        let began = Instant::now();
        work();
        began.elapsed().as_secs_f64()
    });
    bytes as f64 / seconds.fold(f64::INFINITY, f64::min) / 1e9
}
