//! How many blocks a shared prefix takes.

use forebay_kv::BlockHash;
use forebay_ops::{KV_BLOCK, RowKind};

use super::super::{BlockManager, Changes, GroupConfig, Row};

const PREFIX: u32 = 2000;
const OWN: u32 = 16;
const SEQUENCES: u32 = 64;
const BATCH: usize = 512;

/// Admits sequences with a common prefix, one after another, and keeps them. Returns the hits in tokens.
fn admit_all(manager: &mut BlockManager) -> Vec<usize> {
    let mut changes = Changes::default();
    let admit = |number| {
        let own = (0..OWN).map(|position| PREFIX + number * OWN + position);
        let prompt: Vec<u32> = (0..PREFIX).chain(own).collect();
        let admission =
            manager.admit(BlockHash::default(), &Row::of_prompt(&prompt), |_| false, &mut changes);
        for chunk in prompt[admission.hit_rows..].chunks(BATCH) {
            let upto = manager.len(admission.sequence) + chunk.len();
            manager.reserve(admission.sequence, upto, &mut changes).unwrap();
            manager.commit(admission.sequence, chunk, RowKind::Prompt, &mut changes);
        }
        assert!(changes.copies.is_empty());
        admission.hit_rows
    };
    (0..SEQUENCES).map(admit).collect()
}

#[test]
fn sequences_with_a_common_prefix_share_its_blocks() {
    // In a pool with exactly the room for one prefix and the own parts.
    let tokens = (PREFIX + SEQUENCES * OWN) as usize;
    let whole = GroupConfig {
        window: None,
        blocks: 1 + tokens / KV_BLOCK,
        on_device: 1 + tokens / KV_BLOCK,
        block_bytes: 1,
    };
    let window =
        GroupConfig { window: Some(128), blocks: 1 + 200, on_device: 1 + 200, block_bytes: 1 };
    for groups in [vec![whole], vec![whole, window]] {
        let mut manager = BlockManager::new(&groups, BATCH);
        let hits = admit_all(&mut manager);
        assert_eq!(hits[0], 0);
        assert_eq!(hits[1..], [PREFIX as usize; SEQUENCES as usize - 1]);
        let statistics = manager.group_statistics().next().unwrap();
        let used = (statistics.referenced + statistics.cached) * KV_BLOCK;
        assert!(used as f64 <= 1.1 * tokens as f64, "{used} positions for {tokens} tokens");
        assert_eq!(manager.statistics().hit_rows_total, u64::from(PREFIX * (SEQUENCES - 1)));
        let prompts = u64::from((PREFIX + OWN) * SEQUENCES);
        assert_eq!(manager.statistics().rows_total, prompts);
    }
}
