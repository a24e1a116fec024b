//! Compares biases, soft caps and copies of words with the CPU.

use anyhow::Result;

use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("elementwise biases", biases),
        Check::new("elementwise factors", factors),
        Check::new("elementwise soft caps", softcaps),
        Check::new("elementwise words", words),
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
        gpu.multiply_columns(device.ptr(), device_bias.ptr(), rows, width)?;
        context.cpu.multiply_columns(&mut x, &bias);
        outcome = outcome.worse(Outcome::same(&gpu.download(device.ptr(), x.len())?, &x));
    }
    Ok(outcome)
}

fn factors(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for count in [1, 255, 256, 70_001] {
        let mut x = Random::new(count as u64).gaussians(count);
        let device = context.upload(&x)?;
        context.gpu.scale(device.ptr(), count - 1, 0.707)?;
        let last = x[count - 1];
        context.cpu.scale_in_place(&mut x, 0.707);
        // What lies behind stays as it is.
        x[count - 1] = last;
        outcome = outcome.worse(Outcome::same(&context.gpu.download(device.ptr(), count)?, &x));
        context.gpu.clamp(device.ptr(), count - 1, 0.5)?;
        context.cpu.clamp_in_place(&mut x[..count - 1], 0.5);
        outcome = outcome.worse(Outcome::same(&context.gpu.download(device.ptr(), count)?, &x));
        let y = Random::new(7).gaussians(count);
        let added = context.upload(&y)?;
        context.gpu.add_scaled(device.ptr(), added.ptr(), count, 0.707)?;
        x.iter_mut().zip(&y).for_each(|(x, y)| *x += 0.707 * y);
        outcome = outcome.worse(Outcome::same(&context.gpu.download(device.ptr(), count)?, &x));
        context.gpu.copy_scaled(device.ptr(), added.ptr(), count, 1.7)?;
        let x: Vec<f32> = y.iter().map(|y| 1.7 * y).collect();
        outcome = outcome.worse(Outcome::same(&context.gpu.download(device.ptr(), count)?, &x));
    }
    Ok(outcome)
}

fn softcaps(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width, cap) in [(1, 1, 30.0), (3, 333, 50.0), (2, 40_001, 30.0)] {
        let mut random = Random::new(width as u64);
        let mut x: Vec<f32> =
            random.gaussians(rows * width).iter().map(|x| x * x * x * 20.0).collect();
        x[0] = 1e-20;
        x[rows * width - 1] = -1e30;
        let device = context.upload(&x)?;
        gpu.softcap(device.ptr(), rows, width, cap)?;
        let got = gpu.download(device.ptr(), x.len())?;
        let tanh = |x: &f32| f64::from(cap) * (f64::from(*x) / f64::from(cap)).tanh();
        let exact: Vec<f64> = x.iter().map(tanh).collect();
        context.cpu.softcap_in_place(&mut x, cap);
        let cpu: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let norm = |i: usize| exact[i].abs();
        outcome = outcome.worse(Outcome::of(&got, &exact, norm, 1e-6));
        outcome = outcome.worse(Outcome::of(&got, &cpu, norm, 3e-6));
    }
    Ok(outcome)
}

/// Copies ranges of words that the host rewrites each time. Words beside them must not change.
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
