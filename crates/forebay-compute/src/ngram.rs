//! Embeddings of n-grams that a layer adds to the residual streams (Qwen4-Exp): keys and values are products of a token's
//! embedding, each stream gates the value by its agreement with a key of its own, and a causal convolution with gaps mixes the
//! last tokens.
//!
//! The convolution of a token reads the normed gated values of tokens before it in one fixed order. Its bits therefore do not depend
//! on where the sequence is cut into calls.

use crate::cpu::Cpu;
use crate::ops::{logistic, norm_row, share, times_logistic};
use crate::recurrent::{StateRun, check_places};
use crate::simd::{Kernel, LANES, Simd, dispatch};
use crate::streams::StreamShape;

/// Shape of the addition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NGramShape {
    /// Number of residual streams.
    pub streams: usize,
    /// Number of elements of a stream, a multiple of 8.
    pub hidden: usize,
    /// Number of tokens that the convolution sees: the current one, and others each `gap` tokens before the next.
    pub taps: usize,
    pub gap: usize,
}

impl NGramShape {
    fn check(&self) {
        let NGramShape { streams, hidden, taps, gap } = *self;
        let whole = hidden > 0 && hidden.is_multiple_of(LANES) && streams > 0;
        assert!(whole && (2..=TAPS_MAX).contains(&taps) && gap > 0, "n-grams: {self:?}");
    }

    /// Returns the number of channels of the convolution: the elements of all streams.
    pub fn channels(&self) -> usize {
        self.streams * self.hidden
    }

    /// Returns the number of tokens before the current one whose inputs of the convolution are kept.
    pub fn kept(&self) -> usize {
        (self.taps - 1) * self.gap
    }

    /// Returns the number of floats of a state: the last inputs of the convolution `[kept, channels]`, oldest first.
    pub fn state_floats(&self) -> usize {
        self.kept() * self.channels()
    }
}

/// Weights of norms, each `[streams, hidden]`.
#[derive(Debug, Clone, Copy)]
pub struct NGramNorms<'a> {
    pub keys: &'a [f32],
    pub streams: &'a [f32],
    pub convolution: &'a [f32],
    pub epsilon: f32,
}

/// Smallest magnitude of the product of key and stream.
const AGREEMENT_MIN: f32 = 1e-6;

impl Cpu {
    /// Turns keys `[rows, streams, hidden]` into gated values: for each stream, `value` `[rows, hidden]` times the logistic function of
    /// the signed root of the product of the normed key and the normed stream `x` `[rows, streams, hidden]`, divided by the root of
    /// `hidden`. Writes what the convolution reads to `inputs`: the normed gated values.
    ///
    /// # Panics
    /// Panics if the lengths do not fit each other.
    pub fn gate_ngrams(
        &self,
        shape: &NGramShape,
        norms: &NGramNorms<'_>,
        x: &[f32],
        values: &[f32],
        keys: &mut [f32],
        inputs: &mut [f32],
    ) {
        shape.check();
        let (channels, hidden) = (shape.channels(), shape.hidden);
        let rows = values.len() / hidden;
        let lengths = [x.len(), keys.len(), inputs.len()];
        assert!(lengths.iter().all(|len| *len == rows * channels), "gate_ngrams: {lengths:?}");
        let weights = [norms.keys.len(), norms.streams.len(), norms.convolution.len()];
        assert_eq!(weights, [channels; 3], "gate_ngrams: norms");
        self.pool.for_each_chunk_mut(keys, share(rows * channels, channels), |_, start, keys| {
            for (at, key) in keys.chunks_exact_mut(hidden).enumerate() {
                let (at, own) = (start + at * hidden, at % shape.streams * hidden..);
                let (x, value) = (&x[at..][..hidden], &values[at / channels * hidden..][..hidden]);
                norm_row(self, key, &norms.keys[own.clone()][..hidden], norms.epsilon);
                let dot = Agreement { key, x, weight: &norms.streams[own][..hidden] };
                let (dot, squares) = dispatch(self, dot);
                let scale = 1.0 / (squares / hidden as f32 + norms.epsilon).sqrt();
                let gate = logistic(signed_root(dot * scale / (hidden as f32).sqrt()));
                key.iter_mut().zip(value).for_each(|(key, value)| *key = gate * value);
            }
        });
        let streams = StreamShape { count: shape.streams, width: hidden };
        self.norm_streams(keys, streams, norms.convolution, norms.epsilon, inputs);
    }

