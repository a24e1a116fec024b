//! A tier whose memory this crate does not see, as a GPU's is: which expert lies in which of its slots.
//!
//! The same state machine as everywhere decides which experts stay. The caller owns the memory, brings the misses into the
//! slots that it is given, and says when a slot may be overwritten: also those of experts that have to go, whose bytes it
//! may want to keep elsewhere.

use std::cmp::Reverse;

use serde::Serialize;

use crate::blocks::{ExpertIndex, LayerIndex};
use crate::cache::{CacheCounters, CacheShape, CacheState};
use crate::plan::MemoryPlan;
use crate::policy::PolicyKind;

/// Slots of a tier, counted from 0 in every pool of its plan, and the experts in them.
pub struct ExpertTier {
    plan: MemoryPlan,
    cache: CacheState,
    /// Of every expert, layers one after the other.
    places: Vec<Option<u32>>,
    /// Of every pool.
    free: Vec<Vec<u32>>,
    /// Slots, and their pools, of experts that went when the batch began; not free yet.
    left: Vec<(u32, u32)>,
    pool_of_layer: Vec<u32>,
    evicted: Vec<(LayerIndex, ExpertIndex)>,
    /// Of a batch, what comes here or is here.
    admitted: Vec<ExpertIndex>,
    window: CacheCounters,
}

/// A layer's batch, by where its experts are. Lists are ascending, and reused.
#[derive(Clone, Debug, Default)]
pub struct TierBatch {
    pub hits: Vec<ExpertIndex>,
    /// To be brought.
    pub misses: Vec<ExpertIndex>,
    /// Not here, and not to come.
    pub elsewhere: Vec<ExpertIndex>,
    /// What does not stay any more: not here, but for what the batch itself looks up.
    pub gone: Vec<GoneExpert>,
}

/// An expert that does not stay in a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GoneExpert {
    pub layer: LayerIndex,
    pub expert: ExpertIndex,
    /// The slot that still holds it, until [`ExpertTier::free_left`] or its release. `None`: it was to come only now.
    pub slot: Option<u32>,
}

impl TierBatch {
    fn clear(&mut self) {
        [&mut self.hits, &mut self.misses, &mut self.elsewhere].into_iter().for_each(Vec::clear);
        self.gone.clear();
    }
}

/// What was looked up in a tier, for statistics.
#[derive(Clone, Debug, Serialize)]
pub struct TierStatistics {
    pub policy: PolicyKind,
    /// Slots for experts that stay, and for experts on their way.
    pub kept_slots: u64,
    pub transient_slots: u64,
    pub slot_bytes: u64,
    /// Experts of the model.
    pub experts: u64,
    pub lookups: u64,
    pub hits: u64,
    pub misses: u64,
    pub hit_rate: f64,
    pub evictions: u64,
}

impl ExpertTier {
    /// All slots empty.
    pub fn new(plan: MemoryPlan) -> ExpertTier {
        let cache = CacheState::new(plan.policy, &CacheShape::from_plan(&plan));
        let mut pool_of_layer = vec![u32::MAX; plan.experts_per_layer.len()];
        for (index, pool) in plan.pools.iter().enumerate() {
            pool.layers.iter().for_each(|&layer| pool_of_layer[layer as usize] = index as u32);
        }
        // The last one is taken first.
        let free = plan.pools.iter().map(|pool| (0..pool.slots()).rev().collect()).collect();
        let most = plan.experts_per_layer.iter().copied().max().unwrap_or(0);
        ExpertTier {
            places: vec![None; cache.entries()],
            evicted: Vec::with_capacity(2 * most as usize),
            admitted: Vec::with_capacity(most as usize),
            cache,
            free,
            left: Vec::with_capacity(2 * most as usize),
            pool_of_layer,
            plan,
            window: CacheCounters::default(),
        }
    }

    /// The plan that it works by.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The pool whose slots hold the experts of a layer.
    ///
    /// # Panics
    /// For a layer without experts.
    pub fn pool(&self, layer: LayerIndex) -> usize {
        self.pool_of_layer[layer.0 as usize] as usize
    }

    /// The slot that an expert lies in.
    ///
    /// # Panics
    /// If there is no such expert.
    pub fn slot(&self, layer: LayerIndex, expert: ExpertIndex) -> Option<u32> {
        self.places[self.cache.entry(layer, expert)]
    }

