//! Products with compact weights have the bits of products with plain ones.

use anyhow::Result;
use forebay_cuda::{DeviceMatmul, DeviceMatrix, MatmulWeights, Pairing, TileSize, narrow_form};
use forebay_format::TensorType;

use super::{matmul, matvec};
use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::{Random, gaussian_bf16};
use crate::weights::{Weights, random_weights};

pub fn checks() -> Vec<Check> {
    let check = |ty: TensorType| {
        Check::new(format!("compact {ty} as plain"), move |context: &Context| check(context, ty))
    };
    let expand = |ty: TensorType| {
        Check::new(format!("compact {ty} in place"), move |context: &Context| expand(context, ty))
    };
    let types = [TensorType::BF16_C2048, TensorType::BF16_C256];
    types.into_iter().flat_map(|ty| [check(ty), expand(ty)]).collect()
}

pub fn benches() -> Vec<Bench> {
    let bench = |ty| Bench::new(format!("compact {ty} decode"), move |context| bench(context, ty));
    [TensorType::BF16_C2048, TensorType::BF16_C256].map(bench).into()
}

/// Compares what is decoded in its own memory with the weights, with workspaces for all blocks and for the fewest.
fn expand(context: &Context, ty: TensorType) -> Result<Outcome> {
    let gpu = &context.gpu;
    let (compact, plain) = (ty.block_bytes(), 2 * ty.block_elements());
    let fewest = plain.div_ceil(plain - compact);
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for blocks in [1, 2, fewest, 60] {
        let mut random = Random::new(blocks as u64);
        let elements = blocks * ty.block_elements();
        let random_data = random_weights(ty, elements, &mut random);
        for data in [random_data, gaussian_bf16(ty, elements, &mut random)] {
            let of = Weights::of(context, ty, blocks, ty.block_elements(), data.clone())?;
            let weights = of.values.iter();
            let weights = weights.flat_map(|w| half::bf16::from_f32(*w).to_le_bytes());
            let expected: Vec<u8> = weights.collect();
            for in_workspace in [fewest.min(blocks), blocks] {
                let memory = context.poisoned(blocks * plain / 4)?;
                gpu.upload(&data, memory.ptr::<u8>().offset(blocks * (plain - compact)))?;
                let workspace = gpu.allocate(in_workspace * compact)?;
                gpu.expand_compact(ty, memory.ptr(), blocks, workspace.ptr())?;
                let got = gpu.download::<u8>(memory.ptr(), blocks * plain)?;
                let case = format!("{blocks} blocks, {in_workspace} in the workspace");
                worst = worst.worse(Outcome::same(&got, &expected).at(&case));
            }
        }
    }
    Ok(worst)
}

/// Measures decoding of 256 MiB of weights; the rate is of what is read and written.
fn bench(context: &Context, ty: TensorType) -> Result<Measured> {
    let gpu = &context.gpu;
    let blocks = (256 << 20) / (2 * ty.block_elements());
    let mut random = Random::new(1);
    let part = gaussian_bf16(ty, 512 * ty.block_elements(), &mut random);
    let from = gpu.allocate_with(&part.repeat(blocks / 512))?;
    let to = gpu.allocate(blocks * 2 * ty.block_elements())?;
    let seconds =
        median_seconds(context, |_| gpu.decode_compact(ty, from.ptr(), to.ptr(), blocks))?;
    Ok(Measured { seconds, bytes: (from.bytes() + to.bytes()) as f64, flops: 0.0 })
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
        let job = DeviceMatmul { ty, weights: operands, rows, cols, x: input.form, out: out.ptr() };
        // The plain type has one size less.
        let sizes = TileSize::of(ty);
        for size in [TileSize::Small, TileSize::Large, sizes[sizes.len() - 1]] {
            gpu.matmul_in(&job, Some(size))?;
            all.extend(gpu.download::<u32>(out.ptr(), tokens * rows)?);
        }
    }
    Ok(all)
}
