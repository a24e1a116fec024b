//! The work of one call in a form that all workers can read, and the memory that calls reuse.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay_format::TensorType;
use forebay_ops::RowKind;

use super::aligned::AlignedVec;
use super::portable::BlockScales;
use super::{Activations, MatmulJob};
use crate::pool::Pool;

/// A function that computes `rows` of a task for all its tokens.
///
/// # Safety
/// The machine has the instructions of the kernel's family, and the task's type is the kernel's. No other call uses
/// these rows of the task's output at the same time.
pub(crate) type Kernel = unsafe fn(&Task, Range<usize>, &mut Scratch);

/// A kernel and the chunks in which to call it.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) kernel: Kernel,
    pub(crate) rows: ChunkRows,
}

/// Number of rows that one call of a kernel should get.
#[derive(Clone, Copy)]
pub(crate) enum ChunkRows {
    /// Any number, because the kernel reads each row once.
    Any,
    /// Multiples of the first number, and up to the second if there is enough work for all threads. The kernel does
    /// some work once for all rows of a call.
    Batches(usize, usize),
}

/// A [`MatmulJob`] with its borrows turned into pointers, so that workers can write different rows of its output at the
/// same time. It lives no longer than the call that made it.
pub(crate) struct Task {
    pub(crate) ty: TensorType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_bytes: usize,
    /// Number of tokens that are computed, which is the number of rows of the output.
    pub(crate) token_count: usize,
    weights: *const u8,
    activations: *const Activations,
    /// Rows of the activations to use; null for all in order.
    tokens: *const u32,
    out: *mut f32,
    plan: Plan,
    chunk_rows: usize,
}

// SAFETY: a task's shared parts are only read. Its output is written only at the addresses of `out_at`, and the callers
// of that method keep to their own rows.
unsafe impl Send for Task {}
// SAFETY: as above.
unsafe impl Sync for Task {}

impl Task {
    /// # Panics
    /// Panics if the job's parts do not fit each other.
    fn new(job: &mut MatmulJob<'_>, plan: Plan, token_count: usize) -> Task {
        let w = &job.w;
        let row_bytes = usize::try_from(w.ty.row_bytes(w.cols as u64).expect("whole blocks"))
            .expect("a row fits memory");
        assert_eq!(Some(w.data.len()), row_bytes.checked_mul(w.rows), "weights are [rows, cols]");
        assert_eq!(w.cols, job.x.cols(), "weights and activations have rows of one length");
        assert_eq!(job.out.len(), token_count * w.rows, "output is [tokens, weight rows]");
        if let Some(tokens) = job.tokens {
            let limit = job.x.tokens();
            assert!(tokens.iter().all(|&token| (token as usize) < limit), "tokens are rows of x");
        }
        Task {
            ty: w.ty,
            rows: w.rows,
            cols: w.cols,
            row_bytes,
            token_count,
            weights: w.data.as_ptr(),
            activations: job.x,
            tokens: job.tokens.map_or(std::ptr::null(), <[u32]>::as_ptr),
            out: job.out.as_mut_ptr(),
            plan,
            chunk_rows: 0,
        }
    }

    /// Returns the bytes of one row of weights.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> &[u8] {
        debug_assert!(row < self.rows);
        // SAFETY: `new` has checked that the weights are `rows * row_bytes` long. They outlive the call that the task
        // belongs to.
        unsafe {
            std::slice::from_raw_parts(self.weights.add(row * self.row_bytes), self.row_bytes)
        }
    }

    #[inline(always)]
    pub(crate) fn activations(&self) -> &Activations {
        // SAFETY: made from a reference that outlives the call.
        unsafe { &*self.activations }
    }

    /// Returns the row of the activations that belongs to the selected token `selected`.
    #[inline(always)]
    pub(crate) fn token(&self, selected: usize) -> usize {
        debug_assert!(selected < self.token_count);
        if self.tokens.is_null() {
            return selected;
        }
        // SAFETY: the selection is `token_count` long and outlives the call.
        unsafe { *self.tokens.add(selected) as usize }
    }

    /// Writes one number of the output.
    ///
    /// # Safety
    /// `selected < token_count`, `row < rows`, and no other thread uses this row at the same time.
    #[inline(always)]
    pub(crate) unsafe fn store(&self, selected: usize, row: usize, value: f32) {
        // SAFETY: inside the output, whose length `new` has checked.
        unsafe { *self.out_at(selected, row) = value };
    }

    /// Returns the address of the output of a token and row.
    ///
    /// # Safety
    /// `selected < token_count` and `row < rows`. Only the thread that computes that row may write to it.
    #[inline(always)]
    pub(crate) unsafe fn out_at(&self, selected: usize, row: usize) -> *mut f32 {
        debug_assert!(selected < self.token_count && row < self.rows);
        // SAFETY: inside the output, whose length `new` has checked.
        unsafe { self.out.add(selected * self.rows + row) }
    }

    fn chunks(&self) -> usize {
        self.rows.div_ceil(self.chunk_rows)
    }
}

