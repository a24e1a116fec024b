//! Vector code of the recurrence. Every vector has eight channels, or eight elements of a key.

use super::History;
use crate::simd::{Kernel, LANES, Simd};

/// Most tokens that a convolution sees.
const MOST_SEEN: usize = 8;

/// The convolution of one token and its activation, for consecutive channels.
pub(super) struct Convolve<'a> {
    pub history: &'a History<'a>,
    pub token: usize,
    /// The first column in the product, and the first channel.
    pub column: usize,
    pub channel: usize,
    /// `[convolution, channels]`
    pub weights: &'a [f32],
    pub out: &'a mut [f32],
}

impl Kernel for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Convolve { history, token, column, channel, weights, out } = self;
        let (seen, channels) = (history.shape.convolution, history.shape.channels());
        assert!(seen <= MOST_SEEN, "a convolution over {seen} tokens");
        let len = out.len();
        let mut rows: [Option<(&[f32], &[f32])>; MOST_SEEN] = [None; MOST_SEEN];
        for (index, row) in rows.iter_mut().take(seen).enumerate() {
            let inputs = history.inputs(token, seen - 1 - index, (column, channel), len);
            *row = inputs.map(|of| (of, &weights[index * channels + channel..][..len]));
        }
        for (index, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let mut sum = simd.splat(0.0);
            for (inputs, weights) in rows.iter().take(seen).flatten() {
                let (x, w) = (inputs.as_chunks().0, weights.as_chunks().0);
                sum = simd.mul_add(simd.load(&x[index]), simd.load(&w[index]), sum);
            }
            simd.store(silu(simd, sum), out);
        }
    }
}

/// Returns `x / (1 + e^-x)`.
#[inline(always)]
fn silu<S: Simd>(simd: S, x: S::V) -> S::V {
    let e = simd.exp(simd.sub(simd.splat(0.0), x));
    simd.div(x, simd.add(simd.splat(1.0), e))
}

/// Divides a query or key by its length, and multiplies it by `scale`.
pub(super) struct NormaliseHead<'a> {
    pub head: &'a mut [f32],
    pub scale: f32,
}

impl Kernel for NormaliseHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        const EPSILON: f32 = 1e-6;
        let chunks = self.head.as_chunks_mut::<LANES>().0;
        let mut sum = simd.splat(0.0);
        for x in chunks.iter() {
            let x = simd.load(x);
            sum = simd.mul_add(x, x, sum);
        }
        let factor = simd.splat(self.scale / (simd.sum(sum) + EPSILON).sqrt());
        for x in chunks {
            simd.store(simd.mul(simd.load(x), factor), x);
        }
    }
}

/// Multiplies an output by its activated gate.
pub(super) struct GateRow<'a> {
    pub out: &'a mut [f32],
    pub gate: &'a [f32],
}

impl Kernel for GateRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let gates = self.gate.as_chunks::<LANES>().0;
        for (out, gate) in self.out.as_chunks_mut::<LANES>().0.iter_mut().zip(gates) {
            simd.store(simd.mul(simd.load(out), silu(simd, simd.load(gate))), out);
        }
    }
}

/// The steps of all tokens of a run for eight elements of a head's value. The rows of the state matrix for other elements do
/// not matter to them, so these rows stay in the nearest cache from token to token.
pub(super) struct HeadSteps<'a, F> {
    /// `[8, key_dim]`
    pub state: &'a mut [f32],
    /// Queries, keys and values of the run's tokens, `[tokens, channels]`.
    pub mixed: &'a [f32],
    /// Decay and share of replacement of the tokens from the run's first one on, `[.., heads, 2]`.
    pub factors: &'a [f32],
    pub channels: usize,
    pub heads: usize,
    pub head: usize,
    /// First channels of query, key and the eight elements of the value.
    pub query: usize,
    pub key: usize,
    pub value: usize,
    pub key_dim: usize,
    /// Takes the number of a token and its output.
    pub out: F,
}

impl<F: Fn(usize, &[f32; LANES])> Kernel for HeadSteps<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let key_dim = self.key_dim;
        for (token, row) in self.mixed.chunks_exact(self.channels).enumerate() {
            let query = row[self.query..][..key_dim].as_chunks::<LANES>().0;
            let key = row[self.key..][..key_dim].as_chunks::<LANES>().0;
            let value: &[f32; LANES] =
                row[self.value..].first_chunk().expect("values are whole vectors");
            let factors = &self.factors[2 * (token * self.heads + self.head)..];
            let (decay, share) = (factors[0], factors[1]);
            // What the decayed state holds for the key: one sum for each row.
            let mut sums = [simd.splat(0.0); LANES];
            for (index, key) in key.iter().enumerate() {
                let key = simd.load(key);
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let at = lane * key_dim + index * LANES;
                    let state = self.state[at..].first_chunk().expect("keys are whole vectors");
                    *sum = simd.mul_add(simd.load(state), key, *sum);
                }
            }
            let held = simd.mul(simd.sums(sums), simd.splat(decay));
            let change = simd.mul(simd.sub(simd.load(value), held), simd.splat(share));
            let mut changes = [0.0; LANES];
            simd.store(change, &mut changes);
            let decay = simd.splat(decay);
            let mut sums = [simd.splat(0.0); LANES];
            for (index, (key, query)) in key.iter().zip(query).enumerate() {
                let (key, query) = (simd.load(key), simd.load(query));
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let at = lane * key_dim + index * LANES;
                    let state: &mut [f32; LANES] =
                        self.state[at..].first_chunk_mut().expect("keys are whole vectors");
                    let decayed = simd.mul(simd.load(state), decay);
                    let new = simd.mul_add(simd.splat(changes[lane]), key, decayed);
                    simd.store(new, state);
                    *sum = simd.mul_add(new, query, *sum);
                }
            }
            let mut out = [0.0; LANES];
            simd.store(simd.sums(sums), &mut out);
            (self.out)(token, &out);
        }
    }
}
