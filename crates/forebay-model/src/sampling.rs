//! Sampling: chooses the next token from logits.

use serde::{Deserialize, Serialize};

/// Options for choosing the next token. The filters apply in the order of the fields below the seed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Seed of the random numbers. The same seed, prompt and options give the same text.
    pub seed: u64,
    /// Penalty for recent tokens: their logits are divided by it (multiplied if negative); 1 is off.
    /// Source: Keskar et al. 2019, "CTRL", section 4.1.
    pub repeat_penalty: f32,
    /// Number of recent tokens to which the penalty applies.
    pub repeat_window: usize,
    /// Keep the k likeliest tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set of tokens whose probability reaches p; 1 keeps all.
    /// Source: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration".
    pub top_p: f32,
    /// Drop tokens less likely than this fraction of the likeliest token's probability; 0 keeps all.
    pub min_p: f32,
    /// Divisor of the logits; 0 always takes the likeliest token.
    pub temperature: f32,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            seed: 0,
            repeat_penalty: 1.0,
            repeat_window: 64,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            temperature: 0.8,
        }
    }
}

impl Sampling {
    /// Returns options that always take the likeliest token.
    pub fn greedy() -> Self {
        Sampling { temperature: 0.0, ..Sampling::default() }
    }
}

/// A sampler with its random state. Buffers are reused from token to token.
pub struct Sampler {
    options: Sampling,
    random: SplitMix64,
    candidates: Vec<(f32, u32)>,
    penalised: Vec<u32>,
}

impl Sampler {
    pub fn new(options: Sampling, vocabulary: usize) -> Sampler {
        let random = SplitMix64 { state: options.seed };
        let penalised = Vec::with_capacity(options.repeat_window);
        Sampler { options, random, candidates: Vec::with_capacity(vocabulary), penalised }
    }

    /// Returns the state of the random numbers, with which another sampler can go on.
    pub fn random_state(&self) -> u64 {
        self.random.state
    }

    /// Continues with the random numbers of another sampler.
    pub fn set_random_state(&mut self, state: u64) {
        self.random.state = state;
    }

    /// Returns how many of the largest logits are enough to choose a token; `None` if all are needed.
    pub fn deciding(&self) -> Option<usize> {
        let Sampling { temperature, top_k, repeat_penalty, repeat_window, .. } = self.options;
        let kept = match temperature <= 0.0 {
            true => 1,
            false if top_k > 0 => top_k,
            false => return None,
        };
        // A penalty above 1 lowers logits and never raises them, so at most `repeat_window` of the largest can drop
        // out.
        match repeat_penalty {
            1.0 => Some(kept),
            penalty if penalty > 1.0 => Some(kept.saturating_add(repeat_window)),
            _ => None,
        }
    }

    /// Chooses a token. `recent` holds the tokens so far, the latest last.
    pub fn sample(&mut self, logits: &[f32], recent: &[u32]) -> u32 {
        self.candidates.clear();
        self.candidates.extend(logits.iter().zip(0..).map(|(logit, id)| (*logit, id)));
        self.choose(recent)
    }

    /// Chooses a token like [`Sampler::sample`], from the largest logits and their ids. [`Sampler::deciding`] says how
    /// many are needed.
    pub fn sample_from(&mut self, largest: &[(f32, u32)], recent: &[u32]) -> u32 {
        self.candidates.clear();
        self.candidates.extend_from_slice(largest);
        self.choose(recent)
    }

    fn choose(&mut self, recent: &[u32]) -> u32 {
        self.penalise(recent);
        if self.options.temperature <= 0.0 {
            return likeliest(&self.candidates);
        }
        self.keep_top_k();
        self.candidates.truncate(self.likely_count());
        self.draw()
    }

    fn penalise(&mut self, recent: &[u32]) {
        let penalty = self.options.repeat_penalty;
        if penalty == 1.0 {
            return;
        }
        let window = recent.len().saturating_sub(self.options.repeat_window);
        self.penalised.clear();
        for id in &recent[window..] {
            // A token is penalised once, however often it occurred.
            if self.penalised.contains(id) {
                continue;
            }
            self.penalised.push(*id);
            let own = |candidate: &&mut (f32, u32)| candidate.1 == *id;
            // If the candidates are the whole vocabulary, they are in the order of their ids; otherwise they are not.
            let found = match self.candidates.get(*id as usize).is_some_and(|own| own.1 == *id) {
                true => self.candidates.get_mut(*id as usize),
                false => self.candidates.iter_mut().find(own),
            };
            if let Some((logit, _)) = found {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
    }

    /// Sorts the candidates that may be drawn, likeliest first. Ties go to the lower id.
    fn keep_top_k(&mut self) {
        // Adding 0 turns -0 into 0, because `total_cmp` would order -0 below 0.
        let order = |a: &(f32, u32), b: &(f32, u32)| {
            (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then(a.1.cmp(&b.1))
        };
        let k = self.options.top_k;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, order);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(order);
    }

    /// Returns how many of the sorted candidates top-p and min-p keep, at least one.
    fn likely_count(&self) -> usize {
        let largest = self.candidates.first().map_or(0.0, |candidate| candidate.0);
        let total: f32 = self.candidates.iter().map(|(logit, _)| (logit - largest).exp()).sum();
        let threshold = self.options.top_p * total;
        let floor = self.options.min_p;
        let mut reached = 0.0;
        let mut kept = 0;
        for (logit, _) in &self.candidates {
            let weight = (logit - largest).exp();
            if kept > 0 && (reached >= threshold || weight < floor) {
                break;
            }
            reached += weight;
            kept += 1;
        }
        kept
    }

    fn draw(&mut self) -> u32 {
        let candidates = &self.candidates;
        let largest = candidates[0].0;
        let weight = |logit: f32| ((logit - largest) / self.options.temperature).exp();
        let total: f32 = candidates.iter().map(|(logit, _)| weight(*logit)).sum();
        let mut left = self.random.unit() * total;
        for (logit, id) in candidates {
            left -= weight(*logit);
            if left < 0.0 {
                return *id;
            }
        }
        candidates[candidates.len() - 1].1
    }
}

/// Returns the token with the largest logit. Ties go to the lower id.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (logit, id) in logits.iter().zip(0..) {
        if *logit > best.0 {
            best = (*logit, id);
        }
    }
    best.1
}

