use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::AtomicU32;

use tempfile::TempDir;

use super::*;
use crate::buffers::PAGE;

const NO_WAIT: Duration = Duration::ZERO;
const LONG: Duration = Duration::from_secs(20);

fn folder(of: &TempDir) -> PathBuf {
    of.path().join("kv")
}

fn options(of: &TempDir) -> DiskOptions {
    DiskOptions { readers: 2, ..DiskOptions::new(&folder(of), 64 << 20) }
}

fn key(number: u32) -> BlockKey {
    let mut hash = [0; 16];
    hash[4..8].copy_from_slice(&number.to_be_bytes());
    BlockKey { hash: BlockHash(hash), group: number % 2 }
}

/// Returns the bytes of a block, of different lengths.
fn block(number: u32) -> Vec<u8> {
    let len = 3000 + 1000 * (number as usize % 5);
    let mut random = fastrand::Rng::with_seed(number.into());
    (0..len).map(|_| random.u8(..)).collect()
}

fn write(store: &DiskStore, number: u32) -> bool {
    let link = Link { previous: key(number.wrapping_sub(1)).hash, index: number };
    store.write(key(number), link, 7, &block(number), LONG)
}

/// Fetches blocks. Returns those that came, all of which have the right bytes, and the number of the others.
fn fetch(store: &DiskStore, numbers: impl Iterator<Item = u32>) -> (Vec<u32>, usize) {
    let numbers: HashMap<BlockKey, u32> = numbers.map(|number| (key(number), number)).collect();
    let mut fetch = store.fetch(numbers.keys().copied());
    let (mut came, mut lost) = (Vec::new(), 0);
    while fetch.left() > 0 {
        let Some(Fetched { key, block: got }) = fetch.next_within(LONG) else { break };
        match got {
            Ok(got) => {
                assert_eq!(got[..], block(numbers[&key]), "{key:?}");
                came.push(numbers[&key]);
            }
            Err(_) => lost += 1,
        }
    }
    came.sort_unstable();
    (came, lost)
}

fn segments(of: &TempDir) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder(of)).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|e| e == "kv")).collect();
    paths.sort();
    paths
}

fn secret(byte: u8) -> Option<Secret> {
    Secret::new(&[byte; 32])
}

#[test]
fn blocks_come_back_now_and_after_a_restart() {
    for secret in [None, secret(1)] {
        let of = TempDir::new().unwrap();
        let options = DiskOptions { secret: secret.clone(), ..options(&of) };
        let store = DiskStore::open(options.clone()).unwrap();
        assert_eq!(
            store.add_model(BlockHash([7; 16]), "a model").unwrap(),
            u64::from_le_bytes([7; 8])
        );
        assert!((0..40).all(|number| write(&store, number)));
        assert!(store.flush(LONG));
        // A second time, they are here already.
        assert!((0..40).all(|number| !write(&store, number)));
        assert_eq!(fetch(&store, 0..41), ((0..40).collect(), 1));
        assert!(store.has_followers(key(38).hash) && !store.has_followers(key(39).hash));
        drop(store);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder(&of)), 0o700);
        let files: Vec<_> = fs::read_dir(folder(&of)).unwrap().map(|e| e.unwrap().path()).collect();
        assert!(files.iter().all(|path| mode(path) == 0o600), "{files:?}");
        let is_readable = segments(&of).iter().any(|path| {
            let bytes = fs::read(path).unwrap();
            bytes.windows(100).any(|window| *window == block(3)[..100])
        });
        assert_eq!(is_readable, secret.is_none());
        let store = DiskStore::open(options).unwrap();
        assert_eq!(fetch(&store, 0..40), ((0..40).collect(), 0));
        let statistics = store.statistics();
        assert_eq!((statistics.blocks, statistics.damaged_blocks), (40, 0));
        assert_eq!(statistics.read_blocks, 40);
        assert!(store.verify(|_, _| true).is_empty());
        let listed = store.list();
        assert_eq!((listed.len(), listed[0].blocks, listed[0].bytes), (1, 40, statistics.bytes));
    }
}

