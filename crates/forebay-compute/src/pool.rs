//! A fork-join thread pool for regions of a few microseconds.
//!
//! A decoder layer is a handful of parallel regions, so dispatch and join must cost about a microsecond while the pool
//! is hot. An idle pool must leave its cores to other threads: while the decoder waits for weights from the disk, no
//! worker may spin. Workers therefore spin for a short time after each region and then park.
//!
//! Workers take pieces of a region from a counter. When none is left, the caller closes the region and waits only for those that
//! have entered it. So a worker that the system does not run at the moment, because other programs have its core, holds nobody up.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::buffer::SharedSlice;

/// Time for which a thread spins before it parks, while it waits for the next region or for the other workers. Waking a
/// parked thread costs some 5 to 50 us, so spinning about that long loses at most half. [`Pool::set_spin`] changes it.
const SPIN: Duration = Duration::from_micros(40);

/// Number of multiply-adds below which a parallel region costs more than it saves.
const SERIAL_WORK: usize = 128 * 1024;

/// Returns the number of tasks that a thread takes at once: one, or all of them if they are too little work for a parallel region.
pub(crate) fn tasks_at_once(tasks: usize, work: usize) -> usize {
    if work < SERIAL_WORK { tasks } else { 1 }
}

/// Number of pauses between two looks at the clock while spinning.
const PAUSES_PER_LOOK: u32 = 32;

/// Time after which a thread that spins lets others have its core, if any wait for it: perhaps the one that it waits for.
const SPIN_ALONE: Duration = Duration::from_micros(20);

/// A closure that workers run, with their worker number, for one region.
type Region<'a> = &'a (dyn Fn(usize) + Sync + 'a);

thread_local! {
    /// Address of the shared state of the pool whose region this thread is in, or 0.
    static INSIDE: Cell<usize> = const { Cell::new(0) };
}

/// In [`Shared::gate`]: one worker that has entered the region.
const ENTERED: u64 = 1;
/// In [`Shared::gate`]: set if no other worker may enter the region. Lower bits count those that have.
const CLOSED: u64 = 1 << 20;
/// In [`Shared::gate`]: one region.
const REGION: u64 = CLOSED << 1;

/// A fixed set of threads that run one closure together; the caller is worker 0.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a region, so that regions of several callers run one after another.
    turn: Mutex<()>,
    stop: Option<StopFlag>,
}

/// A flag of the caller that ends regions early.
struct StopFlag {
    asked: Arc<AtomicBool>,
    /// Set once a chunk was skipped because of `asked`.
    cut: AtomicBool,
}

/// Keeps values that the caller writes and values that the workers write on separate cache lines. It takes up two
/// lines, because the adjacent-line prefetcher pairs them.
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// Number of the current region, whether it is closed, and how many workers have entered it.
    gate: Line<AtomicU64>,
    /// Number of workers that have finished the current region.
    finished: Line<AtomicUsize>,
    /// Closure of the current region, written before `gate` opens and read by workers that have entered.
    region: UnsafeCell<Option<Region<'static>>>,
    stop: AtomicBool,
    /// Spin time in nanoseconds.
    spin: AtomicU64,
    /// One flag per worker thread: true while it is parked or about to park.
    parked: Box<[Line<AtomicBool>]>,
    /// True while the caller is parked, or about to park, waiting for workers to finish.
    caller_parked: AtomicBool,
    caller: Mutex<Option<Thread>>,
    /// The first panic of the current region.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `region` is the only field that is not Sync by itself. The caller writes it only while no worker is inside a
// region: the gate is closed, all that entered have finished, and `turn` is held. A worker reads it only after it has entered through
// the open gate, which orders the write before the read, and before it counts as finished, which orders the next write after the read.
unsafe impl Sync for Shared {}
// SAFETY: as above. The closure itself is Sync, so any thread may call it.
unsafe impl Send for Shared {}

