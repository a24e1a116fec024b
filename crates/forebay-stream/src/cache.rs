//! The cache state machine: which experts are resident, and what happens to them when a layer's batch
//! looks experts up. Pure and deterministic: no clock, no I/O. The engine and the replay of traces both run
//! exactly this code, so the replay of a recorded run gives the engine's own counters.
//!
//! Accounting: one lookup per distinct expert and layer batch. Eviction happens after the batch, and never
//! takes an expert of the batch while another one can go.

use serde::Serialize;

use crate::blocks::{ExpertIndex, LayerIndex};
use crate::plan::MemoryPlan;
use crate::policy::{AGEING_LOOKUPS_PER_EXPERT, PolicyKind, Usage};

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
        CacheShape { layers, groups, batch_may_exceed: false }
    }

    /// A cache of `capacity_bytes` for layers with `(experts, bytes of one expert)`: one group, or for policies per
    /// layer the same share of the bytes for each layer. Accounting as in the published replays of recorded traces.
    pub fn from_bytes(
        policy: PolicyKind,
        layers: &[(u32, u64)],
        capacity_bytes: u64,
    ) -> CacheShape {
        let with_experts = layers.iter().filter(|layer| layer.0 > 0).count().max(1) as u64;
        let shape = |(index, &(experts, cost)): (usize, &(u32, u64))| LayerShape {
            experts,
            cost,
            group: if policy.is_per_layer() { index } else { 0 },
        };
        let groups = match policy.is_per_layer() {
            true => vec![capacity_bytes / with_experts; layers.len()],
            false => vec![capacity_bytes],
        };
        let layers = layers.iter().enumerate().map(shape).collect();
        CacheShape { layers, groups, batch_may_exceed: true }
    }
}

/// What was looked up so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct CacheCounters {
    /// Distinct experts per layer batch.
    pub lookups: u64,
    /// Lookups that found their expert resident.
    pub hits: u64,
    /// Experts that were resident and had to go, or that were read and not retained.
    pub evictions: u64,
}

impl CacheCounters {
    /// Lookups that did not find their expert.
    pub fn misses(&self) -> u64 {
        self.lookups - self.hits
    }

    /// Adds what happened from one sample to another.
    pub(crate) fn add_between(&mut self, from: &CacheCounters, to: &CacheCounters) {
        self.lookups += to.lookups - from.lookups;
        self.hits += to.hits - from.hits;
        self.evictions += to.evictions - from.evictions;
    }

    /// Hits per lookup; 0 before the first one.
    pub fn hit_rate(&self) -> f64 {
        if self.lookups == 0 { 0.0 } else { self.hits as f64 / self.lookups as f64 }
    }
}

/// The resident experts of all layers, and their use so far.
#[derive(Clone, Debug)]
pub struct CacheState {
    policy: PolicyKind,
    layers: Vec<Layer>,
    groups: Vec<Group>,
    entries: Vec<Entry>,
    batch_may_exceed: bool,
    clock: u64,
    batch: u64,
    counters: CacheCounters,
}

#[derive(Clone, Debug)]
struct Layer {
    shape: LayerShape,
    first: usize,
    /// Lookups until the counts are halved.
    until_ageing: u64,
    resident: u32,
    resident_max: u32,
}

#[derive(Clone, Debug)]
struct Group {
    capacity: u64,
    used: u64,
    /// Entries that are resident, in no order.
    resident: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    usage: Usage,
    layer: u32,
    /// Where it stands in its group's list; `ABSENT` when it is not resident.
    position: u32,
    /// The last batch that touched it.
    batch: u64,
}

const ABSENT: u32 = u32::MAX;

impl CacheState {
    /// An empty cache.
    ///
    /// # Panics
    /// If a layer with experts names a group that does not exist, or there are 2^32 experts.
    pub fn new(policy: PolicyKind, shape: &CacheShape) -> CacheState {
        let mut entries = Vec::new();
        let mut layers = Vec::with_capacity(shape.layers.len());
        for (index, &layer) in shape.layers.iter().enumerate() {
            assert!(
                layer.experts == 0 || layer.group < shape.groups.len(),
                "layer without a group"
            );
            let entry =
                Entry { usage: Usage::default(), layer: index as u32, position: ABSENT, batch: 0 };
            let first = entries.len();
            entries.resize(first + layer.experts as usize, entry);
            layers.push(Layer {
                shape: layer,
                first,
                until_ageing: ageing_period(layer),
                resident: 0,
                resident_max: 0,
            });
        }
        assert!(entries.len() < ABSENT as usize, "too many experts");
        let mut members = vec![0; shape.groups.len()];
        for layer in shape.layers.iter().filter(|layer| layer.experts > 0) {
            members[layer.group] += layer.experts as usize;
        }
        // Room for every member, so that nothing is allocated later.
        let groups = shape.groups.iter().zip(members);
        let groups = groups
            .map(|(&capacity, members)| Group {
                capacity,
                used: 0,
                resident: Vec::with_capacity(members),
            })
            .collect();
        let counters = CacheCounters::default();
        CacheState {
            policy,
            layers,
            groups,
            entries,
            batch_may_exceed: shape.batch_may_exceed,
            clock: 0,
            batch: 1,
            counters,
        }
    }

