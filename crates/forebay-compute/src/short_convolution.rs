//! Short convolutions over the tokens of a sequence, which are added to their inputs (Inkling).

use crate::cpu::Cpu;
use crate::ops::share;
use crate::recurrent::StateRun;

/// Weights of a causal convolution of every channel by itself.
#[derive(Debug, Clone, Copy)]
pub struct ShortConvolution<'a> {
    /// Weights `[taps, channels]`. Those of the token itself come last.
    pub weights: &'a [f32],
    pub channels: usize,
}

impl ShortConvolution<'_> {
    /// Returns the number of tokens before a token that it sees.
    fn seen(&self) -> usize {
        self.weights.len() / self.channels - 1
    }

    /// Returns the number of floats of a state: the inputs of the last tokens `[taps - 1, channels]`.
    pub fn state_floats(&self) -> usize {
        self.seen() * self.channels
    }
}

impl Cpu {
    /// Adds to every row of `x` `[tokens, channels]` the convolution of the rows up to it: the sum over the taps, in their order,
    /// of a tap's weights times its token. The tokens of all `runs` follow one another. A run takes the tokens before it from its
    /// state in `states`, or zeroes if it has none, and writes its new state. `inputs` is scratch, at least as long as `x`.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn add_short_convolution(
        &self,
        of: &ShortConvolution<'_>,
        runs: &[StateRun],
        states: &mut [f32],
        inputs: &mut [f32],
        x: &mut [f32],
    ) {
        let (channels, seen) = (of.channels, of.seen());
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        assert_eq!(
            x.len(),
            tokens * channels,
            "add_short_convolution: x is not [tokens, channels]"
        );
        let inputs = &mut inputs[..x.len()];
        inputs.copy_from_slice(x);
        let mut first = 0;
        for run in runs {
            let own = first * channels..(first + run.tokens) * channels;
            let rows = &inputs[own.clone()];
            let before = run.from.map(|from| &states[from..][..seen * channels]);
            let chunk = share(own.len(), channels);
            self.pool.for_each_chunk_mut(&mut x[own], chunk, |_, start, x| {
                for (row, out) in x.chunks_exact_mut(channels).enumerate() {
                    let token = start / channels + row;
                    for (tap, weights) in of.weights.chunks_exact(channels).enumerate() {
                        let taken = match ((token + tap).checked_sub(seen), before) {
                            (Some(token), _) => &rows[token * channels..],
                            (None, Some(before)) => &before[(token + tap) * channels..],
                            (None, None) => continue,
                        };
                        let products = taken.iter().zip(weights).map(|(x, weight)| x * weight);
                        out.iter_mut().zip(products).for_each(|(out, product)| *out += product);
                    }
                }
            });
            for entry in 0..seen {
                let to = run.to + entry * channels..run.to + (entry + 1) * channels;
                match ((run.tokens + entry).checked_sub(seen), run.from) {
                    (Some(token), _) => {
                        states[to].copy_from_slice(&rows[token * channels..][..channels]);
                    }
                    (None, Some(from)) => {
                        let from = from + (run.tokens + entry) * channels;
                        states.copy_within(from..from + channels, to.start);
                    }
                    (None, None) => states[to].fill(0.0),
                }
            }
            first += run.tokens;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpus, random};

    /// Returns the outputs of a whole sequence in f64.
    fn expected(x: &[f32], weights: &[f32], channels: usize) -> Vec<f64> {
        let (tokens, taps) = (x.len() / channels, weights.len() / channels);
        let value = |token: usize, channel: usize| f64::from(x[token * channels + channel]);
        let of = |at: usize| {
            let (token, channel) = (at / channels, at % channels);
            let terms = (0..taps).filter_map(|tap| {
                let taken = (token + tap + 1).checked_sub(taps)?;
                Some(value(taken, channel) * f64::from(weights[tap * channels + channel]))
            });
            value(token, channel) + terms.sum::<f64>()
        };
        (0..tokens * channels).map(of).collect()
    }

    #[test]
    fn sequences_give_the_same_bits_wherever_they_are_cut() {
        let (channels, tokens) = (40, 23);
        let taps = [2, 4];
        for (cpu, taps) in cpus().iter().flat_map(|cpu| taps.map(|taps| (cpu, taps))) {
            let (x, weights) = (random(5, tokens * channels), random(6, taps * channels));
            let of = ShortConvolution { weights: &weights, channels };
            let floats = of.state_floats();
            let mut inputs = vec![0.0; (tokens + 1) * channels];
            // Two states of the sequence, and one of another sequence.
            let mut states = vec![9.0; 3 * floats];
            let mut whole = x.clone();
            let run = StateRun { tokens, from: None, to: 0 };
            cpu.add_short_convolution(&of, &[run], &mut states, &mut inputs, &mut whole);
            for (out, expected) in whole.iter().zip(expected(&x, &weights, channels)) {
                assert!((f64::from(*out) - expected).abs() < 1e-5);
            }
            assert_eq!(states[..floats], x[(tokens + 1 - taps) * channels..]);
            // The same sequence in pieces, beside the other one.
            let other = random(7, channels);
            let (mut at, mut place) = (0, 0);
            states.fill(9.0);
            for piece in [1, 1, 2, 7, 1, 11] {
                let mut rows = [&other[..], &x[at * channels..(at + piece) * channels]].concat();
                let from = (at > 0).then_some(place * floats);
                place = 1 - place;
                let runs = [
                    StateRun { tokens: 1, from: None, to: 2 * floats },
                    StateRun { tokens: piece, from, to: place * floats },
                ];
                cpu.add_short_convolution(&of, &runs, &mut states, &mut inputs, &mut rows);
                assert_eq!(rows[channels..], whole[at * channels..(at + piece) * channels]);
                let last = &weights[(taps - 1) * channels..];
                for ((out, x), weight) in rows.iter().zip(&other).zip(last) {
                    assert_eq!(*out, x + x * weight);
                }
                at += piece;
            }
            assert_eq!(at, tokens);
        }
    }
}
