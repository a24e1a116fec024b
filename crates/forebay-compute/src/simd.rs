//! Vectors of eight floats. Kernels are written once against [`Simd`] and compiled for AVX2 and, in
//! a portable form, for the compilation target's own instructions.
//!
//! A value of `Avx2` is the proof that the machine has the instructions. Only [`dispatch`] makes
//! one. Every kernel function is `inline(always)`, so that it becomes part of the function that
//! enables the instructions.

use crate::cpu::Cpu;

/// Number of floats in one vector.
pub(crate) const LANES: usize = 8;

/// Operations on vectors of [`LANES`] floats.
pub(crate) trait Simd: Copy {
    /// A vector of [`LANES`] floats.
    type V: Copy;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, from: &[f32; LANES]) -> Self::V;
    fn store(self, v: Self::V, to: &mut [f32; LANES]);
    /// Widens IEEE half-precision numbers, given as bits.
    fn load_f16(self, from: &[u16; LANES]) -> Self::V;
    /// Widens one half-precision number and copies it to every lane.
    fn splat_f16(self, bits: u16) -> Self::V;
    /// Widens bytes.
    fn load_i8(self, from: &[i8; LANES]) -> Self::V;
    /// Widens 4-bit halves of bytes, 0 to 15. The low half of each byte comes first.
    fn load_nibbles(self, from: &[u8; LANES / 2]) -> Self::V;
    /// Rounds to IEEE half precision, ties to even.
    fn store_f16(self, v: Self::V, to: &mut [u16; LANES]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// Computes `a * b + c`, fused in `Avx2` and rounded twice in `Portable`.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Returns the larger of both lanes, or `b`'s if either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns the smaller of both lanes, or `b`'s if either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns `yes` where `a < b`, else `no`, also where either is NaN.
    fn select_less(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Rounds to the nearest integer, ties to even.
    fn round(self, v: Self::V) -> Self::V;
    /// Returns 2 to the power of an integer lane in -126..=127.
    fn power_of_two(self, n: Self::V) -> Self::V;
    /// Returns the sums of the lanes of each vector: lane `i` is the sum of `v[i]`.
    fn sums(self, v: [Self::V; LANES]) -> Self::V;

    /// Returns the sum of all lanes.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    /// Returns the largest lane that is not NaN.
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    /// Returns e to the power of each lane, with a relative error below 3e-7. Below -87.3 the
    /// result is 0, because the true one is not a normal number. Above 88.3 it is e^88.3. NaN gives
    /// NaN.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        // x = n ln 2 + r with |r| <= ln 2 / 2. ln 2 is given in two parts, the first short enough
        // for its product with n to be exact. e^r is the Taylor series to r^7, whose remainder is
        // below 6e-9.
        const LOWEST: f32 = -87.33;
        const LN2_HIGH: f32 = 355.0 / 512.0;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        let clamped = self.max(self.splat(LOWEST), x);
        let clamped = self.min(self.splat(88.37), clamped);
        let n = self.round(self.mul(clamped, self.splat(std::f32::consts::LOG2_E)));
        let r = self.mul_add(n, self.splat(-LN2_HIGH), clamped);
        let r = self.mul_add(n, self.splat(-LN2_LOW), r);
        let mut p = self.splat(1.0 / 5040.0);
        for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
            p = self.mul_add(p, r, self.splat(c));
        }
        let y = self.mul(p, self.power_of_two(n));
        self.select_less(x, self.splat(LOWEST), self.splat(0.0), y)
    }

    /// Returns the hyperbolic tangent, with a relative error below 2e-6.
    #[inline(always)]
    fn tanh(self, x: Self::V) -> Self::V {
        let one = self.splat(1.0);
        let square = self.exp(self.add(x, x));
        let large = self.sub(one, self.div(self.splat(2.0), self.add(square, one)));
        // Near 0 this subtracts two numbers close to 1. The Taylor series to x^11 is used there.
        // Its remainder is below 2e-8 of the sum.
        const NEAR: f32 = 0.35;
        let xx = self.mul(x, x);
        let mut p = self.splat(-1382.0 / 155_925.0);
        for c in [62.0 / 2835.0, -17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0] {
            p = self.mul_add(p, xx, self.splat(c));
        }
        let small = self.mul_add(self.mul(p, xx), x, x);
        self.select_less(xx, self.splat(NEAR * NEAR), small, large)
    }
}

