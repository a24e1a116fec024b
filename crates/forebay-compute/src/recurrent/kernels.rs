//! Vector code before and after the recurrence. Every vector has eight channels, or eight elements of a key.

use super::{History, Segment};
use crate::ops::times_logistic;
use crate::simd::{Kernel, LANES, Simd};

/// Most tokens that a convolution sees.
const SEEN_MAX: usize = 8;

/// The convolution of one token and its activation, for consecutive channels.
pub(super) struct Convolve<'a> {
    pub history: &'a History<'a>,
    pub token: usize,
    pub segment: Segment<'a>,
    /// `[convolution, channels]`
    pub weights: &'a [f32],
    /// Bias of the segment's channels.
    pub bias: Option<&'a [f32]>,
    pub activates: bool,
    pub out: &'a mut [f32],
}

impl Kernel for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Convolve { history, token, segment, weights, bias, activates, out } = self;
        let (seen, channels) = (history.shape.convolution, history.shape.channels());
        assert!(seen <= SEEN_MAX, "a convolution over {seen} tokens");
        let len = out.len();
        let mut rows: [Option<(&[f32], &[f32])>; SEEN_MAX] = [None; SEEN_MAX];
        for (index, row) in rows.iter_mut().take(seen).enumerate() {
            let inputs = history.inputs(token, seen - 1 - index, segment);
            *row = inputs.map(|of| (of, &weights[index * channels + segment.channel..][..len]));
        }
        for (index, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let mut sum = match bias {
                Some(bias) => simd.load(&bias.as_chunks().0[index]),
                None => simd.splat(0.0),
            };
            for (inputs, weights) in rows.iter().take(seen).flatten() {
                let (x, w) = (inputs.as_chunks().0, weights.as_chunks().0);
                sum = simd.mul_add(simd.load(&x[index]), simd.load(&w[index]), sum);
            }
            simd.store(if activates { times_logistic(simd, sum, sum) } else { sum }, out);
        }
    }
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
    /// True if the gate is `sigmoid(z)` and not `silu(z)`.
    pub sigmoid: bool,
}

impl Kernel for GateRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let gates = self.gate.as_chunks::<LANES>().0;
        let outs = self.out.as_chunks_mut::<LANES>().0.iter_mut().zip(gates);
        for (out, gate) in outs {
            let (x, gate) = (simd.load(out), simd.load(gate));
            let gated = match self.sigmoid {
                true => times_logistic(simd, x, gate),
                false => simd.mul(x, times_logistic(simd, gate, gate)),
            };
            simd.store(gated, out);
        }
    }
}
