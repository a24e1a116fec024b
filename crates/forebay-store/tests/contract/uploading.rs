//! Tests of loads to a device: the right bytes arrive, and no slot of the ring is reused while the device copies from
//! it.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use forebay_store::{
    Arena, BlockLabel, Extent, FaultKind, FaultPlan, FileIndex, LoadOptions, LoadStatistics,
    ReadEngine, ReadError, ReadSide, SlotBuffer, StoreError, Upload, UploadCopy, UploadError,
    UploadPart, UploadPlan, Uploader, Uploading,
};

use crate::support::{Bench, Kind, Noise, extent, half_cached, kinds, small_requests};

const BYTES: usize = 3_000_001;
const PIECE: usize = 64 << 10;
/// A piece that several threads copy from the page cache, in parts.
const LONG_PIECE: usize = 1 << 20;

/// A device that copies as late as possible: when a thread waits for it, or asks for the third time.
struct Device {
    memory: Arc<Mutex<Vec<u8>>>,
    copies: AtomicUsize,
    /// Number of the first copy that fails. All later copies fail too.
    fails_at: usize,
}

struct Copy {
    slot: SlotBuffer,
    copies: Vec<UploadCopy>,
    memory: Arc<Mutex<Vec<u8>>>,
    asked: AtomicUsize,
}

impl Upload for Device {
    fn begin(
        &self,
        slot: SlotBuffer,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Uploading>, UploadError> {
        if self.copies.fetch_add(1, Ordering::Relaxed) >= self.fails_at {
            return Err("the device is gone".into());
        }
        let (memory, asked) = (Arc::clone(&self.memory), AtomicUsize::new(0));
        Ok(Box::new(Copy { slot, copies: copies.to_vec(), memory, asked }))
    }
}

impl Uploading for Copy {
    fn is_done(&self) -> Result<bool, UploadError> {
        Ok(self.asked.fetch_add(1, Ordering::Relaxed) >= 2)
    }

    fn finish(self: Box<Self>) -> Result<SlotBuffer, UploadError> {
        let mut memory = self.memory.lock().unwrap();
        for UploadCopy { range, to } in &self.copies {
            let bytes = &self.slot.as_slice()[range.clone()];
            memory[*to as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        drop(memory);
        Ok(self.slot)
    }
}

/// Returns tensors that follow each other in a file with small gaps, one at its end, and two in another file.
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

/// Order of the tensors on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Places {
    /// The order of the file.
    Same,
    /// From the last to the first, with gaps.
    Scattered,
}

/// Returns the destination of each tensor, and the size of the device memory in bytes.
fn parts(places: Places) -> (Vec<UploadPart>, usize) {
    let mut at = 4096;
    let mut parts: Vec<UploadPart> = tensors()
        .into_iter()
        .enumerate()
        .map(|(number, extent)| {
            let label = BlockLabel::Other(number as u64);
            let to = 4096 + u64::from(extent.file.0) * BYTES as u64 + extent.offset;
            UploadPart { label, extent, to }
        })
        .collect();
    if places == Places::Same {
        return (parts, 4096 + BYTES + 20_000);
    }
    for part in parts.iter_mut().rev() {
        part.to = at;
        at += part.extent.length + 3;
    }
    (parts, at as usize)
}

/// Gives all slots for copies but one when the load has begun.
struct Late<'a> {
    engine: &'a mut dyn ReadEngine,
    read: &'a mut Vec<SlotBuffer>,
    more: Vec<SlotBuffer>,
    opened: bool,
}

impl ReadSide for Late<'_> {
    fn more_copied(&mut self) -> Result<Vec<SlotBuffer>, StoreError> {
        Ok(std::mem::take(&mut self.more))
    }

    fn open(&mut self) -> Result<(&mut dyn ReadEngine, &mut Vec<SlotBuffer>), StoreError> {
        self.opened = true;
        Ok((self.engine, self.read))
    }
}

type Uploaded = Result<LoadStatistics, StoreError>;

