//! What a trace says about locality, whatever the cache: how many experts a stretch of text needs, how soon they come
//! back, how evenly they are used. And, for one cache, what it misses.

use serde::Serialize;

use crate::cache::CacheShape;
use crate::replay::{Lookups, ReplayPolicy, replay_observed};
use crate::routing::{Phase, RoutingTrace};

/// Lengths of windows for distinct experts, in tokens.
pub const WINDOWS: [usize; 3] = [16, 64, 256];

/// Locality of a trace. Tokens of prompts and generated ones count alike; each turn stands by itself.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Locality {
    pub layers: Vec<LayerLocality>,
    /// Distinct experts in windows of successive tokens of one turn, mean over layers with experts and windows that lie one
    /// after the other; `None` where no turn is long enough.
    pub distinct_in_windows: Vec<WindowMean>,
    /// Share of a token's experts that the token before chose, too, mean over layers and tokens.
    pub overlap: Option<f64>,
    /// Uses of an expert by the tokens since its use before: the element `i` counts distances from `2^i` to `2^(i+1) - 1`
    /// tokens, so the first counts successive tokens. First uses are not counted.
    pub reuse_distances: Vec<u64>,
}

/// Mean number of distinct experts of a layer in windows of one length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WindowMean {
    pub tokens: usize,
    pub distinct: Option<f64>,
}

/// One layer with experts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerLocality {
    pub layer: usize,
    pub experts: u32,
    /// Tokens that used each expert.
    pub uses: Vec<u64>,
    /// Shannon entropy of the uses divided by that of equal use: 1 for a layer that uses all experts alike, 0 for one expert.
    pub usage_entropy: f64,
    pub overlap: Option<f64>,
}

/// Sums of one layer while its tokens go by.
struct LayerSums {
    uses: Vec<u64>,
    /// The token that used an expert last, 1 first; 0: none in this turn.
    last: Vec<usize>,
    kept: u64,
    compared: u64,
    windows: [(u64, u64); WINDOWS.len()],
}

impl Locality {
    /// Measures a trace in one pass over its tokens for each layer; memory depends on the number of experts.
    pub fn of(trace: &RoutingTrace) -> Locality {
        let mut reuse_distances = vec![0; usize::BITS as usize];
        let mut layers = Vec::new();
        let (mut kept, mut compared) = (0, 0);
        let mut windows = [(0, 0); WINDOWS.len()];
        for (layer, of) in trace.header().layers.iter().enumerate().filter(|(_, of)| of.used > 0) {
            let sums = LayerSums::of(trace, layer, of.experts as usize, &mut reuse_distances);
            kept += sums.kept;
            compared += sums.compared;
            for (all, one) in windows.iter_mut().zip(sums.windows) {
                *all = (all.0 + one.0, all.1 + one.1);
            }
            layers.push(LayerLocality {
                layer,
                experts: of.experts,
                usage_entropy: evenness(&sums.uses),
                overlap: ratio(sums.kept, sums.compared),
                uses: sums.uses,
            });
        }
        let used = reuse_distances.iter().rposition(|&count| count > 0).map_or(0, |last| last + 1);
        reuse_distances.truncate(used);
        let means = WINDOWS.iter().zip(windows);
        Locality {
            layers,
            distinct_in_windows: means
                .map(|(&tokens, (sum, count))| WindowMean { tokens, distinct: ratio(sum, count) })
                .collect(),
            overlap: ratio(kept, compared),
            reuse_distances,
        }
    }
}

impl LayerSums {
    fn of(trace: &RoutingTrace, layer: usize, experts: usize, reuse: &mut [u64]) -> LayerSums {
        let mut sums = LayerSums {
            uses: vec![0; experts],
            last: vec![0; experts],
            kept: 0,
            compared: 0,
            windows: [(0, 0); WINDOWS.len()],
        };
        let (mut turn, mut token_of_turn) = (usize::MAX, 0);
        // First token of every open window, and the distinct experts that it has so far.
        let mut open = [(1, 0_u64); WINDOWS.len()];
        for batch in trace.batches() {
            if batch.turn != turn {
                (turn, token_of_turn) = (batch.turn, 0);
                sums.last.fill(0);
                open = [(1, 0); WINDOWS.len()];
            }
            for token in batch.tokens {
                // Tokens that left the layer out are as if they were not there.
                if trace.experts(token, layer).next().is_none() {
                    continue;
                }
                token_of_turn += 1;
                sums.token(trace, token, layer, token_of_turn, &mut open, reuse);
            }
        }
        sums
    }

    fn token(
        &mut self,
        trace: &RoutingTrace,
        token: usize,
        layer: usize,
        now: usize,
        open: &mut [(usize, u64); WINDOWS.len()],
        reuse: &mut [u64],
    ) {
        for expert in trace.experts(token, layer) {
            let index = expert.0 as usize;
            self.uses[index] += 1;
            let before = std::mem::replace(&mut self.last[index], now);
            if before > 0 {
                reuse[(now - before).ilog2() as usize] += 1;
            }
            if now > 1 {
                self.compared += 1;
                self.kept += u64::from(before + 1 == now);
            }
            for (start, distinct) in &mut *open {
                *distinct += u64::from(before < *start);
            }
        }
        for ((open, &length), sum) in open.iter_mut().zip(&WINDOWS).zip(&mut self.windows) {
            if now + 1 - open.0 == length {
                *sum = (sum.0 + open.1, sum.1 + 1);
                *open = (now + 1, 0);
            }
        }
    }
}

