//! Compares norms with the CPU and with f64 arithmetic.

use anyhow::Result;
use forebay_cuda::{
    Added, Converted, DevicePtr, ExpertOutputs, FiniteFlag, NO_EXPERT, Norm, NormForm, Normed,
    RoundedActivations,
};

use super::halves::Halves;
use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const EPSILON: f32 = 1e-5;
const TOLERANCE: f64 = 2e-6;

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("norm rows", |context| over_shapes(context, rows)),
        Check::new("norm rows in place", |context| over_shapes(context, rows_in_place)),
        Check::new("norm left out after addition", |context| over_shapes(context, not_normed)),
        Check::new("norm after addition", |context| over_shapes(context, after_addition)),
        Check::new("norm after scaled addition", |context| over_shapes(context, after_scaled)),
        Check::new("norm after experts", |context| over_shapes(context, after_experts)),
        Check::new("norm rounded", |context| over_shapes(context, rounded)),
        Check::new("norm as halves", |context| over_shapes(context, as_halves)),
        Check::new("layer norm after addition", |context| over_shapes(context, layer_norm)),
        Check::new("layer norm rounded", |context| over_shapes(context, layer_norm_rounded)),
        Check::new("norm reports what is not finite", reports),
    ]
}

pub fn benches() -> Vec<Bench> {
    let shapes = [(1, 2048), (1, 4096), (512, 4096)];
    let bench = |(tokens, width)| {
        Bench::new(format!("norm after addition {tokens}x{width}"), move |context| {
            measure(context, tokens, width)
        })
    };
    shapes.into_iter().map(bench).collect()
}

fn over_shapes(
    context: &Context,
    check: fn(&Context, usize, usize) -> Result<Outcome>,
) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for width in
        [1, 3, 16, 64, 127, 128, 1000, 1030, 2048, 4096, 5120, 7168, 16_384, 16_388, 40_000]
    {
        for rows in [1, 5] {
            let mut next = check(context, rows, width)?;
            next.place.insert_str(0, &format!("{rows}x{width} "));
            outcome = outcome.worse(next);
        }
    }
    Ok(outcome)
}

/// Returns random rows and a weight.
fn inputs(rows: usize, width: usize) -> (Vec<f32>, Vec<f32>) {
    let mut random = Random::new(width as u64);
    (random.gaussians(rows * width), random.gaussians(width))
}

fn expected(x: &[f32], weight: &[f32]) -> Vec<f64> {
    let row = |x: &[f32]| {
        let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
        let scale = 1.0 / (squares / x.len() as f64 + f64::from(EPSILON)).sqrt();
        x.iter().zip(weight).map(|(&x, &w)| f64::from(x) * scale * f64::from(w)).collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(row).collect()
}

/// Compares with the exact result and with the CPU. The tolerance is relative to each number.
fn compare(context: &Context, got: &[f32], x: &[f32], weight: &[f32]) -> Outcome {
    let exact = expected(x, weight);
    let mut cpu = vec![f32::NAN; x.len()];
    context.cpu.rms_norm(x, weight, EPSILON, &mut cpu);
    let cpu: Vec<f64> = cpu.into_iter().map(f64::from).collect();
    let norm = |i: usize| exact[i].abs();
    Outcome::of(got, &exact, norm, TOLERANCE).worse(Outcome::of(got, &cpu, norm, TOLERANCE))
}

/// Norms rows without any addition or rounding.
fn plain(
    context: &Context,
    x: DevicePtr<f32>,
    norm: &Norm,
    out: DevicePtr<f32>,
    rows: usize,
) -> Result<()> {
    Ok(context.gpu.rms_norm(x, Added::Nothing, norm, Normed::plain(out), rows, None)?)
}

fn rows(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, weight) = inputs(rows, width);
    let (device, device_weight) = (context.upload(&x)?, context.upload(&weight)?);
    let out = context.poisoned(x.len())?;
    let norm = Norm { weight: device_weight.ptr(), width, epsilon: EPSILON };
    plain(context, device.ptr(), &norm, out.ptr(), rows)?;
    let got = context.gpu.download(out.ptr(), x.len())?;
    Ok(compare(context, &got, &x, &weight))
}

fn rows_in_place(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, weight) = inputs(rows, width);
    let (device, device_weight) = (context.upload(&x)?, context.upload(&weight)?);
    let norm = Norm { weight: device_weight.ptr(), width, epsilon: EPSILON };
    plain(context, device.ptr(), &norm, device.ptr(), rows)?;
    let got = context.gpu.download(device.ptr(), x.len())?;
    Ok(compare(context, &got, &x, &weight))
}

