//! Rotary position embedding (Su et al. 2021, "RoFormer") and the ways in which models stretch it
//! to longer contexts.

use std::f64::consts::PI;

use super::share;
use crate::cpu::Cpu;
use crate::error::ComputeError;

/// Pairing of the elements of a head that are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// Elements `2i` and `2i + 1`: GGUF files of the llama, mistral and mixtral architectures.
    Interleaved,
    /// Elements `i` and `i + rotary_dim / 2`: GPT-NeoX, Qwen, and every Hugging Face llama.
    Neox,
}

/// Rule that stretches the angles beyond the context that a model was trained with.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum RopeScaling {
    #[default]
    None,
    /// Divides all angles by `factor` (Chen et al. 2023, "Extending Context Window ... via Positional Interpolation").
    Linear { factor: f64 },
    /// The rule of Llama 3.1: divides long wavelengths by `factor`, keeps short ones, and uses a ramp between.
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_context: f64 },
    /// The rule of Peng et al. 2023, "YaRN", section 3.
    Yarn {
        factor: f64,
        original_context: f64,
        /// Number of rotations within the original context above which an angle is kept (usually 32).
        beta_fast: f64,
        /// Number of rotations below which an angle is divided by the full `factor` (usually 1).
        beta_slow: f64,
        /// True if the ends of the ramp are rounded to whole dimensions, as in all models but gpt-oss.
        truncate: bool,
        /// Factor applied to sine and cosine. `None` selects the paper's `0.1 ln(factor) + 1`. See
        /// [`RopeScaling::yarn_magnitude`] for models that give `mscale` and `mscale_all_dim`.
        magnitude: Option<f64>,
    },
    /// The rule of Ding et al. 2024, "LongRoPE", as Phi-3 uses it. Each pair is divided by its own factor, and sine and
    /// cosine are multiplied by a magnitude. Contexts up to the original one have other factors than longer ones.
    /// [`RopeConfig::frequency_factors`] must hold the right ones.
    LongRope {
        original_context: f64,
        /// Magnitude for contexts up to the original one.
        short_magnitude: f64,
        /// Magnitude for longer contexts.
        long_magnitude: f64,
    },
}

impl RopeScaling {
    /// Returns true if a cache of `context` positions is longer than the original context and the rule has other
    /// factors there.
    pub fn is_long(self, context: usize) -> bool {
        match self {
            RopeScaling::LongRope { original_context, .. } => context as f64 > original_context,
            _ => false,
        }
    }

    /// Returns the default magnitude of LongRoPE for a context `factor` times the original one. Phi-3 uses it when its
    /// configuration gives none.
    pub fn long_rope_magnitude(factor: f64, original_context: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original_context.ln()).sqrt() }
    }

    /// Returns the `magnitude` of models that configure `mscale` and `mscale_all_dim` (DeepSeek-V2).
    pub fn yarn_magnitude(factor: f64, mscale: f64, mscale_all_dim: f64) -> f64 {
        yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
    }
}

fn yarn_scale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// Input of [`RopeTable::new`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig<'a> {
    /// Number of elements of each head that are rotated; even. The others are unchanged.
    pub rotary_dim: usize,
    /// Index of the first rotated element: 0 for all but DeepSeek, whose heads are rotated at their end.
    pub rotary_from: usize,
    /// Base of the angles: 10000 in the paper.
    pub theta: f64,
    pub layout: RopeLayout,
    pub scaling: RopeScaling,
    /// Divisors of each pair's frequency, applied after `scaling`: GGUF's `rope_freqs.weight`, or the factors of
    /// [`RopeScaling::LongRope`]. One per pair.
    pub frequency_factors: Option<&'a [f32]>,
    /// Number of positions to tabulate.
    pub context: usize,
}

/// Cosine and sine of every angle of every position up to the context's end.
#[derive(Debug, Clone)]
pub struct RopeTable {
    rotary_dim: usize,
    rotary_from: usize,
    layout: RopeLayout,
    context: usize,
    /// `[context, 2, pairs]`: a position's cosines, then its sines.
    table: Vec<f32>,
}

