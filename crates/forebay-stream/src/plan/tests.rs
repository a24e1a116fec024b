use forebay_store::{Extent, FileIndex, Step, TensorType};
use proptest::prelude::*;

use super::*;

/// Places blocks of the given sizes one after the other, with gaps so that no reads merge.
struct Layout {
    offset: u64,
}

impl Layout {
    fn block(&mut self, parts: &[u64]) -> Block {
        let mut extent = |&length: &u64| {
            let extent = Extent { file: FileIndex(0), offset: self.offset, length };
            self.offset += length + 3 * 4096 + 17;
            extent
        };
        parts.iter().map(&mut extent).collect::<Vec<_>>().into()
    }
}

/// Returns a model of 6 layers, of which the first is dense, with experts of two sizes. Its head has two chunks that
/// are larger than the layers.
fn model() -> ModelBlocks {
    let mut layout = Layout { offset: 100 };
    let layers = (0..6).map(|layer| layout.block(&[50_000 + 3000 * layer, 9000]));
    let mut dense: Vec<Block> = layers.collect();
    dense.push(layout.block(&[170_000]));
    dense.push(layout.block(&[90_000]));
    let expert_bytes = |layer: u64| if layer.is_multiple_of(2) { 40_000 } else { 60_000 };
    let experts = (0..6_u64).map(|layer| {
        let count = if layer == 0 { 0 } else { 12 };
        (0..count).map(|_| layout.block(&[expert_bytes(layer), 8000, 8000])).collect()
    });
    ModelBlocks { dense, experts: experts.collect(), experts_per_token: 3 }
}

fn check(blocks: &ModelBlocks, plan: &MemoryPlan, ram: u64, reserved: u64) {
    assert!(plan.arena_bytes <= ram - reserved, "{ram}: {plan:?}");
    let slots: u64 = plan.pools.iter().map(ExpertPool::bytes).sum();
    assert_eq!(plan.arena_bytes, plan.dense.bytes() + slots);
    assert!(plan.dense.all_pinned() || plan.kept_slots() == 0, "dense weights come first");
    for pool in &plan.pools {
        assert_eq!(pool.slot_bytes % SLOT_ALIGNMENT as u64, 0);
        let layers = pool.layers.iter().map(|&layer| layer as usize);
        let (kept, experts) = layers.fold((0, 0), |(kept, experts), layer| {
            assert!(plan.kept_per_layer[layer] <= plan.experts_per_layer[layer]);
            let fits = |block: &Block| slot_bytes(block) <= pool.slot_bytes;
            assert!(blocks.experts[layer].iter().all(fits));
            (kept + plan.kept_per_layer[layer], experts + plan.experts_per_layer[layer])
        });
        assert_eq!(kept, pool.kept_slots);
        let in_a_layer = pool.layers.iter().map(|&layer| plan.experts_per_layer[layer as usize]);
        let per_token = (blocks.experts_per_token as u32).min(in_a_layer.max().unwrap_or(0));
        assert!(pool.transient_slots >= per_token || kept == experts, "{pool:?}");
        assert!(pool.slots() <= experts);
    }
}

fn sweep(blocks: &ModelBlocks, reserved: u64, policy: PolicyKind) {
    let smallest = Budget::smallest(blocks, reserved);
    let all = Budget::plan(blocks, None, reserved, policy).unwrap();
    assert!(all.fully_resident);
    assert_eq!(all.kept_slots(), all.experts());
    let enough = all.arena_bytes + all.reserved_bytes;

    match Budget::plan(blocks, Some(smallest - 4096), reserved, policy) {
        Err(StreamError::BudgetTooSmall { needed_bytes, given_bytes, .. }) => {
            assert_eq!((needed_bytes, given_bytes), (smallest, smallest - 4096));
        }
        other => panic!("{other:?}"),
    }
    let mut before: Option<MemoryPlan> = None;
    for ram in (smallest..enough).step_by(4096 + 512).chain([enough, enough + 4096, u64::MAX]) {
        let plan = Budget::plan(blocks, Some(ram), reserved, policy).unwrap();
        check(blocks, &plan, ram, reserved);
        if let Some(before) = before {
            assert!(before.kept_slots() <= plan.kept_slots(), "at {ram}");
            assert!(before.dense.pinned_blocks() <= plan.dense.pinned_blocks(), "at {ram}");
        }
        let keeps_all = plan.dense.all_pinned() && plan.kept_slots() == all.experts();
        assert_eq!(plan.fully_resident, keeps_all, "at {ram}");
        assert!(ram < enough || plan.fully_resident);
        before = Some(plan);
    }
}

