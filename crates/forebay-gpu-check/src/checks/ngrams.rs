//! Compares what layers add for n-grams with the CPU.

use std::ops::Range;

use anyhow::Result;
use forebay_compute::{NGramNorms, NGramShape};
use forebay_cuda::{DeltaRuns, DeltaStates, NGramRows};

use super::state_runs::{self, Found, ROWS, RUNS, Runs, STATES};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const EPSILON: f32 = 1e-6;

pub fn checks() -> Vec<Check> {
    vec![Check::new("embeddings of n-grams", streams)]
}

/// Numbers of a layer and of the rows of a pass.
struct Case {
    shape: NGramShape,
    x: Vec<f32>,
    values: Vec<f32>,
    keys: Vec<f32>,
    norms: [Vec<f32>; 3],
    weights: Vec<f32>,
    states: Vec<f32>,
}

impl Case {
    fn new(shape: NGramShape) -> Case {
        let mut random = Random::new((shape.hidden + ROWS) as u64);
        let channels = shape.channels();
        Case {
            shape,
            x: random.gaussians(ROWS * channels),
            values: random.gaussians(ROWS * shape.hidden),
            keys: random.gaussians(ROWS * channels),
            norms: [(); 3].map(|()| random.gaussians(channels)),
            weights: random.gaussians(shape.taps * channels),
            states: random.gaussians(STATES * shape.state_floats()),
        }
    }

    /// Returns the streams and the states on the CPU.
    fn on_cpu(&self, context: &Context) -> Found {
        let cpu = &context.cpu;
        let [keys, streams, convolution] = &self.norms;
        let norms = NGramNorms { keys, streams, convolution, epsilon: EPSILON };
        let (mut gated, mut inputs) = (self.keys.clone(), vec![0.0; self.keys.len()]);
        cpu.gate_ngrams(&self.shape, &norms, &self.x, &self.values, &mut gated, &mut inputs);
        let runs = state_runs::on_cpu(&RUNS, self.shape.state_floats(), 0);
        let (mut x, mut states) = (self.x.clone(), self.states.clone());
        cpu.add_ngrams(&self.shape, &self.weights, &gated, &inputs, &runs, &mut states, &mut x);
        (x, states)
    }

    /// Returns the streams of these rows and the states on the GPU. Runs outside the rows stay as they are.
    fn on_gpu(
        &self,
        context: &Context,
        runs: &Runs,
        of: Range<usize>,
        states: &[f32],
    ) -> Result<Found> {
        let (gpu, shape, first, rows) = (&context.gpu, self.shape, of.start, of.len());
        let channels = shape.channels();
        let part = |values: &[f32], width: usize| values[first * width..][..rows * width].to_vec();
        let x = context.upload(&part(&self.x, channels))?;
        let keys = context.upload(&part(&self.keys, channels))?;
        let values = context.upload(&part(&self.values, shape.hidden))?;
        let inputs = context.upload(&vec![f32::NAN; rows * channels])?;
        let [key_norm, stream_norm, convolution_norm] =
            self.norms.each_ref().map(|norm| context.upload(norm));
        let (key_norm, stream_norm, convolution_norm) =
            (key_norm?, stream_norm?, convolution_norm?);
        let (weights, device_states) = (context.upload(&self.weights)?, context.upload(states)?);
        let words = context.upload(&state_runs::words(runs))?;
        let of = NGramRows {
            streams: shape.streams,
            hidden: shape.hidden,
            taps: shape.taps,
            gap: shape.gap,
            x: x.ptr(),
            keys: keys.ptr(),
            values: values.ptr(),
            inputs: inputs.ptr(),
            key_norm: key_norm.ptr(),
            stream_norm: stream_norm.ptr(),
            convolution_norm: convolution_norm.ptr(),
            convolution: weights.ptr(),
            epsilon: EPSILON,
            states: DeltaStates {
                floats: device_states.ptr(),
                count: states.len() / shape.state_floats(),
            },
        };
        let runs = DeltaRuns { words: words.ptr(), count: runs.len(), first_row: first, rows };
        gpu.add_ngrams(&of, &runs)?;
        let x = gpu.download::<f32>(x.ptr(), rows * channels)?;
        Ok((x, gpu.download::<f32>(device_states.ptr(), states.len())?))
    }
}

/// Checks streams and states of several runs. A run that is cut in two must give the bits of the whole.
fn streams(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (streams, hidden, taps, gap) in [(1, 8, 2, 1), (4, 64, 4, 3), (2, 1032, 3, 2)] {
        let shape = NGramShape { streams, hidden, taps, gap };
        let case = Case::new(shape);
        let (x, states) = case.on_cpu(context);
        let got = case.on_gpu(context, &RUNS, 0..ROWS, &case.states)?;
        for (got, wanted) in [(&got.0, &x), (&got.1, &states)] {
            let wanted: Vec<f64> = wanted.iter().map(|x| f64::from(*x)).collect();
            let next = Outcome::of(got, &wanted, |i| wanted[i].abs().max(1.0), 2e-5);
            outcome = outcome.worse(next.at(&format!("{streams} streams of {hidden}")));
        }
        let sizes = (shape.channels(), shape.state_floats());
        let run = |runs: &Runs, of, states: &[f32]| case.on_gpu(context, runs, of, states);
        outcome = outcome.worse(state_runs::cuts(sizes, &case.states, &got, run)?);
    }
    Ok(outcome)
}
