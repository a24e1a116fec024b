//! Tests of loads: the right bytes arrive, whether they come from the disk, the page cache or both.

use forebay_store::{
    Arena, BlockLabel, BlockLayout, EngineOptions, Extent, FaultKind, FaultPlan, FileIndex,
    LoadItem, LoadOptions, LoadStatistics, Loaded, Loader, ReadError,
};

use crate::support::{Bench, Kind, Noise, extent, half_cached, kinds, small_requests};

const EIO: i32 = 5;
const BYTES: usize = 3_000_001;
const RING_SLOT: usize = 72 << 10;

fn options() -> LoadOptions {
    LoadOptions { piece_bytes: 64 << 10, copy_threads: 3, probe_threads: 2, engine_bytes: 300_000 }
}

/// Returns blocks of odd sizes at odd offsets, which together are most of the file.
fn blocks(bytes: usize) -> Vec<Vec<Extent>> {
    let (mut noise, mut at, mut blocks) = (Noise(5), 7, Vec::new());
    while at + 400_000 < bytes as u64 {
        let length = 1 + noise.below(350_000);
        let near = extent(0, at, length);
        let far = extent(1, noise.below(9000), noise.below(1000));
        blocks.push(if noise.below(3) == 0 { vec![near, far] } else { vec![near] });
        at += length + noise.below(40_000);
    }
    blocks.push(vec![]);
    blocks.push(vec![extent(0, bytes as u64 - 1, 1)]);
    blocks
}

/// Returns the layout of a block. Some are read behind the front of their slot, as compact weights are.
fn layout(bench: &Bench, index: usize, extents: &[Extent]) -> BlockLayout {
    bench.layout(extents).moved(index % 4 * (12 << 10))
}

fn items(bench: &Bench, blocks: &[Vec<Extent>]) -> Vec<LoadItem> {
    let layouts = blocks.iter().enumerate();
    let layouts: Vec<BlockLayout> =
        layouts.map(|(index, extents)| layout(bench, index, extents)).collect();
    let arena = Arena::map(layouts.iter().map(|layout| layout.slot_bytes).sum()).unwrap();
    let item = |(index, layout): (usize, BlockLayout)| LoadItem {
        label: BlockLabel::Other(index as u64),
        buffer: arena.carve(layout.slot_bytes).unwrap(),
        layout,
    };
    layouts.into_iter().enumerate().map(item).collect()
}

/// Checks every byte of every block.
fn verify(bench: &Bench, blocks: &[Vec<Extent>], loaded: Vec<Loaded>, about: &str) {
    assert_eq!(loaded.len(), blocks.len());
    for (index, (loaded, extents)) in loaded.into_iter().zip(blocks).enumerate() {
        let result = loaded.result;
        let completion =
            forebay_store::Completion { id: index as u64, buffer: loaded.buffer, result };
        let layout = layout(bench, index, extents);
        let buffer = completion.buffer.as_ref().expect("comes back");
        assert_eq!(buffer.len(), layout.slot_bytes, "{about}: the slot is whole again");
        bench.verify_in(&completion, extents, &layout);
    }
}

fn load(bench: &mut Bench, blocks: &[Vec<Extent>]) -> (Vec<Loaded>, LoadStatistics) {
    load_staged(bench, blocks, 0, options())
}

/// Loads without copies from the page cache.
fn load_alone(bench: &mut Bench, blocks: &[Vec<Extent>]) -> (Vec<Loaded>, LoadStatistics) {
    load_staged(bench, blocks, 0, LoadOptions { copy_threads: 0, ..options() })
}