impl Pool {
    /// Creates a pool of `threads` workers (at least 1): the caller of [`Pool::run`] and `threads - 1` threads of its
    /// own.
    ///
    /// # Panics
    /// Panics if the system cannot start a thread.
    pub fn new(threads: usize) -> Pool {
        let spawned = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            gate: Line(AtomicU64::new(CLOSED)),
            finished: Line(AtomicUsize::new(0)),
            region: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            spin: AtomicU64::new(SPIN.as_nanos() as u64),
            parked: (0..spawned).map(|_| Line(AtomicBool::new(false))).collect(),
            caller_parked: AtomicBool::new(false),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
        });
        let workers = (1..=spawned)
            .map(|worker| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("compute-{worker}"))
                    .spawn(move || shared.work(worker))
                    .expect("the system refused a compute thread")
            })
            .collect();
        Pool { shared, workers, turn: Mutex::new(()), stop: None }
    }

    /// Makes regions skip all further chunks while `flag` is set. [`Pool::was_cut_short`] tells whether that happened.
    /// A region that takes seconds thus ends within one chunk.
    pub fn stop_on(&mut self, flag: Arc<AtomicBool>) {
        self.stop = Some(StopFlag { asked: flag, cut: AtomicBool::new(false) });
    }

    /// Returns true if chunks were skipped since the last call because of the flag of [`Pool::stop_on`]. The caller
    /// must then not use the output of those regions.
    pub fn was_cut_short(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.cut.swap(false, Ordering::Relaxed))
    }

    /// Returns true if the next chunk must be skipped.
    pub(crate) fn must_stop(&self) -> bool {
        let Some(stop) = &self.stop else { return false };
        let asked = stop.asked.load(Ordering::Relaxed);
        if asked {
            // The caller reads this after the region's join.
            stop.cut.store(true, Ordering::Relaxed);
        }
        asked
    }

    /// Sets the time for which threads spin before they park. Callers whose regions follow at short intervals set it so
    /// that no region begins late.
    pub fn set_spin(&self, time: Duration) {
        self.shared.spin.store(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Returns the number of workers, including the caller.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `f(worker)` once on the caller, as worker 0, and at most once on each other worker: on those that begin before the caller's
    /// call has ended. Returns when all are done. So every call must take what is left of the work. Callers on different threads take
    /// turns.
    ///
    /// # Panics
    /// Panics if called from inside a region of this same pool. If `f` panics on a worker, `run` passes on the first
    /// such panic after every worker has finished. The pool stays usable.
    pub fn run(&self, f: &(dyn Fn(usize) + Sync)) {
        self.run_after(&mut || (), f);
    }

    /// Does the same as [`Pool::run`], but the caller first runs `first` once while other workers may already begin.
    ///
    /// # Panics
    /// Panics as [`Pool::run`] does, and with a panic of `first`.
    pub fn run_after(&self, first: &mut dyn FnMut(), f: &(dyn Fn(usize) + Sync)) {
        let _inside = Inside::enter(&self.shared);
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut own_part = || {
            first();
            f(0);
        };
        if self.workers.is_empty() {
            return own_part();
        }
        self.dispatch(f);
        if let Err(payload) = catch_unwind(AssertUnwindSafe(own_part)) {
            self.shared.record_panic(payload);
        }
        self.shared.end_region();
        let panic = self.shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Cuts `0..total` into ranges of `chunk` (the last may be shorter) and calls `f` on each exactly once. A flag can
    /// end this early ([`Pool::stop_on`]). An idle worker takes the next range, so the worker that runs a range varies.
    ///
    /// # Panics
    /// Panics as [`Pool::run`] does. A panic ends its worker's share; the other workers finish the rest.
    pub fn for_each_chunk(&self, total: usize, chunk: usize, f: impl Fn(Range<usize>) + Sync) {
        self.for_each_chunk_with_worker(total, chunk, |_, range| f(range));
    }

    /// Does the same as [`Pool::for_each_chunk`] and passes the worker's number to `f`.
    pub fn for_each_chunk_with_worker(
        &self,
        total: usize,
        chunk: usize,
        f: impl Fn(usize, Range<usize>) + Sync,
    ) {
        let chunk = chunk.max(1);
        let chunks = total.div_ceil(chunk);
        let range = |index: usize| index * chunk..total.min((index + 1).saturating_mul(chunk));
        if chunks <= 1 || self.workers.is_empty() {
            // Too small for the workers. It still counts as a region: the rule against nesting must not depend on the
            // size.
            let _inside = Inside::enter(&self.shared);
            let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            let mut left = 0..chunks;
            while let Some(index) = left.next().filter(|_| !self.must_stop()) {
                f(0, range(index));
            }
            return;
        }
        let next = Line(AtomicUsize::new(0));
        self.run(&|worker| {
            loop {
                // A relaxed counter is enough: the region's own fork and join order all other memory.
                let index = next.0.fetch_add(1, Ordering::Relaxed);
                if index >= chunks || self.must_stop() {
                    return;
                }
                f(worker, range(index));
            }
        });
    }

    /// Cuts `data` into pieces of `chunk` elements (the last may be shorter) and calls `f(worker, start, piece)` on
    /// each exactly once. `start` is the piece's offset in `data`.
    ///
    /// # Panics
    /// Panics as [`Pool::run`] does.
    pub fn for_each_chunk_mut<T: Send>(
        &self,
        data: &mut [T],
        chunk: usize,
        f: impl Fn(usize, usize, &mut [T]) + Sync,
    ) {
        let total = data.len();
        let data = SharedSlice::new(data);
        self.for_each_chunk_with_worker(total, chunk, |worker, range| {
            // SAFETY: the ranges do not overlap, and each is handed out once.
            f(worker, range.start, unsafe { data.piece(range.start, range.len()) });
        });
    }

    /// Publishes `f` as the next region and wakes the workers that have parked.
    fn dispatch(&self, f: Region<'_>) {
        // SAFETY: only the lifetime changes. Workers use the reference only between their entry and their end, and `run` returns
        // or unwinds only after the gate is closed and all that entered have finished.
        let f = unsafe { std::mem::transmute::<Region<'_>, Region<'static>>(f) };
        // SAFETY: `turn` is held, the gate is closed and all that entered the previous region have finished, so no worker reads the
        // cell until the gate opens below.
        unsafe { *self.shared.region.get() = Some(f) };
        self.shared.finished.0.store(0, Ordering::Relaxed);
        self.shared.begin_region(0, &self.workers);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.begin_region(CLOSED, &self.workers);
        for worker in self.workers.drain(..) {
            // Panics of regions are caught and passed to the caller, so a worker thread ends normally.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Begins the next region, open or closed, and wakes parked workers.
    fn begin_region(&self, closed: u64, workers: &[JoinHandle<()>]) {
        let number = self.gate.0.load(Ordering::Relaxed) / REGION + 1;
        // Sequentially consistent with `park_until_new`: either the worker sees the new number before it parks, or this
        // thread sees the worker's flag.
        self.gate.0.store(number * REGION + closed, Ordering::SeqCst);
        for (flag, worker) in self.parked.iter().zip(workers) {
            if flag.0.load(Ordering::SeqCst) {
                flag.0.store(false, Ordering::Relaxed);
                worker.thread().unpark();
            }
        }
    }

    /// Returns the number of the current region, and enters it unless it is closed.
    fn enter(&self) -> (u64, bool) {
        let open = |gate: u64| (gate & CLOSED == 0).then_some(gate + ENTERED);
        match self.gate.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, open) {
            Ok(gate) => (gate / REGION, true),
            Err(gate) => (gate / REGION, false),
        }
    }

    /// Runs regions until the pool is dropped. This is the main loop of a worker thread.
    fn work(&self, worker: usize) {
        INSIDE.set(std::ptr::from_ref(self).addr());
        let mut seen = 0;
        loop {
            let is_new = || self.gate.0.load(Ordering::Acquire) / REGION != seen;
            if !self.spin_until(is_new) {
                self.park_until_new(worker, seen);
            }
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let entered;
            (seen, entered) = self.enter();
            if !entered {
                continue;
            }
            // SAFETY: this worker has entered the region and has not finished it yet, so the caller does not write the cell.
            if let Some(region) = unsafe { *self.region.get() }
                && let Err(payload) = catch_unwind(AssertUnwindSafe(|| region(worker)))
            {
                self.record_panic(payload);
            }
            self.finish_region();
        }
    }

    fn park_until_new(&self, worker: usize, seen: u64) {
        let flag = &self.parked[worker - 1].0;
        loop {
            flag.store(true, Ordering::SeqCst);
            if self.gate.0.load(Ordering::SeqCst) / REGION != seen {
                flag.store(false, Ordering::Relaxed);
                return;
            }
            std::thread::park();
        }
    }

    fn finish_region(&self) {
        self.finished.0.fetch_add(1, Ordering::SeqCst);
        if self.caller_parked.load(Ordering::SeqCst) {
            // The caller may have continued in the meantime. Then this wakes no thread, or a thread that checks its
            // condition and parks again.
            let caller = self.caller.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(thread) = caller.as_ref() {
                thread.unpark();
            }
        }
    }

    /// Lets no other worker enter the region, and waits for those that have.
    fn end_region(&self) {
        let gate = self.gate.0.fetch_or(CLOSED, Ordering::AcqRel);
        let entered = (gate & (CLOSED - 1)) as usize;
        let is_done = || self.finished.0.load(Ordering::SeqCst) == entered;
        if self.spin_until(is_done) {
            return;
        }
        *self.caller.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
        self.caller_parked.store(true, Ordering::SeqCst);
        while !is_done() {
            std::thread::park();
        }
        self.caller_parked.store(false, Ordering::Relaxed);
    }

    /// Spins until `is_true` returns true. Returns false if it still does not after the spin time.
    fn spin_until(&self, is_true: impl Fn() -> bool) -> bool {
        for _ in 0..PAUSES_PER_LOOK {
            if is_true() {
                return true;
            }
            std::hint::spin_loop();
        }
        let (start, time) =
            (Instant::now(), Duration::from_nanos(self.spin.load(Ordering::Relaxed)));
        loop {
            let elapsed = start.elapsed();
            if elapsed >= time {
                return is_true();
            }
            if elapsed >= SPIN_ALONE {
                std::thread::yield_now();
            }
            for _ in 0..PAUSES_PER_LOOK {
                if is_true() {
                    return true;
                }
                std::hint::spin_loop();
            }
        }
    }

    fn record_panic(&self, payload: Box<dyn Any + Send>) {
        let mut first = self.panic.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(payload);
    }
}

/// Marks the calling thread as inside a region, and unmarks it when dropped.
struct Inside {
    outer: usize,
}

impl Inside {
    fn enter(shared: &Shared) -> Inside {
        let pool = std::ptr::from_ref(shared).addr();
        let outer = INSIDE.get();
        assert!(outer != pool, "a region of a thread pool cannot start another one on that pool");
        INSIDE.set(pool);
        Inside { outer }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(self.outer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `f` on all workers: the caller's call waits until all have begun.
    fn run_on_all(pool: &Pool, f: impl Fn(usize) + Sync) {
        let begun = AtomicUsize::new(0);
        pool.run(&|worker| {
            begun.fetch_add(1, Ordering::SeqCst);
            while worker == 0 && begun.load(Ordering::SeqCst) < pool.threads() {
                std::thread::yield_now();
            }
            f(worker);
        });
    }

    #[test]
    fn every_worker_runs_once_if_the_caller_waits_for_it() {
        for threads in [1, 2, 3, 5, 16, 64] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for _ in 0..20 {
                let counts: Vec<_> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
                run_on_all(&pool, |worker| {
                    counts[worker].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_worker_that_is_late_is_left_out_and_holds_nobody_up() {
        let pool = Pool::new(4);
        let counts: Vec<_> = (0..4).map(|_| AtomicUsize::new(0)).collect();
        const ROUNDS: usize = 20_000;
        for round in 0..ROUNDS {
            let (inside, left) = (AtomicUsize::new(0), AtomicUsize::new(3));
            pool.run(&|worker| {
                inside.fetch_add(1, Ordering::SeqCst);
                counts[worker].fetch_add(1, Ordering::Relaxed);
                while left
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
                    .is_ok()
                {}
                inside.fetch_sub(1, Ordering::SeqCst);
            });
            assert_eq!(
                (inside.into_inner(), left.into_inner()),
                (0, 0),
                "all that began have ended"
            );
            if round % 1000 == 0 {
                std::thread::sleep(SPIN * 5);
            }
        }
        let counts: Vec<_> = counts.into_iter().map(AtomicUsize::into_inner).collect();
        assert!(counts[0] == ROUNDS && counts.iter().all(|count| *count <= ROUNDS), "{counts:?}");
    }

    #[test]
    fn the_caller_does_its_first_task_once_while_others_work() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            let (begun, mut first) = (AtomicUsize::new(0), 0);
            pool.run_after(
                &mut || {
                    // This loop would hang if the other workers waited for the caller.
                    while begun.load(Ordering::SeqCst) < threads - 1 {
                        std::thread::yield_now();
                    }
                    first += 1;
                },
                &|_| {
                    begun.fetch_add(1, Ordering::SeqCst);
                },
            );
            assert_eq!((first, begun.load(Ordering::SeqCst)), (1, threads));
            let panics = || pool.run_after(&mut || panic!("first fails"), &|_| ());
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
            pool.run(&|_| ());
        }
    }

    #[test]
    fn chunks_cover_everything_exactly_once() {
        let pool = Pool::new(3);
        for total in [0, 1, 2, 7, 64, 1000] {
            for chunk in [0, 1, 3, 64, 5000, usize::MAX] {
                let counts: Vec<_> = (0..total).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each_chunk(total, chunk, |range| {
                    assert!(range.len() <= chunk.max(1) && !range.is_empty());
                    for index in range {
                        counts[index].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn many_regions_in_a_row_lose_nothing_hot_or_parked() {
        let pool = Pool::new(4);
        let sum = AtomicUsize::new(0);
        for round in 0..5_000 {
            pool.for_each_chunk(4, 1, |range| {
                sum.fetch_add(range.start + 1, Ordering::Relaxed);
            });
            if round % 500 == 0 {
                std::thread::sleep(SPIN * 5);
            }
        }
        assert_eq!(sum.load(Ordering::Relaxed), 5_000 * (1 + 2 + 3 + 4));
    }

    #[test]
    fn a_panic_of_any_worker_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
        for culprit in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                run_on_all(&pool, |worker| {
                    if worker == culprit {
                        panic!("worker {worker} fails");
                    }
                });
            }));
            let payload = result.unwrap_err();
            assert_eq!(
                payload.downcast_ref::<String>().unwrap(),
                &format!("worker {culprit} fails")
            );
            let ran = AtomicUsize::new(0);
            run_on_all(&pool, |_| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ran.load(Ordering::Relaxed), 3);
        }
    }

    #[test]
    fn a_nested_region_panics_and_one_on_another_pool_does_not() {
        for threads in [1, 2] {
            let pool = Pool::new(threads);
            let other = Pool::new(2);
            let nested = catch_unwind(AssertUnwindSafe(|| pool.run(&|_| pool.run(&|_| ()))));
            assert!(nested.is_err());
            let ran = AtomicUsize::new(0);
            pool.run(&|worker| {
                if worker == 0 {
                    run_on_all(&other, |_| {
                        ran.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
            assert_eq!(ran.load(Ordering::Relaxed), 2);
        }
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(3);
        let inside = AtomicUsize::new(0);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.for_each_chunk(3, 1, |_| {
                            assert!(inside.fetch_add(1, Ordering::SeqCst) < 3);
                            total.fetch_add(1, Ordering::Relaxed);
                            inside.fetch_sub(1, Ordering::SeqCst);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 500 * 3);
    }

    #[test]
    fn a_flag_ends_regions_early_and_they_say_so() {
        for threads in [1, 3] {
            let flag = Arc::new(AtomicBool::new(false));
            let mut pool = Pool::new(threads);
            pool.stop_on(Arc::clone(&flag));
            let done = AtomicUsize::new(0);
            let count = || {
                done.store(0, Ordering::Relaxed);
                pool.for_each_chunk(1000, 1, |_| {
                    if done.fetch_add(1, Ordering::Relaxed) == 9 {
                        flag.store(true, Ordering::Relaxed);
                    }
                });
                done.load(Ordering::Relaxed)
            };
            let counted = count();
            assert!((10..10 + threads).contains(&counted), "{counted} of {threads} threads");
            assert!(pool.was_cut_short());
            assert!(!pool.was_cut_short());
            assert_eq!(count(), 0);
            flag.store(false, Ordering::Relaxed);
            assert!(pool.was_cut_short());
            pool.for_each_chunk(5, 1, |_| ());
            assert!(!pool.was_cut_short());
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_idle_pool_burns_no_time() {
        let pool = Pool::new(8);
        pool.run(&|_| ());
        std::thread::sleep(Duration::from_millis(20));
        let parked = || pool.shared.parked.iter().all(|flag| flag.0.load(Ordering::SeqCst));
        assert!((0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            parked()
        }));
    }
}
