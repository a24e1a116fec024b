//! Additions, the gated activation, and the weighted sums that join expert outputs.

use super::{CHUNK_ELEMENTS, share};
use crate::cpu::Cpu;
use crate::simd::{Kernel, LANES, Simd, dispatch};

impl Cpu {
    /// `x += y`.
    ///
    /// # Panics
    /// When the lengths differ.
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
    /// When `bias` is empty or `x` is no whole number of rows.
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

    /// `out = silu(gate) * up`, with `silu(g) = g / (1 + e^-g)` (Shazeer 2020, "GLU Variants
    /// Improve Transformer").
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn silu_mul(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        assert!(gate.len() == out.len() && up.len() == out.len(), "silu_mul: lengths differ");
        let share = share(out.len(), LANES);
        self.pool.for_each_chunk_mut(out, share, |_, start, out| {
            let (gate, up) = (&gate[start..][..out.len()], &up[start..][..out.len()]);
            dispatch(self, SiluMul { gate, up, out });
        });
    }

    /// As [`Cpu::silu_mul`], with the result in the place of `gate`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn silu_mul_in_place(&self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "silu_mul: lengths differ");
        let share = share(gate.len(), LANES);
        self.pool.for_each_chunk_mut(gate, share, |_, start, gate| {
            let up = &up[start..][..gate.len()];
            dispatch(self, SiluMulInPlace { gate, up });
        });
    }

    /// `out += w * x`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add_scaled(&self, out: &mut [f32], w: f32, x: &[f32]) {
        assert_eq!(out.len(), x.len(), "add_scaled: lengths differ");
        let share = share(out.len(), 1);
        self.pool.for_each_chunk_mut(out, share, |_, start, out| {
            add_scaled_row(out, w, &x[start..]);
        });
    }

    /// `out[rows[i]] += weights[i] * x[i]` for every row of `x` `[rows.len(), n]`, in order of
    /// `i`; `out` is `[tokens, n]`. Brings the outputs of one expert back to its tokens.
    ///
    /// # Panics
    /// When `n` is 0, the lengths do not fit together, or a row lies outside `out`.
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
        // A token may occur twice, so the rows themselves cannot be shared out; ranges of output
        // rows can, each worker picking the inputs that fall into its own.
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

    /// `out[t] += sum over j of weights[t, j] * parts[t, j]`, in order of `j`: the outputs of the
    /// `k` experts of every token, joined in an order that does not depend on which arrived
    /// first. `parts` `[any, n]` lie in the order computed; `rows` `[tokens, k]` says which row of
    /// `parts` belongs to each choice. `weights` is `[tokens, k]`, `out` `[tokens, n]`.
    ///
    /// # Panics
    /// When `n` or `k` is 0, the lengths do not fit together, or a row lies outside `parts`.
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

    /// The place of the largest element, the lower of two equals; `None` when there is none that
    /// is a number.
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
fn silu_mul<S: Simd>(simd: S, gate: &[f32; LANES], up: &[f32; LANES]) -> S::V {
    let gate = simd.load(gate);
    let e = simd.exp(simd.sub(simd.splat(0.0), gate));
    simd.mul(simd.div(gate, simd.add(simd.splat(1.0), e)), simd.load(up))
}

/// The last elements of a row, filled up to a vector.
#[inline(always)]
fn padded(rest: &[f32]) -> [f32; LANES] {
    let mut full = [0.0; LANES];
    full[..rest.len()].copy_from_slice(rest);
    full
}

struct SiluMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (gate, gate_rest) = self.gate.as_chunks::<LANES>();
        let (up, up_rest) = self.up.as_chunks::<LANES>();
        let (out, out_rest) = self.out.as_chunks_mut::<LANES>();
        for ((gate, up), out) in gate.iter().zip(up).zip(out) {
            simd.store(silu_mul(simd, gate, up), out);
        }
        let mut last = [0.0; LANES];
        simd.store(silu_mul(simd, &padded(gate_rest), &padded(up_rest)), &mut last);
        out_rest.copy_from_slice(&last[..out_rest.len()]);
    }
}

struct SiluMulInPlace<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for SiluMulInPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (gate, gate_rest) = self.gate.as_chunks_mut::<LANES>();
        let (up, up_rest) = self.up.as_chunks::<LANES>();
        for (gate, up) in gate.iter_mut().zip(up) {
            simd.store(silu_mul(simd, gate, up), gate);
        }
        let mut last = [0.0; LANES];
        simd.store(silu_mul(simd, &padded(gate_rest), &padded(up_rest)), &mut last);
        gate_rest.copy_from_slice(&last[..gate_rest.len()]);
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
        }
    }

    #[test]
    fn silu_mul_is_accurate_also_in_tails_and_extremes() {
        for cpu in cpus() {
            for len in [1, 8, 13, 40_003] {
                let mut gate: Vec<f32> = random(4, len).iter().map(|x| x * 30.0).collect();
                gate[0] = -200.0;
                gate[len - 1] = 150.0;
                let up = random(5, len);
                let mut out = vec![0.0; len];
                cpu.silu_mul(&gate, &up, &mut out);
                for i in 0..len {
                    let g = f64::from(gate[i]);
                    let exact = g / (1.0 + (-g).exp()) * f64::from(up[i]);
                    assert!((f64::from(out[i]) - exact).abs() <= 1e-6 * exact.abs() + 1e-30);
                }
                cpu.silu_mul_in_place(&mut gate, &up);
                assert_eq!(gate, out);
            }
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
