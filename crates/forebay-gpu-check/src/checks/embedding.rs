//! Compares rows of the embedding table, and whole tensors, with the exact decoders.

use anyhow::Result;
use forebay_cuda::EmbeddingTable;
use forebay_format::{TensorType, can_dequantize, dequantize};

use crate::harness::{Check, Context, Outcome};
use crate::random::{Random, random_weights};

pub fn checks() -> Vec<Check> {
    let check = |ty: TensorType| {
        Check::new(format!("embedding {ty}"), move |context: &Context| rows(context, ty))
    };
    let expand = |ty: TensorType| {
        Check::new(format!("expand {ty}"), move |context: &Context| expanded(context, ty))
    };
    let types: Vec<TensorType> =
        TensorType::all().iter().copied().filter(|&ty| can_dequantize(ty)).collect();
    let plain = types.iter().copied().filter(|ty| ty.compact().is_none());
    types.iter().copied().map(check).chain(plain.map(expand)).collect()
}

/// Checks whole tensors of random bytes as [`rows`] does, in each type that they may become.
fn expanded(context: &Context, ty: TensorType) -> Result<Outcome> {
    // Of types without blocks, not only whole groups of 32.
    let elements = (9 * 1024_usize + 5).next_multiple_of(ty.block_elements());
    let data = random_blocks(ty, elements, &mut Random::new(11));
    let mut exact = vec![0.0; elements];
    dequantize(ty, &data, &mut exact)?;
    let copies = context.gpu.copy_stream()?;
    let weights = context.upload(&data)?;
    let out = context.gpu.allocate(4 * elements)?;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for to in [TensorType::F32, TensorType::F16, TensorType::BF16] {
        context.gpu.synchronize()?;
        context.gpu.expand(&copies, ty, weights.ptr(), to, out.ptr(), elements)?;
        copies.point()?.reach()?;
        let found: Vec<u8> = context.gpu.download(out.ptr(), elements * to.block_bytes())?;
        let mut floats = vec![0.0; elements];
        dequantize(to, &found, &mut floats)?;
        let round = |x: &f32| match to {
            TensorType::F16 => half::f16::from_f32(*x).to_f32(),
            TensorType::BF16 => half::bf16::from_f32(*x).to_f32(),
            _ => *x,
        };
        outcome = outcome.worse(compare(&floats, &exact.iter().map(round).collect::<Vec<_>>()));
    }
    Ok(outcome)
}

/// Checks rows of random bytes, which are valid blocks; some scales are not finite. All bits must agree, except those
/// of NaNs.
fn rows(context: &Context, ty: TensorType) -> Result<Outcome> {
    let (vocabulary, hidden) = (37, 768usize.next_multiple_of(ty.block_elements()));
    let row_bytes = hidden / ty.block_elements() * ty.block_bytes();
    let data = random_blocks(ty, vocabulary * hidden, &mut Random::new(9));
    let ids: [u32; 6] = [0, 36, 5, 5, 37, u32::MAX];
    let mut expected = Vec::new();
    for &id in &ids {
        let mut row = vec![f32::NAN; hidden];
        if let Some(bytes) = data.chunks_exact(row_bytes).nth(id as usize) {
            dequantize(ty, bytes, &mut row)?;
        }
        expected.extend(row);
    }
    let (table, device_ids) = (context.upload(&data)?, context.upload(&ids)?);
    let out = context.poisoned(expected.len())?;
    let table = EmbeddingTable { ty, data: table.ptr(), vocabulary, hidden };
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    // Without a factor all bits are kept. With one, each element is rounded once more.
    for factor in [1.0, 33.75] {
        context.gpu.embed(&table, device_ids.ptr(), out.ptr(), ids.len(), factor)?;
        let got = context.gpu.download(out.ptr(), expected.len())?;
        let expected: Vec<f32> = expected.iter().map(|x| x * factor).collect();
        outcome = outcome.worse(compare(&got, &expected));
    }
    Ok(outcome)
}

/// Returns blocks of random bytes, or of sane weights where not all bytes are valid.
fn random_blocks(ty: TensorType, elements: usize, random: &mut Random) -> Vec<u8> {
    // Subnormal scales of NVFP4_F32 are halved, and so rounded.
    let is_sane = ty.compact().is_some() || ty == TensorType::NVFP4_F32;
    let bytes = elements / ty.block_elements() * ty.block_bytes();
    match is_sane {
        false => (0..bytes).map(|_| random.next() as u8).collect(),
        true => random_weights(ty, elements, random),
    }
}

/// Passes if all bits agree, except those of NaNs.
fn compare(got: &[f32], expected: &[f32]) -> Outcome {
    let bits = |x: &[f32]| {
        let bits = |x: &f32| if x.is_nan() { u32::MAX } else { x.to_bits() };
        x.iter().map(bits).collect::<Vec<_>>()
    };
    // Differences are reported as numbers, not as bits.
    if bits(got) == bits(expected) {
        return Outcome::same::<f32>(&[], &[]);
    }
    let same = |(got, expected): (&f32, &f32)| {
        got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan()
    };
    let wrong = got.iter().zip(expected).position(|pair| !same(pair)).unwrap_or(0);
    Outcome {
        worst: f64::INFINITY,
        tolerance: 0.0,
        place: format!("[{wrong}] expected {:e}, got {:e}", expected[wrong], got[wrong]),
    }
}