#[test]
fn an_index_may_be_missing_or_damaged() {
    let of = TempDir::new().unwrap();
    let store = DiskStore::open(options(&of)).unwrap();
    (0..30).for_each(|number| assert!(write(&store, number)));
    drop(store);
    let index = segments(&of)[0].with_extension("index");
    let whole = fs::read(&index).unwrap();
    for damaged in [None, Some(Vec::new()), Some(whole[..whole.len() / 2].to_vec())] {
        match damaged {
            None => fs::remove_file(&index).unwrap(),
            Some(bytes) => fs::write(&index, bytes).unwrap(),
        }
        let store = DiskStore::open(options(&of)).unwrap();
        assert_eq!(fetch(&store, 0..30), ((0..30).collect(), 0));
        drop(store);
        assert_eq!(fs::read(&index).unwrap(), whole, "the scan writes it again");
    }
}

#[test]
fn damaged_bytes_lose_only_their_own_block() {
    let mut random = fastrand::Rng::with_seed(1);
    for secret in [None, secret(3)] {
        for round in 0..12 {
            let of = TempDir::new().unwrap();
            let options = DiskOptions { secret: secret.clone(), ..options(&of) };
            let store = DiskStore::open(options.clone()).unwrap();
            (0..20).for_each(|number| assert!(write(&store, number)));
            drop(store);
            let path = segments(&of).remove(0);
            let mut bytes = fs::read(&path).unwrap();
            // Filling bytes behind blocks may be anything.
            let at = random.usize(..bytes.len());
            bytes[at] ^= 1 << random.u8(..8);
            fs::write(&path, bytes).unwrap();
            if round % 2 == 0 {
                fs::remove_file(path.with_extension("index")).unwrap();
            }
            let store = DiskStore::open(options).unwrap();
            let (came, _) = fetch(&store, 0..20);
            assert!(came.len() >= 19, "{came:?}, byte {at}");
            let (again, _) = fetch(&store, 0..20);
            assert_eq!(came, again);
        }
    }
}

#[test]
fn a_cut_segment_has_the_blocks_before_the_cut() {
    for cut in [0, 100, PAGE, 2 * PAGE, 5 * PAGE + 17, 20 * PAGE, 50 * PAGE] {
        let of = TempDir::new().unwrap();
        let store = DiskStore::open(options(&of)).unwrap();
        (0..20).for_each(|number| assert!(write(&store, number)));
        drop(store);
        let path = segments(&of).remove(0);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..cut]).unwrap();
        let store = DiskStore::open(options(&of)).unwrap();
        let (came, lost) = fetch(&store, 0..20);
        let ends: Vec<usize> = (0..20)
            .scan(0, |end, number| {
                *end += PAGE + block(number).len().next_multiple_of(PAGE);
                Some(*end)
            })
            .collect();
        let whole = ends.iter().filter(|end| **end <= cut).count();
        assert_eq!((came.len(), lost), (whole, 20 - whole), "{cut}");
        // New blocks go to a new segment.
        assert!(write(&store, 100) && store.flush(LONG));
        assert_eq!(fetch(&store, 100..101).0, [100]);
    }
}

#[test]
fn the_segments_longest_unused_go_when_the_store_is_full() {
    let of = TempDir::new().unwrap();
    // 1 MiB segments.
    let options = DiskOptions { bytes: 4 << 20, ..options(&of) };
    let store = DiskStore::open(options.clone()).unwrap();
    for number in 0..2000 {
        assert!(write(&store, number));
        if number % 50 == 0 {
            assert!(store.flush(LONG));
            assert_eq!(fetch(&store, 0..20).0.len(), 20.min(number as usize + 1));
        }
    }
    assert!(store.flush(LONG));
    let statistics = store.statistics();
    assert!(statistics.bytes <= 4 << 20 && statistics.bytes > 2 << 20, "{statistics:?}");
    assert!(statistics.removed_blocks > 1000, "{statistics:?}");
    let on_disk: u64 = segments(&of).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert!(on_disk <= 4 << 20, "{on_disk}");
    assert_eq!(fetch(&store, 0..20).0.len(), 20, "blocks in use stay");
    assert!(store.shrink(1 << 20).unwrap() > 0 && store.statistics().bytes <= 1 << 20);
}

