//! Checks and measures the decoding of GDeflate and Zstandard, against the codecs of `forebay-codec` and streams of the reference encoder.

#[path = "../../../forebay-codec/tests/vectors/gdeflate.rs"]
mod vectors;

use anyhow::{Context as _, Result, ensure};
use forebay_codec::{Codec, Encoder, Encoding};
use forebay_cuda::{CodedStream, CodedStreams, CudaError, DevicePtr, Gpu};

use self::vectors::{MANY_MATCHES, OWN_CODE, STORED, TWO_TILES, ZEROS};
use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

/// Bytes of a tile.
const TILE: usize = 1 << 16;

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("gdeflate".to_string(), |context| decoded(context, Encoding::Gdeflate)),
        Check::new("gdeflate of the reference".to_string(), reference),
        Check::new("gdeflate damaged".to_string(), |context| damaged(context, Encoding::Gdeflate)),
        Check::new("zstd".to_string(), |context| decoded(context, ZSTD)),
        Check::new("zstd level 19".to_string(), |context| {
            decoded(context, Encoding::Zstd { level: 19 })
        }),
        Check::new("zstd of several frames".to_string(), several_frames),
        Check::new("zstd damaged".to_string(), |context| damaged(context, ZSTD)),
    ]
}

pub fn benches() -> Vec<Bench> {
    let row = |encoding: Encoding, name: &str, content: fn(usize) -> Vec<u8>| {
        Bench::new(format!("{} {name}", encoding.codec().name()), move |context| {
            bench(context, encoding, content)
        })
    };
    let of = |encoding| {
        [
            row(encoding, "BF16", bf16),
            row(encoding, "INT8", int8),
            row(encoding, "BF16 half zeros", half_zeros),
        ]
    };
    [Encoding::Gdeflate, ZSTD].into_iter().flat_map(of).collect()
}

/// The level of packs.
const ZSTD: Encoding = Encoding::Zstd { level: 3 };

/// A stream, and what the host says about it: its bytes, or that it is damaged.
struct Stream {
    codec: Codec,
    bytes: Vec<u8>,
    decoded_bytes: usize,
    expected: Option<Vec<u8>>,
}

impl Stream {
    fn new(codec: Codec, bytes: Vec<u8>, decoded_bytes: usize) -> Stream {
        let mut decoded = vec![0; decoded_bytes];
        let expected = codec.decode(&bytes, &mut decoded).ok().map(|()| decoded);
        Stream { codec, bytes, decoded_bytes, expected }
    }

    fn of(encoding: Encoding, content: &[u8]) -> Result<Stream> {
        Ok(Stream::new(encoding.codec(), encode(encoding, content)?, content.len()))
    }
}

fn encode(encoding: Encoding, content: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    Encoder::new(encoding).encode(content, &mut bytes)?;
    Ok(bytes)
}

fn decode(
    gpu: &Gpu,
    codec: Codec,
    streams: &CodedStreams,
    damaged: DevicePtr<u32>,
) -> Result<(), CudaError> {
    match codec {
        Codec::Zstd => gpu.decode_zstd(streams, damaged),
        _ => gpu.decode_gdeflate(streams, damaged),
    }
}

/// Decodes streams of one codec together, and compares each with what the host decodes. Bytes between their places must not change.
/// With `may_refuse`, the device may also refuse what the host decodes.
fn compare(context: &Context, streams: &[Stream], may_refuse: bool) -> Result<Outcome> {
    let gpu = &context.gpu;
    let (mut from, mut to_bytes) = (Vec::new(), 0);
    let mut chunks = Vec::new();
    for stream in streams {
        chunks.push(CodedStream {
            at: from.len() as u64,
            bytes: stream.bytes.len() as u32,
            to: to_bytes as u64,
            decoded_bytes: stream.decoded_bytes as u32,
        });
        from.extend(&stream.bytes);
        from.resize(from.len().next_multiple_of(4), 0);
        to_bytes += stream.decoded_bytes + 1;
    }
    let mut words = Vec::new();
    let tiles = CodedStream::describe(&chunks, &mut words);
    let (memory, list) = (gpu.allocate_with(&from)?, gpu.allocate_with(&words)?);
    let out = gpu.allocate(to_bytes)?;
    gpu.fill(out.ptr(), 0xa5, to_bytes)?;
    let damaged = gpu.allocate_with(&vec![0_u32; streams.len()])?;
    let on_device = CodedStreams {
        from: memory.ptr(),
        from_bytes: from.len(),
        to: out.ptr(),
        to_bytes,
        count: streams.len(),
        words: list.ptr(),
        tiles,
    };
    decode(gpu, streams[0].codec, &on_device, damaged.ptr())?;
    let got: Vec<u8> = gpu.download(out.ptr(), to_bytes)?;
    let damaged: Vec<u32> = gpu.download(damaged.ptr(), streams.len())?;
    let (mut worst, mut refused) = (Outcome::same::<u8>(&[], &[]), 0);
    for (index, (stream, chunk)) in streams.iter().zip(&chunks).enumerate() {
        let place = chunk.to as usize;
        let (decoded, behind) = got[place..].split_at(stream.decoded_bytes);
        ensure!(behind[0] == 0xa5, "a byte behind stream {index} has changed");
        if may_refuse && damaged[index] == 1 {
            refused += 1;
            continue;
        }
        let is_damaged = u32::from(stream.expected.is_none());
        let mut outcome = Outcome::same(&[damaged[index]], &[is_damaged]);
        if let Some(expected) = &stream.expected {
            outcome = outcome.worse(Outcome::same(decoded, expected));
        }
        worst = worst.worse(outcome.at(&format!("stream {index}, {} bytes", decoded.len())));
    }
    ensure!(refused < streams.len(), "every stream is refused");
    Ok(worst)
}

