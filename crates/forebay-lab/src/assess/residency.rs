//! Residency over time: one layer's cache, and the misses of all layers.

use crate::replay::{ReplayPolicy, replay_observed};
use forebay_stream::{CacheShape, CacheState, ExpertIndex, LayerIndex, Lookups, Phase, PolicyKind};
use serde::Serialize;

use super::record::{Passage, Recording};
use super::sweep;

/// Largest number of columns in the map of one layer.
const TOKENS_MAX: usize = 360;

/// A run of tokens of one domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stretch {
    pub domain: String,
    pub generated_tokens: usize,
}

/// Misses over time, and a map of one layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ResidencyOverTime {
    pub policy: String,
    /// Number of experts that each layer keeps.
    pub kept_per_layer: u32,
    /// Number of experts that each generated token missed, in all layers.
    pub misses_per_token: Vec<u32>,
    /// Domains of the tokens, in order.
    pub stretches: Vec<Stretch>,
    /// Layer of the map: the one with the median number of misses.
    pub layer: usize,
    /// Index of the map's first token among the generated tokens.
    pub map_start: usize,
    /// One letter per expert for each token of the map: `.` absent, `r` resident, `h` used and resident, `m` used and
    /// missed.
    pub map: Vec<String>,
    /// Mean misses of the first eight generated tokens of a passage: the cost of a switch of domains.
    pub misses_after_switch: Option<f64>,
    /// Mean misses of the other generated tokens.
    pub misses_elsewhere: Option<f64>,
}

/// Number of tokens that count as directly after a switch.
const AFTER_SWITCH: usize = 8;

/// Runs passages through a cache with a policy per layer and `kept_per_layer` experts per layer.
pub fn over_time(
    recording: &Recording,
    passages: &[&Passage],
    policy: PolicyKind,
    kept_per_layer: u32,
) -> ResidencyOverTime {
    let lookups = recording.lookups(passages);
    let shape = sweep::shape_of(policy.scope, &recording.shape, kept_per_layer);
    let misses_per_token = sweep::simulate(&lookups, ReplayPolicy::Online(policy), &shape).misses;
    let mut stretches = Vec::new();
    let (mut after, mut elsewhere) = (Mean::default(), Mean::default());
    let mut from = 0;
    for passage in passages {
        let generated = passage.tokens(&recording.shape) - passage.prompt_tokens;
        let domain = recording.domains[passage.domain].clone();
        stretches.push(Stretch { domain, generated_tokens: generated });
        let end = (from + generated).min(misses_per_token.len());
        for (index, &misses) in misses_per_token[from..end].iter().enumerate() {
            let mean = if index < AFTER_SWITCH { &mut after } else { &mut elsewhere };
            mean.add(misses);
        }
        from = end;
    }
    let layer = median_layer(&lookups, policy, &shape);
    // The map is from the middle, where the cache is warm and domains still switch.
    let map_start = misses_per_token.len().saturating_sub(TOKENS_MAX) / 2;
    let map = map(&lookups, policy, &shape, layer, map_start);
    ResidencyOverTime {
        policy: policy.name().to_owned(),
        kept_per_layer,
        misses_per_token,
        stretches,
        layer,
        map_start,
        map,
        misses_after_switch: after.value(),
        misses_elsewhere: elsewhere.value(),
    }
}

#[derive(Default)]
struct Mean {
    sum: u64,
    count: u64,
}

impl Mean {
    fn add(&mut self, value: u32) {
        self.sum += u64::from(value);
        self.count += 1;
    }

    fn value(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum as f64 / self.count as f64)
    }
}

/// Returns the layer with the median number of misses among the layers with experts.
fn median_layer(lookups: &Lookups, policy: PolicyKind, shape: &CacheShape) -> usize {
    let mut misses = vec![0_u64; shape.layers.len()];
    replay_observed(lookups, ReplayPolicy::Online(policy), shape, |batch| {
        if batch.phase == Phase::Generate {
            misses[batch.layer.0 as usize] += u64::from(batch.lookups - batch.hits);
        }
    });
    let mut layers: Vec<usize> =
        (0..misses.len()).filter(|&layer| shape.layers[layer].experts > 0).collect();
    layers.sort_by_key(|&layer| misses[layer]);
    layers.get(layers.len() / 2).copied().unwrap_or(0)
}

fn map(
    lookups: &Lookups,
    policy: PolicyKind,
    shape: &CacheShape,
    layer: usize,
    start: usize,
) -> Vec<String> {
    let mut cache = CacheState::new(policy, shape);
    let (mut token, mut columns, mut evicted) = (0, Vec::new(), Vec::new());
    let of = LayerIndex(layer as u32);
    for (phase, at, experts) in lookups.batches() {
        let shown = at == of && phase == Phase::Generate;
        let mut column: Vec<u8> = Vec::new();
        if shown && (start..start + TOKENS_MAX).contains(&token) {
            let count = shape.layers[layer].experts;
            let letter = |e| if cache.is_resident(of, ExpertIndex(e)) { b'r' } else { b'.' };
            column = (0..count).map(letter).collect();
        }
        for &expert in experts {
            let hit = cache.lookup(at, expert);
            if let Some(letter) = column.get_mut(expert.0 as usize) {
                *letter = if hit { b'h' } else { b'm' };
            }
        }
        cache.retain(at, experts, &mut evicted);
        evicted.clear();
        token += usize::from(shown);
        if !column.is_empty() {
            columns.push(String::from_utf8_lossy(&column).into_owned());
        }
    }
    columns
}
