//! Recurrent layers: a causal convolution over the last tokens, and a state matrix for each head that every token changes
//! ([`DeltaRule`]).
//!
//! Tokens are computed one after another in one fixed order. The bits of a token therefore do not depend on where its
//! sequence is cut into calls, or on other sequences.

mod kernels;
mod selective;
mod shape;
mod steps;
#[cfg(test)]
mod tests;

use forebay_ops::{DeltaRule, DeltaShape, HeadColumns};

use self::kernels::{Convolve, GateRow, NormaliseHead};
use self::steps::HeadSteps;
use crate::buffer::SharedSlice;
use crate::cpu::Cpu;
use crate::ops::{logistic, norm_row};
use crate::pool::tasks_at_once;
use crate::simd::{LANES, dispatch};

/// Rows of a product, one for each token.
#[derive(Debug, Clone, Copy)]
pub struct ProductRows<'a> {
    pub values: &'a [f32],
    /// Number of columns.
    pub row: usize,
}

impl<'a> ProductRows<'a> {
    fn of(&self, token: usize) -> &'a [f32] {
        &self.values[token * self.row..][..self.row]
    }
}

/// The columns of a layer's products. Several parts may be columns of the same product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaColumns {
    pub q: HeadColumns,
    pub k: HeadColumns,
    pub v: HeadColumns,
    /// Gate of the output, one for each element.
    pub z: HeadColumns,
    /// How far a token replaces the old value, one for each value head.
    pub b: HeadColumns,
    /// Length of the step by which the state decays: one for each value head, or with [`DeltaRule::KimiDelta`] one for each
    /// element of its key.
    pub a: HeadColumns,
}

/// The products of the tokens of a pass.
#[derive(Debug, Clone, Copy)]
pub struct DeltaInputs<'a> {
    pub columns: DeltaColumns,
    pub q: ProductRows<'a>,
    pub k: ProductRows<'a>,
    pub v: ProductRows<'a>,
    pub z: ProductRows<'a>,
    /// Not read with [`DeltaRule::Mamba2`] and [`DeltaRule::Lightning`].
    pub b: ProductRows<'a>,
    /// Not read with [`DeltaRule::Lightning`].
    pub a: ProductRows<'a>,
}

/// Vectors of a layer.
#[derive(Debug, Clone, Copy)]
pub struct DeltaVectors<'a> {
    /// Weights of the convolution `[convolution, channels]`. The last row is that of the current token.
    pub convolution: &'a [f32],
    /// Bias of the convolution `[channels]`.
    pub convolution_bias: Option<&'a [f32]>,
    /// Rate of decay of each value head, at most 0. With [`DeltaRule::Mamba`], `[values, key_dim]`. With [`DeltaRule::Lightning`],
    /// the logarithm of the decay.
    pub decay: &'a [f32],
    /// Numbers that are added to the steps `[value_heads, decay_width]`. With [`DeltaRule::Mamba`], one for each value. None with
    /// [`DeltaRule::Lightning`].
    pub step: &'a [f32],
    /// Factor for each value head's values, which are added to its output. With [`DeltaRule::Mamba`], one for each value.
    pub skip: Option<&'a [f32]>,
    /// Weight of the norm of the outputs, of [`DeltaShape::norm_weights`] elements.
    pub norm: &'a [f32],
    pub epsilon: f32,
}

/// Consecutive tokens of one sequence in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateRun {
    pub tokens: usize,
    /// Place of the state before the first token, in floats. `None` is the empty state.
    pub from: Option<usize>,
    /// Place of the state after the last token.
    pub to: usize,
}