/// Returns contents of several kinds with `bytes` bytes each.
fn contents(bytes: usize) -> Vec<Vec<u8>> {
    let mut random = Random::new(bytes as u64 + 1);
    let mut next = move || random.next() as u8;
    let words = [&b"weights "[..], b"of a ", b"tensor ", b"stream, ", b"stream "];
    let mut text = Vec::new();
    while text.len() < bytes {
        text.extend(words[usize::from(next()) % words.len()]);
    }
    text.truncate(bytes);
    let mut repeats: Vec<u8> = (0..bytes).map(|_| next()).collect();
    for at in 300..bytes {
        if at % 300 > 20 {
            repeats[at] = repeats[at - 300 + at % 7 * 40];
        }
    }
    vec![
        vec![0; bytes],
        (0..bytes).map(|_| next()).collect(),
        text,
        repeats,
        // Few symbols occur much more often than others, so that code words are long.
        (0..bytes)
            .map(|_| (u32::from(next()) | u32::from(next()) << 8 | 1 << 16).trailing_zeros() as u8)
            .collect(),
        (0..bytes).map(|_| if next() < 9 { next() } else { 0 }).collect(),
        (0..bytes).map(|at| (at / 7) as u8).collect(),
        (0..bytes).map(|at| [1, 2, 3][at % 3]).collect(),
        bf16(bytes),
    ]
}

fn bf16(bytes: usize) -> Vec<u8> {
    let mut random = Random::new(7);
    let weights = random.gaussians(bytes.div_ceil(2)).into_iter();
    let mut all: Vec<u8> =
        weights.flat_map(|x| half::bf16::from_f32(0.02 * x).to_le_bytes()).collect();
    all.truncate(bytes);
    all
}

/// Rows with a scale each, whose largest number is five standard deviations away.
fn int8(bytes: usize) -> Vec<u8> {
    let weights = Random::new(8).gaussians(bytes).into_iter();
    weights.map(|x| (25.4 * x).round().clamp(-127.0, 127.0) as i8 as u8).collect()
}

fn half_zeros(bytes: usize) -> Vec<u8> {
    let mut all = bf16(bytes);
    let mut random = Random::new(9);
    all.chunks_mut(2).filter(|_| random.next().is_multiple_of(2)).for_each(|weight| weight.fill(0));
    all
}

fn decoded(context: &Context, encoding: Encoding) -> Result<Outcome> {
    let mut streams = vec![Stream::of(encoding, &[])?];
    for bytes in [1, 2, 31, 33, 300, 5000, TILE - 1, TILE, TILE + 1, 2 * TILE + 77, 4 * TILE] {
        for content in contents(bytes) {
            streams.push(Stream::of(encoding, &content)?);
        }
    }
    ensure!(streams.iter().all(|stream| stream.expected.is_some()), "the host refuses a stream");
    compare(context, &streams, false)
}

/// Decoded bytes and streams.
const REFERENCE: [(usize, (usize, &str)); 5] =
    [(100, ZEROS), (131_072, TWO_TILES), (40, STORED), (600, MANY_MATCHES), (600, OWN_CODE)];

fn reference(context: &Context) -> Result<Outcome> {
    let mut streams = Vec::new();
    for (decoded_bytes, (stream_bytes, digits)) in REFERENCE {
        let digits = digits.as_bytes().chunks(2).map(std::str::from_utf8);
        let mut bytes = Vec::new();
        for two in digits {
            bytes.push(u8::from_str_radix(two?, 16).context("a digit")?);
        }
        bytes.resize(stream_bytes, 0);
        streams.push(Stream::new(Codec::Gdeflate, bytes, decoded_bytes));
    }
    ensure!(streams.iter().all(|stream| stream.expected.is_some()), "the host refuses a stream");
    compare(context, &streams, false)
}

