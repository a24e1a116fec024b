//! Compares factors of rows with the CPU.

use anyhow::Result;
use forebay_compute::{Growth, Temperature};
use forebay_cuda::RowTemperature;

use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    vec![Check::new("row factors taken", taken), Check::new("row factors by position", by_position)]
}

const SHAPES: [(usize, usize); 4] = [(1, 1), (3, 37), (9, 2048), (600, 130)];

fn taken(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width) in SHAPES {
        let mut random = Random::new(width as u64);
        let (mut x, factors) = (random.gaussians(rows * width), random.gaussians(rows));
        let (device_x, device_factors) = (context.upload(&x)?, context.upload(&factors)?);
        let out = context.poisoned(x.len())?;
        context.gpu.take_factors(device_x.ptr(), device_factors.ptr(), out.ptr(), rows, width)?;
        let left = context.gpu.download::<f32>(device_factors.ptr(), rows)?;
        let got = context.gpu.download::<f32>(out.ptr(), x.len())?;
        context.cpu.multiply_rows(&mut x, &factors);
        outcome = outcome.worse(Outcome::same(&got, &x));
        outcome = outcome.worse(Outcome::same(&left, &vec![1.0; rows]).at("factors"));
    }
    Ok(outcome)
}

fn by_position(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let steps = SHAPES.into_iter().zip([16.0, 8192.0, 3.0, 100.0]);
    let both = [Growth::WholeSteps, Growth::Ratio];
    for (((rows, width), step), growth) in steps.flat_map(|of| both.map(|growth| (of, growth))) {
        let mut random = Random::new(rows as u64);
        let x = random.gaussians(rows * width);
        let positions: Vec<u32> = (0..rows).map(|_| random.next() % 1_000_000).collect();
        let (device, places) = (context.upload(&x)?, context.upload(&positions)?);
        let first = u32::from(rows % 2 == 0);
        let by_ratio = growth == Growth::Ratio;
        let of = RowTemperature { rate: 0.1, step, first, by_ratio };
        context.gpu.temper_rows(device.ptr(), places.ptr(), of, rows, width)?;
        let got = context.gpu.download::<f32>(device.ptr(), x.len())?;
        let temperature = Temperature { rate: 0.1, step, first, growth };
        let factors: Vec<f32> = positions.iter().map(|&at| temperature.factor(at)).collect();
        let mut cpu = x;
        context.cpu.multiply_rows(&mut cpu, &factors);
        let expected: Vec<f64> = cpu.into_iter().map(f64::from).collect();
        outcome =
            outcome.worse(Outcome::of(&got, &expected, |i| expected[i].abs().max(1e-6), 1e-6));
    }
    Ok(outcome)
}
