//! What a cache is made for: layers, and the capacities that they share.

use crate::plan::MemoryPlan;
use crate::policy::Scope;

/// One layer as the cache sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerShape {
    /// Experts of the layer; 0 for a dense one.
    pub experts: u32,
    /// What one expert takes of its group's capacity: 1 for slots, or bytes.
    pub cost: u64,
    /// The group whose capacity it shares.
    pub group: usize,
}

/// Layers, and the capacities that they share.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheShape {
    pub layers: Vec<LayerShape>,
    /// Capacity of every group, in the unit of [`LayerShape::cost`].
    pub groups: Vec<u64>,
    /// Whether a batch that is larger than the capacity stays whole until the next batch of its group, as in the engine
    /// that recorded the published traces. Ours keeps to the capacity.
    pub batch_may_exceed: bool,
    /// Layers all of whose experts are loaded before the first lookup.
    pub preloaded: Vec<bool>,
}

impl CacheShape {
    /// The cache of a memory plan: counted in slots, one group per layer or, for a global policy, per pool.
    pub fn from_plan(plan: &MemoryPlan) -> CacheShape {
        let mut layers: Vec<LayerShape> = plan
            .experts_per_layer
            .iter()
            .enumerate()
            .map(|(layer, &experts)| LayerShape { experts, cost: 1, group: layer })
            .collect();
        let mut groups: Vec<u64> =
            plan.kept_per_layer.iter().map(|&kept| u64::from(kept)).collect();
        if !plan.policy.is_per_layer() {
            groups = plan.pools.iter().map(|pool| u64::from(pool.kept_slots)).collect();
            for (index, pool) in plan.pools.iter().enumerate() {
                for &layer in &pool.layers {
                    layers[layer as usize].group = index;
                }
            }
            // Layers without experts belong to no pool; any group will do.
            for layer in layers.iter_mut().filter(|layer| layer.experts == 0) {
                layer.group = 0;
            }
        }
        let preloaded = vec![false; layers.len()];
        CacheShape { layers, groups, batch_may_exceed: false, preloaded }
    }

    /// The same after [`crate::Residency::preload`]: what fits whole is there from the start.
    pub fn after_preload(mut self, plan: &MemoryPlan) -> CacheShape {
        for pool in plan.pools.iter().filter(|pool| pool.transient_slots == 0) {
            pool.layers.iter().for_each(|&layer| self.preloaded[layer as usize] = true);
        }
        self
    }

    /// A cache of `capacity_bytes` for layers with `(experts, bytes of one expert)`: one group, or for policies per
    /// layer the same share of the bytes for each layer. Accounting as in the published replays of recorded traces.
    pub fn from_bytes(scope: Scope, layers: &[(u32, u64)], capacity_bytes: u64) -> CacheShape {
        let with_experts = layers.iter().filter(|layer| layer.0 > 0).count().max(1) as u64;
        let shape = |(index, &(experts, cost)): (usize, &(u32, u64))| LayerShape {
            experts,
            cost,
            group: if scope == Scope::PerLayer { index } else { 0 },
        };
        let groups = match scope {
            Scope::PerLayer => vec![capacity_bytes / with_experts; layers.len()],
            Scope::Global => vec![capacity_bytes],
        };
        let layers: Vec<LayerShape> = layers.iter().enumerate().map(shape).collect();
        let preloaded = vec![false; layers.len()];
        CacheShape { layers, groups, batch_may_exceed: true, preloaded }
    }
}
