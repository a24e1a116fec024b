use super::*;

/// Creates a cache for layers of 16 experts, with `per_layer` slots for each layer or the same total in one group.
fn cache(policy: PolicyKind, layers: u32, per_layer: u64) -> CacheState {
    let global = !policy.is_per_layer();
    let group = |layer: u32| if global { 0 } else { layer as usize };
    let shape = |layer| LayerShape { experts: 16, cost: 1, group: group(layer) };
    let groups = match global {
        true => vec![per_layer * u64::from(layers)],
        false => vec![per_layer; layers as usize],
    };
    let count = layers as usize;
    let layers = (0..layers).map(shape).collect();
    CacheState::new(
        policy,
        &CacheShape { layers, groups, batch_may_exceed: false, preloaded: vec![false; count] },
    )
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
    // 8 layers x 3 experts = 24 for a token; 16 slots, in one group or 2 for each layer.
    let mut rates = Vec::new();
    for policy in [PolicyKind::LAYER_LRU, PolicyKind::LAYER_LFU, PolicyKind::LRU] {
        let mut cache = cache(policy, 8, 2);
        for _token in 0..20 {
            for layer in 0..8 {
                use_batch(&mut cache, layer, &[1, 5, 9]);
            }
        }
        rates.push(cache.counters().hit_rate());
    }
    // Two of three experts are kept from the second token on.
    assert_eq!(rates, [2.0 / 3.0 * 19.0 / 20.0, 2.0 / 3.0 * 19.0 / 20.0, 0.0]);
}

#[test]
fn recency_evicts_the_oldest_and_spares_the_batch() {
    let mut cache = cache(PolicyKind::LAYER_LRU, 1, 3);
    assert_eq!(use_batch(&mut cache, 0, &[0, 1, 2]), (0, vec![]));
    assert_eq!(use_batch(&mut cache, 0, &[0]), (1, vec![]));
    assert_eq!(use_batch(&mut cache, 0, &[7]), (0, vec![1]));
    assert_eq!(use_batch(&mut cache, 0, &[2, 8]), (1, vec![0]));
    // The batch exceeds the capacity: other experts are evicted first, then the batch's own, oldest first.
    assert_eq!(use_batch(&mut cache, 0, &[3, 4, 5, 6]), (0, vec![7, 2, 8, 3]));
    assert_eq!(cache.resident(LayerIndex(0)), 3);
    assert_eq!(cache.resident_max().collect::<Vec<_>>(), [3]);
}

#[test]
fn frequency_keeps_favourites_remembers_the_absent_and_forgives_in_time() {
    let mut cache = cache(PolicyKind::LAYER_LFU, 1, 2);
    for _ in 0..4 {
        use_batch(&mut cache, 0, &[3]);
    }
    use_batch(&mut cache, 0, &[4]);
    assert_eq!(use_batch(&mut cache, 0, &[5]), (0, vec![4]), "3 is the favourite");
    assert_eq!(use_batch(&mut cache, 0, &[4]), (0, vec![5]), "4 was used before");
    // A new favourite replaces the old one, although the old one was used as often long ago.
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
