//! Compares products of prompt rows, on tensor cores and in f32, with f64 arithmetic.

use std::sync::Arc;

use anyhow::Result;
use forebay_cuda::{
    DeviceMatmul, DeviceMemory, DevicePtr, MatmulInput, MatmulWeights, NarrowActivations,
    NarrowForm, TileSize, narrow_form,
};
use forebay_format::TensorType;

use super::matvec;
use crate::bench::{Bench, Measured, Rotation, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;
use crate::weights::{Weights, random_weights, types};

/// Tolerance of f32 sums of exact products, relative to the product of the norms of row and activations.
const EXACT: f64 = 1e-5;
/// Tolerance if both factors are rounded to 11 bits. Each relative error is at most 2^-12, less on average, and the
/// errors of single elements average out. One wrong element among a few hundred still exceeds this by far.
const HALF: f64 = 5e-4;

pub fn checks() -> Vec<Check> {
    let mut checks = vec![
        Check::new("matmul narrow half", |context| narrowing(context, NarrowForm::HalfPair)),
        Check::new("matmul narrow bfloat", |context| narrowing(context, NarrowForm::BfloatPair)),
    ];
    for ty in types() {
        for exact in [false, true] {
            if !exact && narrow_form(ty, 256).is_none() {
                continue;
            }
            let name = if exact { "exact" } else { "matmul" };
            checks
                .push(Check::new(format!("{name} {ty}"), move |context| dense(context, ty, exact)));
            let run = move |context: &Context| experts(context, ty, exact);
            checks.push(Check::new(format!("{name}-experts {ty}"), run));
        }
    }
    for ty in [TensorType::Q4_K, TensorType::Q6_K, TensorType::Q8_0, TensorType::BF16] {
        let run = move |context: &Context| together(context, ty);
        checks.push(Check::new(format!("matmul-together {ty}"), run));
    }
    checks
}

/// Checks that the sum of both parts, times the scale, is the number to within 2^-16 of the row's largest.
fn narrowing(context: &Context, form: NarrowForm) -> Result<Outcome> {
    let (rows, cols, gpu) = (5, 1032, &context.gpu);
    let mut x = Random::new(3).gaussians(rows * cols);
    x[cols..2 * cols].fill(0.0);
    x[2 * cols..3 * cols].iter_mut().for_each(|x| *x *= 1e30);
    x[3 * cols..4 * cols].iter_mut().for_each(|x| *x *= 1e-30);
    let input = Input::new(context, Some(form), &x, cols)?;
    let MatmulInput::Narrow(narrow) = input.form else { unreachable!("a form was asked for") };
    let (high, low) = (gpu.download(narrow.high, x.len())?, gpu.download(narrow.low, x.len())?);
    let scales = match form {
        NarrowForm::BfloatPair => vec![1.0; rows],
        _ => gpu.download(narrow.scales, rows)?,
    };
    let value = |bits: u16| match form {
        NarrowForm::BfloatPair => half::bf16::from_bits(bits).to_f64(),
        _ => half::f16::from_bits(bits).to_f64(),
    };
    let got = high.iter().zip(&low).enumerate();
    let got: Vec<f64> = got
        .map(|(i, (high, low))| (value(*high) + value(*low)) * f64::from(scales[i / cols]))
        .collect();
    let largest = |i: usize| {
        let row = &x[i / cols * cols..][..cols];
        row.iter().fold(0.0_f64, |a, b| a.max(f64::from(b.abs())))
    };
    let tolerance = f64::powi(2.0, -16);
    let mut outcome = Outcome { worst: 0.0, tolerance, place: String::new() };
    for (i, (got, expected)) in got.iter().zip(&x).enumerate() {
        let error = (got - f64::from(*expected)).abs() / largest(i).max(1e-45);
        if error > outcome.worst || error.is_nan() {
            outcome.worst = error;
            outcome.place = format!("[{i}] expected {expected:e}, got {got:e}");
        }
    }
    Ok(outcome)
}

/// Activations on the device, in the form that a product takes.
pub struct Input {
    pub form: MatmulInput,
    _memory: Vec<DeviceMemory>,
}

impl Input {
    /// Uploads `x`, in f32 if `form` is `None`.
    pub fn new(
        context: &Context,
        form: Option<NarrowForm>,
        x: &[f32],
        cols: usize,
    ) -> Result<Input> {
        let device = context.upload(x)?;
        let Some(form) = form else {
            return Ok(Input { form: MatmulInput::Float(device.ptr()), _memory: vec![device] });
        };
        let rows = x.len() / cols;
        let part = || context.poisoned(x.len().div_ceil(2));
        let memory = vec![part()?, part()?, context.poisoned(rows)?];
        let out = NarrowActivations {
            high: memory[0].ptr(),
            low: memory[1].ptr(),
            scales: memory[2].ptr(),
        };
        context.gpu.narrow(form, device.ptr(), out, rows, cols)?;
        // Dropping `device` waits for the GPU.
        Ok(Input { form: MatmulInput::Narrow(out), _memory: memory })
    }
}

fn tolerance(ty: TensorType, exact: bool) -> f64 {
    match ty {
        _ if exact => EXACT,
        TensorType::F16 => EXACT,
        // The activations keep 16 bits.
        TensorType::BF16 | TensorType::BF16_C2048 | TensorType::BF16_C256 => 2.0 * EXACT,
        _ => HALF,
    }
}

fn dense(context: &Context, ty: TensorType, exact: bool) -> Result<Outcome> {
    let block = ty.block_elements();
    let widths = match (exact, block) {
        (true, 1) => vec![1, 5, 33, 256],
        (false, 1) => vec![8, 72, 264],
        _ => vec![block, 3 * block.max(32), 768usize.next_multiple_of(block)],
    };
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for cols in widths {
        let mut random = Random::new(cols as u64);
        let weights = Weights::random(context, ty, 131, cols, &mut random)?;
        for tokens in [1, 2, 9, 17, 33, 64, 200] {
            let x = random.gaussians(tokens * cols);
            let case = format!("131x{cols}, {tokens} tokens");
            worst = worst.worse(dense_case(context, ty, exact, &weights, &x)?.at(&case));
        }
    }
    // Many tokens and many steps, but fewer rows.
    let mut random = Random::new(1);
    let weights = Weights::random(context, ty, 5, 4096, &mut random)?;
    let x = random.gaussians(512 * 4096);
    Ok(worst.worse(dense_case(context, ty, exact, &weights, &x)?.at("5x4096, 512 tokens")))
}

fn dense_case(
    context: &Context,
    ty: TensorType,
    exact: bool,
    weights: &Weights,
    x: &[f32],
) -> Result<Outcome> {
    let (rows, cols, gpu) = (weights.rows, weights.cols, &context.gpu);
    let tokens = x.len() / cols;
    let form = if exact { None } else { narrow_form(ty, cols) };
    let input = Input::new(context, form, x, cols)?;
    let run = |size: Option<TileSize>| -> Result<Vec<f32>> {
        let out = context.poisoned(tokens * rows)?;
        let operands = MatmulWeights::Dense { data: weights.ptr, tokens };
        let job = DeviceMatmul { ty, weights: operands, rows, cols, x: input.form, out: out.ptr() };
        gpu.matmul_in(&job, size)?;
        Ok(gpu.download(out.ptr(), tokens * rows)?)
    };
    let got = run(None)?;
    let bits = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let mut outcome = compare(weights, x, &got, tolerance(ty, exact));
    for &size in TileSize::of(ty) {
        let same = Outcome::same(&bits(&run(Some(size))?), &bits(&got));
        outcome = outcome.worse(same.at(&format!("{size:?}")));
    }
    Ok(outcome)
}

/// Compares four products of the same activations, with different numbers of rows, with the same products one by one. They
/// take two launches.
fn together(context: &Context, ty: TensorType) -> Result<Outcome> {
    let cols = 768usize.next_multiple_of(ty.block_elements());
    let (gpu, mut random) = (&context.gpu, Random::new(7));
    let weights =
        [300, 32, 131, 5].map(|rows| Weights::random(context, ty, rows, cols, &mut random));
    let weights: Vec<Weights> = weights.into_iter().collect::<Result<_>>()?;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for tokens in [1, 40, 150] {
        let x = random.gaussians(tokens * cols);
        let input = Input::new(context, narrow_form(ty, cols), &x, cols)?;
        for &size in TileSize::of(ty) {
            let outs = || -> Result<Vec<DeviceMemory>> {
                weights.iter().map(|of| Ok(context.poisoned(tokens * of.rows)?)).collect()
            };
            let (alone, beside) = (outs()?, outs()?);
            let job = |(of, out): (&Weights, &DeviceMemory)| DeviceMatmul {
                ty,
                weights: MatmulWeights::Dense { data: of.ptr, tokens },
                rows: of.rows,
                cols,
                x: input.form,
                out: out.ptr(),
            };
            let jobs: Vec<DeviceMatmul> = weights.iter().zip(&beside).map(job).collect();
            gpu.matmul_together(&jobs, Some(size))?;
            for ((of, alone), beside) in weights.iter().zip(&alone).zip(&beside) {
                gpu.matmul_in(&job((of, alone)), Some(size))?;
                let bits = |memory: &DeviceMemory| -> Result<Vec<u32>> {
                    let values = gpu.download::<f32>(memory.ptr(), tokens * of.rows)?;
                    Ok(values.iter().map(|x| x.to_bits()).collect())
                };
                let case = format!("{}x{cols}, {tokens} tokens, {size:?}", of.rows);
                worst = worst.worse(Outcome::same(&bits(beside)?, &bits(alone)?).at(&case));
            }
        }
    }
    Ok(worst)
}

/// Compares `got [tokens, rows]` with the exact product.
fn compare(weights: &Weights, x: &[f32], got: &[f32], tolerance: f64) -> Outcome {
    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    let tokens = x.chunks(weights.cols);
    let (expected, norms): (Vec<f64>, Vec<f64>) =
        tokens.flat_map(|x| (0..weights.rows).map(|row| weights.dot(row, x))).unzip();
    Outcome::of(got, &expected, |i| norms[i], tolerance)
}

/// Number of entries of each expert: none (at the start, in the middle and at the end), one, exactly a tile, and more
/// than a tile. The 34 experts that follow extend the search for a tile beyond the first 32.
const COUNTS: [usize; 7] = [0, 40, 1, 0, 32, 130, 0];
const MORE_EXPERTS: usize = 34;
/// The expert without a slot.
const MISSING: usize = 2;

fn experts(context: &Context, ty: TensorType, exact: bool) -> Result<Outcome> {
    let (tokens, rows, gpu) = (50, 130, &context.gpu);
    let cols = 3 * ty.block_elements().max(32);
    let mut random = Random::new(9);
    let mut counts = COUNTS.to_vec();
    counts.extend(std::iter::repeat_n(0, MORE_EXPERTS - 1));
    counts.push(3);
    let experts = counts.len();
    let mut weights = Vec::new();
    let mut slots = vec![0_u64; experts];
    let offset = 64;
    for (expert, count) in counts.iter().enumerate() {
        if *count > 0 {
            weights.push((expert, Weights::random(context, ty, rows, cols, &mut random)?));
        }
    }
    let slot_bytes = offset as usize + weights[0].1.data.len();
    let stride = (slot_bytes + 32).next_multiple_of(256);
    let pool = Arc::new(gpu.allocate(16 + stride * weights.len())?);
    for (place, (expert, one)) in weights.iter().enumerate() {
        let slot = pool.ptr::<u8>().offset(16 + stride * place);
        gpu.upload(&one.data, slot.offset(offset as usize))?;
        slots[*expert] = if *expert == MISSING { 0 } else { slot.address() };
    }
    let starts: Vec<u32> = counts
        .iter()
        .scan(0, |sum, count| Some(std::mem::replace(sum, *sum + count)))
        .chain([counts.iter().sum()])
        .map(|start| start as u32)
        .collect();
    let entries = *starts.last().expect("there are starts") as usize;
    let token_rows: Vec<u32> = (0..entries).map(|_| random.next() % tokens).collect();
    // A permutation: 7 and the number of entries (206) have no common divisor.
    let out_rows: Vec<u32> = (0..entries).map(|i| (i * 7 % entries) as u32).collect();
    let x = random.gaussians(tokens as usize * cols);
    let form = if exact { None } else { narrow_form(ty, cols) };
    let input = Input::new(context, form, &x, cols)?;
    // Largest number of entries, more than there are.
    let most = 49 * experts;
    let with_room = |rows: &[u32]| {
        let mut rows = rows.to_vec();
        rows.resize(most, 0);
        context.upload(&rows)
    };
    let device = [context.upload(&starts)?, with_room(&token_rows)?, with_room(&out_rows)?];
    let slots = context.table(&pool, slot_bytes, &slots)?;
    let run = |scatter: bool, capacity: usize, size: TileSize| -> Result<Vec<f32>> {
        let out = context.poisoned(most * rows)?;
        let operands = MatmulWeights::Experts {
            slots: slots.table(0),
            experts,
            offset,
            starts: device[0].ptr(),
            token_rows: device[1].ptr(),
            out_rows: if scatter { device[2].ptr() } else { DevicePtr::null() },
            entries: capacity,
        };
        let job = DeviceMatmul { ty, weights: operands, rows, cols, x: input.form, out: out.ptr() };
        gpu.matmul_in(&job, Some(size))?;
        Ok(gpu.download(out.ptr(), entries * rows)?)
    };
    // The second has a capacity above the number of entries.
    let sorted = run(false, entries, TileSize::Small)?;
    let large = TileSize::of(ty).last().copied().unwrap_or(TileSize::Large);
    let scattered = run(true, most, large)?;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for (expert, weights) in &weights {
        for entry in starts[*expert] as usize..starts[*expert + 1] as usize {
            let got = &sorted[entry * rows..][..rows];
            let scattered = &scattered[out_rows[entry] as usize * rows..][..rows];
            let case = format!("entry {entry} of expert {expert}");
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            worst = worst.worse(
                Outcome::same(&bits(scattered), &bits(got)).at(&format!("scattered, {case}")),
            );
            if *expert == MISSING {
                let untouched = got.iter().all(|x| x.is_nan());
                worst = worst.worse(Outcome::same(&[untouched], &[true]).at(&case));
            } else {
                let x = &x[token_rows[entry] as usize * cols..][..cols];
                worst = worst.worse(compare(weights, x, got, tolerance(ty, exact)).at(&case));
            }
        }
    }
    Ok(worst)
}

pub fn benches() -> Vec<Bench> {
    let mut benches = Vec::new();
    for ty in [TensorType::Q4_K, TensorType::Q8_0, TensorType::BF16, TensorType::BF16_C2048] {
        for tokens in [32, 512] {
            let name = format!("matmul {ty} 4096x14336, {tokens} tokens");
            benches.push(Bench::new(name, move |context| {
                bench(context, ty, (4096, 14336), tokens, None)
            }));
        }
        // The tiles of the first fit on the multiprocessors at once, those of the second do not.
        for (rows, cols) in [(4096, 14336), (28672, 4096)] {
            for &size in &TileSize::of(ty)[1..] {
                let name = format!("matmul {ty} {rows}x{cols}, 512 tokens, {size:?}");
                benches.push(Bench::new(name, move |context| {
                    bench(context, ty, (rows, cols), 512, Some(size))
                }));
            }
        }
    }
    benches.push(Bench::new("matmul-experts Q4_K 128 of 768x2048, 512 x 8", bench_experts));
    benches
}

fn bench(
    context: &Context,
    ty: TensorType,
    (rows, cols): (usize, usize),
    tokens: usize,
    size: Option<TileSize>,
) -> Result<Measured> {
    let data = matvec::repeated_weights(ty, rows, cols);
    let rotation = Rotation::new(context, &data)?;
    let x = Random::new(2).gaussians(tokens * cols);
    let input = Input::new(context, narrow_form(ty, cols), &x, cols)?;
    let out = context.poisoned(tokens * rows)?;
    let seconds = median_seconds(context, |turn| {
        let weights = MatmulWeights::Dense { data: rotation.turn(turn), tokens };
        let job = DeviceMatmul { ty, weights, rows, cols, x: input.form, out: out.ptr() };
        context.gpu.matmul_in(&job, size)
    })?;
    let flops = 2.0 * (tokens * rows * cols) as f64;
    Ok(Measured { seconds, bytes: data.len() as f64, flops })
}

/// Measures the gate matrix of a layer's experts for a prompt of 512 tokens with 8 experts each, evenly distributed.
fn bench_experts(context: &Context) -> Result<Measured> {
    let (ty, experts, rows, cols, tokens) = (TensorType::Q4_K, 128, 768, 2048, 512);
    let entries = tokens * 8;
    let data = random_weights(ty, rows * cols, &mut Random::new(1));
    let pool = Arc::new(context.gpu.allocate(data.len() * experts)?);
    for expert in 0..experts {
        context.gpu.upload(&data, pool.ptr::<u8>().offset(expert * data.len()))?;
    }
    let slot = |expert| pool.ptr::<u8>().offset(expert * data.len()).address();
    let slots: Vec<u64> = (0..experts).map(slot).collect();
    let slots = context.table(&pool, data.len(), &slots)?;
    let starts: Vec<u32> = (0..=experts).map(|e| (e * entries / experts) as u32).collect();
    let token_rows: Vec<u32> = (0..entries).map(|i| (i * 13 % tokens) as u32).collect();
    let (starts, token_rows) = (context.upload(&starts)?, context.upload(&token_rows)?);
    let x = Random::new(2).gaussians(tokens * cols);
    let input = Input::new(context, narrow_form(ty, cols), &x, cols)?;
    let out = context.poisoned(entries * rows)?;
    let weights = MatmulWeights::Experts {
        slots: slots.table(0),
        experts,
        offset: 0,
        starts: starts.ptr(),
        token_rows: token_rows.ptr(),
        out_rows: DevicePtr::null(),
        entries,
    };
    let job = DeviceMatmul { ty, weights, rows, cols, x: input.form, out: out.ptr() };
    let seconds = median_seconds(context, |_| context.gpu.matmul(&job))?;
    let flops = 2.0 * (entries * rows * cols) as f64;
    Ok(Measured { seconds, bytes: (data.len() * experts) as f64, flops })
}
