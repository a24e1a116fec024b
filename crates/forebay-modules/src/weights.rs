//! Weights of modules in RAM and in files. Those in files are read ahead of their use, and as many of them stay in RAM as it has room for.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use forebay_store::{FileSet, IoStatistics};

use crate::buffers::Bell;
use crate::coded::{CodedChunk, coded_bytes, encode};
use crate::device::DeviceError;
use crate::plan::spread;
use crate::reading::{self, Reader};
use crate::room::Group;
use crate::source::{Outside, WeightSource};
use crate::stored::{
    GroupTensor, StoredGroup, TensorFrom, TensorPlace, WeightFiles, damaged, decode_tensor,
};

/// How weights are kept outside of the device.
#[derive(Debug, Clone, Copy)]
pub struct WeightOptions {
    /// Bytes of RAM for weights, and for buffers of reads.
    pub ram: u64,
    /// Threads that code weights.
    pub threads: usize,
    /// True if weights in RAM are coded where that makes them smaller.
    pub codes: bool,
}

/// The groups of a stream, as they are found.
pub struct WeightsBuilder {
    sources: Vec<WeightFiles>,
    options: WeightOptions,
    groups: Vec<StoredGroup>,
}

impl WeightsBuilder {
    /// Begins without groups.
    pub fn new(options: WeightOptions) -> WeightsBuilder {
        WeightsBuilder { sources: Vec::new(), options, groups: Vec::new() }
    }

    /// Adds files that weights come from. Returns the number of the source.
    pub fn add_source(&mut self, files: FileSet) -> usize {
        self.sources.push(WeightFiles::new(files));
        self.sources.len() - 1
    }

    /// Adds the tensors of a group, and returns its number.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or ends before a tensor does.
    ///
    /// # Panics
    /// Panics if a tensor comes from a source that was not added.
    pub fn add(&mut self, tensors: &[GroupTensor<'_>]) -> Result<Group, DeviceError> {
        let WeightOptions { threads, codes, .. } = self.options;
        self.groups.push(StoredGroup::new(tensors, &self.sources, threads, codes)?);
        Ok(self.groups.len() - 1)
    }

    /// Returns where the tensors of a group are, in their order.
    ///
    /// # Panics
    /// Panics if there is no such group.
    pub fn tensors(&self, group: Group) -> &[TensorPlace] {
        &self.groups[group].tensors
    }

    /// Returns the bytes of one tensor.
    ///
    /// # Errors
    /// Returns an error if they cannot be read, or are damaged.
    ///
    /// # Panics
    /// Panics if there is no such tensor.
    pub fn read_tensor(&self, group: Group, tensor: usize) -> Result<Vec<u8>, DeviceError> {
        self.groups[group].read_tensor(tensor, &self.sources)
    }

    /// Begins to read what is expected. After an error, the groups are as before.
    ///
    /// # Errors
    /// Returns an error if RAM is too small for buffers and for weights that are only there, or if files cannot be read.
    ///
    /// # Panics
    /// Panics if the system starts no thread.
    pub fn finish(&mut self) -> Result<ModuleWeights, DeviceError> {
        let WeightsBuilder { sources, options, groups } = self;
        let options = *options;
        let held: u64 = groups.iter().map(|group| coded_bytes(&group.held)).sum();
        let bell = Arc::new(Bell::default());
        let room = options.ram.saturating_sub(held);
        let reader = match groups.iter().any(|group| !group.reads.is_empty()) {
            true => Some(Reader::open(sources, groups, room, &bell)?),
            false => None,
        };
        let buffer_bytes = reader.as_ref().map_or(0, Reader::bytes);
        let needed = held + buffer_bytes;
        if needed > options.ram {
            return Err(DeviceError::Ram { needed, has: options.ram });
        }
        let (sources, groups) = (std::mem::take(sources), std::mem::take(groups));
        let state = State {
            groups: groups.iter().map(|group| GroupState::new(group.reads.len())).collect(),
            room: options.ram - needed,
            ..State::default()
        };
        let (state, arrived) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { groups, sources, options, state, arrived, bell });
        let thread = reader.map(|reader| {
            let own = Arc::clone(&shared);
            let builder = thread::Builder::new().name("weight-reads".into());
            builder.spawn(move || reading::run(&own, reader)).expect("the system starts a thread")
        });
        Ok(ModuleWeights { shared, thread: Mutex::new(thread), held, buffer_bytes })
    }
}