impl RopeTable {
    /// Tabulates the angles in f64 and rounds them to f32 at the end.
    ///
    /// # Errors
    /// Returns [`ComputeError::Rope`] in these cases:
    ///
    /// - `rotary_dim` is odd or zero.
    /// - A number that must be positive and finite is not.
    /// - The frequency factors have the wrong length.
    /// - The table does not fit into memory.
    pub fn new(config: &RopeConfig<'_>) -> Result<RopeTable, ComputeError> {
        let frequencies = frequencies(config)?;
        let pairs = frequencies.len();
        let magnitude = match config.scaling {
            RopeScaling::Yarn { factor, magnitude, .. } => {
                magnitude.unwrap_or_else(|| yarn_scale(factor, 1.0))
            }
            RopeScaling::LongRope { short_magnitude, long_magnitude, .. } => {
                if config.scaling.is_long(config.context) {
                    long_magnitude
                } else {
                    short_magnitude
                }
            }
            _ => 1.0,
        };
        let mut table: Vec<f32> = Vec::new();
        let len = config.context.checked_mul(config.rotary_dim);
        if len.is_none_or(|len| table.try_reserve_exact(len).is_err()) {
            return fail(format!("no memory for {} positions of {pairs} pairs", config.context));
        }
        for position in 0..config.context {
            let angles = || frequencies.iter().map(|frequency| frequency * position as f64);
            table.extend(angles().map(|angle| (angle.cos() * magnitude) as f32));
            table.extend(angles().map(|angle| (angle.sin() * magnitude) as f32));
        }
        let RopeConfig { rotary_dim, rotary_from, layout, context, .. } = *config;
        Ok(RopeTable { rotary_dim, rotary_from, layout, context, table })
    }

    /// Returns the number of positions in the table.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Returns the number of elements of each head that are rotated.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim
    }

    /// Returns the index of the first element of each head that is rotated.
    pub fn rotary_from(&self) -> usize {
        self.rotary_from
    }

    /// Returns the size of the table in bytes.
    pub fn bytes(&self) -> u64 {
        (self.table.len() * size_of::<f32>()) as u64
    }

    /// Returns the pairing of the elements that are rotated together.
    pub fn layout(&self) -> RopeLayout {
        self.layout
    }

    /// Returns the table as `[context, 2, rotary_dim / 2]`: for each position the cosines, then the sines. Other
    /// devices copy it.
    pub fn angles(&self) -> &[f32] {
        &self.table
    }

    /// Rotates one head, forward or `back`.
    fn turn(&self, head: &mut [f32], position: usize, back: bool) {
        let pairs = self.rotary_dim / 2;
        let direction = |sin: f32| if back { -sin } else { sin };
        let row = &self.table[position * self.rotary_dim..][..self.rotary_dim];
        let (cos, sin) = row.split_at(pairs);
        let head = &mut head[self.rotary_from..][..self.rotary_dim];
        match self.layout {
            RopeLayout::Interleaved => {
                let angles = cos.iter().zip(sin);
                for (pair, (cos, sin)) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                    let ([a, b], sin) = (*pair, direction(*sin));
                    *pair = [a * cos - b * sin, a * sin + b * cos];
                }
            }
            RopeLayout::Neox => {
                let (low, high) = head.split_at_mut(pairs);
                let angles = cos.iter().zip(sin);
                for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(angles) {
                    let (a, b, sin) = (*low, *high, direction(*sin));
                    *low = a * cos - b * sin;
                    *high = a * sin + b * cos;
                }
            }
        }
    }
}

impl Cpu {
    /// Rotates the heads of `x` `[tokens, heads, head_dim]` in place. Token `t` is at position `positions[t]`.
    ///
    /// # Panics
    /// Panics if `head_dim` is 0 or smaller than the table's rotary part, `x` is not that shape, or a position lies
    /// beyond the table.
    pub fn rope(&self, x: &mut [f32], head_dim: usize, positions: &[u32], table: &RopeTable) {
        self.turn_heads(x, head_dim, positions, table, false);
    }

    /// Rotates the heads of `x` back: undoes [`Cpu::rope`], up to rounding and the table's magnitude.
    ///
    /// # Panics
    /// Panics as [`Cpu::rope`] does.
    pub fn rope_back(&self, x: &mut [f32], head_dim: usize, positions: &[u32], table: &RopeTable) {
        self.turn_heads(x, head_dim, positions, table, true);
    }

    fn turn_heads(
        &self,
        x: &mut [f32],
        head_dim: usize,
        positions: &[u32],
        table: &RopeTable,
        back: bool,
    ) {
        assert!(
            head_dim > 0 && table.rotary_dim + table.rotary_from <= head_dim,
            "rope: heads are too short"
        );
        if positions.is_empty() {
            assert!(x.is_empty(), "rope: x has tokens without positions");
            return;
        }
        let row = x.len() / positions.len();
        assert!(
            row * positions.len() == x.len() && row > 0 && row.is_multiple_of(head_dim),
            "rope: x is not [tokens, heads, head_dim]"
        );
        assert!(
            positions.iter().all(|&position| (position as usize) < table.context),
            "rope: a position lies beyond the table of {}",
            table.context
        );
        let share = share(x.len(), row);
        self.pool.for_each_chunk_mut(x, share, |_, start, x| {
            for (x, &position) in x.chunks_exact_mut(row).zip(&positions[start / row..]) {
                for head in x.chunks_exact_mut(head_dim) {
                    table.turn(head, position as usize, back);
                }
            }
        });
    }
}