    /// Begins the batch of a layer with distinct experts: counts the lookups and decides which experts stay. What the batch looks up is
    /// here, once it was brought, until it is released. Of the misses, as many as `admits` says of their number come here,
    /// those that were used most; the others are computed elsewhere and never here. What goes leaves its bytes where they are
    /// until [`ExpertTier::free_left`].
    ///
    /// # Panics
    /// If there is no such expert.
    pub fn begin(
        &mut self,
        layer: LayerIndex,
        experts: &[ExpertIndex],
        admits: impl FnOnce(usize) -> usize,
        batch: &mut TierBatch,
    ) {
        batch.clear();
        for &expert in experts {
            let hit = self.cache.lookup(layer, expert);
            if hit { &mut batch.hits } else { &mut batch.misses }.push(expert);
        }
        let admitted = admits(batch.misses.len());
        if admitted < batch.misses.len() {
            let cache = &self.cache;
            let rank = |expert: &ExpertIndex| (Reverse(cache.frequency(layer, *expert)), *expert);
            batch.misses.sort_unstable_by_key(rank);
            batch.elsewhere.extend(batch.misses.drain(admitted..));
            batch.misses.sort_unstable();
            batch.elsewhere.sort_unstable();
        }
        self.admitted.clear();
        let comes = |expert: &&ExpertIndex| !batch.elsewhere.contains(expert);
        self.admitted.extend(experts.iter().filter(comes));
        let mut evicted = std::mem::take(&mut self.evicted);
        self.cache.retain(layer, &self.admitted, &mut evicted);
        for (of, expert) in evicted.drain(..) {
            let entry = self.cache.entry(of, expert);
            let slot = self.places[entry];
            batch.gone.push(GoneExpert { layer: of, expert, slot });
            if of != layer || !self.admitted.contains(&expert) {
                self.places[entry] = None;
                self.left.extend(slot.map(|slot| (self.pool_of_layer[of.0 as usize], slot)));
            }
        }
        self.evicted = evicted;
    }

    /// Takes a slot for a miss; `None`: all are in use, and something has to be released first.
    ///
    /// # Panics
    /// If there is no such expert, or it has a slot.
    pub fn take(&mut self, layer: LayerIndex, expert: ExpertIndex) -> Option<u32> {
        let entry = self.cache.entry(layer, expert);
        assert!(self.places[entry].is_none(), "an expert is brought once");
        let slot = self.free[self.pool_of_layer[layer.0 as usize] as usize].pop()?;
        self.places[entry] = Some(slot);
        Some(slot)
    }

    /// Nobody needs the bytes of experts that went when batches began: their slots can be taken.
    pub fn free_left(&mut self) {
        self.left.drain(..).for_each(|(pool, slot)| self.free[pool as usize].push(slot));
    }

    /// Slots that can be taken for experts of a layer.
    pub fn free_slots(&self, layer: LayerIndex) -> usize {
        self.free[self.pool(layer)].len()
    }

    /// Whether an expert keeps its slot when its batch is over.
    pub fn stays(&self, layer: LayerIndex, expert: ExpertIndex) -> bool {
        self.cache.is_resident(layer, expert)
    }

    /// An expert of the batch was computed with: its slot is free again, unless it stays.
    pub fn release(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        if !self.stays(layer, expert) {
            self.vacate(layer, expert);
        }
    }

    /// An expert that was to come has not: it is not here, and its slot, if it had one, is free.
    pub fn forget(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        self.cache.forget(layer, expert);
        self.vacate(layer, expert);
    }

    fn vacate(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        let entry = self.cache.entry(layer, expert);
        if let Some(slot) = self.places[entry].take() {
            self.free[self.pool_of_layer[layer.0 as usize] as usize].push(slot);
        }
    }

    /// Starts counting anew.
    pub fn reset_statistics(&mut self) {
        self.window = self.cache.counters();
    }

