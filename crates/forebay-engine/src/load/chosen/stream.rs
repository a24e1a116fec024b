//! Chosen tensors one after the other, with bounded memory. A thread reads ahead.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_format::{WeightsTable, at_least, at_most};
use forebay_options::{BadOption, OptionName};
use forebay_store::Interrupt;

use super::plan::Planned;
use super::staged::staging_bytes_max;
use super::{Choice, ChosenRequest, LoadedTensor, Opened};
use crate::load::error::LoadError;

/// Time after which the reading thread looks at the interrupt again.
const LOOK: Duration = Duration::from_millis(50);

/// Answer of [`TensorStream::next`].
pub enum Next {
    Tensors(Vec<LoadedTensor>),
    End,
    /// Nothing has arrived within the time that the caller waits.
    NotYet,
}

/// Tensors that arrive one after the other.
pub struct TensorStream {
    shared: Arc<Shared>,
    interrupt: Interrupt,
    thread: Option<JoinHandle<()>>,
    /// Bytes of the tensors that were handed out last.
    handed_out: u64,
    /// Bytes of the files that hold the tensors.
    total: u64,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Bytes of the files that were read.
    done: AtomicU64,
}

/// Tensors that are read at once.
struct Batch {
    /// Bytes of memory.
    bytes: u64,
    /// Bytes of the files.
    wanted: u64,
    choices: Vec<Choice>,
}

#[derive(Default)]
struct State {
    /// Bytes of tensors that are being read, are ready or were handed out last.
    live: u64,
    ready: VecDeque<(u64, Result<Vec<LoadedTensor>, LoadError>)>,
    is_finished: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Order of the tensors of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamOrder {
    /// That of the files, which is fastest.
    Files,
    /// That of the caller's choices.
    Choices,
}

impl TensorStream {
    /// Starts to read `choices`. Tensors that are being read, that wait for the caller and
    /// that the last call of [`TensorStream::next`] returned take at most `budget` bytes together, with the memory for
    /// conversions.
    ///
    /// # Errors
    /// Returns [`LoadError::Option`] if one tensor alone needs more than the budget, and the errors of
    /// [`super::load_chosen`] that occur before anything is read.
    pub fn start(
        table: Arc<WeightsTable>,
        mut choices: Vec<Choice>,
        mut request: ChosenRequest,
        order: StreamOrder,
        budget: u64,
    ) -> Result<TensorStream, LoadError> {
        if order == StreamOrder::Files {
            choices.sort_by_key(|choice| table.tensors()[choice.tensor].extent);
        }
        let staging_bytes = (request.staging_bytes as u64).min(budget / 4);
        request.staging_bytes = staging_bytes as usize;
        let opened = Opened::new(&table, &request)?;
        let batches = batches(&table, &choices, &request, budget, &opened)?;
        let shared = Arc::<Shared>::default();
        let interrupt = request.interrupt.clone();
        let total = batches.iter().map(|batch| batch.wanted).sum();
        let read = {
            let shared = Arc::clone(&shared);
            let kept = Mutex::new(None);
            move || {
                let mut before = 0;
                read_batches(&shared, &batches, budget, &request.interrupt, &mut |batch| {
                    let Batch { wanted, choices, .. } = batch;
                    let mut go_on = |done: u64, total: u64| {
                        // A load counts what it reads, which may be more than what is wanted.
                        let share = done as f64 / total.max(1) as f64;
                        let done = before + (*wanted as f64 * share) as u64;
                        shared.done.store(done, Ordering::Relaxed);
                        match request.interrupt.is_requested() {
                            true => ControlFlow::Break(()),
                            false => ControlFlow::Continue(()),
                        }
                    };
                    let loaded = opened.load(&table, choices, &request, Some(&kept), &mut go_on)?;
                    before += wanted;
                    shared.done.store(before, Ordering::Relaxed);
                    Ok(loaded)
                });
            }
        };
        let thread = thread::Builder::new().name("tensor-stream".into()).spawn(read);
        let thread = thread.map_err(|error| {
            LoadError::Option(BadOption {
                name: OptionName::Threads,
                value: "0".into(),
                expected: format!("no thread could be started: {error}"),
            })
        })?;
        Ok(TensorStream { shared, interrupt, thread: Some(thread), handed_out: 0, total })
    }

