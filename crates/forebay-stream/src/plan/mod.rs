//! The memory plan of a model under a RAM budget. Planning is pure: the same model and budget give the same plan.
//!
//! The minimum comes first: a ring of two slots for the dense blocks, and slots for the experts of one token in one
//! layer. Then come as many pinned dense blocks as fit, and then experts. The budget is spent in a fixed order, so a
//! larger budget never keeps fewer experts.

mod dense;
mod experts;

use forebay_store::{Block, BlockLayout, SLOT_ALIGNMENT};
use serde::Serialize;

pub use dense::DensePlan;
pub use experts::ExpertPool;

use crate::blocks::{LayerIndex, ModelBlocks};
use crate::error::StreamError;
use crate::policy::{PolicyKind, Scope};
use experts::{Classes, Growth};

/// Use of memory, in bytes and slots. Slots are multiples of 4096 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    pub policy: PolicyKind,
    /// RAM budget of the plan; `None` means no limit.
    pub ram_bytes: Option<u64>,
    /// Part of the budget for other uses: weights that are always resident, staging buffers, scratch memory for
    /// relayout.
    pub reserved_bytes: u64,
    pub dense: DensePlan,
    /// One pool for each size class of experts.
    pub pools: Vec<ExpertPool>,
    /// Number of experts of every layer; 0 for a dense layer.
    pub experts_per_layer: Vec<u32>,
    /// Number of experts that every layer may keep. A global policy shares the sum over a pool's layers instead.
    pub kept_per_layer: Vec<u32>,
    /// Bytes of all slots, which is the size of the arena.
    pub arena_bytes: u64,
    /// True if every block stays in memory once it was read.
    pub fully_resident: bool,
}

impl MemoryPlan {
    /// Returns the number of kept slots of all pools.
    pub fn kept_slots(&self) -> u64 {
        self.pools.iter().map(|pool| u64::from(pool.kept_slots)).sum()
    }

    /// Returns the number of distinct experts of a layer that one batch can have in slots at once, while the slots of
    /// `busy` experts that it evicts are not free yet. The experts of the batch before must have been released. Returns 0
    /// for a layer without experts.
    pub fn slots_at_once(&self, layer: LayerIndex, busy: usize) -> usize {
        let Some(pool) = self.pools.iter().find(|pool| pool.layers.contains(&layer.0)) else {
            return 0;
        };
        if pool.transient_slots == 0 {
            // All experts of the pool are kept, and none is ever evicted.
            return self.experts_per_layer[layer.0 as usize] as usize;
        }
        // A batch evicts its own experts last, so it keeps as many of them as the policy allows in the layer.
        let kept = match self.policy.scope {
            Scope::Global => pool.kept_slots,
            Scope::PerLayer => self.kept_per_layer[layer.0 as usize],
        };
        (kept as usize + pool.transient_slots as usize).saturating_sub(busy)
    }

    /// Returns the number of slots in transit that a layer lacks so that batches may come in two parts of up to `experts`
    /// distinct experts, while the slots of `busy` experts that were evicted are not free yet.
    pub fn slots_lacking_for_parts(&self, layer: LayerIndex, experts: usize, busy: usize) -> usize {
        let Some(pool) = self.pools.iter().find(|pool| pool.layers.contains(&layer.0)) else {
            return 0;
        };
        // Nothing is kept of a first part before the last one comes, so all that is not kept needs such a slot.
        let kept = match self.policy.scope {
            Scope::Global => 0,
            Scope::PerLayer => self.kept_per_layer[layer.0 as usize],
        };
        let others = (self.experts_per_layer[layer.0 as usize] - kept) as usize;
        let needed = if others == 0 { 0 } else { others.min(experts) + busy };
        needed.saturating_sub(pool.transient_slots as usize)
    }

    /// Returns the number of experts of all layers.
    pub fn experts(&self) -> u64 {
        self.experts_per_layer.iter().map(|&experts| u64::from(experts)).sum()
    }

    /// Returns the fraction of the experts that is kept; 0 for a model without experts.
    pub fn kept_share(&self) -> f64 {
        self.kept_slots() as f64 / self.experts().max(1) as f64
    }
}

/// Namespace for planning memory within a budget.
pub struct Budget;

impl Budget {
    /// Plans a model whose streamed blocks, together with `reserved_bytes` for other uses, must fit `ram_bytes`.
    ///
    /// # Errors
    /// Returns [`StreamError::BudgetTooSmall`] with the smallest budget that works.
    pub fn plan(
        blocks: &ModelBlocks,
        ram_bytes: Option<u64>,
        reserved_bytes: u64,
        policy: PolicyKind,
    ) -> Result<MemoryPlan, StreamError> {
        let reserved_bytes = reserved_bytes.saturating_add(blocks.relayout_bytes());
        Sizes::of(blocks).plan(ram_bytes, reserved_bytes, policy)
    }

    /// Plans only experts, in `bytes` of a tier such as VRAM. `layers` holds `(experts, slot bytes)` of each layer.
    ///
    /// # Errors
    /// Returns [`StreamError::BudgetTooSmall`] with the smallest number of bytes that works.
    pub fn plan_experts(
        layers: &[(u32, u64)],
        experts_per_token: usize,
        bytes: u64,
        policy: PolicyKind,
    ) -> Result<MemoryPlan, StreamError> {
        let sizes = Sizes::new(Vec::new(), layers.to_vec(), experts_per_token);
        sizes.plan(Some(bytes), 0, policy)
    }