fn fail<T>(why: String) -> Result<T, ComputeError> {
    Err(ComputeError::Rope { why })
}

fn positive(name: &str, x: f64) -> Result<(), ComputeError> {
    if x.is_finite() && x > 0.0 { Ok(()) } else { fail(format!("{name} is {x}")) }
}

/// Returns the angle in radians by which each pair is rotated from one position to the next.
fn frequencies(config: &RopeConfig<'_>) -> Result<Vec<f64>, ComputeError> {
    let dim = config.rotary_dim;
    if dim == 0 || !dim.is_multiple_of(2) {
        return fail(format!("the rotary part of a head is {dim} elements long"));
    }
    positive("theta", config.theta)?;
    let plain = |pair: usize| config.theta.powf(-((2 * pair) as f64) / dim as f64);
    let mut frequencies: Vec<f64> = (0..dim / 2).map(plain).collect();
    scale_frequencies(&mut frequencies, config)?;
    if let Some(factors) = config.frequency_factors {
        if factors.len() != frequencies.len() {
            let (given, pairs) = (factors.len(), frequencies.len());
            return fail(format!("{given} frequency factors for {pairs} pairs"));
        }
        for (frequency, &factor) in frequencies.iter_mut().zip(factors) {
            positive("a frequency factor", f64::from(factor))?;
            *frequency /= f64::from(factor);
        }
    }
    for &frequency in &frequencies {
        positive("a frequency", frequency)?;
    }
    Ok(frequencies)
}

fn scale_frequencies(frequencies: &mut [f64], config: &RopeConfig<'_>) -> Result<(), ComputeError> {
    match config.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            positive("the scaling factor", factor)?;
            frequencies.iter_mut().for_each(|frequency| *frequency /= factor);
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            positive("the scaling factor", factor)?;
            positive("the low frequency factor", low_freq_factor)?;
            positive("the distance of the frequency factors", high_freq_factor - low_freq_factor)?;
            positive("the original context", original_context)?;
            for frequency in frequencies {
                let rotations = original_context * *frequency / (2.0 * PI);
                // 0 for the slow pairs, which are divided by the full factor, and 1 for the fast pairs, which are kept.
                let kept = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                *frequency *= ramp(kept, factor);
            }
        }
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            truncate,
            magnitude,
        } => {
            positive("the scaling factor", factor)?;
            positive("the original context", original_context)?;
            positive("beta_fast", beta_fast)?;
            positive("beta_slow", beta_slow)?;
            positive("the magnitude", magnitude.unwrap_or(1.0))?;
            let dim = config.rotary_dim as f64;
            // Dimension whose pair makes this many rotations within the original context.
            let dimension_of = |rotations: f64| {
                dim * (original_context / (rotations * 2.0 * PI)).ln() / (2.0 * config.theta.ln())
            };
            let (mut low, mut high) = (dimension_of(beta_fast), dimension_of(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(dim - 1.0));
            let width = if low == high { 0.001 } else { high - low };
            for (pair, frequency) in frequencies.iter_mut().enumerate() {
                let kept = 1.0 - ((pair as f64 - low) / width).clamp(0.0, 1.0);
                *frequency *= ramp(kept, factor);
            }
        }
        RopeScaling::LongRope { original_context, short_magnitude, long_magnitude } => {
            positive("the original context", original_context)?;
            positive("the magnitude", short_magnitude)?;
            positive("the magnitude", long_magnitude)?;
            if config.frequency_factors.is_none() {
                return fail("LongRoPE has no frequency factors".into());
            }
        }
    }
    Ok(())
}