/// Without a weight, the rows after an addition are the output.
fn not_normed(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, _) = inputs(rows, width);
    let add = Random::new(78).gaussians(x.len());
    let (device, device_add) = (context.upload(&x)?, context.upload(&add)?);
    let out = context.poisoned(x.len())?;
    let norm = Norm { weight: DevicePtr::null(), width, epsilon: EPSILON };
    let added = Added::Rows(device_add.ptr());
    context.gpu.rms_norm(device.ptr(), added, &norm, Normed::plain(out.ptr()), rows, None)?;
    let sums: Vec<f32> = x.iter().zip(&add).map(|(x, add)| x + add).collect();
    let summed = context.gpu.download(device.ptr(), x.len())?;
    let got = context.gpu.download(out.ptr(), x.len())?;
    Ok(Outcome::same(&summed, &sums).worse(Outcome::same(&got, &sums)))
}

fn after_addition(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, weight) = inputs(rows, width);
    let add = Random::new(77).gaussians(x.len());
    let device_add = context.upload(&add)?;
    let sums: Vec<f32> = x.iter().zip(&add).map(|(x, add)| x + add).collect();
    added(context, &x, &weight, Added::Rows(device_add.ptr()), &sums)
}

/// Checks the sum with a factor, with a norm of it and without.
fn after_scaled(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, weight) = inputs(rows, width);
    let add = Random::new(78).gaussians(x.len());
    let device_weight = context.upload(&weight)?;
    let (device_add, factor) = (context.upload(&add)?, 0.953_125);
    let sums: Vec<f32> = x.iter().zip(&add).map(|(x, add)| (x + add) * factor).collect();
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for normed in [true, false] {
        let device = context.upload(&x)?;
        let out = context.poisoned(x.len())?;
        let (weight_at, to) = match normed {
            true => (device_weight.ptr(), out.ptr()),
            false => (DevicePtr::null(), DevicePtr::null()),
        };
        let norm = Norm { weight: weight_at, width, epsilon: EPSILON };
        let added = (Added::Rows(device_add.ptr()), factor);
        let to = Normed::plain(to);
        context.gpu.rms_norm_of_scaled(device.ptr(), added, &norm, to, rows, None)?;
        let got = context.gpu.download::<f32>(device.ptr(), x.len())?;
        outcome = outcome.worse(Outcome::same(&got, &sums));
        if normed {
            let got = context.gpu.download::<f32>(out.ptr(), x.len())?;
            outcome = outcome.worse(compare(context, &got, &sums, &weight));
        }
    }
    Ok(outcome)
}

/// Returns random outputs of experts: parts, weights, and a permutation of the rows.
fn expert_outputs(tokens: usize, k: usize, width: usize) -> (Vec<f32>, Vec<f32>, Vec<u32>) {
    let pairs = tokens * k;
    let mut random = Random::new(width as u64);
    // A step that is coprime with the number of pairs visits every row.
    let step = (1..).map(|i| pairs / 2 + i).find(|&step| gcd(step, pairs) == 1).unwrap_or(1);
    let rows = (0..pairs).map(|pair| (pair * step % pairs) as u32).collect();
    (random.gaussians(pairs * width), random.gaussians(pairs), rows)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn after_experts(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, weight) = inputs(rows, width);
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (k, biased, has_shared) in
        [(1, false, false), (3, false, false), (8, false, true), (4, true, false), (6, true, true)]
    {
        let (mut parts, weights, row_of_pair) = expert_outputs(rows, k, width);
        let (experts, mut random) = (11, Random::new(k as u64));
        let mut ids: Vec<u32> = (0..rows * k).map(|_| random.next() % experts as u32).collect();
        let (bias, shared) = (random.gaussians(experts * width), random.gaussians(x.len()));
        let mut sums = vec![0.0; x.len()];
        let mut whole = parts.clone();
        if rows > 1 {
            // The last row has no experts, and nothing has written its outputs.
            for pair in (rows - 1) * k..rows * k {
                let row = row_of_pair[pair] as usize * width;
                ids[pair] = NO_EXPERT;
                parts[row..][..width].fill(f32::NAN);
                whole[row..][..width].fill(0.0);
            }
        }
        if biased {
            for (pair, &row) in row_of_pair.iter().enumerate() {
                if ids[pair] == NO_EXPERT {
                    continue;
                }
                let bias = &bias[ids[pair] as usize * width..][..width];
                context.cpu.add_bias_rows(&mut whole[row as usize * width..][..width], bias);
            }
        }
        context.cpu.combine_experts(&mut sums, width, k, &weights, &whole, &row_of_pair);
        if has_shared {
            context.cpu.add_assign(&mut sums, &shared);
        }
        sums.iter_mut().zip(&x).for_each(|(sum, x)| *sum += x);
        let (parts, weights) = (context.upload(&parts)?, context.upload(&weights)?);
        let (row_of_pair, ids) = (context.upload(&row_of_pair)?, context.upload(&ids)?);
        let (bias, shared) = (context.upload(&bias)?, context.upload(&shared)?);
        let outputs = ExpertOutputs {
            parts: parts.ptr(),
            weights: weights.ptr(),
            row_of_pair: row_of_pair.ptr(),
            bias: if biased { bias.ptr() } else { DevicePtr::null() },
            ids: ids.ptr(),
            shared: if has_shared { shared.ptr() } else { DevicePtr::null() },
            width,
            k,
        };
        outcome = outcome.worse(added(context, &x, &weight, Added::Experts(outputs), &sums)?);
    }
    Ok(outcome)
}

