//! Sparse activations: the values of a row that stand out.

use super::share;
use crate::cpu::Cpu;
use crate::simd::{Kernel, LANES, Simd, dispatch};

impl Cpu {
    /// Subtracts a number from the values of every row of `x` `[rows, width]`, and sets those that become negative to 0. The number is
    /// the mean of the row and `deviations` times its standard deviation (Gemma 3n, "gaussian top-k").
    ///
    /// # Panics
    /// Panics if `width` is 0 or `x` is no whole number of rows.
    pub fn cut_rows(&self, x: &mut [f32], width: usize, deviations: f32) {
        assert!(width > 0 && x.len().is_multiple_of(width), "cut_rows: no whole rows");
        let share = share(x.len(), width);
        self.pool.for_each_chunk_mut(x, share, |_, _, x| {
            for row in x.chunks_exact_mut(width) {
                let mean = dispatch(self, Sum { x: row, less: None }) / width as f32;
                let square = dispatch(self, Sum { x: row, less: Some(mean) }) / width as f32;
                let cut = mean + square.sqrt() * deviations;
                for value in row {
                    let above = *value - cut;
                    // Values that are no numbers must stay, so that they are noticed.
                    *value = if above < 0.0 { 0.0 } else { above };
                }
            }
        });
    }
}

/// The sum of values, or of the squares of their differences from a number.
struct Sum<'a> {
    x: &'a [f32],
    less: Option<f32>,
}

impl Kernel for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let (blocks, rest) = self.x.as_chunks::<{ 4 * LANES }>();
        let mut sums = [simd.splat(0.0); 4];
        let less = simd.splat(self.less.unwrap_or(0.0));
        for block in blocks {
            for (sum, x) in sums.iter_mut().zip(block.as_chunks::<LANES>().0) {
                let x = simd.load(x);
                *sum = match self.less {
                    None => simd.add(*sum, x),
                    Some(_) => {
                        let difference = simd.sub(x, less);
                        simd.mul_add(difference, difference, *sum)
                    }
                };
            }
        }
        let total = simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]));
        let of_rest = |x: &f32| self.less.map_or(*x, |less| (x - less) * (x - less));
        simd.sum(total) + rest.iter().map(of_rest).sum::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{cpus, random};

    #[test]
    fn values_that_stand_out_are_kept() {
        for cpu in cpus() {
            for (rows, width, deviations) in [(1, 5, 0.5), (3, 96, 1.6448536), (40, 1027, -0.3)] {
                let x = random(rows as u64, rows * width);
                let mut out = x.clone();
                cpu.cut_rows(&mut out, width, deviations);
                let mut kept = 0;
                for (x, out) in x.chunks(width).zip(out.chunks(width)) {
                    let x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
                    let mean = x.iter().sum::<f64>() / width as f64;
                    let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
                    let cut = mean + square.sqrt() * f64::from(deviations);
                    for (x, out) in x.iter().zip(out) {
                        assert!((f64::from(*out) - (x - cut).max(0.0)).abs() < 1e-5, "{x} {out}");
                        kept += usize::from(*out > 0.0);
                    }
                }
                assert!((1..rows * width).contains(&kept), "{kept} of {rows} rows");
            }
        }
    }
}
