//! Tests that the recorder keeps what the engine did, and that a memory map reports its page
//! faults.

use std::time::Duration;

use forebay_store::{
    BlockReader, EngineOptions, FaultKind, FaultPlan, FileIndex, FileSet, IoKind, IoRecorder,
    Priority, ReadEnd, ReadError, ReaderError, ReaderOptions, Recording, Why,
};

use crate::support::{Bench, Kind, Noise, extent, kinds, small_requests, stalling_after};

/// Submits random reads of all priorities and cancels some of them.
fn work(bench: &mut Bench) {
    let mut noise = Noise(5);
    for id in 0..60 {
        let priorities = [Priority::Demand, Priority::ReadAhead, Priority::Load];
        let priority = priorities[noise.below(3) as usize];
        let length = 1 + noise.below(90_000);
        bench.submit(id, priority, &[extent(0, noise.below(300_000 - length), length)]);
        if id % 7 == 0 {
            bench.engine.cancel(id);
        }
    }
    bench.finish();
}

fn assert_same(kind: Kind, bench: &Bench, recording: &Recording) {
    let statistics = bench.engine.io_statistics();
    let reads = &recording.reads;
    assert_eq!(reads.len() as u64, statistics.requests, "{kind:?}");
    let bytes: u64 = reads.iter().map(|read| u64::from(read.bytes)).sum();
    assert_eq!(bytes, statistics.bytes_read, "{kind:?}");
    let repeated = reads.iter().filter(|read| read.attempt > 0).count() as u64;
    assert_eq!(repeated, statistics.retries, "{kind:?}");
    assert_eq!(recording.dropped_reads, 0);
    assert!(reads.iter().all(|read| read.bytes <= read.length && read.block.is_some()));
}

#[test]
fn the_record_is_what_the_engine_counted() {
    let faults = |random_one_in| FaultPlan { random_one_in, seed: 9, ..FaultPlan::default() };
    for kind in kinds() {
        for faults in [FaultPlan::default(), faults(4)] {
            let options = EngineOptions { retries: 50, ..small_requests() };
            let mut bench = Bench::new(kind, options, faults.clone(), &[300_000]);
            work(&mut bench);
            let recording = bench.recorder.take();
            assert_same(kind, &bench, &recording);
            let failed = recording.reads.iter().any(|read| matches!(read.end, ReadEnd::Failed(5)));
            assert_eq!(failed, faults.random_one_in > 0, "{kind:?}");
            for why in [Why::Demand, Why::ReadAhead, Why::Load] {
                assert!(recording.reads.iter().any(|read| read.why == why), "{kind:?} {why:?}");
            }
            assert!(!recording.waits.is_empty());
        }
    }
}

#[test]
fn reads_that_never_end_are_recorded_when_the_engine_goes() {
    for kind in kinds() {
        let faults = FaultPlan::once(FileIndex(0), 0..1, FaultKind::Never);
        let mut bench = Bench::new(kind, stalling_after(50), faults, &[300_000]);
        bench.submit(1, Priority::Demand, &[extent(0, 0, 4096)]);
        bench.submit(2, Priority::Demand, &[extent(0, 8192, 4096)]);
        bench.finish();
        let statistics = bench.engine.io_statistics();
        let recorder = bench.recorder.clone();
        drop(bench);
        let recording = recorder.take();
        assert_eq!(recording.reads.len() as u64, statistics.requests, "{kind:?}");
        let lost = recording.reads.iter().filter(|read| read.end == ReadEnd::Lost);
        assert_eq!(lost.count(), 1, "{kind:?}");
    }
}

#[test]
fn small_reads_are_recorded() {
    let recorder = IoRecorder::new(10);
    let files = FileSet::in_memory(vec![vec![1; 100]]).recorded(&recorder);
    files.read_exact(extent(0, 10, 20), &mut [0; 20]).unwrap();
    files.read_exact(extent(0, 90, 20), &mut [0; 20]).unwrap_err();
    let reads = recorder.take().reads;
    let seen: Vec<_> = reads.iter().map(|read| (read.offset, read.length, read.bytes)).collect();
    assert_eq!(seen, [(10, 20, 20), (90, 20, 0)]);
    assert!(reads.iter().all(|read| read.why == Why::Small && read.block.is_none()));
}