#[test]
fn a_second_process_only_reads() {
    let of = TempDir::new().unwrap();
    let first = DiskStore::open(options(&of)).unwrap();
    assert!(write(&first, 1) && first.flush(LONG));
    let second = DiskStore::open(options(&of)).unwrap();
    assert_eq!((first.access(), second.access()), (Access::Write, Access::ReadOnly));
    assert_eq!(fetch(&second, 1..2).0, [1]);
    assert!(!write(&second, 2));
    assert!(matches!(DiskStore::wipe(&folder(&of)), Err(DiskError::InUse { .. })));
    drop(first);
    drop(second);
    assert_eq!(DiskStore::open(options(&of)).unwrap().access(), Access::Write);
    fs::write(folder(&of).join("notes.txt"), "mine").unwrap();
    DiskStore::wipe(&folder(&of)).unwrap();
    let left: Vec<_> = fs::read_dir(folder(&of)).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["notes.txt"]);
}

#[test]
fn folders_and_secrets_that_do_not_fit_are_refused_in_words() {
    let of = TempDir::new().unwrap();
    let open = |secret| DiskStore::open(DiskOptions { secret, ..options(&of) });
    drop(open(secret(1)).unwrap());
    assert!(matches!(open(secret(2)), Err(DiskError::WrongSecret { .. })));
    assert!(matches!(open(None), Err(DiskError::Encrypted { .. })));
    DiskStore::wipe(&folder(&of)).unwrap();
    assert!(!folder(&of).exists());
    drop(open(None).unwrap());
    assert!(matches!(open(secret(2)), Err(DiskError::NotEncrypted { .. })));
    fs::set_permissions(folder(&of), fs::Permissions::from_mode(0o750)).unwrap();
    assert!(matches!(open(None), Err(DiskError::OthersMayRead { .. })));
    fs::set_permissions(folder(&of), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(
        folder(&of).join("store.json"),
        r#"{"version":9,"encrypted":false,"id":"","check":null}"#,
    )
    .unwrap();
    assert!(matches!(open(None), Err(DiskError::Version { version: 9, .. })));
    fs::remove_file(folder(&of).join("store.json")).unwrap();
    fs::write(folder(&of).join("photo.jpg"), "mine").unwrap();
    assert!(matches!(open(None), Err(DiskError::NotAStore { .. })));
    assert!(matches!(DiskStore::wipe(&folder(&of)), Err(DiskError::NotAStore { .. })));
    assert!(Secret::new(&[0; 31]).is_none());
}

/// Fails with some errors, and stalls while `stalled` is true.
#[derive(Default)]
struct Faulty {
    fail_reads: AtomicBool,
    fail_writes: AtomicU32,
    stalled: AtomicBool,
}

impl DiskFaults for Faulty {
    fn before(&self, operation: Operation) -> io::Result<()> {
        while self.stalled.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
        }
        let left = |count: u32| count.checked_sub(1);
        match operation {
            Operation::Read if self.fail_reads.load(Ordering::Relaxed) => {
                Err(io::Error::other("the disk fails"))
            }
            Operation::Write
                if self
                    .fail_writes
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, left)
                    .is_ok() =>
            {
                Err(io::ErrorKind::StorageFull.into())
            }
            _ => Ok(()),
        }
    }
}