fn load_staged(
    bench: &mut Bench,
    blocks: &[Vec<Extent>],
    ring_slots: usize,
    options: LoadOptions,
) -> (Vec<Loaded>, LoadStatistics) {
    let items = items(bench, blocks);
    let mut last = (0, 0);
    let arena = Arena::map(ring_slots * RING_SLOT).unwrap();
    let mut ring: Vec<_> = (0..ring_slots).map(|_| arena.carve(RING_SLOT).unwrap()).collect();
    let (engine, files) = (bench.engine.as_mut(), &bench.files);
    let loader = Loader { engine, files, options, ring: &mut ring };
    let done = loader.load(items, &mut |done, total| {
        assert!(done >= last.0 && done <= total, "progress runs backwards");
        last = (done, total);
    });
    let (loaded, statistics) = done.unwrap();
    let wanted: u64 = blocks.iter().flatten().map(|extent| extent.length).sum();
    assert_eq!((statistics.bytes, last.1), (wanted, wanted));
    if loaded.iter().all(|loaded| loaded.result.is_ok()) {
        assert_eq!(last, (wanted, wanted), "the last report has all bytes");
    }
    assert_eq!(ring.len(), ring_slots, "the ring comes back");
    assert_eq!(statistics.staging_bytes, (ring_slots * RING_SLOT) as u64);
    (loaded, statistics)
}

#[test]
fn loads_from_disk_from_the_page_cache_and_from_both() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[BYTES, 10_000]);
        let blocks = blocks(BYTES);
        let (loaded, statistics) = load(&mut bench, &blocks);
        verify(&bench, &blocks, loaded, "warm");
        if kind == Kind::Simulated {
            assert_eq!(statistics.cached_bytes, 0);
            continue;
        }
        // The files were just written, so they are cached. The engine may have read some pieces.
        assert!(statistics.cached_bytes > statistics.bytes / 2, "{kind:?}: {statistics:?}");
        if !half_cached(&bench.files) {
            continue;
        }
        let (loaded, statistics) = load(&mut bench, &blocks);
        verify(&bench, &blocks, loaded, "half");
        let from_cache = statistics.cached_bytes + statistics.engine_cached_bytes;
        assert!(from_cache > 0 && from_cache < statistics.bytes, "{kind:?}: {statistics:?}");
        assert_eq!(statistics.cached_bytes + statistics.engine_bytes, statistics.bytes);

        if kind == Kind::Mmap {
            // Mapped pages stay in the page cache.
            continue;
        }
        bench.files.drop_cached().unwrap();
        let (loaded, statistics) = load(&mut bench, &blocks);
        verify(&bench, &blocks, loaded, "cold");
        if bench.engine.describe().direct {
            assert_eq!(statistics.engine_bytes, statistics.bytes, "{kind:?}");
            let left = bench.files.cached_bytes().unwrap().0;
            assert_eq!(left, 0, "{kind:?}: a cold load leaves nothing in the page cache");
        }
    }
}

#[test]
fn a_ring_makes_no_difference_to_the_bytes() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[BYTES, 10_000]);
        let blocks = blocks(BYTES);
        for ring_slots in [1, 2, 9] {
            let _ = bench.files.drop_cached();
            let (loaded, _) = load_staged(&mut bench, &blocks, ring_slots, options());
            verify(&bench, &blocks, loaded, "through a ring");
        }
        let always = FaultPlan::always(FileIndex(0), 700_000..700_001, FaultKind::Error(EIO));
        let mut bench = Bench::new(kind, small_requests(), always, &[BYTES, 10_000]);
        if meets_the_disk(&bench, kind) {
            let error = only_failure(load_staged(&mut bench, &blocks, 3, options()).0, 0);
            assert!(matches!(error, ReadError::Io { .. }), "{kind:?}: {error}");
        }
    }
}

#[test]
fn a_load_through_the_page_cache_leaves_there_what_was_there() {
    let through = EngineOptions { direct: false, ..small_requests() };
    let mut bench = Bench::new(Kind::Pread, through, FaultPlan::default(), &[BYTES, 10_000]);
    if !half_cached(&bench.files) {
        return;
    }
    let before = bench.files.cached_bytes().unwrap().0;
    let blocks = blocks(BYTES);
    let (loaded, _) = load(&mut bench, &blocks);
    verify(&bench, &blocks, loaded, "cached");
    let after = bench.files.cached_bytes().unwrap().0;
    // Read-ahead of the kernel may add a few pages.
    assert!(after >= before && after < before + BYTES as u64 / 4, "{before} {after}");
}

