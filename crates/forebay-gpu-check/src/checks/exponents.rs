//! Checks and measures the decoding of weights whose exponents are coded, against the encoder of `forebay-codec`.

use anyhow::{Result, ensure};
use forebay_codec::{
    CHUNK_WEIGHTS, Compact, Float, Table, Weights, decode_chunk, encode_chunk, encode_compact,
};
use forebay_cuda::{CodedExponents, DeviceMemory};
use forebay_format::TensorType;

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

/// Returns the types of tensors that the codec knows.
fn types() -> [(TensorType, Weights); 6] {
    Weights::ALL.map(|weights| (TensorType::from_weights(weights), weights))
}

pub fn checks() -> Vec<Check> {
    let check = |(ty, weights): (TensorType, Weights)| {
        let whole = move |context: &Context| decoded(context, ty, weights);
        let damaged = move |context: &Context| damaged(context, ty, weights);
        [
            Check::new(format!("exponents {ty}"), whole),
            Check::new(format!("exponents damaged {ty}"), damaged),
        ]
    };
    types().into_iter().flat_map(check).collect()
}

pub fn benches() -> Vec<Bench> {
    let bench = |(ty, weights)| {
        Bench::new(format!("exponents {ty}"), move |context| bench(context, ty, weights))
    };
    types().into_iter().map(bench).collect()
}

/// Returns weights like those of a trained model, with all kinds of numbers among them at the end.
fn bytes_of(weights: Weights, count: usize) -> Result<Vec<u8>> {
    let mut random = Random::new(count as u64);
    let mut bytes = Vec::new();
    for x in random.gaussians(count) {
        match weights {
            Weights::Plain(Float::Bf16) | Weights::Compact(_) => {
                bytes.extend(half::bf16::from_f32(0.02 * x).to_le_bytes());
            }
            Weights::Plain(Float::F16) => {
                bytes.extend(half::f16::from_f32(0.02 * x).to_le_bytes());
            }
            // The upper byte of a half is a number of type F8_E5M2, and as good as any for the other.
            Weights::Plain(Float::F8E4M3) => {
                bytes.push((half::f16::from_f32(x).to_bits() >> 7) as u8);
            }
            Weights::Plain(Float::F8E5M2) => {
                bytes.push((half::f16::from_f32(100.0 * x).to_bits() >> 8) as u8);
            }
        }
    }
    if let Weights::Compact(of) = weights {
        let plain = std::mem::replace(&mut bytes, vec![0; weights.bytes_of(count)]);
        ensure!(encode_compact(of, &plain, &mut bytes)?, "blocks have too many exceptions");
        // Some blocks have ends without sense, and one is all without sense.
        for block in bytes.chunks_mut(of.bytes()).step_by(3) {
            block[of.header()..].iter_mut().for_each(|byte| *byte = random.next() as u8);
        }
    }
    let from = bytes.len().saturating_sub(300);
    bytes[from..].iter_mut().for_each(|byte| *byte = random.next() as u8);
    Ok(bytes)
}

/// Chunks of weights, on the host and on the device.
struct Coded {
    table: Table,
    chunks: Vec<u8>,
    starts: Vec<u32>,
    memory: [DeviceMemory; 3],
    on_device: CodedExponents,
}

impl Coded {
    fn new(context: &Context, ty: TensorType, weights: Weights, bytes: &[u8]) -> Result<Coded> {
        let table = Table::of(weights, bytes)?;
        let (mut chunks, mut starts) = (Vec::new(), vec![0]);
        for bytes in bytes.chunks(weights.chunk_bytes()) {
            encode_chunk(weights, &table, bytes, &mut chunks)?;
            starts.push(chunks.len() as u32);
        }
        let gpu = &context.gpu;
        let memory = [
            gpu.allocate_with(&chunks)?,
            gpu.allocate_with(&starts)?,
            gpu.allocate_with(&table.to_bytes())?,
        ];
        let on_device = CodedExponents {
            ty,
            weights: weights.whole_weights(bytes.len()) as u64,
            bytes: memory[0].ptr(),
            byte_count: chunks.len(),
            chunks: starts.len() - 1,
            starts: memory[1].ptr(),
            table: memory[2].ptr(),
        };
        Ok(Coded { table, chunks, starts, memory, on_device })
    }