/// Interpolates between `1 / factor` (`kept` 0 or less) and 1 (`kept` 1 or more).
fn ramp(kept: f64, factor: f64) -> f64 {
    let kept = kept.clamp(0.0, 1.0);
    kept + (1.0 - kept) / factor
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpus, random};

    fn config(layout: RopeLayout, scaling: RopeScaling) -> RopeConfig<'static> {
        let (rotary_dim, theta) = (8, 10_000.0);
        RopeConfig {
            rotary_dim,
            rotary_from: 0,
            theta,
            layout,
            scaling,
            frequency_factors: None,
            context: 64,
        }
    }

    #[test]
    fn pairs_turn_by_their_angle_in_both_layouts_and_the_rest_stays() {
        for cpu in cpus() {
            for layout in [RopeLayout::Interleaved, RopeLayout::Neox] {
                let table = RopeTable::new(&config(layout, RopeScaling::None)).unwrap();
                let positions: Vec<u32> = (0..900).map(|t| (t * 7 % 64) as u32).collect();
                let (heads, dim) = (2, 12);
                let x = random(3, positions.len() * heads * dim);
                let mut y = x.clone();
                cpu.rope(&mut y, dim, &positions, &table);
                for (at, &position) in positions.iter().enumerate() {
                    for head in 0..heads {
                        let first = (at * heads + head) * dim;
                        let (x, y) = (&x[first..][..dim], &y[first..][..dim]);
                        for pair in 0..4 {
                            let angle = f64::from(position) * 1e4_f64.powf(-(pair as f64) / 4.0);
                            let (i, j) = match layout {
                                RopeLayout::Interleaved => (2 * pair, 2 * pair + 1),
                                RopeLayout::Neox => (pair, pair + 4),
                            };
                            let (a, b) = (f64::from(x[i]), f64::from(x[j]));
                            let exact = (
                                a * angle.cos() - b * angle.sin(),
                                a * angle.sin() + b * angle.cos(),
                            );
                            assert!((exact.0 - f64::from(y[i])).abs() < 1e-6);
                            assert!((exact.1 - f64::from(y[j])).abs() < 1e-6);
                        }
                        assert_eq!(x[8..], y[8..]);
                    }
                }
            }
        }
    }

    #[test]
    fn the_end_of_a_head_turns_as_its_beginning_would() {
        for cpu in cpus() {
            for layout in [RopeLayout::Interleaved, RopeLayout::Neox] {
                let config = config(layout, RopeScaling::None);
                let beginning = RopeTable::new(&config).unwrap();
                let end = RopeTable::new(&RopeConfig { rotary_from: 5, ..config }).unwrap();
                let positions = [3, 0, 63];
                let x = random(4, 3 * 2 * 13);
                let mut y = x.clone();
                cpu.rope(&mut y, 13, &positions, &end);
                for (row, (x, y)) in x.chunks(13).zip(y.chunks(13)).enumerate() {
                    let mut alone = x[5..].to_vec();
                    cpu.rope(&mut alone, 8, &positions[row / 2..][..1], &beginning);
                    assert_eq!((&x[..5], &alone[..]), y.split_at(5));
                }
            }
        }
    }

    #[test]
    fn llama3_scaling_keeps_fast_pairs_and_divides_slow_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192.0,
        };
        let config = RopeConfig {
            rotary_dim: 128,
            rotary_from: 0,
            theta: 500_000.0,
            layout: RopeLayout::Neox,
            scaling,
            frequency_factors: None,
            context: 1,
        };
        let plain = |pair: usize| 500_000_f64.powf(-(pair as f64) / 64.0);
        let scaled = frequencies(&config).unwrap();
        for (pair, &scaled) in scaled.iter().enumerate() {
            // The rule as the Llama 3.1 release states it, by wavelengths.
            let wavelength = 2.0 * PI / plain(pair);
            let expected = if wavelength > 8192.0 {
                plain(pair) / 8.0
            } else if wavelength < 8192.0 / 4.0 {
                plain(pair)
            } else {
                let smooth = (8192.0 / wavelength - 1.0) / 3.0;
                (1.0 - smooth) * plain(pair) / 8.0 + smooth * plain(pair)
            };
            assert!((scaled / expected - 1.0).abs() < 1e-12, "pair {pair}");
        }
        // The same rule given as frequency factors, which is how GGUF stores it.
        let factors: Vec<f32> =
            scaled.iter().enumerate().map(|(pair, f)| (plain(pair) / f) as f32).collect();
        let by_factors = frequencies(&RopeConfig {
            scaling: RopeScaling::None,
            frequency_factors: Some(&factors),
            ..config
        });
        for (a, b) in by_factors.unwrap().iter().zip(&scaled) {
            assert!((a / b - 1.0).abs() < 1e-6);
        }
    }

    #[test]
    fn linear_and_yarn_scaling() {
        let plain = frequencies(&config(RopeLayout::Neox, RopeScaling::None)).unwrap();
        let linear = RopeScaling::Linear { factor: 4.0 };
        let scaled = frequencies(&config(RopeLayout::Neox, linear)).unwrap();
        assert!(plain.iter().zip(&scaled).all(|(a, b)| (a / b - 4.0).abs() < 1e-12));

        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 32_768.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            magnitude: None,
        };
        let config = RopeConfig {
            rotary_dim: 128,
            rotary_from: 0,
            theta: 1_000_000.0,
            layout: RopeLayout::Neox,
            scaling: yarn,
            frequency_factors: None,
            context: 2,
        };
        let scaled = frequencies(&config).unwrap();
        // 128 ln(32768 / (64 pi)) / (2 ln 1e6) = 23.6 and 128 ln(32768 / 2 pi) / ... = 39.7.
        for (pair, scaled) in scaled.iter().enumerate() {
            let plain = 1e6_f64.powf(-(pair as f64) / 64.0);
            let slow = ((pair as f64 - 23.0) / 17.0).clamp(0.0, 1.0);
            let expected = plain * (slow / 4.0 + 1.0 - slow);
            assert!((scaled / expected - 1.0).abs() < 1e-12, "pair {pair}");
        }
        let table = RopeTable::new(&config).unwrap();
        assert!((f64::from(table.table[0]) - (0.1 * 4_f64.ln() + 1.0)).abs() < 1e-6);
        assert_eq!(RopeScaling::yarn_magnitude(40.0, 1.0, 1.0), 1.0);
    }

    #[test]
    fn long_rope_has_factors_and_a_magnitude_by_its_context() {
        let (short, long) = ([1.0, 1.25, 1.5, 2.0], [1.5, 4.0, 9.0, 33.5]);
        let magnitude = RopeScaling::long_rope_magnitude(32.0, 16.0);
        // ln 32 / ln 16 = 5/4.
        assert!((magnitude - 1.5).abs() < 1e-15);
        assert_eq!(RopeScaling::long_rope_magnitude(1.0, 16.0), 1.0);
        let scaling = RopeScaling::LongRope {
            original_context: 16.0,
            short_magnitude: 1.0,
            long_magnitude: magnitude,
        };
        for (context, factors, magnitude) in
            [(16, &short, 1.0), (17, &long, magnitude), (64, &long, magnitude)]
        {
            assert_eq!(scaling.is_long(context), context > 16);
            let factors_f32 = factors.map(|factor: f64| factor as f32);
            let config = RopeConfig {
                frequency_factors: Some(&factors_f32),
                context,
                ..config(RopeLayout::Neox, scaling)
            };
            let table = RopeTable::new(&config).unwrap();
            // The angles of RoPE (Su, Lu et al.) divided by the factors, in double precision.
            for (position, row) in table.angles().chunks(8).enumerate() {
                for (pair, factor) in factors.iter().enumerate() {
                    let angle = position as f64 * 1e4_f64.powf(-(pair as f64) / 4.0) / factor;
                    let found = (f64::from(row[pair]), f64::from(row[4 + pair]));
                    let expected = (magnitude * angle.cos(), magnitude * angle.sin());
                    assert!((found.0 - expected.0).abs() < 1e-6, "{context} {position} {pair}");
                    assert!((found.1 - expected.1).abs() < 1e-6, "{context} {position} {pair}");
                }
            }
        }
        let without = config(RopeLayout::Neox, scaling);
        assert!(RopeTable::new(&without).is_err());
        let three = RopeConfig { frequency_factors: Some(&[1.0; 3]), ..without };
        assert!(RopeTable::new(&three).is_err());
    }

    #[test]
    fn broken_configurations_are_errors() {
        let good = config(RopeLayout::Neox, RopeScaling::None);
        let linear = |factor| RopeScaling::Linear { factor };
        for bad in [
            RopeConfig { rotary_dim: 0, ..good },
            RopeConfig { rotary_dim: 7, ..good },
            RopeConfig { theta: 0.0, ..good },
            RopeConfig { theta: f64::NAN, ..good },
            RopeConfig { scaling: linear(1e-320), ..good },
            RopeConfig { scaling: linear(0.0), ..good },
            RopeConfig { scaling: linear(f64::INFINITY), ..good },
            RopeConfig { frequency_factors: Some(&[1.0]), ..good },
            RopeConfig { frequency_factors: Some(&[1.0, 1.0, 0.0, 1.0]), ..good },
            RopeConfig { context: usize::MAX, ..good },
            RopeConfig { context: usize::MAX / 64, ..good },
        ] {
            assert!(RopeTable::new(&bad).is_err(), "{bad:?}");
        }
        assert_eq!(RopeTable::new(&RopeConfig { context: 0, ..good }).unwrap().context(), 0);
    }
}