#[test]
fn an_engine_alone_gives_the_same_bytes() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[BYTES, 10_000]);
        let blocks = blocks(BYTES);
        let (loaded, statistics) = load_alone(&mut bench, &blocks);
        verify(&bench, &blocks, loaded, "alone");
        assert_eq!((statistics.engine_bytes, statistics.cached_bytes), (statistics.bytes, 0));
    }
}

/// Returns true if every read of a load goes to the engine's disk. Copies from the page cache do
/// not. If an engine reads through the page cache, its read-ahead creates more pages to copy.
fn meets_the_disk(bench: &Bench, kind: Kind) -> bool {
    kind == Kind::Simulated || (bench.engine.describe().direct && bench.files.drop_cached().is_ok())
}

/// Returns the first failure of a load that is not a cancellation. Checks the number of slots that
/// did not come back.
fn only_failure(loaded: Vec<Loaded>, slots_lost: usize) -> ReadError {
    let lost = loaded.iter().filter(|loaded| loaded.buffer.is_none()).count();
    assert_eq!(lost, slots_lost);
    let errors = loaded.into_iter().filter_map(|loaded| loaded.result.err());
    let mut failures: Vec<ReadError> =
        errors.filter(|error| !matches!(error, ReadError::Cancelled { .. })).collect();
    assert!(!failures.is_empty());
    failures.swap_remove(0)
}

#[test]
fn faults_are_survived_or_reported() {
    for kind in kinds() {
        let once = FaultPlan::once(FileIndex(0), 700_000..700_001, FaultKind::Error(EIO));
        let short = FaultPlan::always(FileIndex(0), 0..BYTES as u64, FaultKind::Short(5000));
        for faults in [once, short] {
            let mut bench = Bench::new(kind, small_requests(), faults, &[BYTES, 10_000]);
            let _ = bench.files.drop_cached();
            let blocks = blocks(BYTES);
            let (loaded, _) = load(&mut bench, &blocks);
            verify(&bench, &blocks, loaded, "faults");
        }

        let always = FaultPlan::always(FileIndex(0), 700_000..700_001, FaultKind::Error(EIO));
        let mut bench = Bench::new(kind, small_requests(), always, &[BYTES, 10_000]);
        if !meets_the_disk(&bench, kind) {
            continue;
        }
        let (loaded, _) = load(&mut bench, &blocks(BYTES));
        let error = only_failure(loaded, 0);
        assert!(matches!(error, ReadError::Io { attempts: 4, .. }), "{kind:?}: {error}");
    }
}

#[test]
fn a_file_that_was_truncated_is_an_unexpected_end() {
    for kind in kinds().into_iter().filter(|&kind| kind != Kind::Simulated) {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[BYTES, 10_000]);
        let path = bench.folder.path().join("weights-0");
        std::fs::File::options().write(true).open(path).unwrap().set_len(1_000_001).unwrap();
        let blocks = blocks(BYTES);
        for load in [load, load_alone] {
            let error = only_failure(load(&mut bench, &blocks).0, 0);
            assert!(matches!(error, ReadError::UnexpectedEnd { .. }), "{kind:?}: {error}");
        }
    }
}

#[test]
fn blocks_that_cannot_be_loaded_are_refused() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[BYTES, 10_000]);
        let layout = bench.layout(&[extent(0, 0, 300_000)]);
        let buffer = Arena::map(4096).unwrap().carve(4096).unwrap();
        let label = BlockLabel::Dense(3);
        let (engine, files) = (bench.engine.as_mut(), &bench.files);
        let loader = Loader { engine, files, options: options(), ring: &mut Vec::new() };
        let loaded = loader.load(vec![LoadItem { label, layout, buffer }], &mut |_, _| {});
        let error = only_failure(loaded.unwrap().0, 0);
        assert!(matches!(error, ReadError::SlotTooSmall { .. }), "{kind:?}: {error}");
    }
}
