//! Root-mean-square normalisation (Zhang and Sennrich 2019, "Root Mean Square Layer
//! Normalization") and layer normalisation (Ba et al. 2016, "Layer Normalization").

use super::share;
use crate::cpu::Cpu;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// How rows are normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormForm {
    /// Rows are divided by their root mean square. The weights are `[n]`.
    RootMeanSquare,
    /// The mean is subtracted before, and a bias is added at the end. The weights are `[2, n]`: factors, then biases.
    Layer,
}

impl NormForm {
    /// Returns the number of weights of a norm of rows of `n` elements.
    pub fn weights(self, n: usize) -> usize {
        match self {
            NormForm::RootMeanSquare => n,
            NormForm::Layer => 2 * n,
        }
    }
}

impl Cpu {
    /// Norms every row of `x` to `out`: as [`Cpu::rms_norm`] or [`Cpu::layer_norm`]. The number of weights gives the length of the
    /// rows ([`NormForm::weights`]).
    ///
    /// # Panics
    /// Panics as these do.
    pub fn norm(&self, form: NormForm, x: &[f32], weights: &[f32], eps: f32, out: &mut [f32]) {
        match form {
            NormForm::RootMeanSquare => self.rms_norm(x, weights, eps, out),
            NormForm::Layer => self.layer_norm(x, weights, eps, out),
        }
    }

    /// Does the same as [`Cpu::norm`] and writes the result over `x`.
    ///
    /// # Panics
    /// Panics as [`Cpu::norm`] does.
    pub fn norm_in_place(&self, form: NormForm, x: &mut [f32], weights: &[f32], eps: f32) {
        match form {
            NormForm::RootMeanSquare => self.rms_norm_in_place(x, weights, eps),
            NormForm::Layer => {
                let (weight, bias) = weight_and_bias(weights);
                let n = row_length(x, weight);
                let share = share(x.len(), n);
                self.pool.for_each_chunk_mut(x, share, |_, _, x| {
                    for x in x.chunks_exact_mut(n) {
                        let mean = row_mean(self, x);
                        x.iter_mut().for_each(|x| *x -= mean);
                        finish_layer_norm(self, x, weight, bias, eps);
                    }
                });
            }
        }
    }