    /// Counters since the start or the last reset.
    pub fn statistics(&self) -> TierStatistics {
        let mut counters = CacheCounters::default();
        counters.add_between(&self.window, &self.cache.counters());
        let pools = &self.plan.pools;
        TierStatistics {
            policy: self.plan.policy,
            kept_slots: self.plan.kept_slots(),
            transient_slots: pools.iter().map(|pool| u64::from(pool.transient_slots)).sum(),
            slot_bytes: pools.iter().map(|pool| pool.bytes()).sum(),
            experts: self.plan.experts(),
            lookups: counters.lookups,
            hits: counters.hits,
            misses: counters.misses(),
            hit_rate: counters.hit_rate(),
            evictions: counters.evictions,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::Budget;

    fn tier(bytes: u64, policy: PolicyKind) -> ExpertTier {
        // 4 layers, the second dense, two sizes of slots.
        let layers = [(12, 1024), (0, 0), (12, 4096), (12, 1024)];
        ExpertTier::new(Budget::plan_experts(&layers, 3, bytes, policy).unwrap())
    }

    /// Runs batches as a backend does, with a memory whose slots say what was brought there.
    struct Device {
        tier: ExpertTier,
        /// Misses of a batch that come.
        admits: usize,
        memory: Vec<Vec<Option<(u32, u32)>>>,
    }

    impl Device {
        fn new(tier: ExpertTier, admits: usize) -> Device {
            let pools = &tier.plan().pools;
            let memory = pools.iter().map(|pool| vec![None; pool.slots() as usize]).collect();
            Device { tier, admits, memory }
        }

        fn batch(&mut self, layer: u32, experts: &[u32]) -> (usize, usize) {
            let (of, pool) = (LayerIndex(layer), self.tier.pool(LayerIndex(layer)));
            let experts: Vec<ExpertIndex> = experts.iter().map(|&e| ExpertIndex(e)).collect();
            let mut batch = TierBatch::default();
            self.tier.begin(of, &experts, |misses| misses.min(self.admits), &mut batch);
            let TierBatch { hits, misses, elsewhere, gone } = batch;
            for gone in gone {
                let Some(slot) = gone.slot else { continue };
                let there = self.memory[self.tier.pool(gone.layer)][slot as usize];
                assert_eq!(there, Some((gone.layer.0, gone.expert.0)), "what goes is still there");
            }
            self.tier.free_left();
            let counts = (hits.len(), misses.len() + elsewhere.len());
            assert!(elsewhere.iter().all(|&expert| self.tier.slot(of, expert).is_none()));
            let mut held: Vec<ExpertIndex> = Vec::new();
            let mut computed = elsewhere;
            let holds = |device: &Device, expert: ExpertIndex| {
                let slot = device.tier.slot(of, expert).expect("a hit is here") as usize;
                assert_eq!(device.memory[pool][slot], Some((layer, expert.0)));
            };
            for expert in hits {
                holds(self, expert);
                computed.push(expert);
                self.tier.release(of, expert);
            }
            for expert in misses {
                let slot = loop {
                    match self.tier.take(of, expert) {
                        Some(slot) => break slot,
                        None => {
                            assert!(!held.is_empty(), "transient slots are enough for one");
                            let expert = held.remove(0);
                            holds(self, expert);
                            self.tier.release(of, expert);
                        }
                    }
                };
                self.memory[pool][slot as usize] = Some((layer, expert.0));
                computed.push(expert);
                held.push(expert);
            }
            for expert in held {
                holds(self, expert);
                self.tier.release(of, expert);
            }
            let mut of_batch = experts.clone();
            of_batch.sort_unstable();
            computed.sort_unstable();
            assert_eq!(computed, of_batch);
            counts
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

        /// Every slot holds what the tier says, for every policy and budget; and the counters are those of a replay.
        #[test]
        fn slots_hold_what_was_brought(
            kib in 13_u64..80,
            policy in prop::sample::select(PolicyKind::ALL.to_vec()),
            admits in prop::sample::select(vec![0, 1, 2, usize::MAX]),
            batches in prop::collection::vec(
                (prop::sample::select(vec![0_u32, 2, 3]), prop::collection::btree_set(0_u32..12, 1..9)),
                1..60,
            ),
        ) {
            let mut device = Device::new(tier(kib << 10, policy), admits);
            let plan = device.tier.plan().clone();
            let mut cache = CacheState::new(policy, &CacheShape::from_plan(&plan));
            let (mut hits, mut misses) = (0, 0);
            for (layer, experts) in &batches {
                let experts: Vec<u32> = experts.iter().copied().collect();
                let counts = device.batch(*layer, &experts);
                hits += counts.0;
                misses += counts.1;
                let indices: Vec<ExpertIndex> = experts.iter().map(|&e| ExpertIndex(e)).collect();
                let found = indices.iter().filter(|&&e| cache.lookup(LayerIndex(*layer), e)).count();
                if admits == usize::MAX {
                    prop_assert_eq!(found, counts.0);
                }
                cache.retain(LayerIndex(*layer), &indices, &mut Vec::new());
            }
            let statistics = device.tier.statistics();
            prop_assert_eq!((statistics.hits, statistics.misses), (hits as u64, misses as u64));
            if admits == usize::MAX {
                prop_assert_eq!(statistics.evictions, cache.counters().evictions);
            }
        }
    }

    #[test]
    fn what_never_came_is_not_here() {
        let mut tier = tier(40 << 10, PolicyKind::LAYER_LRU);
        let (layer, expert) = (LayerIndex(0), ExpertIndex(5));
        let mut batch = TierBatch::default();
        tier.begin(layer, &[expert], |misses| misses, &mut batch);
        let free = tier.free_slots(layer);
        tier.take(layer, expert).unwrap();
        tier.forget(layer, expert);
        assert_eq!((tier.free_slots(layer), tier.slot(layer, expert)), (free, None));
        tier.begin(layer, &[expert], |misses| misses, &mut batch);
        assert_eq!((batch.hits.len(), batch.misses.len()), (0, 1));
    }
}
