//! Weights of modules in device memory: on demand, and ahead of their use.

mod loading;
mod planning;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use crate::device::{Device, DeviceError};
use crate::order::{Root, Unit, UseOrder};
use crate::plan::Kept;
use crate::prediction::PassPrediction;
use crate::room::{ALIGNMENT, Group, Room, aligned};
use crate::source::WeightSource;
use crate::timing::{TimedUses, Timing};

/// Weights that are in the device together.
#[derive(Debug, Clone, Copy)]
pub struct GroupOptions {
    /// Bytes that they take in the device.
    pub bytes: u64,
    /// True if they stay in the device, because a module that uses them calls others meanwhile.
    pub stays: bool,
}

/// The modules of a stream, and what they use.
pub struct StreamerOptions {
    pub groups: Vec<GroupOptions>,
    /// The groups that each module uses. None has one of them twice.
    pub units: Vec<Vec<Group>>,
    /// For each root, the modules in the order in which its first pass may use them.
    pub predictions: Vec<Vec<Unit>>,
    /// Bytes of device memory.
    pub bytes: u64,
}

/// Why weights are not there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// A module and the weights that stay are too large together.
    #[error(
        "weights of {needed} bytes must be in the device together, and it has {has} bytes for weights"
    )]
    TooSmall { needed: u64, has: u64 },
    /// Modules that the same thread uses have the memory that another one needs.
    #[error(
        "a module needs {needed} bytes for its weights while modules that call it use the memory for theirs"
    )]
    InUse { needed: u64 },
    /// The caller did not wait until the weights were there.
    #[error("waiting for weights was interrupted")]
    Interrupted,
    /// The stream was closed.
    #[error("the stream of weights is closed")]
    Closed,
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// What a stream has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamStatistics {
    /// Passes that ended.
    pub passes: u64,
    /// Uses that were not the expected ones.
    pub deviations: u64,
    /// Groups brought into the device, and their bytes there.
    pub loads: u64,
    pub loaded_bytes: u64,
    /// Groups decoded from where they stay coded in the device.
    pub decoded: u64,
    /// Those that a module waited for before their load was queued.
    pub late_loads: u64,
    /// Time of callers until loads were queued.
    pub waited: Duration,
}