/// Work that [`dispatch`] compiles for each kernel family. `run` must be `inline(always)`.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs `kernel` with the widest vectors of the kernel family that `cpu` was created for.
#[inline]
pub(crate) fn dispatch<K: Kernel>(cpu: &Cpu, kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    if cpu.isa.has_avx2() {
        // SAFETY: `Cpu::new` has checked that this machine runs the family, which includes AVX2,
        // FMA and F16C.
        return unsafe { avx2::run(kernel) };
    }
    let _ = cpu;
    kernel.run(Portable)
}

/// Vectors computed with the compilation target's own instructions.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

macro_rules! lanewise {
    ($a:ident, $b:ident => $result:expr) => {
        std::array::from_fn(|i| {
            let ($a, $b) = ($a[i], $b[i]);
            $result
        })
    };
}

impl Simd for Portable {
    type V = [f32; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::V {
        *from
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        *to = v;
    }
    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> Self::V {
        from.map(|bits| half::f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    fn splat_f16(self, bits: u16) -> Self::V {
        [half::f16::from_bits(bits).to_f32(); LANES]
    }
    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::V {
        from.map(f32::from)
    }
    #[inline(always)]
    fn load_nibbles(self, from: &[u8; LANES / 2]) -> Self::V {
        std::array::from_fn(|i| f32::from(from[i / 2] >> (i % 2 * 4) & 15))
    }
    #[inline(always)]
    fn store_f16(self, v: Self::V, to: &mut [u16; LANES]) {
        *to = v.map(|x| half::f16::from_f32(x).to_bits());
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(a, b => a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(a, b => a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(a, b => a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(a, b => a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(a, b => if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        lanewise!(a, b => if a < b { a } else { b })
    }
    #[inline(always)]
    fn select_less(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn round(self, v: Self::V) -> Self::V {
        v.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn power_of_two(self, n: Self::V) -> Self::V {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn sums(self, v: [Self::V; LANES]) -> Self::V {
        v.map(|v| self.sum(v))
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Kernel, LANES, Simd};
    use std::arch::x86_64::*;

    /// Proof that the machine has AVX2, FMA and F16C. Only [`run`] makes one.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(());

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
        kernel.run(Avx2(()))
    }

    /// Wraps one or more intrinsics whose instructions the machine has, as `Avx2` proves.
    macro_rules! avx2 {
        ($($body:tt)*) => {
            // SAFETY: `self` proves that the instructions exist. Memory is reached only through
            // references to arrays of exactly the width that is read or written.
            unsafe { $($body)* }
        };
    }

    impl Simd for Avx2 {
        type V = __m256;

        #[inline(always)]
        fn splat(self, x: f32) -> __m256 {
            avx2!(_mm256_set1_ps(x))
        }
        #[inline(always)]
        fn load(self, from: &[f32; LANES]) -> __m256 {
            avx2!(_mm256_loadu_ps(from.as_ptr()))
        }
        #[inline(always)]
        fn store(self, v: __m256, to: &mut [f32; LANES]) {
            avx2!(_mm256_storeu_ps(to.as_mut_ptr(), v))
        }
        #[inline(always)]
        fn load_f16(self, from: &[u16; LANES]) -> __m256 {
            avx2!(_mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())))
        }
        #[inline(always)]
        fn splat_f16(self, bits: u16) -> __m256 {
            avx2!(_mm256_cvtph_ps(_mm_set1_epi16(bits as i16)))
        }
        #[inline(always)]
        fn load_i8(self, from: &[i8; LANES]) -> __m256 {
            avx2!(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.as_ptr().cast()))))
        }
        #[inline(always)]
        fn load_nibbles(self, from: &[u8; LANES / 2]) -> __m256 {
            avx2!({
                let all = _mm256_set1_epi32(i32::from_le_bytes(*from));
                let shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
                let codes = _mm256_and_si256(_mm256_srlv_epi32(all, shifts), _mm256_set1_epi32(15));
                _mm256_cvtepi32_ps(codes)
            })
        }
        #[inline(always)]
        fn store_f16(self, v: __m256, to: &mut [u16; LANES]) {
            avx2!({
                let bits = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v);
                _mm_storeu_si128(to.as_mut_ptr().cast(), bits)
            })
        }
        #[inline(always)]
        fn add(self, a: __m256, b: __m256) -> __m256 {
            avx2!(_mm256_add_ps(a, b))
        }
        #[inline(always)]
        fn sub(self, a: __m256, b: __m256) -> __m256 {
            avx2!(_mm256_sub_ps(a, b))
        }
        #[inline(always)]
        fn mul(self, a: __m256, b: __m256) -> __m256 {
            avx2!(_mm256_mul_ps(a, b))
        }
        #[inline(always)]
        fn div(self, a: __m256, b: __m256) -> __m256 {
            avx2!(_mm256_div_ps(a, b))
        }
        #[inline(always)]
        fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
            avx2!(_mm256_fmadd_ps(a, b, c))
        }
        #[inline(always)]
        fn max(self, a: __m256, b: __m256) -> __m256 {
            avx2!(_mm256_max_ps(a, b))
        }
        #[inline(always)]
        fn min(self, a: __m256, b: __m256) -> __m256 {
            avx2!(_mm256_min_ps(a, b))
        }
        #[inline(always)]
        fn select_less(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
            avx2!(_mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)))
        }
        #[inline(always)]
        fn round(self, v: __m256) -> __m256 {
            avx2!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(v))
        }
        #[inline(always)]
        fn power_of_two(self, n: __m256) -> __m256 {
            avx2!({
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
            })
        }
        #[inline(always)]
        fn sums(self, v: [__m256; LANES]) -> __m256 {
            let [a, b, c, d, e, f, g, h] = v;
            avx2!({
                let low = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
                let high = _mm256_hadd_ps(_mm256_hadd_ps(e, f), _mm256_hadd_ps(g, h));
                // Each half still holds the sums of its own four lanes.
                let first = _mm256_permute2f128_ps::<0x20>(low, high);
                let second = _mm256_permute2f128_ps::<0x31>(low, high);
                _mm256_add_ps(first, second)
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Arithmetic, Isa};

    struct Exp<'a>(&'a [f32], &'a mut [f32]);
    impl Kernel for Exp<'_> {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let (x, y) = (self.0.as_chunks::<LANES>().0, self.1.as_chunks_mut::<LANES>().0);
            for (x, y) in x.iter().zip(y) {
                simd.store(simd.exp(simd.load(x)), y);
            }
        }
    }

    struct Sums([[f32; LANES]; LANES]);
    impl Kernel for Sums {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            simd.store(simd.sums(self.0.map(|row| simd.load(&row))), &mut out);
            out
        }
    }