    /// Computes `out[r] = weight * (x[r] - mean) / sqrt(variance + eps) + bias` for every row `r` of `x`. `weights` are `weight` and
    /// then `bias`, each as long as a row.
    ///
    /// # Panics
    /// Panics if there are no weights, their number is odd, `x` is no whole number of rows, or `out` is not as long as `x`.
    pub fn layer_norm(&self, x: &[f32], weights: &[f32], eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "layer_norm: x and out differ in length");
        let (weight, bias) = weight_and_bias(weights);
        let n = row_length(x, weight);
        self.pool.for_each_chunk_mut(out, share(x.len(), n), |_, start, out| {
            for (row, out) in out.chunks_exact_mut(n).enumerate() {
                let x = &x[start + row * n..][..n];
                let mean = row_mean(self, x);
                out.iter_mut().zip(x).for_each(|(out, x)| *out = x - mean);
                finish_layer_norm(self, out, weight, bias, eps);
            }
        });
    }

    /// Computes `out[r] = weight * x[r] / sqrt(mean(x[r]^2) + eps)` for every row `r` of `x`. Rows
    /// are as long as `weight`: `[tokens, hidden]`, or `[tokens, heads, head_dim]` with a weight of
    /// `head_dim` for the per-head norm of queries and keys.
    ///
    /// # Panics
    /// Panics if `weight` is empty, `x` is no whole number of rows, or `out` is not as long as `x`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len(), "rms_norm: x and out differ in length");
        let n = row_length(x, weight);
        self.pool.for_each_chunk_mut(out, share(x.len(), n), |_, start, out| {
            for (row, out) in out.chunks_exact_mut(n).enumerate() {
                let x = &x[start + row * n..][..n];
                let scale = row_scale(self, x, eps);
                for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
                    *out = x * scale * w;
                }
            }
        });
    }

    /// Does the same as [`Cpu::rms_norm`] and writes the result over `x`.
    ///
    /// # Panics
    /// Panics if `weight` is empty or `x` is no whole number of rows.
    pub fn rms_norm_in_place(&self, x: &mut [f32], weight: &[f32], eps: f32) {
        let n = row_length(x, weight);
        let share = share(x.len(), n);
        self.pool.for_each_chunk_mut(x, share, |_, _, x| {
            for x in x.chunks_exact_mut(n) {
                norm_row(self, x, weight, eps);
            }
        });
    }

    /// Normalises `weight.len()` elements from column `first` on of every row of `x` `[rows, row]` in place, as
    /// [`Cpu::rms_norm_in_place`] does. The rest of each row is unchanged. The latent part of
    /// DeepSeek's key rows needs this, and so do the parts of Jamba's compressed rows.
    ///
    /// # Panics
    /// Panics if `weight` is empty, the elements are not in a row, or `x` is no whole number of rows.
    pub fn rms_norm_columns(
        &self,
        x: &mut [f32],
        row: usize,
        first: usize,
        weight: &[f32],
        eps: f32,
    ) {
        let is_inside = first <= row && weight.len() <= row - first;
        assert!(
            !weight.is_empty() && is_inside && x.len().is_multiple_of(row),
            "rms_norm: {} of {row} elements from {first} on, no whole rows",
            weight.len()
        );
        let share = share(x.len(), row);
        self.pool.for_each_chunk_mut(x, share, |_, _, x| {
            for x in x.chunks_exact_mut(row) {
                norm_row(self, &mut x[first..][..weight.len()], weight, eps);
            }
        });
    }

    /// Computes `weight * (x[r] - mean) / sqrt(variance + eps) + bias` for every row `r` of `x`, in place. Rows are as long as
    /// `weight` and `bias`.
    ///
    /// # Panics
    /// Panics if `weight` is empty, `bias` is not as long, or `x` is no whole number of rows.
    pub fn layer_norm_in_place(&self, x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
        let n = row_length(x, weight);
        assert_eq!(bias.len(), n, "layer_norm: the bias is not as long as the weight");
        let share = share(x.len(), n);
        self.pool.for_each_chunk_mut(x, share, |_, _, x| {
            for x in x.chunks_exact_mut(n) {
                let mean = x.iter().sum::<f32>() / n as f32;
                x.iter_mut().for_each(|x| *x -= mean);
                let scale = row_scale(self, x, eps);
                for ((x, w), b) in x.iter_mut().zip(weight).zip(bias) {
                    *x = *x * scale * w + b;
                }
            }
        });
    }
}

/// Normalises one row in place.
pub(crate) fn norm_row(cpu: &Cpu, x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = row_scale(cpu, x, eps);
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

/// Returns the factors and the biases of a layer norm.
fn weight_and_bias(weights: &[f32]) -> (&[f32], &[f32]) {
    assert!(weights.len().is_multiple_of(2), "layer_norm: {} weights", weights.len());
    weights.split_at(weights.len() / 2)
}

/// Norms a row whose mean has been subtracted.
fn finish_layer_norm(cpu: &Cpu, row: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    let scale = row_scale(cpu, row, eps);
    for ((x, w), b) in row.iter_mut().zip(weight).zip(bias) {
        *x = *x * scale * w + b;
    }
}

fn row_mean(cpu: &Cpu, row: &[f32]) -> f32 {
    dispatch(cpu, Sum(row)) / row.len() as f32
}

fn row_length(x: &[f32], weight: &[f32]) -> usize {
    assert!(!weight.is_empty(), "rms_norm: the weight is empty");
    assert_eq!(x.len() % weight.len(), 0, "rms_norm: x is no whole number of rows");
    weight.len()
}

/// Returns what divides a row by its root mean square.
pub(crate) fn row_scale(cpu: &Cpu, row: &[f32], eps: f32) -> f32 {
    let mean = dispatch(cpu, SumOfSquares(row)) / row.len() as f32;
    1.0 / (mean + eps).sqrt()
}

struct Sum<'a>(&'a [f32]);

impl Kernel for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let (blocks, rest) = self.0.as_chunks::<{ 4 * LANES }>();
        let mut sums = [simd.splat(0.0); 4];
        for block in blocks {
            for (sum, x) in sums.iter_mut().zip(block.as_chunks::<LANES>().0) {
                *sum = simd.add(*sum, simd.load(x));
            }
        }
        let total = simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]));
        simd.sum(total) + rest.iter().sum::<f32>()
    }
}

