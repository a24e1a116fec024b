use forebay_ops::{DeltaRule, DeltaShape, HeadColumns};

use super::*;
use crate::testing::{cpus, random};

/// Products and vectors of a layer, as random numbers.
struct Layer {
    shape: DeltaShape,
    columns: DeltaColumns,
    /// Columns of the products that hold queries, keys and values, then gates, shares and steps.
    widths: [usize; 6],
    vectors: [Vec<f32>; 4],
    /// Bias of the convolution, and factors of the values that are added to the output.
    extra: Option<[Vec<f32>; 2]>,
}

/// Numbers of products.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const Z: usize = 3;
const B: usize = 4;
const A: usize = 5;

impl Layer {
    /// Products of which each has one part.
    fn separate(shape: DeltaShape) -> Layer {
        let keys = shape.key_heads * shape.key_dim;
        let values = shape.values_per_key() * shape.value_dim;
        let per_key = shape.values_per_key();
        let columns = |first, step| HeadColumns { first, step };
        Layer::with(
            shape,
            DeltaColumns {
                q: columns(0, shape.key_dim),
                k: columns(keys, shape.key_dim),
                v: columns(2 * keys, values),
                z: columns(0, values),
                b: columns(0, per_key),
                a: columns(0, per_key),
            },
            [
                shape.channels(),
                shape.channels(),
                shape.channels(),
                shape.value_width(),
                shape.value_heads,
                shape.value_heads,
            ],
        )
    }