    /// Decodes on the device. Returns the weights, and whether a chunk was damaged.
    fn decode(&self, context: &Context, bytes: usize) -> Result<(Vec<u8>, bool)> {
        let gpu = &context.gpu;
        // A byte behind the weights must not change.
        let out = gpu.allocate(bytes + 1)?;
        gpu.fill(out.ptr(), 0xa5, bytes + 1)?;
        let flag = gpu.allocate_with(&[0_u32])?;
        gpu.decode_exponents(&self.on_device, out.ptr(), flag.ptr())?;
        let mut got: Vec<u8> = gpu.download(out.ptr(), bytes + 1)?;
        ensure!(got.pop() == Some(0xa5), "a byte behind the weights has changed");
        Ok((got, gpu.download::<u32>(flag.ptr(), 1)? != [0]))
    }
}

fn decoded(context: &Context, ty: TensorType, weights: Weights) -> Result<Outcome> {
    let mut worst = Outcome::same::<u8>(&[], &[]);
    let counts: &[usize] = match weights {
        Weights::Plain(_) => &[1, 7, 8, 31, 256, 1001, CHUNK_WEIGHTS, 9 * CHUNK_WEIGHTS + 77],
        Weights::Compact(Compact::C2048) => &[2048, CHUNK_WEIGHTS, 9 * CHUNK_WEIGHTS + 2048],
        Weights::Compact(Compact::C256) => &[256, 1280, CHUNK_WEIGHTS, 9 * CHUNK_WEIGHTS + 768],
    };
    for &count in counts {
        let bytes = bytes_of(weights, count)?;
        let (got, is_damaged) =
            Coded::new(context, ty, weights, &bytes)?.decode(context, bytes.len())?;
        let outcome = Outcome::same(&got, &bytes).worse(Outcome::same(&[is_damaged], &[false]));
        worst = worst.worse(outcome.at(&format!("{count} weights")));
    }
    Ok(worst)
}

/// Changes bytes of a chunk. The device must find it damaged where the host does, or decode what the host decodes.
fn damaged(context: &Context, ty: TensorType, weights: Weights) -> Result<Outcome> {
    let count = match weights {
        Weights::Plain(_) => 1500,
        Weights::Compact(_) => 2048,
    };
    let plain = bytes_of(weights, count)?;
    let mut coded = Coded::new(context, ty, weights, &plain)?;
    let whole = coded.chunks.clone();
    let mut random = Random::new(3);
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for turn in 0..60 {
        let mut chunk = whole.clone();
        // Most changes are in the header and in the bitmaps behind sign and mantissa.
        for _ in 0..=turn % 3 {
            let at = match turn % 4 {
                0 => random.next() as usize % 8,
                1 if matches!(weights, Weights::Compact(_)) => 8 + random.next() as usize % 12,
                _ => chunk.len() - 1 - random.next() as usize % (chunk.len() / 2),
            };
            chunk[at] = random.next() as u8;
        }
        context.gpu.upload(&chunk, coded.memory[0].ptr())?;
        coded.chunks = chunk;
        let mut expected = vec![0; plain.len()];
        let chunk = &coded.chunks[..coded.starts[1] as usize];
        let on_host = decode_chunk(weights, &coded.table, chunk, &mut expected);
        let (got, is_damaged) = coded.decode(context, plain.len())?;
        let outcome = Outcome::same(&[is_damaged], &[on_host.is_err()]);
        let same = if on_host.is_ok() {
            Outcome::same(&got, &expected)
        } else {
            Outcome::same::<u8>(&[], &[])
        };
        worst = worst.worse(outcome.worse(same).at(&format!("change {turn}")));
    }
    Ok(worst)
}

/// Rates are of the bytes that are written.
fn bench(context: &Context, ty: TensorType, weights: Weights) -> Result<Measured> {
    // Larger than the L2 cache.
    let some = bytes_of(weights, 1 << 20)?;
    let bytes = some.repeat((256 << 20) / some.len());
    let coded = Coded::new(context, ty, weights, &bytes)?;
    let out = context.gpu.allocate(bytes.len())?;
    let flag = context.gpu.allocate_with(&[0_u32])?;
    let seconds = median_seconds(context, |_| {
        context.gpu.decode_exponents(&coded.on_device, out.ptr(), flag.ptr())
    })?;
    Ok(Measured { seconds, bytes: bytes.len() as f64, flops: 0.0 })
}