    /// Returns the bytes of the files that were read, and those that are read in total.
    pub fn progress(&self) -> (u64, u64) {
        (self.shared.done.load(Ordering::Relaxed), self.total)
    }

    /// Returns the next tensors. What the call before has returned no longer counts towards the budget.
    ///
    /// # Errors
    /// Returns the error of the load. The stream then ends.
    pub fn next(&mut self, patience: Duration) -> Result<Next, LoadError> {
        let mut state = self.shared.lock();
        if self.handed_out > 0 {
            state.live -= std::mem::take(&mut self.handed_out);
            self.shared.changed.notify_all();
        }
        if state.ready.is_empty() && !state.is_finished {
            state = self.shared.wait(state, patience);
        }
        match state.ready.pop_front() {
            Some((bytes, loaded)) => {
                self.handed_out = bytes;
                loaded.map(Next::Tensors)
            }
            None if state.is_finished => Ok(Next::End),
            None => Ok(Next::NotYet),
        }
    }
}

impl Drop for TensorStream {
    fn drop(&mut self) {
        self.interrupt.request();
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has ended the stream already.
            let _ = thread.join();
        }
    }
}

/// Sets the end of a stream even if the reading thread panics.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.lock().is_finished = true;
        self.0.changed.notify_all();
    }
}

type Load<'a> = &'a mut dyn FnMut(&Batch) -> Result<Vec<LoadedTensor>, LoadError>;

fn read_batches(
    shared: &Shared,
    batches: &[Batch],
    budget: u64,
    interrupt: &Interrupt,
    load: Load<'_>,
) {
    let _finish = Finish(shared);
    for batch in batches {
        let bytes = &batch.bytes;
        let mut state = shared.lock();
        while state.live > 0 && state.live + bytes > budget && !interrupt.is_requested() {
            state = shared.wait(state, LOOK);
        }
        if interrupt.is_requested() {
            return;
        }
        state.live += bytes;
        drop(state);
        let loaded = load(batch);
        let failed = loaded.is_err();
        shared.lock().ready.push_back((*bytes, loaded));
        shared.changed.notify_all();
        if failed {
            return;
        }
    }
}

/// Divides tensors into batches of up to half of the budget, with the bytes that each needs.
fn batches(
    table: &WeightsTable,
    choices: &[Choice],
    request: &ChosenRequest,
    budget: u64,
    opened: &Opened,
) -> Result<Vec<Batch>, LoadError> {
    let margin = opened.margin();
    let mut batches: Vec<Batch> = Vec::new();
    let mut staged = 0;
    for choice in choices {
        let tensor = &table.tensors()[choice.tensor];
        let planned = Planned::new(table, choice, request.to_f32)?;
        let staging = match planned.direct() {
            None if planned.count > 0 => staging_bytes_max(&planned, request.staging_bytes, margin),
            _ => 0,
        };
        let (slot_bytes, wanted) = (opened.slot_bytes(&planned, request), planned.wanted_bytes());
        if slot_bytes.saturating_add(staging) > budget {
            return Err(LoadError::Option(BadOption {
                name: OptionName::Budget,
                value: at_most(budget),
                expected: format!(
                    "tensor {:?} alone needs {}",
                    tensor.name,
                    at_least(slot_bytes.saturating_add(staging))
                ),
            }));
        }
        // The tensors of a batch share the memory for conversions.
        let more = slot_bytes + staging.saturating_sub(staged);
        match batches.last_mut() {
            Some(batch) if batch.bytes + more <= budget / 2 => {
                batch.bytes += more;
                batch.wanted += wanted;
                batch.choices.push(*choice);
                staged = staged.max(staging);
            }
            _ => {
                staged = staging;
                batches.push(Batch { bytes: slot_bytes + staging, wanted, choices: vec![*choice] });
            }
        }
    }
    Ok(batches)
}
