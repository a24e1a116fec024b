//! Tests of the order of requests, and of reads that are cancelled or dropped.

use std::time::{Duration, Instant};

use forebay_store::{
    BlockLabel, BlockLayout, BlockRead, DiskModel, EngineOptions, FaultKind, FaultPlan, FileIndex,
    Priority, ReadError, StoreError, VirtualClock, open_simulated_engine,
};

use crate::support::{Bench, Kind, extent, kinds, small_requests, stalling_after};

/// Opens an engine with a queue depth of one. The first request takes long enough for all others to
/// queue up.
fn one_at_a_time(kind: Kind) -> Bench {
    let options = EngineOptions { queue_depth: 1, ..small_requests() };
    let late = FaultKind::Delay(Duration::from_millis(50));
    Bench::new(kind, options, FaultPlan::once(FileIndex(0), 0..1, late), &[100_000])
}

#[test]
fn demand_passes_read_ahead_passes_load() {
    for kind in kinds() {
        let mut bench = one_at_a_time(kind);
        bench.submit(0, Priority::Load, &[extent(0, 0, 10)]);
        let priorities = [Priority::Load, Priority::ReadAhead, Priority::Demand];
        for id in 1..10 {
            let priority = priorities[id as usize % 3];
            bench.submit(id, priority, &[extent(0, id * 5000, 5000)]);
        }
        let order: Vec<u64> = bench.finish().iter().map(|completion| completion.id).collect();
        assert_eq!(order, [0, 2, 5, 8, 1, 4, 7, 3, 6, 9], "{kind:?}");
    }
}

#[test]
fn prefetches_overtake_loads_but_wait_for_demand_reads() {
    for kind in kinds() {
        let mut bench = one_at_a_time(kind);
        bench.submit(0, Priority::Load, &[extent(0, 0, 10)]);
        for (id, priority) in
            [(1, Priority::Load), (2, Priority::Prefetch), (3, Priority::ReadAhead)]
        {
            bench.submit(id, priority, &[extent(0, id * 5000, 5000)]);
        }
        let order: Vec<u64> = bench.finish().iter().map(|completion| completion.id).collect();
        assert_eq!(order, [0, 3, 2, 1], "{kind:?}");

        let late = FaultKind::Delay(Duration::from_millis(50));
        let faults = FaultPlan::once(FileIndex(0), 0..1, late);
        let options = EngineOptions { queue_depth: 8, ..small_requests() };
        let mut bench = Bench::new(kind, options, faults, &[100_000]);
        bench.submit(0, Priority::Demand, &[extent(0, 0, 10)]);
        bench.submit(1, Priority::Prefetch, &[extent(0, 20_000, 5000)]);
        bench.submit(2, Priority::ReadAhead, &[extent(0, 40_000, 5000)]);
        let order: Vec<u64> = bench.finish().iter().map(|completion| completion.id).collect();
        assert_eq!(order, [2, 0, 1], "{kind:?}");
    }
}

#[test]
fn what_is_queued_begins_with_the_next_poll() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[100_000]);
        bench.queue(0, Priority::Demand, &[extent(0, 10, 5000)]);
        bench.queue(1, Priority::Load, &[extent(0, 9000, 5000)]);
        assert_eq!(bench.engine.in_flight(), 2, "{kind:?}");
        assert_eq!(bench.engine.io_statistics().requests, 0, "{kind:?}");
        let mut done = Vec::new();
        bench.engine.poll(&mut done).unwrap();
        assert!(bench.engine.io_statistics().requests >= 2, "{kind:?}");
        while bench.engine.in_flight() > 0 {
            bench.engine.wait(&mut done).unwrap();
        }
        done.sort_by_key(|completion| completion.id);
        bench.verify(&done[0], &[extent(0, 10, 5000)]);
        bench.verify(&done[1], &[extent(0, 9000, 5000)]);
    }
}