impl Cpu {
    /// Computes the layer's rule for the tokens of `runs`, from the projections of their inputs to the gated and normed
    /// outputs `[tokens, value_heads, value_dim]`. Reads and writes states in `states`. `scratch` has
    /// [`DeltaShape::scratch_floats`] for each token.
    ///
    /// # Panics
    /// Panics if a length does not fit the shape, if two states overlap, or with [`DeltaRule::Mamba`], which takes two calls.
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs, weights, states and outputs of one step"
    )]
    pub fn gated_delta(
        &self,
        shape: &DeltaShape,
        weights: &DeltaVectors<'_>,
        inputs: &DeltaInputs<'_>,
        runs: &[StateRun],
        states: &mut [f32],
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        shape::check(shape);
        assert!(shape.rule != DeltaRule::Mamba, "gated_delta: {shape:?}");
        if shape.rule == DeltaRule::ShortConvolution {
            return self.short_convolution(shape, weights, inputs, runs, states, scratch, out);
        }
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        let (channels, heads) = (shape.channels(), shape.value_heads);
        let lengths = [
            (weights.convolution.len(), shape.convolution * channels),
            (weights.decay.len(), heads),
            (weights.convolution_bias.map_or(channels, <[f32]>::len), channels),
            (weights.step.len(), shape.steps()),
            (weights.skip.map_or(heads, <[f32]>::len), heads),
            (weights.norm.len(), shape.norm_weights()),
            (out.len(), tokens * shape.value_width()),
            (scratch.len(), tokens * shape.scratch_floats()),
        ];
        assert!(lengths.iter().all(|(found, wanted)| found == wanted), "gated_delta: {lengths:?}");
        let products = [inputs.q, inputs.k, inputs.v, inputs.z, inputs.b, inputs.a];
        assert!(products.iter().all(|of| of.values.len() == tokens * of.row), "gated_delta: rows");
        check_places(runs, shape.state_floats(), states.len());
        let (mixed, factors) = scratch.split_at_mut(tokens * channels);
        self.convolve(shape, weights, inputs, runs, states, mixed);
        self.factors(shape, weights, inputs, factors);
        let call = Steps { shape, mixed, factors, skip: weights.skip, runs };
        call.run(self, states, out);
        self.gate_outputs(shape, weights, inputs, out);
    }

    /// Computes [`DeltaRule::ShortConvolution`]. Of the vectors, it has the convolution's only.
    #[expect(clippy::too_many_arguments, reason = "as above")]
    fn short_convolution(
        &self,
        shape: &DeltaShape,
        weights: &DeltaVectors<'_>,
        inputs: &DeltaInputs<'_>,
        runs: &[StateRun],
        states: &mut [f32],
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        let channels = shape.channels();
        let lengths = [
            (weights.convolution.len(), shape.convolution * channels),
            (weights.convolution_bias.map_or(channels, <[f32]>::len), channels),
            (out.len(), tokens * channels),
            (scratch.len(), tokens * channels),
        ];
        assert!(lengths.iter().all(|(found, wanted)| found == wanted), "gated_delta: {lengths:?}");
        check_places(runs, shape.state_floats(), states.len());
        let columns = inputs.columns;
        self.pool.for_each_chunk_mut(scratch, channels, |_, start, row| {
            let token = start / channels;
            row.copy_from_slice(&inputs.v.of(token)[columns.v.first..][..channels]);
            let factor = &inputs.b.of(token)[columns.b.first..][..channels];
            row.iter_mut().zip(factor).for_each(|(x, factor)| *x *= factor);
        });
        let whole = HeadColumns { first: 0, step: channels };
        let gated = DeltaInputs {
            columns: DeltaColumns { v: whole, ..columns },
            v: ProductRows { values: scratch, row: channels },
            ..*inputs
        };
        self.convolve(shape, weights, &gated, runs, states, out);
        self.pool.for_each_chunk_mut(out, channels, |_, start, row| {
            let factor = &inputs.z.of(start / channels)[columns.z.first..][..channels];
            row.iter_mut().zip(factor).for_each(|(x, factor)| *x *= factor);
        });
    }

    /// Computes the convolution and its activation for every token, and normalises queries and keys. Writes the inputs that later
    /// tokens need to the states.
    fn convolve(
        &self,
        shape: &DeltaShape,
        weights: &DeltaVectors<'_>,
        inputs: &DeltaInputs<'_>,
        runs: &[StateRun],
        states: &mut [f32],
        mixed: &mut [f32],
    ) {
        let (channels, seen) = (shape.channels(), shape.convolution - 1);
        let mut first = 0;
        for run in runs {
            let of_run = &mut mixed[first * channels..][..run.tokens * channels];
            let before = run.from.map(|from| &states[from..][..shape.tail_floats()]);
            let history = History { shape, inputs, first, before };
            self.pool.for_each_chunk_mut(of_run, channels, |_, start, row| {
                let at = start / channels;
                history.each_segment(|segment| {
                    let own = segment.channel..segment.channel + segment.len;
                    let kernel = Convolve {
                        history: &history,
                        token: at,
                        segment,
                        weights: weights.convolution,
                        bias: weights.convolution_bias.map(|bias| &bias[own.clone()]),
                        activates: shape.rule != DeltaRule::ShortConvolution,
                        out: &mut row[own.clone()],
                    };
                    dispatch(self, kernel);
                });
                if !shape.norms_keys() {
                    return;
                }
                let (q, rest) = row.split_at_mut(shape.key_heads * shape.key_dim);
                let k = &mut rest[..shape.key_heads * shape.key_dim];
                let scale = 1.0 / (shape.key_dim as f32).sqrt();
                for (heads, scale) in [(q, scale), (k, 1.0)] {
                    for head in heads.chunks_exact_mut(shape.key_dim) {
                        dispatch(self, NormaliseHead { head, scale });
                    }
                }
            });
            let tokens = run.tokens;
            for entry in 0..seen {
                // Tokens before the run have negative numbers.
                let token = (tokens + entry).checked_sub(seen);
                let to = run.to + entry * channels;
                match token {
                    Some(token) => {
                        let to = &mut states[to..to + channels];
                        history_segments(
                            shape,
                            inputs,
                            |Segment { rows, column, channel, len }| {
                                let row = rows.of(first + token);
                                to[channel..channel + len]
                                    .copy_from_slice(&row[column..column + len]);
                            },
                        );
                    }
                    None => match run.from {
                        Some(from) => {
                            let from = from + (entry + tokens) * channels;
                            states.copy_within(from..from + channels, to);
                        }
                        None => states[to..to + channels].fill(0.0),
                    },
                }
            }
            first += run.tokens;
        }
    }

    /// Computes the factors of decay and the share of every token and value head, `[tokens, value_heads, decay_width + 1]`, the
    /// share last. The share says how far a token replaces the old value, or with [`DeltaRule::Mamba2`] how much it adds.
    fn factors(
        &self,
        shape: &DeltaShape,
        weights: &DeltaVectors<'_>,
        inputs: &DeltaInputs<'_>,
        factors: &mut [f32],
    ) {
        let (heads, decays) = (shape.value_heads, shape.decay_width());
        if shape.rule == DeltaRule::Lightning {
            for (of, rate) in factors.chunks_exact_mut(2).zip(weights.decay.iter().cycle()) {
                of.copy_from_slice(&[rate.exp(), 1.0]);
            }
            return;
        }
        // Heads with many factors are worth a task each.
        let of_task = if decays > 1 { decays + 1 } else { heads * (decays + 1) };
        self.pool.for_each_chunk_mut(factors, of_task, |_, start, factors| {
            let first = start / (decays + 1);
            for (index, of) in factors.chunks_exact_mut(decays + 1).enumerate() {
                let (token, head) = ((first + index) / heads, (first + index) % heads);
                let a = inputs.a.of(token);
                let a = &a[inputs.columns.a.of_value_head(shape, head, decays)..][..decays];
                let (factors, share) = of.split_at_mut(decays);
                let mut step = 0.0;
                for ((factor, a), bias) in
                    factors.iter_mut().zip(a).zip(&weights.step[head * decays..])
                {
                    if shape.decay_bound != 0.0 {
                        // Rates are negative.
                        let share = logistic(-weights.decay[head] * (a + bias));
                        *factor = (shape.decay_bound * share).exp();
                        continue;
                    }
                    step = softplus(a + bias);
                    *factor = (weights.decay[head] * step).exp();
                }
                share[0] = match shape.rule {
                    DeltaRule::Mamba2 => step,
                    _ => {
                        let b = inputs.b.of(token);
                        let raw = b[inputs.columns.b.of_value_head(shape, head, 1)];
                        shape.share_scale * logistic(raw)
                    }
                };
            }
        });
    }

    /// Normalises the outputs and multiplies them by the activated gate, in the order of the rule.
    fn gate_outputs(
        &self,
        shape: &DeltaShape,
        weights: &DeltaVectors<'_>,
        inputs: &DeltaInputs<'_>,
        out: &mut [f32],
    ) {
        let (width, dim) = (shape.value_width(), shape.value_dim);
        let norms_first = shape.rule != DeltaRule::Mamba2;
        if norms_first {
            self.rms_norm_in_place(out, weights.norm, weights.epsilon);
        }
        let sigmoid = norms_first && shape.sigmoid_gate;
        self.pool.for_each_chunk_mut(out, width, |_, start, row| {
            let z = inputs.z.of(start / width);
            for (head, out) in row.chunks_exact_mut(dim).enumerate() {
                let gate = &z[inputs.columns.z.of_value_head(shape, head, dim)..][..dim];
                dispatch(self, GateRow { out, gate, sigmoid });
            }
            if !norms_first && shape.norm_width > 0 {
                let groups = row.chunks_exact_mut(shape.norm_width);
                for (group, weight) in groups.zip(weights.norm.chunks_exact(shape.norm_width)) {
                    norm_row(self, group, weight, weights.epsilon);
                }
            }
        });
    }
}

