//! Compares streams of which layers compute one, and sparse activations, with the CPU.

use anyhow::Result;
use forebay_compute::StreamShape;
use forebay_cuda::{DevicePtr, FiniteFlag, STREAMS, StreamPrediction, StreamRows};

use super::streams::{SHAPES, compare, first_is_reported};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const EPSILON: f32 = 1e-6;

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("streams: predicted and corrected", predicted),
        Check::new("streams: predicted values that are not finite", not_finite),
        Check::new("sparse activations", cut),
    ]
}

/// The numbers of a check.
struct Numbers {
    x: Vec<f32>,
    activated: Vec<f32>,
    router: Vec<f32>,
    predicts: Vec<f32>,
    corrects: Vec<f32>,
    scale: Vec<f32>,
    active: usize,
}

impl Numbers {
    fn new(rows: usize, width: usize) -> Numbers {
        let mut random = Random::new((rows + width) as u64);
        let root = (width as f32).sqrt();
        Numbers {
            x: random.gaussians(rows * STREAMS * width),
            activated: random.gaussians(rows * width),
            router: random.gaussians(STREAMS * width).iter().map(|x| x / root).collect(),
            predicts: random.gaussians(STREAMS * STREAMS * STREAMS),
            corrects: random.gaussians(STREAMS * STREAMS),
            scale: random.gaussians(width),
            active: width % STREAMS,
        }
    }

    fn on_cpu<'a>(&'a self, coefficients: &'a [f32]) -> forebay_compute::StreamPrediction<'a> {
        let (active, router) = (self.active, &self.router);
        forebay_compute::StreamPrediction { active, router, coefficients, epsilon: EPSILON }
    }

    /// Predicts, corrects, adds and matches the streams of `rows` rows from row `first` on. Returns what each step wrote.
    fn on_gpu(
        &self,
        context: &Context,
        (first, rows, width): (usize, usize, usize),
    ) -> Result<[Vec<f32>; 6]> {
        let gpu = &context.gpu;
        let of_rows =
            |values: &[f32], row: usize| context.upload(&values[first * row..(first + rows) * row]);
        let x = of_rows(&self.x, STREAMS * width)?;
        let activated = of_rows(&self.activated, width)?;
        let [router, predicts, corrects, scale] =
            [&self.router, &self.predicts, &self.corrects, &self.scale]
                .map(|values| context.upload(values));
        let (router, predicts, corrects, scale) = (router?, predicts?, corrects?, scale?);
        let of = |coefficients: DevicePtr<f32>| StreamPrediction {
            active: self.active,
            router: router.ptr(),
            coefficients,
            epsilon: EPSILON,
        };
        let out = context.poisoned(rows * width)?;
        let device = StreamRows { x: x.ptr(), rows, width };
        let all = || gpu.download::<f32>(device.x, rows * STREAMS * width);
        let one = || gpu.download::<f32>(out.ptr(), rows * width);
        gpu.predict_streams(&device, &of(predicts.ptr()), out.ptr())?;
        let (predicted, active) = (all()?, one()?);
        let to = (scale.ptr(), out.ptr());
        gpu.correct_streams(&device, activated.ptr(), &of(corrects.ptr()), to)?;
        let (corrected, scaled) = (all()?, one()?);
        let flag = context.upload(&[u32::MAX])?;
        let flag = FiniteFlag { flag: flag.ptr(), first_tag: 0 };
        gpu.add_to_other_streams(&device, activated.ptr(), flag)?;
        let sum = all()?;
        gpu.match_streams(&device)?;
        // The rows of a stream go to another one of the same rows.
        gpu.take_stream(&device, 1, out.ptr())?;
        gpu.put_stream(out.ptr(), &device, 3)?;
        Ok([predicted, active, corrected, scaled, sum, all()?])
    }
}

/// Checks every step. A row must have the bits that it has alone.
fn predicted(context: &Context) -> Result<Outcome> {
    let cpu = &context.cpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width) in SHAPES {
        let shape = StreamShape { count: STREAMS, width };
        let numbers = Numbers::new(rows, width);
        let found = numbers.on_gpu(context, (0, rows, width))?;
        let mut x = numbers.x.clone();
        let mut out = vec![0.0; rows * width];
        let mut expected = Vec::new();
        cpu.predict_streams(&mut x, shape, &numbers.on_cpu(&numbers.predicts));
        cpu.take_stream(&x, shape, numbers.active, None, &mut out);
        expected.extend([x.clone(), out.clone()]);
        let of = numbers.on_cpu(&numbers.corrects);
        cpu.correct_streams(&mut x, shape, &numbers.activated, &of);
        cpu.take_stream(&x, shape, numbers.active, Some(&numbers.scale), &mut out);
        expected.extend([x.clone(), out.clone()]);
        cpu.add_to_other_streams(&mut x, shape, &numbers.activated);
        expected.push(x.clone());
        cpu.match_streams(&mut x, shape);
        for row in x.chunks_exact_mut(shape.row()) {
            row.copy_within(width..2 * width, 3 * width);
        }
        expected.push(x);
        let alone = numbers.on_gpu(context, (rows - 1, 1, width))?;
        for (step, found) in found.iter().enumerate() {
            // Predicted numbers are sums of larger ones, with factors that come from sums of up to 7,168 numbers. Corrections and
            // matching multiply the differences.
            let limit = if step < 2 { 5e-5 } else { 2e-4 };
            let next = compare(found, &expected[step], limit);
            outcome = outcome.worse(next.at(&format!("step {step}, {rows}x{width}")));
            let last = &found[found.len() - alone[step].len()..];
            outcome = outcome.worse(Outcome::same(&alone[step], last));
        }
    }
    Ok(outcome)
}

fn not_finite(context: &Context) -> Result<Outcome> {
    first_is_reported(context, |device, added, report| {
        Ok(context.gpu.add_to_other_streams(device, added, report)?)
    })
}

fn cut(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width, deviations) in [(1, 5, 0.5), (3, 96, 1.644_853_6), (40, 1027, -0.3)] {
        let x = Random::new(width as u64).gaussians(rows * width);
        let mut expected = x.clone();
        context.cpu.cut_rows(&mut expected, width, deviations);
        let device = context.upload(&x)?;
        context.gpu.cut_rows(device.ptr(), rows, width, deviations)?;
        let found = context.gpu.download::<f32>(device.ptr(), x.len())?;
        let next = compare(&found, &expected, 2e-6);
        outcome = outcome.worse(next.at(&format!("{rows}x{width}, {deviations}")));
    }
    // A value that is no number must not disappear.
    let device = context.upload(&[1.0, f32::NAN, 2.0, 3.0])?;
    context.gpu.cut_rows(device.ptr(), 1, 4, 0.5)?;
    let found = context.gpu.download::<f32>(device.ptr(), 4)?;
    Ok(outcome.worse(Outcome::same(&[found[1].is_nan()], &[true])))
}
