//! The cache state machine: which experts are resident, and how this changes when a layer's batch looks experts up. It
//! is pure and deterministic, without a clock or I/O. The engine and the replay of traces both run this code, so the
//! replay of a recorded run reproduces the engine's counters.
//!
//! Accounting: each distinct expert of a layer batch counts as one lookup. Eviction happens after the batch, and takes
//! an expert of the batch only if no other expert is left.

mod lists;
mod shape;
mod uses;

use serde::Serialize;

use crate::blocks::{ExpertIndex, LayerIndex};
use crate::policy::{AGEING_LOOKUPS_PER_EXPERT, Moment, PolicyKind, Ranking, Rule, Usage, mix};

use lists::Lists;
pub use shape::{CacheShape, LayerShape};
pub use uses::LayerUses;

/// Counts of lookups and evictions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct CacheCounters {
    /// Lookups: one for each distinct expert of a layer batch.
    pub lookups: u64,
    /// Lookups that found their expert resident.
    pub hits: u64,
    /// Resident experts that were evicted, and experts that were read but not retained.
    pub evictions: u64,
}

impl CacheCounters {
    /// Returns the number of lookups that did not find their expert.
    pub fn misses(&self) -> u64 {
        self.lookups - self.hits
    }

    /// Adds the counts between two samples.
    pub(crate) fn add_between(&mut self, from: &CacheCounters, to: &CacheCounters) {
        self.lookups += to.lookups - from.lookups;
        self.hits += to.hits - from.hits;
        self.evictions += to.evictions - from.evictions;
    }

    /// Returns hits per lookup, or 0 before the first lookup.
    pub fn hit_rate(&self) -> f64 {
        if self.lookups == 0 { 0.0 } else { self.hits as f64 / self.lookups as f64 }
    }
}

/// The resident experts of all layers, and the usage statistics of all experts.
#[derive(Clone, Debug)]
pub struct CacheState {
    ranking: Ranking,
    layers: Vec<Layer>,
    groups: Vec<Group>,
    entries: Vec<Entry>,
    /// For rankings that use lists: two lists for each group, one of entries used once and one of protected entries.
    lists: Lists,
    batch_may_exceed: bool,
    clock: u64,
    batch: u64,
    /// Number of passes over the layers, the layer looked up last, and true if its batch is complete.
    pass: u32,
    last_layer: u32,
    batch_is_over: bool,
    drawn: u64,
    counters: CacheCounters,
}

#[derive(Clone, Debug)]
struct Layer {
    shape: LayerShape,
    first: usize,
    /// Number of lookups until the counts are halved.
    until_ageing: u64,
    resident: u32,
    resident_max: u32,
}

#[derive(Clone, Debug)]
struct Group {
    capacity: u64,
    used: u64,
    /// Part of `used` that is protected (segmented LRU).
    protected: u64,
    /// Resident entries in arbitrary order; empty if the ranking uses lists.
    resident: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    usage: Usage,
    layer: u32,
    /// Index in the group's `resident`, or the segment whose list holds the entry; `ABSENT` if it is not resident.
    position: u32,
    /// Number of the last batch that touched the entry.
    batch: u64,
    /// Counts since the start.
    counts: CacheCounters,
}

const ABSENT: u32 = u32::MAX;

/// Segments of a group, stored as an entry's position.
const PROBATION: u32 = 0;
const PROTECTED: u32 = 1;

/// Share of a group's capacity that segmented LRU protects, as a fraction.
const PROTECTED_SHARE: (u64, u64) = (4, 5);

impl CacheState {
    /// Creates an empty cache.
    ///
    /// # Panics
    /// Panics if a layer with experts names a group that does not exist, or if there are 2^32 experts.
    pub fn new(policy: PolicyKind, shape: &CacheShape) -> CacheState {
        CacheState::with_ranking(Ranking::Online(policy.rule), shape)
    }

