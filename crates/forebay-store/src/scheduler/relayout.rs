//! The last step of a block of which some extents are recast: its bytes are here and compared.

use super::Scheduler;
use crate::checker::Work;
use crate::device::Device;
use crate::relayout::Stage;

impl<D: Device> Scheduler<D> {
    /// Has what was read brought into the form in which it is held. `true`: that is under way.
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
            // SAFETY: `check` compared the slot with the layout, and the scratch memory with what the
            // layout needs. Nothing of the job is at the device any more, and it keeps its buffer until
            // all answers are here or the checker was dropped; no other job has the scratch memory.
            // Shares lie apart, and copies begin when all of them are made.
            unsafe { self.checker.begin(key, work) };
        }
        true
    }
}
