//! The selective scan of Mamba (Gu and Dao 2023): every value has a state of its own.

use forebay_ops::{DeltaRule, DeltaShape};

use super::{DeltaInputs, DeltaVectors, StateRun, check_places, softplus};
use crate::buffer::SharedSlice;
use crate::cpu::Cpu;
use crate::ops::times_logistic;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Vectors of values that a task takes.
const VECTORS_OF_TASK: usize = 8;

impl Cpu {
    /// Computes the convolution of [`DeltaRule::Mamba`] and its activation: `mixed` `[tokens, values]`. Reads and writes the part
    /// of the states that belongs to it.
    ///
    /// # Panics
    /// Panics if a length does not fit the shape, or if two states overlap.
    pub fn mix_values(
        &self,
        shape: &DeltaShape,
        weights: &DeltaVectors<'_>,
        inputs: &DeltaInputs<'_>,
        runs: &[StateRun],
        states: &mut [f32],
        mixed: &mut [f32],
    ) {
        super::shape::check(shape);
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        let values = shape.value_width();
        let lengths = [
            (weights.convolution.len(), shape.convolution * values),
            (weights.convolution_bias.map_or(values, <[f32]>::len), values),
            (inputs.v.values.len(), tokens * inputs.v.row),
            (mixed.len(), tokens * values),
        ];
        let fits = lengths.iter().all(|(found, wanted)| found == wanted);
        assert!(fits && shape.rule == DeltaRule::Mamba, "mix_values: {lengths:?}");
        check_places(runs, shape.state_floats(), states.len());
        self.convolve(shape, weights, inputs, runs, states, mixed);
    }

    /// Computes the recurrence of [`DeltaRule::Mamba`] over the tokens of `runs`, times the activated gates: `out`
    /// `[tokens, values]`. For each value `x` and number `n` of its state: `h[n] = exp(d A[n]) h[n] + d B[n] x`, and the output is
    /// `sum(C[n] h[n]) + D x`, where `d` is the softplus of the step. `mixed` is what [`Cpu::mix_values`] gave. Of `inputs`, `a` has the
    /// steps of all values, `k` and `q` have B and C, and `z` has the gates.
    ///
    /// # Panics
    /// Panics if a length does not fit the shape, or if two states overlap.
    #[expect(
        clippy::too_many_arguments,
        reason = "inputs, weights, states and outputs of one step"
    )]
    pub fn selective_scan(
        &self,
        shape: &DeltaShape,
        weights: &DeltaVectors<'_>,
        inputs: &DeltaInputs<'_>,
        mixed: &[f32],
        runs: &[StateRun],
        states: &mut [f32],
        out: &mut [f32],
    ) {
        super::shape::check(shape);
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        let (values, key_dim) = (shape.value_width(), shape.key_dim);
        let lengths = [
            (weights.decay.len(), values * key_dim),
            (weights.step.len(), values),
            (weights.skip.map_or(values, <[f32]>::len), values),
            (mixed.len(), tokens * values),
            (out.len(), tokens * values),
        ];
        let products = [inputs.a, inputs.k, inputs.q, inputs.z];
        let fits = lengths.iter().all(|(found, wanted)| found == wanted)
            && products.iter().all(|of| of.values.len() == tokens * of.row);
        assert!(fits && shape.rule == DeltaRule::Mamba, "selective_scan: {lengths:?}");
        check_places(runs, shape.state_floats(), states.len());
        let (states, out) = (SharedSlice::new(states), SharedSlice::new(out));
        let vectors = values / LANES;
        self.pool.for_each_chunk(runs.len() * vectors, VECTORS_OF_TASK, |tasks| {
            for task in tasks {
                let (index, first) = (task / vectors, task % vectors * LANES);
                let run = &runs[index];
                let before: usize = runs[..index].iter().map(|run| run.tokens).sum();
                let place = |state: usize| state + shape.tail_floats() + first * key_dim;
                // SAFETY: each task has another run or other values, and no states overlap (`check_places`).
                let state = unsafe { states.piece(place(run.to), LANES * key_dim) };
                match run.from {
                    Some(from) => {
                        // SAFETY: as above. No other task has this run and these values.
                        let from = unsafe { states.piece(place(from), LANES * key_dim) };
                        state.copy_from_slice(from);
                    }
                    None => state.fill(0.0),
                }
                let steps = ValueSteps {
                    state,
                    rates: &weights.decay[first * key_dim..][..LANES * key_dim],
                    inputs,
                    mixed: &mixed[before * values..][..run.tokens * values],
                    values,
                    bias: weights.step[first..].first_chunk().expect("whole vectors"),
                    skip: weights
                        .skip
                        .map(|skip| skip[first..].first_chunk().expect("whole vectors")),
                    first,
                    before,
                    key_dim,
                    out: |token: usize, of: &[f32; LANES]| {
                        // SAFETY: each task has other tokens or other columns of the output.
                        let to = unsafe { out.piece((before + token) * values + first, LANES) };
                        to.copy_from_slice(of);
                    },
                };
                dispatch(self, steps);
            }
        });
    }
}

