//! The router of a mixture-of-experts layer: from logits to the experts of each token and the
//! weights of their outputs.

use forebay_ops::{NEAR_LOGITS, RouterGroups, Scoring};

use super::logistic;
use crate::cpu::Cpu;
use crate::error::ComputeError;

/// Routing rule of a model. A new architecture is a new value, not new code.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterRule<'a> {
    /// Factor of the logits.
    pub logit_scale: f32,
    pub scoring: Scoring,
    /// Number of experts, the last ones, that every token uses: shared experts that are scored with the others (Inkling). They
    /// are the last of a token's `k` experts.
    pub always: usize,
    /// True if the chosen experts' weights are divided by their sum.
    pub renormalise: bool,
    /// Factor applied to the weights at the end.
    pub scale: f32,
    /// One factor per expert, applied to its weight after all else (Gemma 4).
    pub expert_scales: Option<&'a [f32]>,
    /// One bias per expert. It is added to the scores for the choice only, not for the weights.
    pub correction_bias: Option<&'a [f32]>,
    pub groups: Option<RouterGroups>,
}

impl RouterRule<'_> {
    /// Returns the rule that takes the softmax over all experts and chooses the best ones. Mixtral
    /// uses it with `renormalise`. Qwen3-MoE and OLMoE set `renormalise` in their configuration.
    pub fn softmax(renormalise: bool) -> RouterRule<'static> {
        RouterRule {
            logit_scale: 1.0,
            scoring: Scoring::Softmax,
            always: 0,
            renormalise,
            scale: 1.0,
            expert_scales: None,
            correction_bias: None,
            groups: None,
        }
    }

    /// Checks that the rule can choose `k` of `experts`.
    ///
    /// # Errors
    /// Returns [`ComputeError::RouterRule`] with the reason if it cannot.
    pub fn check(&self, experts: usize, k: usize) -> Result<(), ComputeError> {
        let why = if k == 0 {
            "a token needs at least one expert"
        } else if k > experts {
            "more experts for each token than there are"
        } else if self.always > k {
            "more experts that every token uses than experts for each token"
        } else if self.always > 0 && self.groups.is_some() {
            "groups of experts beside experts that every token uses"
        } else if self.scoring == Scoring::SparseMixer
            && (self.correction_bias.is_some() || self.groups.is_some() || self.always > 0)
        {
            "a sparse mixer beside other rules of choice"
        } else if !self.logit_scale.is_finite() {
            "the factor of the logits is not finite"
        } else if self.correction_bias.is_some_and(|bias| bias.len() != experts) {
            "the correction bias has another length"
        } else if self.correction_bias.is_some_and(|bias| bias.iter().any(|b| !b.is_finite())) {
            "the correction bias is not finite"
        } else if self.expert_scales.is_some_and(|scales| scales.len() != experts) {
            "the factors of experts have another number"
        } else if let Some(groups) = self.groups {
            match groups.size(experts) {
                None => "the groups do not divide the experts evenly",
                Some(size)
                    if groups.groups_kept > groups.n_groups || groups.experts_scored > size =>
                {
                    "more is kept or scored of the groups than there is"
                }
                Some(size) if groups.groups_kept * size < k => {
                    "the kept groups hold too few experts"
                }
                Some(_) => return Ok(()),
            }
        } else {
            return Ok(());
        };
        Err(ComputeError::RouterRule { experts, why })
    }
}

