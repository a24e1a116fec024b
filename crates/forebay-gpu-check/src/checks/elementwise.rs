//! Additions, the gated activation and the sum of the experts' outputs against the CPU.

use anyhow::Result;
use forebay_cuda::ExpertOutputs;

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("elementwise additions", additions),
        Check::new("elementwise silu", silu),
        Check::new("elementwise experts combined", combine),
    ]
}

pub fn benches() -> Vec<Bench> {
    vec![
        Bench::new("elementwise silu 1x12288", |context| bench_silu(context, 12_288)),
        Bench::new("elementwise silu 512x12288", |context| bench_silu(context, 512 * 12_288)),
        Bench::new("elementwise combine 1x8x2048", |context| bench_combine(context, 1, 8, 2048)),
        Bench::new("elementwise combine 512x8x2048", |context| {
            bench_combine(context, 512, 8, 2048)
        }),
    ]
}

fn additions(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width) in [(1, 1), (3, 333), (513, 64), (70_000, 5)] {
        let mut random = Random::new(width as u64);
        let mut x = random.gaussians(rows * width);
        let (y, bias) = (random.gaussians(x.len()), random.gaussians(width));
        let device = context.upload(&x)?;
        let (device_y, device_bias) = (context.upload(&y)?, context.upload(&bias)?);
        gpu.add_assign(device.ptr(), device_y.ptr(), x.len())?;
        gpu.add_bias_rows(device.ptr(), device_bias.ptr(), rows, width)?;
        context.cpu.add_assign(&mut x, &y);
        context.cpu.add_bias_rows(&mut x, &bias);
        outcome = outcome.worse(Outcome::same(&gpu.download(device.ptr(), x.len())?, &x));
    }
    Ok(outcome)
}

fn silu(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for count in [1, 3, 4, 1023, 40_001] {
        let mut random = Random::new(count as u64);
        let mut gate: Vec<f32> = random.gaussians(count).iter().map(|x| x * 10.0).collect();
        gate[0] = -200.0;
        gate[count - 1] = 150.0;
        let up = random.gaussians(count);
        let exact = |(gate, up): (&f32, &f32)| {
            let gate = f64::from(*gate);
            gate / (1.0 + (-gate).exp()) * f64::from(*up)
        };
        let exact: Vec<f64> = gate.iter().zip(&up).map(exact).collect();
        let (device, device_up) = (context.upload(&gate)?, context.upload(&up)?);
        let out = context.poisoned(count)?;
        gpu.silu_mul(device.ptr(), device_up.ptr(), out.ptr(), count)?;
        let got = gpu.download(out.ptr(), count)?;
        gpu.silu_mul(device.ptr(), device_up.ptr(), device.ptr(), count)?;
        let in_place = gpu.download(device.ptr(), count)?;
        // Far below zero the result is smaller than any f32.
        let norm = |i: usize| exact[i].abs().max(1e-30);
        outcome = outcome.worse(Outcome::of(&got, &exact, norm, 1e-6));
        outcome = outcome.worse(Outcome::same(&in_place, &got));
    }
    Ok(outcome)
}

/// Inputs of `combine_experts`: parts, weights, and rows in an order of their own.
fn expert_outputs(tokens: usize, k: usize, width: usize) -> (Vec<f32>, Vec<f32>, Vec<u32>) {
    let pairs = tokens * k;
    let mut random = Random::new(width as u64);
    // A step without a common divisor visits every row.
    let step = (1..).map(|i| pairs / 2 + i).find(|&step| gcd(step, pairs) == 1).unwrap_or(1);
    let rows = (0..pairs).map(|pair| (pair * step % pairs) as u32).collect();
    (random.gaussians(pairs * width), random.gaussians(pairs), rows)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn combine(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (tokens, k, width) in [(1, 1, 1), (1, 8, 2048), (7, 4, 300), (300, 8, 129)] {
        let (parts, weights, rows) = expert_outputs(tokens, k, width);
        let start = Random::new(5).gaussians(tokens * width);
        let (device_parts, device_weights) = (context.upload(&parts)?, context.upload(&weights)?);
        let device_rows = context.upload(&rows)?;
        let outputs = ExpertOutputs {
            parts: device_parts.ptr(),
            weights: device_weights.ptr(),
            row_of_pair: device_rows.ptr(),
            width,
            k,
        };
        for accumulate in [false, true] {
            let mut expected = if accumulate { start.clone() } else { vec![0.0; start.len()] };
            context.cpu.combine_experts(&mut expected, width, k, &weights, &parts, &rows);
            let out =
                if accumulate { context.upload(&start)? } else { context.poisoned(start.len())? };
            gpu.combine_experts(out.ptr(), &outputs, tokens, accumulate)?;
            let got = gpu.download(out.ptr(), start.len())?;
            outcome = outcome.worse(Outcome::same(&got, &expected));
        }
    }
    Ok(outcome)
}

fn bench_silu(context: &Context, count: usize) -> Result<Measured> {
    let gate = context.upload(&Random::new(1).gaussians(count))?;
    let (up, out) = (context.upload(&Random::new(2).gaussians(count))?, context.poisoned(count)?);
    let seconds =
        median_seconds(context, |_| context.gpu.silu_mul(gate.ptr(), up.ptr(), out.ptr(), count))?;
    Ok(Measured { seconds, bytes: count as f64 * 12.0, flops: 0.0 })
}

fn bench_combine(context: &Context, tokens: usize, k: usize, width: usize) -> Result<Measured> {
    let (parts, weights, rows) = expert_outputs(tokens, k, width);
    let (parts, weights) = (context.upload(&parts)?, context.upload(&weights)?);
    let (rows, out) = (context.upload(&rows)?, context.poisoned(tokens * width)?);
    let outputs = ExpertOutputs {
        parts: parts.ptr(),
        weights: weights.ptr(),
        row_of_pair: rows.ptr(),
        width,
        k,
    };
    let seconds = median_seconds(context, |_| {
        context.gpu.combine_experts(out.ptr(), &outputs, tokens, false)
    })?;
    Ok(Measured { seconds, bytes: (tokens * width * (k + 1) * 4) as f64, flops: 0.0 })
}
