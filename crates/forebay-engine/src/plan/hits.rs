//! Hit rates: how often a token finds its experts in a memory, by the share of the experts that is kept there.

use forebay_stream::{
    CacheShape, Capacity, ExpertIndex, LayerIndex, Lookups, Phase, PolicyKind, ReplayCounters,
    RoutingTrace, replay_observed,
};

/// Hit rate by the share of all experts that is kept, for `layer-lfu` and generated tokens. It comes from recorded
/// routing of Qwen3-30B-A3B (top 6 of 128): `forebay replay qwen.route.csv --phase generate --policy layer-lfu`. The recording is too short to tell more beyond the last point: misses there are first uses in a text
/// of 128 tokens.
const RECORDED: [(f64, f64); 8] = [
    (0.0, 0.0),
    (0.02, 0.181),
    (0.05, 0.379),
    (0.10, 0.576),
    (0.14, 0.672),
    (0.20, 0.774),
    (0.25, 0.835),
    (0.30, 0.876),
];
/// Share of a layer's experts that a token of the recorded model uses.
const RECORDED_USED_SHARE: f64 = 6.0 / 128.0;

/// Start of the tail, beyond the recorded points, as a share of the experts. In the tail, misses fall to zero as
/// `TAIL_MISSES * ((1 - share) / (1 - TAIL_BEGIN)) ^ TAIL_POWER`. This was fitted to a model of that shape (top 8) on
/// an H200: its misses in VRAM, and in RAM behind VRAM.
const TAIL_BEGIN: f64 = 0.35;
const TAIL_MISSES: f64 = 0.095;
const TAIL_POWER: f64 = 1.4;
const TAIL_POINTS: usize = 26;

/// Exponent for the repetition in a text: `tokens` of a prompt touch as many experts as `tokens ^ DISTINCT_POWER`
/// independent tokens. The recording says 0.75 to 0.9 for 16 to 128 tokens. Prompts of 512 tokens on the H200 say 0.75
/// to 0.8.
const DISTINCT_POWER: f64 = 0.78;

/// Smallest number of tokens in a batch that is counted. Smaller batches say little about what a long prompt touches.
const PROMPT_TOKENS_MIN: usize = 32;

/// Number of steps in sums over the experts.
const STEPS: usize = 64;

/// Shares of kept experts at which recorded routing is replayed.
const TRACE_SHARES: [f64; 16] =
    [0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0];

/// Hit rate by the share of the experts that is kept. It never falls, and it is 1 if everything is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct HitCurve {
    points: Vec<(f64, f64)>,
    /// Share of the experts that a token uses in the model from which the curve comes. `None` if the curve does not
    /// depend on it.
    used_share: Option<f64>,
    /// Experts that the recording's prompts touched. `None` if the recording has no prompt that is long enough. Prompts
    /// have their own data because their tokens are not chosen by the model, as generated tokens are.
    prompts: Option<RecordedPrompts>,
    /// Share of all experts that were used before a prompt.
    used_before: f64,
    /// Share of a generated token's lookups, in turns after the first, whose expert nothing used before. 0 if the recording has no
    /// such turn.
    first_uses: f64,
}

/// Experts that prompts touched in a recording.
#[derive(Clone, Debug, PartialEq)]
struct RecordedPrompts {
    /// Mean number of tokens in a batch.
    tokens: f64,
    /// Share of all experts that a batch touched and missed, by the share that is kept. If all are kept, later prompts still
    /// miss experts that nothing used before. First prompts then miss nothing (see [`PromptCounts::cold`]).
    beyond: Vec<(f64, f64)>,
    /// True if these are the first prompts.
    cold: bool,
}

impl Default for HitCurve {
    /// Returns the curve of the recorded model, for models without a recording of their own.
    fn default() -> HitCurve {
        let tail = (0..=TAIL_POINTS).map(|step| {
            let left = 1.0 - step as f64 / TAIL_POINTS as f64;
            let misses = TAIL_MISSES * left.powf(TAIL_POWER);
            (1.0 - left * (1.0 - TAIL_BEGIN), 1.0 - misses)
        });
        let points = RECORDED.into_iter().chain(tail).collect();
        HitCurve { used_share: Some(RECORDED_USED_SHARE), ..HitCurve::only(points) }
    }
}

