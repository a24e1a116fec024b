//! Reads weights from files: what a device waits for, then what it will take next.

use std::sync::Arc;
use std::time::Duration;

use forebay_store::{
    Arena, BlockLabel, BlockRead, Completion, EngineOptions, FileSet, IoKind, IoStatistics,
    Priority, ReadEngine, SlotBuffer, StoreError, open_engine,
};

use crate::buffers::{Bell, Buffers, Filled};
use crate::device::DeviceError;
use crate::room::Group;
use crate::stored::{StoredGroup, WeightFiles};
use crate::weights::{ReadState, Shared, State};

/// Bytes of buffers at most, and how much of the room for them.
const BUFFERS_MAX: u64 = 1 << 30;
const BUFFERS_SHARE: u64 = 4;
/// Fewest buffers: one that is read, one that waits and one that is used.
const BUFFERS_MIN: u64 = 3;
/// Requests at the disk.
const DEPTH: usize = 64;
/// Time after which the thread that reads looks for new work while reads are on their way.
const LOOK: Duration = Duration::from_millis(2);

/// The engines that read, and their buffers.
pub struct Reader {
    /// For each source, what reads its files as they are, and what decodes them. Only those that are needed.
    engines: Vec<[Option<Box<dyn ReadEngine>>; 2]>,
    buffers: Arc<Buffers>,
    bytes: u64,
    /// The group and its read of each number of a request.
    requests: Vec<Option<(Group, usize)>>,
}

impl Reader {
    /// Opens engines for the reads of these groups, with buffers that take a part of this room.
    ///
    /// # Errors
    /// Returns an error if files cannot be read, or if memory is missing.
    pub fn open(
        sources: &[WeightFiles],
        groups: &[StoredGroup],
        room: u64,
        bell: &Arc<Bell>,
    ) -> Result<Reader, DeviceError> {
        let failed = |error: StoreError| DeviceError::of_source(&error);
        let reads = || groups.iter().flat_map(|group| &group.reads);
        let slot = reads().map(|read| read.layout.slot_bytes).max().unwrap_or(0).max(4096);
        let wanted: u64 = reads().map(|read| read.layout.slot_bytes as u64).sum();
        let bytes = wanted.min(BUFFERS_MAX).min(room / BUFFERS_SHARE);
        let count = (bytes / slot as u64).max(BUFFERS_MIN) as usize;
        let arena = Arena::map(count * slot).map_err(failed)?;
        let open = |files: &FileSet| {
            let suited = EngineOptions::suited_to(files);
            let queue_depth = suited.queue_depth.min(DEPTH);
            let options = EngineOptions { queue_depth, background_depth: queue_depth, ..suited };
            open_engine(IoKind::Auto, files, &arena, &options).map_err(failed)
        };
        let needs = |source, is_stored| {
            reads().any(|read| read.source == source && read.is_stored == is_stored)
        };
        let engines = sources.iter().enumerate().map(|(source, files)| {
            let stored = needs(source, true).then(|| open(&files.stored)).transpose()?;
            let decoded = needs(source, false).then(|| open(&files.decoded)).transpose()?;
            Ok([stored, decoded])
        });
        let engines = engines.collect::<Result<Vec<_>, DeviceError>>()?;
        let slots = (0..count).map(|_| arena.carve(slot)).collect::<Result<Vec<_>, _>>();
        let buffers = Buffers::new(slots.map_err(failed)?, Arc::clone(bell));
        Ok(Reader { engines, buffers, bytes: (count * slot) as u64, requests: Vec::new() })
    }

