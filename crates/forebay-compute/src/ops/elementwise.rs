//! Additions, and the weighted sums that combine expert outputs.

use super::{CHUNK_ELEMENTS, share};
use crate::cpu::Cpu;
use crate::simd::{Kernel, LANES, Simd, dispatch};

impl Cpu {
    /// Computes `x += y`.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn add_assign(&self, x: &mut [f32], y: &[f32]) {
        assert_eq!(x.len(), y.len(), "add_assign: lengths differ");
        let share = share(x.len(), 1);
        self.pool.for_each_chunk_mut(x, share, |_, start, x| {
            x.iter_mut().zip(&y[start..]).for_each(|(x, y)| *x += y);
        });
    }

    /// Adds `bias` to every row of `x` `[rows, bias.len()]`.
    ///
    /// # Panics
    /// Panics if `bias` is empty or `x` is no whole number of rows.
    pub fn add_bias_rows(&self, x: &mut [f32], bias: &[f32]) {
        assert!(
            !bias.is_empty() && x.len().is_multiple_of(bias.len()),
            "add_bias_rows: no whole rows"
        );
        let share = share(x.len(), bias.len());
        self.pool.for_each_chunk_mut(x, share, |_, _, x| {
            for row in x.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            }
        });
    }

    /// Multiplies every row of `x` `[rows, factors.len()]` by `factors`, column by column.
    ///
    /// # Panics
    /// Panics if `factors` is empty or `x` is no whole number of rows.
    pub fn multiply_columns(&self, x: &mut [f32], factors: &[f32]) {
        assert!(
            !factors.is_empty() && x.len().is_multiple_of(factors.len()),
            "multiply_columns: no whole rows"
        );
        let share = share(x.len(), factors.len());
        self.pool.for_each_chunk_mut(x, share, |_, _, x| {
            for row in x.chunks_exact_mut(factors.len()) {
                row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
            }
        });
    }

    /// Multiplies all elements of `x` by `factor`.
    pub fn scale_in_place(&self, x: &mut [f32], factor: f32) {
        let share = share(x.len(), 1);
        self.pool.for_each_chunk_mut(x, share, |_, _, x| x.iter_mut().for_each(|x| *x *= factor));
    }

    /// Bounds all elements of `x` by `-limit` and `limit`. NaN stays NaN.
    ///
    /// # Panics
    /// Panics if the limit is negative or NaN.
    pub fn clamp_in_place(&self, x: &mut [f32], limit: f32) {
        let share = share(x.len(), 1);
        let of_share = |_, _, x: &mut [f32]| {
            x.iter_mut().for_each(|x| *x = x.clamp(-limit, limit));
        };
        self.pool.for_each_chunk_mut(x, share, of_share);
    }

    /// Computes `x = cap * tanh(x / cap)`, which keeps logits within `cap` (Gemma 2 report, section
    /// 2).
    pub fn softcap_in_place(&self, x: &mut [f32], cap: f32) {
        let share = share(x.len(), LANES);
        self.pool.for_each_chunk_mut(x, share, |_, _, x| dispatch(self, Softcap { x, cap }));
    }

    /// Computes `out += w * x`.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn add_scaled(&self, out: &mut [f32], w: f32, x: &[f32]) {
        assert_eq!(out.len(), x.len(), "add_scaled: lengths differ");
        let share = share(out.len(), 1);
        self.pool.for_each_chunk_mut(out, share, |_, start, out| {
            add_scaled_row(out, w, &x[start..]);
        });
    }

    /// Computes `out[rows[i]] += weights[i] * x[i]` for every row of `x` `[rows.len(), n]`, in
    /// order of `i`. `out` is `[tokens, n]`. This scatters the outputs of one expert back to its
    /// tokens.
    ///
    /// # Panics
    /// Panics if `n` is 0, the lengths do not fit together, or a row lies outside `out`.
    pub fn add_scaled_rows(
        &self,
        out: &mut [f32],
        n: usize,
        rows: &[u32],
        weights: &[f32],
        x: &[f32],
    ) {
        assert!(
            n > 0 && out.len().is_multiple_of(n),
            "add_scaled_rows: out is no whole number of rows"
        );
        assert_eq!(rows.len(), weights.len(), "add_scaled_rows: one weight for each row");
        assert_eq!(rows.len() * n, x.len(), "add_scaled_rows: x is not [rows, n]");
        // A token may occur twice, so input rows cannot be divided among the workers. Ranges of
        // output rows can: each worker picks the inputs that belong to its range.
        let share = if x.len() < super::PARALLEL_ELEMENTS {
            out.len().max(1)
        } else {
            n * (out.len() / n).div_ceil(16).max(CHUNK_ELEMENTS / n).max(1)
        };
        let tokens = out.len() / n;
        assert!(rows.iter().all(|&row| (row as usize) < tokens), "add_scaled_rows: row outside");
        self.pool.for_each_chunk_mut(out, share, |_, start, out| {
            let first = start / n;
            for ((&row, &w), x) in rows.iter().zip(weights).zip(x.chunks_exact(n)) {
                let Some(at) = (row as usize).checked_sub(first).map(|row| row * n) else {
                    continue;
                };
                if at < out.len() {
                    add_scaled_row(&mut out[at..at + n], w, x);
                }
            }
        });
    }

    /// Computes `out[t] += sum over j of weights[t, j] * parts[t, j]`, in order of `j`. This
    /// combines the outputs of every token's `k` experts in an order that does not depend on which
    /// expert was computed first.
    ///
    /// `parts` is `[any, n]`, in the order computed. `rows` `[tokens, k]` holds the row of `parts`
    /// for each choice. `weights` is `[tokens, k]` and `out` is `[tokens, n]`.
    ///
    /// # Panics
    /// Panics if `n` or `k` is 0, the lengths do not fit together, or a row lies outside `parts`.
    pub fn combine_experts(
        &self,
        out: &mut [f32],
        n: usize,
        k: usize,
        weights: &[f32],
        parts: &[f32],
        rows: &[u32],
    ) {
        assert!(n > 0 && k > 0 && out.len().is_multiple_of(n), "combine_experts: no whole rows");
        assert_eq!(
            weights.len(),
            out.len() / n * k,
            "combine_experts: weights are not [tokens, k]"
        );
        assert_eq!(rows.len(), weights.len(), "combine_experts: rows are not [tokens, k]");
        let share = share(out.len(), n);
        self.pool.for_each_chunk_mut(out, share, |_, start, out| {
            for (row, out) in out.chunks_exact_mut(n).enumerate() {
                let token = start / n + row;
                let weights = &weights[token * k..][..k];
                let rows = &rows[token * k..][..k];
                for (&w, &row) in weights.iter().zip(rows) {
                    add_scaled_row(out, w, &parts[row as usize * n..][..n]);
                }
            }
        });
    }

    /// Returns the index of the largest element, the lowest index if there are equals. Returns
    /// `None` if every element is NaN or `x` is empty.
    pub fn argmax(&self, x: &[f32]) -> Option<usize> {
        let mut best: Option<(usize, f32)> = None;
        for (index, &x) in x.iter().enumerate() {
            if !x.is_nan() && best.is_none_or(|(_, most)| x > most) {
                best = Some((index, x));
            }
        }
        best.map(|(index, _)| index)
    }
}

