//! Tests with random routing under every policy and many budgets. Every lease has the file's bytes, and the engine's
//! counters equal those of a replay.

mod support;

use std::collections::VecDeque;

use forebay_store::{FaultPlan, IoKind};
use forebay_stream::{
    BlockId, CacheShape, ExpertIndex, LayerIndex, Lookups, Phase, PolicyKind, Residency, replay,
};
use proptest::prelude::*;
use support::{EXPERTS, LAYERS, Model, PER_TOKEN, Random, routing, step};

/// Runs a prompt and some tokens. Returns the lookups.
fn run(model: &Model, residency: &mut Residency, seed: u64, tokens: usize) -> Lookups {
    let mut random = Random::new(seed);
    let mut trace = Lookups::new(vec![(EXPERTS, 1); LAYERS as usize]);
    let mut record = |phase, batches: &[Vec<ExpertIndex>]| {
        for (layer, experts) in batches.iter().enumerate().filter(|(_, e)| !e.is_empty()) {
            let tokens = if phase == Phase::Prompt { 20 } else { 1 };
            trace.push(phase, LayerIndex(layer as u32), tokens, experts);
        }
    };
    let prompt = routing(&mut random, EXPERTS as usize - 1);
    record(Phase::Prompt, &prompt);
    step(model, residency, &prompt).unwrap();
    residency.end_prompt(20);
    for _ in 0..tokens {
        let batches = routing(&mut random, PER_TOKEN);
        record(Phase::Generate, &batches);
        step(model, residency, &batches).unwrap();
        residency.end_token();
    }
    trace
}

fn agrees_with_replay(residency: &Residency, trace: &Lookups, tokens: usize) {
    let plan = residency.plan();
    let counters = replay(trace, plan.policy, &CacheShape::from_plan(plan));
    let statistics = residency.statistics();
    assert_eq!(statistics.lookups, counters.all.lookups);
    assert_eq!(statistics.hits, counters.all.hits);
    assert_eq!(statistics.evictions, counters.all.evictions);
    assert_eq!(statistics.experts_read, counters.all.misses());
    let per_token = counters.generate.misses() as f64 / tokens as f64;
    assert_eq!(statistics.faulted_experts_per_token.all, Some(per_token));
    let quota = plan.kept_per_layer.iter().copied().max().unwrap();
    if plan.policy.is_per_layer() {
        assert!(statistics.max_resident_per_layer <= quota);
    }
    assert!(statistics.peak_bytes.host_occupied <= statistics.peak_bytes.host_reserved);
}

#[test]
fn every_policy_and_budget_gives_the_bytes_on_disk() {
    let model = Model::new(1);
    for policy in PolicyKind::ALL {
        for ram in model.budgets(12) {
            let mut residency = model.simulated(ram, policy, FaultPlan::default());
            let trace = run(&model, &mut residency, 7, 40);
            agrees_with_replay(&residency, &trace, 40);
        }
    }
}

#[test]
fn real_files_by_every_engine() {
    let model = Model::new(2);
    let budgets = model.budgets(4);
    for kind in [IoKind::Auto, IoKind::Pread] {
        for &ram in &budgets {
            let folder = tempfile::tempdir().unwrap();
            let mut residency = model.real(kind, folder.path(), ram, PolicyKind::LAYER_LFU, None);
            residency.preload(&mut |_, _| {}).unwrap();
            run(&model, &mut residency, 3, 10);
        }
    }
}

#[test]
fn everything_is_read_once_when_it_fits() {
    let model = Model::new(3);
    for policy in PolicyKind::ALL {
        let mut residency = model.simulated(None, policy, FaultPlan::default());
        let mut progress = Vec::new();
        residency.preload(&mut |done, total| progress.push((done, total))).unwrap();
        assert!(progress.is_sorted());
        assert_eq!(progress.first().unwrap().0, 0);
        assert_eq!(
            progress.last(),
            Some(&(model.blocks.total_bytes(), model.blocks.total_bytes()))
        );
        residency.reset_statistics();
        run(&model, &mut residency, 5, 20);
        let statistics = residency.statistics();
        assert_eq!((statistics.bytes_read, statistics.misses, statistics.evictions), (0, 0, 0));
        assert_eq!(statistics.hit_rate, 1.0);
        assert_eq!(statistics.max_resident_per_layer, EXPERTS);
    }
}