/// Checks that every state is inside `len` floats and overlaps no other.
pub(crate) fn check_places(runs: &[StateRun], floats: usize, len: usize) {
    for (index, run) in runs.iter().enumerate() {
        let inside = |at: usize| at <= len && floats <= len - at;
        assert!(inside(run.to) && run.from.is_none_or(inside), "state of {run:?} in {len} floats");
        let apart = |a: usize, b: usize| a.abs_diff(b) >= floats;
        assert!(run.from.is_none_or(|from| apart(from, run.to)), "states of {run:?}");
        let others = runs[..index].iter().flat_map(|of| [Some(of.to), of.from]).flatten();
        for other in others {
            let alone = apart(run.to, other) && run.from.is_none_or(|from| apart(from, other));
            assert!(alone, "states of {run:?} and one at {other}");
        }
    }
}

/// Returns `ln(1 + e^x)`.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Consecutive channels of the convolution that are consecutive columns of a product.
#[derive(Clone, Copy)]
struct Segment<'a> {
    rows: ProductRows<'a>,
    column: usize,
    channel: usize,
    len: usize,
}

/// Calls `f` for segments that cover all channels of the convolution.
fn history_segments<'a>(
    shape: &DeltaShape,
    inputs: &DeltaInputs<'a>,
    mut f: impl FnMut(Segment<'a>),
) {
    let (key_heads, key_dim) = (shape.key_heads, shape.mixed_key_dim());
    let DeltaColumns { q, k, v, .. } = inputs.columns;
    let values = shape.values_per_key() * shape.value_dim;
    let keys = key_heads * key_dim;
    let parts =
        [(inputs.q, q, 0, key_dim), (inputs.k, k, keys, key_dim), (inputs.v, v, 2 * keys, values)];
    for (rows, columns, channel, len) in parts {
        if len == 0 {
            continue;
        }
        if columns.step == len {
            f(Segment { rows, column: columns.first, channel, len: key_heads * len });
            continue;
        }
        for head in 0..key_heads {
            let (column, channel) = (columns.first + head * columns.step, channel + head * len);
            f(Segment { rows, column, channel, len });
        }
    }
}

