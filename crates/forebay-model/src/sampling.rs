//! Sampling: chooses the next token from logits.

use std::cmp::Ordering;
use std::collections::HashMap;

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
    /// Subtracted from the logits of tokens that were generated before; 0 is off. Source: the OpenAI API reference,
    /// "presence_penalty".
    #[serde(default)]
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for every time that it was generated before; 0 is off.
    #[serde(default)]
    pub frequency_penalty: f32,
    /// Ids with values that are added to their logits.
    #[serde(default)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that may not be chosen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub banned: Vec<Ban>,
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

/// Tokens of which the last one may not be chosen behind the others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ban {
    /// Not empty. All but the last one must be the latest generated tokens.
    pub ids: Vec<u32>,
    /// Number of generated tokens from which on the token is allowed. `None` is never.
    pub until: Option<usize>,
}

impl Ban {
    /// Returns true if the last token is banned behind `recent`, whose last `generated` tokens are generated ones.
    fn applies(&self, recent: &[u32], generated: usize) -> bool {
        let before = &self.ids[..self.ids.len().saturating_sub(1)];
        self.until.is_none_or(|until| generated < until)
            && before.len() <= generated
            && recent.ends_with(before)
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            seed: 0,
            repeat_penalty: 1.0,
            repeat_window: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            banned: Vec::new(),
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

/// Most of the largest logits that a choice looks at before it needs all of them.
pub const LARGEST_MAX: usize = 256;

/// A change of one token's logit before the choice: `(x / divisor) - subtracted + added`, where a logit that is not positive
/// is multiplied by the divisor. Every device computes these operations in this order, each rounded to 32 bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitChange {
    pub id: u32,
    pub divisor: f32,
    pub subtracted: f32,
    pub added: f32,
}

impl LogitChange {
    fn none(id: u32) -> LogitChange {
        LogitChange { id, divisor: 1.0, subtracted: 0.0, added: 0.0 }
    }

    /// Returns the changed logit.
    pub fn apply(&self, logit: f32) -> f32 {
        let logit = if logit > 0.0 { logit / self.divisor } else { logit * self.divisor };
        logit - self.subtracted + self.added
    }
}

/// What a choice needs of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Needs {
    /// Number of the largest logits, of the tokens that are allowed and after all changes.
    pub count: usize,
    /// The divisor of the logits in [`Largest::total`], if the choice needs it.
    pub total_at: Option<f32>,
}

/// The largest logits of a row, of the tokens that are allowed and after all changes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Largest<'a> {
    /// Logits and ids, in descending order. Ties go to the lower id.
    pub logits: &'a [(f32, u32)],
    /// True if no other token is allowed.
    pub is_all: bool,
    /// The sum of `exp((logit - largest) / divisor)` over all tokens that are allowed, with the divisor of
    /// [`Needs::total_at`]. Any value if that is `None`.
    pub total: f32,
}

