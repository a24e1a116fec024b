//! Cases by hand.

use forebay_kv::BlockHash;
use forebay_ops::{KV_BLOCK, RowKind};

use super::super::{
    Admission, BlockCopy, BlockId, BlockManager, Changes, GroupConfig, OutOfBlocks, Row, SequenceId,
};

/// Returns a manager with groups of these windows, each with room for `blocks` blocks.
fn manager(windows: &[Option<usize>], blocks: usize) -> BlockManager {
    let group = |&window| GroupConfig {
        window,
        blocks: blocks + 1,
        on_device: blocks + 1,
        block_bytes: 4096,
    };
    BlockManager::new(&windows.iter().map(group).collect::<Vec<_>>(), 64)
}

/// The hash before the first blocks.
const ROOT: BlockHash = BlockHash([1; 16]);

/// Admits a sequence with what the pools hold.
fn admit(manager: &mut BlockManager, rows: &[Row], changes: &mut Changes) -> Admission {
    manager.admit(ROOT, rows, |_| false, changes)
}

/// Returns `count` tokens of a text.
fn text(number: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|position| 1000 * number + position).collect()
}

/// Returns the rows of a prompt of `count` tokens of a text.
fn rows(number: u32, count: usize) -> Vec<Row> {
    Row::of_prompt(&text(number, count))
}

/// Reserves room for tokens and commits them.
fn add(manager: &mut BlockManager, id: SequenceId, tokens: &[u32], kind: RowKind) -> Changes {
    let mut changes = Changes::default();
    let upto = manager.len(id) + tokens.len();
    manager.reserve(id, upto, &mut changes).unwrap();
    manager.commit(id, tokens, kind, &mut changes);
    changes
}

/// Admits a prompt and computes all of it in one pass. Returns the sequence and the hit in tokens.
fn read(manager: &mut BlockManager, prompt: &[u32]) -> (SequenceId, usize) {
    let admission = admit(manager, &Row::of_prompt(prompt), &mut Changes::default());
    add(manager, admission.sequence, &prompt[admission.hit_rows..], RowKind::Prompt);
    (admission.sequence, admission.hit_rows)
}

fn cached(manager: &BlockManager) -> Vec<usize> {
    manager.group_statistics().map(|group| group.cached).collect()
}

#[test]
fn the_last_token_of_a_prompt_is_never_a_hit() {
    let mut manager = manager(&[None], 10);
    read(&mut manager, &text(0, 32));
    let mut hit = |prompt: &[u32]| read(&mut manager, prompt).1;
    assert_eq!((hit(&text(0, 32)), hit(&text(0, 33)), hit(&text(0, 16))), (16, 32, 0));
    assert_eq!((hit(&[]), hit(&text(1, 33))), (0, 0));
}

#[test]
fn generated_rows_are_no_hit_for_prompts() {
    let mut manager = manager(&[None], 10);
    let (id, _) = read(&mut manager, &text(0, 16));
    add(&mut manager, id, &text(0, 33)[16..], RowKind::Decode);
    assert_eq!(read(&mut manager, &text(0, 40)).1, 16);
}

#[test]
fn a_fork_copies_the_last_block_when_it_writes() {
    let mut manager = manager(&[None], 10);
    let (parent, _) = read(&mut manager, &text(0, 20));
    let mut changes = Changes::default();
    let child = manager.fork(parent, &mut changes);
    assert_eq!(changes.entries.len(), 2);
    let last = manager.table(parent, 0)[1];
    let changes = add(&mut manager, child, &[1], RowKind::Decode);
    let to = manager.table(child, 0)[1];
    assert_eq!(changes.copies, [BlockCopy { group: 0, from: last, to }]);
    assert_ne!(to, last);
    // The parent is now alone with its block.
    assert_eq!(add(&mut manager, parent, &[2], RowKind::Decode), Changes::default());
    assert_eq!(manager.table(parent, 0)[0], manager.table(child, 0)[0]);
}

#[test]
#[should_panic(expected = "was not reserved")]
fn a_fork_after_a_reservation_makes_the_reservation_void() {
    let mut manager = manager(&[None], 10);
    let (parent, _) = read(&mut manager, &text(0, 20));
    let mut changes = Changes::default();
    manager.reserve(parent, 21, &mut changes).unwrap();
    manager.fork(parent, &mut changes);
    manager.commit(parent, &[1], RowKind::Decode, &mut changes);
}

