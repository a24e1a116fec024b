//! Compares products of decode rows with f64 products of the exact weights and the rounded activations.

use std::sync::Arc;

use anyhow::Result;
use forebay_cuda::{
    AddressTables, DeviceMatrix, DeviceMemory, DevicePtr, ExpertPairs, ExpertPart, ExpertTable,
    GateBiases, MatvecInput, Pairing, TiledActivations, takes_rounded, takes_tiles,
};
use forebay_format::TensorType;
use forebay_ops::Gating;

use super::gating;
use super::quantize::{round_group, rounded};
use crate::bench::{Bench, Measured, Rotation, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;
use crate::random::gaussian_bf16;
use crate::weights::{Weights, random_weights, types};

/// Tolerance relative to the product of the norms of row and activations.
const TOLERANCE: f64 = 1e-5;

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for ty in types() {
        checks.push(Check::new(format!("matvec {ty}"), move |context| shapes(context, ty)));
        checks
            .push(Check::new(format!("matvec-experts {ty}"), move |context| experts(context, ty)));
    }
    checks
}

/// Activations on the device in the form that a type takes, and the values they have in that form.
pub struct Input {
    /// For products with experts.
    pub form: MatvecInput,
    /// For products with dense matrices.
    pub dense: MatvecInput,
    _memory: [DeviceMemory; 3],
    /// `[tokens, cols]`.
    pub values: Vec<f64>,
}

impl Input {
    pub fn new(context: &Context, ty: TensorType, x: &[f32], cols: usize) -> Result<Input> {
        let device = context.upload(x)?;
        if !takes_rounded(ty) {
            let (form, gpu) = (MatvecInput::Float(device.ptr()), &context.gpu);
            let values = x.iter().map(|x| f64::from(*x)).collect();
            let memory = [device, gpu.allocate(1)?, gpu.allocate(1)?];
            return Ok(Input { form, dense: form, _memory: memory, values });
        }
        let rows = x.len() / cols;
        let (out, memory) = rounded(context, device.ptr(), rows, cols)?;
        let form = MatvecInput::Rounded(out);
        let (codes, scales) = TiledActivations::bytes(rows, cols);
        let tiles = context.gpu.allocate(codes + scales)?;
        let dense = if takes_tiles(ty, rows) {
            let scales = tiles.ptr::<u8>().offset(codes).cast();
            let to = TiledActivations { codes: tiles.ptr(), scales };
            context.gpu.tile_rounded(out, to, rows, cols)?;
            MatvecInput::Tiled(to)
        } else {
            form
        };
        let groups = x.chunks(32).map(round_group);
        let values = groups.flat_map(|(codes, scale, _)| {
            codes
                .into_iter()
                .map(move |code| f64::from(code) * f64::from(scale))
                .collect::<Vec<_>>()
        });
        Ok(Input { form, dense, _memory: [device, memory, tiles], values: values.collect() })
    }
}

/// Returns the numbers of columns to test: the fewest, some that leave lanes idle, and many.
pub fn widths(ty: TensorType) -> Vec<usize> {
    let block = ty.block_elements();
    if ty.compact().is_some() {
        return vec![block, 3 * block, 2048, 4096];
    }
    if !takes_rounded(ty) && ty.is_quantized() {
        return vec![block, 3 * block, 640, 2048 + block, 2304, 4096];
    }
    if !takes_rounded(ty) {
        return vec![1, 5, 8, 264, 1028, 1025, 2304, 4096];
    }
    let mut widths = vec![block, 3 * block, 768, 2304, 4096, 2048 + 3 * block.max(256)];
    widths.dedup();
    widths
}

fn shapes(context: &Context, ty: TensorType) -> Result<Outcome> {
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for (i, cols) in widths(ty).into_iter().enumerate() {
        for (rows, tokens) in [
            (1, 1),
            (37, 1),
            (64, 2),
            (9, 3),
            (33, 5),
            (66, 8),
            (45, 9),
            (1, 16),
            (131, 17),
            (37, 32),
        ] {
            let mut random = Random::new((i * 100 + tokens) as u64);
            let first = Weights::random(context, ty, rows, cols, &mut random)?;
            let second = Weights::random(context, ty, rows + 3, cols, &mut random)?;
            let input = Input::new(context, ty, &random.gaussians(tokens * cols), cols)?;
            let run = || -> Result<Vec<Vec<f32>>> {
                let weights = [&first, &second];
                let out = weights.map(|w| context.poisoned(tokens * w.rows));
                let [a, b] = out;
                let out = [a?, b?];
                let matrices = [0, 1].map(|i| DeviceMatrix {
                    data: weights[i].ptr,
                    rows: weights[i].rows,
                    out: out[i].ptr(),
                });
                let gpu = &context.gpu;
                gpu.matvec(ty, &matrices, input.dense, tokens, cols, Pairing::Separate)?;
                (0..2).map(|i| Ok(gpu.download(out[i].ptr(), tokens * weights[i].rows)?)).collect()
            };
            let (got, again) = (run()?, run()?);
            for (weights, got) in [&first, &second].into_iter().zip(&got) {
                let outcome = compare(weights, &input.values, got);
                worst = worst.worse(outcome.at(&format!("{rows}x{cols}, {tokens} tokens")));
            }
            let same = Outcome::same(&bits_of(&again.concat()), &bits_of(&got.concat()));
            worst = worst.worse(same.at(&format!("again, {rows}x{cols}, {tokens} tokens")));
            let up = Weights::random(context, ty, rows, cols, &mut random)?;
            let gated = joined(context, ty, [&first, &up], &input, tokens)?;
            worst = worst.worse(gated.at(&format!("joined, {rows}x{cols}, {tokens} tokens")));
        }
    }
    Ok(worst)
}

fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Compares `got [tokens, rows]` with `x [tokens, cols]` times the weights.
pub fn compare(weights: &Weights, x: &[f64], got: &[f32]) -> Outcome {
    let tokens = x.chunks(weights.cols);
    let (expected, norms): (Vec<f64>, Vec<f64>) =
        tokens.flat_map(|x| (0..weights.rows).map(|row| weights.dot(row, x))).unzip();
    Outcome::of(got, &expected, |i| norms[i], TOLERANCE)
}

/// Checks two tokens with four experts each: gate and up separately and joined, then down for every pair.
fn experts(context: &Context, ty: TensorType) -> Result<Outcome> {
    let (tokens, used, rows, gpu) = (2, 4, 35, &context.gpu);
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for cols in [3 * ty.block_elements().max(256), 2304usize.next_multiple_of(ty.block_elements())]
    {
        let mut random = Random::new(cols as u64);
        let pool = Pool::random(context, ty, rows, cols, &mut random)?;
        let ids: Vec<u32> = vec![5, 0, 3, 4, 1, 5, 2, 0];
        let (device_ids, device_order) = (context.upload(&ids)?, context.upload(&ORDER)?);
        // The slot and the bias of an expert have different indices, to tell them apart.
        let bias_of = |id: u32| (id + 1) % 6;
        let bias_ids = context.upload(&ids.iter().map(|id| bias_of(*id)).collect::<Vec<_>>())?;
        let table = ExpertTable { slots: pool.table.table(0), rows };
        for pairs_per_x in [used, 1] {
            let x_rows = tokens * used / pairs_per_x;
            let input = Input::new(context, ty, &random.gaussians(x_rows * cols), cols)?;
            let run = |parts: &[u64], pairing| -> Result<Vec<Vec<f32>>> {
                let count = ids.len() * rows;
                let out: Vec<DeviceMemory> =
                    parts.iter().map(|_| context.poisoned(count)).collect::<Result<_, _>>()?;
                let parts: Vec<ExpertPart> = parts
                    .iter()
                    .zip(&out)
                    .map(|(offset, out)| ExpertPart { offset: *offset, out: out.ptr() })
                    .collect();
                let (ids, order) = (device_ids.ptr(), device_order.ptr());
                let pairs = ExpertPairs { ids, order, count: ORDER.len(), per_row: pairs_per_x };
                gpu.matvec_experts(ty, table, &parts, pairs, input.form, cols, pairing)?;
                out.iter().map(|out| Ok(gpu.download(out.ptr(), count)?)).collect()
            };
            let apart = run(&[0, pool.part_bytes], Pairing::Separate)?;
            let both = [0, pool.part_bytes];
            let joined = GATED
                .map(|(gating, biased)| {
                    let biases = biased.then(|| GateBiases {
                        gate: pool.biases.ptr(),
                        up: pool.biases.ptr(),
                        ids: bias_ids.ptr(),
                        pairs: DevicePtr::null(),
                    });
                    run(&both, Pairing::Gated { gating, biases })
                })
                .into_iter()
                .collect::<Result<Vec<_>>>()?;
            let single = run(&[pool.part_bytes], Pairing::Separate)?;
            for (pair, id) in ids.iter().enumerate() {
                let x = &input.values[pair / pairs_per_x * cols..][..cols];
                let place = format!(
                    "{cols} columns, pair {pair} of expert {id}, {pairs_per_x} pairs a row"
                );
                let cut = |all: &[f32]| all[pair * rows..][..rows].to_vec();
                if *id == MISSING {
                    let untouched = [&apart[0], &joined[0][0]]
                        .iter()
                        .all(|all| cut(all).iter().all(|x| x.is_nan()));
                    let outcome = Outcome::same(&[untouched], &[true]);
                    worst = worst.worse(outcome.at(&place));
                    continue;
                }
                let [gate, up] = &pool.experts[*id as usize];
                worst = worst.worse(compare(gate, x, &cut(&apart[0])).at(&place));
                worst = worst.worse(compare(up, x, &cut(&apart[1])).at(&place));
                worst = worst.worse(compare(up, x, &cut(&single[0])).at(&place));
                for ((gating, biased), joined) in GATED.into_iter().zip(&joined) {
                    let bias = &pool.bias_values[bias_of(*id) as usize * rows..][..rows];
                    let bias = biased.then_some(bias);
                    let gated = compare_gated(gating, [gate, up], bias, x, &cut(&joined[0]));
                    worst = worst.worse(gated.at(&format!("{gating:?}, {place}")));
                }
            }
        }
    }
    Ok(worst)
}

