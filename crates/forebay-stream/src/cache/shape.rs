//! The shape of a cache: its layers, and the capacities that they share.

use crate::plan::MemoryPlan;
use crate::policy::Scope;

/// Shape of one layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerShape {
    /// Number of experts of the layer; 0 for a dense layer.
    pub experts: u32,
    /// Capacity of the group that one expert takes: 1 if the capacity is in slots, or its bytes.
    pub cost: u64,
    /// Index of the group whose capacity the layer shares.
    pub group: usize,
}

/// Layers, and the capacities that they share.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheShape {
    pub layers: Vec<LayerShape>,
    /// Capacity of every group, in the unit of [`LayerShape::cost`].
    pub groups: Vec<u64>,
    /// True if a batch larger than the capacity stays resident until the next batch of its group, as in the engine that
    /// recorded the published traces. Forebay's engine respects the capacity.
    pub batch_may_exceed: bool,
    /// For each layer, true if all its experts are loaded before the first lookup.
    pub preloaded: Vec<bool>,
}

impl CacheShape {
    /// Returns the cache shape of a memory plan, counted in slots. There is one group per layer or, for a global
    /// policy, per pool.
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
            // Layers without experts belong to no pool, so any group will do.
            for layer in layers.iter_mut().filter(|layer| layer.experts == 0) {
                layer.group = 0;
            }
        }
        let preloaded = vec![false; layers.len()];
        CacheShape { layers, groups, batch_may_exceed: false, preloaded }
    }

    /// Returns the shape after [`crate::Residency::preload`]: layers whose experts all fit are loaded from the start.
    pub fn after_preload(mut self, plan: &MemoryPlan) -> CacheShape {
        for pool in plan.pools.iter().filter(|pool| pool.transient_slots == 0) {
            pool.layers.iter().for_each(|&layer| self.preloaded[layer as usize] = true);
        }
        self
    }

    /// Returns the shape of a cache of `capacity_bytes` for layers with `(experts, bytes of one expert)`. It has one
    /// group, or for per-layer policies one group per layer with an equal share of the bytes. Accounting follows the
    /// published replays of recorded traces.
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