impl HitCurve {
    /// Returns the curve of uniform random routing.
    pub fn uniform() -> HitCurve {
        HitCurve::only(vec![(0.0, 0.0), (1.0, 1.0)])
    }

    /// Returns the curve through points, of which nothing else is known.
    fn only(points: Vec<(f64, f64)>) -> HitCurve {
        let (prompts, used_before) = (None, USED_BY_A_TURN);
        HitCurve { points, used_share: None, prompts, used_before, first_uses: 0.0 }
    }

    /// Returns the curve through points of `(share kept, hits per lookup)`, for a model whose tokens use `used_share`
    /// of the experts. Returns `None` unless the points run from (0, 0) to (1, 1), shares rise, and hits never fall.
    /// Also returns `None` if `used_share` is not positive.
    pub fn through(points: Vec<(f64, f64)>, used_share: f64) -> Option<HitCurve> {
        let rises = points.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        let whole = points.first() == Some(&(0.0, 0.0)) && points.last() == Some(&(1.0, 1.0));
        let used_share = Some(used_share);
        (rises && whole && used_share > Some(0.0))
            .then(|| HitCurve { used_share, ..HitCurve::only(points) })
    }

    /// Replays recorded routing with a policy and returns its curve. Returns `None` if the recording has no generated
    /// token that used an expert.
    pub fn of_trace(trace: &RoutingTrace, policy: PolicyKind) -> Option<HitCurve> {
        let used = trace.header().layers.iter().map(|layer| u64::from(layer.used)).sum();
        HitCurve::of_lookups(&Lookups::of(trace), used, policy)
    }

    /// Replays lookups with a policy and returns their curve, as [`HitCurve::of_trace`] does. `used` is the number of
    /// experts that a token of the model uses in all layers together.
    pub fn of_lookups(lookups: &Lookups, used: u64, policy: PolicyKind) -> Option<HitCurve> {
        let sizes = lookups.layers();
        let experts: u64 = sizes.iter().map(|layer| u64::from(layer.0)).sum();
        let mut points = vec![(0.0, 0.0)];
        let mut best: f64 = 0.0;
        let mut prompts = PromptCounts::of(lookups);
        for share in TRACE_SHARES {
            let shape = Capacity::Share(share).shape(policy.scope, sizes, false);
            let counted = prompts.replay(lookups, policy, share, &shape).generate;
            if counted.lookups == 0 {
                return None;
            }
            best = best.max(counted.hits as f64 / counted.lookups as f64);
            points.push((share, if share < 1.0 { best } else { 1.0 }));
        }
        let curve = HitCurve::through(points, used as f64 / experts.max(1) as f64)?;
        // A recording may be shorter than a turn.
        let used_before = prompts.used_before.max(USED_BY_A_TURN);
        let first_uses = prompts.first_uses;
        Some(HitCurve { prompts: prompts.finish(&curve), used_before, first_uses, ..curve })
    }

    /// Returns the largest share of a generated token's lookups that may find its expert in VRAM or in RAM, if RAM keeps this share of
    /// the experts. Unless RAM has a slot for every expert, an expert is read from the disk when it is used for the first time.
    pub fn found_at_most(&self, ram: f64) -> f64 {
        if ram < 1.0 { 1.0 - self.first_uses } else { 1.0 }
    }

    /// Returns the share of the experts that a prompt may find in VRAM or in RAM after a turn: one as long as those of the
    /// recording, or of `bench`.
    ///
    /// If RAM has a slot for every expert, all are loaded at the start. Otherwise slots fill as experts are used. An expert
    /// that was never used is then read from the disk, even if there is room for it.
    fn found_by_a_prompt(&self, vram: f64, ram: f64) -> f64 {
        let either = share_in_either(vram, ram);
        if ram < 1.0 { either.min(self.used_before).max(vram) } else { either }
    }

