//! Who is evicted. A policy is a rule, which ranks blocks by what is known of their use, and a scope: the
//! blocks of one layer compete among themselves, or all layers together.
//!
//! Layers are visited in a cycle. A global list by recency that is smaller than one token's cycle
//! therefore never hits (sequential flooding); a list per layer has no such cliff.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::error::StreamError;

/// How blocks are ranked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rule {
    /// The least recently used goes.
    Lru,
    /// The least frequently used goes; old uses count less and less.
    Lfu,
    /// The least frequently used goes; a use counts for ever.
    LfuUnaged,
    /// The one with the fewest uses (aged) for each lookup since its last use goes: frequency divided by age.
    Lfru,
    /// Segmented LRU (Karedla, Love, Wherry 1994): a second use promotes a block to a protected segment of four fifths of
    /// the capacity, and the least recently used of the others goes.
    Slru,
    /// Blocks that the present pass over the layers has not used go first, those whose layer comes up last before the
    /// others; then blocks of the present pass. After Least-Stale of SpecMD (arXiv 2602.03921), without its prefetching.
    LeastStale,
    /// Any, by a generator with a fixed seed.
    Random,
}

/// Who competes for the same capacity.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// All layers together.
    Global,
    /// The experts of one layer; every layer has its own share.
    PerLayer,
}

/// A cache policy that needs to know the past only: what the engine can run.
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

    /// All policies. Least-stale has one scope: it is about the order of layers.
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

    /// The name on the command line: `layer-` for a policy per layer, then the rule.
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

    /// Whether the layers have a quota each, instead of one for all.
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

/// What the cache ranks by: a rule that the engine can run, or knowledge that only a replay has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ranking {
    Online(Rule),
    /// What was preloaded stays, and nothing else.
    Fixed,
    /// The one whose next use is farthest away goes (Belady 1966).
    NextUse,
}

impl Ranking {
    /// Whether a list in order of use finds the victim without a search.
    pub(crate) fn is_list(self) -> bool {
        matches!(self, Ranking::Online(Rule::Lru | Rule::Slru))
    }

    /// Whether frequencies are halved from time to time.
    pub(crate) fn ages(self) -> bool {
        matches!(self, Ranking::Online(Rule::Lfu | Rule::Lfru))
    }

    /// What a block is worth: the smallest value is evicted first. For rankings without a list.
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
                // The layer just visited comes up last.
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

/// When and for whom a victim is looked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    /// Lookups so far.
    pub clock: u64,
    /// Passes over the layers so far.
    pub pass: u32,
    /// The layer whose batch makes room, and the number of layers.
    pub layer: u32,
    pub layers: u32,
    /// The state of the generator of random numbers.
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

/// What is remembered of a block's use, also while it is not resident.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// Number of the lookup that used it last, 1 first; 0: never.
    pub last_use: u64,
    /// When it is used next, where a replay knows that.
    pub next_use: u64,
    /// Uses in fixed point ([`USE_WEIGHT`] each), halved when its layer ages.
    pub frequency: u32,
    /// The pass over the layers that used it last.
    pub pass: u32,
}

/// One use in [`Usage::frequency`]: leaves room for ten halvings.
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