/// The inputs of the convolution of a run: those of its tokens, and those of tokens before.
struct History<'a> {
    shape: &'a DeltaShape,
    inputs: &'a DeltaInputs<'a>,
    /// Row of the run's first token.
    first: usize,
    /// Inputs of the tokens before the run, `[convolution - 1, channels]`.
    before: Option<&'a [f32]>,
}

impl<'a> History<'a> {
    fn each_segment(&self, f: impl FnMut(Segment<'a>)) {
        history_segments(self.shape, self.inputs, f);
    }

    /// Returns the inputs of a segment's channels that are `back` tokens before `token` of the run. `None` means 0.
    fn inputs(&self, token: usize, back: usize, segment: Segment<'a>) -> Option<&'a [f32]> {
        let Segment { rows, column, channel, len } = segment;
        match token.checked_sub(back) {
            Some(token) => Some(&rows.of(self.first + token)[column..column + len]),
            None => {
                let entry = self.shape.convolution - 1 + token - back;
                let start = entry * self.shape.channels() + channel;
                self.before.map(|before| &before[start..start + len])
            }
        }
    }
}

/// The recurrence over all tokens, heads and runs.
struct Steps<'a> {
    shape: &'a DeltaShape,
    mixed: &'a [f32],
    factors: &'a [f32],
    skip: Option<&'a [f32]>,
    runs: &'a [StateRun],
}

impl Steps<'_> {
    fn run(&self, cpu: &Cpu, states: &mut [f32], out: &mut [f32]) {
        let Steps { shape, mixed, factors, skip, runs } = *self;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = *shape;
        let (channels, matrix) = (shape.channels(), value_dim * key_dim);
        let of_head = shape.decay_width() + 1;
        let (states, out) = (SharedSlice::new(states), SharedSlice::new(out));
        let tasks = runs.len() * value_heads;
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        let work = 2 * tokens * value_heads * matrix;
        let tasks_at_once = tasks_at_once(tasks, work);
        cpu.pool.for_each_chunk(tasks, tasks_at_once, |tasks| {
            for task in tasks {
                let (index, head) = (task / value_heads, task % value_heads);
                let run = &runs[index];
                let first: usize = runs[..index].iter().map(|run| run.tokens).sum();
                let place = |state: usize| state + shape.tail_floats() + head * matrix;
                // SAFETY: each task has another run or head, and no states overlap (`check_places`).
                let state = unsafe { states.piece(place(run.to), matrix) };
                // SAFETY: as above. No other task has this run and head.
                let before = run.from.map(|from| unsafe { states.piece(place(from), matrix) });
                let key = shape.key_head(head) * key_dim;
                for block in 0..value_dim / LANES {
                    let of_block = block * LANES * key_dim..(block + 1) * LANES * key_dim;
                    let rows = &mut state[of_block.clone()];
                    // Just before they are used, so that memory is read once.
                    match &before {
                        Some(before) => rows.copy_from_slice(&before[of_block]),
                        None => rows.fill(0.0),
                    }
                    let value = 2 * key_heads * key_dim + head * value_dim + block * LANES;
                    let steps = HeadSteps {
                        state: rows,
                        mixed: &mixed[first * channels..][..run.tokens * channels],
                        rule: shape.rule,
                        factors: &factors[first * value_heads * of_head..],
                        factors_row: value_heads * of_head,
                        factors_of: head * of_head..(head + 1) * of_head,
                        skip: skip.map_or(0.0, |skip| skip[head]),
                        channels,
                        query: key,
                        key: key_heads * key_dim + key,
                        key_dim,
                        value,
                        out: |token: usize, values: &[f32; LANES]| {
                            let at = (first + token) * shape.value_width();
                            let at = at + head * value_dim + block * LANES;
                            // SAFETY: each task and block has its own columns of the output.
                            unsafe { out.piece(at, LANES) }.copy_from_slice(values);
                        },
                    };
                    dispatch(cpu, steps);
                }
            }
        });
    }
}