    /// Returns the share of all experts that a prompt of `tokens` tokens reads from the disk after a turn, if VRAM and RAM keep
    /// these shares.
    ///
    /// Recorded prompts behind other turns say this themselves: their misses in a cache as large as both tiers, which include
    /// experts that nothing used before. Longer prompts read more than the recorded ones, but then the turns before them are
    /// longer, too, and leave fewer experts unused.
    pub fn read_by_a_prompt(&self, vram: f64, ram: f64, used_share: f64, tokens: f64) -> f64 {
        let found = self.found_by_a_prompt(vram, ram);
        match &self.prompts {
            Some(prompts) if !prompts.cold && ram < 1.0 => {
                let recorded = prompts.beyond(share_in_either(vram, ram));
                let longer = self.longer(prompts, used_share, tokens);
                (longer * recorded).min(recorded.max(1.0 - found))
            }
            _ => self.touched_beyond(found, used_share, tokens),
        }
    }

    /// Returns the hit rate if `share` of all experts is kept, for a model whose tokens use `used_share` of them.
    ///
    /// A model that uses more experts for each token spreads its lookups more. The curves of three models coincide when
    /// the odds of a share are divided by the square root of the share that a token uses. The three are two recordings
    /// (top 6 and top 2 of 128) and the synthetic model (top 8).
    pub fn at(&self, share: f64, used_share: f64) -> f64 {
        let share = share.clamp(0.0, 1.0);
        let odds = |of: f64| (of / used_share.max(f64::MIN_POSITIVE)).sqrt();
        let odds = self.used_share.map_or(1.0, odds);
        let share = share * odds / (1.0 - share + share * odds);
        between(&self.points, share).unwrap_or(1.0)
    }

    /// Returns the hit rate of the experts that a pass of `sequences` sequences uses. The sequences are unrelated: which
    /// experts one uses says nothing about another.
    ///
    /// Each sequence keeps as many experts as if it had a part of the memory. Parts overlap as random sets of experts do,
    /// and the parts of the others hold what a sequence does not find in its own with the same probability. A replay of
    /// recorded routing with the experts renumbered for each sequence misses 110, 326 and 829 of 564, 1074 and 1957 experts
    /// with 2, 4 and 8 sequences and 36 % of the experts kept; this says 103, 317 and 805.
    pub fn together(&self, share: f64, used_share: f64, sequences: usize) -> f64 {
        let parts = 1.0 / sequences.max(1) as f64;
        let share = share.clamp(0.0, 1.0);
        let own = 1.0 - (1.0 - share).powf(parts);
        1.0 - (1.0 - self.at(own, used_share)) * (1.0 - share).powf(1.0 - parts)
    }

    /// Returns the share of all experts that a prompt batch of `tokens` tokens uses and that is not among the `kept`
    /// share.
    pub fn touched_beyond(&self, kept: f64, used_share: f64, tokens: f64) -> f64 {
        let kept = kept.clamp(0.0, 1.0);
        match &self.prompts {
            None => self.touched_by_slopes(kept, used_share, tokens),
            Some(prompts) => {
                let longer = self.longer(prompts, used_share, tokens);
                (longer * prompts.beyond(kept)).min(1.0 - kept)
            }
        }
    }

    /// Returns how many times as many experts a batch of `tokens` tokens touches as the recorded ones.
    fn longer(&self, prompts: &RecordedPrompts, used_share: f64, tokens: f64) -> f64 {
        let touched = |tokens| self.touched_by_slopes(0.0, used_share, tokens);
        touched(tokens) / touched(prompts.tokens)
    }

    /// Returns the same if only the curve is known. It assumes that the most used experts are kept and that an expert's
    /// use is the slope of the curve.
    fn touched_by_slopes(&self, kept: f64, used_share: f64, tokens: f64) -> f64 {
        let independent = tokens.max(1.0).powf(DISTINCT_POWER);
        let step = (1.0 - kept) / STEPS as f64;
        if step <= 0.0 {
            return 0.0;
        }
        let hits = |index: usize| self.at(kept + step * index as f64, used_share);
        let of_step = |index: usize| {
            let use_of_one = used_share * (hits(index + 1) - hits(index)) / step;
            step * (1.0 - (1.0 - use_of_one.clamp(0.0, 1.0)).powf(independent))
        };
        (0..STEPS).map(of_step).sum()
    }
}

impl RecordedPrompts {
    /// Returns the share of all experts that a batch touched and missed with `kept` of them in memory.
    fn beyond(&self, kept: f64) -> f64 {
        between(&self.beyond, kept).unwrap_or(0.0)
    }
}

