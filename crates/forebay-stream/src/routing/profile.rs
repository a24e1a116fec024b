//! Routing made from a published curve of LRU hit rates, so that a model with random weights can be compared with other
//! people's numbers.
//!
//! Each layer keeps its experts in the order of their last use, as an LRU cache does. A cache of `c` experts hits
//! what is among the first `c`, so the points of the curve say how many of a token's experts come from each part of
//! the order (the stack model of Spirn and Denning, 1972). Two things are added, and neither changes the hits of LRU
//! caches of the published sizes:
//!
//! - Within a part, newer experts are likelier: misses fall exponentially from one point of the curve to the next,
//!   and evenly behind the last one. Nothing is published about this.
//! - Within a part, some experts are more popular than others, and remain so: as much as is published about the uses
//!   of the most popular ones.

use std::ops::Range;

use super::{LookupOrder, Phase, RoutingHeader, RoutingLayer, RoutingTrace, Rows, Turn};

/// Number of tokens that a trace of a profile has.
const TOKENS: usize = 4096;

/// Tokens that each layer takes before the trace begins, so that its beginning is like the rest.
const TOKENS_BEFORE: usize = 64;

/// A published curve of hit rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoutingProfile {
    pub name: &'static str,
    /// Experts of a layer of the published model.
    experts: u32,
    /// Experts of a layer that an LRU cache holds, and its hits per look-up, in ascending order.
    points: &'static [(u32, f64)],
    /// The popularity of an expert is its rank, counted from a 64th of the experts, to the power of minus this.
    popularity: f64,
}

/// Profiles, by the models whose curves they are.
const PROFILES: [RoutingProfile; 1] = [
    // 54,000 records of code, mathematics, prose and several languages, 10 experts for a token:
    // https://github.com/ggml-org/llama.cpp/pull/27861. The 32 experts that one half uses most have 10 % of the uses
    // in the other half, which this popularity gives.
    RoutingProfile {
        name: "qwen3.8-flash-next",
        experts: 512,
        points: &[(64, 0.67), (128, 0.81)],
        popularity: 0.12,
    },
];

impl RoutingProfile {
    /// Returns the profile with this name.
    pub fn find(name: &str) -> Option<RoutingProfile> {
        PROFILES.into_iter().find(|profile| profile.name == name)
    }

    /// Returns the names of all profiles.
    pub fn names() -> Vec<&'static str> {
        PROFILES.iter().map(|profile| profile.name).collect()
    }

    /// Returns the hits per look-up of an LRU cache that holds this share of a layer's experts, as if all experts
    /// were equally popular. At the published points, popularity changes nothing.
    fn hits(&self, share: f64) -> f64 {
        let experts = f64::from(self.experts);
        let (mut from, mut misses) = (0.0, 1.0);
        for &(cached, hits) in self.points {
            let to = f64::from(cached) / experts;
            if share <= to {
                let part = (share - from) / (to - from);
                return 1.0 - misses * ((1.0 - hits) / misses).powf(part);
            }
            (from, misses) = (to, 1.0 - hits);
        }
        1.0 - misses * ((1.0 - share) / (1.0 - from)).max(0.0)
    }

    /// Returns a trace of generated tokens for a model with these layers. If the model has another number of experts,
    /// the hits are those of the same shares of its experts.
    ///
    /// # Errors
    /// Returns a message if a layer uses so large a share of its experts that no routing has the curve.
    pub fn trace(&self, layers: &[RoutingLayer], seed: u64) -> Result<RoutingTrace, String> {
        let header = RoutingHeader::new(
            format!("profile of {}", self.name),
            "profile".into(),
            layers.to_vec(),
            LookupOrder::Ascending,
        );
        let mut orders = Vec::with_capacity(layers.len());
        for (number, layer) in layers.iter().enumerate() {
            let seed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(number as u64);
            orders.push(Order::new(self, layer, seed)?);
        }
        for _ in 0..TOKENS_BEFORE {
            orders.iter_mut().for_each(|order| order.choose(&mut Vec::new()));
        }
        let mut choices = Vec::new();
        for _ in 0..TOKENS {
            orders.iter_mut().for_each(|order| order.choose(&mut choices));
        }
        let mut trace = RoutingTrace::new(header);
        trace.begin_turn(Turn { prompt_hash: None, prompt_tokens: 0 });
        let width = trace.width();
        for token in 0..TOKENS {
            let choices = &choices[token * width..(token + 1) * width];
            trace.push(Phase::Generate, Rows { tokens: 1, choices, weights: &[], scores: &[] })?;
        }
        Ok(trace)
    }
}

