//! Gated activations of feed-forward layers, which combine the gate and up projections.

use forebay_ops::Gating;

use super::share;
use crate::cpu::Cpu;
use crate::simd::{Kernel, LANES, Simd, dispatch};

impl Cpu {
    /// Computes `gate = gating(gate, up)` element by element. Without a gate, both are to be the same values; see
    /// [`Cpu::activate_in_place`].
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn gate_in_place(&self, gating: Gating, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "gate_in_place: lengths differ");
        match gating {
            Gating::Silu => self.apply(Silu, gate, up),
            Gating::GeluTanh => self.apply(GeluTanh, gate, up),
            Gating::Clamped { alpha, limit } => self.apply(Clamped { alpha, limit }, gate, up),
            Gating::ClampedSilu { limit } => self.apply(ClampedSilu { limit }, gate, up),
            Gating::SiluClamped { limit } => self.apply(SiluClamped { limit }, gate, up),
            Gating::Situ { limit, up_limit } => self.apply(Situ { limit, up_limit }, gate, up),
            // A square without a gate is that of the gate with itself.
            Gating::Relu | Gating::SquaredRelu => self.apply(SquaredRelu, gate, up),
            Gating::PlainGelu => self.apply(PlainGelu, gate, up),
            Gating::PlainGeluTanh => self.apply(PlainGeluTanh, gate, up),
            Gating::Xielu { positive, negative, slope, floor } => {
                self.apply(Xielu { positive, negative, slope, floor }, gate, up);
            }
        }
    }

    /// Computes the activation of a feed-forward without a gate, element by element.
    ///
    /// # Panics
    /// Panics if the activation has a gate.
    pub fn activate_in_place(&self, gating: Gating, x: &mut [f32]) {
        match gating {
            Gating::SquaredRelu => self.activate(SquaredRelu, x),
            Gating::PlainGelu => self.activate(PlainGelu, x),
            Gating::PlainGeluTanh => self.activate(PlainGeluTanh, x),
            Gating::Xielu { positive, negative, slope, floor } => {
                self.activate(Xielu { positive, negative, slope, floor }, x);
            }
            Gating::Silu
            | Gating::Relu
            | Gating::GeluTanh
            | Gating::Clamped { .. }
            | Gating::ClampedSilu { .. }
            | Gating::SiluClamped { .. }
            | Gating::Situ { .. } => panic!("activate_in_place: {gating:?}"),
        }
    }

    fn activate<G: Gate>(&self, gating: G, x: &mut [f32]) {
        let share = share(x.len(), LANES);
        let of_share = |_, _, x: &mut [f32]| dispatch(self, Activate { gating, x });
        self.pool.for_each_chunk_mut(x, share, of_share);
    }

    /// Computes `x = x / (1 + e^-gate)` element by element.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    pub fn multiply_by_sigmoid(&self, x: &mut [f32], gate: &[f32]) {
        assert_eq!(gate.len(), x.len(), "multiply_by_sigmoid: lengths differ");
        self.apply(Sigmoid, x, gate);
    }

    fn apply<G: Gate>(&self, gating: G, gate: &mut [f32], up: &[f32]) {
        let share = share(gate.len(), LANES);
        self.pool.for_each_chunk_mut(gate, share, |_, start, gate| {
            let up = &up[start..][..gate.len()];
            dispatch(self, Apply { gating, gate, up });
        });
    }
}

/// One kind of gate. Each implementor gets a loop of its own.
trait Gate: Copy + Sync {
    fn of<S: Simd>(self, simd: S, gate: S::V, up: S::V) -> S::V;
}

/// Returns `x / (1 + e^-s)`.
#[inline(always)]
pub(crate) fn times_logistic<S: Simd>(simd: S, x: S::V, s: S::V) -> S::V {
    let e = simd.exp(simd.sub(simd.splat(0.0), s));
    simd.div(x, simd.add(simd.splat(1.0), e))
}

#[derive(Clone, Copy)]
struct Silu;

impl Gate for Silu {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, gate: S::V, up: S::V) -> S::V {
        simd.mul(times_logistic(simd, gate, gate), up)
    }
}