/// Counters of what the prompts of a recording touch while it is replayed.
struct PromptCounts {
    /// One entry for each batch: true if the batch is counted. A counted batch belongs to a prompt that is long enough,
    /// and its layer was used before. If no batch meets the second condition, it does not apply (see `cold`).
    counts: Vec<bool>,
    /// Mean number of tokens in a counted batch.
    tokens: f64,
    /// Number of experts in the layers of the counted batches, summed over these batches.
    experts: f64,
    /// True if no long enough prompt met a layer that was used before. Then the counted prompts touched every expert
    /// for the first time.
    cold: bool,
    /// Share of the experts that were used before the counted batches. If these are the first ones, this is the share that
    /// the whole recording uses.
    used_before: f64,
    /// Share of the lookups of generated tokens behind a prompt of `counts` whose expert nothing used before. If these are the
    /// first prompts, 0.
    first_uses: f64,
    /// Number of lookups in all counted batches.
    lookups: f64,
    /// Number of misses in all counted batches, by the share that is kept.
    misses: Vec<(f64, f64)>,
}

impl PromptCounts {
    fn of(lookups: &Lookups) -> PromptCounts {
        let mut used = UsedExperts::new(lookups);
        let batches = || lookups.batches().zip(lookups.tokens());
        let tells = |phase, tokens| phase == Phase::Prompt && tokens >= PROMPT_TOKENS_MIN;
        let (mut warm, mut used_before) = (Vec::new(), 0.0);
        let (mut behind, mut new, mut generated) = (false, 0, 0);
        for ((phase, layer, touched), tokens) in batches() {
            let before = if tells(phase, tokens) { used.of(layer) } else { 0 };
            used_before += before as f64;
            warm.push(before > 0);
            behind |= before > 0;
            let first = used.add(layer, touched);
            if behind && phase == Phase::Generate {
                (new, generated) = (new + first, generated + touched.len());
            }
        }
        let first_uses = new as f64 / generated.max(1) as f64;
        let cold = !warm.contains(&true);
        let counts = match cold {
            true => batches().map(|((phase, ..), tokens)| tells(phase, tokens)).collect(),
            false => warm,
        };
        let chosen = batches().zip(&counts).filter(|(_, counts)| **counts).map(|(batch, _)| batch);
        let (mut tokens, mut experts, mut found, mut number) = (0.0, 0.0, 0.0, 0.0);
        for ((_, layer, touched), of_batch) in chosen {
            tokens += of_batch as f64;
            experts += f64::from(lookups.layers()[layer.0 as usize].0);
            found += touched.len() as f64;
            number += 1.0;
        }
        let tokens = tokens / f64::max(number, 1.0);
        let used_before = if cold { used.share() } else { used_before / experts };
        PromptCounts {
            counts,
            tokens,
            experts,
            cold,
            used_before,
            first_uses,
            lookups: found,
            misses: Vec::new(),
        }
    }

    /// Replays all lookups and records how many the prompts missed.
    fn replay(
        &mut self,
        lookups: &Lookups,
        policy: PolicyKind,
        share: f64,
        shape: &CacheShape,
    ) -> ReplayCounters {
        let (mut missed, mut counts) = (0.0, self.counts.iter());
        let counters = replay_observed(lookups, policy, shape, |batch| {
            if counts.next() == Some(&true) {
                missed += f64::from(batch.lookups - batch.hits);
            }
        });
        self.misses.push((share, missed));
        counters
    }

    /// Returns what the prompts touched, or `None` if no prompt is long enough. If every prompt was the first use of its
    /// layers, `curve` says which part of the touched experts is kept.
    fn finish(self, curve: &HitCurve) -> Option<RecordedPrompts> {
        if self.experts == 0.0 {
            return None;
        }
        let touched = self.lookups / self.experts;
        let used_share = curve.used_share.unwrap_or(1.0);
        let by_slopes = |kept| curve.touched_by_slopes(kept, used_share, self.tokens);
        let mut least = touched;
        let beyond = self.misses.iter().map(|&(share, missed)| {
            let found = match self.cold {
                true => touched * by_slopes(share) / by_slopes(0.0),
                false => missed / self.experts,
            };
            // More memory never misses more, except for noise.
            least = f64::min(least, found);
            (share, least)
        });
        let beyond = std::iter::once((0.0, touched)).chain(beyond).collect();
        Some(RecordedPrompts { tokens: self.tokens, beyond, cold: self.cold })
    }
}