#[test]
fn failing_and_stalling_disks_lose_blocks_and_nothing_else() {
    let of = TempDir::new().unwrap();
    let faulty = Arc::new(Faulty::default());
    let options = DiskOptions { faults: Some(faulty.clone()), bytes: 4 << 20, ..options(&of) };
    let store = DiskStore::open(options).unwrap();
    (0..200).for_each(|number| assert!(write(&store, number)));
    assert!(store.flush(LONG));
    // The disk is full: a segment goes, and the write is tried again.
    faulty.fail_writes.store(1, Ordering::Relaxed);
    assert!(write(&store, 300) && store.flush(LONG));
    assert_eq!(fetch(&store, 300..301).0, [300]);
    // A failure that repeats loses the block.
    faulty.fail_writes.store(2, Ordering::Relaxed);
    assert!(write(&store, 301) && store.flush(LONG));
    assert_eq!(fetch(&store, 301..302).1, 1);
    assert!(write(&store, 301) && store.flush(LONG), "it may be written later");
    assert_eq!(fetch(&store, 300..302).0, [300, 301]);
    faulty.fail_reads.store(true, Ordering::Relaxed);
    assert_eq!(fetch(&store, 300..301).1, 1);
    faulty.fail_reads.store(false, Ordering::Relaxed);
    assert_eq!(fetch(&store, 301..302).0, [301]);
    assert_eq!(store.statistics().damaged_blocks, 1);
    faulty.stalled.store(true, Ordering::Relaxed);
    let mut stalled = store.fetch([key(301)].into_iter());
    assert!(stalled.next_within(Duration::from_millis(20)).is_none());
    assert_eq!(stalled.left(), 1);
    drop(stalled);
    faulty.stalled.store(false, Ordering::Relaxed);
    assert_eq!(fetch(&store, 301..302).0, [301]);
    faulty.fail_writes.store(1000, Ordering::Relaxed);
    for number in 400..500 {
        write(&store, number);
        store.flush(LONG);
    }
    assert!(!write(&store, 500), "it stops to write");
}

#[test]
fn writes_are_bounded_by_the_day_and_by_the_queue() {
    let of = TempDir::new().unwrap();
    let faulty = Arc::new(Faulty::default());
    let options = DiskOptions {
        bytes_per_day: Some(20 * 2 * PAGE as u64),
        faults: Some(faulty.clone()),
        ..options(&of)
    };
    let store = DiskStore::open(options.clone()).unwrap();
    let written = (0..100).filter(|number| write(&store, *number) && store.flush(LONG)).count();
    assert!((10..=20).contains(&written), "{written}");
    assert_eq!(store.statistics().skipped_wear, 100 - written as u64);
    drop(store);
    let store = DiskStore::open(options.clone()).unwrap();
    assert!(!write(&store, 200), "a restart does not begin a new day");
    drop(store);
    let store = DiskStore::open(DiskOptions { bytes_per_day: None, ..options }).unwrap();
    faulty.stalled.store(true, Ordering::Relaxed);
    let large = vec![1; 30 << 20];
    let write = |number| store.write(key(number), Link::default(), 7, &large, NO_WAIT);
    assert!(write(300) && write(301) && !write(302));
    assert!(!write(300), "it waits already");
    assert_eq!(store.statistics().skipped_busy, 1);
    faulty.stalled.store(false, Ordering::Relaxed);
    assert!(store.flush(LONG) && write(302));
}

/// The state of the folder at any moment of writing must be usable, as after `kill -9`.
#[test]
fn every_moment_of_writing_leaves_a_usable_folder() {
    let of = TempDir::new().unwrap();
    let options = DiskOptions { bytes: 4 << 20, ..options(&of) };
    let store = DiskStore::open(options.clone()).unwrap();
    thread::scope(|scope| {
        let writing = scope.spawn(|| (0..1500).for_each(|number| assert!(write(&store, number))));
        let mut copies = 0;
        while !writing.is_finished() {
            let copy = TempDir::new().unwrap();
            fs::create_dir(folder(&copy)).unwrap();
            fs::set_permissions(folder(&copy), fs::Permissions::from_mode(0o700)).unwrap();
            for entry in fs::read_dir(folder(&of)).unwrap() {
                let path = entry.unwrap().path();
                // The file may be removed by now.
                let _ = fs::copy(&path, folder(&copy).join(path.file_name().unwrap()));
            }
            let copied = DiskOptions { folder: folder(&copy), ..options.clone() };
            let copied = DiskStore::open(copied).unwrap();
            fetch(&copied, 0..1500);
            copies += 1;
        }
        assert!(copies > 1);
    });
}

