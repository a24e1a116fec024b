//! Helpers for the unit tests of this crate.

use crate::cpu::{Arithmetic, Cpu, Isa};

/// Returns a backend of every kernel family that this machine runs, with several thread counts.
pub(crate) fn cpus() -> Vec<Cpu> {
    let all = Isa::supported().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]);
    all.map(|(isa, threads)| Cpu::new(threads, isa, Arithmetic::Fast)).collect()
}

/// Returns `len` reproducible numbers in -1..1 (SplitMix64, Steele et al. 2014).
pub(crate) fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x5851_F42D_4C95_7F2D);
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}