/// Interpolates linearly between ascending points. Outside their range, returns the value of the nearest point. Returns
/// `None` if there are no points.
fn between(points: &[(f64, f64)], x: f64) -> Option<f64> {
    let after = points.partition_point(|point| point.0 < x);
    match (after.checked_sub(1).map(|before| points[before]), points.get(after)) {
        (Some(below), Some(above)) => {
            Some(below.1 + (x - below.0) / (above.0 - below.0) * (above.1 - below.1))
        }
        (only, above) => only.or(above.copied()).map(|point| point.1),
    }
}

/// Returns each possible number of missing experts among a layer's `used` ones, with its probability. Each lookup hits
/// with probability `hit_rate`, independently of the others.
pub fn missing(used: usize, hit_rate: f64) -> impl Iterator<Item = (usize, f64)> {
    let mut ways = 1.0;
    (0..=used).map(move |missed| {
        if missed > 0 {
            ways *= (used - missed + 1) as f64 / missed as f64;
        }
        let hits = hit_rate.powf((used - missed) as f64);
        (missed, ways * (1.0 - hit_rate).powf(missed as f64) * hits)
    })
}

/// Returns how many of a layer's `count` experts the tokens of `sequences` unrelated sequences use, one token each.
pub fn used_together(count: usize, used: usize, sequences: usize) -> f64 {
    if sequences <= 1 || count == 0 {
        return used as f64;
    }
    let unused = 1.0 - used as f64 / count as f64;
    count as f64 * (1.0 - unused.powf(sequences as f64))
}

/// Share of the experts in RAM that counts in addition to those in VRAM. It is below 1 because the expert evicted to
/// RAM is not always the one that is needed next. Measured with recorded routing on an H200 and 38 % of the experts in
/// VRAM: 1.1 of 288 lookups read from the disk with 60 % in RAM, and 13.4 with 24 %.
const DISTINCT_IN_RAM: f64 = 0.93;

/// Returns the share of the experts that is in VRAM or in RAM. If RAM does not have a slot for every expert, VRAM and
/// RAM form an exclusive cache.
pub fn share_in_either(vram: f64, ram: f64) -> f64 {
    (vram + DISTINCT_IN_RAM * ram).clamp(ram.max(vram), 1.0)
}

/// Share of all experts that a prompt of 512 tokens and an answer of 128 tokens use, without a recording that used more. In a
/// replay of a synthetic model's own routing (top 8), they used 112 of a layer's 128 experts.
const USED_BY_A_TURN: f64 = 0.875;

/// The experts that a part of a recording uses.
struct UsedExperts {
    /// One entry for each expert of each layer.
    used: Vec<Vec<bool>>,
}

impl UsedExperts {
    fn new(lookups: &Lookups) -> UsedExperts {
        let sizes = lookups.layers().iter();
        UsedExperts { used: sizes.map(|layer| vec![false; layer.0 as usize]).collect() }
    }

    /// Adds experts of a layer. Returns how many were not used before.
    fn add(&mut self, layer: LayerIndex, experts: &[ExpertIndex]) -> usize {
        let of = &mut self.used[layer.0 as usize];
        let is_new = |&expert: &&ExpertIndex| !std::mem::replace(&mut of[expert.0 as usize], true);
        experts.iter().filter(is_new).count()
    }

    /// Returns the number of experts of a layer that are used.
    fn of(&self, layer: LayerIndex) -> usize {
        self.used[layer.0 as usize].iter().filter(|used| **used).count()
    }

