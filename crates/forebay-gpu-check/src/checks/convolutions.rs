//! Compares short convolutions that are added to their inputs with the CPU.

use std::ops::Range;

use anyhow::Result;
use forebay_compute::ShortConvolution;
use forebay_cuda::{DeltaRuns, DeltaStates, RowConvolution};

use super::state_runs::{self, Found, ROWS, RUNS, Runs, STATES};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    vec![Check::new("short convolutions added", added)]
}

/// Numbers of a convolution and of the rows of a pass. States have room for other convolutions before and after its inputs.
struct Case {
    channels: usize,
    taps: usize,
    x: Vec<f32>,
    weights: Vec<f32>,
    states: Vec<f32>,
}

const BEFORE: usize = 12;
const AFTER: usize = 5;

impl Case {
    fn new(channels: usize, taps: usize) -> Case {
        let mut random = Random::new((channels + taps) as u64);
        let floats = Case::floats(channels, taps);
        Case {
            channels,
            taps,
            x: random.gaussians(ROWS * channels),
            weights: random.gaussians(taps * channels),
            states: random.gaussians(STATES * floats),
        }
    }

    fn floats(channels: usize, taps: usize) -> usize {
        BEFORE + (taps - 1) * channels + AFTER
    }

    /// Returns the rows and the states on the CPU.
    fn on_cpu(&self, context: &Context) -> Found {
        let runs = state_runs::on_cpu(&RUNS, Case::floats(self.channels, self.taps), BEFORE);
        let (mut x, mut states) = (self.x.clone(), self.states.clone());
        let of = ShortConvolution { weights: &self.weights, channels: self.channels };
        let mut inputs = vec![0.0; x.len()];
        context.cpu.add_short_convolution(&of, &runs, &mut states, &mut inputs, &mut x);
        (x, states)
    }

    /// Returns these rows and the states on the GPU. Runs outside the rows stay as they are.
    fn on_gpu(
        &self,
        context: &Context,
        runs: &Runs,
        of: Range<usize>,
        states: &[f32],
    ) -> Result<Found> {
        let (gpu, channels, first, rows) = (&context.gpu, self.channels, of.start, of.len());
        let x = context.upload(&self.x[first * channels..][..rows * channels])?;
        let inputs = context.poisoned(rows * channels)?;
        let (weights, device_states) = (context.upload(&self.weights)?, context.upload(states)?);
        let words = context.upload(&state_runs::words(runs))?;
        let state_floats = Case::floats(channels, self.taps);
        let of = RowConvolution {
            x: x.ptr(),
            inputs: inputs.ptr(),
            weights: weights.ptr(),
            channels,
            taps: self.taps,
            states: DeltaStates { floats: device_states.ptr(), count: states.len() / state_floats },
            state_floats,
            first_float: BEFORE,
        };
        let runs = DeltaRuns { words: words.ptr(), count: runs.len(), first_row: first, rows };
        gpu.add_convolution(&of, &runs)?;
        let x = gpu.download::<f32>(x.ptr(), rows * channels)?;
        Ok((x, gpu.download::<f32>(device_states.ptr(), states.len())?))
    }
}

/// Checks rows and states of several runs. A run that is cut in two must give the bits of the whole.
fn added(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (channels, taps) in [(8, 2), (64, 4), (1032, 4), (37, 8)] {
        let case = Case::new(channels, taps);
        let (x, states) = case.on_cpu(context);
        let got = case.on_gpu(context, &RUNS, 0..ROWS, &case.states)?;
        let wanted: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let next = Outcome::of(&got.0, &wanted, |i| wanted[i].abs().max(1.0), 2e-6);
        outcome = outcome.worse(next.at(&format!("{channels} channels, {taps} taps")));
        outcome = outcome.worse(Outcome::same(&got.1, &states));
        let sizes = (channels, Case::floats(channels, taps));
        let run = |runs: &Runs, of, states: &[f32]| case.on_gpu(context, runs, of, states);
        outcome = outcome.worse(state_runs::cuts(sizes, &case.states, &got, run)?);
    }
    Ok(outcome)
}
