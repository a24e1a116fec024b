//! Decodes damaged chunks of all codecs, many in a short time: a panic, a byte behind the output, or a wrong result of an undamaged chunk
//! ends the program with an error.
//!
//! `cargo run --release -p forebay-codec --example fuzz_decoders -- INPUTS [SEED] [THREADS]`
//!
//! Overflow checks make it stricter: `CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true`.

#[path = "common/fuzz.rs"]
mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use common::Fuzz;
use forebay_codec::{Codec, Compact, Decoder, Encoder, Encoding, Weights, encode_compact};

/// Bytes behind the output that must stay as they are.
const BEHIND: usize = 64;
const UNTOUCHED: u8 = 0x5a;

/// A valid chunk.
struct Seed {
    codec: Codec,
    encoded: Vec<u8>,
    plain: Vec<u8>,
}

fn main() -> ExitCode {
    let Some(fuzz) = Fuzz::from_arguments("fuzz_decoders") else { return ExitCode::from(2) };
    let seeds = seeds();
    println!("{} valid chunks", seeds.len());
    fuzz.run(|| Worker::new(&seeds), Worker::step)
}

/// Returns small valid chunks of all codecs and many contents.
fn seeds() -> Vec<Seed> {
    let mut random = fastrand::Rng::with_seed(9);
    let mut plains: Vec<Vec<u8>> = vec![Vec::new(), vec![7], vec![0; 100], vec![1; 3000]];
    for bytes in [2, 31, 64, 300, 1000, 2500] {
        plains.push((0..bytes).map(|_| random.u8(..)).collect());
        plains.push((0..bytes).map(|_| random.u8(..4)).collect());
        let skewed = |random: &mut fastrand::Rng| random.u64(..).trailing_zeros() as u8;
        plains.push((0..bytes).map(|_| skewed(&mut random)).collect());
        let words = [&b"weights "[..], b"of a ", b"tensor ", b"stream, ", b"stream "];
        let text = (0..bytes).flat_map(|_| words[random.usize(..words.len())]);
        plains.push(text.copied().take(bytes).collect());
        let near = |random: &mut fastrand::Rng| 0x3c00 + random.u16(..0x700);
        plains.push((0..bytes).flat_map(|_| near(&mut random).to_le_bytes()).collect());
    }
    // Two tiles, and two sub-chunks.
    plains.push(vec![3; 65_540]);
    plains.push((0..8_300).map(|_| random.u8(60..64)).collect());
    // Compact blocks: a few, and more than a sub-chunk has.
    for (of, blocks) in [(Compact::C256, 3), (Compact::C256, 17), (Compact::C2048, 1)] {
        let near = |random: &mut fastrand::Rng| 0x3c00 + random.u16(..0x700);
        let count = blocks * of.weights();
        let plain: Vec<u8> = (0..count).flat_map(|_| near(&mut random).to_le_bytes()).collect();
        let mut coded = vec![0; blocks * of.bytes()];
        assert_eq!(encode_compact(of, &plain, &mut coded), Ok(true));
        plains.push(coded);
    }
    let mut encodings: Vec<Encoding> = Weights::ALL.map(Encoding::Exponents).to_vec();
    encodings.extend([Encoding::Raw, Encoding::Gdeflate, Encoding::Gdeflate, Encoding::Gdeflate]);
    encodings.extend([1, 3, 19].map(|level| Encoding::Zstd { level }));
    let mut seeds = Vec::new();
    for encoding in encodings {
        let mut encoder = Encoder::new(encoding);
        for plain in &plains {
            let mut encoded = Vec::new();
            encoder.encode(plain, &mut encoded).expect("a chunk");
            seeds.push(Seed { codec: encoding.codec(), encoded, plain: plain.clone() });
        }
    }
    seeds
}

struct Worker<'a> {
    seeds: &'a [Seed],
    decoder: Decoder,
    input: Vec<u8>,
    output: Vec<u8>,
}

impl<'a> Worker<'a> {
    fn new(seeds: &'a [Seed]) -> Worker<'a> {
        Worker { seeds, decoder: Decoder::default(), input: Vec::new(), output: Vec::new() }
    }

    /// Decodes one input. Returns whether it was decoded without error, or `None` if something is wrong.
    fn step(&mut self, random: &mut fastrand::Rng) -> Option<bool> {
        let mut seed = &self.seeds[random.usize(..self.seeds.len())];
        // Large outputs take most of the time, and differ little from small ones.
        while seed.plain.len() > 5000 && random.u8(..) > 8 {
            seed = &self.seeds[random.usize(..self.seeds.len())];
        }
        self.input.clear();
        self.input.extend(&seed.encoded);
        let damaged = random.u16(..1000) > 0;
        let mut codec = seed.codec;
        let mut bytes = seed.plain.len();
        if damaged {
            for _ in 0..random.u32(1..4) {
                self.damage(random);
            }
            match random.u8(..64) {
                0 => codec = Codec::ALL[random.usize(..Codec::ALL.len())],
                1 => bytes = random.usize(..2 * bytes + 8),
                _ => {}
            }
        }
        self.output.clear();
        self.output.resize(bytes + BEHIND, UNTOUCHED);
        let (decoded, behind) = self.output.split_at_mut(bytes);
        let (decoder, input) = (&mut self.decoder, &self.input);
        let result = catch_unwind(AssertUnwindSafe(|| decoder.decode(codec, input, decoded)));
        let wrong = match &result {
            Err(_) => Some("a panic"),
            _ if behind.iter().any(|byte| *byte != UNTOUCHED) => Some("bytes behind the output"),
            Ok(Ok(())) if !damaged && decoded != seed.plain => Some("another result"),
            Ok(Err(_)) if !damaged => Some("an error for an undamaged chunk"),
            _ => None,
        };
        if let Some(wrong) = wrong {
            println!("{wrong}: {codec:?}, {bytes} bytes after decoding, from {input:02x?}");
            return None;
        }
        Some(matches!(result, Ok(Ok(()))))
    }

    /// Damages the input in one way.
    fn damage(&mut self, random: &mut fastrand::Rng) {
        let input = &mut self.input;
        if input.is_empty() {
            input.push(random.u8(..));
            return;
        }
        // Headers decide more than what follows them.
        let within = if random.bool() { input.len() } else { input.len().min(48) };
        let at = random.usize(..within);
        match random.u8(..10) {
            0..4 => input[at] ^= 1 << random.u8(..8),
            4 => input[at] = random.u8(..),
            5 => input[at] = [0, 1, 0x7f, 0x80, 0xfe, 0xff][random.usize(..6)],
            6 => {
                let word = [0, 1, 4, random.u32(..), random.u32(..70_000), u32::MAX, 1 << 31];
                let word = word[random.usize(..word.len())].to_le_bytes();
                let end = input.len().min(at + 4);
                input[at..end].copy_from_slice(&word[..end - at]);
            }
            7 => input.truncate(at),
            8 => {
                // The rest becomes that of another chunk.
                let other = &self.seeds[random.usize(..self.seeds.len())].encoded;
                let from = random.usize(..=other.len());
                input.truncate(at);
                input.extend(other[from..].iter().take(4096));
            }
            _ => {
                let end = input.len().min(at + random.usize(1..40));
                random.fill(&mut input[at..end]);
            }
        }
    }
}
