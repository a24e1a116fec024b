//! Biases and the gated activation against the CPU.

use anyhow::Result;

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("elementwise biases", biases),
        Check::new("elementwise silu", silu),
        Check::new("elementwise words", words),
    ]
}

pub fn benches() -> Vec<Bench> {
    vec![
        Bench::new("elementwise silu 1x12288", |context| bench_silu(context, 12_288)),
        Bench::new("elementwise silu 512x12288", |context| bench_silu(context, 512 * 12_288)),
    ]
}

fn biases(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width) in [(1, 1), (3, 333), (513, 64), (70_000, 5)] {
        let mut random = Random::new(width as u64);
        let mut x = random.gaussians(rows * width);
        let bias = random.gaussians(width);
        let (device, device_bias) = (context.upload(&x)?, context.upload(&bias)?);
        gpu.add_bias_rows(device.ptr(), device_bias.ptr(), rows, width)?;
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

/// Ranges of words that the host writes anew each time; what is beside them stays.
fn words(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let all: Vec<f32> = Random::new(1).gaussians(3000);
    let mut host = gpu.host_words(all.len())?;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for range in [0..1, 5..6, 1..258, 0..3000, 2743..3000] {
        let device = context.upload(&vec![1.0_f32; all.len()])?;
        host.write(0, &all);
        gpu.read_words(&host, range.clone(), device.ptr())?;
        let mut expected = all[range.clone()].to_vec();
        expected.resize(all.len(), 1.0);
        outcome = outcome.worse(Outcome::same(&gpu.download(device.ptr(), all.len())?, &expected));
        host.write(0, &vec![0.0_f32; all.len()]);
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