    /// Returns the share of all experts that are used.
    fn share(&self) -> f64 {
        let all = self.used.iter().flatten();
        all.clone().filter(|used| **used).count() as f64 / all.count().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unrelated_sequences_push_each_others_experts_out() {
        // Misses of a pass with 36 % of the experts kept, of a replay (see `HitCurve::together`).
        let curve = HitCurve::default();
        for (sequences, missed) in [(2, 110.0), (4, 326.0), (8, 829.0)] {
            let used = 48.0 * used_together(128, 6, sequences);
            let found = curve.together(0.358, RECORDED_USED_SHARE, sequences);
            let predicted = used * (1.0 - found);
            assert!((0.9..1.1).contains(&(predicted / missed)), "{sequences}: {predicted}");
        }
        for share in [0.0, 0.1, 0.5, 1.0] {
            let alone = curve.at(share, RECORDED_USED_SHARE);
            let one = curve.together(share, RECORDED_USED_SHARE, 1);
            assert!((one - alone).abs() < 1e-12, "{one} {alone}");
            let uniform = HitCurve::uniform().together(share, 0.05, 7);
            assert!((uniform - share).abs() < 1e-12, "chance finds what is kept: {uniform}");
        }
        assert_eq!(used_together(128, 6, 1), 6.0);
        assert_eq!(used_together(4, 4, 3), 4.0);
    }

    #[test]
    fn the_default_curve_rises_from_nothing_to_everything() {
        let curve = HitCurve::default();
        assert!(curve.points.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 < pair[1].1));
        for used in [0.01, RECORDED_USED_SHARE, 0.0625, 0.25, 1.0] {
            assert_eq!(curve.at(0.0, used), 0.0);
            assert!((curve.at(1.0, used) - 1.0).abs() < 1e-12);
            let hits: Vec<f64> = (0..=1000).map(|i| curve.at(i as f64 / 1000.0, used)).collect();
            assert!(hits.windows(2).all(|pair| pair[0] <= pair[1]));
        }
        // Recorded for Qwen3-30B-A3B with 4000 MiB, which hold 22.3 % of its experts: a hit rate of 81.7 %.
        assert!((curve.at(0.223, RECORDED_USED_SHARE) - 0.817).abs() < 0.02);
        // Recorded for gpt-oss-120b (top 2) with 10 % of its experts: 68 % of the hits that are possible at all.
        assert!((curve.at(0.1, 2.0 / 128.0) - 0.68).abs() < 0.05);
    }

    /// In the recording, 16, 32, 64 and 128 tokens use 34.7, 45.2, 55.2 and 75.0 distinct experts of a layer.
    #[test]
    fn prompts_touch_as_many_experts_as_recorded() {
        let curve = HitCurve::default();
        for (tokens, recorded) in [(16.0, 34.7), (32.0, 45.2), (64.0, 55.2), (128.0, 75.0)] {
            let found = 128.0 * curve.touched_beyond(0.0, RECORDED_USED_SHARE, tokens);
            assert!((found / recorded - 1.0).abs() < 0.2, "{tokens}: {found}");
        }
        assert_eq!(curve.touched_beyond(1.0, 0.05, 512.0), 0.0);
    }

