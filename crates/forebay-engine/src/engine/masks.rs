//! Masks of grammars, computed by threads of their own while a pass runs.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use forebay_grammar::{GrammarError, Matcher, STACK_BYTES};

use super::Engine;
use super::active::Active;
use super::request::RequestId;
use super::schedule::Part;
use crate::pass_logits::Masks;

/// Most threads. A mask takes 10 to 500 microseconds.
const THREADS_MAX: usize = 8;

/// Threads that compute masks. They end with this value.
#[derive(Default)]
pub struct MaskThreads {
    channels: Option<(Sender<Job>, Receiver<Job>)>,
}

/// A mask to compute, or a computed one.
pub struct Job {
    pub id: RequestId,
    matcher: Matcher,
    mask: Vec<u32>,
    computed: Result<(), GrammarError>,
}

impl Job {
    /// Returns the mask, if it could be computed.
    pub fn mask(&self) -> Option<&[u32]> {
        self.computed.is_ok().then_some(self.mask.as_slice())
    }
}

/// Masks that are needed after a pass.
pub struct PendingMasks<'a> {
    threads: &'a MaskThreads,
    /// Number of masks that have not come.
    pending: usize,
    /// Masks that have come.
    pub come: Vec<Job>,
}

impl PendingMasks<'_> {
    /// Waits for all masks.
    pub fn wait(&mut self) {
        let Some((_, results)) = &self.threads.channels else { return };
        while self.pending > 0 {
            self.pending -= 1;
            // If a thread has panicked, requests without their mask fail when they choose.
            self.come.extend(results.recv().ok());
        }
    }
}

impl MaskThreads {
    fn channels(&mut self) -> &(Sender<Job>, Receiver<Job>) {
        self.channels.get_or_insert_with(|| {
            let (jobs, waiting) = channel::<Job>();
            let (done, results) = channel();
            let waiting = Arc::new(Mutex::new(waiting));
            let cores = thread::available_parallelism().map_or(1, usize::from);
            for _ in 0..(cores / 2).clamp(1, THREADS_MAX) {
                let (waiting, done) = (waiting.clone(), done.clone());
                let builder = thread::Builder::new().name("masks".into()).stack_size(STACK_BYTES);
                let run = move || {
                    loop {
                        let job = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
                        let Ok(mut job) = job else { return };
                        job.computed = job.matcher.mask(&mut job.mask);
                        if done.send(job).is_err() {
                            return;
                        }
                    }
                };
                // Without any thread, requests fail when they choose, because they have no mask.
                let _ = builder.spawn(run);
            }
            (jobs, results)
        })
    }

    /// Returns the masks of a pass, of which so many were begun.
    pub fn pending(&self, begun: usize) -> PendingMasks<'_> {
        PendingMasks { threads: self, pending: begun, come: Vec::new() }
    }
}

impl Engine<'_> {
    /// Begins to compute the masks that are needed after these parts. Returns how many there are.
    pub(super) fn begin_masks(&mut self, parts: &[Part]) -> usize {
        let mut begun = 0;
        for part in parts {
            let active = &mut self.running[part.index];
            if !active.chooses_after(part.count) {
                continue;
            }
            let Some((matcher, mask)) = active.lend_matcher() else { continue };
            let job = Job { id: active.id, matcher, mask, computed: Ok(()) };
            begun += usize::from(self.masks.channels().0.send(job).is_ok());
        }
        begun
    }

    /// Gives masks to their requests.
    pub(super) fn return_masks(&mut self, masks: Vec<Job>) {
        for Job { id, matcher, mask, computed } in masks {
            if let Some(active) = self.running.iter_mut().find(|active| active.id == id) {
                active.return_matcher(matcher, mask, computed);
            }
        }
    }
}

/// The masks of the rows of a pass that have logits.
pub(super) struct MasksOfRows<'a> {
    pub pending: PendingMasks<'a>,
    /// The request of each row from which a token is chosen.
    pub requests: Vec<Option<&'a Active>>,
}

impl Masks for MasksOfRows<'_> {
    fn wait(&mut self) {
        self.pending.wait();
    }

    fn of_row(&self, row: usize) -> Option<&[u32]> {
        let request = self.requests[row]?;
        let come = self.pending.come.iter().find(|job| job.id == request.id);
        come.map_or_else(|| request.mask(), Job::mask)
    }
}