#[test]
fn a_promoted_read_goes_first() {
    for kind in kinds() {
        let mut bench = one_at_a_time(kind);
        bench.submit(0, Priority::Load, &[extent(0, 0, 10)]);
        for id in 1..5 {
            bench.submit(id, Priority::ReadAhead, &[extent(0, id * 5000, 5000)]);
        }
        bench.engine.promote(3);
        bench.engine.promote(77);
        let order: Vec<u64> = bench.finish().iter().map(|completion| completion.id).collect();
        assert_eq!(order, [0, 3, 1, 2, 4], "{kind:?}");
    }
}

#[test]
fn read_ahead_leaves_places_for_demand() {
    for kind in kinds() {
        let options = EngineOptions { queue_depth: 4, background_depth: 2, ..stalling_after(300) };
        let faults = FaultPlan::always(FileIndex(0), 0..50_000, FaultKind::Never);
        let mut bench = Bench::new(kind, options, faults, &[100_000]);
        for id in 0..4 {
            bench.submit(id, Priority::ReadAhead, &[extent(0, id * 5000, 100)]);
        }
        bench.submit(9, Priority::Demand, &[extent(0, 60_000, 30_000)]);
        let mut done = Vec::new();
        bench.engine.wait(&mut done).unwrap();
        assert_eq!(done[0].id, 9, "{kind:?}");
        bench.verify(&done[0], &[extent(0, 60_000, 30_000)]);
    }
}

#[test]
fn a_demand_read_waits_a_bounded_time_behind_read_ahead() {
    let files = forebay_store::FileSet::in_memory(vec![vec![1; 64 << 20]]);
    let arena = forebay_store::Arena::reserve(66 << 20).unwrap();
    let options = EngineOptions { background_depth: 8, ..EngineOptions::default() };
    let clock = VirtualClock::default();
    let model = DiskModel { bytes_per_second: 1e9, ..DiskModel::default() };
    let mut engine =
        open_simulated_engine(&files, &options, model, &clock, FaultPlan::default()).unwrap();
    let mut submit = |id, priority, offset, length| {
        let layout = BlockLayout::plan(&[extent(0, offset, length)], 512);
        let buffer = arena.carve(layout.slot_bytes).unwrap();
        let label = BlockLabel::Other(id);
        engine.submit(BlockRead { id, label, layout, buffer, priority });
    };
    submit(1, Priority::ReadAhead, 0, 60 << 20);
    submit(2, Priority::Demand, 62 << 20, 1 << 20);
    let mut done = Vec::new();
    engine.wait(&mut done).unwrap();
    assert_eq!(done[0].id, 2);
    // It waits for 8 requests of 512 KiB and its own 1 MiB. At 1 GB/s this takes 5.2 ms, not the 64
    // ms of the whole read-ahead.
    assert!(clock.now() < Duration::from_millis(6), "{:?}", clock.now());
}

#[test]
fn cancelling_drops_what_has_not_begun() {
    for kind in kinds() {
        let mut bench = one_at_a_time(kind);
        bench.submit(0, Priority::Demand, &[extent(0, 0, 10)]);
        bench.submit(1, Priority::ReadAhead, &[extent(0, 5000, 60_000)]);
        bench.submit(2, Priority::ReadAhead, &[extent(0, 70_000, 100)]);
        bench.engine.cancel(1);
        bench.engine.cancel(12345);
        let mut done = Vec::new();
        bench.engine.poll(&mut done).unwrap();
        assert_eq!(done.len(), 1, "{kind:?}: the slot comes back at once");
        let cancelled = done.pop().unwrap();
        assert_eq!((cancelled.id, cancelled.buffer.is_some()), (1, true));
        assert!(matches!(cancelled.result, Err(ReadError::Cancelled { .. })));

        bench.engine.cancel(0);
        let done = bench.finish();
        let order: Vec<u64> = done.iter().map(|completion| completion.id).collect();
        assert_eq!(order, [0, 2], "{kind:?}");
        bench.verify(&done[0], &[extent(0, 0, 10)]);
    }
}

