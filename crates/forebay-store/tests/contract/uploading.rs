//! Loads to a device: the right bytes arrive, and no slot of the ring is used again while it is copied from.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use forebay_store::{
    Arena, BlockLabel, Extent, FaultKind, FaultPlan, FileIndex, LoadOptions, LoadStatistics,
    Loader, ReadDone, ReadError, SlotBuffer, StoreError, Upload, UploadError, UploadItem,
    Uploading,
};

use crate::support::{Bench, Kind, Noise, extent, half_cached, kinds, small_requests};

const BYTES: usize = 3_000_001;
const PIECE: usize = 64 << 10;
const RING_SLOT: usize = PIECE + 8192;

/// A device that copies as late as it may: when somebody waits, or asks for the third time.
struct Device {
    memory: Arc<Mutex<Vec<u8>>>,
    copies: AtomicUsize,
    /// Copies from this one on fail.
    fails_at: usize,
}

struct Copy {
    slot: SlotBuffer,
    range: Range<usize>,
    to: usize,
    memory: Arc<Mutex<Vec<u8>>>,
    asked: AtomicUsize,
}

impl Upload for Device {
    fn begin(
        &self,
        slot: SlotBuffer,
        range: Range<usize>,
        to: u64,
    ) -> Result<Box<dyn Uploading>, UploadError> {
        if self.copies.fetch_add(1, Ordering::Relaxed) >= self.fails_at {
            return Err("the device is gone".into());
        }
        let (memory, asked) = (Arc::clone(&self.memory), AtomicUsize::new(0));
        Ok(Box::new(Copy { slot, range, to: to as usize, memory, asked }))
    }
}

impl Uploading for Copy {
    fn is_done(&self) -> Result<bool, UploadError> {
        Ok(self.asked.fetch_add(1, Ordering::Relaxed) >= 2)
    }

    fn finish(self: Box<Self>) -> Result<SlotBuffer, UploadError> {
        let bytes = &self.slot.as_slice()[self.range.clone()];
        self.memory.lock().unwrap()[self.to..self.to + bytes.len()].copy_from_slice(bytes);
        Ok(self.slot)
    }
}

/// Tensors as they follow each other in a file, with little between them, and one far away.
fn tensors() -> Vec<Extent> {
    let (mut noise, mut at, mut tensors) = (Noise(11), 7, Vec::new());
    while at + 400_000 < BYTES as u64 {
        let limit = if noise.below(2) == 0 { 900 } else { 350_000 };
        let length = 1 + noise.below(limit);
        tensors.push(extent(0, at, length));
        at += length + noise.below(40);
    }
    tensors.push(extent(0, BYTES as u64 - 1, 1));
    tensors.push(extent(1, 100, 9000));
    tensors.push(extent(1, 500, 0));
    tensors
}

type Uploaded = Result<(Vec<Result<ReadDone, ReadError>>, LoadStatistics), StoreError>;

/// Loads all tensors as one block to byte 4096 of a device.
fn upload(
    bench: &mut Bench,
    options: LoadOptions,
    slots: usize,
    fails_at: usize,
) -> (Uploaded, Vec<u8>, usize) {
    let layout = bench.files.plan(&tensors(), 4096);
    let memory = Arc::new(Mutex::new(vec![255; 4096 + layout.slot_bytes]));
    let device = Device { memory: Arc::clone(&memory), copies: AtomicUsize::new(0), fails_at };
    let items = [
        UploadItem { label: BlockLabel::Dense(0), layout, to: 4096 },
        UploadItem { label: BlockLabel::Dense(1), layout: bench.files.plan(&[], 4096), to: 0 },
    ];
    let arena = Arena::map(slots * RING_SLOT).unwrap();
    let slot = |_| arena.carve(RING_SLOT).unwrap();
    let mut ring: Vec<_> = (0..slots).map(slot).collect();
    let (engine, files) = (bench.engine.as_mut(), &bench.files);
    let loader = Loader { engine, files, options, ring: &mut ring };
    let done = loader.upload(&items, &device, &mut |done, total| assert!(done <= total));
    assert!(done.is_err() || ring.len() == slots, "the ring comes back");
    let memory = memory.lock().unwrap().clone();
    (done, memory, device.copies.into_inner())
}

fn options(copy_threads: usize) -> LoadOptions {
    LoadOptions { piece_bytes: PIECE as u64, copy_threads, scout_threads: 2, engine_bytes: 300_000 }
}

fn verify(bench: &Bench, memory: &[u8], about: &str) {
    let layout = bench.files.plan(&tensors(), 4096);
    for part in layout.parts.iter() {
        let Extent { file, offset, length } = part.extent;
        let expected = &bench.images[file.0 as usize][offset as usize..(offset + length) as usize];
        let found = &memory[4096 + part.at..][..length as usize];
        assert!(found == expected, "{about}: tensor at {offset} of {file:?}");
    }
}

#[test]
fn everything_arrives_from_disk_from_the_page_cache_and_from_both() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[BYTES, 10_000]);
        for (copy_threads, slots) in [(0, 2), (0, 5), (3, 2), (3, 9), (3, 64)] {
            for case in ["warm", "half", "cold"] {
                match case {
                    "half" if kind != Kind::Simulated => drop(half_cached(&bench.files)),
                    "cold" => drop(bench.files.drop_cached()),
                    _ => {}
                }
                let (done, memory, copies) =
                    upload(&mut bench, options(copy_threads), slots, usize::MAX);
                let (results, statistics) = done.unwrap();
                assert!(results.len() == 2 && results.iter().all(Result::is_ok));
                let wanted: u64 = tensors().iter().map(|extent| extent.length).sum();
                assert_eq!(statistics.bytes, wanted);
                verify(&bench, &memory, &format!("{kind:?}, {case}, {slots} slots"));
                // Neighbours travel together, however small: one copy for each whole piece and few more.
                assert!(copies <= BYTES.div_ceil(PIECE) + 3, "{copies} copies");
            }
        }
    }
}

#[test]
fn a_device_that_fails_ends_the_load() {
    for kind in kinds() {
        for (copy_threads, fails_at) in [(0, 0), (3, 0), (3, 7)] {
            let faults = FaultPlan::default();
            let mut bench = Bench::new(kind, small_requests(), faults, &[BYTES, 10_000]);
            let (done, _, _) = upload(&mut bench, options(copy_threads), 6, fails_at);
            let error = done.unwrap_err().to_string();
            assert!(error.contains("the device is gone"), "{error}");
        }
    }
}

#[test]
fn a_disk_that_fails_ends_the_load_with_its_error() {
    for kind in kinds().into_iter().filter(|&kind| kind != Kind::Mmap) {
        let always = FaultPlan::always(FileIndex(0), 700_000..700_001, FaultKind::Error(5));
        let mut bench = Bench::new(kind, small_requests(), always, &[BYTES, 10_000]);
        let (done, _, _) = upload(&mut bench, options(0), 4, usize::MAX);
        let (results, _) = done.unwrap();
        assert!(matches!(results[0], Err(ReadError::Io { .. })), "{kind:?}: {:?}", results[0]);
    }
}