/// Loads all tensors to a device.
fn upload(
    bench: &mut Bench,
    options: LoadOptions,
    slots: usize,
    fails_at: usize,
    places: Places,
) -> (Uploaded, Vec<u8>, usize) {
    let (parts, bytes) = parts(places);
    let memory = Arc::new(Mutex::new(vec![255; bytes]));
    let device = Device { memory: Arc::clone(&memory), copies: AtomicUsize::new(0), fails_at };
    let plan = UploadPlan::new(&parts, &bench.files, options.piece_bytes);
    let slot_bytes = options.piece_bytes as usize + 8192;
    assert!(plan.slot_bytes() <= slot_bytes);
    let arena = Arena::map(slots * slot_bytes).unwrap();
    let slot = |_| arena.carve(slot_bytes).unwrap();
    let mut read: Vec<_> = (0..slots).map(slot).collect();
    let mut copied = read.split_off(if options.copy_threads == 0 { slots } else { slots / 2 });
    let files = &bench.files;
    let more = copied.split_off(copied.len().min(1));
    let mut reads = Late { engine: bench.engine.as_mut(), read: &mut read, more, opened: false };
    let uploader = Uploader { files, options, copied: &mut copied, reads: &mut reads };
    let mut last = (0, 0);
    let done = uploader.upload(&plan, &device, &mut |done, total| {
        assert!(done >= last.0 && done <= total, "progress runs backwards");
        last = (done, total);
        ControlFlow::Continue(())
    });
    if let Ok(statistics) = &done {
        assert_eq!(
            reads.opened,
            statistics.engine_bytes > 0,
            "an engine is opened if it is needed"
        );
        assert_eq!(last, (statistics.bytes, statistics.bytes), "the last report has all bytes");
    }
    assert!(done.is_err() || read.len() + copied.len() == slots, "the ring comes back");
    let memory = memory.lock().unwrap().clone();
    (done, memory, device.copies.into_inner())
}

fn options(copy_threads: usize, piece: usize) -> LoadOptions {
    LoadOptions { piece_bytes: piece as u64, copy_threads, probe_threads: 2, engine_bytes: 300_000 }
}

fn verify(bench: &Bench, memory: &[u8], places: Places, about: &str) {
    for part in parts(places).0 {
        let Extent { file, offset, length } = part.extent;
        let expected = &bench.images[file.0 as usize][offset as usize..(offset + length) as usize];
        let found = &memory[part.to as usize..][..length as usize];
        assert!(found == expected, "{about}: tensor at {offset} of {file:?}");
    }
}

#[test]
fn everything_arrives_from_disk_from_the_page_cache_and_from_both() {
    for kind in kinds() {
        let mut bench = Bench::new(kind, small_requests(), FaultPlan::default(), &[BYTES, 10_000]);
        for (copy_threads, slots, piece) in [
            (0, 2, PIECE),
            (0, 5, PIECE),
            (3, 2, PIECE),
            (3, 9, PIECE),
            (3, 64, PIECE),
            (0, 3, LONG_PIECE),
            (1, 2, LONG_PIECE),
            (7, 2, LONG_PIECE),
            (7, 8, LONG_PIECE),
        ] {
            for case in ["warm", "half", "cold"] {
                match case {
                    "half" if kind != Kind::Simulated => drop(half_cached(&bench.files)),
                    "cold" => drop(bench.files.drop_cached()),
                    _ => {}
                }
                for places in [Places::Same, Places::Scattered] {
                    let (done, memory, fills) =
                        upload(&mut bench, options(copy_threads, piece), slots, usize::MAX, places);
                    let wanted: u64 = tensors().iter().map(|extent| extent.length).sum();
                    assert_eq!(done.unwrap().bytes, wanted);
                    verify(
                        &bench,
                        &memory,
                        places,
                        &format!("{kind:?}, {case}, {slots} slots of {piece}"),
                    );
                    // Neighbours in the file share a piece, however small they are and wherever they go.
                    let most = match places {
                        Places::Same => BYTES.div_ceil(piece) + 3,
                        Places::Scattered => 2 * BYTES.div_ceil(piece),
                    };
                    assert!(fills <= most, "{fills} pieces, {places:?}");
                }
            }
        }
    }
}

#[test]
fn a_device_that_fails_ends_the_load() {
    for kind in kinds() {
        for (copy_threads, fails_at, piece) in
            [(0, 0, PIECE), (3, 0, PIECE), (3, 7, PIECE), (5, 1, LONG_PIECE)]
        {
            let faults = FaultPlan::default();
            let mut bench = Bench::new(kind, small_requests(), faults, &[BYTES, 10_000]);
            let (done, _, _) =
                upload(&mut bench, options(copy_threads, piece), 6, fails_at, Places::Same);
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
        let (done, _, _) = upload(&mut bench, options(0, PIECE), 4, usize::MAX, Places::Same);
        assert!(matches!(done, Err(StoreError::Block(ReadError::Io { .. }))), "{kind:?}: {done:?}");
    }
}
