//! Choosing experts, and sorting pairs of token and slot by expert.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Tokens of a block; as in the kernel.
const WARPS: usize = 4;
const EXPERTS_MAX: usize = 512;
const LANES: usize = 32;

/// Experts in equal groups, of which each token first picks some.
#[derive(Clone, Copy, Debug)]
pub struct RouterGroups {
    /// At most 32.
    pub n_groups: usize,
    pub groups_kept: usize,
    /// A group's score is the sum of this many of its best experts'.
    pub experts_scored: usize,
}

/// How a layer's router chooses `k` of `experts`, at most 32 of 512.
#[derive(Clone, Copy)]
pub struct RouterChoice {
    pub experts: usize,
    pub k: usize,
    /// The logistic function of each logit, else the softmax over all.
    pub sigmoid: bool,
    /// Divides the chosen experts' weights by their sum.
    pub renormalise: bool,
    /// Multiplies the weights at the end.
    pub scale: f32,
    /// Added to the scores for the choice alone `[experts]`; null: none.
    pub correction_bias: DevicePtr<f32>,
    pub groups: Option<RouterGroups>,
}

impl RouterChoice {
    fn check(&self) {
        let RouterChoice { experts, k, .. } = *self;
        assert!(
            (1..=LANES).contains(&k) && k <= experts && experts <= EXPERTS_MAX,
            "a choice of {k} of {experts} experts"
        );
        if let Some(RouterGroups { n_groups, groups_kept, experts_scored }) = self.groups {
            assert!((1..=LANES).contains(&n_groups) && experts.is_multiple_of(n_groups));
            let size = experts / n_groups;
            assert!(groups_kept <= n_groups && experts_scored <= size && groups_kept * size >= k);
        }
    }
}

/// Pairs `token * k + slot` in the order of their experts.
#[derive(Clone, Copy)]
pub struct SortedPairs {
    /// `[experts + 1]`: expert `e` has the places from `starts[e]` to `starts[e + 1]`.
    pub starts: DevicePtr<u32>,
    /// Token of each place `[pairs]`.
    pub pair_tokens: DevicePtr<u32>,
    /// Pair of each place `[pairs]`.
    pub pairs: DevicePtr<u32>,
    /// Place of each pair `[pairs]`.
    pub row_of_pair: DevicePtr<u32>,
}

impl Gpu {
    /// Chooses experts for `tokens` rows of `logits [tokens, experts]`: `ids` and `weights` are `[tokens, k]`, best
    /// first, of equals the lower id. `flag`, one word that is `u32::MAX` while all is well, gets the smallest token
    /// with a logit that is not finite; that token's ids are some experts.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When the choice is impossible or larger than the kernel's limits.
    pub fn route(
        &self,
        choice: &RouterChoice,
        logits: DevicePtr<f32>,
        ids: DevicePtr<u32>,
        weights: DevicePtr<f32>,
        flag: DevicePtr<u32>,
        tokens: usize,
    ) -> Result<(), CudaError> {
        choice.check();
        let kernel = match choice.experts {
            0..=128 => "route_128",
            129..=256 => "route_256",
            _ => "route_512",
        };
        let none = RouterGroups { n_groups: 0, groups_kept: 0, experts_scored: 0 };
        let groups = choice.groups.unwrap_or(none);
        let grid = (tokens.div_ceil(WARPS) as u32, 1, 1);
        let shared = WARPS * 2 * choice.experts * size_of::<f32>();
        Launch::new(self.kernel("router", kernel)?, grid, ((WARPS * LANES) as u32, 1, 1))
            .shared(shared as u32)
            .ptr(logits)
            .ptr(choice.correction_bias)
            .ptr(ids)
            .ptr(weights)
            .ptr(flag)
            .int(tokens)
            .int(choice.experts)
            .int(choice.k)
            .int(usize::from(choice.sigmoid))
            .int(usize::from(choice.renormalise))
            .float(choice.scale)
            .int(groups.n_groups)
            .int(groups.groups_kept)
            .int(groups.experts_scored)
            .run(self)
    }

    /// Sorts the pairs of `ids [tokens, k]` by expert, tokens ascending within one.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn sort_pairs(
        &self,
        ids: DevicePtr<u32>,
        sorted: &SortedPairs,
        tokens: usize,
        k: usize,
        experts: usize,
    ) -> Result<(), CudaError> {
        // One warp for each expert and one for the last start.
        let grid = ((experts + 1).div_ceil(8) as u32, 1, 1);
        Launch::new(self.kernel("router", "sort_pairs")?, grid, (256, 1, 1))
            .ptr(ids)
            .ptr(sorted.starts)
            .ptr(sorted.pair_tokens)
            .ptr(sorted.pairs)
            .ptr(sorted.row_of_pair)
            .int(tokens * k)
            .int(experts)
            .int(k)
            .run(self)
    }
}
