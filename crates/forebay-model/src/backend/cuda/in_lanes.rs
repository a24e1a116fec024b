//! Queueing the work of a pass in its lanes.

use std::ops::Range;

use super::backend::CudaBackend;
use crate::ModelError;
use crate::backend::Step;

impl CudaBackend {
    /// Queues work of the pass with `queue`, for each lane with a step that has only its rows.
    ///
    /// # Errors
    /// Returns an error of `queue`.
    pub(super) fn in_lanes(
        &mut self,
        step: &Step<'_>,
        queue: impl Fn(&mut CudaBackend, &Step<'_>) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let Some(first) = self.lanes.forked() else { return queue(self, step) };
        for (lane, rows) in [0..first, first..step.count].into_iter().enumerate() {
            self.lanes.enter(&self.gpu, lane);
            let queued = queue(self, &of_rows(step, rows));
            self.lanes.enter(&self.gpu, 0);
            queued?;
        }
        Ok(())
    }
}

/// Returns the step for some of the rows of a pass whose runs have one row each.
fn of_rows<'a>(step: &Step<'a>, rows: Range<usize>) -> Step<'a> {
    let count = rows.len();
    let states = step.states.get(rows.clone()).unwrap_or_default();
    Step {
        runs: &step.runs[rows],
        states,
        count,
        decode: count,
        outputs: &[],
        chosen: None,
        ..*step
    }
}
