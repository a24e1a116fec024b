//! Checks and measures the decoding of weights whose exponents are coded, against the encoder of `forebay-codec`.

use anyhow::{Result, ensure};
use forebay_codec::{CHUNK_WEIGHTS, Float, Table, decode_chunk, encode_chunk};
use forebay_cuda::{CodedExponents, DeviceMemory};
use forebay_format::TensorType;

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const TYPES: [(TensorType, Float); 4] = [
    (TensorType::BF16, Float::Bf16),
    (TensorType::F16, Float::F16),
    (TensorType::F8_E4M3, Float::F8E4M3),
    (TensorType::F8_E5M2, Float::F8E5M2),
];

pub fn checks() -> Vec<Check> {
    let check = |(ty, float): (TensorType, Float)| {
        let whole = move |context: &Context| decoded(context, ty, float);
        let damaged = move |context: &Context| damaged(context, ty, float);
        [
            Check::new(format!("exponents {ty}"), whole),
            Check::new(format!("exponents damaged {ty}"), damaged),
        ]
    };
    TYPES.into_iter().flat_map(check).collect()
}

pub fn benches() -> Vec<Bench> {
    let bench = |(ty, float)| {
        Bench::new(format!("exponents {ty}"), move |context| bench(context, ty, float))
    };
    TYPES.into_iter().map(bench).collect()
}

/// Returns weights like those of a trained model, with all kinds of numbers among them at the end.
fn weights(float: Float, count: usize) -> Vec<u8> {
    let mut random = Random::new(count as u64);
    let mut weights = Vec::new();
    for x in random.gaussians(count) {
        match float {
            Float::Bf16 => weights.extend(half::bf16::from_f32(0.02 * x).to_le_bytes()),
            Float::F16 => weights.extend(half::f16::from_f32(0.02 * x).to_le_bytes()),
            // The upper byte of a half is a number of type F8_E5M2, and as good as any for the other.
            Float::F8E4M3 => weights.push((half::f16::from_f32(x).to_bits() >> 7) as u8),
            Float::F8E5M2 => weights.push((half::f16::from_f32(100.0 * x).to_bits() >> 8) as u8),
        }
    }
    let from = weights.len().saturating_sub(300);
    weights[from..].iter_mut().for_each(|byte| *byte = random.next() as u8);
    weights
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
    fn new(context: &Context, ty: TensorType, float: Float, weights: &[u8]) -> Result<Coded> {
        let table = Table::of(float, weights)?;
        let (mut chunks, mut starts) = (Vec::new(), vec![0]);
        for weights in weights.chunks(CHUNK_WEIGHTS * float.bytes()) {
            encode_chunk(float, &table, weights, &mut chunks)?;
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
            weights: (weights.len() / float.bytes()) as u64,
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

fn decoded(context: &Context, ty: TensorType, float: Float) -> Result<Outcome> {
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for count in [1, 7, 8, 31, 256, 1001, CHUNK_WEIGHTS, 9 * CHUNK_WEIGHTS + 77] {
        let weights = weights(float, count);
        let (got, is_damaged) =
            Coded::new(context, ty, float, &weights)?.decode(context, weights.len())?;
        let outcome = Outcome::same(&got, &weights).worse(Outcome::same(&[is_damaged], &[false]));
        worst = worst.worse(outcome.at(&format!("{count} weights")));
    }
    Ok(worst)
}

/// Changes bytes of a chunk. The device must find it damaged where the host does, or decode what the host decodes.
fn damaged(context: &Context, ty: TensorType, float: Float) -> Result<Outcome> {
    let count = 1500;
    let weights = weights(float, count);
    let mut coded = Coded::new(context, ty, float, &weights)?;
    let whole = coded.chunks.clone();
    let mut random = Random::new(3);
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for turn in 0..60 {
        let mut chunk = whole.clone();
        // Most changes are in the header and in the bitmaps behind sign and mantissa.
        for _ in 0..=turn % 3 {
            let at = match turn % 4 {
                0 => random.next() as usize % 8,
                _ => chunk.len() - 1 - random.next() as usize % (chunk.len() / 2),
            };
            chunk[at] = random.next() as u8;
        }
        context.gpu.upload(&chunk, coded.memory[0].ptr())?;
        coded.chunks = chunk;
        let mut expected = vec![0; weights.len()];
        let chunk = &coded.chunks[..coded.starts[1] as usize];
        let on_host = decode_chunk(float, &coded.table, chunk, &mut expected);
        let (got, is_damaged) = coded.decode(context, weights.len())?;
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

fn bench(context: &Context, ty: TensorType, float: Float) -> Result<Measured> {
    // Larger than the L2 cache.
    let some = weights(float, 1 << 20);
    let weights = some.repeat((256 << 20) / some.len());
    let coded = Coded::new(context, ty, float, &weights)?;
    let out = context.gpu.allocate(weights.len())?;
    let flag = context.gpu.allocate_with(&[0_u32])?;
    let seconds = median_seconds(context, |_| {
        context.gpu.decode_exponents(&coded.on_device, out.ptr(), flag.ptr())
    })?;
    Ok(Measured { seconds, bytes: weights.len() as f64, flops: 0.0 })
}
