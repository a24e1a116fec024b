//! How often each expert was used, for people who look at the cache.

use serde::Serialize;

use super::{ABSENT, CacheState};

/// Uses of the experts of one layer since the start. Every list has one entry for each expert.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LayerUses {
    /// Index of the layer in the model.
    pub layer: u32,
    pub lookups: Vec<u64>,
    /// Lookups that found the expert resident. The others missed.
    pub hits: Vec<u64>,
    pub evictions: Vec<u64>,
    /// True for experts that are resident now.
    pub resident: Vec<bool>,
}

impl CacheState {
    /// Returns the uses of all experts, by layer. Layers without experts are left out.
    pub fn uses(&self) -> Vec<LayerUses> {
        let mut uses = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let entries = &self.entries[layer.first..][..layer.shape.experts as usize];
            if entries.is_empty() {
                continue;
            }
            uses.push(LayerUses {
                layer: index as u32,
                lookups: entries.iter().map(|entry| entry.counts.lookups).collect(),
                hits: entries.iter().map(|entry| entry.counts.hits).collect(),
                evictions: entries.iter().map(|entry| entry.counts.evictions).collect(),
                resident: entries.iter().map(|entry| entry.position != ABSENT).collect(),
            });
        }
        uses
    }
}

#[cfg(test)]
mod tests {
    use crate::blocks::{ExpertIndex, LayerIndex};
    use crate::cache::{CacheShape, CacheState, LayerShape};
    use crate::policy::PolicyKind;

    #[test]
    fn uses_of_all_experts_add_up_to_the_counters() {
        let layer = LayerShape { experts: 4, group: 0, cost: 1 };
        let dense = LayerShape { experts: 0, ..layer };
        let shape = CacheShape {
            layers: vec![dense, layer],
            groups: vec![2],
            preloaded: vec![false; 2],
            batch_may_exceed: false,
        };
        let mut cache = CacheState::new(PolicyKind::LAYER_LFU, &shape);
        for batch in [[0, 1], [0, 2], [0, 3], [0, 1]] {
            let batch = batch.map(ExpertIndex);
            for expert in batch {
                cache.lookup(LayerIndex(1), expert);
            }
            cache.retain(LayerIndex(1), &batch, &mut Vec::new());
        }
        let uses = cache.uses();
        assert_eq!((uses.len(), uses[0].layer), (1, 1));
        assert_eq!(uses[0].lookups, [4, 2, 1, 1]);
        assert_eq!(uses[0].hits[0], 3);
        let counters = cache.counters();
        assert_eq!(uses[0].lookups.iter().sum::<u64>(), counters.lookups);
        assert_eq!(uses[0].hits.iter().sum::<u64>(), counters.hits);
        assert_eq!(uses[0].evictions.iter().sum::<u64>(), counters.evictions);
        assert!(counters.evictions > 0);
        assert_eq!(uses[0].resident.iter().filter(|resident| **resident).count(), 2);
    }
}
