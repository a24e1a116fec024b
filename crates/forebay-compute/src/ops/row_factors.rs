//! Factors of whole rows and of columns.

use super::share;
use crate::cpu::Cpu;

/// Factor of queries that grows with their position: `1 + rate * ln(g)`, where `g` is given by [`Temperature::growth`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Temperature {
    pub rate: f32,
    /// Length of a step in positions.
    pub step: f32,
    /// Number of the first position: 1 if steps include the token itself.
    pub first: u32,
    pub growth: Growth,
}

/// What the factor of a query at position `p` is a logarithm of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Growth {
    /// 1 and the number of whole steps in `p + first` (Llama 4, Ministral 3).
    WholeSteps,
    /// `(p + first) / step`, but at least 1 (Inkling).
    Ratio,
}

impl Temperature {
    /// Returns the factor of a token's query.
    pub fn factor(&self, position: u32) -> f32 {
        let ratio = (position as f32 + self.first as f32) / self.step;
        match self.growth {
            Growth::WholeSteps => 1.0 + self.rate * ratio.floor().ln_1p(),
            Growth::Ratio => 1.0 + self.rate * ratio.max(1.0).ln(),
        }
    }
}

impl Cpu {
    /// Multiplies every row of `x` `[factors.len(), n]` by its factor.
    ///
    /// # Panics
    /// Panics if `x` is no whole number of rows for each factor.
    pub fn multiply_rows(&self, x: &mut [f32], factors: &[f32]) {
        if factors.is_empty() {
            assert!(x.is_empty(), "multiply_rows: rows without factors");
            return;
        }
        let row = x.len() / factors.len();
        assert!(row > 0 && row * factors.len() == x.len(), "multiply_rows: no whole rows");
        self.pool.for_each_chunk_mut(x, share(x.len(), row), |_, start, x| {
            for (x, factor) in x.chunks_exact_mut(row).zip(&factors[start / row..]) {
                x.iter_mut().for_each(|x| *x *= factor);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpus, random};

    #[test]
    fn rows_are_multiplied_by_their_factors() {
        for cpu in cpus() {
            for (rows, width) in [(1, 5), (3, 64), (300, 130)] {
                let (x, factors) = (random(1, rows * width), random(2, rows));
                let mut y = x.clone();
                cpu.multiply_rows(&mut y, &factors);
                for (at, (x, y)) in x.iter().zip(&y).enumerate() {
                    assert_eq!(*y, x * factors[at / width]);
                }
            }
        }
    }

    #[test]
    fn the_temperature_rises_by_whole_steps() {
        let growth = Growth::WholeSteps;
        let temperature = Temperature { rate: 0.1, step: 16.0, first: 1, growth };
        let expected = |steps: f64| (1.0 + 0.1 * (1.0 + steps).ln()) as f32;
        for (position, steps) in
            [(0, 0.0), (14, 0.0), (15, 1.0), (30, 1.0), (31, 2.0), (1599, 100.0)]
        {
            assert!((temperature.factor(position) - expected(steps)).abs() < 1e-6, "{position}");
            let later = Temperature { first: 0, ..temperature };
            assert_eq!(later.factor(position + 1), temperature.factor(position), "{position}");
        }
    }

    #[test]
    fn the_temperature_of_a_ratio_rises_with_every_position() {
        let temperature = Temperature { rate: 0.1, step: 16.0, first: 1, growth: Growth::Ratio };
        for position in [0, 7, 15] {
            assert_eq!(temperature.factor(position), 1.0, "{position}");
        }
        for position in [16_u32, 31, 1599] {
            let expected = 1.0 + 0.1 * (f64::from(position + 1) / 16.0).ln();
            assert!(
                (f64::from(temperature.factor(position)) - expected).abs() < 1e-6,
                "{position}"
            );
        }
    }

    #[test]
    fn columns_are_multiplied_by_their_factors() {
        for cpu in cpus() {
            for (rows, width) in [(1, 5), (3, 64), (300, 130)] {
                let (x, factors) = (random(3, rows * width), random(4, width));
                let mut y = x.clone();
                cpu.multiply_columns(&mut y, &factors);
                for (at, (x, y)) in x.iter().zip(&y).enumerate() {
                    assert_eq!(*y, x * factors[at % width]);
                }
            }
        }
    }
}