/// The first operand times the logistic function of the second one.
#[derive(Clone, Copy)]
struct Sigmoid;

impl Gate for Sigmoid {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, x: S::V, gate: S::V) -> S::V {
        times_logistic(simd, x, gate)
    }
}

#[derive(Clone, Copy)]
struct GeluTanh;

impl Gate for GeluTanh {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, gate: S::V, up: S::V) -> S::V {
        // (1 + tanh(y)) / 2 equals the logistic function of 2y, which stays accurate for negative
        // y.
        const SQRT_8_OVER_PI: f32 = 1.595_769;
        let cubic = simd.mul(simd.mul(gate, gate), simd.splat(0.044_715));
        let s = simd.mul(simd.mul_add(cubic, gate, gate), simd.splat(SQRT_8_OVER_PI));
        simd.mul(times_logistic(simd, gate, s), up)
    }
}

#[derive(Clone, Copy)]
struct Clamped {
    alpha: f32,
    limit: f32,
}

impl Gate for Clamped {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, gate: S::V, up: S::V) -> S::V {
        // `min` and `max` return their second argument if either is NaN, so NaN passes through.
        let (limit, lowest) = (simd.splat(self.limit), simd.splat(-self.limit));
        let gate = simd.min(limit, gate);
        let up = simd.min(limit, simd.max(lowest, up));
        let inner = times_logistic(simd, gate, simd.mul(gate, simd.splat(self.alpha)));
        simd.mul(simd.add(up, simd.splat(1.0)), inner)
    }
}

#[derive(Clone, Copy)]
struct ClampedSilu {
    limit: f32,
}

impl Gate for ClampedSilu {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, gate: S::V, up: S::V) -> S::V {
        // NaN passes through, as above.
        let (limit, lowest) = (simd.splat(self.limit), simd.splat(-self.limit));
        let gate = simd.min(limit, gate);
        let up = simd.min(limit, simd.max(lowest, up));
        simd.mul(times_logistic(simd, gate, gate), up)
    }
}

#[derive(Clone, Copy)]
struct Situ {
    limit: f32,
    up_limit: f32,
}

impl Gate for Situ {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, gate: S::V, up: S::V) -> S::V {
        let within = |x: S::V, limit: f32| {
            let limit = simd.splat(limit);
            simd.mul(limit, simd.tanh(simd.div(x, limit)))
        };
        let inner = times_logistic(simd, within(gate, self.limit), gate);
        simd.mul(inner, within(up, self.up_limit))
    }
}

/// The larger one of `gate` and 0, times `up`.
#[derive(Clone, Copy)]
struct SiluClamped {
    limit: f32,
}

impl Gate for SiluClamped {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, gate: S::V, up: S::V) -> S::V {
        // NaN passes through, as above.
        let (limit, lowest) = (simd.splat(self.limit), simd.splat(-self.limit));
        let inner = simd.min(limit, times_logistic(simd, gate, gate));
        simd.mul(inner, simd.min(limit, simd.max(lowest, up)))
    }
}

#[derive(Clone, Copy)]
struct SquaredRelu;

impl Gate for SquaredRelu {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, gate: S::V, up: S::V) -> S::V {
        // `max` returns its second argument if either is NaN.
        simd.mul(simd.max(simd.splat(0.0), gate), up)
    }
}

/// GELU of the first operand. The second one is not used.
#[derive(Clone, Copy)]
struct PlainGelu;

impl Gate for PlainGelu {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, gate: S::V, _: S::V) -> S::V {
        // Coefficients of a polynomial in 1 / (1 + z / 2), whose exponential gives erfc(z) for z >= 0 with an error of less than
        // 1.2e-7 times the value (Press et al., "Numerical Recipes").
        const COEFFICIENTS: [f32; 9] = [
            -0.822_152_2,
            1.488_515_9,
            -1.135_204,
            0.278_868_07,
            -0.186_288_06,
            0.096_784_18,
            0.374_091_96,
            1.000_023_7,
            -1.265_512_2,
        ];
        let zero = simd.splat(0.0);
        let negative = simd.sub(zero, gate);
        let z = simd.mul(simd.max(gate, negative), simd.splat(std::f32::consts::FRAC_1_SQRT_2));
        let one = simd.splat(1.0);
        let t = simd.div(one, simd.mul_add(z, simd.splat(0.5), one));
        let mut sum = simd.splat(0.170_872_77);
        for coefficient in COEFFICIENTS {
            sum = simd.mul_add(sum, t, simd.splat(coefficient));
        }
        let exponent = simd.sub(sum, simd.mul(z, z));
        let tail = simd.mul(simd.mul(t, simd.exp(exponent)), simd.splat(0.5));
        simd.mul(gate, simd.select_less(gate, zero, tail, simd.sub(one, tail)))
    }
}