/// The experts of a layer in the order of their last use, the last one first.
struct Order {
    experts: Vec<u16>,
    /// Number of experts that a token uses.
    used: usize,
    /// Popularity of each expert.
    popularity: Vec<f64>,
    parts: Vec<Part>,
    /// Probability of each place of the order for the next token.
    uses: Vec<f64>,
    /// Places of the order, shuffled for each token.
    places: Vec<usize>,
    random: fastrand::Rng,
}

/// Places of the order between two points of the curve.
struct Part {
    places: Range<usize>,
    /// Number of a token's experts that come from it, on average.
    uses: f64,
    /// Probability of each place, if all experts were equally popular.
    alike: Vec<f64>,
}

impl Order {
    fn new(profile: &RoutingProfile, layer: &RoutingLayer, seed: u64) -> Result<Order, String> {
        let count = layer.experts as usize;
        let place_of = |share: f64| (share * count as f64).round() as usize;
        let shares =
            profile.points.iter().map(|point| f64::from(point.0) / f64::from(profile.experts));
        let ends: Vec<usize> = shares.map(place_of).chain([count]).collect();
        let hits = |place: usize| profile.hits(place as f64 / count.max(1) as f64);
        let used = f64::from(layer.used);
        let part = |(from, to): (usize, usize)| Part {
            uses: used * (hits(to) - hits(from)),
            alike: (from..to).map(|place| used * (hits(place + 1) - hits(place))).collect(),
            places: from..to,
        };
        let begins = [0].into_iter().chain(ends.iter().copied());
        let parts: Vec<Part> = begins.zip(ends.iter().copied()).map(part).collect();
        if count > 0 && parts.iter().any(|part| part.uses > part.places.len() as f64) {
            return Err(format!(
                "the routing profile {} needs more experts: of {} experts, a token cannot use {} with these hits",
                profile.name, layer.experts, layer.used
            ));
        }
        let mut random = fastrand::Rng::with_seed(seed);
        let first = count as f64 / 64.0;
        let mut popularity: Vec<f64> =
            (0..count).map(|rank| (first + rank as f64 + 1.0).powf(-profile.popularity)).collect();
        random.shuffle(&mut popularity);
        let mut experts: Vec<u16> = (0..layer.experts).map(|expert| expert as u16).collect();
        random.shuffle(&mut experts);
        Ok(Order {
            experts,
            used: layer.used as usize,
            popularity,
            parts,
            uses: vec![0.0; count],
            places: (0..count).collect(),
            random,
        })
    }

    /// Adds the experts of the next token, and moves them to the front.
    ///
    /// Places are taken by systematic sampling in random order (Goodman and Kish 1950): the probabilities are added
    /// up, and a place is taken where the sum passes a random number or that number plus 1, 2 and so on. Each place
    /// then has exactly its probability, and no place is taken twice.
    fn choose(&mut self, choices: &mut Vec<u16>) {
        for part in &self.parts {
            let experts = self.experts[part.places.clone()].iter();
            let popular = experts.map(|&expert| self.popularity[expert as usize]);
            let uses = &mut self.uses[part.places.clone()];
            uses.iter_mut()
                .zip(part.alike.iter().zip(popular))
                .for_each(|(uses, (alike, popular))| *uses = alike * popular);
            bring_to(part.uses, uses);
        }
        self.random.shuffle(&mut self.places);
        let start = self.random.f64();
        let mut taken = Vec::with_capacity(self.used);
        let mut sum = 0.0;
        for &place in &self.places {
            sum += self.uses[place];
            if taken.len() < self.used && sum > start + taken.len() as f64 {
                taken.push(place);
            }
        }
        // The last sum may be a rounding error short of the last number.
        let mut others = self.places.iter().rev().filter(|place| self.uses[**place] > 0.0);
        while taken.len() < self.used {
            match others.find(|place| !taken.contains(place)) {
                Some(&place) => taken.push(place),
                None => break,
            }
        }
        let chosen: Vec<u16> = taken.iter().map(|&place| self.experts[place]).collect();
        choices.extend_from_slice(&chosen);
        self.experts.retain(|expert| !chosen.contains(expert));
        self.experts.splice(0..0, chosen);
    }
}

