//! Tests of loads in which another library reads into device memory. All bytes arrive, whatever that library does.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_store::{
    BlockLabel, DeviceReader, DeviceSpan, Extent, FileIndex, FileSet, IoRecorder, LoadStatistics,
    ReadError, StoreError, StraightOptions, UploadPart, UploadPlan, load_straight,
};

use crate::support::{Noise, extent};

const BYTES: usize = 3_000_001;
const PIECE: u64 = 64 << 10;

/// Misbehaviour of the reader.
#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    Nothing,
    /// Reads only a part of each request, and is interrupted now and then.
    Short,
    /// Fails this many times in a row, then works.
    Fails(usize),
    Hangs,
    /// Reports that it read more than requested.
    TooMuch,
}

struct Reader {
    files: Vec<File>,
    memory: Mutex<Vec<u8>>,
    trouble: Trouble,
    noise: AtomicU64,
    failures: AtomicUsize,
}

impl DeviceReader for Reader {
    fn name(&self) -> &'static str {
        "test"
    }

    fn read(&self, span: DeviceSpan) -> io::Result<usize> {
        let mut noise = Noise(self.noise.fetch_add(977, Ordering::Relaxed) + 1);
        noise.next();
        let length = match self.trouble {
            Trouble::Short if noise.below(9) == 0 => {
                return Err(io::ErrorKind::Interrupted.into());
            }
            Trouble::Short => 1 + noise.below(span.length as u64) as usize,
            Trouble::Fails(times) if self.failures.fetch_add(1, Ordering::Relaxed) < times => {
                return Err(io::Error::from_raw_os_error(5));
            }
            Trouble::Hangs => {
                std::thread::sleep(Duration::from_secs(3));
                return Ok(span.length);
            }
            Trouble::TooMuch => return Ok(span.length + 1),
            _ => span.length,
        };
        let mut bytes = vec![0; length];
        let count = self.files[span.file.0 as usize].read_at(&mut bytes, span.offset)?;
        let to = span.to as usize;
        self.memory.lock().unwrap()[to..to + count].copy_from_slice(&bytes[..count]);
        Ok(count)
    }
}

struct Setup {
    files: FileSet,
    image: Vec<u8>,
    reader: Arc<Reader>,
    _folder: tempfile::TempDir,
}

fn setup(trouble: Trouble) -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights");
    let mut noise = Noise(5);
    let image: Vec<u8> = (0..BYTES).map(|_| noise.next() as u8).collect();
    std::fs::write(&path, &image).unwrap();
    let reader = Reader {
        files: vec![File::open(&path).unwrap()],
        memory: Mutex::new(vec![255; 2 * BYTES]),
        trouble,
        noise: AtomicU64::new(1),
        failures: AtomicUsize::new(0),
    };
    let files = FileSet::open(&[path]).unwrap();
    Setup { files, image, reader: Arc::new(reader), _folder: folder }
}

/// Returns parts of odd sizes. On the device they have gaps between them and the reverse order.
fn parts() -> Vec<UploadPart> {
    let (mut noise, mut at, mut parts) = (Noise(3), 11, Vec::new());
    while at + 400_000 < BYTES as u64 {
        let limit = if noise.below(2) == 0 { 900 } else { 350_000 };
        let length = 1 + noise.below(limit);
        let label = BlockLabel::Other(parts.len() as u64);
        parts.push(UploadPart { label, extent: extent(0, at, length), to: 0 });
        at += length + noise.below(40);
    }
    let mut to = 100;
    for part in parts.iter_mut().rev() {
        part.to = to;
        to += part.extent.length + 3;
    }
    parts
}

fn load(setup: &Setup, options: StraightOptions) -> Result<LoadStatistics, StoreError> {
    let plan = UploadPlan::new(&parts(), &setup.files, PIECE);
    let reader: Arc<dyn DeviceReader> = setup.reader.clone();
    load_straight(&reader, &setup.files, &plan, options, &mut |done, all| assert!(done <= all))
}

#[test]
fn everything_arrives_and_nothing_else_is_touched() {
    for (trouble, threads) in [
        (Trouble::Nothing, 1),
        (Trouble::Nothing, 7),
        (Trouble::Short, 1),
        (Trouble::Short, 16),
        (Trouble::Fails(3), 1),
    ] {
        let mut setup = setup(trouble);
        let recorder = IoRecorder::new(10_000);
        setup.files = setup.files.recorded(&recorder);
        let done = load(&setup, StraightOptions { threads, ..StraightOptions::default() }).unwrap();
        let wanted: u64 = parts().iter().map(|part| part.extent.length).sum();
        assert_eq!((done.bytes, done.engine_bytes, done.staging_bytes), (wanted, wanted, 0));
        let mut expected = vec![255; 2 * BYTES];
        for UploadPart { extent: Extent { offset, length, .. }, to, .. } in parts() {
            let bytes = &setup.image[offset as usize..(offset + length) as usize];
            expected[to as usize..(to + length) as usize].copy_from_slice(bytes);
        }
        assert!(*setup.reader.memory.lock().unwrap() == expected, "{threads} threads");
        let traced: u64 = recorder.take().reads.iter().map(|read| u64::from(read.bytes)).sum();
        assert_eq!(traced, wanted);
    }
}

#[test]
fn a_read_that_fails_too_often_ends_the_load_with_its_place() {
    let setup = setup(Trouble::Fails(usize::MAX));
    let options = StraightOptions { threads: 4, retries: 2, ..StraightOptions::default() };
    let error = load(&setup, options).unwrap_err();
    let StoreError::Block(ReadError::Io { attempts, source, file, .. }) = error else {
        panic!("{error}");
    };
    assert_eq!((attempts, source.raw_os_error()), (3, Some(5)));
    assert!(file.ends_with("weights"));
}

#[test]
fn more_than_was_asked_for_is_an_error() {
    let error = load(&setup(Trouble::TooMuch), StraightOptions::default()).unwrap_err();
    assert!(error.to_string().contains("more bytes"), "{error}");
}

#[test]
fn a_file_that_became_shorter_is_an_error_with_its_end() {
    let setup = setup(Trouble::Nothing);
    let path = setup.files.path(FileIndex(0)).unwrap();
    File::options().write(true).open(path).unwrap().set_len(1_000_000).unwrap();
    let error = load(&setup, StraightOptions::default()).unwrap_err();
    let StoreError::Block(ReadError::UnexpectedEnd { file_end, .. }) = error else {
        panic!("{error}");
    };
    assert!(file_end >= 1_000_000, "{file_end}");
}

#[test]
fn a_read_that_hangs_is_an_error_and_not_a_wait() {
    let setup = setup(Trouble::Hangs);
    let stall_timeout = Duration::from_millis(100);
    let options = StraightOptions { threads: 2, stall_timeout, ..StraightOptions::default() };
    let started = std::time::Instant::now();
    let error = load(&setup, options).unwrap_err();
    assert!(matches!(error, StoreError::Block(ReadError::Stalled { .. })), "{error}");
    assert!(started.elapsed() < Duration::from_secs(60));
}
