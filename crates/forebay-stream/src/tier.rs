//! A tier whose memory the caller owns, such as VRAM. This module tracks which expert is in which slot.
//!
//! The cache state machine of this crate decides which experts are kept. The caller copies misses into the slots that
//! it is given, and says when a slot may be overwritten. This includes the slots of evicted experts, whose bytes the
//! caller may first copy to another tier.

use std::cmp::Reverse;

use serde::Serialize;

use crate::blocks::{ExpertIndex, LayerIndex};
use crate::cache::{CacheCounters, CacheShape, CacheState, LayerUses};
use crate::plan::MemoryPlan;
use crate::policy::PolicyKind;

/// The slots of a tier and the experts in them. Slots are counted from 0 in every pool of the plan.
pub struct ExpertTier {
    plan: MemoryPlan,
    cache: CacheState,
    /// Slot of every expert, ordered by layer.
    places: Vec<Option<u32>>,
    /// Free slots of every pool.
    free: Vec<Vec<u32>>,
    /// Pools and slots of experts that were evicted when the batch began. These slots are not free yet.
    left: Vec<(u32, u32)>,
    pool_of_layer: Vec<u32>,
    evicted: Vec<(LayerIndex, ExpertIndex)>,
    /// Experts of the batch that are in the tier or will be copied there.
    admitted: Vec<ExpertIndex>,
    window: CacheCounters,
}

/// Part of a layer's batch that comes to a tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BatchPart<'a> {
    /// The whole batch. Its experts are evicted last.
    Whole,
    /// The first of two parts. All its misses get slots, none is kept, and nothing is evicted.
    First,
    /// The second of two parts, after one with these experts. The experts of both parts are kept or evicted in order of worth,
    /// like all others. Those of the first part must have slots.
    Last(&'a [ExpertIndex]),
}

/// A layer's batch, grouped by where its experts are. Lists are ascending, and reused from batch to batch.
#[derive(Clone, Debug, Default)]
pub struct TierBatch {
    pub hits: Vec<ExpertIndex>,
    /// Experts that the caller must copy into slots.
    pub misses: Vec<ExpertIndex>,
    /// Experts that are not in the tier and are not admitted.
    pub elsewhere: Vec<ExpertIndex>,
    /// Experts that are no longer kept. Those that the batch itself uses stay in their slots until they are released.
    pub gone: Vec<GoneExpert>,
}

/// An expert that a tier no longer keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GoneExpert {
    pub layer: LayerIndex,
    pub expert: ExpertIndex,
    /// Slot that holds the expert until [`ExpertTier::free_left`] or its release. `None` if it has not been copied yet.
    pub slot: Option<u32>,
}

impl TierBatch {
    fn clear(&mut self) {
        [&mut self.hits, &mut self.misses, &mut self.elsewhere].into_iter().for_each(Vec::clear);
        self.gone.clear();
    }
}

/// Statistics of the lookups in a tier.
#[derive(Clone, Debug, Serialize)]
pub struct TierStatistics {
    pub policy: PolicyKind,
    /// Number of slots for experts that are kept, and for experts in transit.
    pub kept_slots: u64,
    pub transient_slots: u64,
    pub slot_bytes: u64,
    /// Number of experts of the model.
    pub experts: u64,
    pub lookups: u64,
    pub hits: u64,
    pub misses: u64,
    pub hit_rate: f64,
    pub evictions: u64,
}

impl ExpertTier {
    /// Creates a tier with empty slots.
    pub fn new(plan: MemoryPlan) -> ExpertTier {
        let cache = CacheState::new(plan.policy, &CacheShape::from_plan(&plan));
        let mut pool_of_layer = vec![u32::MAX; plan.experts_per_layer.len()];
        for (index, pool) in plan.pools.iter().enumerate() {
            pool.layers.iter().for_each(|&layer| pool_of_layer[layer as usize] = index as u32);
        }
        // Slots are taken from the end of the list.
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

    /// Returns the plan of the tier.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Returns the pool whose slots hold the experts of a layer. For a layer without experts it returns no valid pool.
    ///
    /// # Panics
    /// Panics if the layer does not exist.
    pub fn pool(&self, layer: LayerIndex) -> usize {
        self.pool_of_layer[layer.0 as usize] as usize
    }

    /// Returns the slot of an expert, if it has one.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn slot(&self, layer: LayerIndex, expert: ExpertIndex) -> Option<u32> {
        self.places[self.cache.entry(layer, expert)]
    }