    /// Creates an empty cache with the given ranking. For the policies that the engine runs, use [`CacheState::new`].
    ///
    /// # Panics
    /// Panics as [`CacheState::new`] does.
    pub fn with_ranking(ranking: Ranking, shape: &CacheShape) -> CacheState {
        let mut entries = Vec::new();
        let mut layers = Vec::with_capacity(shape.layers.len());
        let mut members = vec![0; shape.groups.len()];
        for (index, &layer) in shape.layers.iter().enumerate() {
            let experts = layer.experts as usize;
            assert!(experts == 0 || layer.group < shape.groups.len(), "layer without a group");
            if experts > 0 {
                members[layer.group] += experts;
            }
            let entry = Entry {
                usage: Usage::default(),
                layer: index as u32,
                position: ABSENT,
                batch: 0,
                counts: CacheCounters::default(),
            };
            let first = entries.len();
            entries.resize(first + experts, entry);
            let until_ageing = ageing_period(layer);
            layers.push(Layer { shape: layer, first, until_ageing, resident: 0, resident_max: 0 });
        }
        let lists = if ranking.is_list() { 2 * shape.groups.len() } else { 0 };
        assert!(entries.len() + lists < ABSENT as usize, "too many experts");
        // Reserve room for every member, so that nothing is allocated later.
        let room = |members: usize| if lists > 0 { 0 } else { members };
        let groups = shape.groups.iter().zip(members).map(|(&capacity, members)| Group {
            capacity,
            used: 0,
            protected: 0,
            resident: Vec::with_capacity(room(members)),
        });
        let mut cache = CacheState {
            ranking,
            layers,
            groups: groups.collect(),
            lists: Lists::new(if lists > 0 { entries.len() } else { 0 }, lists),
            entries,
            batch_may_exceed: shape.batch_may_exceed,
            clock: 0,
            batch: 1,
            pass: 0,
            last_layer: 0,
            batch_is_over: true,
            drawn: 0,
            counters: CacheCounters::default(),
        };
        for (layer, of) in shape.layers.iter().enumerate().filter(|(i, _)| shape.preloaded[*i]) {
            let experts = (0..of.experts).map(ExpertIndex);
            experts.for_each(|expert| cache.preload(LayerIndex(layer as u32), expert));
        }
        cache
    }

    /// Returns the number of experts of a layer; 0 for a dense or unknown layer.
    pub fn experts(&self, layer: LayerIndex) -> u32 {
        self.layers.get(layer.0 as usize).map_or(0, |layer| layer.shape.experts)
    }

    /// Returns true if an expert is resident. Does not count as a lookup.
    pub fn is_resident(&self, layer: LayerIndex, expert: ExpertIndex) -> bool {
        self.entries[self.entry(layer, expert)].position != ABSENT
    }