/// Device memory for the weights of modules, which another library runs.
///
/// A caller tells when a pass begins and ends, and before and after each use of a module. Weights that the pass will use soon come in
/// the place of those that it will use last, as long as that is later. So as many weights as fit stay in the device from pass to pass, the
/// others come while modules before them compute, and no two of them are ever at the same place: whatever is written waits for the
/// points at which what was there has been used.
pub struct Streamer<D: Device> {
    shared: Arc<Shared<D>>,
    loaders: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared<D: Device> {
    device: Arc<D>,
    source: Arc<dyn WeightSource<D::Weights>>,
    groups: Vec<GroupOptions>,
    units: Vec<Vec<Group>>,
    /// The groups of each module that do not always stay.
    coming: Vec<Vec<Group>>,
    /// The modules that use each group.
    users: Vec<Vec<Unit>>,
    /// Bytes of each group in the device, and those that it takes up there.
    sizes: Vec<u64>,
    aligned: Vec<u64>,
    /// Bytes of device memory, and of the groups that always stay.
    bytes: u64,
    always_bytes: u64,
    /// Most loaders that stage weights at the same time. One more gives places to what is staged.
    staging_max: usize,
    state: Mutex<State<D>>,
    /// Notified when weights have come, or do not come.
    changed: Condvar,
    /// Notified when the loader may have work.
    work: Condvar,
}

struct State<D: Device> {
    order: UseOrder,
    /// The groups that stay from pass to pass, apart from those that always stay.
    kept: Kept,
    /// Where groups that stay begin in the device. The others are behind them, in `room`.
    fixed: HashMap<Group, u64>,
    /// Groups that stay coded.
    coded: HashMap<Group, CodedPlace<D::Coded>>,
    /// True for the modules of which all groups stay decoded.
    is_fixed: Vec<bool>,
    /// The queues that have used such modules.
    queues: Vec<D::Queue>,
    /// True while loaders begin nothing but what a caller waits for, because other groups are to stay.
    pauses: bool,
    /// Numbers of loaders that wait for work, of those that stage weights, and of callers that wait for weights.
    loaders_wait: usize,
    loaders_stage: usize,
    callers_wait: usize,
    /// Bytes of the groups that stay.
    fixed_bytes: u64,
    /// The points after which memory of groups that stay may be written.
    after: Vec<D::Point>,
    room: Room<D::Point>,
    groups: Vec<GroupState<D>>,
    /// What a caller waits for. Others wait for their turn, so that no two wait for memory that the other one has.
    demand: Option<Demand>,
    /// Groups whose loads failed, until a caller asks again.
    failed: HashMap<Group, StreamError>,
    /// Passes of each root that began.
    begun: Vec<u64>,
    /// Times of the pass that runs, if it is measured, and of the last measured pass of each root.
    measuring: Option<Timing<D::Moment>>,
    measured: Vec<Measured<D::Moment>>,
    /// True if times have become known for which nothing was planned yet.
    has_new_times: bool,
    /// Modules in use, for each thread.
    uses: HashMap<ThreadId, usize>,
    /// The error after which nothing is known about the device any more.
    lost: Option<DeviceError>,
    closes: bool,
    statistics: StreamStatistics,
}

/// Where a group stays coded.
struct CodedPlace<C> {
    range: Range<u64>,
    /// It, if it is there and no loader uses it.
    weights: Option<C>,
}

/// Times of a pass, and which groups stayed decoded then.
enum Measured<M> {
    No,
    /// They were noted, but the device has perhaps not reached all of them.
    Timing(Timing<M>, Vec<bool>),
    Times(TimedUses, Vec<bool>),
}

/// A module whose weights a caller waits for.
struct Demand {
    unit: Unit,
    thread: ThreadId,
    /// Its groups that are not there.
    groups: VecDeque<Group>,
    /// True if everything that may leave has left.
    is_last_try: bool,
}

struct GroupState<D: Device> {
    place: Place<D::Point>,
    near: Near<D::Staged>,
    /// Modules that use it, or wait for it with others.
    in_use: usize,
    /// The ends of uses, of which the device has perhaps not reached all.
    ends: Vec<D::Point>,
}

/// Whether weights without a place in the device are staged.
enum Near<S> {
    No,
    /// A loader stages them.
    Coming,
    Staged {
        weights: S,
        is_whole: bool,
    },
}

enum Place<P> {
    Absent,
    /// The loader queues its load.
    Queuing,
    There {
        at: u64,
        ready: P,
        /// True if the point is known to be reached.
        is_reached: bool,
    },
}

impl<D: Device> GroupState<D> {
    fn new() -> GroupState<D> {
        GroupState { place: Place::Absent, near: Near::No, in_use: 0, ends: Vec::new() }
    }

    fn is_absent(&self) -> bool {
        matches!(self.place, Place::Absent)
    }

    fn is_coming_near(&self) -> bool {
        matches!(self.near, Near::Coming)
    }

    fn ready(&self) -> Option<(u64, &D::Point)> {
        match &self.place {
            Place::There { at, ready, .. } => Some((*at, ready)),
            _ => None,
        }
    }

