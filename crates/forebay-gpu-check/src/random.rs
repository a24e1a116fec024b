//! Reproducible inputs.

/// A small generator (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// In `-1.0..1.0`.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// About normally distributed, with now and then a large one.
    pub fn gaussian(&mut self) -> f32 {
        let sum: f32 = (0..6).map(|_| self.unit()).sum();
        sum * 0.7 * if self.next().is_multiple_of(64) { 8.0 } else { 1.0 }
    }

    pub fn gaussians(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.gaussian()).collect()
    }
}
