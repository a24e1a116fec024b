//! Mixing of adjacent elements by a Hadamard matrix, which spreads outliers before keys and values are rounded.

use forebay_ops::KvType;

use super::share;
use crate::cpu::Cpu;
use crate::kv::KvShape;

/// Most elements that are mixed with each other. Longer matrices round a little better and cost more.
const MIXED_MAX: usize = 64;

impl KvShape {
    /// Returns the number of adjacent elements of queries, keys and values that are mixed before they are stored as `kind`: a power
    /// of two that divides the lengths of keys and values, or 1 if nothing is mixed.
    ///
    /// The matrix is orthogonal and symmetric. So products of queries with keys stay, and mixing sums of values once more gives the sums
    /// of what the values were.
    pub fn mixed(&self, kind: KvType) -> usize {
        match kind {
            KvType::F16 | KvType::F32 => 1,
            KvType::Q8_0 | KvType::Q4_0 => {
                let common = (self.head_dim_k | self.head_dim_v).trailing_zeros();
                MIXED_MAX.min(1 << common.min(usize::BITS - 1))
            }
        }
    }
}

impl Cpu {
    /// Multiplies every `mixed` adjacent elements by the Hadamard matrix of this size, divided by the square root of `mixed`. Doing
    /// so twice gives the elements again, but for rounding. Every device takes the same steps in the same order.
    ///
    /// # Panics
    /// Panics if `mixed` is no power of two, or if `x` is no whole number of so many elements.
    pub fn mix(&self, x: &mut [f32], mixed: usize) {
        assert!(mixed.is_power_of_two(), "mix: {mixed} elements");
        assert!(x.len().is_multiple_of(mixed), "mix: {} elements by {mixed}", x.len());
        if mixed == 1 || x.is_empty() {
            return;
        }
        let factor = 1.0 / (mixed as f32).sqrt();
        self.pool.for_each_chunk_mut(x, share(x.len(), mixed), |_, _, x| {
            for group in x.chunks_exact_mut(mixed) {
                let mut distance = 1;
                while distance < mixed {
                    for pair in group.chunks_exact_mut(2 * distance) {
                        let (low, high) = pair.split_at_mut(distance);
                        for (a, b) in low.iter_mut().zip(high) {
                            (*a, *b) = (*a + *b, *a - *b);
                        }
                    }
                    distance *= 2;
                }
                group.iter_mut().for_each(|x| *x *= factor);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{KvCache, KvLayer};
    use crate::testing::{cpus, random};

    #[test]
    fn products_stay_and_a_second_time_undoes_it() {
        for cpu in cpus() {
            for (mixed, groups) in [(2, 3), (16, 40), (64, 1), (64, 2000)] {
                let (a, b) = (random(1, mixed * groups), random(2, mixed * groups));
                let (mut c, mut d) = (a.clone(), b.clone());
                cpu.mix(&mut c, mixed);
                cpu.mix(&mut d, mixed);
                assert_ne!(a, c);
                let dot = |x: &[f32], y: &[f32]| -> f64 {
                    x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
                };
                for at in (0..a.len()).step_by(mixed) {
                    let of = at..at + mixed;
                    let (before, after) =
                        (dot(&a[of.clone()], &b[of.clone()]), dot(&c[of.clone()], &d[of]));
                    assert!((before - after).abs() < 1e-4, "{before} {after}");
                }
                cpu.mix(&mut c, mixed);
                assert!(a.iter().zip(&c).all(|(a, c)| (a - c).abs() < 1e-5));
            }
        }
    }

    #[test]
    fn an_outlier_is_spread_evenly() {
        let mut x = vec![0.0; 64];
        x[5] = 8.0;
        cpus()[0].mix(&mut x, 64);
        assert!(x.iter().all(|x| x.abs() == 1.0), "{x:?}");
    }

    /// Keys of real models have a few channels that are much larger than the others, which rounding would lose.
    #[test]
    fn keys_with_an_outlier_lose_less_when_they_are_mixed() {
        let cpu = &cpus()[0];
        let shape = KvShape { kv_heads: 1, head_dim_k: 64, head_dim_v: 1, values_in_keys: true };
        let mut key = random(3, 64);
        key[5] = 20.0;
        for (kind, share) in [(KvType::Q8_0, 0.5), (KvType::Q4_0, 0.5)] {
            let loss = |mixed: usize| -> f32 {
                let mut cache = KvCache::new(&[KvLayer::new(shape, 0)], &[2], kind).unwrap();
                let mut row = key.clone();
                cpu.mix(&mut row, mixed);
                cache.write(cpu, 0, &[1], 0, &row, &[]);
                let mut kept = cache.key(cpu, 0, &[1], 0, 0);
                cpu.mix(&mut kept, mixed);
                key.iter().zip(&kept).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt()
            };
            let (plain, mixed) = (loss(1), loss(64));
            assert!(mixed < share * plain, "{kind:?}: {plain} without, {mixed} with");
        }
    }

    #[test]
    fn lengths_that_have_no_common_power_of_two_stay() {
        let of = |head_dim_k, head_dim_v, values_in_keys| {
            let shape = KvShape { kv_heads: 1, head_dim_k, head_dim_v, values_in_keys };
            [KvType::F16, KvType::F32, KvType::Q8_0, KvType::Q4_0].map(|kind| shape.mixed(kind))
        };
        assert_eq!(of(128, 128, false), [1, 1, 64, 64]);
        assert_eq!(of(576, 512, true), [1, 1, 64, 64]);
        assert_eq!(of(48, 32, true), [1, 1, 16, 16]);
        assert_eq!(of(192, 128, false), [1, 1, 64, 64]);
        assert_eq!(of(33, 32, false), [1, 1, 1, 1]);
    }
}