    /// Notes that it is no longer in the device. Returns the points after which its range may be written.
    fn leave(&mut self) -> Vec<D::Point> {
        let Place::There { ready, .. } = std::mem::replace(&mut self.place, Place::Absent) else {
            unreachable!("only groups that are there leave");
        };
        let mut points = std::mem::take(&mut self.ends);
        points.push(ready);
        points
    }
}

/// Points that are kept before those that are reached are looked for, since asking the device takes time.
const POINTS_MAX: usize = 8;
/// Uses in a row that were expected, after which later ones are trusted enough to stage their weights.
const TRUSTED: u64 = 8;
/// Time after which a caller that waits is asked whether to wait on.
const ASKS_AFTER: Duration = Duration::from_millis(100);
/// How much more a plan must save than the one before, because all weights come again then.
const BETTER: f64 = 1.1;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<D: Device> Streamer<D> {
    /// Begins without weights in the device.
    ///
    /// # Errors
    /// Returns an error if a module and the weights that stay are larger than the memory.
    ///
    /// # Panics
    /// Panics if a number of a module or of a group is too large, or if the system starts no thread.
    pub fn new(
        device: Arc<D>,
        source: Arc<dyn WeightSource<D::Weights>>,
        options: StreamerOptions,
    ) -> Result<Streamer<D>, StreamError> {
        let StreamerOptions { groups, units, predictions, bytes } = options;
        let mut users = vec![Vec::new(); groups.len()];
        for (unit, of) in units.iter().enumerate() {
            of.iter().for_each(|group| users[*group].push(unit));
        }
        let sizes: Vec<u64> = groups.iter().map(|of| of.bytes).collect();
        let aligned: Vec<u64> = sizes.iter().map(|bytes| aligned(*bytes)).collect();
        let come = |unit: &Vec<Group>| -> Vec<Group> {
            unit.iter().copied().filter(|group| !groups[*group].stays).collect()
        };
        let coming: Vec<Vec<Group>> = units.iter().map(come).collect();
        let sum = |groups: &mut dyn Iterator<Item = Group>| -> u64 {
            groups.map(|group| aligned[group]).sum()
        };
        let always_bytes = sum(&mut (0..groups.len()).filter(|group| groups[*group].stays));
        let largest = coming.iter().map(|unit| sum(&mut unit.iter().copied())).max().unwrap_or(0);
        let needed = always_bytes + largest;
        if needed > bytes / ALIGNMENT * ALIGNMENT {
            return Err(StreamError::TooSmall { needed, has: bytes });
        }
        let predictions_len = predictions.len();
        let state = State {
            order: UseOrder::new(units.len(), predictions),
            kept: Kept::default(),
            fixed: HashMap::new(),
            coded: HashMap::new(),
            is_fixed: Vec::new(),
            queues: Vec::new(),
            pauses: false,
            loaders_wait: 0,
            loaders_stage: 0,
            callers_wait: 0,
            fixed_bytes: 0,
            after: Vec::new(),
            room: Room::new(0, Vec::new()),
            groups: groups.iter().map(|_| GroupState::new()).collect(),
            demand: None,
            begun: vec![0; predictions_len],
            measuring: None,
            measured: (0..predictions_len).map(|_| Measured::No).collect(),
            has_new_times: false,
            failed: HashMap::new(),
            uses: HashMap::new(),
            lost: None,
            closes: false,
            statistics: StreamStatistics::default(),
        };
        let (state, changed, work) = (Mutex::new(state), Condvar::new(), Condvar::new());
        // Weights of files come one after the other, as the disk reads them. Of those of RAM, one is queued while another one is copied.
        let staging_max = if source.expects_max() > 0 { 0 } else { 2 };
        let shared = Arc::new(Shared {
            device,
            source,
            groups,
            units,
            coming,
            users,
            sizes,
            aligned,
            bytes,
            always_bytes,
            staging_max,
            state,
            changed,
            work,
        });
        shared.plan(&mut lock(&shared.state));
        let loader = |_| {
            let own = shared.clone();
            let builder = thread::Builder::new().name("weights".into());
            builder.spawn(move || own.load_ahead()).expect("the system starts a thread")
        };
        let loaders = (0..=staging_max).map(loader).collect();
        Ok(Streamer { shared, loaders: Mutex::new(loaders) })
    }

    /// Notes that a pass of this root begins.
    pub fn begin(&self, root: Root) {
        let mut state = lock(&self.shared.state);
        state.order.begin(root);
        state.begun[root] += 1;
        // The first pass waits for all weights, and often for libraries that begin.
        let is_measured = state.begun[root] > 1 && state.begun[root].is_power_of_two();
        state.measuring = is_measured.then(Timing::new);
        self.shared.wake_loader(&state);
    }

    /// Notes that a pass has ended as a whole. A pass that fails does not end.
    pub fn end(&self) {
        let mut state = lock(&self.shared.state);
        // Those of passes before this one. An error of the device shows where a module is used.
        let _ = self.shared.resolve_times(&mut state);
        if let (Some(root), Some(timing)) = (state.order.end(), state.measuring.take()) {
            let stays = (0..state.groups.len()).map(|group| state.fixed.contains_key(&group));
            state.measured[root] = Measured::Timing(timing, stays.collect());
        }
        state.statistics.passes += 1;
        while !self.shared.plan(&mut state) && !state.closes && state.lost.is_none() {
            // The loaders end what they have begun, and begin nothing.
            (state.pauses, state.callers_wait) = (true, state.callers_wait + 1);
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.callers_wait -= 1;
        }
        state.pauses = false;
        self.shared.work.notify_all();
    }

    /// Notes that a module is used, by work that the caller queues next. Returns where its groups are in the device, in their order.
    /// They stay there until [`Streamer::release`]. `waits` is asked from time to time whether to wait on for weights that are not there.
    ///
    /// # Errors
    /// Returns an error if the weights cannot be brought, if the device fails, if the stream is closed, or if the caller does not wait. The
    /// module is then not in use.
    pub fn acquire(
        &self,
        unit: Unit,
        queue: D::Queue,
        waits: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u64>, StreamError> {
        self.shared.acquire(unit, queue, waits)
    }

    /// Notes that all work which uses a module is queued. The thread is the one that acquired it.
    ///
    /// # Errors
    /// Returns an error if the device fails. All later uses then fail, too.
    ///
    /// # Panics
    /// Panics if the module is not in use.
    pub fn release(&self, unit: Unit, queue: D::Queue) -> Result<(), StreamError> {
        self.shared.release(unit, queue)
    }

    /// Notes that a group that is in use has other weights from now on. They are those of the device, and of the source.
    pub fn change(&self, group: Group) {
        let mut state = lock(&self.shared.state);
        if let Some(coded) = state.coded.get_mut(&group) {
            coded.weights = None;
        }
    }

    pub fn device(&self) -> &Arc<D> {
        &self.shared.device
    }

    pub fn statistics(&self) -> StreamStatistics {
        let state = lock(&self.shared.state);
        StreamStatistics { deviations: state.order.deviations(), ..state.statistics }
    }

    /// Predicts a pass of this root that is like the last one, if there were so many more bytes of memory in the device, and of RAM. Returns
    /// `None` until a pass was measured, which is the second one.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    ///
    /// # Panics
    /// Panics if there is no such root.
    pub fn predict(
        &self,
        root: Root,
        more: u64,
        more_ram: u64,
    ) -> Result<Option<PassPrediction>, StreamError> {
        self.shared.predict(root, more, more_ram)
    }

    /// Stops, and waits until the device no longer uses the memory. Later uses fail.
    ///
    /// # Errors
    /// Returns an error if the device fails. The memory must then not be used again.
    pub fn close(&self) -> Result<(), StreamError> {
        lock(&self.shared.state).closes = true;
        self.shared.changed.notify_all();
        self.shared.work.notify_all();
        self.shared.source.close();
        let loaders = std::mem::take(&mut *lock(&self.loaders));
        if loaders.is_empty() {
            return Ok(());
        }
        for loader in loaders {
            // It does not panic: an error of the device is a value.
            let _ = loader.join();
        }
        let points: Vec<D::Point> = {
            let mut state = lock(&self.shared.state);
            if let Some(lost) = &state.lost {
                return Err(lost.clone().into());
            }
            // No loader is left that stages others.
            state.groups.iter_mut().for_each(|group| group.near = Near::No);
            state.coded.clear();
            let ready = |group: &mut GroupState<D>| {
                let ready = group.ready().map(|(_, ready)| ready.clone());
                ready.into_iter().chain(std::mem::take(&mut group.ends)).collect::<Vec<_>>()
            };
            let mut points: Vec<D::Point> = state.groups.iter_mut().flat_map(ready).collect();
            for queue in std::mem::take(&mut state.queues) {
                points.push(self.shared.device.mark(queue)?);
            }
            points
        };
        Ok(points.iter().try_for_each(|point| self.shared.device.reach(point))?)
    }
}

impl<D: Device> Drop for Streamer<D> {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::error!("a stream of weights ends without its device: {error}");
        }
    }
}

