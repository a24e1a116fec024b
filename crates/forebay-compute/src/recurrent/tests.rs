use super::*;
use crate::testing::{cpus, random};

/// Products and vectors of a layer, as random numbers.
struct Layer {
    shape: DeltaShape,
    columns: DeltaColumns,
    widths: [usize; 4],
    vectors: [Vec<f32>; 4],
}

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
            [shape.channels(), shape.value_width(), shape.value_heads, shape.value_heads],
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
            [qkvz, qkvz, ba, ba],
        )
    }

    fn with(shape: DeltaShape, columns: DeltaColumns, widths: [usize; 4]) -> Layer {
        let decay = random(31, shape.value_heads).iter().map(|x| -0.05 - x.abs()).collect();
        let vectors = [
            random(30, shape.convolution * shape.channels()),
            decay,
            random(32, shape.value_heads),
            random(33, shape.value_dim),
        ];
        Layer { shape, columns, widths, vectors }
    }

    fn products(&self, seed: u64, tokens: usize) -> [Vec<f32>; 4] {
        let same = self.widths[0] == self.widths[1];
        [0, 1, 2, 3].map(|index| {
            let of = if same { index / 2 * 2 } else { index };
            random(seed + of as u64, tokens * self.widths[of])
        })
    }

    /// Computes the runs, whose tokens are rows of `products` from `first` on.
    fn run(
        &self,
        cpu: &Cpu,
        products: &[Vec<f32>; 4],
        first: usize,
        runs: &[StateRun],
        states: &mut [f32],
    ) -> Vec<f32> {
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        let rows = |index: usize| ProductRows {
            values: &products[index][first * self.widths[index]..][..tokens * self.widths[index]],
            row: self.widths[index],
        };
        let inputs =
            DeltaInputs { columns: self.columns, qkv: rows(0), z: rows(1), b: rows(2), a: rows(3) };
        let [convolution, decay, step, norm] = &self.vectors;
        let weights = DeltaVectors { convolution, decay, step, norm, epsilon: 1e-6 };
        let mut scratch = vec![f32::NAN; tokens * self.shape.scratch_floats()];
        let mut out = vec![f32::NAN; tokens * self.shape.value_width()];
        cpu.gated_delta(&self.shape, &weights, &inputs, runs, states, &mut scratch, &mut out);
        out
    }

    /// Computes the formulas of the paper in double precision, token by token.
    fn reference(&self, products: &[Vec<f32>; 4], tokens: usize) -> Vec<f64> {
        let shape = &self.shape;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = *shape;
        let per_key = value_heads / key_heads;
        let at = |part: usize, token: usize, column: usize| {
            f64::from(products[part][token * self.widths[part] + column])
        };
        let value_column = |of: HeadColumns, head: usize, width: usize, i: usize| -> usize {
            of.first + head / per_key * of.step + head % per_key * width + i
        };
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let convolved = |token: usize, channel: usize, column: usize| {
            let seen = shape.convolution;
            let terms = (0..seen).filter(|back| *back <= token).map(|back| {
                let weight = self.vectors[0][(seen - 1 - back) * shape.channels() + channel];
                f64::from(weight) * at(0, token - back, column)
            });
            silu(terms.sum())
        };
        let unit = |x: Vec<f64>| {
            let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
            x.into_iter().map(|x| x / length).collect::<Vec<f64>>()
        };
        let mut out = vec![0.0; tokens * value_heads * value_dim];
        for head in 0..value_heads {
            let key_head = if shape.tiled { head % key_heads } else { head / per_key };
            let mut state = vec![0.0; key_dim * value_dim];
            for token in 0..tokens {
                let keys = |of: HeadColumns, base: usize| {
                    let column = of.first + key_head * of.step;
                    let x = (0..key_dim)
                        .map(|i| convolved(token, base + key_head * key_dim + i, column + i));
                    unit(x.collect())
                };
                let q: Vec<f64> = keys(self.columns.q, 0);
                let k = keys(self.columns.k, key_heads * key_dim);
                let a = at(3, token, value_column(self.columns.a, head, 1, 0));
                let a = a + f64::from(self.vectors[2][head]);
                let decay = (f64::from(self.vectors[1][head]) * a.exp().ln_1p()).exp();
                let beta = at(2, token, value_column(self.columns.b, head, 1, 0));
                let beta = 1.0 / (1.0 + (-beta).exp());
                state.iter_mut().for_each(|x| *x *= decay);
                let mut o = vec![0.0; value_dim];
                for (i, o) in o.iter_mut().enumerate() {
                    let channel = 2 * key_heads * key_dim + head * value_dim + i;
                    let column = value_column(self.columns.v, head, value_dim, i);
                    let v = convolved(token, channel, column);
                    let row = &mut state[i * key_dim..][..key_dim];
                    let held: f64 = row.iter().zip(&k).map(|(s, k)| s * k).sum();
                    let change = beta * (v - held);
                    row.iter_mut().zip(&k).for_each(|(s, k)| *s += change * k);
                    *o = row.iter().zip(&q).map(|(s, q)| s * q).sum::<f64>()
                        / (key_dim as f64).sqrt();
                }
                let mean = o.iter().map(|x| x * x).sum::<f64>() / value_dim as f64;
                for (i, o) in o.iter().enumerate() {
                    let z = at(1, token, value_column(self.columns.z, head, value_dim, i));
                    let normed = o / (mean + 1e-6).sqrt() * f64::from(self.vectors[3][i]);
                    out[(token * value_heads + head) * value_dim + i] = normed * silu(z);
                }
            }
        }
        out
    }
}

fn shape(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> DeltaShape {
    DeltaShape { key_heads, value_heads, key_dim, value_dim, convolution: 4, tiled: false }
}

fn layers() -> Vec<Layer> {
    vec![
        Layer::separate(shape(2, 4, 16, 16)),
        Layer::separate(DeltaShape { tiled: true, ..shape(2, 6, 24, 8) }),
        Layer::separate(DeltaShape { convolution: 2, ..shape(1, 1, 8, 40) }),
        Layer::by_key_head(shape(2, 4, 16, 32)),
        Layer::by_key_head(shape(4, 4, 128, 128)),
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
#[should_panic(expected = "gated_delta")]
fn a_state_that_another_run_reads_cannot_be_written() {
    let layer = &layers()[0];
    let products = layer.products(60, 2);
    let mut states = vec![0.0; 2 * layer.shape.state_floats()];
    let at = layer.shape.state_floats();
    let runs =
        [StateRun { tokens: 1, from: Some(at), to: 0 }, StateRun { tokens: 1, from: None, to: at }];
    layer.run(&cpus()[0], &products, 0, &runs, &mut states);
}
