//! Tests of one layer's batch: hits first, chunks, leases, prefetching.

mod support;

use std::thread::sleep;
use std::time::{Duration, Instant};

use forebay_store::{FaultPlan, IoKind};
use forebay_stream::{BlockId, ExpertIndex, LayerIndex, Lease, PolicyKind, Residency};
use support::{EXPERTS, Model, PER_TOKEN, batch};

const LAYER: LayerIndex = LayerIndex(2);

fn experts(numbers: impl IntoIterator<Item = u32>) -> Vec<ExpertIndex> {
    numbers.into_iter().map(ExpertIndex).collect()
}

/// Returns a residency whose budget keeps at least this many experts for each layer.
fn keeping(model: &Model, kept: u32) -> Residency {
    let budgets = model.budgets(200);
    let residencies = budgets
        .into_iter()
        .map(|ram| model.simulated(ram, PolicyKind::LAYER_LRU, FaultPlan::default()));
    let enough =
        |residency: &Residency| residency.plan().kept_per_layer[1..].iter().all(|&k| k >= kept);
    residencies.into_iter().find(enough).unwrap()
}

fn numbers(pass: &[(ExpertIndex, Lease)]) -> Vec<u32> {
    pass.iter().map(|(expert, _)| expert.0).collect()
}

#[test]
fn hits_come_first_and_at_once() {
    let model = Model::new(21);
    let mut residency = keeping(&model, 4);
    batch(&model, &mut residency, LAYER, &experts([1, 3, 7])).unwrap();
    residency.begin_experts(LAYER, &experts([1, 2, 3, 9])).unwrap();
    let mut pass = Vec::new();
    assert!(residency.next_experts(&mut pass).unwrap());
    assert_eq!(numbers(&pass), [1, 3]);
    let mut arrived = Vec::new();
    while residency.next_experts(&mut arrived).unwrap() {}
    arrived.iter().for_each(|(_, lease)| model.check(&residency, lease));
    let mut arrived = numbers(&arrived);
    arrived.sort_unstable();
    assert_eq!(arrived, [2, 9]);
    residency.end_experts();
    let statistics = residency.statistics();
    assert_eq!((statistics.lookups, statistics.hits, statistics.experts_read), (7, 2, 5));
}

#[test]
fn a_prompt_larger_than_the_pool_takes_several_passes() {
    let model = Model::new(22);
    let mut residency = keeping(&model, 0);
    assert_eq!(residency.plan().kept_slots(), 0);
    for _ in 0..2 {
        residency.begin_experts(LAYER, &experts(0..EXPERTS)).unwrap();
        let (mut passes, mut seen, mut pass) = (0, 0, Vec::new());
        while residency.next_experts(&mut pass).unwrap() {
            assert!(pass.len() <= PER_TOKEN);
            pass.iter().for_each(|(_, lease)| model.check(&residency, lease));
            seen += pass.len();
            passes += 1;
            pass.clear();
        }
        residency.end_experts();
        assert_eq!(seen, EXPERTS as usize);
        assert!(passes >= EXPERTS as usize / PER_TOKEN);
    }
    assert_eq!(residency.statistics().experts_read, u64::from(2 * EXPERTS), "each once per batch");
}

#[test]
fn reads_go_on_without_anybody_waiting() {
    let (model, folder) = (Model::new(25), tempfile::tempdir().unwrap());
    let least = model.budgets(2)[0];
    let mut residency = model.real(IoKind::Auto, folder.path(), least, PolicyKind::LAYER_LRU, None);
    let begun = Instant::now();
    let comes = |residency: &mut Residency| {
        while !residency.experts_are_ready().unwrap() {
            assert!(begun.elapsed() < Duration::from_secs(60), "nothing comes");
            sleep(Duration::from_micros(100));
        }
    };
    residency.begin_experts(LAYER, &experts(0..EXPERTS)).unwrap();
    let (mut seen, mut pass) = (0, Vec::new());
    while seen < EXPERTS as usize {
        // After the inner loop, all slots are leased. The next reads start when the leases are dropped.
        while pass.len() < PER_TOKEN.min(EXPERTS as usize - seen) {
            comes(&mut residency);
            assert!(residency.next_experts(&mut pass).unwrap());
        }
        pass.iter().for_each(|(_, lease)| model.check(&residency, lease));
        seen += pass.len();
        pass.clear();
    }
    assert!(!residency.next_experts(&mut pass).unwrap());
    assert_eq!(seen, EXPERTS as usize);
}

#[test]
fn a_leased_slot_is_not_reused_whatever_else_is_read() {
    let model = Model::new(23);
    let mut residency = keeping(&model, 0);
    residency.begin_experts(LAYER, &experts([4])).unwrap();
    let mut held = Vec::new();
    assert!(residency.next_experts(&mut held).unwrap());
    residency.end_experts();
    // Two of three slots are left, which is enough for small batches.
    for turn in 0..40 {
        let others = experts([turn % EXPERTS, (turn + 3) % EXPERTS]);
        batch(&model, &mut residency, LayerIndex(1 + turn % 3), &others).unwrap();
        model.check(&residency, &held[0].1);
        assert_eq!(held[0].1.block(), BlockId::Expert(LAYER, ExpertIndex(4)));
    }
}

#[test]
fn leases_may_end_on_another_thread() {
    let model = Model::new(24);
    let mut residency = keeping(&model, 1);
    let lease = residency.dense(0).unwrap();
    std::thread::spawn(move || drop(lease)).join().unwrap();
    for index in 0..model.blocks.dense.len() as u32 {
        residency.dense(index).unwrap();
    }
}

#[test]
fn right_predictions_are_used_and_wrong_ones_are_dropped() {
    let model = Model::new(25);
    let mut residency = keeping(&model, 1);
    residency.prefetch_experts(LAYER, &experts([1, 2])).unwrap();
    // A second prefetch of the same experts changes nothing.
    residency.prefetch_experts(LAYER, &experts([1, 2])).unwrap();
    batch(&model, &mut residency, LAYER, &experts([1, 5])).unwrap();
    let statistics = residency.statistics();
    assert_eq!(
        (statistics.prefetch.issued, statistics.prefetch.used, statistics.prefetch.wasted),
        (2, 1, 1)
    );
    assert_eq!(
        (statistics.hits, statistics.misses),
        (0, 2),
        "a prefetched expert is a miss all the same"
    );
}

#[test]
fn prefetches_never_evict_and_yield_to_misses() {
    let model = Model::new(26);
    for kept in [0, 1, 3] {
        let mut residency = keeping(&model, kept);
        batch(&model, &mut residency, LAYER, &experts([0, 1, 2])).unwrap();
        let before = residency.statistics();
        for turn in 0..20 {
            residency.prefetch_experts(LayerIndex(1 + turn % 3), &experts(3..EXPERTS)).unwrap();
        }
        assert_eq!(residency.statistics().evictions, before.evictions);
        // All slots that are not retained now hold predicted experts, and every prediction is wrong.
        batch(&model, &mut residency, LayerIndex(1), &experts([0, 1, 2])).unwrap();
        batch(&model, &mut residency, LayerIndex(3), &experts([0, 1, 2])).unwrap();
        batch(&model, &mut residency, LAYER, &experts([0, 1, 2])).unwrap();
        let statistics = residency.statistics();
        let quota = residency.plan().kept_per_layer[LAYER.0 as usize].min(3);
        assert_eq!(statistics.hits, u64::from(quota));
        assert_eq!(statistics.prefetch.used, 0);
        assert_eq!(statistics.prefetch.wasted, statistics.prefetch.issued);
    }
}