#[test]
fn a_memory_map_counts_the_pages_that_it_copies() {
    if !kinds().contains(&Kind::Mmap) {
        return;
    }
    let mut bench = Bench::new(Kind::Mmap, small_requests(), FaultPlan::default(), &[300_000]);
    bench.submit(1, Priority::Demand, &[extent(0, 0, 300_000)]);
    let done = bench.finish_one();
    bench.verify(&done, &[extent(0, 0, 300_000)]);
    let recording = bench.recorder.take();
    let pages: u32 = recording.reads.iter().filter_map(|r| r.faults).map(|f| f.pages).sum();
    let page_bytes = rustix::param::page_size();
    assert_eq!(pages as usize, 300_000_usize.div_ceil(page_bytes));
    // The file was written a moment ago, so its pages are in the page cache.
    assert!(recording.reads.iter().filter_map(|r| r.faults).all(|f| f.absent == 0));
}

/// If a mapped file shrinks, most programs get SIGBUS. Here the read returns an error. A read that
/// succeeds never returns zeros in place of weights.
#[test]
fn a_mapped_file_may_shrink_while_it_is_read() {
    if !kinds().contains(&Kind::Mmap) {
        return;
    }
    for left in [0_u64, 1000, 150_001] {
        let mut bench = Bench::new(Kind::Mmap, small_requests(), FaultPlan::default(), &[300_000]);
        let path = bench.folder.path().join("weights-0");
        let file = std::fs::File::options().write(true).open(path).unwrap();
        let cut = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_micros(300));
            file.set_len(left).unwrap();
        });
        let mut failed = 0;
        for id in 0..20 {
            bench.submit(id, Priority::Demand, &[extent(0, 7, 290_000)]);
            let done = bench.finish_one();
            match &done.result {
                Ok(_) => bench.verify(&done, &[extent(0, 7, 290_000)]),
                Err(ReadError::UnexpectedEnd { file_end, .. }) => {
                    assert!(*file_end >= left.min(7) && *file_end <= 300_000, "{file_end}");
                    failed += 1;
                }
                Err(error) => panic!("{error}"),
            }
        }
        cut.join().unwrap();
        bench.submit(99, Priority::Demand, &[extent(0, 7, 290_000)]);
        let error = bench.finish_one().result.unwrap_err();
        assert!(error.to_string().contains("truncated"), "{error} after {failed}");
    }
}

#[test]
fn a_block_reader_fills_any_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights");
    let image = crate::support::image(3, 2_000_003);
    std::fs::write(&path, &image).unwrap();
    for io in [IoKind::Auto, IoKind::Pread, IoKind::Mmap] {
        let options =
            ReaderOptions { io, requests_max: 300, staging_bytes: 1 << 20, ..Default::default() };
        let mut reader = match BlockReader::open(&[&path], &options) {
            Ok(reader) => reader,
            Err(_) if io == IoKind::Mmap => continue,
            Err(error) => panic!("{error}"),
        };
        let mut noise = Noise(11);
        let mut spans = Vec::new();
        for tag in 0..300 {
            let length =
                if tag % 9 == 0 { noise.below(700_000) } else { noise.below(9000) } as usize;
            let offset = noise.below((image.len() - length) as u64);
            let (offset, length) = match tag % 3 {
                0 => (offset / 4096 * 4096, length / 4096 * 4096),
                _ => (offset, length),
            };
            spans.push((offset, length));
            let buffer = reader.buffer(length).unwrap();
            let (file, priority) = (FileIndex(0), Priority::ReadAhead);
            reader
                .submit(forebay_store::ReadRequest { tag, file, offset, length, priority }, buffer)
                .unwrap();
        }
        let one_more = forebay_store::ReadRequest {
            tag: 0,
            file: FileIndex(0),
            offset: 0,
            length: 1,
            priority: Priority::Demand,
        };
        let full = reader.submit(one_more, reader.buffer(1).unwrap());
        assert!(matches!(full, Err(ReaderError::Full { limit: 300 })));
        let mut answered = 0;
        while let Some(answer) = reader.wait().unwrap() {
            let (offset, length) = spans[answer.tag as usize];
            let buffer = answer.result.unwrap();
            assert!(buffer.as_slice()[..length] == image[offset as usize..][..length]);
            answered += 1;
        }
        assert_eq!(answered, 300);
        let mut out = vec![0; 1_234_567];
        reader.read(FileIndex(0), 4321, &mut out).unwrap();
        assert!(out == image[4321..4321 + out.len()]);
        let beyond = reader.read(FileIndex(0), image.len() as u64 - 3, &mut out[..4]);
        assert!(matches!(beyond, Err(ReaderError::Read(ReadError::UnexpectedEnd { .. }))));
        let small = reader.submit(
            forebay_store::ReadRequest { length: 9000, ..one_more },
            reader.buffer(1).unwrap(),
        );
        assert!(matches!(small, Err(ReaderError::BufferTooSmall { .. })));
    }
}
