//! A gate of whole rows: the weight that a model gives to its shared experts for every token.

use super::{logistic, share};
use crate::cpu::Cpu;
use crate::simd::{Kernel, LANES, Simd, dispatch};

impl Cpu {
    /// Multiplies every row of `out` `[rows, out.len() / rows]` by the logistic function of the product of a row of `x`
    /// `[rows, weight.len()]` with `weight`.
    ///
    /// # Panics
    /// Panics if `weight` is empty, or if `x` and `out` are no whole numbers of as many rows.
    pub fn gate_rows(&self, out: &mut [f32], x: &[f32], weight: &[f32]) {
        assert!(!weight.is_empty() && x.len().is_multiple_of(weight.len()), "gate_rows: no rows");
        let rows = x.len() / weight.len();
        if rows == 0 {
            return;
        }
        assert!(out.len().is_multiple_of(rows), "gate_rows: {} of {rows} rows", out.len());
        let width = out.len() / rows;
        self.pool.for_each_chunk_mut(out, share(rows * width, width), |_, start, out| {
            for (row, out) in out.chunks_exact_mut(width).enumerate() {
                let x = &x[(start / width + row) * weight.len()..][..weight.len()];
                let factor = logistic(dispatch(self, Dot(x, weight)));
                out.iter_mut().for_each(|out| *out *= factor);
            }
        });
    }
}

struct Dot<'a>(&'a [f32], &'a [f32]);

impl Kernel for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let ((a, rest_a), (b, rest_b)) = (self.0.as_chunks::<LANES>(), self.1.as_chunks::<LANES>());
        let mut sums = [simd.splat(0.0); 4];
        for (index, (a, b)) in a.iter().zip(b).enumerate() {
            let sum = &mut sums[index % 4];
            *sum = simd.mul_add(simd.load(a), simd.load(b), *sum);
        }
        let total = simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]));
        simd.sum(total) + rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{cpus, random};

    #[test]
    fn every_row_has_its_own_factor() {
        for cpu in cpus() {
            for (rows, n, width) in [(1, 1, 3), (3, 37, 5), (40, 64, 1000)] {
                let (x, weight) = (random(1, rows * n), random(2, n));
                let before = random(3, rows * width);
                let mut out = before.clone();
                cpu.gate_rows(&mut out, &x, &weight);
                for row in 0..rows {
                    let pairs = x[row * n..][..n].iter().zip(&weight);
                    let dot: f64 = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                    let factor = 1.0 / (1.0 + (-dot).exp());
                    for i in row * width..(row + 1) * width {
                        let exact = factor * f64::from(before[i]);
                        assert!((f64::from(out[i]) - exact).abs() < 2e-6, "{exact}: {}", out[i]);
                    }
                }
            }
        }
    }
}
