//! Numbers that look random and are the same every time.

/// A multiplicative generator (Knuth's MMIX constants).
pub(crate) struct PseudoRandom {
    state: u64,
}

impl PseudoRandom {
    pub fn new(seed: u64) -> PseudoRandom {
        PseudoRandom { state: seed }
    }

    /// The next one below `end`; 0 where there is none.
    pub fn below(&mut self, end: u32) -> u32 {
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        // The lower bits of such a state have short periods.
        ((self.state >> 33) % u64::from(end.max(1))) as u32
    }
}