/// Scratch memory of one worker.
#[derive(Default)]
pub(crate) struct Scratch {
    pub(crate) codes: AlignedVec<i8>,
    pub(crate) floats: AlignedVec<f32>,
    pub(crate) block_scales: Vec<BlockScales>,
}

/// Memory that products reuse from call to call.
pub(crate) struct Workspace {
    tasks: Mutex<Vec<Task>>,
    workers: Box<[Mutex<Scratch>]>,
}

impl Workspace {
    pub(crate) fn new(threads: usize) -> Workspace {
        let workers = (0..threads).map(|_| Mutex::default()).collect();
        Workspace { tasks: Mutex::default(), workers }
    }

    /// Computes all jobs in one parallel region. The caller runs `first` before it joins in.
    pub(crate) fn run(
        &self,
        pool: &Pool,
        first: &mut dyn FnMut(),
        jobs: &mut [MatmulJob<'_>],
        plan: impl Fn(TensorType, RowKind) -> Plan,
    ) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.clear();
        for job in jobs {
            let count = job.tokens.map_or(job.x.tokens(), <[u32]>::len);
            let task = Task::new(job, plan(job.w.ty, job.kind), count);
            if task.rows > 0 && count > 0 {
                tasks.push(task);
            }
        }
        cut(&mut tasks, pool.threads());
        let tasks = &tasks[..];
        let next = AtomicUsize::new(0);
        let region = |worker: usize| {
            let mut scratch = self.workers[worker].lock().unwrap_or_else(PoisonError::into_inner);
            compute_chunks(pool, tasks, &next, &mut scratch);
        };
        let chunks: usize = tasks.iter().map(Task::chunks).sum();
        let products: usize = tasks.iter().map(|of| of.rows * of.cols * of.token_count).sum();
        if pool.threads() == 1 || chunks < 2 || products < SERIAL_PRODUCTS {
            first();
            return region(0);
        }
        pool.run_after(first, &region);
    }
}

/// Number of multiply-adds below which a parallel region costs more than it saves. Every weight is read from memory for few of them.
const SERIAL_PRODUCTS: usize = 32 * 1024;

/// Number of chunks for each thread, over all tasks, with which threads finish at about the same time.
const CHUNKS_OF_THREAD: usize = 8;

/// Decides the number of rows in a chunk of each task. No output depends on it.
fn cut(tasks: &mut [Task], threads: usize) {
    let bytes: usize = tasks.iter().map(|task| task.rows * task.row_bytes).sum();
    // Below some kilobytes, taking a chunk costs more than computing it.
    let chunk_bytes = (bytes / (threads * CHUNKS_OF_THREAD)).clamp(8 << 10, 256 << 10);
    let batches = |task: &Task| match task.plan.rows {
        ChunkRows::Any => 0,
        ChunkRows::Batches(_, most) => task.rows.div_ceil(most),
    };
    let batches: usize = tasks.iter().map(batches).sum();
    let pieces = (threads * CHUNKS_OF_THREAD / 2).div_ceil(batches.max(1));
    for task in tasks {
        task.chunk_rows = match task.plan.rows {
            ChunkRows::Any => (chunk_bytes / task.row_bytes.max(1)).max(1),
            ChunkRows::Batches(unit, most) => (most / pieces).next_multiple_of(unit).max(unit),
        };
    }
}

/// Computes chunks of all tasks until none is left or the pool must stop.
fn compute_chunks(pool: &Pool, tasks: &[Task], next: &AtomicUsize, scratch: &mut Scratch) {
    let mut rest = tasks.iter();
    let Some(mut task) = rest.next() else { return };
    let mut first = 0;
    loop {
        let chunk = next.fetch_add(1, Ordering::Relaxed);
        if pool.must_stop() {
            return;
        }
        while chunk >= first + task.chunks() {
            first += task.chunks();
            let Some(following) = rest.next() else { return };
            task = following;
        }
        let start = (chunk - first) * task.chunk_rows;
        let rows = start..task.rows.min(start + task.chunk_rows);
        // SAFETY: the plan's kernel fits the type and the machine. The counter gives every chunk, and so every row, to
        // one worker.
        unsafe { (task.plan.kernel)(task, rows, scratch) };
    }
}
