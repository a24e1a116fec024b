//! Choice of experts, and sorting of (token, slot) pairs by expert.

use forebay_format::TensorType;
use forebay_ops::{RouterGroups, Scoring};

use super::DECODE_ROWS;
use super::weights::weight_alignment;
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Number of warps of a block; the same as in the kernels.
const WARPS: usize = 4;
const EXPERTS_MAX: usize = 512;
const LANES: usize = 32;

/// A table that gives the experts of every token.
#[derive(Clone, Copy)]
pub struct TokenExperts {
    /// Experts `[vocabulary, k]` of the tokens, all below [`RouterChoice::experts`].
    pub table: DevicePtr<u32>,
    pub vocabulary: usize,
    /// Tokens of the rows, all below `vocabulary`.
    pub tokens: DevicePtr<u32>,
}

/// Rule by which a layer's router chooses `k` of `experts`, at most 32 of 512.
#[derive(Clone, Copy)]
pub struct RouterChoice {
    pub experts: usize,
    pub k: usize,
    pub scoring: Scoring,
    /// True if the chosen experts' weights are divided by their sum.
    pub renormalise: bool,
    /// Factor that multiplies the weights at the end.
    pub scale: f32,
    /// Bias `[experts]` added to the logits before they become scores; null if there is none.
    pub logit_bias: DevicePtr<f32>,
    /// Bias `[experts]` added to the scores for the choice alone; null if there is none.
    pub correction_bias: DevicePtr<f32>,
    /// Factors `[experts]` of the weights, applied after `scale`; null if there are none.
    pub expert_scales: DevicePtr<f32>,
    /// Number of experts, the last ones, that every token uses. They take the last of the `k` places.
    pub always: usize,
    pub groups: Option<RouterGroups>,
    /// The experts of each row, if the router only weighs them.
    pub by_token: Option<TokenExperts>,
}

impl RouterChoice {
    fn check(&self) {
        let RouterChoice { experts, k, .. } = *self;
        assert!(
            (1..=LANES).contains(&k) && k <= experts && experts <= EXPERTS_MAX,
            "a choice of {k} of {experts} experts"
        );
        let is_mixer = self.scoring == Scoring::SparseMixer;
        let is_plain =
            self.correction_bias.is_null() && self.groups.is_none() && self.by_token.is_none();
        let is_plain = is_plain && self.always == 0;
        assert!(!is_mixer || is_plain, "a sparse mixer beside other rules of choice");
        assert!(self.always <= k && (self.always == 0 || self.groups.is_none()), "experts of all");
        if let Some(RouterGroups { n_groups, groups_kept, experts_scored }) = self.groups {
            assert!((1..=LANES).contains(&n_groups) && experts.is_multiple_of(n_groups));
            let size = experts / n_groups;
            assert!(groups_kept <= n_groups && experts_scored <= size && groups_kept * size >= k);
        }
    }
}

/// Pairs `token * k + slot`, sorted by expert. Pairs with [`super::NO_EXPERT`] come last.
#[derive(Clone, Copy)]
pub struct SortedPairs {
    /// Bounds `[experts + 1]`: the sorted pairs of expert `e` are those from `starts[e]` to `starts[e + 1]`. The last
    /// bound is the number of pairs that have an expert.
    pub starts: DevicePtr<u32>,
    /// Token of each sorted pair `[pairs]`.
    pub pair_tokens: DevicePtr<u32>,
    /// Index of each sorted pair before sorting `[pairs]`.
    pub pairs: DevicePtr<u32>,
    /// Row of each pair in the sorted order `[pairs]`.
    pub row_of_pair: DevicePtr<u32>,
}

/// A router's matrix `[experts, cols]`, of a type that [`RouterMatrix::is_supported`] accepts.
#[derive(Clone, Copy)]
pub struct RouterMatrix {
    pub ty: TensorType,
    /// Weights, aligned as [`weight_alignment`] requires.
    pub data: DevicePtr<u8>,
    pub cols: usize,
}

impl RouterMatrix {
    /// Returns the modules that multiply and choose at once, for up to 128, 256 and 512 experts. Returns `None` if
    /// this type has none.
    fn modules(ty: TensorType) -> Option<[&'static str; 3]> {
        match ty {
            TensorType::F32 => {
                Some(["router_few_f32_128", "router_few_f32_256", "router_few_f32_512"])
            }
            TensorType::F16 => {
                Some(["router_few_f16_128", "router_few_f16_256", "router_few_f16_512"])
            }
            TensorType::BF16 => {
                Some(["router_few_bf16_128", "router_few_bf16_256", "router_few_bf16_512"])
            }
            _ => None,
        }
    }

    /// Returns true if [`Gpu::route_few`] takes a matrix of this type.
    pub fn is_supported(ty: TensorType) -> bool {
        RouterMatrix::modules(ty).is_some()
    }
}

/// Returns the modules that a router with a matrix of this type needs: the one for decode rows, if there is one, and
/// those for prompt rows.
pub(super) fn router_modules(
    ty: TensorType,
    experts: usize,
) -> (Option<&'static str>, [&'static str; 2]) {
    let few = RouterMatrix::modules(ty).map(|modules| of_size(experts, modules));
    (few, [of_size(experts, ROUTERS), "router_sort"])
}

const ROUTERS: [&str; 3] = ["router_128", "router_256", "router_512"];