    /// Returns the aged use count of an expert, by which frequency rules rank.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn frequency(&self, layer: LayerIndex, expert: ExpertIndex) -> u32 {
        self.entries[self.entry(layer, expert)].usage.frequency
    }

    /// Looks an expert up and records its use. Returns true if the expert is resident. Within a batch, later lookups
    /// count as more recent.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn lookup(&mut self, layer: LayerIndex, expert: ExpertIndex) -> bool {
        let index = self.entry(layer, expert);
        self.record_use(layer, index);
        let entry = &mut self.entries[index];
        let hit = entry.position != ABSENT;
        for counters in [&mut self.counters, &mut entry.counts] {
            counters.lookups += 1;
            counters.hits += u64::from(hit);
        }
        hit
    }

    /// Records a use of an expert that another tier served. No lookup is counted.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn note_use(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        self.record_use(layer, self.entry(layer, expert));
    }

    fn record_use(&mut self, layer: LayerIndex, index: usize) {
        if self.batch_is_over {
            self.batch_is_over = false;
            self.pass += u32::from(layer.0 <= self.last_layer);
            self.last_layer = layer.0;
        }
        self.clock += 1;
        if self.ranking != Ranking::Fixed {
            self.entries[index].usage.record(self.clock, self.pass);
        }
        if self.ranking.ages() {
            self.count_towards_ageing(layer);
        }
    }

    /// Looks an expert up like [`CacheState::lookup`]. `next_use` is the number of the batch that uses the expert next.
    pub fn lookup_knowing(
        &mut self,
        layer: LayerIndex,
        expert: ExpertIndex,
        next_use: u64,
    ) -> bool {
        let index = self.entry(layer, expert);
        self.entries[index].usage.next_use = next_use;
        self.lookup(layer, expert)
    }

    /// Ends a layer's batch. The experts that it touched become resident, then experts are evicted until the group fits
    /// its capacity: first other experts in order of worth, then those of the batch. Appends every expert that is no
    /// longer resident to `evicted`, whether it belongs to the batch or not.
    pub fn retain(
        &mut self,
        layer: LayerIndex,
        touched: &[ExpertIndex],
        evicted: &mut Vec<(LayerIndex, ExpertIndex)>,
    ) {
        self.retain_by(layer, touched, true, evicted);
    }

    /// Ends a layer's batch as [`CacheState::retain`] does. If `spares_batch` is false, experts of the batch are evicted in
    /// order of worth like all others.
    pub fn retain_by(
        &mut self,
        layer: LayerIndex,
        touched: &[ExpertIndex],
        spares_batch: bool,
        evicted: &mut Vec<(LayerIndex, ExpertIndex)>,
    ) {
        self.batch += 1;
        self.batch_is_over = true;
        for &expert in touched {
            let index = self.entry(layer, expert);
            if spares_batch {
                self.entries[index].batch = self.batch;
            }
            self.insert(index);
        }
        let Some(shape) = self.layers.get(layer.0 as usize).map(|layer| layer.shape) else {
            return;
        };
        if shape.experts == 0 {
            return;
        }
        self.unprotect(shape.group);
        self.cut(shape.group, layer, evicted);
        let layer = &mut self.layers[layer.0 as usize];
        layer.resident_max = layer.resident_max.max(layer.resident);
    }

    /// Admits an expert without a lookup. The expert becomes resident, then the group is cut to its capacity. Experts
    /// of the last batch are not evicted, but the new expert itself may be. Appends every expert that is no longer
    /// resident to `evicted`.
    ///
    /// # Panics
    /// Panics if there is no such expert.
    pub fn admit(
        &mut self,
        layer: LayerIndex,
        expert: ExpertIndex,
        evicted: &mut Vec<(LayerIndex, ExpertIndex)>,
    ) {
        let index = self.entry(layer, expert);
        if self.entries[index].position != ABSENT {
            return;
        }
        self.insert(index);
        let group = self.layers[layer.0 as usize].shape.group;
        self.cut(group, layer, evicted);
        if self.groups[group].used > self.groups[group].capacity {
            self.evict(index);
            evicted.push((layer, expert));
        }
        let layer = &mut self.layers[layer.0 as usize];
        layer.resident_max = layer.resident_max.max(layer.resident);
    }

    /// Removes a resident expert that another tier holds from now on. This does not count as an eviction.
    pub fn give_away(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        let index = self.entry(layer, expert);
        if self.entries[index].position != ABSENT {
            self.remove(index);
        }
    }

    /// Makes an expert resident that was loaded before any lookup. The caller must respect the capacity.
    pub(crate) fn preload(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        let index = self.entry(layer, expert);
        if self.entries[index].position == ABSENT {
            self.enter(index);
            if self.ranking.is_list() {
                // Never used yet, so it is older than every used entry.
                let list = self.list_of(index);
                self.lists.push_oldest(list, index as u32);
            }
        }
        let layer = &mut self.layers[layer.0 as usize];
        layer.resident_max = layer.resident_max.max(layer.resident);
    }

    /// Marks an expert as a member of a fixed list ([`Ranking::Fixed`]).
    pub fn fix(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        let index = self.entry(layer, expert);
        self.entries[index].usage.frequency = 1;
    }

    /// Removes an expert that could not be loaded, or whose bytes were lost.
    pub(crate) fn forget(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        let index = self.entry(layer, expert);
        if self.entries[index].position != ABSENT {
            self.evict(index);
        }
    }

    /// Returns the counts since the start.
    pub fn counters(&self) -> CacheCounters {
        self.counters
    }

    /// Returns, for each layer, the largest number of experts that were resident after one of its batches.
    pub fn resident_max(&self) -> impl Iterator<Item = u32> + '_ {
        self.layers.iter().map(|layer| layer.resident_max)
    }

    /// Returns the number of experts of a layer that are resident now.
    pub fn resident(&self, layer: LayerIndex) -> u32 {
        self.layers.get(layer.0 as usize).map_or(0, |layer| layer.resident)
    }

    /// Returns the flat number of an expert, counted through all layers.
    pub(crate) fn entry(&self, layer: LayerIndex, expert: ExpertIndex) -> usize {
        let of = &self.layers[layer.0 as usize];
        assert!(expert.0 < of.shape.experts, "layer {} has no expert {}", layer.0, expert.0);
        of.first + expert.0 as usize
    }

    /// Returns the number of experts of all layers.
    pub(crate) fn entries(&self) -> usize {
        self.entries.len()
    }

    /// Makes an entry resident and the youngest of its list.
    fn insert(&mut self, index: usize) {
        let position = self.entries[index].position;
        if !self.ranking.is_list() {
            if position == ABSENT {
                self.enter(index);
            }
            return;
        }
        if position == ABSENT {
            self.enter(index);
        } else {
            self.lists.remove(index as u32);
            if position == PROBATION && self.ranking == Ranking::Online(Rule::Slru) {
                self.entries[index].position = PROTECTED;
                let shape = self.layers[self.entries[index].layer as usize].shape;
                self.groups[shape.group].protected += shape.cost;
            }
        }
        let list = self.list_of(index);
        self.lists.push(list, index as u32);
    }

    /// Counts an entry as resident.
    fn enter(&mut self, index: usize) {
        let entry = &mut self.entries[index];
        let layer = &mut self.layers[entry.layer as usize];
        let group = &mut self.groups[layer.shape.group];
        entry.position = match self.ranking.is_list() {
            true => PROBATION,
            false => {
                group.resident.push(index as u32);
                group.resident.len() as u32 - 1
            }
        };
        group.used += layer.shape.cost;
        layer.resident += 1;
    }

    /// Returns the list of a resident entry.
    fn list_of(&self, index: usize) -> usize {
        let entry = &self.entries[index];
        2 * self.layers[entry.layer as usize].shape.group + entry.position as usize
    }

    /// Evicts the least worthy entries until a group fits its capacity, for a batch of `layer`.
    fn cut(
        &mut self,
        group: usize,
        layer: LayerIndex,
        evicted: &mut Vec<(LayerIndex, ExpertIndex)>,
    ) {
        while self.groups[group].used > self.groups[group].capacity {
            let Some(victim) = self.least_worthy(group, layer) else { break };
            self.evict(victim);
            let owner = self.entries[victim].layer;
            let first = self.layers[owner as usize].first;
            evicted.push((LayerIndex(owner), ExpertIndex((victim - first) as u32)));
        }
    }

    fn evict(&mut self, index: usize) {
        self.remove(index);
        self.counters.evictions += 1;
        self.entries[index].counts.evictions += 1;
    }

    fn remove(&mut self, index: usize) {
        let position = std::mem::replace(&mut self.entries[index].position, ABSENT);
        let layer = &mut self.layers[self.entries[index].layer as usize];
        let group = &mut self.groups[layer.shape.group];
        group.used -= layer.shape.cost;
        layer.resident -= 1;
        if self.ranking.is_list() {
            self.lists.remove(index as u32);
            if position == PROTECTED {
                group.protected -= layer.shape.cost;
            }
            return;
        }
        group.resident.swap_remove(position as usize);
        if let Some(&moved) = group.resident.get(position as usize) {
            self.entries[moved as usize].position = position;
        }
    }

    /// Moves protected entries beyond the protected share back to probation, least recently used first.
    fn unprotect(&mut self, group: usize) {
        let share = self.groups[group].capacity / PROTECTED_SHARE.1 * PROTECTED_SHARE.0
            + self.groups[group].capacity % PROTECTED_SHARE.1 * PROTECTED_SHARE.0
                / PROTECTED_SHARE.1;
        while self.groups[group].protected > share {
            let Some(oldest) = self.lists.first(2 * group + PROTECTED as usize) else { return };
            self.lists.remove(oldest);
            let entry = &mut self.entries[oldest as usize];
            entry.position = PROBATION;
            self.groups[group].protected -= self.layers[entry.layer as usize].shape.cost;
            self.lists.push(2 * group + PROBATION as usize, oldest);
        }
    }

    fn least_worthy(&mut self, group: usize, layer: LayerIndex) -> Option<usize> {
        let victim = match self.ranking.is_list() {
            true => self.oldest(group)?,
            false => self.least_by_scan(group, layer)?,
        };
        let is_touched = self.entries[victim].batch == self.batch;
        (!is_touched || !self.batch_may_exceed).then_some(victim)
    }

    /// Returns the oldest entry that the batch did not touch, or the oldest of all if there is none.
    fn oldest(&self, group: usize) -> Option<usize> {
        let lists = [2 * group + PROBATION as usize, 2 * group + PROTECTED as usize];
        for list in lists {
            let mut next = self.lists.first(list);
            while let Some(entry) = next {
                if self.entries[entry as usize].batch != self.batch {
                    return Some(entry as usize);
                }
                next = self.lists.after(entry);
            }
        }
        lists.iter().find_map(|&list| self.lists.first(list)).map(|entry| entry as usize)
    }

    /// Finds the victim by a scan. This takes microseconds, while the miss that needs the room takes a disk read.
    fn least_by_scan(&mut self, group: usize, layer: LayerIndex) -> Option<usize> {
        self.drawn = mix(self.drawn.wrapping_add(0x9e37_79b9_7f4a_7c15));
        // A ranking that knows the future need not keep the batch's experts, unless the accounting requires it.
        let spares_batch = self.batch_may_exceed || matches!(self.ranking, Ranking::Online(_));
        let moment = Moment {
            clock: self.clock,
            pass: self.pass,
            layer: layer.0,
            layers: self.layers.len() as u32,
            drawn: self.drawn,
            victim: 0,
            victim_layer: 0,
        };
        let key = |&index: &u32| {
            let entry = &self.entries[index as usize];
            let at = Moment { victim: index.into(), victim_layer: entry.layer, ..moment };
            let is_spared = spares_batch && entry.batch == self.batch;
            (is_spared, self.ranking.worth(&entry.usage, &at), index)
        };
        let victim = self.groups[group].resident.iter().copied().min_by_key(key)?;
        Some(victim as usize)
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
mod tests;
