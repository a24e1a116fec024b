//! Tests of a failing disk: reads are retried, or fail with an error that says where. No read
//! returns wrong bytes.

use std::time::{Duration, Instant};

use forebay_store::{EngineOptions, Fault, FaultKind, FaultPlan, FileIndex, Priority, ReadError};

use crate::support::{Bench, Kind, extent, kinds, small_requests, stalling_after};

const EIO: i32 = 5;
const EINTR: i32 = 4;
const EAGAIN: i32 = 11;

#[test]
fn an_error_once_is_retried() {
    for errno in [EIO, EINTR, EAGAIN] {
        for kind in kinds() {
            let faults = FaultPlan::once(FileIndex(0), 40_000..40_001, FaultKind::Error(errno));
            let mut bench = Bench::new(kind, small_requests(), faults, &[100_000]);
            bench.submit(1, Priority::Demand, &[extent(0, 5, 90_000)]);
            let done = bench.finish_one();
            bench.verify(&done, &[extent(0, 5, 90_000)]);
            assert_eq!(bench.engine.io_statistics().retries, 1, "{kind:?} {errno}");
        }
    }
}

#[test]
fn an_error_that_stays_names_file_offset_and_block() {
    for kind in kinds() {
        let faults = FaultPlan::always(FileIndex(0), 40_000..40_001, FaultKind::Error(EIO));
        let options = EngineOptions { retries: 2, ..small_requests() };
        let mut bench = Bench::new(kind, options, faults, &[100_000]);
        bench.submit(1, Priority::Demand, &[extent(0, 5, 90_000)]);
        bench.submit(2, Priority::Demand, &[extent(0, 60_000, 30_000)]);
        let mut done = bench.finish();
        done.sort_by_key(|completion| completion.id);
        bench.verify(&done[1], &[extent(0, 60_000, 30_000)]);
        assert!(done[0].buffer.is_some());
        let error = done.swap_remove(0).result.unwrap_err();
        let ReadError::Io { offset, attempts: 3, .. } = &error else { panic!("{error}") };
        assert!(*offset <= 40_000 && *offset > 40_000 - (16 << 10));
        let text = error.to_string();
        let name = if kind == Kind::Simulated { "memory-0" } else { "weights-0" };
        for needed in [name, "expert 1 of layer 4", "3 attempts", &offset.to_string()] {
            assert!(text.contains(needed), "{needed} is missing: {text}");
        }
    }
}

#[test]
fn short_reads_are_continued() {
    for kind in kinds() {
        for given in [4096, 5000, 12_288, 16_383] {
            let faults = FaultPlan::always(FileIndex(0), 0..100_000, FaultKind::Short(given));
            let mut bench = Bench::new(kind, small_requests(), faults, &[100_000]);
            let extents = [extent(0, 700, 60_000), extent(0, 80_000, 20_000)];
            bench.submit(1, Priority::Demand, &extents);
            let done = bench.finish_one();
            bench.verify(&done, &extents);
            assert!(bench.engine.io_statistics().retries > 0, "{kind:?}");
        }
    }
}

#[test]
fn reads_that_give_nothing_end() {
    for kind in kinds() {
        for given in [0, 1] {
            let faults = FaultPlan::always(FileIndex(0), 0..100_000, FaultKind::Short(given));
            let mut bench = Bench::new(kind, small_requests(), faults, &[100_000]);
            bench.submit(1, Priority::Demand, &[extent(0, 700, 60_000)]);
            let error = bench.finish_one().result.unwrap_err();
            // A cached read can continue at any byte, so one byte per attempt is enough for it.
            if given == 0 || bench.engine.describe().direct {
                assert!(matches!(error, ReadError::UnexpectedEnd { .. }), "{error}");
            }
        }
    }
}

#[test]
fn a_file_that_shrinks_is_an_unexpected_end() {
    for kind in [Kind::Uring, Kind::Pread].into_iter().filter(|kind| kinds().contains(kind)) {
        for direct in [true, false] {
            let options = EngineOptions { direct, ..small_requests() };
            let mut bench = Bench::new(kind, options, FaultPlan::default(), &[100_000]);
            let path = bench.folder.path().join("weights-0");
            std::fs::File::options().write(true).open(path).unwrap().set_len(30_001).unwrap();
            bench.submit(1, Priority::Demand, &[extent(0, 0, 90_000)]);
            bench.submit(2, Priority::Demand, &[extent(0, 0, 30_001)]);
            let mut done = bench.finish();
            done.sort_by_key(|completion| completion.id);
            bench.verify(&done[1], &[extent(0, 0, 30_001)]);
            let error = done.swap_remove(0).result.unwrap_err();
            assert!(matches!(error, ReadError::UnexpectedEnd { .. }), "{kind:?}: {error}");
        }
    }
}