/// What weights take up outside of the device, and what was read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightStatistics {
    /// Bytes of all weights in a device.
    pub weight_bytes: u64,
    /// Bytes of weights in RAM.
    pub ram_bytes: u64,
    /// Bytes of buffers for reads.
    pub buffer_bytes: u64,
    /// Bytes of weights that are in files, as the files have them.
    pub file_bytes: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
}

/// Weights of modules outside of the device.
pub struct ModuleWeights {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    held: u64,
    buffer_bytes: u64,
}

pub struct Shared {
    pub groups: Vec<StoredGroup>,
    sources: Vec<WeightFiles>,
    options: WeightOptions,
    state: Mutex<State>,
    /// Notified when chunks have arrived.
    arrived: Condvar,
    /// Wakes the thread that reads.
    pub bell: Arc<Bell>,
}

#[derive(Default)]
pub struct State {
    pub groups: Vec<GroupState>,
    /// Groups that are taken next, the first one first.
    pub expected: Vec<Group>,
    /// The group that is being taken.
    pub taking: Option<Group>,
    /// The groups for which those that stay in RAM were chosen.
    planned: Vec<Group>,
    /// Bytes of groups from files in RAM, and room for them.
    resident_bytes: u64,
    room: u64,
    /// Bytes of chunks that were coded, before and after.
    plain_bytes: u64,
    coded_bytes: u64,
    pub closes: bool,
    /// Why nothing can be read any more.
    pub lost: Option<DeviceError>,
    pub io: IoStatistics,
}

pub struct GroupState {
    pub reads: Vec<ReadState>,
    /// True if the group is to stay in RAM once it has come from files.
    stays: bool,
    /// Its chunks from files, if they are in RAM.
    resident: Option<Arc<Vec<CodedChunk>>>,
    /// All its chunks, if its bytes are no longer those that it began with.
    changed: Option<Arc<Vec<CodedChunk>>>,
}

pub enum ReadState {
    Absent,
    InFlight,
    Arrived(Vec<CodedChunk>),
    /// Taken by the device.
    Taken,
    Failed(DeviceError),
}

impl GroupState {
    fn new(reads: usize) -> GroupState {
        let reads = (0..reads).map(|_| ReadState::Absent).collect();
        GroupState { reads, stays: false, resident: None, changed: None }
    }

    /// Returns the first read that has not begun, if the group is to be read.
    pub fn next_read(&self) -> Option<usize> {
        let is_absent = |read: &ReadState| matches!(read, ReadState::Absent);
        let is_read = self.resident.is_none() && self.changed.is_none();
        is_read.then(|| self.reads.iter().position(is_absent)).flatten()
    }
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn notify(&self) {
        self.arrived.notify_all();
    }

    /// Returns the bytes that a group from files has in RAM, or is expected to have there by what coding has saved so far.
    fn size_in_ram(&self, state: &State, group: Group) -> u64 {
        if let Some(chunks) = &state.groups[group].resident {
            return coded_bytes(chunks);
        }
        let ratio = match (self.options.codes, state.plain_bytes) {
            (true, 1..) => state.coded_bytes as f64 / state.plain_bytes as f64,
            _ => 1.0,
        };
        let chunks = self.groups[group].reads.iter().flat_map(|read| &read.chunks);
        let bytes = chunks.map(|chunk| match chunk.weights {
            Some(_) => (chunk.bytes as f64 * ratio).ceil() as u64,
            None => chunk.bytes_read(),
        });
        bytes.sum()
    }

    fn sizes_in_ram(&self, state: &State, groups: &[Group]) -> Vec<(Group, u64)> {
        groups.iter().map(|group| (*group, self.size_in_ram(state, *group))).collect()
    }
}

impl ModuleWeights {
    pub fn groups(&self) -> usize {
        self.shared.groups.len()
    }

    /// Returns the bytes that a group needs in a device.
    ///
    /// # Panics
    /// Panics if there is no such group.
    pub fn group_bytes(&self, group: Group) -> u64 {
        self.shared.groups[group].bytes
    }