/// Checks that the rows become `sums`, bit for bit, and are then normed.
fn added(
    context: &Context,
    x: &[f32],
    weight: &[f32],
    added: Added,
    sums: &[f32],
) -> Result<Outcome> {
    let (device, device_weight) = (context.upload(x)?, context.upload(weight)?);
    let out = context.poisoned(x.len())?;
    let norm = Norm { weight: device_weight.ptr(), width: weight.len(), epsilon: EPSILON };
    let rows = x.len() / weight.len();
    let normed = Normed::plain(out.ptr());
    context.gpu.rms_norm(device.ptr(), added, &norm, normed, rows, None)?;
    let got = context.gpu.download(out.ptr(), x.len())?;
    let got_sums = context.gpu.download(device.ptr(), x.len())?;
    Ok(compare(context, &got, sums, weight).worse(Outcome::same(&got_sums, sums)))
}

/// Checks that the fused rounding gives the same bits as rounding the rows afterwards, including zeroes and NaN.
fn rounded(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    if !width.is_multiple_of(32) {
        return Ok(Outcome::same::<f32>(&[], &[]));
    }
    let (mut x, mut weight) = inputs(rows, width);
    weight[..32].fill(0.0);
    if rows > 1 {
        x[width + 17] = f32::NAN;
    }
    let (device, device_weight) = (context.upload(&x)?, context.upload(&weight)?);
    let out = context.poisoned(x.len())?;
    let (codes, scales) = RoundedActivations::bytes(rows, width);
    let memory = context.poisoned(2 * (codes + scales))?;
    let place = |first: usize| RoundedActivations {
        codes: memory.ptr::<i8>().offset(first),
        scales: memory.ptr::<u8>().offset(first + codes).cast(),
    };
    let norm = Norm { weight: device_weight.ptr(), width, epsilon: EPSILON };
    let normed = Normed { rows: out.ptr(), also: Some(Converted::Rounded(place(0))) };
    context.gpu.rms_norm(device.ptr(), Added::Nothing, &norm, normed, rows, None)?;
    context.gpu.quantize_q8(out.ptr(), place(codes + scales), rows, width)?;
    let got = context.gpu.download::<u8>(memory.ptr(), 2 * (codes + scales))?;
    Ok(Outcome::same(&got[..codes + scales], &got[codes + scales..]))
}

/// Compares rows that the norm writes as halves with the same rows converted afterwards. A row of zeroes and one that is not
/// finite are among them.
fn as_halves(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (mut x, weight) = inputs(rows, width);
    if rows > 2 {
        x[width..2 * width].fill(0.0);
        x[2 * width + width / 2] = f32::NAN;
    }
    let (device, device_weight) = (context.upload(&x)?, context.upload(&weight)?);
    let out = context.poisoned(x.len())?;
    let halves = Halves::new(context, rows, width)?;
    let norm = Norm { weight: device_weight.ptr(), width, epsilon: EPSILON };
    let normed = Normed { rows: out.ptr(), also: Some(Converted::Halves(halves.checked())) };
    context.gpu.rms_norm(device.ptr(), Added::Nothing, &norm, normed, rows, None)?;
    halves.compare(context, out.ptr())
}

/// Returns the factors and the biases of a layer norm.
fn layer_weights(width: usize) -> Vec<f32> {
    Random::new(79).gaussians(2 * width)
}

