//! The layers of the KV cache.

use forebay_compute::{KvLayer, KvShape};

use super::indexer::index_layers;
use super::shared_keys::entry_layers;
use crate::arch::{self, Architecture};

/// Returns the layers of the KV cache. Recurrent layers keep nothing in it. If there are indexers, as many layers follow for
/// their keys, which are in the same blocks. Layers for compressed entries follow if there are such.
pub fn cache_layers(architecture: &Architecture) -> Vec<KvLayer> {
    let groups = architecture.kv_groups();
    let layer = |layer: usize| {
        let attention = architecture.attention_of(layer);
        let shape = attention.kv_shape();
        match architecture.kv_group(layer) {
            Some(of) => {
                let group = groups.iter().position(|group| *group == of);
                KvLayer::new(shape, group.expect("every group is listed"))
            }
            None => KvLayer::new(KvShape { kv_heads: 0, ..shape }, 0),
        }
    };
    let mut layers: Vec<KvLayer> = (0..architecture.layers.len()).map(layer).collect();
    if architecture.indexer().is_some() {
        layers.extend(index_layers(architecture, &layers));
    }
    if architecture.has_entries() {
        let group = |of: arch::KvGroup| groups.iter().position(|group| *group == of);
        layers.extend(entry_layers(architecture, |of| group(of).expect("every group is listed")));
    }
    layers
}
