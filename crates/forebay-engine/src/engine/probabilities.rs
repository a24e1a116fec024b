//! Probabilities of tokens.

use forebay_model::sampling::{Largest, RowLogits};

use super::request::PromptToken;

/// Most rows of a prompt in a pass if their logits are wanted. The logits of a large vocabulary take 0.6 MB each.
pub const SCORED_ROWS_MAX: usize = 32;

/// Probabilities of a prompt's tokens, on their way to the caller.
pub struct PromptScores {
    /// Number of the likeliest tokens that are reported with each.
    likeliest: usize,
    /// The tokens from the second one on.
    tokens: Vec<PromptToken>,
}

impl PromptScores {
    pub fn new(likeliest: usize) -> PromptScores {
        PromptScores { likeliest, tokens: Vec::new() }
    }

    /// Takes the logits after the token at `index`, behind which comes `next`. A request that is computed again brings rows twice.
    pub fn take(&mut self, index: usize, next: u32, logits: RowLogits<'_>) {
        let (RowLogits::All(logits) | RowLogits::Changed(logits)) = logits else { return };
        if index < self.tokens.len() {
            return;
        }
        let (logprob, likeliest) = log_probabilities(logits, next, self.likeliest);
        let own = logits[next as usize];
        let rank = 1 + logits.iter().filter(|logit| **logit > own).count();
        self.tokens.push(PromptToken { logprob, rank, likeliest });
    }

    pub fn into_tokens(self) -> Vec<PromptToken> {
        self.tokens
    }
}

/// Returns the logarithm of the probability of token `id`, and the `count` likeliest tokens with theirs.
pub fn log_probabilities(logits: &[f32], id: u32, count: usize) -> (f32, Vec<(u32, f32)>) {
    let largest = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    let sum: f64 = logits.iter().map(|x| f64::from(x - largest).exp()).sum();
    let log_sum = f64::from(largest) + sum.ln();
    let of = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let by_logit =
        |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let count = count.min(order.len());
    if count > 0 && count < order.len() {
        order.select_nth_unstable_by(count - 1, by_logit);
    }
    order.truncate(count);
    order.sort_unstable_by(by_logit);
    (of(logits[id as usize]), order.into_iter().map(|id| (id, of(logits[id as usize]))).collect())
}

/// Does the same as [`log_probabilities`] with the largest logits and their total at a divisor of 1. Token `id` is one of them.
pub fn log_probabilities_of_largest(
    largest: &Largest<'_>,
    id: u32,
    count: usize,
) -> (f32, Vec<(u32, f32)>) {
    let Largest { logits, total, .. } = largest;
    let log_sum = f64::from(logits[0].0) + f64::from(*total).ln();
    let of = |logit: f32| (f64::from(logit) - log_sum) as f32;
    let own = logits.iter().find(|(_, of)| *of == id).expect("a token is chosen from the largest");
    let likeliest = logits.iter().take(count).map(|(logit, id)| (*id, of(*logit)));
    (of(own.0), likeliest.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_follow_from_the_largest_logits_and_their_total() {
        let logits = [0.5, 3.0, -1.0, 2.5, 3.0];
        let largest = [(3.0, 1), (3.0, 4), (2.5, 3)];
        let total = logits.iter().map(|logit: &f32| (logit - 3.0).exp()).sum();
        let largest = Largest { logits: &largest, is_all: false, total };
        for (id, count) in [(1, 0), (4, 1), (3, 3)] {
            let (own, likeliest) = log_probabilities(&logits, id, count);
            let (of_largest, same) = log_probabilities_of_largest(&largest, id, count);
            assert!((own - of_largest).abs() < 1e-6);
            let ids = |of: &[(u32, f32)]| of.iter().map(|(id, _)| *id).collect::<Vec<_>>();
            assert_eq!(ids(&likeliest), ids(&same));
            assert!(likeliest.iter().zip(&same).all(|(a, b)| (a.1 - b.1).abs() < 1e-6));
        }
    }
}