    /// Returns the bytes of buffers.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn in_flight(&self) -> usize {
        self.engines.iter().flatten().flatten().map(|engine| engine.in_flight()).sum()
    }

    fn submit(&mut self, groups: &[StoredGroup], group: Group, read: usize, buffer: SlotBuffer) {
        let free = self.requests.iter().position(Option::is_none);
        let id = free.unwrap_or_else(|| {
            self.requests.push(None);
            self.requests.len() - 1
        });
        self.requests[id] = Some((group, read));
        let of = &groups[group].reads[read];
        let engine = self.engines[of.source][usize::from(!of.is_stored)].as_mut();
        let engine = engine.expect("the engines that are needed are open");
        let label = BlockLabel::Other(group as u64);
        let (layout, priority) = (of.layout.clone(), Priority::ReadAhead);
        engine.submit(BlockRead { id: id as u64, label, layout, buffer, priority });
    }

    /// Returns how a read has ended, with its group and its number there.
    fn end(
        &mut self,
        groups: &[StoredGroup],
        completion: Completion,
    ) -> Option<(Group, usize, ReadState)> {
        let (group, read) = self.requests.get_mut(completion.id as usize)?.take()?;
        let end = match (completion.result, completion.buffer) {
            (Ok(_), Some(buffer)) => {
                let buffer = Arc::new(Filled::new(buffer, &self.buffers));
                ReadState::Arrived(groups[group].reads[read].chunks_in(buffer))
            }
            (Err(error), buffer) => {
                if let Some(buffer) = buffer {
                    self.buffers.put(buffer);
                }
                ReadState::Failed(DeviceError::of_source(&error))
            }
            (Ok(_), None) => ReadState::Failed(DeviceError::Source("a read was lost".into())),
        };
        Some((group, read, end))
    }

    fn statistics(&self) -> IoStatistics {
        let mut all = IoStatistics::default();
        for engine in self.engines.iter().flatten().flatten() {
            let of = engine.io_statistics();
            all.bytes_read += of.bytes_read;
            all.busy_seconds += of.busy_seconds;
        }
        all
    }

    /// Waits a while for reads that end.
    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        for engine in self.engines.iter_mut().flatten().flatten() {
            if engine.in_flight() > 0 {
                engine.wait_for(LOOK, done)?;
            }
        }
        Ok(())
    }
}

/// Returns the next read to begin.
fn next(state: &State) -> Option<(Group, usize)> {
    let groups = state.taking.iter().chain(&state.expected);
    groups.copied().find_map(|group| Some((group, state.groups[group].next_read()?)))
}

/// Lets the buffers go of what is used last, if the read that a device waits for has none and gets none.
fn make_room(state: &mut State) -> Vec<ReadState> {
    let Some(taking) = state.taking else { return Vec::new() };
    let reads = &state.groups[taking].reads;
    let awaited = reads.iter().find(|of| !matches!(of, ReadState::Taken));
    if !matches!(awaited, Some(ReadState::Absent)) {
        return Vec::new();
    }
    let others = (0..state.groups.len()).filter(|group| !state.expected.contains(group));
    let last = others.chain(state.expected.iter().rev().copied());
    // Reads of the group itself are behind the one that is awaited.
    let victim = last
        .filter(|group| *group != taking)
        .chain([taking])
        .find(|group| state.groups[*group].reads.iter().any(has_arrived));
    victim.map(|victim| take_arrived(&mut state.groups[victim].reads)).unwrap_or_default()
}

fn has_arrived(read: &ReadState) -> bool {
    matches!(read, ReadState::Arrived(_))
}

/// Takes what has arrived, so that its buffers become free once the state is unlocked.
fn take_arrived(reads: &mut [ReadState]) -> Vec<ReadState> {
    let arrived = reads.iter_mut().filter(|read| has_arrived(read));
    arrived.map(|read| std::mem::replace(read, ReadState::Absent)).collect()
}

/// Reads until the weights are closed.
pub fn run(shared: &Shared, mut reader: Reader) {
    let mut done = Vec::new();
    loop {
        let rung = shared.bell.rung();
        let mut begins = Vec::new();
        let mut state = shared.lock();
        if state.closes {
            break;
        }
        while let Some((group, read)) = next(&state) {
            let Some(buffer) = reader.buffers.take() else { break };
            state.groups[group].reads[read] = ReadState::InFlight;
            begins.push((group, read, buffer));
        }
        let dropped = if begins.is_empty() { make_room(&mut state) } else { Vec::new() };
        drop(state);
        if !dropped.is_empty() {
            continue;
        }
        for (group, read, buffer) in begins {
            reader.submit(&shared.groups, group, read, buffer);
        }
        if reader.in_flight() == 0 {
            shared.bell.wait_past(rung);
            continue;
        }
        let waited = reader.wait(&mut done);
        let io = reader.statistics();
        let ends = done.drain(..).filter_map(|completion| reader.end(&shared.groups, completion));
        let ends: Vec<_> = ends.collect();
        let mut state = shared.lock();
        state.io = io;
        for (group, read, end) in ends {
            state.groups[group].reads[read] = end;
        }
        if let Err(error) = waited {
            state.lost = Some(DeviceError::of_source(&error));
            state.closes = true;
        }
        drop(state);
        shared.notify();
    }
    // What arrived gives its buffers back.
    let mut state = shared.lock();
    let dropped: Vec<_> =
        state.groups.iter_mut().map(|group| take_arrived(&mut group.reads)).collect();
    drop(state);
    drop(dropped);
    shared.notify();
}