    /// One product each for queries, keys, values, gates, shares and steps.
    fn apart(shape: DeltaShape) -> Layer {
        let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_width());
        let (of_key, decays) = (shape.values_per_key(), shape.decay_width());
        let columns = |step| HeadColumns { first: 0, step };
        Layer::with(
            shape,
            DeltaColumns {
                q: columns(shape.key_dim),
                k: columns(shape.key_dim),
                v: columns(of_key * shape.value_dim),
                z: columns(of_key * shape.value_dim),
                b: columns(of_key),
                a: columns(of_key * decays),
            },
            [keys, keys, values, values, shape.value_heads, shape.value_heads * decays],
        )
    }

    /// One product for everything, as Mamba-2 orders it: gates, values, keys, queries, steps.
    fn together(shape: DeltaShape) -> Layer {
        let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_width());
        let per_key = shape.values_per_key();
        let columns = |first, step| HeadColumns { first, step };
        let width = shape.channels() + values + shape.value_heads;
        Layer::with(
            shape,
            DeltaColumns {
                q: columns(2 * values + keys, shape.key_dim),
                k: columns(2 * values, shape.key_dim),
                v: columns(values, per_key * shape.value_dim),
                z: columns(0, per_key * shape.value_dim),
                b: columns(0, per_key),
                a: columns(2 * values + 2 * keys, per_key),
            },
            [width; 6],
        )
    }

    /// Products with all parts of a key head together.
    fn by_key_head(shape: DeltaShape) -> Layer {
        let values = shape.values_per_key() * shape.value_dim;
        let (dim, step) = (shape.key_dim, 2 * shape.key_dim + 2 * values);
        let columns = |first, step| HeadColumns { first, step };
        let (qkvz, ba) = (shape.key_heads * step, 2 * shape.value_heads);
        let per_key = shape.values_per_key();
        Layer::with(
            shape,
            DeltaColumns {
                q: columns(0, step),
                k: columns(dim, step),
                v: columns(2 * dim, step),
                z: columns(2 * dim + values, step),
                b: columns(0, 2 * per_key),
                a: columns(per_key, 2 * per_key),
            },
            [qkvz, qkvz, qkvz, qkvz, ba, ba],
        )
    }

    /// One product for a gated short convolution: factors of the values, factors of the output, values.
    fn short_convolution(convolution: usize, channels: usize) -> Layer {
        let of = DeltaShape {
            rule: DeltaRule::ShortConvolution,
            convolution,
            ..shape(1, 1, 0, channels)
        };
        let columns = |first| HeadColumns { first, step: channels };
        let all = DeltaColumns {
            q: columns(0),
            k: columns(0),
            v: columns(2 * channels),
            z: columns(channels),
            b: columns(0),
            a: columns(0),
        };
        Layer::with(of, all, [3 * channels; 6])
    }

    fn with(shape: DeltaShape, columns: DeltaColumns, widths: [usize; 6]) -> Layer {
        let decay = random(31, shape.value_heads).iter().map(|x| -0.05 - x.abs()).collect();
        let vectors = [
            random(30, shape.convolution * shape.channels()),
            decay,
            random(32, shape.steps()),
            random(33, shape.norm_weights()),
        ];
        let extra = (shape.rule == DeltaRule::Mamba2)
            .then(|| [random(34, shape.channels()), random(35, shape.value_heads)]);
        Layer { shape, columns, widths, vectors, extra }
    }

    /// Products of the same width have the same values, so they may be one product.
    fn products(&self, seed: u64, tokens: usize) -> [Vec<f32>; 6] {
        [0, 1, 2, 3, 4, 5].map(|index| {
            let of = self.widths.iter().position(|width| *width == self.widths[index]);
            random(seed + of.expect("it is there") as u64, tokens * self.widths[index])
        })
    }

    /// Computes the runs, whose tokens are rows of `products` from `first` on.
    fn run(
        &self,
        cpu: &Cpu,
        products: &[Vec<f32>; 6],
        first: usize,
        runs: &[StateRun],
        states: &mut [f32],
    ) -> Vec<f32> {
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        let rows = |index: usize| ProductRows {
            values: &products[index][first * self.widths[index]..][..tokens * self.widths[index]],
            row: self.widths[index],
        };
        let inputs = DeltaInputs {
            columns: self.columns,
            q: rows(Q),
            k: rows(K),
            v: rows(V),
            z: rows(Z),
            b: rows(B),
            a: rows(A),
        };
        let [convolution, decay, step, norm] = &self.vectors;
        let extra = self.extra.as_ref();
        let weights = DeltaVectors {
            convolution,
            convolution_bias: extra.map(|[bias, _]| &bias[..]),
            decay,
            step,
            skip: extra.map(|[_, skip]| &skip[..]),
            norm,
            epsilon: 1e-6,
        };
        let mut scratch = vec![f32::NAN; tokens * self.shape.scratch_floats()];
        let mut out = vec![f32::NAN; tokens * self.shape.value_width()];
        cpu.gated_delta(&self.shape, &weights, &inputs, runs, states, &mut scratch, &mut out);
        out
    }

    /// Computes a gated short convolution in double precision.
    fn short_reference(&self, products: &[Vec<f32>; 6], tokens: usize) -> Vec<f64> {
        let (seen, channels) = (self.shape.convolution, self.shape.channels());
        let at =
            |token: usize, column: usize| f64::from(products[V][token * 3 * channels + column]);
        let value = |index: usize| {
            let (token, channel) = (index / channels, index % channels);
            let terms = (0..seen.min(token + 1)).map(|back| {
                let weight = f64::from(self.vectors[0][(seen - 1 - back) * channels + channel]);
                weight * at(token - back, channel) * at(token - back, 2 * channels + channel)
            });
            terms.sum::<f64>() * at(token, channels + channel)
        };
        (0..tokens * channels).map(value).collect()
    }

    /// Computes the formulas of the papers in double precision, token by token.
    fn reference(&self, products: &[Vec<f32>; 6], tokens: usize) -> Vec<f64> {
        let shape = &self.shape;
        let DeltaShape { rule, key_heads, value_heads, key_dim, value_dim, .. } = *shape;
        let per_key = value_heads / key_heads;
        if rule == DeltaRule::ShortConvolution {
            return self.short_reference(products, tokens);
        }
        let at = |part: usize, token: usize, column: usize| {
            f64::from(products[part][token * self.widths[part] + column])
        };
        let value_column = |of: HeadColumns, head: usize, width: usize, i: usize| -> usize {
            of.first + head / per_key * of.step + head % per_key * width + i
        };
        let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
        let silu = |x: f64| x * logistic(x);
        let convolved = |part: usize, token: usize, channel: usize, column: usize| {
            let seen = shape.convolution;
            let terms = (0..seen).filter(|back| *back <= token).map(|back| {
                let weight = self.vectors[0][(seen - 1 - back) * shape.channels() + channel];
                f64::from(weight) * at(part, token - back, column)
            });
            let bias = self.extra.as_ref().map_or(0.0, |[bias, _]| f64::from(bias[channel]));
            silu(bias + terms.sum::<f64>())
        };
        let unit = |x: Vec<f64>| {
            let length = match rule {
                DeltaRule::Mamba2 | DeltaRule::Lightning => 1.0,
                _ => (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt(),
            };
            x.into_iter().map(|x| x / length).collect::<Vec<f64>>()
        };
        let mut out = vec![0.0; tokens * value_heads * value_dim];
        for head in 0..value_heads {
            let key_head = if shape.tiled { head % key_heads } else { head / per_key };
            let mut state = vec![0.0; key_dim * value_dim];
            for token in 0..tokens {
                let keys = |part: usize, of: HeadColumns, base: usize| {
                    let column = of.first + key_head * of.step;
                    let x = (0..key_dim)
                        .map(|i| convolved(part, token, base + key_head * key_dim + i, column + i));
                    unit(x.collect())
                };
                let q: Vec<f64> = keys(Q, self.columns.q, 0);
                let k = keys(K, self.columns.k, key_heads * key_dim);
                let rate = f64::from(self.vectors[1][head]);
                let steps: Vec<f64> = (0..shape.decay_width())
                    .map(|i| {
                        if rule == DeltaRule::Lightning {
                            return 1.0;
                        }
                        let a = value_column(self.columns.a, head, shape.decay_width(), i);
                        let bias = self.vectors[2][head * shape.decay_width() + i];
                        let raw = at(A, token, a) + f64::from(bias);
                        // A bounded decay is the bound times the logistic function of the step times the rate.
                        match shape.decay_bound {
                            0.0 => raw.exp().ln_1p(),
                            bound => f64::from(bound) * logistic(-rate * raw) / rate,
                        }
                    })
                    .collect();
                let beta = logistic(at(B, token, value_column(self.columns.b, head, 1, 0)));
                let beta = f64::from(shape.share_scale) * beta;
                for (i, x) in state.iter_mut().enumerate() {
                    *x *= (rate * steps[i % key_dim % steps.len()]).exp();
                }
                for i in 0..value_dim {
                    let channel = 2 * key_heads * key_dim + head * value_dim + i;
                    let column = value_column(self.columns.v, head, value_dim, i);
                    let v = convolved(V, token, channel, column);
                    let row = &mut state[i * key_dim..][..key_dim];
                    let held: f64 = row.iter().zip(&k).map(|(s, k)| s * k).sum();
                    let change = match rule {
                        DeltaRule::Mamba2 | DeltaRule::Lightning => steps[0] * v,
                        _ => beta * (v - held),
                    };
                    row.iter_mut().zip(&k).for_each(|(s, k)| *s += change * k);
                    let read = row.iter().zip(&q).map(|(s, q)| s * q).sum::<f64>();
                    out[(token * value_heads + head) * value_dim + i] = match &self.extra {
                        Some([_, skip]) => read + f64::from(skip[head]) * v,
                        None if rule == DeltaRule::Lightning => read,
                        None => read / (key_dim as f64).sqrt(),
                    };
                }
            }
        }
        let width = value_heads * value_dim;
        let gate = |index: usize| {
            let (token, head, i) = (index / width, index % width / value_dim, index % value_dim);
            at(Z, token, value_column(self.columns.z, head, value_dim, i))
        };
        if rule == DeltaRule::Mamba2 {
            out.iter_mut().enumerate().for_each(|(index, x)| *x *= silu(gate(index)));
        }
        let groups = match shape.norm_width {
            0 => out[..0].chunks_exact_mut(1),
            width => out.chunks_exact_mut(width),
        };
        for (group, values) in groups.enumerate() {
            let mean = values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
            for (i, x) in values.iter_mut().enumerate() {
                let weight = (group * shape.norm_width + i) % shape.norm_weights();
                *x = *x / (mean + 1e-6).sqrt() * f64::from(self.vectors[3][weight]);
            }
        }
        for (index, x) in out.iter_mut().enumerate() {
            match rule {
                DeltaRule::GatedDelta | DeltaRule::KimiDelta | DeltaRule::Lightning => {
                    let gate = gate(index);
                    *x *= if shape.sigmoid_gate { logistic(gate) } else { silu(gate) };
                }
                DeltaRule::Mamba2 | DeltaRule::Mamba | DeltaRule::ShortConvolution => {}
            }
        }
        out
    }
}