    /// Two prompts of 64 tokens with an answer each. Both touch experts 0 to 7 of 16, and the second also touches 8 and
    /// 9.
    #[test]
    fn prompts_touch_what_those_of_a_recording_did() {
        let experts = |range: std::ops::Range<u32>| range.map(ExpertIndex).collect::<Vec<_>>();
        let recorded = |prompts: &[u32], tokens| {
            let mut lookups = Lookups::new(vec![(16, 1), (0, 0), (16, 1)]);
            for &touched in prompts {
                for layer in [LayerIndex(0), LayerIndex(2)] {
                    lookups.push(Phase::Prompt, layer, tokens, &experts(0..touched));
                }
                for layer in [LayerIndex(0), LayerIndex(2)] {
                    lookups.push(Phase::Generate, layer, 1, &experts(0..2));
                }
            }
            HitCurve::of_lookups(&lookups, 4, PolicyKind::default()).unwrap()
        };
        let near = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-9, "{found}");
        let beyond = |curve: &HitCurve, kept| curve.touched_beyond(kept, 2.0 / 16.0, 64.0);
        let behind = recorded(&[8, 10], 64);
        near(beyond(&behind, 0.0), 10.0 / 16.0);
        // With room for 12 experts, the first 8 are all there, and only the 2 new ones are missing.
        near(beyond(&behind, 0.8), 2.0 / 16.0);
        assert!((2.0 / 16.0..=8.0 / 16.0).contains(&beyond(&behind, 0.5)));
        near(beyond(&behind, 1.0), 0.0);
        let longer = behind.touched_beyond(0.0, 2.0 / 16.0, 512.0);
        assert!(longer > 10.0 / 16.0 && longer <= 1.0, "{longer}");
        // The very first prompt finds nothing, so the curve says which part of its experts is kept.
        let first = recorded(&[8], 64);
        near(beyond(&first, 0.0), 8.0 / 16.0);
        assert!(beyond(&first, 0.5) < 8.0 / 16.0);
        near(beyond(&first, 1.0), 0.0);
        // An expert that an earlier turn used is found later if there is room for it.
        let read =
            |curve: &HitCurve, vram, ram| curve.read_by_a_prompt(vram, ram, 2.0 / 16.0, 64.0);
        near(read(&recorded(&[15, 15], 64), 0.5, 0.9), 0.0);
        near(read(&recorded(&[8, 8], 64), 0.5, 0.9), 0.0);
        // One that none used is read, unless RAM holds all of them from the start.
        near(read(&behind, 0.5, 0.9), 2.0 / 16.0);
        near(read(&recorded(&[8, 15], 64), 0.5, 0.9), 7.0 / 16.0);
        near(read(&behind, 0.5, 1.0), 0.0);
        // Where there is no room, others are read, too.
        near(read(&behind, 0.1, 0.2), beyond(&behind, share_in_either(0.1, 0.2)));
        assert!(read(&behind, 0.1, 0.2) > 2.0 / 16.0);
        // A longer prompt follows a longer turn, which leaves few experts unused.
        let longer = behind.read_by_a_prompt(0.5, 0.9, 2.0 / 16.0, 4096.0);
        assert!((2.0 / 16.0..=1.0 - USED_BY_A_TURN + 1e-9).contains(&longer), "{longer}");
        // Generated tokens of the second turn look up 6 experts, of which the first 14 is the only one that nothing used before.
        near(behind.found_at_most(0.9), 1.0);
        let mut lookups = Lookups::new(vec![(16, 1)]);
        for (answer, tokens) in [(12..14, 3), (12..15, 2)] {
            lookups.push(Phase::Prompt, LayerIndex(0), 64, &experts(0..8));
            (0..tokens).for_each(|_| {
                lookups.push(Phase::Generate, LayerIndex(0), 1, &experts(answer.clone()));
            });
        }
        let new = HitCurve::of_lookups(&lookups, 2, PolicyKind::default()).unwrap();
        near(new.found_at_most(0.9), 1.0 - 1.0 / 6.0);
        near(new.found_at_most(1.0), 1.0);
        // Prompts that are too short are not counted.
        let short = recorded(&[8, 10], PROMPT_TOKENS_MIN - 1);
        assert_eq!((short.prompts.is_none(), behind.prompts.is_some()), (true, true));
    }

    #[test]
    fn more_of_either_memory_is_never_less() {
        let steps = || (0..=50).map(|i| f64::from(i) / 50.0);
        for vram in steps() {
            let of: Vec<f64> = steps().map(|ram| share_in_either(vram, ram)).collect();
            assert!(of.windows(2).all(|pair| pair[0] <= pair[1] + 1e-12), "{vram}: {of:?}");
            assert!((of[0] - vram).abs() < 1e-12 && (of[50] - 1.0).abs() < 1e-12);
            let curve = HitCurve::default();
            let of: Vec<f64> = steps().map(|ram| curve.found_by_a_prompt(vram, ram)).collect();
            assert!(of.windows(2).all(|pair| pair[0] <= pair[1] + 1e-12), "{vram}: {of:?}");
            assert!(of[0] >= vram && of[50] == 1.0 && of[49] == vram.max(USED_BY_A_TURN));
        }
        for ram in steps() {
            let of: Vec<f64> = steps().map(|vram| share_in_either(vram, ram)).collect();
            assert!(of.windows(2).all(|pair| pair[0] <= pair[1] + 1e-12), "{ram}: {of:?}");
            assert!((of[0] - ram).abs() < 1e-12);
        }
    }
}
