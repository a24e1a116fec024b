//! Threads for work that blocks. Callers take turns, and none can take all threads.
//!
//! Handlers await the work, so a thread that talks to clients never waits for it. Each caller has its own queue. The thread that
//! is free next takes a job of the caller whose turn it is.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use rustix::process::{Pid, getpriority_process, setpriority_process};
use rustix::thread::gettid;
use tokio::sync::oneshot;

use crate::caller::{Caller, Share};
use crate::error::ApiError;

/// Time after which work is no longer urgent: its thread then gives way to the engine and to shorter work.
const URGENT: Duration = Duration::from_millis(20);
/// Limit of work and of waits without one.
pub const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Priority of work that is not urgent, as by `nice`. It has a tenth of the time of a thread of usual priority.
const NICE: i32 = 10;
/// Longest time of work from its start, in multiples of the processor time that it may take.
const BUSY_MACHINE: u32 = 4;

/// Bounds of a [`Pool`].
#[derive(Clone, Copy, Debug)]
pub struct PoolOptions {
    /// Name of its threads.
    pub name: &'static str,
    /// What the work is, for the error of a caller whose queue is full.
    pub work: &'static str,
    /// Most threads. Each starts and ends with a job.
    pub threads: usize,
    /// Most threads that work for one caller.
    pub threads_each: usize,
    /// Most jobs of one caller that wait.
    pub waiting_each: usize,
    /// Longest time that a job waits for its start.
    pub waiting_time: Duration,
    pub stack_bytes: usize,
}

/// Threads for work that blocks. Work that runs goes on when the pool is dropped, and does not hold up the end of the program.
pub struct Pool(Arc<Shared>);

struct Shared {
    options: PoolOptions,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    threads: usize,
    /// Callers that have jobs.
    lanes: HashMap<Share, Lane>,
    /// Callers with a job that may start, the next one first.
    turns: VecDeque<Share>,
}

/// The jobs of one caller.
#[derive(Default)]
struct Lane {
    running: usize,
    waiting: VecDeque<Job>,
    has_turn: bool,
}

struct Job {
    run: Box<dyn FnOnce() + Send>,
    thread: Arc<Mutex<JobThread>>,
}

/// The thread that runs a job.
#[derive(Default)]
enum JobThread {
    #[default]
    NotYet,
    Runs(Pid),
    Ended,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn too_many(why: &str) -> ApiError {
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, why);
    ApiError { code: Some("too_many_requests"), ..error }
}

impl Pool {
    /// Creates a pool without threads.
    pub fn new(options: PoolOptions) -> Pool {
        Pool(Arc::new(Shared { options, state: Mutex::default() }))
    }

