//! Files with known bytes, and engines of every kind that read them.

use std::io::Write as _;
use std::time::Duration;

use forebay_store::{
    Arena, BlockLabel, BlockLayout, BlockRead, Completion, DiskModel, EngineOptions, Extent,
    FaultPlan, FileIndex, FileSet, IoKind, IoRecorder, Priority, ReadEngine, StoreError,
    VirtualClock, open_engine, open_faulty_engine, open_simulated_engine,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Uring,
    Pread,
    Mmap,
    Simulated,
}

/// Returns the engines that work here. Prints a message for each one that does not.
pub fn kinds() -> Vec<Kind> {
    let files = FileSet::in_memory(Vec::new());
    let arena = Arena::reserve(4096).unwrap();
    let mut kinds = vec![Kind::Pread, Kind::Simulated];
    match open_engine(IoKind::Mmap, &files, &arena, &EngineOptions::default()) {
        Ok(_) => kinds.push(Kind::Mmap),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: the contract of mmap: {error}");
        }
    }
    match open_engine(IoKind::Uring, &files, &arena, &EngineOptions::default()) {
        Ok(_) => kinds.push(Kind::Uring),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "SKIPPED: the contract of io_uring: {error}");
        }
    }
    kinds
}

/// A deterministic generator of random numbers.
pub struct Noise(pub u64);

impl Noise {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }
}

pub fn image(seed: u64, bytes: usize) -> Vec<u8> {
    let mut noise = Noise(seed | 1);
    let mut image = Vec::with_capacity(bytes + 8);
    while image.len() < bytes {
        image.extend_from_slice(&noise.next().to_le_bytes());
    }
    image.truncate(bytes);
    image
}

pub fn extent(file: u32, offset: u64, length: u64) -> Extent {
    Extent { file: FileIndex(file), offset, length }
}

/// An engine and the files of known content that it reads.
pub struct Bench {
    pub engine: Box<dyn ReadEngine>,
    pub files: FileSet,
    pub arena: Arena,
    pub images: Vec<Vec<u8>>,
    pub folder: tempfile::TempDir,
    pub recorder: IoRecorder,
}

pub const ARENA_BYTES: usize = 16 << 20;

impl Bench {
    pub fn new(kind: Kind, options: EngineOptions, faults: FaultPlan, sizes: &[usize]) -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let mut images = Vec::new();
        let mut paths = Vec::new();
        for (index, &bytes) in sizes.iter().enumerate() {
            images.push(image(index as u64 + 17, bytes));
            paths.push(folder.path().join(format!("weights-{index}")));
            std::fs::write(&paths[index], &images[index]).unwrap();
        }
        let arena = Arena::reserve(ARENA_BYTES).unwrap();
        let files = match kind {
            Kind::Simulated => FileSet::in_memory(images.clone()),
            _ => FileSet::open(&paths).unwrap(),
        };
        let recorder = IoRecorder::new(10_000);
        let files = files.recorded(&recorder);
        let engine = open(kind, &files, &arena, &options, faults).unwrap();
        Bench { engine, files, arena, images, folder, recorder }
    }

    pub fn layout(&self, extents: &[Extent]) -> BlockLayout {
        BlockLayout::plan(extents, self.files.alignment())
    }

    pub fn submit(&mut self, id: u64, priority: Priority, extents: &[Extent]) {
        let read = self.read(id, priority, extents);
        self.engine.submit(read);
    }

    pub fn queue(&mut self, id: u64, priority: Priority, extents: &[Extent]) {
        let read = self.read(id, priority, extents);
        self.engine.queue(read);
    }

    fn read(&self, id: u64, priority: Priority, extents: &[Extent]) -> BlockRead {
        let layout = self.layout(extents);
        let mut buffer = self.arena.carve(layout.slot_bytes).unwrap();
        buffer.as_mut_slice().fill(0x5A);
        let label = BlockLabel::Expert { layer: 4, expert: id as u32 };
        BlockRead { id, label, layout, buffer, priority }
    }

    /// Waits until nothing is in flight. Returns the completions in the order of their arrival.
    pub fn finish(&mut self) -> Vec<Completion> {
        let mut done = Vec::new();
        while self.engine.in_flight() > 0 {
            let before = done.len();
            self.engine.wait(&mut done).unwrap();
            assert!(done.len() > before, "wait came back with nothing");
        }
        done
    }

    pub fn finish_one(&mut self) -> Completion {
        let mut done = self.finish();
        assert_eq!(done.len(), 1);
        done.pop().unwrap()
    }

    /// Checks that a completion succeeded with exactly the bytes of the files.
    pub fn verify(&self, completion: &Completion, extents: &[Extent]) {
        self.verify_in(completion, extents, &self.layout(extents));
    }

    /// Does the same as [`Bench::verify`] for a slot with this layout.
    pub fn verify_in(&self, completion: &Completion, extents: &[Extent], layout: &BlockLayout) {
        let done = completion.result.as_ref().unwrap();
        assert!(done.bytes_read >= extents.iter().map(|e| e.length).max().unwrap_or(0));
        let slot = completion.buffer.as_ref().unwrap().as_slice();
        for (part, extent) in layout.parts.iter().zip(extents) {
            let start = extent.offset as usize;
            let wanted =
                &self.images[extent.file.0 as usize][start..start + extent.length as usize];
            let got = &slot[part.at..part.at + extent.length as usize];
            assert!(got == wanted, "wrong bytes for {extent:?} of read {}", completion.id);
        }
    }
}

pub fn open(
    kind: Kind,
    files: &FileSet,
    arena: &Arena,
    options: &EngineOptions,
    faults: FaultPlan,
) -> Result<Box<dyn ReadEngine>, StoreError> {
    let kind = match kind {
        Kind::Uring => IoKind::Uring,
        Kind::Pread => IoKind::Pread,
        Kind::Mmap => IoKind::Mmap,
        Kind::Simulated => {
            let clock = VirtualClock::default();
            return open_simulated_engine(files, options, DiskModel::default(), &clock, faults);
        }
    };
    open_faulty_engine(kind, files, arena, options, faults)
}

/// Leaves only every other 256 KiB of the first file in the page cache. Returns false and prints a
/// message if pages cannot be dropped.
pub fn half_cached(files: &FileSet) -> bool {
    if let Err(error) = files.drop_cached() {
        let _ = writeln!(std::io::stderr(), "SKIPPED: half of a page cache: {error}");
        return false;
    }
    let step = 256 << 10;
    let bytes = files.file_bytes(FileIndex(0)).unwrap();
    for offset in (0..bytes).step_by(2 * step as usize) {
        let length = step.min(bytes - offset);
        files.read_exact(extent(0, offset, length), &mut vec![0; length as usize]).unwrap();
    }
    true
}

pub fn small_requests() -> EngineOptions {
    EngineOptions { request_bytes: 16 << 10, queue_depth: 16, ..EngineOptions::default() }
}

pub fn stalling_after(milliseconds: u64) -> EngineOptions {
    EngineOptions { stall_timeout: Duration::from_millis(milliseconds), ..small_requests() }
}