/// What there is of a row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RowLogits<'a> {
    /// All logits of the model.
    All(&'a [f32]),
    /// All logits after the changes of [`Sampler::changes`].
    Changed(&'a [f32]),
    /// As many of the largest as [`Sampler::needs`] asks for, or more.
    Largest(Largest<'a>),
}

/// Returns true if the bit of a token is set: bit `id % 32` of word `id / 32`. Tokens behind the last word are not allowed.
pub fn is_allowed(words: &[u32], id: u32) -> bool {
    words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
}

/// A sampler with its random state. Buffers are reused from token to token.
pub struct Sampler {
    options: Sampling,
    random: SplitMix64,
    candidates: Vec<(f32, u32)>,
    changed: Vec<f32>,
    changes: Vec<LogitChange>,
    /// Generated tokens and how often each occurred, if a penalty needs them.
    generated: HashMap<u32, u32>,
    /// Number of generated tokens.
    count: usize,
}

impl Sampler {
    pub fn new(options: Sampling) -> Sampler {
        let random = SplitMix64 { state: options.seed };
        Sampler {
            options,
            random,
            candidates: Vec::new(),
            changed: Vec::new(),
            changes: Vec::new(),
            generated: HashMap::new(),
            count: 0,
        }
    }

    /// Notes a token that was generated by another sampler, before this one goes on.
    pub fn note(&mut self, id: u32) {
        self.count += 1;
        if self.options.presence_penalty != 0.0 || self.options.frequency_penalty != 0.0 {
            *self.generated.entry(id).or_default() += 1;
        }
    }

    /// Returns the state of the random numbers, with which another sampler can go on.
    pub fn random_state(&self) -> u64 {
        self.random.state
    }

    /// Continues with the random numbers of another sampler.
    pub fn set_random_state(&mut self, state: u64) {
        self.random.state = state;
    }

    /// Returns how many of the latest tokens [`Sampler::changes`] looks at.
    pub fn window(&self) -> usize {
        let banned = self.options.banned.iter().map(|ban| ban.ids.len().saturating_sub(1)).max();
        self.penalised().max(banned.unwrap_or(0))
    }

    /// Returns how many of the latest tokens are penalised.
    fn penalised(&self) -> usize {
        if self.options.repeat_penalty == 1.0 { 0 } else { self.options.repeat_window }
    }

    /// Returns true if the changes of logits depend on the tokens so far.
    pub fn looks_back(&self) -> bool {
        let Sampling { repeat_penalty, presence_penalty, frequency_penalty, .. } = self.options;
        let bans_change = |ban: &Ban| ban.ids.len() > 1 || ban.until.is_some();
        repeat_penalty != 1.0
            || presence_penalty != 0.0
            || frequency_penalty != 0.0
            || self.options.banned.iter().any(bans_change)
    }

    /// Returns what the next choice needs of the logits.
    pub fn needs(&self) -> Needs {
        let Sampling { temperature, top_k, top_p, .. } = self.options;
        match top_k {
            _ if temperature <= 0.0 => Needs { count: 1, total_at: None },
            1..=LARGEST_MAX => Needs { count: top_k, total_at: None },
            _ => {
                let total_at = Some(if top_p < 1.0 { 1.0 } else { temperature });
                Needs { count: LARGEST_MAX, total_at }
            }
        }
    }

    /// Replaces `changes` by the changes of the next token's logits, one for each token that has any, in the order of the
    /// ids. `recent` holds the tokens so far, the latest last.
    pub fn changes(&self, recent: &[u32], changes: &mut Vec<LogitChange>) {
        changes.clear();
        let Sampling { repeat_penalty, presence_penalty, frequency_penalty, .. } = self.options;
        let penalised = &recent[recent.len().saturating_sub(self.penalised())..];
        changes.extend(
            penalised
                .iter()
                .map(|id| LogitChange { divisor: repeat_penalty, ..LogitChange::none(*id) }),
        );
        // A token is divided once, however often it occurred.
        changes.sort_unstable_by_key(|change| change.id);
        changes.dedup_by_key(|change| change.id);
        changes.extend(self.generated.iter().map(|(id, count)| LogitChange {
            subtracted: presence_penalty + frequency_penalty * *count as f32,
            ..LogitChange::none(*id)
        }));
        let biases = self.options.logit_bias.iter();
        changes.extend(
            biases.map(|(id, bias)| LogitChange { added: *bias, ..LogitChange::none(*id) }),
        );
        let banned = self.options.banned.iter().filter(|ban| ban.applies(recent, self.count));
        changes.extend(banned.filter_map(|ban| {
            Some(LogitChange { added: f32::NEG_INFINITY, ..LogitChange::none(*ban.ids.last()?) })
        }));
        changes.sort_by_key(|change| change.id);
        changes.dedup_by(|next, kept| {
            let same = next.id == kept.id;
            if same {
                kept.divisor *= next.divisor;
                kept.subtracted += next.subtracted;
                kept.added += next.added;
            }
            same
        });
    }

    /// Returns true if [`Sampler::choose`] can choose from these logits.
    pub fn can_choose(&self, largest: &Largest<'_>) -> bool {
        self.decide(largest).is_some()
    }

    /// Chooses a token. `recent` holds the tokens so far, the latest last. If there is `allowed`, only tokens whose bits are set
    /// can be chosen ([`is_allowed`]). Returns `None` if no token is allowed, or if the largest logits are not enough.
    pub fn choose(
        &mut self,
        logits: RowLogits<'_>,
        recent: &[u32],
        allowed: Option<&[u32]>,
    ) -> Option<u32> {
        let (id, random) = match logits {
            RowLogits::Largest(largest) => self.decide(&largest),
            RowLogits::Changed(logits) => self.decide_by_all(logits, allowed),
            RowLogits::All(logits) => self.decide_after_changes(logits, recent, allowed),
        }?;
        self.random = random;
        self.note(id);
        Some(id)
    }

    /// Chooses from all logits before their changes.
    fn decide_after_changes(
        &mut self,
        logits: &[f32],
        recent: &[u32],
        allowed: Option<&[u32]>,
    ) -> Option<(u32, SplitMix64)> {
        let mut changes = std::mem::take(&mut self.changes);
        self.changes(recent, &mut changes);
        if changes.is_empty() {
            self.changes = changes;
            return self.decide_by_all(logits, allowed);
        }
        let mut changed = std::mem::take(&mut self.changed);
        changed.clear();
        changed.extend_from_slice(logits);
        for change in &changes {
            if let Some(logit) = changed.get_mut(change.id as usize) {
                *logit = change.apply(*logit);
            }
        }
        let decided = self.decide_by_all(&changed, allowed);
        (self.changes, self.changed) = (changes, changed);
        decided
    }

    /// Chooses from all logits after their changes. Sorting all of them takes long, so the largest are tried first.
    fn decide_by_all(
        &mut self,
        logits: &[f32],
        allowed: Option<&[u32]>,
    ) -> Option<(u32, SplitMix64)> {
        let Needs { count, total_at } = self.needs();
        let mut candidates = std::mem::take(&mut self.candidates);
        keep_largest(logits, allowed, count, &mut candidates);
        candidates.sort_unstable_by(by_logit);
        let is_all = candidates.len() < count;
        let total = match (total_at, candidates.first()) {
            (Some(divisor), Some((most, _))) => total(logits, allowed, *most, divisor),
            _ => 0.0,
        };
        let mut decided = self.decide(&Largest { logits: &candidates, is_all, total });
        if decided.is_none() && !is_all {
            candidates.clear();
            let all = logits.iter().zip(0..).map(|(logit, id)| (*logit, id));
            let is_candidate = |id: u32| allowed.is_none_or(|words| is_allowed(words, id));
            candidates.extend(all.filter(|(_, id)| is_candidate(*id)));
            candidates.sort_unstable_by(by_logit);
            decided = self.decide(&Largest { logits: &candidates, is_all: true, total });
        }
        self.candidates = candidates;
        decided
    }

    /// Returns the chosen token and the state of the random numbers after it. `None` if there is no token, or if tokens that are
    /// not among the largest could be chosen.
    fn decide(&self, largest: &Largest<'_>) -> Option<(u32, SplitMix64)> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.options;
        let Largest { logits, is_all, total } = *largest;
        let most = logits.first()?.0;
        // If all tokens are banned, the first one is as good as any.
        if temperature <= 0.0 || most == f32::NEG_INFINITY {
            return Some((logits[0].1, self.random));
        }
        let limit = if top_k == 0 { usize::MAX } else { top_k };
        let mut candidates = &logits[..logits.len().min(limit)];
        // True if no other token can be chosen.
        let mut is_complete = is_all || candidates.len() == limit;
        let weight = |logit: f32, divisor: f32| ((logit - most) / divisor).exp();
        let sum =
            |of: &[(f32, u32)], divisor| of.iter().map(|(logit, _)| weight(*logit, divisor)).sum();
        if is_complete || top_p < 1.0 || min_p > 0.0 {
            let threshold = match is_complete {
                true => top_p * sum(candidates, 1.0),
                false if limit == usize::MAX && top_p < 1.0 => top_p * total,
                false if top_p < 1.0 => return None,
                false => f32::INFINITY,
            };
            match likely(candidates, threshold, min_p) {
                Some(count) => (candidates, is_complete) = (&candidates[..count], true),
                None if is_complete => {}
                None => return None,
            }
        }
        let total: f32 = match is_complete {
            true => sum(candidates, temperature),
            false if limit == usize::MAX => total,
            false => return None,
        };
        let mut random = self.random;
        let mut left = random.unit() * total;
        for (logit, id) in candidates {
            left -= weight(*logit, temperature);
            if left < 0.0 {
                return Some((*id, random));
            }
        }
        // Rounding left a rest. A token that is banned has no part in it.
        let last = candidates.iter().rev().find(|(logit, _)| *logit > f32::NEG_INFINITY);
        last.filter(|_| is_complete).map(|(_, id)| (*id, random))
    }
}

/// Returns how many of the sorted candidates top-p and min-p keep, at least one: those before the sum of their weights reaches
/// `threshold`, and that weigh at least `floor` of the first. `None` if candidates behind the last one may be kept, too.
fn likely(candidates: &[(f32, u32)], threshold: f32, floor: f32) -> Option<usize> {
    let most = candidates[0].0;
    let mut reached = 0.0;
    for (kept, (logit, _)) in candidates.iter().enumerate() {
        let weight = (logit - most).exp();
        if kept > 0 && (reached >= threshold || weight < floor) {
            return Some(kept);
        }
        reached += weight;
    }
    None
}

/// Returns the sum of `exp((logit - largest) / divisor)` over the tokens that are allowed.
fn total(logits: &[f32], allowed: Option<&[u32]>, largest: f32, divisor: f32) -> f32 {
    let mut total = 0.0;
    for (word, logits) in logits.chunks(32).enumerate() {
        let bits = allowed.map_or(u32::MAX, |words| words.get(word).copied().unwrap_or(0));
        if bits == 0 {
            continue;
        }
        let weight = |(bit, logit): (usize, &f32)| match bits >> bit & 1 {
            0 => 0.0,
            _ => ((logit - largest) / divisor).exp(),
        };
        total += f64::from(logits.iter().enumerate().map(weight).sum::<f32>());
    }
    total as f32
}

/// Orders candidates, the largest first. Ties go to the lower id.
fn by_logit(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    // Adding 0 turns -0 into 0, because `total_cmp` would order -0 below 0.
    (b.0 + 0.0).total_cmp(&(a.0 + 0.0)).then(a.1.cmp(&b.1))
}

/// Collects the `count` largest logits with their ids in any order, of those whose bits in `allowed` are set.
fn keep_largest(logits: &[f32], allowed: Option<&[u32]>, count: usize, kept: &mut Vec<(f32, u32)>) {
    kept.clear();
    // Collecting more before each selection makes selections rare.
    let room = 4 * count + 256;
    let mut least = f32::NEG_INFINITY;
    for (word, logits) in logits.chunks(32).enumerate() {
        let mut bits = allowed.map_or(u32::MAX, |words| words.get(word).copied().unwrap_or(0));
        if bits == 0 {
            continue;
        }
        let first = 32 * word as u32;
        for (logit, id) in logits.iter().zip(first..) {
            // Of equal logits the lower id counts, and ids ascend, so one that only equals the least is not needed.
            let is_kept = bits & 1 == 1 && (*logit > least || kept.len() < count);
            bits >>= 1;
            if is_kept {
                kept.push((*logit, id));
            }
        }
        if kept.len() >= room {
            kept.select_nth_unstable_by(count - 1, by_logit);
            least = kept[count - 1].0;
            kept.truncate(count);
        }
    }
    if count < kept.len() {
        kept.select_nth_unstable_by(count - 1, by_logit);
        kept.truncate(count);
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

/// The SplitMix64 generator (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators"). One draw
/// per token needs nothing stronger, and its stream cannot change with a library's version.
#[derive(Clone, Copy)]
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
mod tests;