    /// Adds gated values, and the SiLU of the convolution of `inputs`, to the streams `x`. All are `[rows, streams, hidden]`; `weights`
    /// of the convolution are `[taps, channels]`, the last row that of the current token. Reads and writes states in `states`.
    ///
    /// # Panics
    /// Panics if the lengths do not fit each other, or if two states overlap.
    #[expect(clippy::too_many_arguments, reason = "inputs, weights, states and output of one step")]
    pub fn add_ngrams(
        &self,
        shape: &NGramShape,
        weights: &[f32],
        gated: &[f32],
        inputs: &[f32],
        runs: &[StateRun],
        states: &mut [f32],
        x: &mut [f32],
    ) {
        shape.check();
        let (channels, kept) = (shape.channels(), shape.kept());
        let rows: usize = runs.iter().map(|run| run.tokens).sum();
        let lengths = [x.len(), gated.len(), inputs.len()];
        assert!(lengths.iter().all(|len| *len == rows * channels), "add_ngrams: {lengths:?}");
        assert_eq!(weights.len(), shape.taps * channels, "add_ngrams: weights");
        check_places(runs, shape.state_floats(), states.len());
        let before = &*states;
        self.pool.for_each_chunk_mut(x, share(rows * channels, channels), |_, start, x| {
            for (at, x) in x.chunks_exact_mut(channels).enumerate() {
                let (row, mut first) = (start / channels + at, 0);
                let own = runs.iter().find(|run| {
                    let is_own = row < first + run.tokens;
                    first += if is_own { 0 } else { run.tokens };
                    is_own
                });
                let run = own.expect("runs cover all rows");
                let history = History { inputs, before, run, first, kept };
                let mut seen: [Option<&[f32]>; TAPS_MAX] = [None; TAPS_MAX];
                for (tap, seen) in seen[..shape.taps].iter_mut().enumerate() {
                    let back = (shape.taps - 1 - tap) * shape.gap;
                    *seen = history.inputs_of(row - first, back, channels);
                }
                let gated = &gated[row * channels..][..channels];
                let seen = &seen[..shape.taps];
                dispatch(self, Add { seen, weights, gated, x });
            }
        });
        let mut first = 0;
        for run in runs {
            let own = &inputs[first * channels..][..run.tokens * channels];
            first += run.tokens;
            let new = run.tokens.min(kept);
            let old = (kept - new) * channels;
            match run.from {
                Some(from) => {
                    states.copy_within(from + new * channels..from + kept * channels, run.to)
                }
                None => states[run.to..][..old].fill(0.0),
            }
            let to = &mut states[run.to + old..][..new * channels];
            to.copy_from_slice(&own[(run.tokens - new) * channels..]);
        }
    }
}

/// Most taps of the convolution.
const TAPS_MAX: usize = 8;

fn signed_root(x: f32) -> f32 {
    // The sign of 0 is 0, so no agreement at all is a gate of a half.
    if x == 0.0 { 0.0 } else { x.abs().max(AGREEMENT_MIN).sqrt().copysign(x) }
}

/// The inputs of the convolution of a run: those of its tokens, and those of tokens before.
struct History<'a> {
    inputs: &'a [f32],
    before: &'a [f32],
    run: &'a StateRun,
    /// The run's first row.
    first: usize,
    kept: usize,
}

impl<'a> History<'a> {
    /// Returns the inputs `back` tokens before the run's token with this number. `None` means zeros, before the sequence.
    fn inputs_of(&self, token: usize, back: usize, channels: usize) -> Option<&'a [f32]> {
        if back <= token {
            return Some(&self.inputs[(self.first + token - back) * channels..][..channels]);
        }
        let entry = self.kept + token - back;
        self.run.from.map(|from| &self.before[from + entry * channels..][..channels])
    }
}

/// The product of a normed key with a stream times the weight of its norm, and the sum of squares of the stream.
struct Agreement<'a> {
    key: &'a [f32],
    x: &'a [f32],
    weight: &'a [f32],
}

impl Kernel for Agreement<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> (f32, f32) {
        let (key, x) = (self.key.as_chunks::<LANES>().0, self.x.as_chunks::<LANES>().0);
        let weight = self.weight.as_chunks::<LANES>().0;
        let (mut dots, mut squares) = ([simd.splat(0.0); 2], [simd.splat(0.0); 2]);
        for (index, ((key, x), weight)) in key.iter().zip(x).zip(weight).enumerate() {
            let x = simd.load(x);
            let weighted = simd.mul(x, simd.load(weight));
            dots[index % 2] = simd.mul_add(simd.load(key), weighted, dots[index % 2]);
            squares[index % 2] = simd.mul_add(x, x, squares[index % 2]);
        }
        let [dot, square] = [dots, squares].map(|of| simd.sum(simd.add(of[0], of[1])));
        (dot, square)
    }
}