struct SumOfSquares<'a>(&'a [f32]);

impl Kernel for SumOfSquares<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let (blocks, rest) = self.0.as_chunks::<{ 4 * LANES }>();
        let mut sums = [simd.splat(0.0); 4];
        for block in blocks {
            for (sum, x) in sums.iter_mut().zip(block.as_chunks::<LANES>().0) {
                let x = simd.load(x);
                *sum = simd.mul_add(x, x, *sum);
            }
        }
        let total = simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]));
        simd.sum(total) + rest.iter().map(|x| x * x).sum::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::NormForm;
    use crate::testing::{cpus, random};

    #[test]
    fn agrees_with_f64_for_every_row_length() {
        for cpu in cpus() {
            for (rows, n) in [(1, 1), (3, 7), (2, 64), (5, 100), (40, 1027), (1, 4096)] {
                let x = random(rows as u64, rows * n);
                let weight = random(n as u64, n);
                let mut out = vec![0.0; x.len()];
                cpu.rms_norm(&x, &weight, 1e-6, &mut out);
                for (x, out) in x.chunks(n).zip(out.chunks(n)) {
                    let squares: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum();
                    let scale = 1.0 / (squares / n as f64 + 1e-6).sqrt();
                    for ((&x, &w), &out) in x.iter().zip(&weight).zip(out) {
                        let exact = f64::from(x) * f64::from(w) * scale;
                        assert!((exact - f64::from(out)).abs() < 1e-6 * (1.0 + exact.abs()));
                    }
                }
                let mut in_place = x.clone();
                cpu.rms_norm_in_place(&mut in_place, &weight, 1e-6);
                assert_eq!(in_place, out);
            }
        }
    }

    #[test]
    fn a_norm_of_some_columns_leaves_the_rest() {
        for cpu in cpus() {
            for (rows, row, first, n) in
                [(1, 9, 0, 9), (3, 20, 0, 12), (70, 576, 0, 512), (5, 36, 4, 16), (2, 7, 6, 1)]
            {
                let (x, weight) = (random(5, rows * row), random(6, n));
                let mut out = x.clone();
                cpu.rms_norm_columns(&mut out, row, first, &weight, 1e-6);
                for (x, out) in x.chunks(row).zip(out.chunks(row)) {
                    let mut expected = x.to_vec();
                    cpu.rms_norm_in_place(&mut expected[first..first + n], &weight, 1e-6);
                    assert_eq!(expected, out);
                }
            }
        }
    }

    #[test]
    fn a_layer_norm_agrees_with_f64() {
        for cpu in cpus() {
            for (rows, n) in [(1, 1), (3, 7), (5, 128), (9, 1027)] {
                let (x, weight, bias) = (random(1, rows * n), random(2, n), random(3, n));
                let mut out = x.clone();
                cpu.layer_norm_in_place(&mut out, &weight, &bias, 1e-6);
                let weights = [&weight[..], &bias].concat();
                assert_eq!(weights.len(), NormForm::Layer.weights(n));
                let (mut other, mut in_place) = (vec![0.0; x.len()], x.clone());
                cpu.norm(NormForm::Layer, &x, &weights, 1e-6, &mut other);
                cpu.norm_in_place(NormForm::Layer, &mut in_place, &weights, 1e-6);
                assert_eq!(in_place, other);
                out.iter().zip(&other).for_each(|(a, b)| assert!((a - b).abs() < 1e-5, "{a} {b}"));
                for (x, out) in x.chunks(n).zip(out.chunks(n)) {
                    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
                    let mean = x.iter().sum::<f64>() / n as f64;
                    let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
                    let scale = 1.0 / (variance + 1e-6).sqrt();
                    for (((x, w), b), out) in x.iter().zip(&weight).zip(&bias).zip(out) {
                        let exact = (x - mean) * scale * f64::from(*w) + f64::from(*b);
                        assert!((exact - f64::from(*out)).abs() < 1e-5, "{exact} {out}");
                    }
                }
            }
        }
    }
}
