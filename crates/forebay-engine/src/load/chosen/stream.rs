//! Chosen tensors one after the other, with bounded memory. A thread reads ahead.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use forebay_format::{StoredType, WeightsTable};
use forebay_store::{Interrupt, SLOT_ALIGNMENT};

use super::plan::Planned;
use super::staged::staging_bytes_max;
use super::{Choice, ChosenRequest, LoadedTensor, Opened};
use crate::EngineError;

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
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Bytes of tensors that are being read, are ready or were handed out last.
    live: u64,
    ready: VecDeque<(u64, Result<Vec<LoadedTensor>, EngineError>)>,
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
    /// Returns [`EngineError::BadOption`] if one tensor alone needs more than the budget, and the errors of
    /// [`super::load_chosen`] that occur before anything is read.
    pub fn start(
        table: Arc<WeightsTable>,
        mut choices: Vec<Choice>,
        mut request: ChosenRequest,
        order: StreamOrder,
        budget: u64,
    ) -> Result<TensorStream, EngineError> {
        if order == StreamOrder::Files {
            choices.sort_by_key(|choice| table.tensors()[choice.tensor].extent);
        }
        let staging_bytes = (request.staging_bytes as u64).min(budget / 4);
        request.staging_bytes = staging_bytes as usize;
        let batches = batches(&table, &choices, &request, budget)?;
        let opened = Opened::new(&table, &request)?;
        let shared = Arc::<Shared>::default();
        let interrupt = request.interrupt.clone();
        let read = {
            let shared = Arc::clone(&shared);
            let kept = Mutex::new(None);
            move || {
                read_batches(&shared, &batches, budget, &request.interrupt, &mut |choices| {
                    let mut go_on = |_, _| match request.interrupt.is_requested() {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    };
                    opened.load(&table, choices, &request, Some(&kept), &mut go_on)
                });
            }
        };
        let thread = thread::Builder::new().name("tensor-stream".into()).spawn(read);
        let thread = thread.map_err(|error| EngineError::BadOption {
            name: "threads",
            value: "0".into(),
            expected: format!("no thread could be started: {error}"),
        })?;
        Ok(TensorStream { shared, interrupt, thread: Some(thread), handed_out: 0 })
    }

    /// Returns the next tensors. What the call before has returned no longer counts towards the budget.
    ///
    /// # Errors
    /// Returns the error of the load. The stream then ends.
    pub fn next(&mut self, patience: Duration) -> Result<Next, EngineError> {
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

type Load<'a> = &'a mut dyn FnMut(&[Choice]) -> Result<Vec<LoadedTensor>, EngineError>;

fn read_batches(
    shared: &Shared,
    batches: &[(u64, Vec<Choice>)],
    budget: u64,
    interrupt: &Interrupt,
    load: Load<'_>,
) {
    let _finish = Finish(shared);
    for (bytes, choices) in batches {
        let mut state = shared.lock();
        while state.live > 0 && state.live + bytes > budget && !interrupt.is_requested() {
            state = shared.wait(state, LOOK);
        }
        if interrupt.is_requested() {
            return;
        }
        state.live += bytes;
        drop(state);
        let loaded = load(choices);
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
) -> Result<Vec<(u64, Vec<Choice>)>, EngineError> {
    let mut batches: Vec<(u64, Vec<Choice>)> = Vec::new();
    let mut is_staged = false;
    for choice in choices {
        let tensor = &table.tensors()[choice.tensor];
        let planned = Planned::new(table, choice, request.to_f32)?;
        let staging = match planned.direct() {
            None if planned.count > 0 => staging_bytes_max(request.staging_bytes),
            _ => 0,
        };
        // Compact weights of packs become BF16.
        let plain = match (&table.pack, tensor.ty) {
            (Some(_), StoredType::Tensor(ty)) => ty.plain().tensor_bytes(&tensor.shape),
            _ => None,
        };
        let bytes = plain.unwrap_or(0).max(planned.bytes());
        // A slot has room for the ends of aligned reads.
        let slot_bytes = bytes.saturating_add(2 * SLOT_ALIGNMENT as u64);
        if slot_bytes.saturating_add(staging) > budget {
            return Err(EngineError::BadOption {
                name: "budget",
                value: budget.to_string(),
                expected: format!(
                    "tensor {:?} alone needs {} bytes",
                    tensor.name,
                    slot_bytes.saturating_add(staging)
                ),
            });
        }
        // The tensors of a batch share the memory for conversions.
        let more = slot_bytes + if is_staged { 0 } else { staging };
        match batches.last_mut() {
            Some((sum, members)) if *sum + more <= budget / 2 => {
                *sum += more;
                is_staged |= staging > 0;
                members.push(*choice);
            }
            _ => {
                is_staged = staging > 0;
                batches.push((slot_bytes + staging, vec![*choice]));
            }
        }
    }
    Ok(batches)
}
