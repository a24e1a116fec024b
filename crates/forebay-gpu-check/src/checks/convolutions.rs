//! Compares short convolutions that are added to their inputs with the CPU.

use anyhow::Result;
use forebay_compute::{ShortConvolution, StateRun};
use forebay_cuda::{DeltaRuns, DeltaStates, NO_STATE, RowConvolution};

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
const ROWS: usize = 20;
const STATES: usize = 7;

/// Runs of a pass: number of rows, and the states before and after them.
type Runs = [(usize, Option<usize>, usize)];

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
    fn on_cpu(&self, context: &Context, runs: &Runs) -> (Vec<f32>, Vec<f32>) {
        let floats = Case::floats(self.channels, self.taps);
        let run = |&(tokens, from, to): &(usize, Option<usize>, usize)| StateRun {
            tokens,
            from: from.map(|from| from * floats + BEFORE),
            to: to * floats + BEFORE,
        };
        let runs: Vec<StateRun> = runs.iter().map(run).collect();
        let (mut x, mut states) = (self.x.clone(), self.states.clone());
        let of = ShortConvolution { weights: &self.weights, channels: self.channels };
        let mut inputs = vec![0.0; x.len()];
        context.cpu.add_short_convolution(&of, &runs, &mut states, &mut inputs, &mut x);
        (x, states)
    }

    /// Returns rows `first..first + rows` and the states on the GPU. Runs outside the rows stay as they are.
    fn on_gpu(
        &self,
        context: &Context,
        runs: &Runs,
        (first, rows): (usize, usize),
        states: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let (gpu, channels) = (&context.gpu, self.channels);
        let x = context.upload(&self.x[first * channels..][..rows * channels])?;
        let inputs = context.poisoned(rows * channels)?;
        let (weights, device_states) = (context.upload(&self.weights)?, context.upload(states)?);
        let (mut words, mut row) = (Vec::new(), 0);
        for (count, from, to) in runs {
            let from = from.map_or(NO_STATE, |from| from as u32);
            words.extend([row as u32, *count as u32, from, *to as u32]);
            row += count;
        }
        let words = context.upload(&words)?;
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
        let runs = [(5, Some(0), 3), (1, None, 4), (14, Some(2), 5)];
        let (x, states) = case.on_cpu(context, &runs);
        let (got, got_states) = case.on_gpu(context, &runs, (0, ROWS), &case.states)?;
        let wanted: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let next = Outcome::of(&got, &wanted, |i| wanted[i].abs().max(1.0), 2e-6);
        outcome = outcome.worse(next.at(&format!("{channels} channels, {taps} taps")));
        outcome = outcome.worse(Outcome::same(&got_states, &states));
        let floats = Case::floats(channels, taps);
        for cut in [1, 3, 13] {
            // The first part ends in state 6, from which the second continues.
            let (before, after) = ([(5, Some(0), 3), (1, None, 4), (cut, Some(2), 6)], 6 + cut);
            let (first, states) = case.on_gpu(context, &before, (0, after), &case.states)?;
            let rest = [(after, None, 1), (ROWS - after, Some(6), 5)];
            let (second, states) = case.on_gpu(context, &rest, (after, ROWS - after), &states)?;
            outcome = outcome.worse(Outcome::same(&first, &got[..after * channels]));
            outcome = outcome.worse(Outcome::same(&second, &got[after * channels..]));
            let last = 5 * floats..6 * floats;
            outcome = outcome.worse(Outcome::same(&states[last.clone()], &got_states[last]));
        }
    }
    Ok(outcome)
}
