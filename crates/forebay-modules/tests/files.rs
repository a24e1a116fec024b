//! Weights in files: read ahead of their use, kept in RAM as far as it has room, and never wrong.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_codec::{Float, Weights};
use forebay_format::FileIndex;
use forebay_modules::{
    DeviceError, FileForm, GroupOptions, GroupTensor, HostDevice, ModuleWeights, StreamError,
    Streamer, StreamerOptions, TensorFile, TensorFrom, WeightOptions, WeightsBuilder,
};
use forebay_store::{Extent, FileSet};

const MIB: usize = 1 << 20;

/// Files with tensors at any offset, which are removed at the end.
struct Files {
    folder: PathBuf,
    paths: Vec<PathBuf>,
    contents: Vec<Vec<u8>>,
    /// The tensors of each group.
    groups: Vec<Vec<Extent>>,
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Files {
    /// Returns two files of BF16 weights with so many groups of up to two tensors.
    fn new(name: &str, random: &mut fastrand::Rng, groups: usize, bytes_max: usize) -> Files {
        let folder = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let paths = [0, 1].map(|at| folder.join(format!("{at}.bin"))).to_vec();
        let mut contents = vec![vec![1_u8; 777], vec![2; 8]];
        let mut extents = Vec::new();
        for _ in 0..groups {
            let mut of = Vec::new();
            for _ in 0..random.usize(1..3) {
                let file = random.usize(..2);
                let content = &mut contents[file];
                content.resize(content.len() + random.usize(..3) * 100, 9);
                let (offset, length) = (content.len() as u64, 2 * random.usize(1..bytes_max / 2));
                for _ in 0..length / 2 {
                    let bits = (random.f32() - 0.5).to_bits() >> 16;
                    content.extend(&bits.to_le_bytes()[..2]);
                }
                let file = FileIndex(file as u32);
                of.push(Extent { file, offset, length: length as u64 });
            }
            extents.push(of);
        }
        for (path, content) in paths.iter().zip(&contents) {
            fs::write(path, content).unwrap();
        }
        Files { folder, paths, contents, groups: extents }
    }

    fn bytes(&self, extent: Extent) -> &[u8] {
        &self.contents[extent.file.0 as usize][extent.offset as usize..extent.end() as usize]
    }

    fn all_bytes(&self) -> u64 {
        self.groups.iter().flatten().map(|extent| extent.length).sum()
    }

    fn weights(&self, ram: u64, codes: bool) -> Result<ModuleWeights, DeviceError> {
        let files = FileSet::open(&self.paths).unwrap();
        let mut builder = WeightsBuilder::new(WeightOptions { ram, threads: 2, codes });
        let source = builder.add_source(files);
        for group in &self.groups {
            let tensor = |extent: &Extent| GroupTensor {
                from: TensorFrom::File(TensorFile {
                    source,
                    extent: *extent,
                    form: FileForm::Plain,
                }),
                weights: Some(Weights::Plain(Float::Bf16)),
            };
            builder.add(&group.iter().map(tensor).collect::<Vec<_>>())?;
        }
        builder.finish()
    }

    fn stream(&self, ram: u64, codes: bool, room: u64) -> Stream<'_> {
        let weights = Arc::new(self.weights(ram, codes).unwrap());
        let group = |at| GroupOptions { bytes: weights.group_bytes(at), stays: false };
        let count = self.groups.len();
        let groups: Vec<_> = (0..count).map(group).collect();
        let largest = groups.iter().map(|group| group.bytes).max().unwrap();
        let units = (0..count).map(|at| vec![at]).collect();
        let predictions = vec![(0..count).collect()];
        let bytes = (largest + 512).max(room);
        let options = StreamerOptions { groups, units, predictions, bytes };
        let device = Arc::new(HostDevice::new());
        let streamer = Streamer::new(device, weights.clone(), options).unwrap();
        Stream { files: self, weights, streamer }
    }
}

struct Stream<'a> {
    files: &'a Files,
    weights: Arc<ModuleWeights>,
    streamer: Streamer<HostDevice>,
}

impl Stream<'_> {
    fn use_unit(&self, unit: usize) -> Result<(), StreamError> {
        let place = self.streamer.acquire(unit, 0, &mut || true)?[0];
        let memory = self.streamer.device().memory(place);
        let mut at = 0;
        for extent in &self.files.groups[unit] {
            let own = &memory.bytes()[at..at + extent.length as usize];
            assert!(own == self.files.bytes(*extent), "wrong weights of group {unit}");
            at += (extent.length as usize).next_multiple_of(512);
        }
        self.streamer.release(unit, 0)
    }

    /// Uses all modules, and returns the bytes that were read meanwhile.
    fn pass(&self) -> u64 {
        let before = self.weights.statistics().read_bytes;
        self.streamer.begin(0);
        (0..self.files.groups.len()).for_each(|unit| self.use_unit(unit).unwrap());
        self.streamer.end();
        self.weights.statistics().read_bytes - before
    }
}