/// Entropy of counts in units of its largest value (Shannon 1948); 0 for fewer than two places or no counts.
fn evenness(counts: &[u64]) -> f64 {
    let total: u64 = counts.iter().sum();
    if total == 0 || counts.len() < 2 {
        return 0.0;
    }
    let share = |&count: &u64| count as f64 / total as f64;
    let entropy: f64 = counts.iter().map(share).filter(|p| *p > 0.0).map(|p| -p * p.ln()).sum();
    entropy / (counts.len() as f64).ln()
}

fn ratio(sum: u64, count: u64) -> Option<f64> {
    (count > 0).then(|| sum as f64 / count as f64)
}

/// What one cache makes of a trace, token by token.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Faults {
    /// Misses for each generated token; `None` without any.
    pub all: Option<f64>,
    /// Without warm-up: the first quarter of the generated tokens, one at least, is left out.
    pub steady: Option<f64>,
    /// Misses of every generated token.
    pub by_token: Vec<u32>,
    /// Most experts that any layer held after one of its batches. It says little without the capacity: with room for all it is
    /// the number of experts that a layer ever used.
    pub max_resident_per_layer: u32,
}

impl Faults {
    /// Replays a trace and counts. A generated token begins where the layers begin anew.
    pub fn of(lookups: &Lookups, policy: ReplayPolicy, shape: &CacheShape) -> Faults {
        let mut by_token = Vec::new();
        let (mut last, mut max_resident_per_layer) = (None, 0);
        replay_observed(lookups, policy, shape, |batch| {
            max_resident_per_layer = max_resident_per_layer.max(batch.resident);
            if batch.phase == Phase::Prompt {
                last = None;
                return;
            }
            if last.is_none_or(|last| batch.layer <= last) {
                by_token.push(0);
            }
            last = Some(batch.layer);
            if let Some(misses) = by_token.last_mut() {
                *misses += batch.lookups - batch.hits;
            }
        });
        let mean =
            |tokens: &[u32]| ratio(tokens.iter().map(|&m| u64::from(m)).sum(), tokens.len() as u64);
        Faults {
            all: mean(&by_token),
            steady: mean(&by_token[by_token.len().div_ceil(4)..]),
            by_token,
            max_resident_per_layer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::Capacity;
    use crate::routing::{LookupOrder, RoutingHeader, RoutingLayer, Rows, Turn};
    use crate::{PolicyKind, Scope};

    /// One layer of 8 experts of which tokens use two; experts of the tokens of each turn.
    fn trace(turns: &[&[[u16; 2]]]) -> RoutingTrace {
        let layer = RoutingLayer { experts: 8, used: 2, expert_bytes: 1 };
        let dense = RoutingLayer { experts: 0, used: 0, expert_bytes: 0 };
        let layers = vec![dense, layer];
        let header = RoutingHeader::new("m".into(), "a".into(), layers, LookupOrder::Ascending);
        let mut trace = RoutingTrace::new(header);
        for tokens in turns {
            trace.begin_turn(Turn { prompt_hash: None, prompt_tokens: 0 });
            for choices in *tokens {
                let rows = Rows { tokens: 1, choices, weights: &[], scores: &[] };
                trace.push(Phase::Generate, rows).unwrap();
            }
        }
        trace
    }

    #[test]
    fn overlap_reuse_and_entropy() {
        let locality = Locality::of(&trace(&[&[[0, 1], [1, 2], [0, 2], [5, 6]], &[[0, 1]]]));
        // 1, then 2 of two each, then nothing; the second turn begins anew.
        assert_eq!(locality.overlap, Some(2.0 / 6.0));
        // 1 and 2 after one token, 0 after two.
        assert_eq!(locality.reuse_distances, [2, 1]);
        let layer = &locality.layers[0];
        assert_eq!((layer.layer, &layer.uses[..4]), (1, &[3, 3, 2, 0][..]));
        assert!(layer.usage_entropy > 0.7 && layer.usage_entropy < 0.8, "{}", layer.usage_entropy);
        assert_eq!(evenness(&[5, 5, 5]), 1.0);
        assert_eq!(evenness(&[5, 0, 0]), 0.0);
        assert_eq!(locality.distinct_in_windows[0].distinct, None);
    }

    #[test]
    fn windows_are_whole_and_of_one_turn() {
        let steady: Vec<[u16; 2]> =
            (0..40).map(|token| [token / 16 % 2, 2 + token / 16 % 2]).collect();
        let locality = Locality::of(&trace(&[&steady, &steady[..15]]));
        // Two windows of 16 tokens with two experts each; what is left over counts in none.
        assert_eq!(locality.distinct_in_windows[0], WindowMean { tokens: 16, distinct: Some(2.0) });
        assert_eq!(locality.distinct_in_windows[1].distinct, None);
    }

    #[test]
    fn faults_with_and_without_warm_up() {
        let lookups = Lookups::of(&trace(&[&[[0, 1]; 8]]));
        let shape = Capacity::ExpertsPerLayer(2).shape(Scope::PerLayer, lookups.layers(), false);
        let faults = Faults::of(&lookups, ReplayPolicy::Online(PolicyKind::LAYER_LRU), &shape);
        assert_eq!((faults.all, faults.steady), (Some(0.25), Some(0.0)));
        assert_eq!((faults.by_token.len(), faults.max_resident_per_layer), (8, 2));
    }
}