    /// Runs work of this caller on a thread, and waits for its result until it has taken `limit` of processor time, or four times
    /// that on a machine that is too busy to give it that. Work that takes longer goes on, and counts as the caller's until it
    /// ends. Work whose client has gone before it started does not run.
    ///
    /// # Errors
    /// Returns the errors of the work, and an error if too much work of this caller waits, if other work of the caller does not come
    /// to an end, or if the work takes too long or panics.
    pub async fn run<T: Send + 'static>(
        &self,
        caller: &Caller,
        limit: Option<Duration>,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (reply, done) = oneshot::channel();
        let (begin, begun) = oneshot::channel();
        let run = move || {
            if reply.is_closed() {
                return;
            }
            // An error means that nobody waits any more, which `reply` says, too.
            let _ = begin.send(());
            let _ = reply.send(catch_unwind(AssertUnwindSafe(work)));
        };
        let thread = Arc::new(Mutex::default());
        self.0.add(caller.share(), Job { run: Box::new(run), thread: thread.clone() })?;
        // A job that begins after all finds `reply` closed. An error of `begun` means that the job has ended.
        if tokio::time::timeout(self.0.options.waiting_time, begun).await.is_err() {
            let why =
                format!("earlier requests of yours are not done with {}", self.0.options.work);
            return Err(too_many(&format!("{why}: try again later")));
        }
        tokio::pin!(done);
        let limit = limit.unwrap_or(FOR_EVER);
        let longest = limit.saturating_mul(BUSY_MACHINE);
        let started = Instant::now();
        let mut wait = URGENT.min(limit);
        let done = loop {
            if let Ok(done) = tokio::time::timeout(wait, &mut done).await {
                break done;
            }
            let (passed, thread) = (started.elapsed(), lock(&thread));
            // Where the system does not tell, the time that has passed counts.
            let taken = thread.processor_time().unwrap_or(passed);
            if taken >= limit {
                let (work, seconds) = (self.0.options.work, limit.as_secs_f64());
                let why = format!("{work} takes longer than {seconds} seconds of processor time");
                return Err(ApiError::bad(why));
            }
            if passed >= longest {
                let (work, seconds) = (self.0.options.work, longest.as_secs_f64());
                let why = format!(
                    "the server is too busy: {work} is not done after {seconds} seconds: try again later"
                );
                return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, &why));
            }
            if wait == URGENT {
                thread.give_way();
            }
            wait = (limit - taken).min(longest - passed);
        };
        match done {
            Ok(Ok(result)) => result,
            Ok(Err(_)) | Err(_) => {
                let why = "the request could not be prepared";
                Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why))
            }
        }
    }
}

impl Shared {
    /// Queues a job, and starts it if there is a thread for it.
    fn add(self: &Arc<Shared>, share: Share, job: Job) -> Result<(), ApiError> {
        let mut state = lock(&self.state);
        let lane = state.lanes.entry(share).or_default();
        let waiting = lane.waiting.len();
        if waiting >= self.options.waiting_each {
            let work = self.options.work;
            let why =
                format!("{waiting} of your requests wait for {work} already: try again later");
            return Err(too_many(&why));
        }
        lane.waiting.push_back(job);
        state.give_turn(share, self.options.threads_each);
        self.start(&mut state);
        Ok(())
    }

    /// Starts threads for jobs, each of which ends with its job.
    fn start(self: &Arc<Shared>, state: &mut State) {
        while state.threads < self.options.threads
            && let Some((share, job)) = state.next(self.options.threads_each)
        {
            let own = self.clone();
            let builder = thread::Builder::new().name(self.options.name.into());
            let started = builder.stack_size(self.options.stack_bytes).spawn(move || {
                lock(&job.thread).begin();
                (job.run)();
                lock(&job.thread).end();
                let mut state = lock(&own.state);
                state.end(share, own.options.threads_each);
                own.start(&mut state);
            });
            if let Err(error) = started {
                // The job is gone, which its request notices.
                tracing::error!("the system starts no thread: {error}");
                state.end(share, self.options.threads_each);
            }
        }
    }
}

impl State {
    /// Gives a caller a turn, if it has a job that may start and no turn yet.
    fn give_turn(&mut self, share: Share, each: usize) {
        if let Some(lane) = self.lanes.get_mut(&share)
            && !lane.has_turn
            && !lane.waiting.is_empty()
            && lane.running < each
        {
            lane.has_turn = true;
            self.turns.push_back(share);
        }
    }

    /// Takes the next job, whose caller goes to the end of the turns.
    fn next(&mut self, each: usize) -> Option<(Share, Job)> {
        let share = self.turns.pop_front()?;
        let lane = self.lanes.get_mut(&share).expect("a caller with a turn has jobs");
        let job = lane.waiting.pop_front().expect("a caller with a turn has a job that waits");
        lane.has_turn = false;
        lane.running += 1;
        self.threads += 1;
        self.give_turn(share, each);
        Some((share, job))
    }

    /// Notes that a job of this caller has ended.
    fn end(&mut self, share: Share, each: usize) {
        self.threads -= 1;
        let lane = self.lanes.get_mut(&share).expect("a caller with a job that runs has a lane");
        lane.running -= 1;
        if lane.running == 0 && lane.waiting.is_empty() {
            self.lanes.remove(&share);
        } else {
            self.give_turn(share, each);
        }
    }
}