/// The first operand's GELU by the approximation with tanh. The second one is not used.
#[derive(Clone, Copy)]
struct PlainGeluTanh;

impl Gate for PlainGeluTanh {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, gate: S::V, _: S::V) -> S::V {
        GeluTanh.of(simd, gate, simd.splat(1.0))
    }
}

/// xIELU of the first operand. The second one is not used.
#[derive(Clone, Copy)]
struct Xielu {
    positive: f32,
    negative: f32,
    slope: f32,
    floor: f32,
}

impl Gate for Xielu {
    #[inline(always)]
    fn of<S: Simd>(self, simd: S, gate: S::V, _: S::V) -> S::V {
        let zero = simd.splat(0.0);
        let square = simd.mul(simd.mul(gate, gate), simd.splat(self.positive));
        // The second operand is returned if either is NaN.
        let low = simd.min(simd.splat(self.floor), gate);
        let inner = simd.sub(simd.sub(simd.exp(low), simd.splat(1.0)), gate);
        let curved = simd.mul(inner, simd.splat(self.negative));
        // NaN is not less than 0, and its square is NaN.
        let bent = simd.select_less(zero, gate, square, curved);
        simd.mul_add(gate, simd.splat(self.slope), bent)
    }
}

/// The gate of each element with itself.
struct Activate<'a, G> {
    gating: G,
    x: &'a mut [f32],
}

impl<G: Gate> Kernel for Activate<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (blocks, rest) = self.x.as_chunks_mut::<LANES>();
        for x in blocks {
            let v = simd.load(x);
            simd.store(self.gating.of(simd, v, v), x);
        }
        let mut last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let v = simd.load(&last);
        simd.store(self.gating.of(simd, v, v), &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

struct Apply<'a, G> {
    gating: G,
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl<G: Gate> Kernel for Apply<'_, G> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (gate, gate_rest) = self.gate.as_chunks_mut::<LANES>();
        let (up, up_rest) = self.up.as_chunks::<LANES>();
        for (gate, up) in gate.iter_mut().zip(up) {
            simd.store(self.gating.of(simd, simd.load(gate), simd.load(up)), gate);
        }
        let (mut last, mut last_up) = ([0.0; LANES], [0.0; LANES]);
        last[..gate_rest.len()].copy_from_slice(gate_rest);
        last_up[..up_rest.len()].copy_from_slice(up_rest);
        simd.store(self.gating.of(simd, simd.load(&last), simd.load(&last_up)), &mut last);
        gate_rest.copy_from_slice(&last[..gate_rest.len()]);
    }
}

#[cfg(test)]
mod tests {
    use forebay_ops::GateFunction;

    use super::*;
    use crate::testing::{cpus, random};

    const ALL: [Gating; 7] = [
        Gating::Silu,
        Gating::GeluTanh,
        Gating::Clamped { alpha: 1.702, limit: 7.0 },
        Gating::ClampedSilu { limit: 10.0 },
        Gating::SiluClamped { limit: 7.0 },
        Gating::Situ { limit: 4.0, up_limit: 2.5 },
        Gating::SquaredRelu,
    ];