#[test]
fn every_budget_from_the_smallest_to_the_whole_model() {
    for policy in PolicyKind::ALL {
        sweep(&model(), 12_345, policy);
    }
}

#[test]
fn the_smallest_budget_holds_two_dense_slots_and_the_experts_of_a_token() {
    let blocks = model();
    let plan = Budget::plan(&blocks, Some(Budget::smallest(&blocks, 0)), 0, PolicyKind::LAYER_LRU);
    let plan = plan.unwrap();
    assert_eq!(plan.dense.ring_slots, 2);
    assert_eq!(plan.pools.len(), 1, "one pool for both sizes of experts");
    assert_eq!(plan.pools[0].transient_slots, 3);
    assert_eq!(plan.kept_slots(), 0);
}

#[test]
fn a_refusal_says_what_would_work() {
    let error = Budget::plan(&model(), Some(1 << 16), 1000, PolicyKind::LAYER_LRU).unwrap_err();
    let needed = Budget::smallest(&model(), 1000);
    let text = error.to_string();
    assert!(text.contains("65536 bytes (64.00 KiB) is too small"), "{text}");
    assert!(text.contains(&format!("the smallest that works is {needed} bytes")), "{text}");
}

#[test]
fn models_without_experts_or_without_anything() {
    let mut blocks = model();
    blocks.experts.iter_mut().for_each(Vec::clear);
    sweep(&blocks, 0, PolicyKind::LAYER_LFU);
    let nothing = Budget::plan(&ModelBlocks::default(), Some(0), 0, PolicyKind::LRU).unwrap();
    assert_eq!(nothing.arena_bytes, 0);
    assert!(nothing.fully_resident);
}

#[test]
fn absurd_extents_are_refused() {
    let mut blocks = model();
    blocks.dense[2].extents[0].length = u64::MAX - 5;
    blocks.experts[3][1].extents[0].length = u64::MAX / 2;
    for ram in [None, Some(1 << 40)] {
        let plan = Budget::plan(&blocks, ram, 0, PolicyKind::LAYER_LRU);
        assert!(matches!(plan, Err(StreamError::BudgetTooSmall { .. })), "{plan:?}");
    }
}

#[test]
fn relayout_buffers_count_towards_the_budget() {
    let plain = model();
    let mut blocks = model();
    let bytes: u64 = 60_000;
    let extent = Extent { file: FileIndex(1), offset: 0, length: bytes };
    let heads =
        Step::Heads { extent: 0, heads: 10, plain: 20, value: 10, rank: 100, ty: TensorType::F16 };
    let mut block = Block::default();
    block.push_relayout(&[extent], vec![heads]);
    blocks.dense[1] = block;
    assert_eq!(blocks.relayout_bytes(), bytes);
    sweep(&blocks, 1000, PolicyKind::LAYER_LFU);
    let plan = |blocks, ram| Budget::plan(blocks, Some(ram), 1000, PolicyKind::LAYER_LFU);
    let smallest = Budget::smallest(&blocks, 1000);
    assert_eq!(smallest, Budget::smallest(&plain, 1000) + bytes);
    assert_eq!(plan(&blocks, smallest).unwrap().reserved_bytes, 1000 + bytes);
    assert!(plan(&blocks, smallest - 1).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_model_keeps_the_rules(
        dense in prop::collection::vec(1_u64..200_000, 0..7),
        layers in prop::collection::vec((0_usize..9, 1_u64..90_000), 0..5),
        experts_per_token in 0_usize..5,
        reserved in 4096_u64..50_000,
    ) {
        let mut layout = Layout { offset: 0 };
        let dense = dense.iter().map(|&bytes| layout.block(&[bytes])).collect();
        let experts = layers
            .iter()
            .map(|&(count, bytes)| (0..count).map(|_| layout.block(&[bytes, 100])).collect());
        let blocks = ModelBlocks { dense, experts: experts.collect(), experts_per_token };
        if blocks.total_bytes() > 0 {
            sweep(&blocks, reserved, PolicyKind::LAYER_LRU);
        }
    }
}