    fn cpus() -> Vec<Cpu> {
        Isa::supported().into_iter().map(|isa| Cpu::new(1, isa, Arithmetic::Fast)).collect()
    }

    #[test]
    fn exp_is_accurate_everywhere() {
        let x: Vec<f32> = (0..400_000).map(|i| -87.3 + i as f32 * (175.6 / 400_000.0)).collect();
        for cpu in cpus() {
            let mut y = vec![0.0; x.len()];
            dispatch(&cpu, Exp(&x, &mut y));
            for (&x, &y) in x.iter().zip(&y) {
                let exact = f64::from(x).exp();
                let error = (f64::from(y) - exact).abs() / exact;
                assert!(error < 3e-7, "{}: exp({x}) = {y}, off by {error:e}", cpu.isa);
            }
        }
    }

    #[test]
    fn exp_of_special_values() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for cpu in cpus() {
            let mut y = [9.0; LANES];
            dispatch(&cpu, Exp(&[-inf, inf, nan, 0.0, -0.0, f32::MIN, f32::MAX, -90.0], &mut y));
            assert_eq!((y[0], y[3], y[4], y[5], y[7]), (0.0, 1.0, 1.0, 0.0, 0.0));
            assert!(y[1] > 2e38 && y[1].is_finite() && y[6] == y[1] && y[2].is_nan());
        }
    }

    #[test]
    fn sums_puts_each_vectors_sum_in_its_lane() {
        let v = std::array::from_fn(|i| std::array::from_fn(|j| (i * 100 + j) as f32));
        for cpu in cpus() {
            let expected = std::array::from_fn(|i| (i * 800 + 28) as f32);
            assert_eq!(dispatch(&cpu, Sums(v)), expected);
        }
    }
}