    /// Computes the published formulas in f64.
    fn exact(gating: Gating, gate: f32, up: f32) -> f64 {
        let (g, u) = (f64::from(gate), f64::from(up));
        match gating {
            Gating::Silu => g / (1.0 + (-g).exp()) * u,
            Gating::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                0.5 * g * (1.0 + inner.tanh()) * u
            }
            Gating::Clamped { alpha, limit } => {
                let limit = f64::from(limit);
                let (g, u) = (g.min(limit), u.clamp(-limit, limit));
                (u + 1.0) * g / (1.0 + (-g * f64::from(alpha)).exp())
            }
            Gating::ClampedSilu { limit } => {
                let limit = f64::from(limit);
                let (g, u) = (g.min(limit), u.clamp(-limit, limit));
                g / (1.0 + (-g).exp()) * u
            }
            Gating::SiluClamped { limit } => {
                let limit = f64::from(limit);
                (g / (1.0 + (-g).exp())).min(limit) * u.clamp(-limit, limit)
            }
            Gating::Situ { limit, up_limit } => {
                let (limit, up_limit) = (f64::from(limit), f64::from(up_limit));
                let inner = limit * (g / limit).tanh() / (1.0 + (-g).exp());
                inner * up_limit * (u / up_limit).tanh()
            }
            Gating::Relu | Gating::SquaredRelu => g.max(0.0) * u,
            Gating::PlainGelu => {
                0.5 * g * complementary_error(-g * std::f64::consts::FRAC_1_SQRT_2)
            }
            Gating::PlainGeluTanh => exact(Gating::GeluTanh, gate, 1.0),
            Gating::Xielu { positive, negative, slope, floor } => {
                let [positive, negative, slope, floor] =
                    [positive, negative, slope, floor].map(f64::from);
                let bent = match g > 0.0 {
                    true => positive * g * g,
                    false => negative * (g.min(floor).exp_m1() - g),
                };
                bent + slope * g
            }
        }
    }

    /// Integrates the bell curve from `z` on, by Simpson's rule.
    fn complementary_error(z: f64) -> f64 {
        if z < 0.0 {
            return 2.0 - complementary_error(-z);
        }
        let (steps, width) = (4000, 8.0);
        let at = |step: usize| (-(z + width * step as f64 / steps as f64).powi(2)).exp();
        let weight = |step: usize| match step {
            0 => 1.0,
            _ if step == steps => 1.0,
            _ => [2.0, 4.0][step % 2],
        };
        let sum: f64 = (0..=steps).map(|step| weight(step) * at(step)).sum();
        sum * width / steps as f64 / 3.0 * std::f64::consts::FRAC_2_SQRT_PI
    }

    #[test]
    fn xielu_is_accurate() {
        let gating = Gating::Xielu { positive: 0.7, negative: 1.1, slope: 0.5, floor: -0.01 };
        for cpu in cpus() {
            let mut before: Vec<f32> = random(9, 901).iter().map(|x| x * 5.0).collect();
            before[..3].copy_from_slice(&[0.0, -0.005, -80.0]);
            let mut x = before.clone();
            cpu.activate_in_place(gating, &mut x);
            for (x, before) in x.iter().zip(&before) {
                let exact = exact(gating, *before, 0.0);
                let error = (f64::from(*x) - exact).abs();
                assert!(error <= 1e-6 * exact.abs() + 4e-7, "{before}: {x} {exact}");
            }
            let mut x = [f32::NAN];
            cpu.activate_in_place(gating, &mut x);
            assert!(x[0].is_nan());
        }
    }

    #[test]
    fn gelu_without_a_gate_is_accurate() {
        for cpu in cpus() {
            let before: Vec<f32> = random(9, 901).iter().map(|x| x * 5.0).collect();
            for gating in [Gating::PlainGelu, Gating::PlainGeluTanh] {
                let (mut x, mut gate) = (before.clone(), before.clone());
                cpu.activate_in_place(gating, &mut x);
                cpu.gate_in_place(gating, &mut gate, &before);
                assert_eq!(x, gate);
                for (x, before) in x.iter().zip(&before) {
                    let exact = exact(gating, *before, 0.0);
                    let error = (f64::from(*x) - exact).abs();
                    assert!(error <= 2e-6 * exact.abs() + 1e-7, "{gating:?} {before}: {x} {exact}");
                }
            }
            let mut x = [f32::NAN, 0.0, -30.0, 30.0];
            cpu.activate_in_place(Gating::PlainGelu, &mut x);
            assert!(x[0].is_nan() && x[1..] == [0.0, 0.0, 30.0], "{x:?}");
        }
    }

    #[test]
    fn an_activation_without_a_gate_squares_what_is_positive() {
        for cpu in cpus() {
            for len in [1, 8, 13, 40_003] {
                let before: Vec<f32> = random(8, len).iter().map(|x| x * 30.0).collect();
                let (mut x, mut gate) = (before.clone(), before.clone());
                cpu.activate_in_place(Gating::SquaredRelu, &mut x);
                cpu.gate_in_place(Gating::SquaredRelu, &mut gate, &before);
                assert_eq!(x, gate);
                for (x, before) in x.iter().zip(&before) {
                    assert_eq!(*x, before.max(0.0) * before);
                }
            }
            let mut x = [f32::NAN, -1.0, -0.0, 3.0];
            cpu.activate_in_place(Gating::SquaredRelu, &mut x);
            assert!(x[0].is_nan() && x[1..] == [0.0, 0.0, 9.0], "{x:?}");
        }
    }

    #[test]
    fn gates_are_accurate_also_in_tails_and_extremes() {
        for cpu in cpus() {
            for (gating, len) in ALL.into_iter().flat_map(|g| [1, 8, 13, 40_003].map(|n| (g, n))) {
                // For gates far below 0 the formula itself loses its digits, also in f64.
                let spread = if gating == Gating::GeluTanh { 4.0 } else { 30.0 };
                let mut gate: Vec<f32> = random(4, len).iter().map(|x| x * spread).collect();
                gate[0] = -200.0;
                gate[len - 1] = 150.0;
                let up: Vec<f32> = random(5, len).iter().map(|x| x * 12.0).collect();
                let before = gate.clone();
                cpu.gate_in_place(gating, &mut gate, &up);
                for i in 0..len {
                    let exact = exact(gating, before[i], up[i]);
                    let error = (f64::from(gate[i]) - exact).abs();
                    let (g, u) = (before[i], up[i]);
                    // Rounding the argument of e^x costs about as many units in the last place as
                    // its magnitude.
                    let bound = match gating {
                        Gating::Silu => 1e-6,
                        // Both tangents are within 2e-6.
                        Gating::Situ { .. } => 8e-6,
                        _ => 4e-6,
                    };
                    assert!(
                        error <= bound * exact.abs() + 1e-30,
                        "{gating:?} {g} {u}: {} instead of {exact}",
                        gate[i]
                    );
                }
            }
        }
    }

    #[test]
    fn a_sigmoid_multiplies_every_element() {
        for cpu in cpus() {
            for len in [1, 8, 13, 40_003] {
                let gate: Vec<f32> = random(6, len).iter().map(|x| x * 30.0).collect();
                let before = random(7, len);
                let mut x = before.clone();
                cpu.multiply_by_sigmoid(&mut x, &gate);
                for i in 0..len {
                    let exact = f64::from(before[i]) / (1.0 + (-f64::from(gate[i])).exp());
                    assert!((f64::from(x[i]) - exact).abs() <= 4e-6 * exact.abs() + 1e-30);
                }
            }
        }
    }

    #[test]
    fn factors_of_gates_follow_their_functions() {
        for gate in [-90.0, -3.0, -0.5, 0.0, 1.0, 19.0, 21.0, 100.0] {
            let exact = f64::from(gate).exp();
            for (function, exact) in [
                (GateFunction::Sigmoid, exact / (1.0 + exact)),
                (GateFunction::Softplus, exact.ln_1p()),
            ] {
                let error = (f64::from(function.of(gate)) - exact).abs();
                assert!(error <= 1e-6 * exact + 1e-38, "{function:?} {gate}");
            }
        }
    }

    #[test]
    fn what_is_not_a_number_stays_so() {
        for (cpu, gating) in cpus().iter().flat_map(|cpu| ALL.map(|gating| (cpu, gating))) {
            let mut gate = [f32::NAN, 1.0, 2.0];
            cpu.gate_in_place(gating, &mut gate, &[1.0, f32::NAN, 1.0]);
            assert_eq!(gate.map(f32::is_nan), [true, true, false], "{gating:?}");
        }
    }
}