impl Cpu {
    /// Chooses `k` experts for every token. `logits` is `[tokens, experts]`; `ids` and `weights`
    /// are `[tokens, k]`, best expert first. Ties between experts or groups go to the lower id.
    ///
    /// # Errors
    /// Returns [`ComputeError::RouterRule`] if the rule does not fit `experts` and `k`, and
    /// [`ComputeError::RouterLogit`] if a logit is not finite.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn route(
        &self,
        rule: &RouterRule<'_>,
        logits: &[f32],
        experts: usize,
        k: usize,
        ids: &mut [u32],
        weights: &mut [f32],
    ) -> Result<(), ComputeError> {
        rule.check(experts, k)?;
        assert_eq!(logits.len() % experts, 0, "route: logits are not [tokens, experts]");
        let tokens = logits.len() / experts;
        assert!(ids.len() == tokens * k && weights.len() == tokens * k, "route: not [tokens, k]");
        let groups = rule.groups.map_or(0, |groups| groups.n_groups);
        let mut scratch = self.shared_scratch();
        let (scores, rest) = scratch.floats(2 * experts + groups).split_at_mut(experts);
        let (choice, group_scores) = rest.split_at_mut(experts);
        let outputs = ids.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
        for (token, (logits, (ids, weights))) in
            logits.chunks_exact(experts).zip(outputs).enumerate()
        {
            check_finite(token, logits)?;
            score(rule, logits, scores);
            choice.copy_from_slice(match rule.scoring {
                Scoring::SigmoidOfChosen => logits,
                Scoring::Softmax
                | Scoring::Sigmoid
                | Scoring::SqrtSoftplus
                | Scoring::SparseMixer => scores,
            });
            if let Some(bias) = rule.correction_bias {
                choice.iter_mut().zip(bias).for_each(|(choice, bias)| *choice += bias);
            }
            if let Some(groups) = &rule.groups {
                keep_best_groups(groups, choice, group_scores);
            }
            let (others, always) = (experts - rule.always, k - rule.always);
            for (number, (id, weight)) in ids.iter_mut().zip(&mut *weights).enumerate() {
                let best = match number.checked_sub(always) {
                    None => take_best(&mut choice[..others]),
                    Some(number) => others + number,
                };
                *id = best as u32;
                *weight = match rule.scoring {
                    Scoring::SparseMixer => take_share(scores, best),
                    _ => scores[best],
                };
            }
            scale_weights(rule, ids, weights);
        }
        Ok(())
    }

    /// Computes the weights of experts that were chosen before, as [`Cpu::route`] does for those that it chooses. `logits` is
    /// `[tokens, experts]`; `ids` and `weights` are `[tokens, k]`.
    ///
    /// # Errors
    /// Returns the errors of [`Cpu::route`].
    ///
    /// # Panics
    /// Panics if the lengths do not fit together, or if there is no such expert.
    pub fn weigh_experts(
        &self,
        rule: &RouterRule<'_>,
        logits: &[f32],
        experts: usize,
        ids: &[u32],
        weights: &mut [f32],
    ) -> Result<(), ComputeError> {
        assert_eq!(logits.len() % experts, 0, "weigh_experts: logits are not [tokens, experts]");
        let tokens = logits.len() / experts;
        let k = ids.len().checked_div(tokens).unwrap_or(1);
        rule.check(experts, k)?;
        assert!(ids.len() == tokens * k && weights.len() == ids.len(), "weigh_experts: {k}");
        let mut scratch = self.shared_scratch();
        let scores = scratch.floats(experts);
        let outputs = ids.chunks_exact(k).zip(weights.chunks_exact_mut(k));
        for (token, (logits, (ids, weights))) in
            logits.chunks_exact(experts).zip(outputs).enumerate()
        {
            check_finite(token, logits)?;
            score(rule, logits, scores);
            for (weight, id) in weights.iter_mut().zip(ids) {
                *weight = match rule.scoring {
                    Scoring::SparseMixer => take_share(scores, *id as usize),
                    _ => scores[*id as usize],
                };
            }
            scale_weights(rule, ids, weights);
        }
        Ok(())
    }
}

/// Returns an error if a logit of a token is not finite.
fn check_finite(token: usize, logits: &[f32]) -> Result<(), ComputeError> {
    match logits.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(expert) => Err(ComputeError::RouterLogit { token, expert, value: logits[expert] }),
    }
}

