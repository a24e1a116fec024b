//! Compares rows of the embedding table with the exact decoders.

use anyhow::Result;
use forebay_cuda::EmbeddingTable;
use forebay_format::{TensorType, can_dequantize, dequantize};

use crate::harness::{Check, Context, Outcome};
use crate::random::{Random, random_weights};

pub fn checks() -> Vec<Check> {
    let check = |ty: TensorType| {
        Check::new(format!("embedding {ty}"), move |context: &Context| rows(context, ty))
    };
    TensorType::all().iter().copied().filter(|&ty| can_dequantize(ty)).map(check).collect()
}

/// Checks rows of random bytes, which are valid blocks; some scales are not finite. All bits must agree, except those
/// of NaNs.
fn rows(context: &Context, ty: TensorType) -> Result<Outcome> {
    let (vocabulary, hidden) = (37, 768usize.next_multiple_of(ty.block_elements()));
    let row_bytes = hidden / ty.block_elements() * ty.block_bytes();
    let mut random = Random::new(9);
    // Subnormal scales of NVFP4_F32 are halved, and so rounded.
    let is_sane = ty.compact().is_some() || ty == TensorType::NVFP4_F32;
    let data: Vec<u8> = match is_sane {
        false => (0..vocabulary * row_bytes).map(|_| random.next() as u8).collect(),
        true => random_weights(ty, vocabulary * hidden, &mut random),
    };
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
