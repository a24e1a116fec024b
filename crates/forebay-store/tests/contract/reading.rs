//! Tests that the right bytes arrive, whatever the extents look like.

use std::collections::HashMap;
use std::io::Write as _;

use forebay_store::{
    Arena, BlockLabel, BlockLayout, BlockRead, EngineOptions, Extent, FaultPlan, FileSet, IoKind,
    Priority, ReadError, StoreError, open_engine,
};

use crate::support::{Bench, Kind, Noise, extent, kinds, small_requests};

fn check_all(sizes: &[usize], blocks: &[Vec<Extent>]) {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), sizes);
        for (id, extents) in blocks.iter().enumerate() {
            bench.submit(id as u64, Priority::Demand, extents);
        }
        let done = bench.finish();
        assert_eq!(done.len(), blocks.len(), "{kind:?}");
        for completion in &done {
            bench.verify(completion, &blocks[completion.id as usize]);
        }
    }
}

#[test]
fn unaligned_extents_of_several_files() {
    check_all(
        &[300_000, 70_001],
        &[
            vec![extent(0, 1, 1)],
            vec![extent(0, 12_345, 100_003), extent(1, 777, 50_000), extent(0, 200_000, 31)],
            vec![extent(1, 0, 70_001)],
            vec![extent(0, 511, 2), extent(0, 4095, 2)],
            vec![extent(0, 5000, 0), extent(0, 6000, 10)],
            vec![extent(0, 100, 1000), extent(0, 500, 1000)],
            vec![],
        ],
    );
}

#[test]
fn the_last_bytes_of_files_of_any_length() {
    let sizes = [1, 511, 512, 513, 4095, 4096, 4097, 16 << 10, (16 << 10) + 1, 100_000];
    let whole = |(file, &bytes): (usize, &usize)| vec![extent(file as u32, 0, bytes as u64)];
    let last = |(file, &bytes): (usize, &usize)| vec![extent(file as u32, bytes as u64 - 1, 1)];
    let blocks: Vec<_> = sizes.iter().enumerate().map(whole).collect();
    check_all(&sizes, &blocks);
    let blocks: Vec<_> = sizes.iter().enumerate().map(last).collect();
    check_all(&sizes, &blocks);
}

#[test]
fn adjacent_extents_cost_one_request() {
    for kind in kinds() {
        let options = EngineOptions { request_bytes: 1 << 20, ..small_requests() };
        let mut bench = Bench::new(kind, options, FaultPlan::default(), &[100_000]);
        let extents = [extent(0, 20_000, 10_000), extent(0, 1000, 19_000), extent(0, 30_000, 500)];
        bench.submit(1, Priority::Demand, &extents);
        let done = bench.finish_one();
        bench.verify(&done, &extents);
        assert_eq!(done.result.unwrap().requests, 1, "{kind:?}");
    }
}

/// Reads thousands of random blocks, many of them in flight at a time, into reused slots.
fn random_reads(kind: Kind, faults: FaultPlan, reads: u64) {
    const SLOT: usize = 200 << 10;
    let sizes = [3_000_000, 1_234_567, 4096];
    let options = EngineOptions { retries: 20, ..small_requests() };
    let mut bench = Bench::new(kind, options, faults, &sizes);
    let mut noise = Noise(99);
    let mut free: Vec<_> = (0..24).map(|_| bench.arena.carve(SLOT).unwrap()).collect();
    let mut waiting: HashMap<u64, Vec<Extent>> = HashMap::new();
    let mut done = Vec::new();
    let mut wanted_bytes = 0;
    for id in 0..reads {
        let extents: Vec<Extent> = (0..1 + noise.below(3))
            .map(|_| {
                let file = noise.below(3) as usize;
                let length = noise.below(60_000.min(sizes[file] as u64));
                extent(file as u32, noise.below(sizes[file] as u64 - length), length)
            })
            .collect();
        wanted_bytes += extents.iter().map(|extent| extent.length).sum::<u64>();
        while free.is_empty() {
            bench.engine.wait(&mut done).unwrap();
            for completion in done.drain(..) {
                bench.verify(&completion, &waiting.remove(&completion.id).unwrap());
                free.push(completion.buffer.unwrap());
            }
        }
        let priority =
            [Priority::Demand, Priority::ReadAhead, Priority::Load][noise.below(3) as usize];
        let (layout, buffer) = (bench.layout(&extents), free.pop().unwrap());
        let label = BlockLabel::Other(id);
        bench.engine.submit(BlockRead { id, label, layout, buffer, priority });
        waiting.insert(id, extents);
        if noise.below(4) == 0 {
            bench.engine.poll(&mut done).unwrap();
        }
    }
    for completion in done.drain(..).chain(bench.finish()) {
        bench.verify(&completion, &waiting.remove(&completion.id).unwrap());
    }
    assert!(waiting.is_empty());
    let statistics = bench.engine.io_statistics();
    assert_eq!(statistics.bytes_requested, wanted_bytes);
    assert!(statistics.bytes_read > wanted_bytes && statistics.busy_seconds > 0.0);
}

#[test]
fn thousands_of_random_reads() {
    for kind in kinds() {
        random_reads(kind, FaultPlan::default(), 3000);
    }
}

