//! Compares what layers add for n-grams with the CPU.

use anyhow::Result;
use forebay_compute::{NGramNorms, NGramShape, StateRun};
use forebay_cuda::{DeltaRuns, DeltaStates, NGramRows, NO_STATE};

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

/// Runs of a pass: number of rows, and the states before and after them.
type Runs = [(usize, Option<usize>, usize)];

impl Case {
    fn new(shape: NGramShape, rows: usize, states: usize) -> Case {
        let mut random = Random::new((shape.hidden + rows) as u64);
        let channels = shape.channels();
        Case {
            shape,
            x: random.gaussians(rows * channels),
            values: random.gaussians(rows * shape.hidden),
            keys: random.gaussians(rows * channels),
            norms: [(); 3].map(|()| random.gaussians(channels)),
            weights: random.gaussians(shape.taps * channels),
            states: random.gaussians(states * shape.state_floats()),
        }
    }

    /// Returns the streams and the states on the CPU.
    fn on_cpu(&self, context: &Context, runs: &Runs) -> (Vec<f32>, Vec<f32>) {
        let (cpu, floats) = (&context.cpu, self.shape.state_floats());
        let [keys, streams, convolution] = &self.norms;
        let norms = NGramNorms { keys, streams, convolution, epsilon: EPSILON };
        let (mut gated, mut inputs) = (self.keys.clone(), vec![0.0; self.keys.len()]);
        cpu.gate_ngrams(&self.shape, &norms, &self.x, &self.values, &mut gated, &mut inputs);
        let run = |&(tokens, from, to): &(usize, Option<usize>, usize)| StateRun {
            tokens,
            from: from.map(|from| from * floats),
            to: to * floats,
        };
        let runs: Vec<StateRun> = runs.iter().map(run).collect();
        let (mut x, mut states) = (self.x.clone(), self.states.clone());
        cpu.add_ngrams(&self.shape, &self.weights, &gated, &inputs, &runs, &mut states, &mut x);
        (x, states)
    }

    /// Returns the streams of rows `first..first + rows` and the states on the GPU. Runs outside the rows stay as they are.
    fn on_gpu(
        &self,
        context: &Context,
        runs: &Runs,
        first: usize,
        rows: usize,
        states: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let (gpu, shape) = (&context.gpu, self.shape);
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
        let mut words = Vec::new();
        let mut row = 0;
        for (count, from, to) in runs {
            let from = from.map_or(NO_STATE, |from| from as u32);
            words.extend([row as u32, *count as u32, from, *to as u32]);
            row += count;
        }
        let words = context.upload(&words)?;
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
        let runs = [(5, Some(0), 3), (1, None, 4), (14, Some(2), 5)];
        let case = Case::new(shape, 20, 7);
        let (x, states) = case.on_cpu(context, &runs);
        let (got, got_states) = case.on_gpu(context, &runs, 0, 20, &case.states)?;
        for (got, wanted) in [(&got, &x), (&got_states, &states)] {
            let wanted: Vec<f64> = wanted.iter().map(|x| f64::from(*x)).collect();
            let next = Outcome::of(got, &wanted, |i| wanted[i].abs().max(1.0), 2e-5);
            outcome = outcome.worse(next.at(&format!("{streams} streams of {hidden}")));
        }
        let (channels, floats) = (shape.channels(), shape.state_floats());
        for cut in [1, 3, 13] {
            // The first part ends in state 6, from which the second goes on.
            let (before, after) = ([(5, Some(0), 3), (1, None, 4), (cut, Some(2), 6)], 6 + cut);
            let (first, states) = case.on_gpu(context, &before, 0, after, &case.states)?;
            let rest = [(after, None, 1), (20 - after, Some(6), 5)];
            let (second, states) = case.on_gpu(context, &rest, after, 20 - after, &states)?;
            outcome = outcome.worse(Outcome::same(&first, &got[..after * channels]));
            outcome = outcome.worse(Outcome::same(&second, &got[after * channels..]));
            let last = 5 * floats..6 * floats;
            outcome = outcome.worse(Outcome::same(&states[last.clone()], &got_states[last]));
        }
    }
    Ok(outcome)
}
