//! Norms against the CPU and f64 arithmetic.

use anyhow::Result;
use forebay_cuda::{FiniteFlag, Norm};

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const EPSILON: f32 = 1e-5;
const TOLERANCE: f64 = 2e-6;

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("norm rows", |context| over_shapes(context, rows)),
        Check::new("norm rows in place", |context| over_shapes(context, rows_in_place)),
        Check::new("norm after addition", |context| over_shapes(context, after_addition)),
        Check::new("norm heads", |context| over_shapes(context, heads)),
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

/// Rows and weight.
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

/// Relative to each number, and close to the CPU, too.
fn compare(context: &Context, got: &[f32], x: &[f32], weight: &[f32]) -> Outcome {
    let exact = expected(x, weight);
    let mut cpu = vec![f32::NAN; x.len()];
    context.cpu.rms_norm(x, weight, EPSILON, &mut cpu);
    let cpu: Vec<f64> = cpu.into_iter().map(f64::from).collect();
    let norm = |i: usize| exact[i].abs();
    Outcome::of(got, &exact, norm, TOLERANCE).worse(Outcome::of(got, &cpu, norm, TOLERANCE))
}

fn rows(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, weight) = inputs(rows, width);
    let (device, device_weight) = (context.upload(&x)?, context.upload(&weight)?);
    let out = context.poisoned(x.len())?;
    let norm = Norm { weight: device_weight.ptr(), width, epsilon: EPSILON };
    context.gpu.rms_norm(device.ptr(), &norm, out.ptr(), rows, None)?;
    let got = context.gpu.download(out.ptr(), x.len())?;
    Ok(compare(context, &got, &x, &weight))
}

fn rows_in_place(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, weight) = inputs(rows, width);
    let (device, device_weight) = (context.upload(&x)?, context.upload(&weight)?);
    let norm = Norm { weight: device_weight.ptr(), width, epsilon: EPSILON };
    context.gpu.rms_norm(device.ptr(), &norm, device.ptr(), rows, None)?;
    let got = context.gpu.download(device.ptr(), x.len())?;
    Ok(compare(context, &got, &x, &weight))
}

fn after_addition(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, weight) = inputs(rows, width);
    let add = Random::new(77).gaussians(x.len());
    let (device, device_weight) = (context.upload(&x)?, context.upload(&weight)?);
    let (device_add, out) = (context.upload(&add)?, context.poisoned(x.len())?);
    let norm = Norm { weight: device_weight.ptr(), width, epsilon: EPSILON };
    let (x_ptr, add_ptr) = (device.ptr(), device_add.ptr());
    context.gpu.add_rms_norm(x_ptr, add_ptr, &norm, out.ptr(), rows, None)?;
    let sums: Vec<f32> = x.iter().zip(&add).map(|(x, add)| x + add).collect();
    let got = context.gpu.download(out.ptr(), x.len())?;
    let got_sums = context.gpu.download(x_ptr, x.len())?;
    Ok(compare(context, &got, &sums, &weight).worse(Outcome::same(&got_sums, &sums)))
}

fn heads(context: &Context, rows: usize, width: usize) -> Result<Outcome> {
    let (x, weight) = inputs(rows, width);
    let (device, device_weight) = (context.upload(&x)?, context.upload(&weight)?);
    let norm = Norm { weight: device_weight.ptr(), width, epsilon: EPSILON };
    context.gpu.rms_norm_heads(device.ptr(), &norm, rows)?;
    let got = context.gpu.download(device.ptr(), x.len())?;
    Ok(compare(context, &got, &x, &weight))
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
        gpu.rms_norm(device.ptr(), &norm, out.ptr(), rows, Some(flag(0)))?;
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
        context.gpu.add_rms_norm(device.ptr(), add.ptr(), &norm, out.ptr(), tokens, None)
    })?;
    Ok(Measured { seconds, bytes: x.len() as f64 * 16.0, flops: 0.0 })
}