/// Takes blocks as a GPU does: in order and ahead of use, with several leased at a time, waiting only for the block
/// that is due.
#[test]
fn dense_blocks_are_taken_ahead() {
    let model = Model::new(5);
    for ram in model.budgets(6) {
        let mut residency = model.simulated(ram, PolicyKind::LAYER_LFU, FaultPlan::default());
        residency.preload(&mut |_, _| {}).unwrap();
        residency.reset_statistics();
        let pinned = residency.plan().dense.pinned.clone();
        let streamed = pinned.iter().filter(|&&pinned| !pinned).count();
        let mut taken = VecDeque::new();
        let (mut ahead_max, rounds) = (0, 5);
        for due in 0..rounds * pinned.len() {
            while due + taken.len() < rounds * pinned.len() && taken.len() < pinned.len() {
                let next = ((due + taken.len()) % pinned.len()) as u32;
                match residency.dense_if_here(next).unwrap() {
                    Some(lease) => taken.push_back(lease),
                    None if taken.is_empty() => {
                        taken.push_back(residency.dense(next).unwrap());
                    }
                    None => break,
                }
            }
            ahead_max = ahead_max.max(taken.len());
            let lease = taken.pop_front().unwrap();
            assert_eq!(lease.block(), BlockId::Dense((due % pinned.len()) as u32));
            model.check(&residency, &lease);
        }
        // Simulated time advances only while the caller waits, so no streamed block arrives early.
        assert!(ahead_max > 1 || streamed == pinned.len(), "{ahead_max} ahead");
        let read = residency.statistics().dense_blocks_read as usize;
        assert!(read <= rounds * streamed, "{read} of {streamed} blocks that stream");
        assert!(streamed == 0 || read >= (rounds - 1) * streamed, "{read} of {streamed}");
    }
}

#[test]
fn dense_blocks_are_read_once_per_round() {
    let model = Model::new(4);
    let mut residency =
        model.simulated(model.budgets(2)[0], PolicyKind::LAYER_LRU, FaultPlan::default());
    let streamed = residency.plan().dense.pinned.iter().filter(|&&pinned| !pinned).count() as u64;
    assert!(streamed > 2);
    let mut random = Random::new(1);
    step(&model, &mut residency, &routing(&mut random, 2)).unwrap();
    residency.reset_statistics();
    let rounds = 5;
    for _ in 0..rounds {
        step(&model, &mut residency, &routing(&mut random, 2)).unwrap();
    }
    // The read-ahead may be two blocks further at the end than it was at the start.
    let read = residency.statistics().dense_blocks_read;
    assert!(
        read.abs_diff(rounds * streamed) <= 2,
        "{read} reads of {streamed} blocks in {rounds} rounds"
    );
}

#[test]
fn dense_blocks_in_any_order() {
    let model = Model::new(5);
    for ram in model.budgets(6) {
        let mut residency = model.simulated(ram, PolicyKind::LAYER_LRU, FaultPlan::default());
        let mut random = Random::new(9);
        for turn in 0..200 {
            if turn % 20 == 0 {
                residency.set_dense_cycle(1 + random.below(7) as usize);
                if random.below(2) == 0 {
                    residency.postpone_dense(random.below(9) as usize);
                }
            }
            let index = random.below(model.blocks.dense.len() as u64) as u32;
            let lease = residency.dense(index).unwrap();
            model.check(&residency, &lease);
        }
    }
}

