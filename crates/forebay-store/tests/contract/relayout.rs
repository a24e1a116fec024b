//! Tests of blocks whose layout is converted after they have arrived.

use forebay_store::{
    Block, BlockLabel, BlockLayout, BlockRead, Completion, EngineOptions, FaultKind, FaultPlan,
    FileIndex, Priority, ReadError, Step,
};

use super::support::{Bench, extent, kinds, small_requests};

const BLOCKS: u64 = 6;
const ROWS: usize = 1000;
const ROW_BLOCKS: usize = 40;
/// Bytes of the elements and of the scales of one block. They make several shares for the threads.
const LENGTHS: [u64; 2] = [16 * (ROWS * ROW_BLOCKS) as u64, (ROWS * ROW_BLOCKS) as u64];
const BYTES: u64 = LENGTHS[0] + LENGTHS[1];

fn block(number: u64) -> Block {
    let at = 100 + number * LENGTHS[0];
    let scales = 100 + BLOCKS * LENGTHS[0] + number * LENGTHS[1];
    let step = Step::Mxfp4 { blocks: 0, scales: 1, rows: ROWS, row_blocks: ROW_BLOCKS, turns: 2 };
    let mut block = Block::default();
    block.push_relayout(&[extent(0, at, LENGTHS[0]), extent(0, scales, LENGTHS[1])], vec![step]);
    block
}

fn options(relayout_bytes: u64) -> EngineOptions {
    EngineOptions { relayout_bytes: relayout_bytes as usize, retries: 1, ..small_requests() }
}

fn layout(bench: &Bench, number: u64) -> BlockLayout {
    BlockLayout::plan_block(&block(number), bench.files.alignment())
}

fn submit_all(bench: &mut Bench) {
    for id in 0..BLOCKS {
        let layout = layout(bench, id);
        let buffer = bench.arena.carve(layout.slot_bytes).unwrap();
        let (label, priority) = (BlockLabel::Other(id), Priority::Demand);
        bench.engine.submit(BlockRead { id, label, layout, buffer, priority });
    }
}

/// Checks that the parts in the slot are what the block's relayout makes of the file.
fn verify(bench: &Bench, done: &Completion) {
    let block = block(done.id);
    let read = |index: usize| {
        let extent = block.extents[index];
        &bench.images[0][extent.offset as usize..extent.end() as usize]
    };
    let (from, relayout) = ([read(0), read(1)], block.relayout.as_ref().unwrap());
    let mut expected = vec![0; relayout.bytes()];
    for share in relayout.shares(usize::MAX) {
        relayout.make(&share, &from, &mut expected[share.out.clone()]);
    }
    let slot = done.buffer.as_ref().unwrap().as_slice();
    let held = layout(bench, done.id).held;
    assert_eq!(held.len(), 2);
    let found: Vec<&[u8]> = held.iter().map(|range| &slot[range.clone()]).collect();
    assert!(found.concat() == expected, "block {}", done.id);
}

#[test]
fn blocks_that_arrive_together_share_one_relayout_buffer() {
    for kind in kinds() {
        let faults = FaultPlan::once(FileIndex(0), 500_000..900_000, FaultKind::Short(4096));
        let mut bench =
            Bench::new(kind, options(BYTES), faults, &[100 + (BLOCKS * BYTES) as usize]);
        submit_all(&mut bench);
        let done = bench.finish();
        assert_eq!(done.len() as u64, BLOCKS);
        for completion in &done {
            completion.result.as_ref().unwrap();
            verify(&bench, completion);
        }
        assert_eq!(bench.engine.io_statistics().bytes_relaid_out, BLOCKS * BYTES, "{kind:?}");
    }
}

#[test]
fn a_failed_read_skips_its_relayout_and_delays_no_other_block() {
    for kind in kinds() {
        let bad = block(2).extents[1].offset;
        let faults = FaultPlan::always(FileIndex(0), bad + 9..bad + 10, FaultKind::Error(5));
        let mut bench =
            Bench::new(kind, options(BYTES), faults, &[100 + (BLOCKS * BYTES) as usize]);
        submit_all(&mut bench);
        let mut failed = Vec::new();
        for done in bench.finish() {
            match done.result {
                Ok(_) => verify(&bench, &done),
                Err(_) => failed.push(done.id),
            }
        }
        // The aligned read of block 1 may also cover the bad byte, because block 2's scales follow.
        assert!(failed.contains(&2) && failed.iter().all(|id| [1, 2].contains(id)), "{failed:?}");
        let relayout = BLOCKS - failed.len() as u64;
        assert_eq!(bench.engine.io_statistics().bytes_relaid_out, relayout * BYTES, "{kind:?}");
    }
}

#[test]
fn an_engine_without_a_relayout_buffer_refuses_relayouts() {
    for kind in kinds() {
        let image = 100 + (BLOCKS * BYTES) as usize;
        let mut bench = Bench::new(kind, options(BYTES - 1), FaultPlan::default(), &[image]);
        submit_all(&mut bench);
        for done in bench.finish() {
            let error = done.result.unwrap_err();
            assert!(matches!(error, ReadError::ScratchTooSmall { .. }), "{error}");
        }
    }
}

#[test]
fn an_engine_may_be_dropped_during_a_relayout() {
    for kind in kinds() {
        let image = 100 + (BLOCKS * BYTES) as usize;
        let mut bench = Bench::new(kind, options(BYTES), FaultPlan::default(), &[image]);
        submit_all(&mut bench);
        let mut done = Vec::new();
        bench.engine.wait(&mut done).unwrap();
        drop(bench);
        assert!(done[0].result.is_ok());
    }
}