    /// Returns the bytes of one tensor.
    ///
    /// # Errors
    /// Returns an error if they cannot be read, or are damaged.
    ///
    /// # Panics
    /// Panics if there is no such tensor.
    pub fn read_tensor(&self, group: Group, tensor: usize) -> Result<Vec<u8>, DeviceError> {
        let of = &self.shared.groups[group];
        let changed = self.shared.lock().groups[group].changed.clone();
        match changed {
            Some(changed) => decode_tensor(of.tensors[tensor], &changed),
            None => of.read_tensor(tensor, &self.shared.sources),
        }
    }

    /// Gives a tensor other bytes, which come to the device from now on. The group is in RAM then, even if it has no room for it.
    ///
    /// # Errors
    /// Returns an error if the other tensors of the group cannot be read.
    ///
    /// # Panics
    /// Panics if there is no such tensor, or if it has another number of bytes.
    pub fn change_tensor(
        &self,
        group: Group,
        tensor: usize,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let of = &self.shared.groups[group];
        assert_eq!(bytes.len() as u64, of.tensors[tensor].bytes);
        let other = |index| match index == tensor {
            true => Ok(bytes.to_vec()),
            false => self.read_tensor(group, index),
        };
        let all = (0..of.tensors.len()).map(other).collect::<Result<Vec<_>, _>>()?;
        let weights = of.weights();
        let tensors: Vec<GroupTensor<'_>> = all
            .iter()
            .zip(weights)
            .map(|(bytes, weights)| GroupTensor { from: TensorFrom::Ram(bytes), weights: *weights })
            .collect();
        let WeightOptions { threads, codes, .. } = self.shared.options;
        let changed = StoredGroup::new(&tensors, &[], threads, codes)?.held;
        let mut state = self.shared.lock();
        let before = state.groups[group].resident.take();
        state.resident_bytes -= before.map_or(0, |chunks| coded_bytes(&chunks));
        let of = &mut state.groups[group];
        (of.changed, of.stays) = (Some(Arc::new(changed)), false);
        Ok(())
    }

    pub fn statistics(&self) -> WeightStatistics {
        let state = self.shared.lock();
        let groups = || self.shared.groups.iter();
        WeightStatistics {
            weight_bytes: groups().map(|group| group.bytes).sum(),
            ram_bytes: self.held + state.resident_bytes + state.changed_bytes(),
            buffer_bytes: self.buffer_bytes,
            file_bytes: groups().map(StoredGroup::read_bytes).sum(),
            read_bytes: state.io.bytes_read,
        }
    }
}

impl Drop for ModuleWeights {
    fn drop(&mut self) {
        self.close();
    }
}

impl State {
    fn changed_bytes(&self) -> u64 {
        let changed = self.groups.iter().filter_map(|group| group.changed.as_ref());
        changed.map(|chunks| coded_bytes(chunks)).sum()
    }
}

/// Bytes that a device may need for each chunk that stays coded, beside its own.
const CHUNK_OVERHEAD: u64 = 64;
/// How much better another choice of what stays in RAM must be.
const BETTER: f64 = 1.1;

impl WeightSource<Arriving> for ModuleWeights {
    fn take(&self, group: Group) -> Result<Arriving, DeviceError> {
        let mut state = self.shared.lock();
        let held: VecDeque<CodedChunk> = self.shared.groups[group].held.iter().cloned().collect();
        let mut arriving = Arriving {
            shared: Arc::clone(&self.shared),
            group,
            here: held,
            next: 0,
            reads: self.shared.groups[group].reads.len(),
            kept: None,
        };
        let of = &mut state.groups[group];
        if let Some(changed) = &of.changed {
            arriving.here = changed.iter().cloned().collect();
            arriving.reads = 0;
        } else if let Some(resident) = &of.resident {
            arriving.here.extend(resident.iter().cloned());
            arriving.reads = 0;
        }
        if arriving.reads > 0 {
            // What failed before is tried again.
            let failed = of.reads.iter_mut().filter(|of| matches!(of, ReadState::Failed(_)));
            failed.for_each(|read| *read = ReadState::Absent);
            arriving.kept = of.stays.then(Vec::new);
            state.taking = Some(group);
            // Once it is taken, it would be read again.
            state.expected.retain(|expected| *expected != group);
            self.shared.bell.ring();
        }
        Ok(arriving)
    }