#[test]
fn a_read_that_never_ends_is_reported_in_time() {
    for kind in kinds() {
        let faults = FaultPlan::always(FileIndex(0), 40_000..40_001, FaultKind::Never);
        // The read that works must be over before that, on a busy machine too.
        let mut bench = Bench::new(kind, stalling_after(600), faults, &[100_000]);
        let started = Instant::now();
        bench.submit(1, Priority::Demand, &[extent(0, 5, 90_000)]);
        bench.submit(2, Priority::Demand, &[extent(0, 60_000, 30_000)]);
        let mut done = bench.finish();
        assert_eq!(done[0].id, 2, "the read that works does not wait for the one that does not");
        bench.verify(&done[0], &[extent(0, 60_000, 30_000)]);
        let stalled = done.swap_remove(1);
        assert!(stalled.buffer.is_none());
        let error = stalled.result.unwrap_err();
        let ReadError::Stalled { offset, waited, .. } = &error else { panic!("{error}") };
        assert!(*offset <= 40_000 && *waited >= Duration::from_millis(600));
        assert!(error.to_string().contains("expert 1 of layer 4"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(60), "{kind:?}");

        // A prefetch waits for demand reads, but not for a demand read that has stalled.
        for priority in [Priority::Demand, Priority::Prefetch] {
            bench.submit(3, priority, &[extent(0, 0, 30_000)]);
            let after = bench.finish_one();
            bench.verify(&after, &[extent(0, 0, 30_000)]);
        }
    }
}

#[test]
fn polling_sees_a_stall_too() {
    for kind in [Kind::Uring, Kind::Pread].into_iter().filter(|kind| kinds().contains(kind)) {
        let faults = FaultPlan::always(FileIndex(0), 0..100_000, FaultKind::Never);
        let mut bench = Bench::new(kind, stalling_after(50), faults, &[100_000]);
        bench.submit(1, Priority::Demand, &[extent(0, 5, 1000)]);
        let (mut done, started) = (Vec::new(), Instant::now());
        while done.is_empty() {
            assert!(started.elapsed() < Duration::from_secs(60), "{kind:?}");
            std::thread::sleep(Duration::from_millis(5));
            bench.engine.poll(&mut done).unwrap();
        }
        assert!(matches!(done[0].result, Err(ReadError::Stalled { .. })));
        assert_eq!(bench.engine.in_flight(), 0);
    }
}

#[test]
fn what_waits_behind_stalled_requests_is_reported_too() {
    for kind in kinds() {
        let faults = FaultPlan::always(FileIndex(0), 0..100_000, FaultKind::Never);
        let options = EngineOptions { queue_depth: 2, ..stalling_after(100) };
        let mut bench = Bench::new(kind, options, faults, &[100_000]);
        for id in 0..5 {
            bench.submit(id, Priority::ReadAhead, &[extent(0, id * 1000, 500)]);
        }
        let done = bench.finish();
        assert_eq!(done.len(), 5);
        for completion in done {
            assert!(matches!(completion.result, Err(ReadError::Stalled { .. })), "{kind:?}");
        }
    }
}

#[test]
fn a_late_answer_is_not_a_stall() {
    for kind in kinds() {
        let delay = FaultKind::Delay(Duration::from_millis(60));
        let faults = FaultPlan::always(FileIndex(0), 0..100_000, delay);
        let mut bench = Bench::new(kind, stalling_after(2000), faults, &[100_000]);
        bench.submit(1, Priority::Demand, &[extent(0, 5, 90_000)]);
        let done = bench.finish_one();
        bench.verify(&done, &[extent(0, 5, 90_000)]);
        assert!(bench.engine.io_statistics().busy_seconds >= 0.05, "{kind:?}");
    }
}

#[test]
fn the_first_fault_that_applies_happens_and_runs_out() {
    for kind in kinds() {
        let fault =
            |kind, times| Fault { file: FileIndex(0), range: 0..10_000, kind, spares: 0, times };
        let faults = FaultPlan {
            faults: vec![
                fault(FaultKind::Error(EIO), 2),
                fault(FaultKind::Short(4096), 1),
                fault(FaultKind::Delay(Duration::from_millis(1)), 1),
            ],
            ..FaultPlan::default()
        };
        let mut bench = Bench::new(kind, small_requests(), faults, &[100_000]);
        bench.submit(1, Priority::Demand, &[extent(0, 0, 10_000)]);
        let done = bench.finish_one();
        bench.verify(&done, &[extent(0, 0, 10_000)]);
        assert_eq!(bench.engine.io_statistics().retries, 3, "{kind:?}");
    }
}