    /// Experts of a layer; 0 for a dense or an unknown one.
    pub fn experts(&self, layer: LayerIndex) -> u32 {
        self.layers.get(layer.0 as usize).map_or(0, |layer| layer.shape.experts)
    }

    /// Whether an expert is resident, without counting a lookup.
    pub fn is_resident(&self, layer: LayerIndex, expert: ExpertIndex) -> bool {
        self.entries[self.entry(layer, expert)].position != ABSENT
    }

    /// Looks an expert up and records its use. Within a batch, later lookups count as more recent.
    ///
    /// # Panics
    /// If there is no such expert.
    pub fn lookup(&mut self, layer: LayerIndex, expert: ExpertIndex) -> bool {
        let index = self.entry(layer, expert);
        self.clock += 1;
        self.counters.lookups += 1;
        let entry = &mut self.entries[index];
        entry.usage.record(self.clock);
        let hit = entry.position != ABSENT;
        self.counters.hits += u64::from(hit);
        self.count_towards_ageing(layer);
        hit
    }

    /// Ends a layer's batch: what it touched becomes resident, then the group is cut to its capacity, the least
    /// worthy of the others first, the batch's own only when no others are left. Appends to `evicted` what is no longer
    /// resident, of the batch or not.
    pub fn retain(
        &mut self,
        layer: LayerIndex,
        touched: &[ExpertIndex],
        evicted: &mut Vec<(LayerIndex, ExpertIndex)>,
    ) {
        self.batch += 1;
        for &expert in touched {
            let index = self.entry(layer, expert);
            self.entries[index].batch = self.batch;
            self.insert(index);
        }
        let Some(shape) = self.layers.get(layer.0 as usize).map(|layer| layer.shape) else {
            return;
        };
        if shape.experts == 0 {
            return;
        }
        while self.groups[shape.group].used > self.groups[shape.group].capacity {
            let Some(victim) = self.least_worthy(shape.group) else { break };
            self.remove(victim);
            let owner = self.entries[victim].layer;
            let first = self.layers[owner as usize].first;
            evicted.push((LayerIndex(owner), ExpertIndex((victim - first) as u32)));
        }
        let layer = &mut self.layers[layer.0 as usize];
        layer.resident_max = layer.resident_max.max(layer.resident);
    }

    /// Makes an expert resident that was loaded before any lookup. The caller keeps to the capacity.
    pub(crate) fn preload(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        let index = self.entry(layer, expert);
        self.insert(index);
        let layer = &mut self.layers[layer.0 as usize];
        layer.resident_max = layer.resident_max.max(layer.resident);
    }

    /// An expert that was to become resident could not be loaded, or was lost.
    pub(crate) fn forget(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        let index = self.entry(layer, expert);
        if self.entries[index].position != ABSENT {
            self.remove(index);
        }
    }

    /// Totals since the start.
    pub fn counters(&self) -> CacheCounters {
        self.counters
    }

    /// For each layer, the most experts that it had resident after one of its batches.
    pub fn resident_max(&self) -> impl Iterator<Item = u32> + '_ {
        self.layers.iter().map(|layer| layer.resident_max)
    }

    /// Resident experts of a layer now.
    pub fn resident(&self, layer: LayerIndex) -> u32 {
        self.layers.get(layer.0 as usize).map_or(0, |layer| layer.resident)
    }

    /// Flat number of an expert: layers one after the other.
    pub(crate) fn entry(&self, layer: LayerIndex, expert: ExpertIndex) -> usize {
        let of = &self.layers[layer.0 as usize];
        assert!(expert.0 < of.shape.experts, "layer {} has no expert {}", layer.0, expert.0);
        of.first + expert.0 as usize
    }

    /// Experts of all layers.
    pub(crate) fn entries(&self) -> usize {
        self.entries.len()
    }

    fn insert(&mut self, index: usize) {
        let entry = &mut self.entries[index];
        if entry.position != ABSENT {
            return;
        }
        let layer = &mut self.layers[entry.layer as usize];
        let group = &mut self.groups[layer.shape.group];
        entry.position = group.resident.len() as u32;
        group.resident.push(index as u32);
        group.used += layer.shape.cost;
        layer.resident += 1;
    }

    fn remove(&mut self, index: usize) {
        let position = std::mem::replace(&mut self.entries[index].position, ABSENT) as usize;
        let layer = &mut self.layers[self.entries[index].layer as usize];
        let group = &mut self.groups[layer.shape.group];
        group.used -= layer.shape.cost;
        layer.resident -= 1;
        group.resident.swap_remove(position);
        if let Some(&moved) = group.resident.get(position) {
            self.entries[moved as usize].position = position as u32;
        }
        self.counters.evictions += 1;
    }

    /// A scan: it costs microseconds where the miss that it makes room for costs a disk read.
    fn least_worthy(&self, group: usize) -> Option<usize> {
        let key = |&index: &u32| {
            let entry = &self.entries[index as usize];
            (entry.batch == self.batch, self.policy.worth(&entry.usage), index)
        };
        let victim = self.groups[group].resident.iter().copied().min_by_key(key)? as usize;
        let is_touched = self.entries[victim].batch == self.batch;
        (!is_touched || !self.batch_may_exceed).then_some(victim)
    }

    fn count_towards_ageing(&mut self, layer: LayerIndex) {
        let layer = &mut self.layers[layer.0 as usize];
        layer.until_ageing -= 1;
        if layer.until_ageing == 0 {
            layer.until_ageing = ageing_period(layer.shape);
            let end = layer.first + layer.shape.experts as usize;
            self.entries[layer.first..end].iter_mut().for_each(|entry| entry.usage.age());
        }
    }
}