/// Returns the name for this number of experts, of the names for up to 128, 256 and 512.
fn of_size(experts: usize, names: [&'static str; 3]) -> &'static str {
    match experts {
        0..=128 => names[0],
        129..=256 => names[1],
        _ => names[2],
    }
}

/// Buffers for the result of a choice.
#[derive(Clone, Copy)]
pub struct RouterOutputs {
    /// Expert ids `[tokens, k]`, best first; of experts with equal scores, the lower id first.
    pub ids: DevicePtr<u32>,
    /// `[tokens, k]`
    pub weights: DevicePtr<f32>,
    /// One word, `u32::MAX` as long as all logits are finite. Otherwise it gets the smallest token with a logit that
    /// is not finite. That token's ids are valid but arbitrary.
    pub flag: DevicePtr<u32>,
}

impl RouterChoice {
    /// Passes the kernel's last arguments.
    fn pass(&self, launch: Launch, outputs: &RouterOutputs, tokens: usize) -> Launch {
        let none = RouterGroups { n_groups: 0, groups_kept: 0, experts_scored: 0 };
        let groups = self.groups.unwrap_or(none);
        let scoring = match self.scoring {
            Scoring::Softmax => 0,
            Scoring::Sigmoid => 1,
            Scoring::SqrtSoftplus => 2,
            Scoring::SigmoidOfChosen => 3,
            Scoring::SparseMixer => 4,
        };
        let launch = launch
            .optional(self.logit_bias, self.experts)
            .optional(self.correction_bias, self.experts)
            .optional(self.expert_scales, self.experts);
        let launch = match self.by_token {
            None => launch.null().null(),
            Some(of) => launch.ptr(of.table, of.vocabulary * self.k).ptr(of.tokens, tokens),
        };
        launch
            .ptr(outputs.ids, tokens * self.k)
            .ptr(outputs.weights, tokens * self.k)
            .ptr(outputs.flag, 1)
            .int(tokens)
            .int(self.experts)
            .int(self.k)
            .int(scoring)
            .int(usize::from(self.renormalise))
            .float(self.scale)
            .int(groups.n_groups)
            .int(groups.groups_kept)
            .int(groups.experts_scored)
            .int(self.always)
    }
}

impl Gpu {
    /// Computes the logits `[tokens, experts]` of `x [tokens, cols]` and the choice, in one launch, for at most
    /// [`DECODE_ROWS`] tokens. `tickets` `[tokens]` are 0 before and after.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, if the choice is impossible or larger than the kernel's limits, or if the
    /// matrix is of another type or not aligned.
    #[allow(clippy::too_many_arguments, reason = "what the kernel needs to know, each once")]
    pub fn route_few(
        &self,
        choice: &RouterChoice,
        matrix: RouterMatrix,
        x: DevicePtr<f32>,
        logits: DevicePtr<f32>,
        outputs: &RouterOutputs,
        tickets: DevicePtr<u32>,
        tokens: usize,
    ) -> Result<(), CudaError> {
        choice.check();
        assert!(tokens <= DECODE_ROWS, "{tokens} tokens");
        let RouterMatrix { ty, data, cols } = matrix;
        let modules = RouterMatrix::modules(ty).unwrap_or_else(|| panic!("a router of {ty}"));
        let kernel = self.kernel(of_size(choice.experts, modules), "route_few")?;
        assert!(data.address().is_multiple_of(weight_alignment(ty) as u64), "router not aligned");
        let row_bytes = ty.row_bytes(cols as u64).unwrap_or_else(|| panic!("{cols} of {ty}"));
        // Each warp computes two rows.
        let grid = (choice.experts.div_ceil(2 * WARPS) as u32, 1, tokens as u32);
        let launch = Launch::new(kernel, grid, ((WARPS * LANES) as u32, 1, 1))
            .shared((2 * choice.experts * size_of::<f32>()) as u32)
            .ptr(x, tokens * cols)
            .ptr(data, choice.experts * row_bytes as usize)
            .int(cols)
            .u64(row_bytes)
            .ptr(logits, tokens * choice.experts)
            .ptr(tickets, tokens);
        choice.pass(launch, outputs, tokens).run(self)
    }

    /// Chooses experts for `tokens` rows of `logits [tokens, experts]`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if the choice is impossible or larger than the kernel's limits.
    pub fn route(
        &self,
        choice: &RouterChoice,
        logits: DevicePtr<f32>,
        outputs: &RouterOutputs,
        tokens: usize,
    ) -> Result<(), CudaError> {
        choice.check();
        let kernel = self.kernel(of_size(choice.experts, ROUTERS), "route")?;
        let grid = (tokens.div_ceil(WARPS) as u32, 1, 1);
        let shared = WARPS * 2 * choice.experts * size_of::<f32>();
        let launch = Launch::new(kernel, grid, ((WARPS * LANES) as u32, 1, 1))
            .shared(shared as u32)
            .ptr(logits, tokens * choice.experts);
        choice.pass(launch, outputs, tokens).run(self)
    }

    /// Sorts the pairs of `ids [tokens, k]` by expert; pairs of one expert are in ascending order of tokens.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn sort_pairs(
        &self,
        ids: DevicePtr<u32>,
        sorted: &SortedPairs,
        tokens: usize,
        k: usize,
        experts: usize,
    ) -> Result<(), CudaError> {
        // One warp per expert, and one for the last bound.
        let grid = ((experts + 1).div_ceil(8) as u32, 1, 1);
        Launch::new(self.kernel("router_sort", "sort_pairs")?, grid, (256, 1, 1))
            .ptr(ids, tokens * k)
            .ptr(sorted.starts, experts + 1)
            .ptr(sorted.pair_tokens, tokens * k)
            .ptr(sorted.pairs, tokens * k)
            .ptr(sorted.row_of_pair, tokens * k)
            .int(tokens * k)
            .int(experts)
            .int(k)
            .run(self)
    }
}