    /// Returns the smallest budget that works, in bytes.
    pub fn smallest(blocks: &ModelBlocks, reserved_bytes: u64) -> u64 {
        let sizes = Sizes::of(blocks);
        let smallest = sizes.smallest(&sizes.candidates());
        reserved_bytes.saturating_add(blocks.relayout_bytes()).saturating_add(smallest)
    }
}

/// Slot bytes of every block, and the number of experts that a token needs at once.
struct Sizes {
    dense: Vec<u64>,
    /// `(experts, slot bytes of the largest expert)` of every layer.
    experts: Vec<(u32, u64)>,
    experts_per_token: u32,
}

impl Sizes {
    fn of(blocks: &ModelBlocks) -> Sizes {
        let dense = blocks.dense.iter().map(slot_bytes).collect();
        let largest = |experts: &Vec<Block>| {
            let slot = experts.iter().map(slot_bytes).max().unwrap_or(0);
            (experts.len() as u32, slot)
        };
        let experts: Vec<(u32, u64)> = blocks.experts.iter().map(largest).collect();
        Sizes::new(dense, experts, blocks.experts_per_token)
    }

    fn new(dense: Vec<u64>, experts: Vec<(u32, u64)>, experts_per_token: usize) -> Sizes {
        let most = experts.iter().map(|layer| layer.0).max().unwrap_or(0);
        let wanted = u32::try_from(experts_per_token).unwrap_or(u32::MAX);
        Sizes { dense, experts, experts_per_token: wanted.clamp(1, most.max(1)) }
    }

    fn plan(
        &self,
        ram_bytes: Option<u64>,
        reserved_bytes: u64,
        policy: PolicyKind,
    ) -> Result<MemoryPlan, StreamError> {
        let free = ram_bytes.map_or(u64::MAX, |ram| ram.saturating_sub(reserved_bytes));
        let candidates = self.candidates();
        let best = candidates
            .iter()
            .filter_map(|classes| Candidate::within(self, classes, free))
            .max_by_key(|candidate| (candidate.growth.kept(), candidate.dense.pinned_blocks()));
        match best {
            Some(candidate) => Ok(candidate.into_plan(self, ram_bytes, reserved_bytes, policy)),
            None => Err(self.too_small(&candidates, ram_bytes.unwrap_or(u64::MAX), reserved_bytes)),
        }
    }

    /// Returns the possible divisions into classes: one pool for each size class, or one for all experts. The latter
    /// may be the only one that fits a small budget.
    fn candidates(&self) -> Vec<Classes> {
        let separate = Classes::by_size(&self.experts, self.experts_per_token);
        let mut all = vec![Classes::one_for_all(&self.experts, self.experts_per_token)];
        if separate.len() > 1 {
            // `max_by_key` returns the last of several equal candidates, so this one wins a tie.
            all.push(separate);
        }
        all
    }

    fn smallest(&self, candidates: &[Classes]) -> u64 {
        let dense = dense::smallest_bytes(&self.dense);
        let experts = candidates.iter().map(Classes::smallest_bytes).min().unwrap_or(0);
        dense.saturating_add(experts)
    }

    fn too_small(
        &self,
        candidates: &[Classes],
        given_bytes: u64,
        reserved_bytes: u64,
    ) -> StreamError {
        let dense = dense::smallest_bytes(&self.dense);
        let experts = self.smallest(candidates) - dense;
        let mut why = format!("{dense} bytes are needed to stream the dense layers");
        if experts > 0 {
            let used = self.experts_per_token;
            why += &format!(", {experts} for the {used} experts that a token uses in a layer");
        }
        why += &format!(", {reserved_bytes} for what is always in memory");
        let needed_bytes = reserved_bytes.saturating_add(dense).saturating_add(experts);
        StreamError::BudgetTooSmall { needed_bytes, given_bytes, why }
    }
}

/// Returns the slot bytes of a block: what its layout needs for any alignment that a disk may require.
fn slot_bytes(block: &Block) -> u64 {
    BlockLayout::plan_block(block, SLOT_ALIGNMENT).slot_bytes as u64
}

/// One way to use a budget.
struct Candidate<'a> {
    dense: DensePlan,
    classes: &'a Classes,
    growth: Growth,
}

impl<'a> Candidate<'a> {
    fn within(sizes: &Sizes, classes: &'a Classes, free: u64) -> Option<Candidate<'a>> {
        let for_dense = free.checked_sub(classes.smallest_bytes())?;
        let dense = DensePlan::within(&sizes.dense, for_dense)?;
        let for_experts = free - dense.bytes();
        let growth = match dense.all_pinned() {
            true => classes.grow(for_experts),
            false => classes.widen(for_experts),
        };
        Some(Candidate { dense, classes, growth })
    }

    fn into_plan(
        self,
        sizes: &Sizes,
        ram_bytes: Option<u64>,
        reserved_bytes: u64,
        policy: PolicyKind,
    ) -> MemoryPlan {
        let fully_resident = self.dense.all_pinned() && self.classes.all_kept(&self.growth);
        let pools = self.classes.pools(&self.growth);
        let experts = pools.iter().map(ExpertPool::bytes).sum::<u64>();
        MemoryPlan {
            policy,
            ram_bytes,
            reserved_bytes,
            arena_bytes: self.dense.bytes() + experts,
            dense: self.dense,
            pools,
            experts_per_layer: sizes.experts.iter().map(|layer| layer.0).collect(),
            kept_per_layer: self.growth.kept_per_layer,
            fully_resident,
        }
    }
}

#[cfg(test)]
mod tests;
