//! Tests of two memories as an exclusive cache: one takes back the experts that the other evicts.

mod support;

use forebay_store::FaultPlan;
use forebay_stream::{
    BatchPart, BlockId, Budget, ExpertIndex, ExpertPool, ExpertTier, LayerIndex, Lease, MemoryPlan,
    PolicyKind, Residency, TierBatch,
};
use proptest::prelude::*;
use support::{EXPERTS, LAYERS, Model, PER_TOKEN, Random};

/// A device's memory with the host's memory behind it.
struct Both<'a> {
    model: &'a Model,
    host: Residency,
    tier: ExpertTier,
    /// Parts of the experts in the tier's slots, by pool.
    memory: Vec<Vec<[Vec<u8>; 3]>>,
    batch: TierBatch,
    /// Number of experts that left the tier, and of those that were copied back to the host.
    left: u64,
    returned: u64,
}

impl<'a> Both<'a> {
    fn new(model: &'a Model, ram: Option<u64>, device: u64, policy: PolicyKind) -> Both<'a> {
        let host = model.simulated(ram, policy, FaultPlan::default());
        let layers: Vec<(u32, u64)> =
            (0..LAYERS).map(|layer| (if layer == 0 { 0 } else { EXPERTS }, 16384)).collect();
        let plan = Budget::plan_experts(&layers, PER_TOKEN, device, policy).unwrap();
        let empty = || [Vec::new(), Vec::new(), Vec::new()];
        let slots = |pool: &ExpertPool| vec![empty(); pool.slots() as usize];
        let memory = plan.pools.iter().map(slots).collect();
        let (tier, batch) = (ExpertTier::new(plan), TierBatch::default());
        Both { model, host, tier, memory, batch, left: 0, returned: 0 }
    }

    /// Runs one token's batch of a layer as a device does. Returns the number of experts read from disk.
    fn token(&mut self, layer: LayerIndex, experts: &[ExpertIndex]) -> u64 {
        let Both { model, host, tier, memory, batch, left, returned } = self;
        let before = host.statistics().experts_read;
        tier.begin(layer, experts, BatchPart::Whole, |misses| misses, batch);
        let pool = tier.pool(layer);
        for expert in &batch.hits {
            let slot = tier.slot(layer, *expert).unwrap() as usize;
            model.check_parts(BlockId::Expert(layer, *expert), &memory[pool][slot]);
        }
        host.note_uses(layer, &batch.hits);
        let mut leases: Vec<(ExpertIndex, Lease)> = Vec::new();
        if !batch.misses.is_empty() {
            host.begin_experts(layer, &batch.misses).unwrap();
            while host.next_experts(&mut leases).unwrap() {}
            host.end_experts();
        }
        let stays = |expert: &&ExpertIndex| tier.stays(layer, **expert);
        batch.misses.iter().filter(stays).for_each(|&expert| host.hand_over(layer, expert));
        let mut returning = Vec::new();
        for gone in &batch.gone {
            let Some(slot) = gone.slot else { continue };
            *left += 1;
            let from = memory[tier.pool(gone.layer)][slot as usize].clone();
            if let Some(to) = host.take_back(gone.layer, gone.expert) {
                returning.push((to, from));
            }
        }
        for (expert, lease) in leases {
            model.check(host, &lease);
            let slot = tier.take(layer, expert).unwrap() as usize;
            memory[pool][slot] = [0, 1, 2].map(|part| host.bytes(&lease, part).to_vec());
        }
        *returned += returning.len() as u64;
        for (mut to, from) in returning {
            let parts = to.parts().into_iter().zip(from);
            parts.for_each(|(range, from)| to.as_mut()[range].copy_from_slice(&from));
            host.has_returned(to);
        }
        experts.iter().for_each(|&expert| tier.release(layer, expert));
        tier.free_left();
        host.statistics().experts_read - before
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    /// For every budget and policy, each expert keeps its own bytes while it moves between the memories.
    #[test]
    fn experts_keep_their_bytes_on_the_way(
        budget in 0_usize..40,
        kib in 150_u64..400,
        policy in prop::sample::select(PolicyKind::ALL.to_vec()),
        seed in 0_u64..1000,
    ) {
        let model = Model::new(seed);
        let budgets = model.budgets(40);
        let mut both = Both::new(&model, budgets[budget.min(budgets.len() - 1)], kib << 10, policy);
        let mut random = Random::new(seed);
        for _ in 0..30 {
            for layer in 1..LAYERS {
                both.token(LayerIndex(layer), &random.experts(EXPERTS, PER_TOKEN));
            }
        }
    }
}

#[test]
fn two_memories_that_hold_all_experts_together_read_each_once() {
    let model = Model::new(5);
    for policy in [PolicyKind::LAYER_LFU, PolicyKind::LAYER_LRU] {
        let mut found = false;
        for ram in model.budgets(80) {
            let mut both = Both::new(&model, ram, 300 << 10, policy);
            let kept = |plan: &MemoryPlan, layer: usize| plan.kept_per_layer[layer];
            let sum = |layer| kept(both.tier.plan(), layer) + kept(both.host.plan(), layer);
            let device_alone = kept(both.tier.plan(), 1);
            let host_alone = kept(both.host.plan(), 1);
            if (1..LAYERS as usize).any(|layer| sum(layer) < EXPERTS)
                || host_alone == EXPERTS
                || device_alone == EXPERTS
            {
                continue;
            }
            found = true;
            let mut random = Random::new(7);
            let mut read = 0;
            for _ in 0..200 {
                for layer in 1..LAYERS {
                    read += both.token(LayerIndex(layer), &random.experts(EXPERTS, PER_TOKEN));
                }
            }
            assert!(
                read <= u64::from((LAYERS - 1) * EXPERTS),
                "{policy}: {read} reads, {device_alone} and {host_alone} of {EXPERTS} kept"
            );
        }
        assert!(found, "some budget is one at which neither memory holds all experts");
    }
}

#[test]
fn spare_slots_keep_copies_so_that_little_is_copied_back() {
    let model = Model::new(5);
    let mut returned = Vec::new();
    for ram in model.budgets(80) {
        let mut both = Both::new(&model, ram, 300 << 10, PolicyKind::LAYER_LFU);
        let kept = |plan: &MemoryPlan| plan.kept_per_layer[1];
        let (device, host) = (kept(both.tier.plan()), kept(both.host.plan()));
        let spare = (device + host).saturating_sub(EXPERTS);
        if host == EXPERTS || device + host < EXPERTS {
            continue;
        }
        let mut random = Random::new(7);
        let mut run = |both: &mut Both<'_>| {
            for _ in 0..200 {
                for layer in 1..LAYERS {
                    both.token(LayerIndex(layer), &random.experts(EXPERTS, PER_TOKEN));
                }
            }
        };
        // The first uses come from the disk.
        run(&mut both);
        (both.left, both.returned) = (0, 0);
        run(&mut both);
        assert!(both.left > 100, "experts come and go: {}", both.left);
        returned.push((spare, both.returned as f64 / both.left as f64));
    }
    let with_spare = returned.iter().filter(|of| of.0 > 0).map(|of| of.1);
    let worst = with_spare.reduce(f64::max).expect("some budget has spare slots");
    assert!(worst < 0.25, "shares that go back, by spare slots of a layer: {returned:?}");
}