#[test]
fn weights_are_those_of_the_files_whatever_the_order_and_the_memory() {
    for seed in 0..12 {
        let mut random = fastrand::Rng::with_seed(seed);
        let count = random.usize(1..20);
        let largest = [3 * MIB, 12 * MIB, MIB / 2][random.usize(..3)];
        let files = Files::new(&format!("order-{seed}"), &mut random, count, largest);
        let ram = 40 * MIB as u64 + random.u64(..=files.all_bytes());
        let stream = files.stream(ram, random.bool(), random.u64(..files.all_bytes()));
        for _ in 0..4 {
            stream.streamer.begin(0);
            for unit in 0..count {
                let unit = if random.u8(..5) == 0 { random.usize(..count) } else { unit };
                stream.use_unit(unit).unwrap();
            }
            stream.streamer.end();
            let of = stream.weights.statistics();
            assert!(of.ram_bytes + of.buffer_bytes <= ram, "{of:?} with {ram}");
        }
        for (group, extents) in files.groups.iter().enumerate() {
            for (index, extent) in extents.iter().enumerate() {
                let read = stream.weights.read_tensor(group, index).unwrap();
                assert!(read == files.bytes(*extent));
            }
        }
    }
}

#[test]
fn passes_read_what_ram_has_no_room_for() {
    let mut random = fastrand::Rng::with_seed(77);
    let mut files = Files::new("room", &mut random, 1, 8);
    // 16 groups of 4 MiB.
    files.contents[0] = (0..32 * MIB)
        .flat_map(|_| {
            let bits = (random.f32() - 0.5).to_bits() >> 16;
            [bits as u8, (bits >> 8) as u8]
        })
        .collect();
    fs::write(&files.paths[0], &files.contents[0]).unwrap();
    let extent = |at: usize| Extent {
        file: FileIndex(0),
        offset: (at * 4 * MIB) as u64,
        length: 4 * MIB as u64,
    };
    files.groups = (0..16).map(|at| vec![extent(at)]).collect();
    // With all RAM, nothing is read from the second pass on, but for what was read ahead.
    let stream = files.stream(u64::MAX, true, 0);
    let all = files.all_bytes();
    assert!(stream.pass() >= all);
    stream.pass();
    assert_eq!(stream.pass(), 0);
    let of = stream.weights.statistics();
    assert!(of.ram_bytes < all * 3 / 4, "weights in RAM are coded: {of:?}");
    // With little RAM, everything is read in each pass, and with half of it about half.
    for (ram, codes, least, most) in [(14, true, 0.9, 1.1), (14 + 30, false, 0.5, 0.7)] {
        let stream = files.stream((ram * MIB) as u64, codes, 0);
        let read: Vec<u64> = (0..6).map(|_| stream.pass()).collect();
        let mean = read[2..].iter().sum::<u64>() as f64 / 4.0 / all as f64;
        assert!((least..most).contains(&mean), "{mean} with {ram} MiB: {read:?}");
    }
}

#[test]
fn reads_that_fail_are_errors_of_their_use_and_the_next_one_works() {
    let mut random = fastrand::Rng::with_seed(3);
    let files = Files::new("fails", &mut random, 8, 3 * MIB);
    let stream = files.stream(12 * MIB as u64, false, 0);
    stream.pass();
    let set_length = |path: &Path, bytes: u64| {
        OpenOptions::new().write(true).open(path).unwrap().set_len(bytes).unwrap();
    };
    for path in &files.paths {
        set_length(path, 100);
    }
    let failed =
        (0..8).map(|unit| stream.use_unit(unit)).filter(Result::is_err).collect::<Vec<_>>();
    assert!(!failed.is_empty(), "something must be read again");
    for error in failed {
        assert!(matches!(error, Err(StreamError::Device(DeviceError::Source(_)))), "{error:?}");
    }
    for (path, content) in files.paths.iter().zip(&files.contents) {
        fs::write(path, content).unwrap();
    }
    stream.pass();
    stream.streamer.close().unwrap();
    assert_eq!(stream.use_unit(0), Err(StreamError::Closed));
}

#[test]
fn changed_weights_come_from_then_on() {
    let mut random = fastrand::Rng::with_seed(9);
    let mut files = Files::new("changed", &mut random, 6, 2 * MIB);
    let stream = files.stream(16 * MIB as u64, true, 0);
    stream.pass();
    let (group, tensor) = (3, files.groups[3].len() - 1);
    let extent = files.groups[group][tensor];
    let other: Vec<u8> = (0..extent.length).map(|_| random.u8(..)).collect();
    stream.weights.change_tensor(group, tensor, &other).unwrap();
    assert!(stream.weights.read_tensor(group, tensor).unwrap() == other);
    // Another group takes the place of what is there now.
    (0..6).for_each(|unit| {
        if unit != group {
            stream.use_unit(unit).unwrap()
        }
    });
    let weights = Arc::clone(&stream.weights);
    let streamer = stream.streamer;
    let range = extent.offset as usize..extent.end() as usize;
    files.contents[extent.file.0 as usize][range].copy_from_slice(&other);
    let stream = Stream { files: &files, weights, streamer };
    stream.pass();
    stream.pass();
}

#[test]
fn files_and_ram_that_are_too_small_are_refused() {
    let mut random = fastrand::Rng::with_seed(4);
    let mut files = Files::new("refused", &mut random, 4, 3 * MIB);
    let error = files.weights(3 * MIB as u64, false).err().unwrap();
    assert!(error.to_string().contains("bytes of RAM are needed"), "{error}");
    files.groups[0][0].length += 1 << 40;
    let error = files.weights(u64::MAX, false).err().unwrap();
    assert!(error.to_string().contains("but the file ends at"), "{error}");
}
