//! Eviction policies. A policy consists of a rule and a scope. The rule ranks blocks by their use; the scope says if
//! the blocks of one layer compete among themselves or with those of all layers.
//!
//! Layers are visited in a cycle. A global LRU list smaller than one token's cycle therefore never hits (sequential
//! flooding). One list per layer has no such cliff.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::error::StreamError;

/// Rule that ranks blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rule {
    /// Evicts the least recently used block.
    Lru,
    /// Evicts the least frequently used block. Old uses count less and less.
    Lfu,
    /// Evicts the least frequently used block. Every use counts forever.
    LfuUnaged,
    /// Evicts the block with the lowest frequency (aged) divided by the number of lookups since its last use.
    Lfru,
    /// Segmented LRU (Karedla, Love, Wherry 1994). A second use promotes a block to a protected segment of four fifths
    /// of the capacity. Evicts the least recently used of the other blocks.
    Slru,
    /// Evicts blocks first that the current pass over the layers has not used, starting with those whose layer comes up
    /// last. Blocks used in the current pass follow. Based on Least-Stale of SpecMD (arXiv 2602.03921), without its
    /// prefetching.
    LeastStale,
    /// Evicts a random block, chosen by a generator with a fixed seed.
    Random,
}

/// The blocks that compete for the same capacity.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// The experts of all layers compete.
    Global,
    /// The experts of each layer compete among themselves; every layer has its own share.
    PerLayer,
}

/// A cache policy that uses only past lookups, so that the engine can run it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PolicyKind {
    pub rule: Rule,
    pub scope: Scope,
}

impl PolicyKind {
    pub const LRU: PolicyKind = global(Rule::Lru);
    pub const LFU: PolicyKind = global(Rule::Lfu);
    pub const LFU_UNAGED: PolicyKind = global(Rule::LfuUnaged);
    pub const LFRU: PolicyKind = global(Rule::Lfru);
    pub const SLRU: PolicyKind = global(Rule::Slru);
    pub const LEAST_STALE: PolicyKind = global(Rule::LeastStale);
    pub const RANDOM: PolicyKind = global(Rule::Random);
    pub const LAYER_LRU: PolicyKind = per_layer(Rule::Lru);
    pub const LAYER_LFU: PolicyKind = per_layer(Rule::Lfu);
    pub const LAYER_LFU_UNAGED: PolicyKind = per_layer(Rule::LfuUnaged);
    pub const LAYER_LFRU: PolicyKind = per_layer(Rule::Lfru);
    pub const LAYER_SLRU: PolicyKind = per_layer(Rule::Slru);
    pub const LAYER_RANDOM: PolicyKind = per_layer(Rule::Random);

    /// All policies. Least-stale exists only with global scope, because it is about the order of layers.
    pub const ALL: [PolicyKind; 13] = [
        PolicyKind::LAYER_LFU,
        PolicyKind::LAYER_LFU_UNAGED,
        PolicyKind::LAYER_LFRU,
        PolicyKind::LAYER_SLRU,
        PolicyKind::LAYER_LRU,
        PolicyKind::LAYER_RANDOM,
        PolicyKind::LFU,
        PolicyKind::LFU_UNAGED,
        PolicyKind::LFRU,
        PolicyKind::SLRU,
        PolicyKind::LRU,
        PolicyKind::LEAST_STALE,
        PolicyKind::RANDOM,
    ];

    /// Returns the name on the command line: the rule, after `layer-` for a per-layer policy.
    pub fn name(self) -> &'static str {
        match (self.scope, self.rule) {
            (Scope::Global, Rule::Lru) => "lru",
            (Scope::Global, Rule::Lfu) => "lfu",
            (Scope::Global, Rule::LfuUnaged) => "lfu-unaged",
            (Scope::Global, Rule::Lfru) => "lfru",
            (Scope::Global, Rule::Slru) => "slru",
            (Scope::Global, Rule::LeastStale) => "least-stale",
            (Scope::Global, Rule::Random) => "random",
            (Scope::PerLayer, Rule::Lru) => "layer-lru",
            (Scope::PerLayer, Rule::Lfu) => "layer-lfu",
            (Scope::PerLayer, Rule::LfuUnaged) => "layer-lfu-unaged",
            (Scope::PerLayer, Rule::Lfru) => "layer-lfru",
            (Scope::PerLayer, Rule::Slru) => "layer-slru",
            (Scope::PerLayer, Rule::LeastStale) => "layer-least-stale",
            (Scope::PerLayer, Rule::Random) => "layer-random",
        }
    }

    /// Returns true if each layer has its own quota.
    pub fn is_per_layer(self) -> bool {
        self.scope == Scope::PerLayer
    }
}

