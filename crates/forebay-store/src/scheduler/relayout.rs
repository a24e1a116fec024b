//! The relayout of a block: the last step, after all its bytes have arrived and were verified.

use super::Scheduler;
use crate::checker::Work;
use crate::device::Device;
use crate::relayout::Stage;

impl<D: Device> Scheduler<D> {
    /// Starts the next stage of the job's relayout. Returns true if it is in progress, and false if there is nothing to
    /// do.
    pub(super) fn relayout(&mut self, key: u32) -> bool {
        let Some(job) = self.jobs[key as usize].as_mut() else { return false };
        let Some(layout) = job.read.layout.relayout.clone() else { return false };
        if job.outcome.is_some() || job.abandoned {
            return false;
        }
        let slot = job.read.buffer.pointer();
        let (next, tasks): (Stage, Vec<Work>) = match job.stage {
            Stage::AsRead | Stage::Waiting if self.relayouts.is_some() => {
                job.stage = Stage::Waiting;
                self.to_relayout.push_back(key);
                return true;
            }
            Stage::AsRead | Stage::Waiting => {
                self.relayouts = Some(key);
                (Stage::Made, self.scratch.making(&layout, slot).collect())
            }
            Stage::Made => (Stage::Copied, self.scratch.copying(&layout, slot).collect()),
            Stage::Copied => {
                self.statistics.bytes_relaid_out += layout.to.len() as u64;
                self.relayouts = None;
                if let Some(waiting) = self.to_relayout.pop_front() {
                    self.relayout(waiting);
                }
                return false;
            }
        };
        job.stage = next;
        job.checking += tasks.len() as u32;
        for work in tasks {
            // SAFETY: `check` compared the slot with the layout, and the scratch memory with what the layout needs. No
            // request of the job is at the device any more. The job keeps its buffer until all answers have arrived or
            // the checker is dropped. No other job uses the scratch memory. Shares do not overlap, and copies begin
            // when all shares are made.
            unsafe { self.checker.begin(key, work) };
        }
        true
    }
}