    fn expects_max(&self) -> usize {
        match self.buffer_bytes {
            0 => 0,
            _ => 64,
        }
    }

    fn expect(&self, groups: &[Group]) {
        let mut state = self.shared.lock();
        if state.expected != groups {
            state.expected = groups.to_vec();
            drop(state);
            self.shared.bell.ring();
        }
    }

    fn plan(&self, order: &[Group]) {
        let mut state = self.shared.lock();
        let from_files = |group: &&Group| {
            let reads = &self.shared.groups[**group].reads;
            !reads.is_empty() && state.groups[**group].changed.is_none()
        };
        let order: Vec<Group> = order.iter().filter(from_files).copied().collect();
        let sizes = self.shared.sizes_in_ram(&state, &order);
        let chosen = spread(&sizes, state.room);
        let bytes = |is_chosen: &dyn Fn(Group) -> bool| -> u64 {
            sizes.iter().filter(|(group, _)| is_chosen(*group)).map(|(_, bytes)| bytes).sum()
        };
        let now = bytes(&|group| state.groups[group].stays);
        let then = bytes(&|group| chosen.contains(&group));
        if order == state.planned && then as f64 <= BETTER * now as f64 {
            return;
        }
        state.planned = order;
        let mut left = Vec::new();
        for (group, of) in state.groups.iter_mut().enumerate() {
            of.stays = chosen.contains(&group);
            if !of.stays {
                left.extend(of.resident.take());
            }
        }
        state.resident_bytes -= left.iter().map(|chunks| coded_bytes(chunks)).sum::<u64>();
    }

    fn outside(&self, groups: &[Group], more_ram: u64) -> Vec<Outside> {
        let state = self.shared.lock();
        let sizes = self.shared.sizes_in_ram(&state, &state.planned);
        let chosen = spread(&sizes, state.room.saturating_add(more_ram));
        let outside = |group: &Group| {
            let (of, its) = (&self.shared.groups[*group], &state.groups[*group]);
            if let Some(changed) = &its.changed {
                return Outside { bytes: coded_bytes(changed), read_bytes: 0 };
            }
            let read_bytes = of.read_bytes();
            let (bytes, read_bytes) = match its.resident.is_some() || chosen.contains(group) {
                true => (self.shared.size_in_ram(&state, *group), 0),
                false => (read_bytes, read_bytes),
            };
            Outside { bytes: coded_bytes(&of.held) + bytes, read_bytes }
        };
        groups.iter().map(outside).collect()
    }

    fn coded_bytes(&self, group: Group) -> Option<u64> {
        let of = &self.shared.groups[group];
        let changed = self.shared.lock().groups[group].changed.clone();
        let chunks: u64 = match &changed {
            Some(changed) => coded_bytes(changed) + CHUNK_OVERHEAD * changed.len() as u64,
            None => {
                let reads = of.reads.iter().flat_map(|read| &read.chunks);
                let read = reads.map(|chunk| chunk.bytes_in_ram() + CHUNK_OVERHEAD).sum::<u64>();
                coded_bytes(&of.held) + CHUNK_OVERHEAD * of.held.len() as u64 + read
            }
        };
        Some(chunks)
    }

    fn read_bytes_per_second(&self) -> Option<f64> {
        let io = self.shared.lock().io;
        let is_known = io.bytes_read > 0 && io.busy_seconds > 0.0;
        is_known.then(|| io.bytes_read as f64 / io.busy_seconds)
    }

    fn buffer_bytes(&self) -> u64 {
        self.buffer_bytes
    }

    fn close(&self) {
        self.shared.lock().closes = true;
        self.shared.bell.ring();
        self.shared.notify();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // The thread does not panic: an error of the disk is a value.
            let _ = thread.join();
        }
    }
}

/// The chunks of a group, as they arrive.
pub struct Arriving {
    shared: Arc<Shared>,
    group: Group,
    /// Chunks that are in RAM.
    here: VecDeque<CodedChunk>,
    /// The next read to wait for, and number of reads.
    next: usize,
    reads: usize,
    /// The chunks so far, if the group is to stay in RAM.
    kept: Option<Vec<CodedChunk>>,
}