/// Returns numbers at which sums overflow or lengths exceed a file.
fn hostile_numbers() -> Vec<u64> {
    let near = |number: u64| [number.wrapping_sub(1), number, number.wrapping_add(1)];
    let powers = [0, 12, 30, 31, 32, 40, 47, 52, 63].map(|power| 1_u64 << power);
    let ends = [0, u64::MAX, u64::MAX - 4095, i64::MAX as u64, u64::MAX - 4096 - 16];
    powers.into_iter().chain(ends).flat_map(near).collect()
}

/// Writes the checksum of what a hostile program changed.
fn with_checksum(bytes: &mut [u8]) {
    let (content, sum) = bytes.split_last_chunk_mut::<8>().unwrap();
    *sum = twox_hash::XxHash3_64::oneshot(content).to_le_bytes();
}

/// Uses everything of a store. What comes has the right bytes.
fn use_all(of: &TempDir) {
    for has_index in [true, false] {
        let store = DiskStore::open(options(of)).unwrap();
        let listed: u64 = store.list().iter().map(|of| of.blocks).sum();
        assert!(listed <= 12, "{listed}");
        store.verify(|_, _| true);
        fetch(&store, 0..12);
        drop(store);
        if has_index {
            for segment in segments(of) {
                let _ = fs::remove_file(segment.with_extension("index"));
            }
        }
    }
}

#[test]
fn numbers_of_hostile_files_are_checked() {
    for number in hostile_numbers() {
        // The length of a block in a header, and the offset and the length of one in an index.
        for (extension, at) in [("kv", 32), ("kv", 24), ("index", 40), ("index", 48), ("index", 32)]
        {
            let of = tempfile::tempdir().unwrap();
            let store = DiskStore::open(options(&of)).unwrap();
            (0..12).for_each(|number| assert!(write(&store, number)));
            assert!(store.flush(LONG));
            drop(store);
            let path = segments(&of).remove(0);
            // The index is written when a segment is opened again.
            drop(DiskStore::open(options(&of)).unwrap());
            let path = path.with_extension(extension);
            let mut bytes = fs::read(&path).unwrap();
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            match extension {
                "kv" => {
                    with_checksum(&mut bytes[..PAGE]);
                    fs::remove_file(path.with_extension("index")).unwrap();
                }
                _ => with_checksum(&mut bytes),
            }
            fs::write(&path, bytes).unwrap();
            use_all(&of);
        }
    }
}

#[test]
fn files_of_random_hostile_bytes_are_no_harm() {
    let mut random = fastrand::Rng::with_seed(23);
    let numbers = hostile_numbers();
    for _ in 0..60 {
        let of = tempfile::tempdir().unwrap();
        let store = DiskStore::open(options(&of)).unwrap();
        (0..12).for_each(|number| assert!(write(&store, number)));
        assert!(store.flush(LONG));
        drop(store);
        drop(DiskStore::open(options(&of)).unwrap());
        for extension in ["kv", "index"] {
            let path = segments(&of).remove(0).with_extension(extension);
            let mut bytes = fs::read(&path).unwrap();
            for _ in 0..random.usize(1..20) {
                let at = random.usize(0..bytes.len() - 8) / 8 * 8;
                let number = *random.choice(&numbers).unwrap();
                bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            }
            if extension == "kv" {
                for header in
                    bytes.chunks_exact_mut(PAGE).filter(|page| page.starts_with(b"fbkvrec1"))
                {
                    with_checksum(header);
                }
            } else {
                with_checksum(&mut bytes);
            }
            bytes.truncate(random.usize(bytes.len() / 2..=bytes.len()));
            fs::write(&path, bytes).unwrap();
        }
        use_all(&of);
    }
}

#[test]
#[should_panic(expected = "overflow")]
fn sums_that_overflow_are_noticed_in_this_crate() {
    let sum = std::hint::black_box(u64::MAX) + std::hint::black_box(1);
    assert_eq!(sum, 0);
}