fn score(rule: &RouterRule<'_>, logits: &[f32], scores: &mut [f32]) {
    let logits = logits.iter().map(|x| x * rule.logit_scale);
    match rule.scoring {
        Scoring::Sigmoid | Scoring::SigmoidOfChosen => {
            for (score, x) in scores.iter_mut().zip(logits) {
                *score = logistic(x);
            }
        }
        // Shares depend on which experts are left.
        Scoring::SparseMixer => {
            scores.iter_mut().zip(logits).for_each(|(score, x)| *score = x);
        }
        Scoring::SqrtSoftplus => {
            for (score, x) in scores.iter_mut().zip(logits) {
                // In f64 and rounded once, as on GPUs, so that equal logits give equal choices.
                let x = f64::from(x);
                *score = (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt() as f32;
            }
        }
        Scoring::Softmax => {
            let largest = logits.clone().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for (score, x) in scores.iter_mut().zip(logits) {
                *score = (x - largest).exp();
                sum += *score;
            }
            scores.iter_mut().for_each(|score| *score /= sum);
        }
    }
}

/// Removes the experts of all groups but the best from the choice.
fn keep_best_groups(groups: &RouterGroups, choice: &mut [f32], group_scores: &mut [f32]) {
    let size = choice.len() / groups.n_groups;
    for (score, group) in group_scores.iter_mut().zip(choice.chunks_exact(size)) {
        *score = sum_of_best(group, groups.experts_scored);
    }
    // `take_best` marks the groups that it takes with -inf. Those are the kept groups.
    for _ in 0..groups.groups_kept {
        take_best(group_scores);
    }
    for (score, group) in group_scores.iter().zip(choice.chunks_exact_mut(size)) {
        if *score != f32::NEG_INFINITY {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// Returns the sum of the `count` largest elements, added from the largest down.
fn sum_of_best(group: &[f32], count: usize) -> f32 {
    // `count` is 1 or 2 in every known model, so repeated scans beat sorting a copy.
    let (mut sum, mut last, mut taken) = (0.0, f32::INFINITY, 0);
    while taken < count {
        let below = group.iter().copied().filter(|&x| x < last);
        let best = below.fold(f32::NEG_INFINITY, f32::max);
        let equal = group.iter().filter(|&&x| x == best).count().max(1);
        let used = equal.min(count - taken);
        sum += best * used as f32;
        taken += used;
        last = best;
    }
    sum
}

/// Returns the index of the largest element, the lowest index if there are equals, and removes the
/// element from the choice. The caller must make sure that there is a finite element.
fn take_best(choice: &mut [f32]) -> usize {
    let mut best = 0;
    for (index, &x) in choice.iter().enumerate() {
        if x > choice[best] {
            best = index;
        }
    }
    choice[best] = f32::NEG_INFINITY;
    best
}

/// Returns the share of an expert in the softmax over the logits that are near the largest of those that are left, and takes it from
/// these. Taken logits are -inf.
fn take_share(left: &mut [f32], expert: usize) -> f32 {
    let largest = left.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let part = |x: f32| {
        let is_far = x == f32::NEG_INFINITY || (largest - x) / x.abs().max(largest) > NEAR_LOGITS;
        if is_far { 0.0 } else { (x - largest).exp() }
    };
    let share = part(left[expert]) / left.iter().map(|x| part(*x)).sum::<f32>();
    left[expert] = f32::NEG_INFINITY;
    share
}

/// Multiplies the scores of a token's experts by the rule's factors.
fn scale_weights(rule: &RouterRule<'_>, ids: &[u32], weights: &mut [f32]) {
    let mut factor = rule.scale;
    if rule.renormalise {
        let sum: f32 = weights.iter().sum();
        // Sigmoid scores may all underflow. Then the weights are 0, as in the reference models.
        factor /= sum.max(1e-20);
    }
    weights.iter_mut().for_each(|weight| *weight *= factor);
    if let Some(scales) = rule.expert_scales {
        let of_experts = ids.iter().map(|id| scales[*id as usize]);
        weights.iter_mut().zip(of_experts).for_each(|(weight, scale)| *weight *= scale);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpus, random};

    type Chosen = Result<(Vec<u32>, Vec<f32>), ComputeError>;

    fn route(rule: &RouterRule<'_>, logits: &[f32], experts: usize, k: usize) -> Chosen {
        let tokens = logits.len() / experts;
        let (mut ids, mut weights) = (vec![0; tokens * k], vec![0.0; tokens * k]);
        cpus()[0].route(rule, logits, experts, k, &mut ids, &mut weights)?;
        Ok((ids, weights))
    }

    #[test]
    fn the_root_of_softplus_is_exact_for_large_and_small_logits() {
        let logits = [-100.0, -30.0, -1.0, 0.0, 1.0, 30.0, 1e4, 3e38];
        let rule = RouterRule { scoring: Scoring::SqrtSoftplus, ..RouterRule::softmax(false) };
        let (ids, weights) = route(&rule, &logits, 8, 8).unwrap();
        assert_eq!(ids, [7, 6, 5, 4, 3, 2, 1, 0]);
        for (id, weight) in ids.iter().zip(weights) {
            let x = f64::from(logits[*id as usize]);
            let exact = if x > 30.0 { x } else { x.exp().ln_1p() }.sqrt();
            assert!((f64::from(weight) - exact).abs() <= 1e-6 * exact, "{x}: {weight}");
        }
    }

    #[test]
    fn experts_of_every_token_share_the_weights_with_the_chosen_ones() {
        // The last two experts count for every token, whatever their scores. The bias decides between the others.
        let logits = [0.5, 1.0, -1.0, 0.75, -3.0, 4.0];
        let bias = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let rule = RouterRule {
            scoring: Scoring::Sigmoid,
            scale: 8.0,
            always: 2,
            correction_bias: Some(&bias),
            logit_scale: 0.5,
            ..RouterRule::softmax(true)
        };
        let (ids, weights) = route(&rule, &logits, 6, 4).unwrap();
        assert_eq!(ids, [0, 1, 4, 5]);
        let sigmoid = |x: f64| 1.0 / (1.0 + (-0.5 * x).exp());
        let scores = [0.5, 1.0, -3.0, 4.0].map(sigmoid);
        let sum: f64 = scores.iter().sum();
        for (weight, score) in weights.iter().zip(scores) {
            assert!((f64::from(*weight) - 8.0 * score / sum).abs() < 1e-6, "{weights:?}");
        }
        for always in [5, 6] {
            assert!(route(&RouterRule { always, ..rule }, &logits, 6, 4).is_err(), "{always}");
        }
    }

    #[test]
    fn large_logits_choose_although_their_scores_are_equal() {
        let logits = [30.0, 31.0, -1.0, 40.0];
        for (scoring, expected) in [(Scoring::Sigmoid, [0, 1]), (Scoring::SigmoidOfChosen, [3, 1])]
        {
            let rule = RouterRule { scoring, ..RouterRule::softmax(true) };
            let (ids, weights) = route(&rule, &logits, 4, 2).unwrap();
            assert_eq!((&ids[..], &weights[..]), (&expected[..], &[0.5, 0.5][..]), "{scoring:?}");
        }
    }

    #[test]
    fn near_logits_share_the_weight_of_a_sparse_mixer() {
        let rule = RouterRule { scoring: Scoring::SparseMixer, ..RouterRule::softmax(false) };
        // 4.95 is near 5, and 4.87 is near 4.95 but not near 5.
        let (ids, weights) = route(&rule, &[4.87, 5.0, -7.0, 4.95], 4, 3).unwrap();
        assert_eq!(ids, [1, 3, 0]);
        let of_two = |distance: f32| 1.0 / (1.0 + (-distance).exp());
        for (found, expected) in weights.iter().zip([of_two(0.05), of_two(0.08), 1.0]) {
            assert!((found - expected).abs() < 1e-5, "{found} instead of {expected}");
        }
        // Negative logits are compared with their own size, and 0 is near 0.
        let (_, weights) = route(&rule, &[-1.0, -1.01, -1.1], 3, 1).unwrap();
        assert!((weights[0] - of_two(0.01)).abs() < 1e-5);
        let (ids, weights) = route(&rule, &[0.0, 0.0, -0.5], 3, 2).unwrap();
        assert_eq!((ids, weights), (vec![0, 1], vec![0.5, 1.0]));
        let groups = Some(RouterGroups { n_groups: 1, groups_kept: 1, experts_scored: 1 });
        assert!(route(&RouterRule { groups, ..rule }, &[0.0; 3], 3, 2).is_err());
    }

    #[test]
    fn experts_chosen_before_get_the_weights_of_the_rule() {
        let logits: Vec<f32> = random(3, 5 * 16).iter().map(|x| x * 6.0).collect();
        let scales = random(4, 16);
        for scoring in
            [Scoring::Softmax, Scoring::Sigmoid, Scoring::SigmoidOfChosen, Scoring::SqrtSoftplus]
        {
            let rule = RouterRule {
                scoring,
                scale: 1.5,
                expert_scales: Some(&scales),
                ..RouterRule::softmax(true)
            };
            let (ids, expected) = route(&rule, &logits, 16, 3).unwrap();
            let mut weights = vec![0.0; ids.len()];
            let cpu = &cpus()[0];
            cpu.weigh_experts(&rule, &logits, 16, &ids, &mut weights).unwrap();
            assert_eq!(weights, expected);
            // The order of experts is that of the caller.
            let swapped: Vec<u32> = ids.chunks(3).flat_map(|of| [of[2], of[1], of[0]]).collect();
            cpu.weigh_experts(&rule, &logits, 16, &swapped, &mut weights).unwrap();
            for (found, expected) in weights.chunks(3).zip(expected.chunks(3)) {
                for (found, expected) in found.iter().rev().zip(expected) {
                    assert!((found - expected).abs() <= 1e-6 * expected.abs());
                }
            }
            let mut broken = logits.clone();
            broken[20] = f32::NAN;
            assert!(cpu.weigh_experts(&rule, &broken, 16, &ids, &mut weights).is_err());
        }
    }

    #[test]
    fn softmax_then_best_with_and_without_renormalising() {
        let logits: Vec<f32> = random(1, 5 * 64).iter().map(|x| x * 6.0).collect();
        let (ids, plain) = route(&RouterRule::softmax(false), &logits, 64, 8).unwrap();
        let (same, normed) = route(&RouterRule::softmax(true), &logits, 64, 8).unwrap();
        assert_eq!(ids, same);
        for token in 0..5 {
            let logits = &logits[token * 64..][..64];
            let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            let mut order: Vec<u32> = (0..64).collect();
            order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
            assert_eq!(ids[token * 8..][..8], order[..8]);
            let chosen: Vec<f64> =
                order[..8].iter().map(|&id| f64::from(logits[id as usize]).exp() / sum).collect();
            for (j, exact) in chosen.iter().enumerate() {
                assert!((f64::from(plain[token * 8 + j]) - exact).abs() < 1e-6);
                let exact = exact / chosen.iter().sum::<f64>();
                assert!((f64::from(normed[token * 8 + j]) - exact).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn equals_go_to_the_lower_id() {
        let (ids, _) = route(&RouterRule::softmax(true), &[1.0, 2.0, 2.0, 2.0], 4, 2).unwrap();
        assert_eq!(ids, [1, 2]);
        let (ids, _) = route(&RouterRule::softmax(true), &[0.0; 4], 4, 4).unwrap();
        assert_eq!(ids, [0, 1, 2, 3]);
    }

    #[test]
    fn the_correction_bias_moves_the_choice_and_not_the_weights() {
        let bias = [0.0, 0.0, 5.0, 0.0];
        let rule = RouterRule {
            scoring: Scoring::Sigmoid,
            scale: 2.5,
            correction_bias: Some(&bias),
            ..RouterRule::softmax(true)
        };
        let (ids, weights) = route(&rule, &[0.0, 1.0, -1.0, 0.5], 4, 2).unwrap();
        assert_eq!(ids, [2, 1]);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let sum = sigmoid(-1.0) + sigmoid(1.0);
        assert!((weights[0] - 2.5 * sigmoid(-1.0) / sum).abs() < 1e-6);
        assert!((weights[1] - 2.5 * sigmoid(1.0) / sum).abs() < 1e-6);
    }

    #[test]
    fn factors_of_experts_change_the_weights_and_not_the_choice() {
        let plain = RouterRule { scale: 2.0, ..RouterRule::softmax(true) };
        let logits = [0.0, 1.0, -1.0, 0.5];
        let (ids, weights) = route(&plain, &logits, 4, 3).unwrap();
        let scales = [0.25, 4.0, 9.0, 0.5];
        let scaled = RouterRule { expert_scales: Some(&scales), ..plain };
        let (same, products) = route(&scaled, &logits, 4, 3).unwrap();
        assert_eq!((&ids, &ids[..]), (&same, &[1, 3, 0][..]));
        assert_eq!(products, [4.0 * weights[0], 0.5 * weights[1], 0.25 * weights[2]]);
        assert!(RouterRule { expert_scales: Some(&scales[..3]), ..plain }.check(4, 3).is_err());
    }

    #[test]
    fn groups_limit_the_choice() {
        let groups = |experts_scored| RouterGroups { n_groups: 3, groups_kept: 1, experts_scored };
        let rule = |scored| RouterRule {
            groups: Some(groups(scored)),
            scoring: Scoring::Sigmoid,
            ..RouterRule::softmax(false)
        };
        // The best single expert is in group 0, the best pair in group 2.
        let logits = [3.0, -3.0, 0.0, 0.1, 2.0, 2.0];
        assert_eq!(route(&rule(1), &logits, 6, 2).unwrap().0, [0, 1]);
        assert_eq!(route(&rule(2), &logits, 6, 2).unwrap().0, [4, 5]);
    }

    #[test]
    fn rejected_groups_stay_out_where_kept_scores_are_negative() {
        let bias = [-1.0, -2.0, -3.0, -3.0];
        let groups = Some(RouterGroups { n_groups: 2, groups_kept: 1, experts_scored: 2 });
        let rule = RouterRule {
            scoring: Scoring::Sigmoid,
            correction_bias: Some(&bias),
            groups,
            ..RouterRule::softmax(false)
        };
        assert_eq!(route(&rule, &[0.0; 4], 4, 2).unwrap().0, [0, 1]);
    }

    #[test]
    fn broken_logits_and_impossible_rules_are_errors() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let result = route(&RouterRule::softmax(true), &[0.0, 1.0, 2.0, bad], 2, 1);
            assert!(matches!(result, Err(ComputeError::RouterLogit { token: 1, expert: 1, .. })));
        }
        let plain = RouterRule::softmax(true);
        let groups = |n_groups, groups_kept, experts_scored| RouterRule {
            groups: Some(RouterGroups { n_groups, groups_kept, experts_scored }),
            ..RouterRule::softmax(true)
        };
        assert!(plain.check(8, 0).is_err() && plain.check(8, 9).is_err());
        assert!(plain.check(8, 8).is_ok() && plain.check(0, 1).is_err());
        for bad in [(0, 1, 1), (3, 1, 1), (2, 3, 1), (2, 1, 5), (4, 1, 1)] {
            assert!(groups(bad.0, bad.1, bad.2).check(8, 4).is_err(), "{bad:?}");
        }
        assert!(groups(2, 1, 2).check(8, 4).is_ok());
        let short = RouterRule { correction_bias: Some(&[0.0]), ..plain };
        let nan = RouterRule { correction_bias: Some(&[f32::NAN, 0.0]), ..plain };
        assert!(short.check(2, 1).is_err() && nan.check(2, 1).is_err());
    }
}