/// The order in which the kernel visits the eight pairs.
const ORDER: [u32; 8] = [3, 1, 7, 0, 2, 6, 5, 4];

/// The expert of [`Pool`] that has no slot.
pub const MISSING: u32 = 4;

/// Ways to join gate and up; the flag is true if there are biases.
const GATED: [(Gating, bool); 3] = [
    (Gating::Silu, false),
    (Gating::GeluTanh, false),
    (Gating::Clamped { alpha: 1.702, limit: 7.0 }, true),
];

/// Six experts of two matrices each, in slots that are neither ordered nor adjacent.
pub struct Pool {
    experts: Vec<[Weights; 2]>,
    pub part_bytes: u64,
    pub table: AddressTables,
    /// `[experts, rows]`, used for both gate and up.
    bias_values: Vec<f32>,
    pub biases: DeviceMemory,
}

impl Pool {
    pub fn random(
        context: &Context,
        ty: TensorType,
        rows: usize,
        cols: usize,
        random: &mut Random,
    ) -> Result<Pool> {
        let mut experts = Vec::new();
        for _ in 0..6 {
            let mut part = || Weights::random(context, ty, rows, cols, random);
            experts.push([part()?, part()?]);
        }
        let part_bytes = experts[0][0].data.len();
        let stride = (2 * part_bytes + 64).next_multiple_of(256) + 16;
        let slots = Arc::new(context.gpu.allocate(stride * 8)?);
        context.gpu.fill(slots.ptr(), 0xff, stride * 8)?;
        let mut table = vec![0_u64; experts.len()];
        for (id, parts) in experts.iter().enumerate() {
            if id as u32 == MISSING {
                continue;
            }
            let slot: DevicePtr<u8> = slots.ptr::<u8>().offset(stride * ((id * 5 + 1) % 8) + 16);
            for (i, part) in parts.iter().enumerate() {
                context.gpu.upload(&part.data, slot.offset(i * part_bytes))?;
            }
            table[id] = slot.address();
        }
        let bias_values = random.gaussians(experts.len() * rows);
        Ok(Pool {
            biases: context.upload(&bias_values)?,
            bias_values,
            experts,
            part_bytes: part_bytes as u64,
            table: context.table(&slots, 2 * part_bytes, &table)?,
        })
    }
}

/// Checks the joined gate and up matrices of a dense feed-forward.
fn joined(
    context: &Context,
    ty: TensorType,
    weights: [&Weights; 2],
    input: &Input,
    tokens: usize,
) -> Result<Outcome> {
    let Weights { rows, cols, .. } = *weights[0];
    let out = context.poisoned(tokens * rows)?;
    let matrices = weights.map(|w| DeviceMatrix { data: w.ptr, rows, out: out.ptr() });
    let pairing = Pairing::gated(Gating::GeluTanh);
    context.gpu.matvec(ty, &matrices, input.dense, tokens, cols, pairing)?;
    let got = context.gpu.download::<f32>(out.ptr(), tokens * rows)?;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for (x, got) in input.values.chunks(cols).zip(got.chunks(rows)) {
        worst = worst.worse(compare_gated(Gating::GeluTanh, weights, None, x, got));
    }
    Ok(worst)
}

/// Compares with `gating(gate + bias, up + bias)`. The norm weights an error in one factor with the size of the other.
fn compare_gated(
    gating: Gating,
    [gate, up]: [&Weights; 2],
    bias: Option<&[f32]>,
    x: &[f64],
    got: &[f32],
) -> Outcome {
    let rows = (0..gate.rows).map(|row| {
        let ((gate, gate_norm), (up, up_norm)) = (gate.dot(row, x), up.dot(row, x));
        let bias = bias.map_or(0.0, |bias| f64::from(bias[row]));
        let (gate, up) = (gate + bias, up + bias);
        // The clamped gating multiplies by `up + 1` instead of `up`.
        let one = f64::from(u8::from(matches!(gating, Gating::Clamped { .. })));
        let inner = gating::exact(gating, gate, 1.0 - one).abs();
        let slope = 1.2 * gate_norm * (up + one).abs() + inner * up_norm;
        (gating::exact(gating, gate, up), slope)
    });
    let (expected, norms): (Vec<f64>, Vec<f64>) = rows.unzip();
    Outcome::of(got, &expected, |i| norms[i] + 1e-4, TOLERANCE)
}

