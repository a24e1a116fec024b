//! Products with compact weights have the bits of products with plain ones.

use anyhow::Result;
use forebay_cuda::{DeviceMatrix, MatmulJob, MatmulWeights, Pairing, TileSize, narrow_form};
use forebay_format::TensorType;

use super::{matmul, matvec};
use crate::harness::{Check, Context, Outcome};
use crate::random::{Random, gaussian_bf16};
use crate::weights::{Weights, random_weights};

pub fn checks() -> Vec<Check> {
    let check = |ty: TensorType| {
        Check::new(format!("compact {ty} as plain"), move |context: &Context| check(context, ty))
    };
    [TensorType::BF16_C2048, TensorType::BF16_C256].map(check).into()
}

/// Compares decode rows and prompt rows, in every size of tiles, with weights like trained ones and with many exceptions.
fn check(context: &Context, ty: TensorType) -> Result<Outcome> {
    let (rows, block) = (131, ty.block_elements());
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for cols in [block, 3 * block, 4096] {
        let mut random = Random::new(cols as u64);
        let trained = gaussian_bf16(ty, rows * cols, &mut random);
        for data in [random_weights(ty, rows * cols, &mut random), trained] {
            let compact = Weights::of(context, ty, rows, cols, data)?;
            let plain = compact.values.iter();
            let plain = plain.flat_map(|w| half::bf16::from_f32(*w).to_le_bytes()).collect();
            let plain = Weights::of(context, TensorType::BF16, rows, cols, plain)?;
            for tokens in [1, 2, 4, 8, 32, 70] {
                let x = random.gaussians(tokens * cols);
                let got = products(context, ty, &compact, &x)?;
                let expected = products(context, TensorType::BF16, &plain, &x)?;
                let case = format!("{rows}x{cols}, {tokens} tokens");
                worst = worst.worse(Outcome::same(&got, &expected).at(&case));
            }
        }
    }
    Ok(worst)
}

/// Returns the bits of all products.
fn products(context: &Context, ty: TensorType, weights: &Weights, x: &[f32]) -> Result<Vec<u32>> {
    let (rows, cols, gpu) = (weights.rows, weights.cols, &context.gpu);
    let tokens = x.len() / cols;
    let out = context.poisoned(tokens * rows)?;
    let mut all = Vec::new();
    if tokens <= forebay_cuda::DECODE_ROWS {
        let input = matvec::Input::new(context, ty, x, cols)?;
        let matrix = DeviceMatrix { data: weights.ptr, rows, out: out.ptr() };
        gpu.matvec(ty, &[matrix], input.dense, tokens, cols, Pairing::Separate)?;
        all.extend(gpu.download::<u32>(out.ptr(), tokens * rows)?);
    }
    for form in [narrow_form(ty, cols), None] {
        let input = matmul::Input::new(context, form, x, cols)?;
        let operands = MatmulWeights::Dense { data: weights.ptr, tokens };
        let job = MatmulJob { ty, weights: operands, rows, cols, x: input.form, out: out.ptr() };
        for size in [TileSize::Small, TileSize::Large] {
            gpu.matmul_in(&job, Some(size))?;
            all.extend(gpu.download::<u32>(out.ptr(), tokens * rows)?);
        }
    }
    Ok(all)
}