/// A block that is used behind the others is not read in its place.
#[test]
fn a_postponed_block_is_read_once_per_round() {
    let model = Model::new(4);
    let mut residency =
        model.simulated(model.budgets(2)[0], PolicyKind::LAYER_LRU, FaultPlan::default());
    let blocks = model.blocks.dense.len();
    let streamed: Vec<bool> = residency.plan().dense.pinned.iter().map(|pinned| !pinned).collect();
    let postponed = (1..blocks - 1).find(|block| streamed[*block]).expect("a block that streams");
    let order: Vec<usize> =
        (0..blocks).filter(|block| *block != postponed).chain([postponed]).collect();
    residency.set_dense_cycle(blocks);
    residency.postpone_dense(postponed);
    let rounds = 6;
    for _ in 0..rounds {
        for &block in &order {
            let lease = residency.dense(block as u32).unwrap();
            assert_eq!(lease.block(), BlockId::Dense(block as u32));
            model.check(&residency, &lease);
        }
    }
    let read = residency.statistics().dense_blocks_read;
    let each = streamed.iter().filter(|streamed| **streamed).count() as u64;
    assert!(read >= rounds * each && read <= rounds * each + 2, "{read} reads of {each} blocks");
}

#[test]
fn statistics_serialize_with_units_in_their_keys() {
    let model = Model::new(6);
    let mut residency = model.simulated(None, PolicyKind::LRU, FaultPlan::default());
    run(&model, &mut residency, 1, 4);
    let statistics = residency.statistics();
    assert_eq!((statistics.prompt_tokens, statistics.generated_tokens), (20, 4));
    assert_eq!(residency.token_records().len(), 4);
    assert!(statistics.io.requests > 0);
    let json = serde_json::to_value(&statistics).unwrap();
    assert_eq!(json["policy"], "lru");
    for key in ["hit_rate", "bytes_read", "wait_seconds", "max_resident_per_layer"] {
        assert!(json[key].is_number(), "{key} in {json}");
    }
    assert!(json["faulted_experts_per_token"]["steady"].is_number());
    let plan = serde_json::to_value(residency.plan()).unwrap();
    assert_eq!(plan["fully_resident"], true);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() })]

    /// Runs batches of any size, some ended early, with prefetches and leases held across batches. Leases never have
    /// other bytes than those on disk, and a leased slot is never written to.
    #[test]
    fn whatever_the_caller_does_the_bytes_are_right(
        seed in any::<u64>(),
        policy in 0_usize..PolicyKind::ALL.len(),
        budget in 0_usize..8,
        random_one_in in prop::sample::select(vec![0_u32, 7]),
    ) {
        let model = Model::new(seed);
        let ram = model.budgets(8)[budget];
        let faults = FaultPlan { random_one_in, seed, ..FaultPlan::default() };
        let mut residency = model.simulated(ram, PolicyKind::ALL[policy], faults);
        let mut random = Random::new(seed ^ 1);
        let mut held = Vec::new();
        for _ in 0..60 {
            let layer = LayerIndex(1 + random.below(u64::from(LAYERS) - 1) as u32);
            let count = 1 + random.below(u64::from(EXPERTS)) as usize;
            let experts = random.experts(EXPERTS, count);
            match random.below(5) {
                0 => residency.prefetch_experts(layer, &experts).unwrap(),
                1 => {
                    // End the batch early, at any point.
                    residency.begin_experts(layer, &experts).unwrap();
                    let mut pass = Vec::new();
                    for _ in 0..random.below(3) {
                        residency.next_experts(&mut pass).unwrap();
                        pass.iter().for_each(|(_, lease)| model.check(&residency, lease));
                        pass.truncate(1);
                        held.append(&mut pass);
                        held.truncate(1);
                    }
                    residency.end_experts();
                }
                _ => {
                    held.iter().for_each(|(_, lease)| model.check(&residency, lease));
                    held.clear();
                    let mut batches = vec![Vec::new(); LAYERS as usize];
                    batches[layer.0 as usize] = experts;
                    step(&model, &mut residency, &batches).unwrap();
                    residency.end_token();
                }
            }
            held.iter().for_each(|(_, lease)| model.check(&residency, lease));
        }
        // Batches still work, so no slot was lost.
        held.clear();
        for _ in 0..3 {
            step(&model, &mut residency, &routing(&mut random, PER_TOKEN)).unwrap();
        }
        let prefetch = residency.statistics().prefetch;
        prop_assert!(prefetch.used + prefetch.wasted <= prefetch.issued);
    }
}