/// Adds gated values and the activated convolution of one token.
struct Add<'a> {
    /// The inputs of each tap; `None` means zeros.
    seen: &'a [Option<&'a [f32]>],
    /// `[taps, channels]`
    weights: &'a [f32],
    gated: &'a [f32],
    x: &'a mut [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let channels = self.x.len();
        let places = self.x.as_chunks_mut::<LANES>().0.iter_mut();
        for (index, (x, gated)) in places.zip(self.gated.as_chunks::<LANES>().0).enumerate() {
            let mut sum = simd.splat(0.0);
            for (seen, weights) in self.seen.iter().zip(self.weights.chunks_exact(channels)) {
                let Some(seen) = seen else { continue };
                let (seen, weights) = (seen.as_chunks().0, weights.as_chunks().0);
                sum = simd.mul_add(simd.load(&weights[index]), simd.load(&seen[index]), sum);
            }
            let added = simd.add(simd.load(gated), times_logistic(simd, sum, sum));
            simd.store(simd.add(simd.load(x), added), x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpus, random};

    const EPSILON: f32 = 1e-6;

    struct Layer {
        shape: NGramShape,
        norms: [Vec<f32>; 3],
        weights: Vec<f32>,
    }

    impl Layer {
        fn new(shape: NGramShape) -> Layer {
            let channels = shape.channels();
            let norms = [1, 2, 3].map(|seed| random(seed, channels));
            Layer { shape, norms, weights: random(4, shape.taps * channels) }
        }

        /// Adds to the streams of rows cut into `pieces`. States alternate between two places.
        fn run(
            &self,
            cpu: &Cpu,
            pieces: &[usize],
            x: &[f32],
            values: &[f32],
            keys: &[f32],
        ) -> Vec<f32> {
            let (shape, channels) = (&self.shape, self.shape.channels());
            let [keys_norm, streams, convolution] = &self.norms;
            let norms = NGramNorms { keys: keys_norm, streams, convolution, epsilon: EPSILON };
            let mut states = vec![f32::NAN; 2 * shape.state_floats()];
            let (mut x, mut first) = (x.to_vec(), 0);
            for (index, rows) in pieces.iter().enumerate() {
                let own = first * channels..(first + rows) * channels;
                let mut gated = keys[own.clone()].to_vec();
                let mut inputs = vec![f32::NAN; gated.len()];
                let values = &values[first * shape.hidden..][..rows * shape.hidden];
                cpu.gate_ngrams(shape, &norms, &x[own.clone()], values, &mut gated, &mut inputs);
                let place = |index: usize| index % 2 * shape.state_floats();
                let from = index.checked_sub(1).map(place);
                let run = StateRun { tokens: *rows, from, to: place(index) };
                let x = &mut x[own];
                cpu.add_ngrams(shape, &self.weights, &gated, &inputs, &[run], &mut states, x);
                first += rows;
            }
            x
        }

        /// The formulas, in f64.
        fn exact(&self, x: &[f32], values: &[f32], keys: &[f32]) -> Vec<f64> {
            let NGramShape { streams, hidden, taps, gap } = self.shape;
            let channels = self.shape.channels();
            let norm = |x: &[f64], weight: &[f32]| -> Vec<f64> {
                let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
                let scale = 1.0 / (mean + f64::from(EPSILON)).sqrt();
                x.iter().zip(weight).map(|(x, w)| x * scale * f64::from(*w)).collect()
            };
            let wide = |x: &[f32]| -> Vec<f64> { x.iter().map(|x| f64::from(*x)).collect() };
            let (mut gated, mut inputs) = (Vec::new(), Vec::new());
            for (at, key) in keys.chunks(hidden).enumerate() {
                let own = at % streams * hidden..(at % streams + 1) * hidden;
                let key = norm(&wide(key), &self.norms[0][own.clone()]);
                let query = norm(&wide(&x[at * hidden..][..hidden]), &self.norms[1][own.clone()]);
                let dot: f64 = key.iter().zip(&query).map(|(a, b)| a * b).sum();
                let dot = dot / (hidden as f64).sqrt();
                let gate = 1.0 / (1.0 + (-(dot.abs().max(1e-6).sqrt() * dot.signum())).exp());
                let value = &values[at / streams * hidden..][..hidden];
                let row: Vec<f64> = wide(value).into_iter().map(|value| gate * value).collect();
                inputs.extend(norm(&row, &self.norms[2][own]));
                gated.extend(row);
            }
            let mut out = wide(x);
            for (at, out) in out.iter_mut().enumerate() {
                let (row, channel) = (at / channels, at % channels);
                let of_tap = |tap: usize| match row.checked_sub((taps - 1 - tap) * gap) {
                    Some(row) => {
                        inputs[row * channels + channel]
                            * f64::from(self.weights[tap * channels + channel])
                    }
                    None => 0.0,
                };
                let sum: f64 = (0..taps).map(of_tap).sum();
                *out += gated[at] + sum / (1.0 + (-sum).exp());
            }
            out
        }
    }

    #[test]
    fn streams_agree_with_f64_and_cuts_change_no_bit() {
        for cpu in cpus() {
            for (streams, hidden, taps, gap, rows) in
                [(1, 8, 2, 1, 3), (4, 64, 4, 3, 30), (2, 1032, 3, 2, 9)]
            {
                let layer = Layer::new(NGramShape { streams, hidden, taps, gap });
                let channels = streams * hidden;
                let (x, values) = (random(5, rows * channels), random(6, rows * hidden));
                let keys = random(7, rows * channels);
                let whole = layer.run(&cpu, &[rows], &x, &values, &keys);
                for (found, exact) in whole.iter().zip(layer.exact(&x, &values, &keys)) {
                    assert!((f64::from(*found) - exact).abs() < 1e-5, "{found} {exact}");
                }
                let (half, rest) = (rows / 2, rows - rows / 2);
                for pieces in [vec![1; rows], vec![half, rest], vec![rows - 1, 1]] {
                    let cut = layer.run(&cpu, &pieces, &x, &values, &keys);
                    assert_eq!(cut, whole, "{pieces:?}");
                }
            }
        }
    }

    #[test]
    fn no_agreement_at_all_is_a_gate_of_a_half() {
        let cpu = &cpus()[0];
        let shape = NGramShape { streams: 1, hidden: 8, taps: 2, gap: 1 };
        let ones = [1.0; 8];
        let norms =
            NGramNorms { keys: &ones, streams: &ones, convolution: &ones, epsilon: EPSILON };
        let (mut keys, mut inputs) = ([0.0; 8], [0.0; 8]);
        cpu.gate_ngrams(&shape, &norms, &[1.0; 8], &[2.0; 8], &mut keys, &mut inputs);
        assert_eq!(keys, [1.0; 8]);
    }

    #[test]
    fn sequences_of_one_call_do_not_mix() {
        for cpu in cpus() {
            let layer = Layer::new(NGramShape { streams: 2, hidden: 16, taps: 4, gap: 3 });
            let (shape, channels) = (&layer.shape, layer.shape.channels());
            let (gated, inputs) = (random(1, 12 * channels), random(2, 12 * channels));
            let floats = shape.state_floats();
            let states = random(3, 6 * floats);
            let x = random(4, 12 * channels);
            let runs = [(5, Some(0), 3), (1, None, 4), (6, Some(2), 5)];
            let run = |(tokens, from, to): (usize, Option<usize>, usize)| StateRun {
                tokens,
                from: from.map(|from| from * floats),
                to: to * floats,
            };
            let (mut together, mut all) = (x.clone(), states.clone());
            cpu.add_ngrams(
                shape,
                &layer.weights,
                &gated,
                &inputs,
                &runs.map(run),
                &mut all,
                &mut together,
            );
            let mut first = 0;
            for of in runs {
                let own = first * channels..(first + of.0) * channels;
                let (mut alone, mut one) = (x[own.clone()].to_vec(), states.clone());
                let (gated, inputs) = (&gated[own.clone()], &inputs[own.clone()]);
                cpu.add_ngrams(
                    shape,
                    &layer.weights,
                    gated,
                    inputs,
                    &[run(of)],
                    &mut one,
                    &mut alone,
                );
                assert_eq!(alone, together[own]);
                assert_eq!(one[of.2 * floats..][..floats], all[of.2 * floats..][..floats]);
                first += of.0;
            }
        }
    }
}