const MEASURED: [TensorType; 7] = [
    TensorType::Q4_K,
    TensorType::Q6_K,
    TensorType::Q8_0,
    TensorType::MXFP4,
    TensorType::BF16,
    TensorType::BF16_C2048,
    TensorType::BF16_C256,
];

pub fn benches() -> Vec<Bench> {
    let mut benches = Vec::new();
    for ty in MEASURED {
        for (rows, cols) in [(4096, 14336), (14336, 4096), (151_936, 2048)] {
            let name = format!("matvec {ty} {rows}x{cols}");
            benches.push(Bench::new(name, move |context| bench(context, ty, rows, cols, 1)));
        }
        benches.push(Bench::new(format!("matvec {ty} 14336x4096 4 tokens"), move |context| {
            bench(context, ty, 14336, 4096, 4)
        }));
        let of_experts = [(2048, 768, 1), (768, 2048, 2)];
        let fits = |of: &(usize, usize, usize)| of.1.is_multiple_of(ty.block_elements());
        for (rows, cols, parts) in of_experts.into_iter().filter(fits) {
            let name = format!("matvec-experts {ty} 8 of 128, {parts} x {rows}x{cols}");
            benches.push(Bench::new(name, move |context| {
                bench_experts(context, ty, rows, cols, parts)
            }));
        }
    }
    benches
}

/// Repeats a few random rows, because random bytes for a whole large matrix take seconds.
pub fn repeated_weights(ty: TensorType, rows: usize, cols: usize) -> Vec<u8> {
    let some = match ty.compact() {
        None => random_weights(ty, 16 * cols, &mut Random::new(1)),
        Some(_) => gaussian_bf16(ty, 16 * cols, &mut Random::new(1)),
    };
    some.iter().copied().cycle().take(some.len() / 16 * rows).collect()
}

fn bench(
    context: &Context,
    ty: TensorType,
    rows: usize,
    cols: usize,
    tokens: usize,
) -> Result<Measured> {
    let data = repeated_weights(ty, rows, cols);
    let rotation = Rotation::new(context, &data)?;
    let input = Input::new(context, ty, &Random::new(2).gaussians(tokens * cols), cols)?;
    let out = context.poisoned(tokens * rows)?;
    let seconds = median_seconds(context, |turn| {
        let matrix = DeviceMatrix { data: rotation.turn(turn), rows, out: out.ptr() };
        context.gpu.matvec(ty, &[matrix], input.dense, tokens, cols, Pairing::Separate)
    })?;
    Ok(Measured { seconds, bytes: data.len() as f64, flops: 2.0 * (tokens * rows * cols) as f64 })
}

/// Measures eight experts of 128 for one token, with different experts in each turn.
fn bench_experts(
    context: &Context,
    ty: TensorType,
    rows: usize,
    cols: usize,
    parts: usize,
) -> Result<Measured> {
    let (count, used) = (128, 8);
    let data = repeated_weights(ty, rows * parts, cols);
    let stride = data.len().next_multiple_of(256);
    let pool = Arc::new(context.gpu.allocate(stride * count)?);
    context.gpu.upload(&data, pool.ptr())?;
    for expert in 1..count {
        let to = pool.ptr::<u8>().offset(expert * stride);
        context.gpu.copy(pool.ptr(), to, data.len())?;
    }
    let slots: Vec<u64> =
        (0..count).map(|expert| pool.ptr::<u8>().offset(expert * stride).address()).collect();
    let slots = context.table(&pool, data.len(), &slots)?;
    let out = context.poisoned(used * rows)?;
    let ids: Vec<u32> = (0..count as u32).map(|i| i * 37 % count as u32).collect();
    let ids = context.upload(&ids)?;
    let input = Input::new(context, ty, &Random::new(2).gaussians(used * cols), cols)?;
    let table = ExpertTable { slots: slots.table(0), rows };
    let parts: Vec<ExpertPart> = (0..parts)
        .map(|i| ExpertPart { offset: (data.len() / parts * i) as u64, out: out.ptr() })
        .collect();
    let pairing = match parts.len() {
        2 => Pairing::gated(Gating::Silu),
        _ => Pairing::Separate,
    };
    let seconds = median_seconds(context, |turn| {
        let ids = ids.ptr::<u32>().offset(turn * used % count);
        let pairs = ExpertPairs { ids, order: DevicePtr::null(), count: used, per_row: 1 };
        context.gpu.matvec_experts(ty, table, &parts, pairs, input.form, cols, pairing)
    })?;
    Ok(Measured { seconds, bytes: (data.len() * used) as f64, flops: 0.0 })
}