fn shape(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaShape {
    DeltaShape {
        rule: DeltaRule::GatedDelta,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        convolution: 4,
        tiled: false,
        norm_width: value_dim,
        sigmoid_gate: false,
        decay_bound: 0.0,
        share_scale: 1.0,
    }
}

fn layers() -> Vec<Layer> {
    let kimi = |heads, dim| DeltaShape {
        rule: DeltaRule::KimiDelta,
        sigmoid_gate: true,
        ..shape(heads, heads, dim, dim)
    };
    let mamba = |groups: usize, heads: usize, key_dim, value_dim: usize| DeltaShape {
        rule: DeltaRule::Mamba2,
        norm_width: heads / groups * value_dim,
        ..shape(groups, heads, key_dim, value_dim)
    };
    let lightning = |heads: usize, dim: usize| DeltaShape {
        rule: DeltaRule::Lightning,
        convolution: 1,
        norm_width: heads * dim,
        sigmoid_gate: true,
        ..shape(heads, heads, dim, dim)
    };
    vec![
        Layer::separate(shape(2, 4, 16, 16)),
        Layer::separate(DeltaShape { tiled: true, ..shape(2, 6, 24, 8) }),
        Layer::separate(DeltaShape { convolution: 2, ..shape(1, 1, 8, 40) }),
        Layer::separate(DeltaShape { sigmoid_gate: true, ..shape(2, 4, 16, 8) }),
        Layer::apart(DeltaShape { share_scale: 2.0, ..shape(2, 4, 16, 32) }),
        Layer::by_key_head(shape(2, 4, 16, 32)),
        Layer::by_key_head(shape(4, 4, 128, 128)),
        Layer::apart(kimi(4, 16)),
        Layer::apart(DeltaShape { convolution: 3, ..kimi(2, 128) }),
        Layer::apart(DeltaShape { decay_bound: -5.0, ..kimi(2, 24) }),
        Layer::together(mamba(2, 8, 32, 16)),
        Layer::together(mamba(1, 3, 128, 64)),
        Layer::together(DeltaShape { norm_width: 24, ..mamba(1, 6, 16, 8) }),
        Layer::together(DeltaShape { norm_width: 0, ..mamba(2, 4, 16, 24) }),
        Layer::by_key_head(lightning(3, 16)),
        Layer::apart(lightning(2, 128)),
        Layer::short_convolution(3, 40),
        Layer::short_convolution(2, 8),
    ]
}

#[test]
fn agrees_with_the_formulas_in_double_precision() {
    for layer in layers() {
        let tokens = 21;
        let products = layer.products(40, tokens);
        let expected = layer.reference(&products, tokens);
        let floats = layer.shape.state_floats();
        for cpu in cpus() {
            let mut states = vec![f32::NAN; floats];
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
        let tokens = 37;
        let products = layer.products(50, tokens);
        let floats = layer.shape.state_floats();
        for cpu in cpus() {
            let mut whole = vec![0.0; floats];
            let run = StateRun { tokens, from: None, to: 0 };
            let expected = layer.run(&cpu, &products, 0, &[run], &mut whole);
            // Shorter than the convolution, one by one, and long pieces.
            for pieces in [vec![1; 37], vec![2, 1, 16, 1, 17], vec![36, 1], vec![3, 34]] {
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
            // Two sequences together: the second one begins at row 20.
            let mut states = vec![0.0; 2 * floats];
            let runs = [
                StateRun { tokens: 20, from: None, to: floats },
                StateRun { tokens: 17, from: None, to: 0 },
            ];
            let together = layer.run(&cpu, &products, 0, &runs, &mut states);
            let width = layer.shape.value_width();
            assert_eq!(together[..20 * width], expected[..20 * width]);
            let mut alone = vec![0.0; floats];
            let run = StateRun { tokens: 17, from: None, to: 0 };
            let second = layer.run(&cpu, &products, 20, &[run], &mut alone);
            assert_eq!(together[20 * width..], second);
            assert_eq!(states[..floats], alone);
        }
    }
}

#[test]
#[should_panic(expected = "states of")]
fn a_state_that_another_run_reads_cannot_be_written() {
    let layer = &layers()[0];
    let products = layer.products(60, 2);
    let mut states = vec![0.0; 2 * layer.shape.state_floats()];
    let at = layer.shape.state_floats();
    let runs =
        [StateRun { tokens: 1, from: Some(at), to: 0 }, StateRun { tokens: 1, from: None, to: at }];
    layer.run(&cpus()[0], &products, 0, &runs, &mut states);
}