    /// Begins a batch of distinct experts of a layer: counts the lookups and decides which experts are kept. Hits and
    /// admitted misses keep their slots until they are released. `admits` gets the number of misses and returns how
    /// many of them to admit; those used most are admitted. The others go to `elsewhere` and never enter the tier.
    /// Evicted experts keep their bytes until [`ExpertTier::free_left`].
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn begin(
        &mut self,
        layer: LayerIndex,
        experts: &[ExpertIndex],
        part: BatchPart<'_>,
        admits: impl FnOnce(usize) -> usize,
        batch: &mut TierBatch,
    ) {
        batch.clear();
        let earlier = if let BatchPart::Last(earlier) = part { earlier } else { &[] };
        for &expert in experts {
            // Experts of both parts are looked up once.
            let hit = match earlier.contains(&expert) {
                true => self.cache.is_resident(layer, expert),
                false => self.cache.lookup(layer, expert),
            };
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
        if part == BatchPart::First {
            // What is kept is decided with the last part.
            return;
        }
        self.admitted.extend(earlier.iter().filter(|expert| !experts.contains(expert)));
        let spares_batch = part == BatchPart::Whole;
        let mut evicted = std::mem::take(&mut self.evicted);
        self.cache.retain_by(layer, &self.admitted, spares_batch, &mut evicted);
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

    /// Takes a slot for a miss. Returns `None` if all slots are in use; the caller must then release an expert first.
    ///
    /// # Panics
    /// Panics if there is no such expert, or it already has a slot.
    pub fn take(&mut self, layer: LayerIndex, expert: ExpertIndex) -> Option<u32> {
        let entry = self.cache.entry(layer, expert);
        assert!(self.places[entry].is_none(), "an expert is brought once");
        let slot = self.free[self.pool_of_layer[layer.0 as usize] as usize].pop()?;
        self.places[entry] = Some(slot);
        Some(slot)
    }

    /// Frees the slots of experts that were evicted when batches began. The caller must no longer need their bytes.
    pub fn free_left(&mut self) {
        self.left.drain(..).for_each(|(pool, slot)| self.free[pool as usize].push(slot));
    }

    /// Frees the slots of evicted experts as [`ExpertTier::free_left`] does, except those for which `is_needed` returns
    /// true. It gets their pools and slots.
    pub fn free_left_unless(&mut self, mut is_needed: impl FnMut(usize, u32) -> bool) {
        let free = self.left.extract_if(.., |&mut (pool, slot)| !is_needed(pool as usize, slot));
        free.for_each(|(pool, slot)| self.free[pool as usize].push(slot));
    }

    /// Returns the number of slots that can be taken for experts of a layer.
    pub fn free_slots(&self, layer: LayerIndex) -> usize {
        self.free[self.pool(layer)].len()
    }

    /// Returns true if an expert keeps its slot when its batch is over.
    pub fn stays(&self, layer: LayerIndex, expert: ExpertIndex) -> bool {
        self.cache.is_resident(layer, expert)
    }

    /// Releases an expert of the batch after it was computed with. Its slot becomes free unless the expert is kept.
    pub fn release(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        if !self.stays(layer, expert) {
            self.vacate(layer, expert);
        }
    }

    /// Removes an admitted expert that could not be copied. Its slot, if it had one, becomes free.
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

    /// Restarts the counters.
    pub fn reset_statistics(&mut self) {
        self.window = self.cache.counters();
    }

    /// Returns the uses of all experts in this tier since the start, by layer.
    pub fn expert_uses(&self) -> Vec<LayerUses> {
        self.cache.uses()
    }

    /// Returns the counters since the start or the last reset.
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
        // 4 layers, of which the second is dense, and two slot sizes.
        let layers = [(12, 1024), (0, 0), (12, 4096), (12, 1024)];
        ExpertTier::new(Budget::plan_experts(&layers, 3, bytes, policy).unwrap())
    }

    /// Runs batches as a backend does. Its memory records which expert was copied into each slot.
    struct Device {
        tier: ExpertTier,
        /// Most misses of a batch that are admitted.
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
            self.tier.begin(
                of,
                &experts,
                BatchPart::Whole,
                |misses| misses.min(self.admits),
                &mut batch,
            );
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

        /// For every policy and budget, every slot holds what the tier reports. If all misses are admitted, the
        /// counters equal those of a replay.
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

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

        /// Batches in two parts: every slot holds what the tier reports, no slot of a part is taken before both parts are
        /// released, and each expert counts as one lookup.
        #[test]
        fn parts_of_a_batch_keep_their_slots(
            kib in 60_u64..100,
            batches in prop::collection::vec(
                (
                    prop::sample::select(vec![0_u32, 2, 3]),
                    prop::collection::btree_set(0_u32..12, 1..4),
                    prop::collection::btree_set(0_u32..12, 1..4),
                ),
                1..60,
            ),
        ) {
            let layers = [(12, 1024), (0, 0), (12, 4096), (12, 1024)];
            let plan = Budget::plan_experts(&layers, 7, kib << 10, PolicyKind::LAYER_LFU).unwrap();
            let lacks = |layer| plan.slots_lacking_for_parts(LayerIndex(layer), 3, 0);
            prop_assume!([0, 2, 3].into_iter().all(|layer| lacks(layer) == 0));
            let mut device = Device::new(ExpertTier::new(plan), usize::MAX);
            let (mut batch, mut lookups) = (TierBatch::default(), 0);
            for (layer, first, last) in batches {
                let (of, pool) = (LayerIndex(layer), device.tier.pool(LayerIndex(layer)));
                let [first, last] = [first, last].map(|of| of.into_iter().map(ExpertIndex).collect::<Vec<_>>());
                lookups += first.iter().chain(last.iter().filter(|e| !first.contains(e))).count() as u64;
                for (part, experts) in [(BatchPart::First, &first), (BatchPart::Last(&first), &last)] {
                    device.tier.begin(of, experts, part, |misses| misses, &mut batch);
                    prop_assert!(part != BatchPart::First || batch.gone.is_empty());
                    device.tier.free_left();
                    for &expert in &batch.misses {
                        if device.tier.slot(of, expert).is_none() {
                            let slot = device.tier.take(of, expert).expect("parts have slots");
                            device.memory[pool][slot as usize] = Some((layer, expert.0));
                        }
                    }
                }
                for &expert in first.iter().chain(&last) {
                    let slot = device.tier.slot(of, expert).expect("both parts are here") as usize;
                    prop_assert_eq!(device.memory[pool][slot], Some((layer, expert.0)));
                }
                first.into_iter().chain(last).for_each(|expert| device.tier.release(of, expert));
            }
            prop_assert_eq!(device.tier.statistics().lookups, lookups);
        }
    }

    #[test]
    fn what_never_came_is_not_here() {
        let mut tier = tier(40 << 10, PolicyKind::LAYER_LRU);
        let (layer, expert) = (LayerIndex(0), ExpertIndex(5));
        let mut batch = TierBatch::default();
        tier.begin(layer, &[expert], BatchPart::Whole, |misses| misses, &mut batch);
        let free = tier.free_slots(layer);
        tier.take(layer, expert).unwrap();
        tier.forget(layer, expert);
        assert_eq!((tier.free_slots(layer), tier.slot(layer, expert)), (free, None));
        tier.begin(layer, &[expert], BatchPart::Whole, |misses| misses, &mut batch);
        assert_eq!((batch.hits.len(), batch.misses.len()), (0, 1));
    }
}