fn likeliest(candidates: &[(f32, u32)]) -> u32 {
    let mut best = candidates[0];
    for candidate in candidates {
        if candidate.0 > best.0 || candidate.0 == best.0 && candidate.1 < best.1 {
            best = *candidate;
        }
    }
    best.1
}

/// The SplitMix64 generator (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators"). One draw
/// per token needs nothing stronger, and its stream cannot change with a library's version.
struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// Returns a number uniformly distributed in [0, 1).
    fn unit(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 40) as f32 / (1u64 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits() -> Vec<f32> {
        vec![0.1, 3.0, 2.9, -1.0, 0.0]
    }

    #[test]
    fn temperature_zero_takes_the_likeliest() {
        let mut sampler = Sampler::new(Sampling::greedy(), 5);
        assert_eq!(sampler.sample(&logits(), &[]), 1);
        assert_eq!(argmax(&logits()), 1);
        assert_eq!(argmax(&[1.0, 1.0]), 0);
    }

    #[test]
    fn the_penalty_moves_the_choice() {
        let options = Sampling { repeat_penalty: 1.5, ..Sampling::greedy() };
        let mut sampler = Sampler::new(options, 5);
        assert_eq!(sampler.sample(&logits(), &[1, 1, 1]), 2);
    }

    #[test]
    fn the_largest_decide() {
        let count = 500;
        let logits: Vec<f32> =
            (0..count).map(|i| ((i * 7919 % 997) as f32 - 400.0) / 60.0).collect();
        let mut sorted: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
        sorted.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let recent: Vec<u32> = sorted.iter().step_by(2).take(90).map(|(_, id)| *id).collect();
        let cases = [
            (Sampling::greedy(), Some(1)),
            (Sampling { repeat_penalty: 1.7, ..Sampling::greedy() }, Some(65)),
            (Sampling::default(), Some(40)),
            (Sampling { repeat_penalty: 1.3, temperature: 2.0, ..Sampling::default() }, Some(104)),
            (Sampling { repeat_penalty: 0.9, ..Sampling::default() }, None),
            (Sampling { top_k: 0, ..Sampling::default() }, None),
        ];
        for (options, deciding) in cases {
            let mut whole = Sampler::new(options.clone(), count);
            let mut few = Sampler::new(options, count);
            assert_eq!(few.deciding(), deciding);
            let largest = &sorted[..deciding.unwrap_or(count)];
            for turn in 0..200 {
                let recent = &recent[..recent.len() * turn / 200];
                assert_eq!(few.sample_from(largest, recent), whole.sample(&logits, recent));
            }
        }
    }

    #[test]
    fn filters_limit_what_can_be_drawn() {
        let cases = [
            Sampling { top_k: 2, top_p: 1.0, min_p: 0.0, temperature: 5.0, ..Sampling::default() },
            Sampling { top_k: 0, top_p: 0.7, min_p: 0.0, temperature: 5.0, ..Sampling::default() },
            Sampling { top_k: 0, top_p: 1.0, min_p: 0.5, temperature: 5.0, ..Sampling::default() },
        ];
        for options in cases {
            let mut sampler = Sampler::new(options, 5);
            let drawn: Vec<u32> = (0..400).map(|_| sampler.sample(&logits(), &[])).collect();
            assert!(drawn.iter().all(|id| [1, 2].contains(id)));
            assert!(drawn.contains(&1) && drawn.contains(&2));
        }
    }

    #[test]
    fn draws_follow_the_distribution_and_the_seed() {
        let options = Sampling {
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            temperature: 1.0,
            seed: 7,
            ..Sampling::default()
        };
        let logits = [0.0, (3.0f32).ln()];
        let mut first = Sampler::new(options.clone(), 2);
        let mut second = Sampler::new(options, 2);
        let draws: Vec<u32> = (0..4000).map(|_| first.sample(&logits, &[])).collect();
        let again: Vec<u32> = (0..4000).map(|_| second.sample(&logits, &[])).collect();
        assert_eq!(draws, again);
        let ones = draws.iter().filter(|id| **id == 1).count() as f32 / 4000.0;
        assert!((ones - 0.75).abs() < 0.03, "{ones}");
    }
}