/// Compares layer norms after an addition with the CPU and with f64 arithmetic.
fn layer_norm(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, _) = inputs(rows, width);
    let (add, weights) = (Random::new(80).gaussians(x.len()), layer_weights(width));
    let (device, device_add) = (context.upload(&x)?, context.upload(&add)?);
    let (device_weights, out) = (context.upload(&weights)?, context.poisoned(x.len())?);
    let norm = Norm { weight: device_weights.ptr(), width, epsilon: EPSILON };
    let added = (Added::Rows(device_add.ptr()), 1.0);
    let to = Normed::plain(out.ptr());
    let form = NormForm::Layer;
    context.gpu.norm_of_scaled(form, device.ptr(), added, &norm, to, (rows, None))?;
    let sums: Vec<f32> = x.iter().zip(&add).map(|(x, add)| x + add).collect();
    let row = |x: &[f32]| {
        let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / width as f64;
        let squares: f64 = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum();
        let scale = 1.0 / (squares / width as f64 + f64::from(EPSILON)).sqrt();
        let of = |i: usize| {
            (f64::from(x[i]) - mean) * scale * f64::from(weights[i]) + f64::from(weights[width + i])
        };
        (0..width).map(of).collect::<Vec<f64>>()
    };
    let exact: Vec<f64> = sums.chunks(width).flat_map(row).collect();
    let mut cpu = vec![f32::NAN; x.len()];
    context.cpu.layer_norm(&sums, &weights, EPSILON, &mut cpu);
    let cpu: Vec<f64> = cpu.into_iter().map(f64::from).collect();
    let got = context.gpu.download::<f32>(out.ptr(), x.len())?;
    let summed = context.gpu.download::<f32>(device.ptr(), x.len())?;
    // Differences from the mean and sums with biases may cancel.
    let beside = |i: usize| exact[i].abs().max(1.0);
    let outcome = Outcome::of(&got, &exact, beside, 2.0 * TOLERANCE);
    let outcome = outcome.worse(Outcome::of(&got, &cpu, beside, 4.0 * TOLERANCE));
    Ok(outcome.worse(Outcome::same(&summed, &sums)))
}

/// Checks that rounding in the kernel of layer norms gives the same bits as rounding the rows afterwards.
fn layer_norm_rounded(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    if !width.is_multiple_of(32) {
        return Ok(Outcome::same::<f32>(&[], &[]));
    }
    let (x, _) = inputs(rows, width);
    let (device, device_weights) = (context.upload(&x)?, context.upload(&layer_weights(width))?);
    let out = context.poisoned(x.len())?;
    let (codes, scales) = RoundedActivations::bytes(rows, width);
    let memory = context.poisoned(2 * (codes + scales))?;
    let place = |first: usize| RoundedActivations {
        codes: memory.ptr::<i8>().offset(first),
        scales: memory.ptr::<u8>().offset(first + codes).cast(),
    };
    let norm = Norm { weight: device_weights.ptr(), width, epsilon: EPSILON };
    let normed = Normed { rows: out.ptr(), also: Some(Converted::Rounded(place(0))) };
    let none = (Added::Nothing, 1.0);
    let form = NormForm::Layer;
    context.gpu.norm_of_scaled(form, device.ptr(), none, &norm, normed, (rows, None))?;
    context.gpu.quantize_q8(out.ptr(), place(codes + scales), rows, width)?;
    let got = context.gpu.download::<u8>(memory.ptr(), 2 * (codes + scales))?;
    Ok(Outcome::same(&got[..codes + scales], &got[codes + scales..]))
}

fn reports(context: &Context) -> Result<Outcome> {
    let (gpu, rows, width) = (&context.gpu, 9, 1024);
    let (mut x, weight) = inputs(rows, width);
    let device_weight = context.upload(&weight)?;
    let norm = Norm { weight: device_weight.ptr(), width, epsilon: EPSILON };
    let mut flags = Vec::new();
    for bad in [None, Some(f32::NAN), Some(f32::INFINITY)] {
        if let Some(bad) = bad {
            (x[7 * width + 1023], x[5 * width + 3]) = (bad, bad);
        }
        let (device, out) = (context.upload(&x)?, context.poisoned(x.len())?);
        let word = context.upload(&[u32::MAX; 2])?;
        let flag = |index| FiniteFlag { flag: word.ptr::<u32>().offset(index), first_tag: 100 };
        let normed = Normed::plain(out.ptr());
        gpu.rms_norm(device.ptr(), Added::Nothing, &norm, normed, rows, Some(flag(0)))?;
        gpu.check_finite(device.ptr(), rows, width, flag(1))?;
        flags.extend(gpu.download::<u32>(word.ptr(), 2)?);
    }
    Ok(Outcome::same(&flags, &[u32::MAX, u32::MAX, 105, 105, 105, 105]))
}

fn measure(context: &Context, tokens: usize, width: usize) -> Result<Measured> {
    let (x, weight) = inputs(tokens, width);
    let (device, device_weight) = (context.upload(&x)?, context.upload(&weight)?);
    let (add, out) = (context.upload(&vec![0.0_f32; x.len()])?, context.poisoned(x.len())?);
    let norm = Norm { weight: device_weight.ptr(), width, epsilon: EPSILON };
    let seconds = median_seconds(context, |_| {
        let (added, normed) = (Added::Rows(add.ptr()), Normed::plain(out.ptr()));
        context.gpu.rms_norm(device.ptr(), added, &norm, normed, tokens, None)
    })?;
    Ok(Measured { seconds, bytes: x.len() as f64 * 16.0, flops: 0.0 })
}