fn add_scaled_row(out: &mut [f32], w: f32, x: &[f32]) {
    out.iter_mut().zip(x).for_each(|(out, x)| *out += w * x);
}

#[inline(always)]
fn softcap<S: Simd>(simd: S, x: S::V, cap: S::V) -> S::V {
    simd.mul(cap, simd.tanh(simd.div(x, cap)))
}

struct Softcap<'a> {
    x: &'a mut [f32],
    cap: f32,
}

impl Kernel for Softcap<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let cap = simd.splat(self.cap);
        let (x, rest) = self.x.as_chunks_mut::<LANES>();
        for x in x {
            simd.store(softcap(simd, simd.load(x), cap), x);
        }
        let mut last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        simd.store(softcap(simd, simd.load(&last), cap), &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::{cpus, random};

    #[test]
    fn additions_touch_every_element_once() {
        for cpu in cpus() {
            for len in [1, 9, 5000, 70_001] {
                let (x, y) = (random(1, len), random(2, len));
                let mut sum = x.clone();
                cpu.add_assign(&mut sum, &y);
                let mut scaled = x.clone();
                cpu.add_scaled(&mut scaled, 0.5, &y);
                for i in 0..len {
                    assert_eq!(sum[i], x[i] + y[i]);
                    assert_eq!(scaled[i], x[i] + 0.5 * y[i]);
                }
            }
            let bias = random(3, 100);
            let mut rows = vec![1.0; 100 * 300];
            cpu.add_bias_rows(&mut rows, &bias);
            assert!(rows.iter().zip(bias.iter().cycle()).all(|(&x, &b)| x == 1.0 + b));
            rows.fill(3.0);
            cpu.multiply_columns(&mut rows, &bias);
            assert!(rows.iter().zip(bias.iter().cycle()).all(|(&x, &b)| x == 3.0 * b));
        }
    }

    #[test]
    fn a_softcap_squeezes_and_keeps_small_numbers() {
        for cpu in cpus() {
            for (len, cap) in [(1, 30.0), (13, 50.0), (40_003, 30.0)] {
                let mut x: Vec<f32> = random(6, len).iter().map(|x| x * x * x * 400.0).collect();
                (x[0], x[len - 1]) = (1e-20, f32::MAX);
                x[len / 2] = -1e30;
                let before = x.clone();
                cpu.softcap_in_place(&mut x, cap);
                for (x, before) in x.iter().zip(before) {
                    let exact = f64::from(cap) * (f64::from(before) / f64::from(cap)).tanh();
                    assert!((f64::from(*x) - exact).abs() <= 2e-6 * exact.abs(), "{before}: {x}");
                }
            }
            let mut x = [f32::NAN, 0.0, -0.0, f32::INFINITY];
            cpu.softcap_in_place(&mut x, 30.0);
            assert!(x[0].is_nan() && x[1..] == [0.0, 0.0, 30.0]);
        }
    }

    #[test]
    fn expert_outputs_come_back_to_their_tokens() {
        for cpu in cpus() {
            for (tokens, n) in [(1, 5), (7, 64), (300, 129)] {
                let k = 3;
                let parts = random(6, tokens * k * n);
                let weights = random(7, tokens * k);
                let mut combined = random(8, tokens * n);
                let mut by_rows = combined.clone();
                let rows: Vec<u32> = (0..weights.len() as u32).collect();
                cpu.combine_experts(&mut combined, n, k, &weights, &parts, &rows);
                let rows: Vec<u32> = (0..tokens * k).map(|i| (i / k) as u32).collect();
                cpu.add_scaled_rows(&mut by_rows, n, &rows, &weights, &parts);
                assert_eq!(combined, by_rows);
                let token = tokens - 1;
                let expected = (0..k).fold(random(8, tokens * n)[token * n], |sum, j| {
                    sum + weights[token * k + j] * parts[(token * k + j) * n]
                });
                assert_eq!(combined[token * n], expected);
            }
        }
    }

    #[test]
    fn argmax_prefers_the_lower_index_and_ignores_nan() {
        let cpu = &cpus()[0];
        assert_eq!(cpu.argmax(&[]), None);
        assert_eq!(cpu.argmax(&[f32::NAN]), None);
        assert_eq!(cpu.argmax(&[f32::NAN, -1.0, 3.0, f32::NAN, 3.0]), Some(2));
        assert_eq!(cpu.argmax(&[f32::NEG_INFINITY]), Some(0));
    }
}