fn ageing_period(layer: LayerShape) -> u64 {
    (AGEING_LOOKUPS_PER_EXPERT * u64::from(layer.experts)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers of 16 experts in slots: `per_layer` each, or the same number together.
    fn cache(policy: PolicyKind, layers: u32, per_layer: u64) -> CacheState {
        let global = !policy.is_per_layer();
        let group = |layer: u32| if global { 0 } else { layer as usize };
        let shape = |layer| LayerShape { experts: 16, cost: 1, group: group(layer) };
        let groups = match global {
            true => vec![per_layer * u64::from(layers)],
            false => vec![per_layer; layers as usize],
        };
        let layers = (0..layers).map(shape).collect();
        CacheState::new(policy, &CacheShape { layers, groups, batch_may_exceed: false })
    }

    fn use_batch(cache: &mut CacheState, layer: u32, experts: &[u32]) -> (usize, Vec<u32>) {
        let experts: Vec<ExpertIndex> = experts.iter().copied().map(ExpertIndex).collect();
        let hits = experts.iter().filter(|&&e| cache.lookup(LayerIndex(layer), e)).count();
        let mut evicted = Vec::new();
        cache.retain(LayerIndex(layer), &experts, &mut evicted);
        (hits, evicted.into_iter().map(|(_, expert)| expert.0).collect())
    }

    #[test]
    fn a_global_list_smaller_than_a_token_never_hits_where_layers_of_their_own_do() {
        // 8 layers x 3 experts = 24 for a token; 16 slots, together or 2 for each layer.
        let mut rates = Vec::new();
        for policy in PolicyKind::ALL {
            let mut cache = cache(policy, 8, 2);
            for _token in 0..20 {
                for layer in 0..8 {
                    use_batch(&mut cache, layer, &[1, 5, 9]);
                }
            }
            rates.push(cache.counters().hit_rate());
        }
        // Two of three stay, from the second token on.
        assert_eq!(rates, [2.0 / 3.0 * 19.0 / 20.0, 2.0 / 3.0 * 19.0 / 20.0, 0.0]);
    }

    #[test]
    fn recency_evicts_the_oldest_and_spares_the_batch() {
        let mut cache = cache(PolicyKind::PerLayerLru, 1, 3);
        assert_eq!(use_batch(&mut cache, 0, &[0, 1, 2]), (0, vec![]));
        assert_eq!(use_batch(&mut cache, 0, &[0]), (1, vec![]));
        assert_eq!(use_batch(&mut cache, 0, &[7]), (0, vec![1]));
        assert_eq!(use_batch(&mut cache, 0, &[2, 8]), (1, vec![0]));
        // More than fit: the others go first, then the batch's own, oldest first.
        assert_eq!(use_batch(&mut cache, 0, &[3, 4, 5, 6]), (0, vec![7, 2, 8, 3]));
        assert_eq!(cache.resident(LayerIndex(0)), 3);
        assert_eq!(cache.resident_max().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn frequency_keeps_favourites_remembers_the_absent_and_forgives_in_time() {
        let mut cache = cache(PolicyKind::PerLayerLfu, 1, 2);
        for _ in 0..4 {
            use_batch(&mut cache, 0, &[3]);
        }
        use_batch(&mut cache, 0, &[4]);
        assert_eq!(use_batch(&mut cache, 0, &[5]), (0, vec![4]), "3 is the favourite");
        assert_eq!(use_batch(&mut cache, 0, &[4]), (0, vec![5]), "4 was used before");
        // A new favourite replaces the old one although it was used as often long ago.
        let mut turns = 0;
        while cache.is_resident(LayerIndex(0), ExpertIndex(3)) {
            use_batch(&mut cache, 0, &[6]);
            use_batch(&mut cache, 0, &[7]);
            turns += 1;
            assert!(turns < 40);
        }
    }

    #[test]
    fn no_capacity_keeps_nothing() {
        for policy in PolicyKind::ALL {
            let mut cache = cache(policy, 2, 0);
            assert_eq!(use_batch(&mut cache, 1, &[2, 3]), (0, vec![2, 3]));
            assert_eq!(use_batch(&mut cache, 1, &[2, 3]).0, 0);
            assert_eq!(cache.resident(LayerIndex(1)), 0);
        }
    }
}
