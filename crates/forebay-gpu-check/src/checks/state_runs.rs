//! Runs of consecutive rows of sequences, and checks of what continues from their states.

use std::ops::Range;

use anyhow::Result;
use forebay_compute::StateRun;
use forebay_cuda::NO_STATE;

use crate::harness::Outcome;

/// Runs of a pass: number of rows, and the states before and after them.
pub type Runs = [(usize, Option<usize>, usize)];

/// Rows and states.
pub type Found = (Vec<f32>, Vec<f32>);

/// The pass that checks of continued states run, its rows, and the number of states.
pub const RUNS: [(usize, Option<usize>, usize); 3] =
    [(5, Some(0), 3), (1, None, 4), (14, Some(2), 5)];
pub const ROWS: usize = 20;
pub const STATES: usize = 7;

/// Returns the words that kernels take.
pub fn words(runs: &Runs) -> Vec<u32> {
    let (mut words, mut row) = (Vec::new(), 0);
    for (count, from, to) in runs {
        let from = from.map_or(NO_STATE, |from| from as u32);
        words.extend([row as u32, *count as u32, from, *to as u32]);
        row += count;
    }
    words
}

/// Returns the runs as the CPU takes them, for states of so many floats, of which `first` belong to others.
pub fn on_cpu(runs: &Runs, floats: usize, first: usize) -> Vec<StateRun> {
    let of = |&(tokens, from, to): &(usize, Option<usize>, usize)| StateRun {
        tokens,
        from: from.map(|from| from * floats + first),
        to: to * floats + first,
    };
    runs.iter().map(of).collect()
}

/// Checks that the last of [`RUNS`] gives the bits of the whole, `got`, when it is cut in two. `run` computes rows `first..first +
/// rows` of a pass from states of `floats` floats each, and leaves runs outside these rows as they are.
pub fn cuts(
    (width, floats): (usize, usize),
    states: &[f32],
    got: &Found,
    run: impl Fn(&Runs, Range<usize>, &[f32]) -> Result<Found>,
) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let [first, second, (_, from, to)] = RUNS;
    for cut in [1, 3, 13] {
        // The first part ends in state 6, from which the second continues.
        let (before, after) = ([first, second, (cut, from, 6)], first.0 + second.0 + cut);
        let (rows, states) = run(&before, 0..after, states)?;
        outcome = outcome.worse(Outcome::same(&rows, &got.0[..after * width]));
        let rest = [(after, None, 1), (ROWS - after, Some(6), to)];
        let (rows, states) = run(&rest, after..ROWS, &states)?;
        outcome = outcome.worse(Outcome::same(&rows, &got.0[after * width..]));
        let last = to * floats..(to + 1) * floats;
        outcome = outcome.worse(Outcome::same(&states[last.clone()], &got.1[last]));
    }
    Ok(outcome)
}