/// Frames behind each other, and frames that decoders skip, as other programs may write them.
fn several_frames(context: &Context) -> Result<Outcome> {
    let mut streams = Vec::new();
    for bytes in [10, 3000, TILE + 5] {
        let skipped = [&0x184d_2a53_u32.to_le_bytes()[..], &3_u32.to_le_bytes(), b"any"].concat();
        let (mut all, mut decoded_bytes) = (skipped.clone(), 0);
        for content in contents(bytes) {
            all.extend(encode(ZSTD, &content)?);
            decoded_bytes += content.len();
        }
        all.extend(skipped);
        streams.push(Stream::new(Codec::Zstd, all, decoded_bytes));
    }
    ensure!(streams.iter().all(|stream| stream.expected.is_some()), "the host refuses a stream");
    compare(context, &streams, false)
}

/// Damaged streams. The device must refuse those that the host refuses, and decode others to the same bytes. It refuses streams of literals
/// that do not end with their first bit, as RFC 8878 demands; the host's library does not notice.
fn damaged(context: &Context, encoding: Encoding) -> Result<Outcome> {
    let mut random = Random::new(3);
    let mut streams = Vec::new();
    for bytes in [300, 3000, TILE + 500] {
        for content in contents(bytes) {
            let whole = encode(encoding, &content)?;
            for turn in 0..if bytes < TILE { 24 } else { 3 } {
                let mut stream = whole.clone();
                let mut decoded_bytes = bytes;
                for _ in 0..=turn % 2 {
                    // Headers and codes decide more than what follows them.
                    let within = if turn % 3 == 0 { stream.len() } else { stream.len().min(200) };
                    stream[random.next() as usize % within] = random.next() as u8;
                }
                match turn % 8 {
                    5 => stream.truncate(random.next() as usize % stream.len()),
                    6 => decoded_bytes += 1,
                    7 => stream.extend([0; 4]),
                    _ => {}
                }
                streams.push(Stream::new(encoding.codec(), stream, decoded_bytes));
            }
        }
    }
    let good = streams.iter().filter(|stream| stream.expected.is_some()).count();
    ensure!(good > 0 && good < streams.len(), "{good} of {} streams are good", streams.len());
    compare(context, &streams, encoding.codec() == Codec::Zstd)
}

/// Measures 256 MiB in chunks of 128 KiB. Rates are of decoded bytes.
fn bench(context: &Context, encoding: Encoding, content: fn(usize) -> Vec<u8>) -> Result<Measured> {
    const CHUNK: usize = 128 << 10;
    let gpu = &context.gpu;
    let mut from = Vec::new();
    let mut places = Vec::new();
    for content in content(8 << 20).chunks(CHUNK) {
        let mut stream = encode(encoding, content)?;
        places.push((from.len() as u64, stream.len() as u32));
        stream.resize(stream.len().next_multiple_of(4), 0);
        from.extend(stream);
    }
    let to_bytes = 256 << 20;
    let repeats = to_bytes / CHUNK / places.len();
    let mut chunks = Vec::new();
    for repeat in 0..repeats {
        for &(at, bytes) in &places {
            let (at, to) = (at + (repeat * from.len()) as u64, (chunks.len() * CHUNK) as u64);
            chunks.push(CodedStream { at, bytes, to, decoded_bytes: CHUNK as u32 });
        }
    }
    let from = from.repeat(repeats);
    let mut words = Vec::new();
    let tiles = CodedStream::describe(&chunks, &mut words);
    let (memory, list) = (gpu.allocate_with(&from)?, gpu.allocate_with(&words)?);
    let out = gpu.allocate(to_bytes)?;
    let damaged = gpu.allocate_with(&vec![0_u32; chunks.len()])?;
    let on_device = CodedStreams {
        from: memory.ptr(),
        from_bytes: from.len(),
        to: out.ptr(),
        to_bytes,
        count: chunks.len(),
        words: list.ptr(),
        tiles,
    };
    let seconds =
        median_seconds(context, |_| decode(gpu, encoding.codec(), &on_device, damaged.ptr()))?;
    let damaged: Vec<u32> = gpu.download(damaged.ptr(), chunks.len())?;
    ensure!(damaged.iter().all(|word| *word == 0), "a stream is damaged");
    Ok(Measured { seconds, bytes: to_bytes as f64, flops: 0.0 })
}