#[test]
fn a_full_block_survives_a_truncation_into_it() {
    let mut manager = manager(&[None], 10);
    let (id, _) = read(&mut manager, &text(0, 33));
    assert_eq!(manager.truncate(id, 20, &mut Changes::default()), 20);
    let changes = add(&mut manager, id, &[7], RowKind::Decode);
    assert_eq!(changes.copies.len(), 1);
    assert_eq!(cached(&manager), [1]);
    assert_eq!(admit(&mut manager, &rows(0, 33), &mut Changes::default()).hit_rows, 32);
}

#[test]
fn a_full_block_is_written_in_place_if_there_is_no_block_for_a_copy() {
    let mut manager = manager(&[None, Some(4)], 2);
    let (id, _) = read(&mut manager, &text(0, 32));
    assert_eq!(manager.truncate(id, 30, &mut Changes::default()), 30);
    let before = manager.table(id, 0).to_vec();
    let changes = add(&mut manager, id, &[7, 8], RowKind::Decode);
    assert_eq!(changes.copies, []);
    assert_eq!(manager.table(id, 0), before);
    manager.release(id);
    assert_eq!(admit(&mut manager, &rows(0, 33), &mut Changes::default()).hit_rows, 16);
}

#[test]
fn equal_blocks_are_kept_once_after_their_sequences_end() {
    let mut manager = manager(&[None], 10);
    let prompt = text(0, 32);
    // Both begin before either has computed anything.
    let ids = [0, 1]
        .map(|_| admit(&mut manager, &Row::of_prompt(&prompt), &mut Changes::default()).sequence);
    for id in ids {
        let changes = add(&mut manager, id, &prompt, RowKind::Prompt);
        assert_eq!(changes.entries.len(), 2, "a commit replaces no entry");
    }
    assert_eq!(manager.free_blocks().next(), Some(6));
    manager.release(ids[0]);
    assert_eq!((cached(&manager), manager.free_blocks().next()), (vec![0], Some(8)));
    assert_eq!(read(&mut manager, &text(0, 33)).1, 32);
    manager.release(ids[1]);
    assert_eq!(cached(&manager), [0]);
}

#[test]
fn eviction_takes_ends_first_and_spares_what_was_used_last() {
    let mut manager = manager(&[None], 6);
    for number in [0, 1, 0] {
        let (id, _) = read(&mut manager, &text(number, 48));
        manager.release(id);
    }
    assert_eq!(cached(&manager), [6]);
    let (id, _) = read(&mut manager, &text(2, 32));
    let mut hit = |number| {
        let admission = admit(&mut manager, &rows(number, 100), &mut Changes::default());
        manager.release(admission.sequence);
        admission.hit_rows
    };
    assert_eq!((hit(0), hit(1), hit(2)), (48, 16, 32));
    manager.release(id);
    // The third prompt computes its last block again, because its last token is in it.
    assert_eq!(manager.group_statistics().next().unwrap().evictions_total, 3);
}

#[test]
fn blocks_that_have_a_copy_go_first_for_a_while() {
    for turns in [1, 60] {
        let mut manager = manager(&[None], 6);
        for number in [0, 1] {
            let (id, _) = read(&mut manager, &text(number, 32));
            manager.release(id);
        }
        let (mut restored, mut changes) = (Vec::new(), Changes::default());
        let rows_of_3 = rows(3, 32);
        for _ in 0..turns {
            let id = manager.restore(ROOT, &rows_of_3, &mut restored, &mut changes).unwrap();
            manager.release(id);
        }
        // The first time, two blocks are copied to the pool. Then they are there.
        assert_eq!((restored.len(), cached(&manager)), (2, vec![6]));
        let (id, _) = read(&mut manager, &text(4, 32));
        let mut hit = |number| {
            let admission = admit(&mut manager, &rows(number, 100), &mut Changes::default());
            manager.release(admission.sequence);
            admission.hit_rows
        };
        let hits = [0, 1, 3].map(&mut hit);
        assert_eq!(hits, if turns == 1 { [32, 32, 0] } else { [0, 32, 32] }, "{turns} turns");
        manager.release(id);
    }
}

#[test]
fn a_reservation_is_made_in_all_groups_or_in_none() {
    let groups = [(None, 10), (Some(100), 3)].map(|(window, blocks)| GroupConfig {
        window,
        blocks,
        on_device: blocks,
        block_bytes: 1,
    });
    let mut manager = BlockManager::new(&groups, 64);
    let id = admit(&mut manager, &rows(0, 40), &mut Changes::default()).sequence;
    let mut changes = Changes::default();
    let error = manager.reserve(id, 33, &mut changes).unwrap_err();
    assert_eq!(error, OutOfBlocks { group: 1, needed: 3, available: 2 });
    assert_eq!(error.to_string(), "layer group 1 needs 3 KV blocks and has 2");
    assert_eq!(changes, Changes::default());
    assert_eq!(manager.free_blocks().collect::<Vec<_>>(), [9, 2]);
    manager.reserve(id, 32, &mut changes).unwrap();
    assert_eq!(manager.free_blocks().collect::<Vec<_>>(), [7, 0]);
}