impl<D: Device> Shared<D> {
    fn acquire(
        &self,
        unit: Unit,
        queue: D::Queue,
        waits: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<u64>, StreamError> {
        let groups = &self.units[unit];
        let begin = |state: &mut State<D>| {
            let is_expected = state.order.note(unit);
            groups.iter().for_each(|group| state.groups[*group].in_use += 1);
            if !is_expected {
                self.wake_loader(state);
            }
        };
        let mut state = lock(&self.state);
        let arrives = match state.measuring {
            Some(_) => Some(self.device.moment(queue)?),
            None => None,
        };
        if self.are_there(&state, unit)? {
            begin(&mut state);
        } else {
            let started = Instant::now();
            while state.demand.is_some() {
                let (now, goes_on) = self.wait(state, waits);
                state = now;
                if !goes_on {
                    return Err(StreamError::Interrupted);
                }
            }
            begin(&mut state);
            let waited = self.demand(state, unit, waits);
            state = waited.0;
            state.statistics.waited += started.elapsed();
            if let Err(error) = waited.1 {
                self.give_up(&mut state, unit);
                return Err(error);
            }
        }
        let is_fixed = state.is_fixed[unit];
        let waits = groups.iter().map(|group| match &mut state.groups[*group].place {
            Place::There { at, ready, is_reached } => {
                // What comes and goes is hardly ever there for long.
                *is_reached = *is_reached || is_fixed && self.device.is_reached(ready);
                match is_reached {
                    true => Ok(*at),
                    false => self.device.wait(queue, ready).map(|()| *at),
                }
            }
            _ => unreachable!("all groups are there"),
        });
        let places = waits.collect::<Result<Vec<u64>, DeviceError>>();
        match places {
            Ok(places) => {
                if let (Some(timing), Some(arrives)) = (&mut state.measuring, arrives) {
                    // An error of the device shows where the module is used.
                    if let Ok(ready) = self.device.moment(queue) {
                        timing.add(unit, arrives, ready);
                    }
                }
                *state.uses.entry(thread::current().id()).or_default() += 1;
                Ok(places)
            }
            Err(error) => {
                self.give_up(&mut state, unit);
                Err(error.into())
            }
        }
    }

    /// Lets the groups of a module leave again that is not used after all.
    fn give_up(&self, state: &mut State<D>, unit: Unit) {
        self.units[unit].iter().for_each(|group| state.groups[*group].in_use -= 1);
        self.wake_loader(state);
    }

    /// Returns true if the loads of all groups of a module are queued.
    fn are_there(&self, state: &State<D>, unit: Unit) -> Result<bool, StreamError> {
        if let Some(lost) = &state.lost {
            return Err(lost.clone().into());
        }
        if state.closes {
            return Err(StreamError::Closed);
        }
        Ok(self.units[unit].iter().all(|group| state.groups[*group].ready().is_some()))
    }

    /// Waits until the loads of all groups of a module are queued. The caller has noted that it uses them.
    fn demand<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<D>>,
        unit: Unit,
        waits: &mut dyn FnMut() -> bool,
    ) -> (MutexGuard<'a, State<D>>, Result<(), StreamError>) {
        let groups = &self.units[unit];
        groups.iter().for_each(|group| drop(state.failed.remove(group)));
        let absent = |group: &Group| state.groups[*group].is_absent();
        let groups_absent: VecDeque<Group> = groups.iter().copied().filter(absent).collect();
        state.statistics.late_loads += groups_absent.len() as u64;
        let thread = thread::current().id();
        state.demand = Some(Demand { unit, thread, groups: groups_absent, is_last_try: false });
        self.wake_loader(&state);
        let done = loop {
            match self.are_there(&state, unit) {
                Ok(false) => {}
                Ok(true) => break Ok(()),
                Err(error) => break Err(error),
            }
            if let Some(error) = groups.iter().find_map(|group| state.failed.remove(group)) {
                break Err(error);
            }
            // What is near is queued at once, so no loader need wake up for it.
            if let Some((group, choice)) = self.next(&state)
                && groups.contains(&group)
                && self.is_near(&state, group)
            {
                state = self.load(state, group, choice);
                continue;
            }
            let (now, goes_on) = self.wait(state, waits);
            state = now;
            if !goes_on {
                break Err(StreamError::Interrupted);
            }
        };
        state.demand = None;
        self.wake_callers(&state);
        (state, done)
    }