impl JobThread {
    fn begin(&mut self) {
        *self = JobThread::Runs(gettid());
    }

    fn end(&mut self) {
        *self = JobThread::Ended;
    }

    /// Returns the processor time that the thread has taken, or `None` if it does not run or the system does not tell.
    fn processor_time(&self) -> Option<Duration> {
        let JobThread::Runs(thread) = *self else { return None };
        // Nanoseconds on a processor, then other numbers.
        let path = format!("/proc/self/task/{}/schedstat", thread.as_raw_nonzero());
        let text = fs::read_to_string(path).ok()?;
        text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
    }

    /// Lowers the priority of the thread, which ends with this job.
    fn give_way(&self) {
        if let JobThread::Runs(thread) = *self {
            let priority = getpriority_process(Some(thread)).unwrap_or(0) + NICE;
            if let Err(error) = setpriority_process(Some(thread), priority) {
                tracing::debug!("the priority of a thread cannot be lowered: {error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};

    use super::*;

    const LONG: Option<Duration> = None;

    fn caller(share: Share) -> Caller {
        Caller::new("", Vec::new(), share)
    }

    fn pool(threads: usize, threads_each: usize, waiting_each: usize) -> Arc<Pool> {
        let (name, work, stack_bytes) = ("test", "tests", 1 << 20);
        Arc::new(Pool::new(PoolOptions {
            name,
            work,
            threads,
            threads_each,
            waiting_each,
            waiting_time: FOR_EVER,
            stack_bytes,
        }))
    }

    /// Jobs that tell when they begin, and wait until they may end.
    struct Jobs {
        begun: Sender<(Share, usize)>,
        begins: Receiver<(Share, usize)>,
    }

    type Asked = tokio::task::JoinHandle<Result<usize, ApiError>>;

    impl Jobs {
        fn new() -> Jobs {
            let (begun, begins) = channel();
            Jobs { begun, begins }
        }

        /// Adds a job, and returns what ends it when it is dropped.
        async fn add(&self, pool: &Arc<Pool>, share: Share, number: usize) -> (Sender<()>, Asked) {
            let (end, ends) = channel::<()>();
            let (begun, own) = (self.begun.clone(), pool.clone());
            let work = move || {
                let _ = begun.send((share, number));
                let _ = ends.recv();
                Ok(number)
            };
            let asked = tokio::spawn(async move { own.run(&caller(share), LONG, work).await });
            // The queue has the job when the task has run once.
            tokio::task::yield_now().await;
            (end, asked)
        }

        fn next(&self) -> (Share, usize) {
            self.begins.recv().unwrap()
        }
    }

    #[tokio::test]
    async fn callers_take_turns_and_none_takes_all_threads() {
        let (pool, jobs) = (pool(3, 2, 100), Jobs::new());
        let mut ends = HashMap::new();
        for number in 0..6 {
            ends.insert((1, number), jobs.add(&pool, 1, number).await);
        }
        for number in 0..2 {
            ends.insert((2, number), jobs.add(&pool, 2, number).await);
        }
        ends.insert((3, 0), jobs.add(&pool, 3, 0).await);
        // Two of the first caller run, and the third thread is that of the second caller, although it came later.
        let mut running = [jobs.next(), jobs.next(), jobs.next()];
        running.sort_unstable();
        assert_eq!(running, [(1, 0), (1, 1), (2, 0)]);
        // Whatever ends, the caller that waits longest for a turn is next.
        let mut order = Vec::new();
        for ended in [(1, 0), (1, 1), (2, 0), (3, 0)] {
            let (end, asked) = ends.remove(&ended).unwrap();
            drop(end);
            assert_eq!(asked.await.unwrap().unwrap(), ended.1);
            order.push(jobs.next());
        }
        assert_eq!(order, [(2, 1), (3, 0), (1, 2), (1, 3)]);
        // The first caller has its two threads, so the third one stays free for others.
        let (end, asked) = ends.remove(&(2, 1)).unwrap();
        drop(end);
        asked.await.unwrap().unwrap();
        assert!(jobs.begins.try_recv().is_err());
        ends.insert((4, 0), jobs.add(&pool, 4, 0).await);
        assert_eq!(jobs.next(), (4, 0));
    }

    #[tokio::test]
    async fn a_full_queue_refuses_its_own_caller_only() {
        let (pool, jobs) = (pool(4, 1, 2), Jobs::new());
        let mut ends = Vec::new();
        for number in 0..3 {
            ends.push(jobs.add(&pool, 1, number).await);
        }
        let refused = pool.run(&caller(1), LONG, || Ok(())).await.unwrap_err();
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
        pool.run(&caller(2), LONG, || Ok(())).await.unwrap();
        assert_eq!(jobs.next(), (1, 0));
        // Jobs whose clients are gone do not run, and leave nothing.
        ends.iter().for_each(|(_, asked)| asked.abort());
        tokio::task::yield_now().await;
        ends.clear();
        while !lock(&pool.0.state).lanes.is_empty() {
            tokio::task::yield_now().await;
        }
        assert!(jobs.begins.try_recv().is_err());
        let state = lock(&pool.0.state);
        assert_eq!((state.threads, state.turns.len()), (0, 0));
    }

    #[tokio::test]
    async fn work_that_does_not_end_holds_up_no_later_request_for_long() {
        let waiting_time = Duration::from_millis(1);
        let options = PoolOptions { waiting_time, ..pool(2, 1, 8).0.options };
        let (pool, jobs) = (Arc::new(Pool::new(options)), Jobs::new());
        let (end, asked) = jobs.add(&pool, 1, 0).await;
        assert_eq!(jobs.next(), (1, 0));
        let refused = pool.run(&caller(1), LONG, || Ok(())).await.unwrap_err();
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
        assert!(refused.message.contains("earlier requests of yours"));
        drop(end);
        asked.await.unwrap().unwrap();
        // The job that was refused leaves the queue without a run.
        while !lock(&pool.0.state).lanes.is_empty() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn work_without_a_processor_has_more_time_and_an_end() {
        let (pool, (end, ends)) = (pool(2, 1, 1), channel::<()>());
        let limit = Duration::from_millis(10);
        let work = move || {
            let _ = ends.recv();
            Ok(())
        };
        let asked = Instant::now();
        let error = pool.run(&caller(1), Some(limit), work).await.unwrap_err();
        assert!(error.status == StatusCode::SERVICE_UNAVAILABLE, "{}", error.message);
        assert!(asked.elapsed() >= limit * BUSY_MACHINE);
        drop(end);
    }

    #[tokio::test]
    async fn work_that_takes_too_long_goes_on_as_its_callers() {
        let (pool, (end, ends)) = (pool(2, 1, 1), channel::<()>());
        let work = move || {
            while ends.try_recv() == Err(TryRecvError::Empty) {}
            Ok(())
        };
        // With any other limit, a busy machine may not give the work that much time.
        let error = pool.run(&caller(1), Some(Duration::ZERO), work).await.unwrap_err();
        assert!(error.status == StatusCode::BAD_REQUEST && error.message.contains("takes longer"));
        assert_eq!(lock(&pool.0.state).lanes[&1].running, 1);
        // Others have the other thread.
        pool.run(&caller(2), LONG, || Ok(())).await.unwrap();
        drop(end);
        pool.run(&caller(1), LONG, || Ok(())).await.unwrap();
        let first = caller(1);
        let panics = pool.run(&first, LONG, || -> Result<(), ApiError> { panic!("on purpose") });
        assert_eq!(panics.await.unwrap_err().status, StatusCode::INTERNAL_SERVER_ERROR);
        pool.run(&caller(1), LONG, || Ok(())).await.unwrap();
    }
}