#[test]
fn blocks_outside_the_window_are_dropped_and_stay_cached() {
    let mut manager = manager(&[None, Some(17)], 10);
    let (id, _) = read(&mut manager, &text(0, 31));
    // A token at 31 sees 15 to 31, one at 32 sees 16 to 32.
    assert_eq!(manager.blocks_held(id).collect::<Vec<_>>(), [2, 2]);
    let changes = add(&mut manager, id, &[1], RowKind::Decode);
    let entry = changes.entries[0];
    assert_eq!((entry.group, entry.index, entry.block), (1, 0, BlockId::NULL));
    assert_eq!(changes.entries.len(), 1);
    assert_eq!(manager.blocks_held(id).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(cached(&manager), [0, 1]);
    assert_eq!(manager.blocks_needed(1000, 100).collect::<Vec<_>>(), [69, 6]);
}

#[test]
fn truncation_uses_cached_blocks_and_goes_back_without_them() {
    let (prompt, mut changes) = (text(0, 96), Changes::default());
    let groups = [(None, 13), (Some(16), 8)].map(|(window, blocks)| GroupConfig {
        window,
        blocks,
        on_device: blocks,
        block_bytes: 1,
    });
    let mut manager = BlockManager::new(&groups, 96);
    let (id, _) = read(&mut manager, &prompt);
    assert_eq!(manager.blocks_held(id).collect::<Vec<_>>(), [6, 1]);
    // A token at 50 sees 35 to 50.
    assert_eq!(manager.truncate(id, 50, &mut changes), 50);
    let restored = changes.entries.iter().filter(|entry| entry.block != BlockId::NULL);
    assert_eq!(
        restored.map(|entry| (entry.group, entry.index)).collect::<Vec<_>>(),
        [(1, 2), (1, 3)]
    );
    add(&mut manager, id, &prompt[50..], RowKind::Prompt);
    // Another sequence needs all other blocks of the second group.
    read(&mut manager, &text(1, 90));
    assert_eq!(manager.truncate(id, 50, &mut changes), 0);
    assert_eq!(manager.len(id), 0);
}

#[test]
fn a_restored_sequence_copies_only_what_was_evicted() {
    let (mut restored, mut changes) = (Vec::new(), Changes::default());
    let mut manager = manager(&[None], 4);
    let (id, _) = read(&mut manager, &text(0, 40));
    let table = manager.table(id, 0).to_vec();
    let saved: Vec<_> = manager.blocks_to_save(id).map(|block| block.block).collect();
    assert_eq!(saved, table);
    let rows = manager.rows(id).to_vec();
    manager.release(id);
    assert_eq!(manager.free_blocks().next(), Some(4));

    let (other, _) = read(&mut manager, &text(1, 33));
    let error = manager.restore(ROOT, &rows, &mut restored, &mut changes).unwrap_err();
    assert_eq!((error.needed, error.available), (3, 1));
    manager.release(other);
    let id = manager.restore(ROOT, &rows, &mut restored, &mut changes).unwrap();
    assert_eq!(restored.iter().map(|block| block.index).collect::<Vec<_>>(), [1, 2]);
    assert_eq!((manager.len(id), manager.table(id, 0).len()), (40, 3));
    // The restored blocks can be found again.
    assert_eq!(admit(&mut manager, &rows, &mut changes).hit_rows, 32);
}

#[test]
fn generated_rows_are_hits_for_the_same_generated_rows() {
    let mut manager = manager(&[None], 10);
    let (id, _) = read(&mut manager, &text(0, 20));
    add(&mut manager, id, &text(0, 50)[20..], RowKind::Decode);
    let rows = manager.rows(id).to_vec();
    assert_eq!(admit(&mut manager, &rows, &mut Changes::default()).hit_rows, 48);
}

#[test]
#[should_panic(expected = "is released")]
fn ids_of_released_sequences_are_not_valid() {
    let mut manager = manager(&[None], 4);
    let (id, _) = read(&mut manager, &text(0, 40));
    manager.release(id);
    let (next, _) = read(&mut manager, &text(0, 40));
    assert_eq!((next.slot(), next == id), (id.slot(), false));
    manager.len(id);
}

#[test]
fn the_size_of_blocks_is_known() {
    assert_eq!(manager(&[None], 4).block_bytes(0), 4096);
    assert_eq!(KV_BLOCK, 16);
}
