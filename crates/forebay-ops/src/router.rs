//! How a router chooses experts.

/// Function that turns a logit into a score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scoring {
    /// Softmax over all experts (Mixtral, Qwen3-MoE, OLMoE).
    Softmax,
    /// Logistic function of each logit separately (DeepSeek-V3, GLM-4-MoE).
    Sigmoid,
    /// The same, but the logits choose (Cohere): the function gives equal scores to large logits that differ.
    SigmoidOfChosen,
    /// Square root of `ln(1 + e^x)` of each logit separately (DeepSeek-V4).
    SqrtSoftplus,
    /// The logits choose. The weight of an expert is its share of a softmax over those experts that no better one precedes and whose
    /// logits are within [`NEAR_LOGITS`] of its own: that of the best expert, then that of the best of the others, and so on (PhiMoE).
    SparseMixer,
}

/// Relative distance up to which a logit takes part in the softmax of a better one ([`Scoring::SparseMixer`]).
pub const NEAR_LOGITS: f32 = 0.02;

/// Equal groups of experts. Each token first picks some of the groups (DeepSeek-V3 report, section
/// 2.1.2, node-limited routing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RouterGroups {
    /// Number of groups that the experts are divided into, in order of expert id.
    pub n_groups: usize,
    /// Number of groups that remain in the choice: those with the highest group score. Experts of
    /// other groups are never chosen, whatever their scores. A correction bias can make the scores
    /// of kept experts negative, and an implementation that sets the rejected ones to 0 would
    /// choose those.
    pub groups_kept: usize,
    /// Number of best experts whose scores are summed into the group's score: 2 in DeepSeek-V3, 1
    /// in DeepSeek-V2.
    pub experts_scored: usize,
}

impl RouterGroups {
    /// Returns the number of experts of a group, or `None` if the experts are no whole number of groups.
    pub fn size(&self, experts: usize) -> Option<usize> {
        (self.n_groups > 0 && experts.is_multiple_of(self.n_groups))
            .then(|| experts / self.n_groups)
    }
}
