//! The thread that runs the engine. Callers talk to it through a channel.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_engine::engine::{EngineStatistics, KvBlocks, Request, RequestId, Sink};
use forebay_engine::{Engine, EngineError, KvTierStatistics, SessionStatistics, WeightUse};
use forebay_grammar::STACK_BYTES;

use crate::rates::{Collected, History};

/// Passes that may fail one after the other before the requests end with an error. Each one tries the same rows again.
const FAILURES_MAX: u32 = 3;

/// Time between two reports of statistics that take long to collect.
const REPORT_EVERY: Duration = Duration::from_millis(250);

/// Time without requests after which KV blocks are written to the disk.
const IDLE: Duration = Duration::from_secs(1);
/// Longest time for which these writes delay a request that comes meanwhile.
const WRITE_WHEN_IDLE: Duration = Duration::from_millis(500);
/// Longest time for which writes of KV blocks delay another model that needs the memory.
const WRITE_AT_END: Duration = Duration::from_millis(200);

/// State of the engine for metrics.
#[derive(Clone, Debug)]
pub struct Report {
    pub waiting: usize,
    pub running: usize,
    /// Most requests that run at a time.
    pub running_max: usize,
    pub engine: EngineStatistics,
    pub session: SessionStatistics,
    pub kv: KvBlocks,
    pub kv_tiers: KvTierStatistics,
    /// Use of weights up to the last pass.
    pub weights: WeightUse,
    pub live: Collected,
}

/// Who asks: what the engine keeps apart, and whom it serves in turn. It has no default, so that nobody forgets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// Requests share keys and values of equal prefixes only with requests of the same namespace.
    pub namespace: Vec<u8>,
    /// Number that tells one caller from another.
    pub share: u64,
}

impl Caller {
    /// Returns the caller of a process that has only one.
    pub fn only() -> Caller {
        Caller { namespace: Vec::new(), share: 0 }
    }
}

/// A running engine. Its thread ends when the last handle to it is gone and no request is left.
pub struct Worker {
    commands: Sender<Command>,
    report: Arc<Mutex<Report>>,
    failure: Arc<Mutex<Option<String>>>,
    is_broken: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

enum Command {
    Submit {
        request: Box<Request>,
        sink: Sink,
        reply: Box<dyn FnOnce(Submitted) + Send>,
    },
    Cancel(RequestId),
    /// Writes KV blocks to the disk, and says when that is done.
    WriteKv {
        limit: Duration,
        done: Sender<()>,
    },
    Stop,
}

type Submitted = Result<RequestId, EngineError>;

/// A request on the engine. Dropping it cancels the request.
pub struct Ticket {
    id: RequestId,
    commands: Sender<Command>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // The engine does nothing if the request has ended, and has ended itself if the channel is closed.
        let _ = self.commands.send(Command::Cancel(self.id));
    }
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns an error if the system starts no thread.
    pub fn start(engine: Engine<'static>) -> std::io::Result<Worker> {
        let report = Arc::new(Mutex::new(report(
            &engine,
            engine.session().statistics(),
            Collected::default(),
        )));
        let failure = Arc::new(Mutex::new(None));
        let is_broken = Arc::new(AtomicBool::new(false));
        let (commands, received) = channel();
        let thread = Thread {
            engine,
            received,
            report: report.clone(),
            failure: failure.clone(),
            is_broken: is_broken.clone(),
            failures: 0,
            reported: Instant::now(),
            history: History::default(),
        };
        // It runs parsers of grammars, too.
        let builder = thread::Builder::new().name("engine".into()).stack_size(STACK_BYTES);
        let thread = builder.spawn(move || thread.run())?;
        Ok(Worker { commands, report, failure, is_broken, thread: Some(thread) })
    }

    /// Queues a request of this caller. `reply` gets its ticket on the engine's thread, or an error if the queue is full or the prompt does
    /// not fit. If the engine has ended, `reply` is dropped.
    pub fn submit(
        &self,
        caller: &Caller,
        request: Request,
        sink: Sink,
        reply: impl FnOnce(Result<Ticket, EngineError>) + Send + 'static,
    ) {
        let Caller { namespace, share } = caller.clone();
        let request = Request { namespace, share, ..request };
        let commands = self.commands.clone();
        let reply = move |submitted: Submitted| {
            reply(submitted.map(|id| Ticket { id, commands }));
        };
        let command = Command::Submit { request: Box::new(request), sink, reply: Box::new(reply) };
        // A channel that is closed drops the command.
        let _ = self.commands.send(command);
    }

    /// Queues a request, and waits until the engine has taken it.
    ///
    /// # Errors
    /// Returns an error if the queue is full or the prompt does not fit. Returns `None` if the engine has ended.
    pub fn submit_and_wait(
        &self,
        caller: &Caller,
        request: Request,
        sink: Sink,
    ) -> Option<Result<Ticket, EngineError>> {
        let (reply, submitted) = channel();
        self.submit(caller, request, sink, move |result| drop(reply.send(result)));
        submitted.recv().ok()
    }