/// Multiplies weights so that their sum is `sum`, and none is above 1. The sum is at most their number.
fn bring_to(sum: f64, weights: &mut [f64]) {
    loop {
        let is_free = |weight: &&f64| **weight < 1.0;
        let free: f64 = weights.iter().filter(is_free).sum();
        let full = weights.iter().filter(|weight| **weight >= 1.0).count();
        if free <= 0.0 {
            return;
        }
        let factor = (sum - full as f64) / free;
        weights.iter_mut().filter(|weight| **weight < 1.0).for_each(|weight| *weight *= factor);
        if weights.iter().filter(|weight| **weight >= 1.0).count() == full {
            return;
        }
        weights.iter_mut().for_each(|weight| *weight = weight.min(1.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(experts: u32, used: u32) -> RoutingLayer {
        RoutingLayer { experts, used, expert_bytes: 1 }
    }

    #[test]
    fn curves_pass_through_their_points_and_are_concave() {
        for profile in PROFILES {
            let at = |cached: u32| profile.hits(f64::from(cached) / f64::from(profile.experts));
            for &(cached, hits) in profile.points {
                assert!((at(cached) - hits).abs() < 1e-12, "{} {cached}", profile.name);
            }
            assert_eq!((at(0), at(profile.experts)), (0.0, 1.0));
            let steps: Vec<f64> = (0..profile.experts).map(|c| at(c + 1) - at(c)).collect();
            assert!(steps.windows(2).all(|pair| pair[1] <= pair[0] + 1e-12), "{}", profile.name);
            assert_eq!(RoutingProfile::find(profile.name), Some(profile));
        }
        assert_eq!(RoutingProfile::find("none"), None);
    }

    #[test]
    fn tokens_use_different_experts_and_the_seed_decides() {
        let profile = PROFILES[0];
        let layers = [layer(512, 10), layer(0, 0), layer(128, 8)];
        let trace = profile.trace(&layers, 1).unwrap();
        assert_eq!(trace.tokens(), TOKENS);
        for token in 0..trace.tokens() {
            for (number, layer) in layers.iter().enumerate() {
                let mut experts: Vec<u32> = trace.experts(token, number).map(|e| e.0).collect();
                experts.sort_unstable();
                experts.dedup();
                assert_eq!(experts.len(), layer.used as usize, "{token} {number}");
                assert!(experts.iter().all(|expert| *expert < layer.experts));
            }
        }
        let choices = |seed| profile.trace(&layers, seed).unwrap().rows(0..100).choices.to_vec();
        assert_eq!(choices(1), choices(1));
        assert_ne!(choices(1), choices(2));
    }

    #[test]
    fn weights_reach_their_sum_below_one_each() {
        for (sum, weights) in
            [(2.0, vec![9.0, 1.0, 1.0]), (1.0, vec![0.5, 0.1]), (3.0, vec![1e-9, 5.0, 2.0])]
        {
            // Weights are far below 1 before.
            let mut brought: Vec<f64> = weights.iter().map(|weight| weight / 100.0).collect();
            bring_to(sum, &mut brought);
            assert!((brought.iter().sum::<f64>() - sum).abs() < 1e-9, "{brought:?}");
            assert!(brought.iter().all(|weight| *weight <= 1.0 + 1e-9), "{brought:?}");
        }
    }

    #[test]
    fn a_layer_with_too_few_experts_is_refused() {
        let error = PROFILES[0].trace(&[layer(16, 4)], 1).unwrap_err();
        assert!(error.contains("of 16 experts, a token cannot use 4"), "{error}");
    }
}