/// The steps of all tokens of a run for eight values.
struct ValueSteps<'a, F> {
    /// `[8, key_dim]`
    state: &'a mut [f32],
    /// Rates of decay `[8, key_dim]`.
    rates: &'a [f32],
    inputs: &'a DeltaInputs<'a>,
    /// All values of the run's tokens `[tokens, values]`.
    mixed: &'a [f32],
    values: usize,
    /// Number that is added to each value's step.
    bias: &'a [f32; LANES],
    skip: Option<&'a [f32; LANES]>,
    /// Number of the first of the eight values, and the row of the run's first token.
    first: usize,
    before: usize,
    key_dim: usize,
    /// Takes the number of a token and its output.
    out: F,
}

impl<F: Fn(usize, &[f32; LANES])> Kernel for ValueSteps<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ValueSteps { state, rates, inputs, first, before, key_dim, .. } = self;
        let columns = inputs.columns;
        for (token, row) in self.mixed.chunks_exact(self.values).enumerate() {
            let eight = |row: &[f32], column: usize| -> [f32; LANES] {
                *row[column..].first_chunk().expect("values are whole vectors")
            };
            let x = eight(row, first);
            let mut steps = eight(inputs.a.of(before + token), columns.a.first + first);
            steps.iter_mut().zip(self.bias).for_each(|(step, bias)| *step = softplus(*step + bias));
            let keys = &inputs.k.of(before + token)[columns.k.first..][..key_dim];
            let queries = &inputs.q.of(before + token)[columns.q.first..][..key_dim];
            let mut sums = [simd.splat(0.0); LANES];
            let both = keys.as_chunks::<LANES>().0.iter().zip(queries.as_chunks::<LANES>().0);
            for (index, (key, query)) in both.enumerate() {
                let (key, query) = (simd.load(key), simd.load(query));
                for (lane, sum) in sums.iter_mut().enumerate() {
                    let at = lane * key_dim + index * LANES;
                    let rate = rates[at..].first_chunk().expect("keys are whole vectors");
                    let state = state[at..].first_chunk_mut().expect("keys are whole vectors");
                    let decay = simd.exp(simd.mul(simd.splat(steps[lane]), simd.load(rate)));
                    let decayed = simd.mul(simd.load(state), decay);
                    let new = simd.mul_add(simd.splat(steps[lane] * x[lane]), key, decayed);
                    simd.store(new, state);
                    *sum = simd.mul_add(new, query, *sum);
                }
            }
            let mut y = simd.sums(sums);
            if let Some(skip) = self.skip {
                y = simd.mul_add(simd.load(&x), simd.load(skip), y);
            }
            let gate = simd.load(&eight(inputs.z.of(before + token), columns.z.first + first));
            let mut out = [0.0; LANES];
            simd.store(simd.mul(y, times_logistic(simd, gate, gate)), &mut out);
            (self.out)(token, &out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DeltaColumns, ProductRows};
    use super::*;
    use crate::testing::{cpus, random};
    use forebay_ops::HeadColumns;

    /// A layer of random numbers. Its products are values and gates together, steps, and keys and queries together.
    struct Layer {
        shape: DeltaShape,
        has_skip: bool,
        convolution: Vec<f32>,
        bias: Vec<f32>,
        decay: Vec<f32>,
        step: Vec<f32>,
        skip: Vec<f32>,
    }

    /// Columns of the product of keys and queries that are before the keys.
    const BEFORE_KEYS: usize = 3;

    impl Layer {
        fn new(values: usize, key_dim: usize, convolution: usize, has_skip: bool) -> Layer {
            let shape = DeltaShape {
                rule: DeltaRule::Mamba,
                key_heads: 1,
                value_heads: 1,
                key_dim,
                value_dim: values,
                convolution,
                tiled: false,
                norm_width: 0,
                sigmoid_gate: false,
                decay_bound: 0.0,
                share_scale: 1.0,
            };
            let decay = random(71, values * key_dim);
            Layer {
                shape,
                has_skip,
                convolution: random(72, convolution * values),
                bias: random(73, values),
                decay: decay.iter().map(|x| -0.05 - x.abs()).collect(),
                step: random(74, values),
                skip: random(75, values),
            }
        }

        fn widths(&self) -> [usize; 3] {
            let values = self.shape.value_width();
            [2 * values, values, BEFORE_KEYS + 2 * self.shape.key_dim]
        }

        fn products(&self, tokens: usize) -> [Vec<f32>; 3] {
            [0, 1, 2].map(|index| random(80 + index as u64, tokens * self.widths()[index]))
        }

        /// Computes the runs, whose tokens are rows of `products` from `first` on.
        fn run(
            &self,
            cpu: &Cpu,
            products: &[Vec<f32>; 3],
            first: usize,
            runs: &[StateRun],
            states: &mut [f32],
        ) -> Vec<f32> {
            let tokens: usize = runs.iter().map(|run| run.tokens).sum();
            let [both, a, keys] = [0, 1, 2].map(|index| {
                let row = self.widths()[index];
                ProductRows { values: &products[index][first * row..][..tokens * row], row }
            });
            let (values, key_dim) = (self.shape.value_width(), self.shape.key_dim);
            let columns = |first| HeadColumns { first, step: values };
            let inputs = DeltaInputs {
                columns: DeltaColumns {
                    q: columns(BEFORE_KEYS + key_dim),
                    k: columns(BEFORE_KEYS),
                    v: columns(0),
                    z: columns(values),
                    b: columns(0),
                    a: columns(0),
                },
                q: keys,
                k: keys,
                v: both,
                z: both,
                b: a,
                a,
            };
            let weights = DeltaVectors {
                convolution: &self.convolution,
                convolution_bias: Some(&self.bias),
                decay: &self.decay,
                step: &self.step,
                skip: self.has_skip.then_some(&self.skip[..]),
                norm: &[],
                epsilon: 1e-6,
            };
            let mut mixed = vec![f32::NAN; tokens * values];
            cpu.mix_values(&self.shape, &weights, &inputs, runs, states, &mut mixed);
            let mut out = vec![f32::NAN; tokens * values];
            cpu.selective_scan(&self.shape, &weights, &inputs, &mixed, runs, states, &mut out);
            out
        }

        /// Computes the formulas of the paper in double precision, value by value.
        fn reference(&self, products: &[Vec<f32>; 3], tokens: usize) -> Vec<f64> {
            let DeltaShape { key_dim, value_dim: values, convolution: seen, .. } = self.shape;
            let [both, steps, keys] = self.widths();
            let silu = |x: f64| x / (1.0 + (-x).exp());
            let mut out = vec![0.0; tokens * values];
            for value in 0..values {
                let mut state = vec![0.0; key_dim];
                for token in 0..tokens {
                    let terms = (0..seen.min(token + 1)).map(|back| {
                        let x = products[0][(token - back) * both + value];
                        f64::from(x)
                            * f64::from(self.convolution[(seen - 1 - back) * values + value])
                    });
                    let x = silu(terms.sum::<f64>() + f64::from(self.bias[value]));
                    let raw = f64::from(products[1][token * steps + value]);
                    let step = (raw + f64::from(self.step[value])).exp().ln_1p();
                    let key = &products[2][token * keys + BEFORE_KEYS..];
                    let mut y = if self.has_skip { f64::from(self.skip[value]) * x } else { 0.0 };
                    for (n, state) in state.iter_mut().enumerate() {
                        let rate = f64::from(self.decay[value * key_dim + n]);
                        *state = (step * rate).exp() * *state + step * f64::from(key[n]) * x;
                        y += f64::from(key[key_dim + n]) * *state;
                    }
                    let gate = f64::from(products[0][token * both + values + value]);
                    out[token * values + value] = y * silu(gate);
                }
            }
            out
        }
    }

    fn layers() -> [Layer; 4] {
        [
            Layer::new(8, 8, 2, true),
            Layer::new(136, 16, 4, true),
            Layer::new(16, 64, 3, false),
            Layer::new(72, 24, 4, true),
        ]
    }

    #[test]
    fn agrees_with_the_formulas_in_double_precision() {
        for layer in layers() {
            let tokens = 21;
            let products = layer.products(tokens);
            let expected = layer.reference(&products, tokens);
            for cpu in cpus() {
                let mut states = vec![f32::NAN; layer.shape.state_floats()];
                let run = StateRun { tokens, from: None, to: 0 };
                let out = layer.run(&cpu, &products, 0, &[run], &mut states);
                for (index, (out, expected)) in out.iter().zip(&expected).enumerate() {
                    let error = (f64::from(*out) - expected).abs();
                    assert!(error < 2e-4 * (1.0 + expected.abs()), "{index}: {out}, {expected}");
                }
                assert!(states.iter().all(|x| x.is_finite()));
            }
        }
    }

    #[test]
    fn cuts_and_neighbours_change_no_bit() {
        for layer in layers() {
            let tokens = 23;
            let products = layer.products(tokens);
            let floats = layer.shape.state_floats();
            for cpu in cpus() {
                let mut whole = vec![0.0; floats];
                let run = StateRun { tokens, from: None, to: 0 };
                let expected = layer.run(&cpu, &products, 0, &[run], &mut whole);
                for pieces in [vec![1; 23], vec![2, 1, 16, 1, 3], vec![3, 20]] {
                    let mut states = vec![0.0; 2 * floats];
                    let (mut done, mut out) = (0, Vec::new());
                    for (index, tokens) in pieces.iter().copied().enumerate() {
                        let (from, to) = ((index + 1) % 2 * floats, index % 2 * floats);
                        let from = (index > 0).then_some(from);
                        let run = StateRun { tokens, from, to };
                        out.extend(layer.run(&cpu, &products, done, &[run], &mut states));
                        done += tokens;
                    }
                    assert_eq!(out, expected, "{pieces:?}");
                    let last = (pieces.len() + 1) % 2 * floats;
                    assert_eq!(states[last..][..floats], whole, "{pieces:?}");
                }
                // Two sequences together: the second one begins at row 14.
                let mut states = vec![0.0; 2 * floats];
                let runs = [
                    StateRun { tokens: 14, from: None, to: floats },
                    StateRun { tokens: 9, from: None, to: 0 },
                ];
                let together = layer.run(&cpu, &products, 0, &runs, &mut states);
                let width = layer.shape.value_width();
                assert_eq!(together[..14 * width], expected[..14 * width]);
                let mut alone = vec![0.0; floats];
                let run = StateRun { tokens: 9, from: None, to: 0 };
                let second = layer.run(&cpu, &products, 14, &[run], &mut alone);
                assert_eq!(together[14 * width..], second);
                assert_eq!(states[..floats], alone);
            }
        }
    }
}