const fn global(rule: Rule) -> PolicyKind {
    PolicyKind { rule, scope: Scope::Global }
}

const fn per_layer(rule: Rule) -> PolicyKind {
    PolicyKind { rule, scope: Scope::PerLayer }
}

impl Default for PolicyKind {
    fn default() -> PolicyKind {
        PolicyKind::LAYER_LFU
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = StreamError;

    fn from_str(text: &str) -> Result<PolicyKind, StreamError> {
        PolicyKind::ALL
            .into_iter()
            .find(|policy| policy.name() == text)
            .ok_or_else(|| StreamError::UnknownPolicy { name: text.to_owned() })
    }
}

impl Serialize for PolicyKind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Ranking used by the cache: a rule that the engine can run, or one that needs knowledge only a replay has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ranking {
    Online(Rule),
    /// Keeps the fixed list of experts and evicts everything else first.
    Fixed,
    /// Evicts the block whose next use is farthest away (Belady 1966).
    NextUse,
}

impl Ranking {
    /// Returns true if a list in order of use gives the victim without a search.
    pub(crate) fn is_list(self) -> bool {
        matches!(self, Ranking::Online(Rule::Lru | Rule::Slru))
    }

    /// Returns true if frequencies are halved periodically.
    pub(crate) fn ages(self) -> bool {
        matches!(self, Ranking::Online(Rule::Lfu | Rule::Lfru))
    }

    /// Returns the worth of a block: the block with the smallest value is evicted first. For rankings without a list.
    pub(crate) fn worth(self, usage: &Usage, at: &Moment) -> (u64, u64) {
        match self {
            Ranking::Online(Rule::Lru | Rule::Slru) => (0, usage.last_use),
            Ranking::Online(Rule::Lfu | Rule::LfuUnaged) => {
                (u64::from(usage.frequency), usage.last_use)
            }
            Ranking::Online(Rule::Lfru) => {
                let age = (at.clock - usage.last_use).max(1);
                ((u64::from(usage.frequency) << 24) / age, usage.last_use)
            }
            Ranking::Online(Rule::LeastStale) => {
                let is_current = u64::from(usage.pass == at.pass) << 32;
                // The layer that was just visited comes up last.
                let until = match at.victim_layer > at.layer {
                    true => at.victim_layer - at.layer,
                    false => at.victim_layer + at.layers - at.layer,
                };
                (is_current | u64::from(at.layers - until), usage.last_use)
            }
            Ranking::Online(Rule::Random) => (mix(at.drawn ^ (at.victim << 32)), 0),
            Ranking::Fixed => (u64::from(usage.frequency), usage.last_use),
            Ranking::NextUse => (u64::MAX - usage.next_use, usage.last_use),
        }
    }
}

/// Context of one search for a victim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    /// Number of lookups so far.
    pub clock: u64,
    /// Number of passes over the layers so far.
    pub pass: u32,
    /// The layer whose batch makes room, and the number of layers.
    pub layer: u32,
    pub layers: u32,
    /// State of the random number generator.
    pub drawn: u64,
    /// The candidate and its layer.
    pub victim: u64,
    pub victim_layer: u32,
}

/// Scrambles a number (SplitMix64's output function, Steele, Lea, Flood 2014).
pub(crate) fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Usage history of a block, kept even while it is not resident.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// Number of the lookup that used it last, counted from 1; 0 if it was never used.
    pub last_use: u64,
    /// Batch that uses it next, if a replay knows that.
    pub next_use: u64,
    /// Number of uses in fixed point ([`USE_WEIGHT`] each), halved when its layer ages.
    pub frequency: u32,
    /// Pass over the layers that used it last.
    pub pass: u32,
}

/// Weight of one use in [`Usage::frequency`]. It leaves room for ten halvings.
const USE_WEIGHT: u32 = 1 << 10;

/// A layer's counts are halved every time it has had this many lookups for each of its experts: about 20 tokens of a
/// model that uses 6 of 128. On recorded routing (Qwen3-30B, gpt-oss-120b) this beats counts that never age by up to
/// 0.6 points at every capacity; periods from half to four times as long are within 0.5 points of it.
pub(crate) const AGEING_LOOKUPS_PER_EXPERT: u64 = 1;

impl Usage {
    pub fn record(&mut self, now: u64, pass: u32) {
        self.last_use = now;
        self.pass = pass;
        self.frequency = self.frequency.saturating_add(USE_WEIGHT);
    }

    pub fn age(&mut self) {
        self.frequency /= 2;
    }
}