#[test]
fn cancelling_in_the_middle_waits_for_what_has_begun() {
    for kind in kinds() {
        let mut bench = one_at_a_time(kind);
        bench.submit(0, Priority::Demand, &[extent(0, 0, 60_000)]);
        bench.engine.cancel(0);
        let done = bench.finish_one();
        assert!(matches!(done.result, Err(ReadError::Cancelled { .. })), "{kind:?}");
        assert!(done.buffer.is_some());
        assert_eq!(bench.engine.io_statistics().requests, 1);
    }
}

#[test]
fn waiting_for_nothing_returns() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[1000]);
        let mut done = Vec::new();
        bench.engine.wait(&mut done).unwrap();
        bench.engine.poll(&mut done).unwrap();
        assert!(done.is_empty());
    }
}

#[test]
fn dropping_an_engine_waits_for_the_disk() {
    for kind in kinds() {
        for _ in 0..20 {
            let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[1_000_000]);
            for id in 0..10 {
                bench.submit(id, Priority::Demand, &[extent(0, id * 77_777, 200_000)]);
            }
            drop(bench.engine);
            // The memory belongs to the caller again, so the disk must no longer write to it.
            let rest = bench.arena.bytes() - bench.arena.used_bytes();
            let mut slot = bench.arena.carve(rest).unwrap();
            slot.as_mut_slice().fill(3);
            assert!(slot.as_slice().iter().all(|&byte| byte == 3));
        }
    }
}

#[test]
fn dropping_an_engine_with_a_stalled_read_does_not_hang() {
    for kind in kinds() {
        let faults = FaultPlan::always(FileIndex(0), 0..1000, FaultKind::Never);
        let mut bench = Bench::new(kind, stalling_after(100), faults, &[100_000]);
        bench.submit(1, Priority::Demand, &[extent(0, 0, 90_000)]);
        let started = Instant::now();
        drop(bench.engine);
        assert!(started.elapsed() < Duration::from_secs(60));
    }
}

#[test]
fn an_idle_engine_may_move_to_another_thread() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[100_000]);
        for round in 0..3 {
            bench = std::thread::spawn(move || {
                bench.submit(round, Priority::Demand, &[extent(0, 5, 90_000)]);
                let done = bench.finish_one();
                bench.verify(&done, &[extent(0, 5, 90_000)]);
                bench
            })
            .join()
            .unwrap();
        }
    }
}

#[test]
fn a_busy_engine_may_be_dropped_on_another_thread() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, stalling_after(500), FaultPlan::default(), &[1_000_000]);
        for id in 0..10 {
            bench.submit(id, Priority::Demand, &[extent(0, id * 77_777, 200_000)]);
        }
        std::thread::spawn(move || drop(bench)).join().unwrap();
    }
}

#[test]
fn options_that_make_no_sense_are_errors() {
    let files = forebay_store::FileSet::in_memory(vec![vec![1; 10]]);
    let open = |options: EngineOptions| {
        let clock = VirtualClock::default();
        open_simulated_engine(&files, &options, DiskModel::default(), &clock, FaultPlan::default())
            .err()
    };
    let sound = EngineOptions::default();
    assert!(open(sound).is_none());
    for (name, options) in [
        ("queue_depth", EngineOptions { queue_depth: 0, ..sound }),
        ("background_depth", EngineOptions { background_depth: 0, ..sound }),
        ("request_bytes", EngineOptions { request_bytes: 5000, ..sound }),
        ("demand_request_bytes", EngineOptions { demand_request_bytes: 5000, ..sound }),
        ("threads", EngineOptions { threads: 100_000, ..sound }),
        ("stall_timeout", EngineOptions { stall_timeout: Duration::ZERO, ..sound }),
    ] {
        let error = open(options).unwrap();
        assert!(matches!(error, StoreError::Option { option, .. } if option == name), "{error}");
    }
}