#[test]
fn thousands_of_random_reads_from_a_bad_disk() {
    for kind in kinds() {
        let faults = FaultPlan { random_one_in: 5, seed: 7, ..FaultPlan::default() };
        random_reads(kind, faults, 1500);
    }
}

/// An outage lasts for more requests than a read has retries, and then ends. So reads fail during
/// it and succeed after it.
#[test]
fn outages_outlast_retries_and_end() {
    for kind in kinds() {
        let faults = FaultPlan { outage_one_in: 40, seed: 5, ..FaultPlan::default() };
        let mut bench = Bench::new(kind, small_requests(), faults, &[200_000]);
        let extents = [extent(0, 3, 10_000)];
        let (mut failed, mut right) = (0, 0);
        for id in 0..200 {
            bench.submit(id, Priority::Demand, &extents);
            let done = bench.finish_one();
            match &done.result {
                Err(ReadError::Io { .. }) => failed += 1,
                _ => {
                    bench.verify(&done, &extents);
                    right += 1;
                }
            }
        }
        assert!(failed > 0 && right > failed, "{kind:?}: {failed} failed, {right} right");
    }
}

#[test]
fn cached_reads_give_the_same_bytes() {
    for kind in kinds() {
        let options = EngineOptions { direct: false, ..small_requests() };
        let mut bench = Bench::new(kind, options, FaultPlan::default(), &[200_000]);
        let extents = [extent(0, 3, 150_000), extent(0, 180_000, 20_000)];
        bench.submit(1, Priority::Demand, &extents);
        let done = bench.finish_one();
        bench.verify(&done, &extents);
        let info = bench.engine.describe();
        assert!(!info.direct && !info.why.is_empty(), "{info:?}");
    }
}

#[test]
fn files_without_direct_reads_are_read_cached_and_that_is_said() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        // Past the capture of the test harness, which hides what passing tests print.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: reading from tmpfs: /dev/shm is not writable here"
        );
        return;
    };
    let path = folder.path().join("weights");
    std::fs::write(&path, vec![9; 10_000]).unwrap();
    let files = FileSet::open(&[&path]).unwrap();
    let arena = forebay_store::Arena::reserve(1 << 20).unwrap();
    let engine = open_engine(IoKind::Auto, &files, &arena, &EngineOptions::default()).unwrap();
    let info = engine.describe();
    assert!(!info.direct && info.why.contains("weights"), "{info:?}");
}

#[test]
fn reads_that_cannot_succeed_are_refused_with_their_buffer() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[50_000]);
        let mut read = |id: u64, extents: &[Extent], alignment: usize, bytes: usize| {
            let layout = BlockLayout::plan(extents, alignment);
            let buffer = bench.arena.carve(bytes).unwrap();
            let label = BlockLabel::Dense(1);
            let priority = Priority::Demand;
            bench.engine.submit(BlockRead { id, label, layout, buffer, priority });
        };
        read(0, &[extent(0, 49_999, 2)], 4096, 8192);
        read(1, &[extent(3, 0, 2)], 4096, 8192);
        read(2, &[extent(0, 0, 40_000)], 4096, 4096);
        read(3, &[extent(0, u64::MAX - 1, 4)], 4096, 8192);
        let done = bench.finish();
        assert!(done.iter().all(|completion| completion.buffer.is_some()));
        let errors: Vec<ReadError> = done.into_iter().map(|c| c.result.unwrap_err()).collect();
        assert!(matches!(errors[0], ReadError::UnexpectedEnd { file_end: 50_000, .. }));
        assert!(matches!(errors[1], ReadError::UnknownFile { index: 3, .. }));
        assert!(matches!(errors[2], ReadError::SlotTooSmall { given_bytes: 4096, .. }));
        assert!(matches!(errors[3], ReadError::UnexpectedEnd { .. }));
        assert_eq!(bench.engine.in_flight(), 0);
    }
}

#[test]
fn a_layout_for_another_alignment_is_refused() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[50_000]);
        if !bench.engine.describe().direct {
            // Past the capture of the test harness, which hides what passing tests print.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: alignment of {kind:?}: no direct reads in the temporary folder"
            );
            continue;
        }
        let layout = BlockLayout::plan(&[extent(0, 100, 50)], 1);
        let buffer = bench.arena.carve(4096).unwrap();
        let (label, priority) = (BlockLabel::Dense(1), Priority::Demand);
        bench.engine.submit(BlockRead { id: 1, label, layout, buffer, priority });
        let error = bench.finish_one().result.unwrap_err();
        assert!(matches!(error, ReadError::Misaligned { planned: 1, .. }), "{error}");
    }
}

#[test]
fn engines_of_the_disk_refuse_files_in_memory() {
    let files = FileSet::in_memory(vec![vec![0; 100]]);
    let arena = Arena::reserve(4096).unwrap();
    for kind in [IoKind::Auto, IoKind::Uring, IoKind::Pread, IoKind::Mmap] {
        let refused = open_engine(kind, &files, &arena, &EngineOptions::default()).err();
        assert!(matches!(refused, Some(StoreError::Unavailable { .. })), "{kind:?}");
    }
}
