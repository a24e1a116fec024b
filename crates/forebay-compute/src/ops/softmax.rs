//! Softmax over rows.

use super::share;
use crate::cpu::Cpu;
use crate::simd::{Kernel, LANES, Simd, dispatch};

impl Cpu {
    /// Replaces every row of `x` `[rows, cols]` by its softmax. Elements of `-inf` become 0.
    ///
    /// # Panics
    /// Panics if `cols` is 0 or `x` is no whole number of rows.
    pub fn softmax_rows(&self, x: &mut [f32], cols: usize) {
        assert!(cols > 0 && x.len().is_multiple_of(cols), "softmax_rows: no whole rows");
        let share = share(x.len(), cols);
        self.pool.for_each_chunk_mut(x, share, |_, _, x| {
            for row in x.chunks_exact_mut(cols) {
                let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum = dispatch(self, ExpAndSum { row, largest });
                let scale = 1.0 / sum;
                row.iter_mut().for_each(|x| *x *= scale);
            }
        });
    }
}

/// Replaces `row` by `e^(row - largest)` and returns its sum.
pub(crate) struct ExpAndSum<'a> {
    pub(crate) row: &'a mut [f32],
    pub(crate) largest: f32,
}

impl Kernel for ExpAndSum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let largest = simd.splat(self.largest);
        let (blocks, rest) = self.row.as_chunks_mut::<LANES>();
        let mut sum = simd.splat(0.0);
        for block in blocks {
            let e = simd.exp(simd.sub(simd.load(block), largest));
            simd.store(e, block);
            sum = simd.add(sum, e);
        }
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let e = simd.exp(simd.sub(simd.load(&last), largest));
        simd.store(e, &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
        simd.sum(simd.add(sum, e))
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{cpus, random};

    #[test]
    fn rows_agree_with_f64() {
        for cpu in cpus() {
            for (rows, cols) in [(1, 1), (3, 8), (5, 13), (2, 30_001)] {
                let x: Vec<f32> = random(9, rows * cols).iter().map(|x| x * 20.0).collect();
                let mut y = x.clone();
                cpu.softmax_rows(&mut y, cols);
                for (x, y) in x.chunks(cols).zip(y.chunks(cols)) {
                    let largest = x.iter().copied().fold(f32::MIN, f32::max);
                    let e = x.iter().map(|&x| (f64::from(x) - f64::from(largest)).exp());
                    let sum: f64 = e.clone().sum();
                    for (e, &y) in e.zip(y) {
                        assert!((e / sum - f64::from(y)).abs() < 5e-6 * e / sum + 1e-12);
                    }
                }
            }
            let mut masked = [1.0, f32::NEG_INFINITY, 1.0];
            cpu.softmax_rows(&mut masked, 3);
            assert_eq!(masked, [0.5, 0.0, 0.5]);
        }
    }
}
