//! Activations rounded to 8 bits.

use anyhow::Result;
use forebay_cuda::RoundedActivations;

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    vec![Check::new("quantize q8", q8)]
}

pub fn benches() -> Vec<Bench> {
    vec![Bench::new("quantize q8 1x4096", |context| bench_q8(context, 1, 4096))]
}

/// Codes and scale of 32 activations, and the scale times the sum of the codes.
fn expected(x: &[f32]) -> (Vec<i8>, [f32; 2]) {
    let largest = x.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
    let inverse = if largest > 1e-36 { 127.0 / largest } else { 0.0 };
    let codes: Vec<i8> = x.iter().map(|x| (x * inverse).round_ties_even() as i8).collect();
    let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
    let scale = largest / 127.0;
    (codes, [scale, scale * sum as f32])
}

fn q8(context: &Context) -> Result<Outcome> {
    let (tokens, cols, gpu) = (3, 1056, &context.gpu);
    let mut x = Random::new(1).gaussians(tokens * cols);
    x[64..96].fill(0.0);
    x[128] = 1e30;
    let device = context.upload(&x)?;
    let (codes, scales) =
        (context.poisoned(tokens * cols / 4)?, context.poisoned(tokens * cols / 16)?);
    let out = RoundedActivations { codes: codes.ptr(), scales: scales.ptr() };
    gpu.quantize_q8(device.ptr(), out, tokens, cols)?;
    let (expected_codes, expected_scales): (Vec<_>, Vec<_>) = x.chunks(32).map(expected).unzip();
    let got = gpu.download(out.codes, tokens * cols)?;
    let scales = gpu.download(out.scales, tokens * cols / 32)?;
    Ok(Outcome::same(&got, &expected_codes.concat())
        .worse(Outcome::same(&scales, &expected_scales)))
}

fn bench_q8(context: &Context, tokens: usize, cols: usize) -> Result<Measured> {
    let x = context.upload(&Random::new(1).gaussians(tokens * cols))?;
    let (codes, scales) =
        (context.poisoned(tokens * cols / 4)?, context.poisoned(tokens * cols / 16)?);
    let out = RoundedActivations { codes: codes.ptr(), scales: scales.ptr() };
    let seconds = median_seconds(context, |_| context.gpu.quantize_q8(x.ptr(), out, tokens, cols))?;
    Ok(Measured { seconds, bytes: (tokens * cols) as f64 * 5.25, flops: 0.0 })
}