impl Iterator for Arriving {
    type Item = Result<CodedChunk, DeviceError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.here.is_empty() {
            if self.next == self.reads {
                return None;
            }
            match self.arrive() {
                Ok(chunks) => self.here.extend(chunks),
                Err(error) => return Some(Err(error)),
            }
        }
        self.here.pop_front().map(Ok)
    }
}

impl Arriving {
    /// Returns true if there is no other chunk.
    pub fn is_at_end(&self) -> bool {
        self.here.is_empty() && self.next == self.reads
    }

    /// Returns true if the next chunk is still on its way.
    pub fn is_late(&self) -> bool {
        self.here.is_empty() && self.next < self.reads && {
            let state = self.shared.lock();
            let read = &state.groups[self.group].reads[self.next];
            matches!(read, ReadState::Absent | ReadState::InFlight)
        }
    }

    /// Waits for the next read.
    fn arrive(&mut self) -> Result<Vec<CodedChunk>, DeviceError> {
        let mut state = self.shared.lock();
        let mut chunks = loop {
            if let Some(lost) = &state.lost {
                return Err(lost.clone());
            }
            if state.closes {
                return Err(DeviceError::Source("the stream of weights is closed".into()));
            }
            let read = &mut state.groups[self.group].reads[self.next];
            match std::mem::replace(read, ReadState::Taken) {
                ReadState::Arrived(chunks) => break chunks,
                ReadState::Failed(error) => {
                    *read = ReadState::Failed(error.clone());
                    return Err(error);
                }
                other => *read = other,
            }
            state = self.shared.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        self.shared.groups[self.group].reads[self.next].expand(&mut chunks)?;
        let chunks = match self.kept.is_some() {
            true => self.keep(chunks)?,
            false => chunks,
        };
        self.next += 1;
        if self.next == self.reads {
            self.end();
        }
        Ok(chunks)
    }

    /// Returns the same chunks in memory of their own, coded if that makes them smaller.
    fn keep(&mut self, chunks: Vec<CodedChunk>) -> Result<Vec<CodedChunk>, DeviceError> {
        let read = &self.shared.groups[self.group].reads[self.next];
        let weights = |at: u64| read.chunks.iter().find(|of| of.at == at).and_then(|of| of.weights);
        let is_plain = |chunk: &&CodedChunk| {
            chunk.codec == forebay_codec::Codec::Raw && chunk.expansion.is_none()
        };
        let plain: Vec<_> = chunks.iter().filter(is_plain).collect();
        let to_code: Vec<_> =
            plain.iter().map(|chunk| (chunk.at, &chunk.coded[..], weights(chunk.at))).collect();
        let coded =
            encode(&to_code, self.shared.options.threads).map_err(|error| damaged(&error))?;
        let can = |chunk: &&CodedChunk| weights(chunk.at).is_some();
        let before: u64 = plain.iter().filter(|of| can(of)).map(|of| of.bytes as u64).sum();
        let after = coded.iter().filter(can).map(|of| of.coded.len() as u64).sum::<u64>();
        {
            let mut state = self.shared.lock();
            state.plain_bytes += before;
            state.coded_bytes += after;
        }
        let others = chunks.iter().filter(|chunk| !is_plain(chunk));
        let copied =
            others.map(|chunk| CodedChunk { coded: chunk.coded.to_vec().into(), ..chunk.clone() });
        let own: Vec<CodedChunk> = coded.into_iter().chain(copied).collect();
        self.kept.get_or_insert_default().extend(own.iter().cloned());
        Ok(own)
    }

    /// Notes that everything has arrived.
    fn end(&mut self) {
        let mut state = self.shared.lock();
        if let Some(kept) = self.kept.take() {
            let bytes = coded_bytes(&kept);
            let fits = state.resident_bytes + bytes <= state.room;
            let of = &mut state.groups[self.group];
            if of.stays && fits {
                of.resident = Some(Arc::new(kept));
                state.resident_bytes += bytes;
            }
        }
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        if self.reads == 0 {
            return;
        }
        let mut state = self.shared.lock();
        state.taking = None;
        let reads = &mut state.groups[self.group].reads;
        let taken = reads.iter_mut().filter(|of| matches!(of, ReadState::Taken));
        taken.for_each(|read| *read = ReadState::Absent);
        drop(state);
        self.shared.bell.ring();
    }
}