    /// Writes KV blocks to the disk that later requests may use, after the requests that run. Returns what receives a message
    /// when that is done.
    pub fn write_kv(&self, limit: Duration) -> Receiver<()> {
        let (done, received) = channel();
        // If the engine has ended, nothing is received.
        let _ = self.commands.send(Command::WriteKv { limit, done });
        received
    }

    /// Returns true if passes kept failing, or if the thread has panicked. The model should then be loaded again.
    pub fn is_broken(&self) -> bool {
        let has_ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        has_ended || self.is_broken.load(Ordering::Relaxed)
    }

    /// Returns the state after the last pass.
    pub fn report(&self) -> Report {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns why the last requests that were cancelled by an error of the engine failed.
    pub fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine's thread has panicked");
        }
    }
}

fn report(engine: &Engine, session: SessionStatistics, live: Collected) -> Report {
    let (waiting, running) = engine.load();
    Report {
        waiting,
        running,
        running_max: engine.running_max(),
        engine: engine.statistics(),
        session,
        kv: engine.kv_blocks(),
        kv_tiers: engine.kv_tiers(),
        weights: engine.weight_use(),
        live,
    }
}

struct Thread {
    engine: Engine<'static>,
    received: Receiver<Command>,
    report: Arc<Mutex<Report>>,
    failure: Arc<Mutex<Option<String>>>,
    is_broken: Arc<AtomicBool>,
    /// Passes that failed since the last one that did not.
    failures: u32,
    reported: Instant,
    history: History,
}

impl Thread {
    fn run(mut self) {
        while self.take_commands() {
            match self.engine.step() {
                Ok(_) => self.failures = 0,
                Err(error) => self.note_failure(&error),
            }
            // Without work, `take_commands` makes the report, whole, so that nobody sees an idle engine with old rates.
            if self.engine.load() != (0, 0) {
                self.update_report(self.reported.elapsed() >= REPORT_EVERY);
            }
        }
        self.engine.cancel_all();
        self.write_kv(true, WRITE_AT_END);
    }

    /// Takes all commands that wait, and waits for one if no request is left. Returns false if the thread should end.
    fn take_commands(&mut self) -> bool {
        if self.engine.load() == (0, 0) {
            self.update_report(true);
            let Some(command) = self.next_when_idle() else { return false };
            if !self.take(command) {
                return false;
            }
            // A cancelled request that has ended is no work.
            if self.engine.load() != (0, 0) {
                self.history.resume();
            }
        }
        loop {
            let goes_on = match self.received.try_recv() {
                Ok(command) => self.take(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => false,
            };
            if !goes_on {
                return false;
            }
        }
    }

    /// Waits for a command. If none comes for a while, this writes KV blocks that have earned it, so that they survive the
    /// process however it ends.
    fn next_when_idle(&mut self) -> Option<Command> {
        match self.received.recv_timeout(IDLE) {
            Err(RecvTimeoutError::Timeout) => {}
            received => return received.ok(),
        }
        self.write_kv(false, WRITE_WHEN_IDLE);
        self.update_report(true);
        self.received.recv().ok()
    }

    fn write_kv(&mut self, everything: bool, limit: Duration) {
        if let Err(error) = self.engine.write_kv(everything, limit) {
            tracing::warn!("KV blocks are not written to the disk: {error}");
        }
    }

    /// Returns false if the thread should end.
    fn take(&mut self, command: Command) -> bool {
        match command {
            Command::Submit { request, sink, reply } => {
                reply(self.engine.submit(*request, sink));
            }
            Command::Cancel(id) => self.engine.cancel(id),
            Command::WriteKv { limit, done } => {
                self.write_kv(true, limit);
                let _ = done.send(());
            }
            Command::Stop => return false,
        }
        true
    }

    /// Ends all requests if passes keep failing.
    fn note_failure(&mut self, error: &EngineError) {
        self.failures += 1;
        tracing::warn!(failures = self.failures, "a pass failed: {error}");
        if self.failures >= FAILURES_MAX {
            self.failures = 0;
            let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            *failure = Some(error.to_string());
            drop(failure);
            self.is_broken.store(true, Ordering::Relaxed);
            self.engine.cancel_all();
        }
    }

    /// Updates the report. Statistics that take long to collect stay as they are unless the report `is_due`.
    fn update_report(&mut self, is_due: bool) {
        let collected = is_due.then(|| {
            let session = self.engine.session().statistics();
            let live = self.history.collect(&self.engine, &session);
            (session, live)
        });
        let mut current = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        let (session, live) =
            collected.unwrap_or_else(|| (current.session.clone(), current.live.clone()));
        *current = report(&self.engine, session, live);
        if is_due {
            self.reported = Instant::now();
        }
    }
}
