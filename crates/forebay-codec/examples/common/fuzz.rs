//! Runs a fuzz test in several threads. Shared with the examples of other crates.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Inputs between two lines of progress, and between two looks at the progress of all threads.
const LINE: u64 = 10_000_000;
const STEP: u64 = 1_000;

/// How many inputs to make, from which seed, and in how many threads.
pub struct Fuzz {
    inputs: u64,
    seed: u64,
    threads: u64,
}

impl Fuzz {
    /// Reads the arguments of `program`: `INPUTS [SEED] [THREADS]`. Prints the usage and returns `None` if they are wrong.
    pub fn from_arguments(program: &str) -> Option<Fuzz> {
        let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<u64>());
        let mut number = |default: u64| arguments.next().map_or(Ok(default), |number| number);
        let (Ok(inputs), Ok(seed), Ok(threads)) = (number(1_000_000), number(1), number(1)) else {
            eprintln!("usage: {program} INPUTS [SEED] [THREADS]");
            return None;
        };
        Some(Fuzz { inputs, seed, threads: threads.max(1) })
    }

    /// Calls `step` for each input, with the `worker` of its thread. It returns whether the input was accepted, or `None` after it has
    /// printed what is wrong, which ends the thread and makes the exit status a failure.
    pub fn run<W>(
        &self,
        worker: impl Fn() -> W + Sync,
        step: impl Fn(&mut W, &mut fastrand::Rng) -> Option<bool> + Sync,
    ) -> ExitCode {
        let Fuzz { inputs, seed, threads } = *self;
        println!("{inputs} inputs in {threads} threads");
        let (began, done, accepted) = (Instant::now(), AtomicU64::new(0), AtomicU64::new(0));
        let run = |mut random: fastrand::Rng| {
            let mut worker = worker();
            while done.fetch_add(STEP, Ordering::Relaxed) < inputs {
                for _ in 0..STEP {
                    let Some(good) = step(&mut worker, &mut random) else { return false };
                    accepted.fetch_add(good.into(), Ordering::Relaxed);
                }
                let all = done.load(Ordering::Relaxed);
                if all % LINE < STEP {
                    let seconds = began.elapsed().as_secs_f64();
                    println!("{all} in {seconds:.0} s, {:.0}/s", all as f64 / seconds);
                }
            }
            true
        };
        let sound = std::thread::scope(|scope| {
            let random = |thread| fastrand::Rng::with_seed(seed << 16 | thread);
            let workers: Vec<_> = (0..threads)
                .map(|thread| {
                    let run = &run;
                    scope.spawn(move || run(random(thread)))
                })
                .collect();
            workers.into_iter().all(|worker| worker.join().unwrap_or(false))
        });
        let (seconds, accepted) = (began.elapsed().as_secs_f64(), accepted.into_inner());
        println!("{inputs} inputs in {seconds:.0} s, of which {accepted} were accepted");
        if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