    /// Waits for a change. Returns false if the caller does not wait any longer.
    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, State<D>>,
        waits: &mut dyn FnMut() -> bool,
    ) -> (MutexGuard<'a, State<D>>, bool) {
        let mut state = state;
        state.callers_wait += 1;
        let waited = self.changed.wait_timeout(state, ASKS_AFTER);
        let (mut state, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        state.callers_wait -= 1;
        if !timeout.timed_out() {
            return (state, true);
        }
        // The answer may need a lock of the caller, which another thread holds while it asks for this one.
        drop(state);
        let goes_on = waits();
        (lock(&self.state), goes_on)
    }

    fn release(&self, unit: Unit, queue: D::Queue) -> Result<(), StreamError> {
        let mut state = lock(&self.state);
        // Weights that stay are written again only after a point that comes then.
        let is_fixed = state.is_fixed[unit];
        let point = match is_fixed {
            true => Ok(None),
            false => self.device.mark(queue).map(Some),
        };
        if let Err(error) = &point {
            state.lost.get_or_insert_with(|| error.clone());
        }
        if is_fixed && !state.queues.contains(&queue) {
            state.queues.push(queue);
        }
        for group in &self.units[unit] {
            let of = &mut state.groups[*group];
            of.in_use = of.in_use.checked_sub(1).expect("the module is in use");
            if let Ok(Some(point)) = &point {
                if of.ends.len() >= POINTS_MAX {
                    of.ends.retain(|end| !self.device.is_reached(end));
                }
                of.ends.push(point.clone());
            }
        }
        if let Some(timing) = &mut state.measuring
            && let Ok(end) = self.device.moment(queue)
        {
            timing.end(end);
        }
        if let Some(uses) = state.uses.get_mut(&thread::current().id()) {
            *uses = uses.saturating_sub(1);
        }
        state.uses.retain(|_, uses| *uses > 0);
        if !is_fixed || state.demand.is_some() || point.is_err() {
            self.wake_loader(&state);
        }
        Ok(point.map(drop)?)
    }

    fn wake_loader(&self, state: &State<D>) {
        // Without a waiter, this would still be a call of the system.
        if state.loaders_wait > 0 {
            self.work.notify_one();
        }
    }

    fn wake_callers(&self, state: &State<D>) {
        if state.callers_wait > 0 {
            self.changed.notify_all();
        }
    }
}
