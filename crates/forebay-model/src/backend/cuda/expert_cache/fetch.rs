//! Computes a batch's experts in passes. Experts that have arrived in host memory are copied to slots while the
//! kernels of the previous pass run and the disk reads the next experts.

use forebay_cuda::Gpu;
use forebay_stream::{ExpertIndex, Lease};

use super::super::on_cpu::{BatchRows, ExpertMatrices};
use super::{ExpertCache, ExpertPass, LayerOfDevice};
use crate::ModelError;

/// Maximum number of bytes of expert copies that are queued at a time. If many more are queued, the driver blocks the
/// calling thread. A prompt's 147 copies of 27 MB each took 63 ms to queue on an H200. A blocked thread cannot send
/// the next reads to the disk.
const QUEUED_BYTES: u64 = 64 << 20;

/// Devices that have work in a pass.
#[derive(Clone, Copy, Debug)]
pub struct PassWork {
    pub gpu: bool,
    pub cpu: bool,
}

impl ExpertCache {
    /// Queues copies of the next experts to the GPU. Makes the layer's table name these experts and no others of the
    /// batch. Returns `None` once the whole batch is computed.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails. This ends the batch.
    pub fn next_pass(&mut self, on: &LayerOfDevice<'_>) -> Result<Option<PassWork>, ModelError> {
        match self.try_next_pass(on) {
            Ok(more) => Ok(more),
            Err(error) => {
                // Queued copies may still write slots that other experts get next.
                let _ = on.gpu.synchronize();
                self.give_up();
                Err(error)
            }
        }
    }

    fn try_next_pass(&mut self, on: &LayerOfDevice<'_>) -> Result<Option<PassWork>, ModelError> {
        self.pass.clear();
        self.take_ready()?;
        self.copy_ready(on)?;
        if !self.hits_are_done {
            self.hits_are_done = true;
            self.pass.append(&mut self.batch.hits);
        }
        let work = PassWork { gpu: !self.pass.is_empty(), cpu: !self.for_cpu.is_empty() };
        if !work.gpu {
            return Ok(work.cpu.then_some(work));
        }
        if let Some(last) = self.in_flight.back() {
            self.copies.hold(on.gpu, last)?;
        }
        self.name_pass(on)?;
        self.passes_done += 1;
        Ok(Some(work))
    }

    /// Computes the CPU's experts of a pass, while the GPU computes its own.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails. This ends the batch.
    pub fn compute_on_cpu(
        &mut self,
        gpu: &Gpu,
        of: &ExpertMatrices<'_>,
        rows: &BatchRows,
        chosen: &[u32],
    ) -> Result<(), ModelError> {
        let ExpertCache { cpu, host, for_cpu, experts_on_cpu, .. } = self;
        let cpu = cpu.as_mut().expect("what is the CPU's is for a CPU");
        *experts_on_cpu += for_cpu.len() as u64;
        let computed = cpu.compute(gpu, host, of, rows, chosen, for_cpu);
        for_cpu.clear();
        if computed.is_err() {
            let _ = gpu.synchronize();
            self.give_up();
        }
        computed
    }

    /// Takes the experts that have arrived in host memory. Waits for them if there is nothing else to do.
    fn take_ready(&mut self) -> Result<(), ModelError> {
        if self.host_is_done || !self.ready.is_empty() {
            return Ok(());
        }
        // Reads continue only when this thread polls them, so it waits for one copy at a time. The next reads may
        // need the slots of copies' leases and of evicted experts that are on their way back.
        while !self.host.experts_are_ready()? {
            if !self.hits_are_done {
                return Ok(());
            }
            if !self.finish_a_copy() {
                break;
            }
        }
        let host = &mut self.host;
        self.host_is_done = !host.next_experts(&mut self.ready)?;
        if self.host_is_done {
            host.end_experts();
        }
        let elsewhere = &self.batch.elsewhere;
        if !elsewhere.is_empty() {
            let of_cpu = |(expert, _): &mut (ExpertIndex, Lease)| elsewhere.contains(expert);
            self.for_cpu.extend(self.ready.extract_if(.., of_cpu));
        }
        Ok(())
    }

    /// Waits for the batch's oldest copy in flight. Returns false if there is none.
    fn finish_a_copy(&mut self) -> bool {
        // Copies of evicted experts were started before.
        if self.finish_a_return() {
            return true;
        }
        // If the device has failed, the next queued call reports it.
        self.in_flight.pop_front().is_some_and(|copy| copy.finish().is_ok())
    }

    /// Starts copies of ready experts, as far as there are slots. Reads continue meanwhile.
    fn copy_ready(&mut self, on: &LayerOfDevice<'_>) -> Result<(), ModelError> {
        let layout = on.plan.weights.experts_of[on.layer].expect("the layer has experts");
        let expert_bytes: u64 = layout.part_bytes.iter().sum();
        let queued_most = (QUEUED_BYTES / expert_bytes.max(1)).max(2) as usize;
        while self.pass.len() < self.pass_misses {
            let Some(expert) = self.ready.last().map(|ready| ready.0) else { break };
            while self.in_flight.len() >= queued_most && self.finish_a_copy() {}
            self.host.progress()?;
            let slot = match self.tier.take(self.layer, expert) {
                Some(slot) => slot,
                None if !self.pass.is_empty() => break,
                None => {
                    let pass = self.passes.pop_front().expect("released slots are enough for one");
                    self.copies.wait_for(&pass.done)?;
                    self.release(&pass);
                    continue;
                }
            };
            let (expert, lease) = self.ready.pop().expect("it was looked at");
            let to = on.plan.slot(on.arena, self.tier.pool(self.layer), slot);
            let parts = layout.parts;
            let host = &self.host;
            let copies =
                [0, 1, 2].map(|part| (host.range(&lease, part), to.offset(parts[part] as usize)));
            self.bytes_copied += copies.iter().map(|(range, _)| range.len() as u64).sum::<u64>();
            self.in_flight.push_back(self.copies.upload(lease, copies)?);
            self.experts_copied += 1;
            self.pass.push(expert);
        }
        Ok(())
    }

    /// Makes the layer's table on the GPU name the experts of the pass, and no others of the batch.
    fn name_pass(&mut self, on: &LayerOfDevice<'_>) -> Result<(), ModelError> {
        let ExpertCache { tier, on_device, is_known, touched, pass, layer, seen, .. } = self;
        touched.iter().for_each(|expert| seen[expert.0 as usize] = false);
        pass.iter().for_each(|expert| seen[expert.0 as usize] = true);
        let (table, pool) = (&mut on_device[on.layer], tier.pool(*layer));
        let mut changed = !std::mem::replace(&mut is_known[on.layer], true);
        for &expert in &*touched {
            let index = expert.0 as usize;
            let address = match tier.slot(*layer, expert).filter(|_| seen[index]) {
                Some(slot) => on.plan.slot(on.arena, pool, slot).address(),
                None => 0,
            };
            changed |= table[index] != address;
            table[index] = address;
        }
        if !changed {
            return Ok(());
        }
        assert!(self.tables_used < self.tables_max, "every pass computes something new");
        let words = 2 * table.len();
        let at = self.tables_used * words;
        self.tables_used += 1;
        let tables = on.arena.expert_tables();
        Ok(on.gpu.queue_table(tables, on.layer, table, &mut self.tables, at)?)
    }

    /// Ends a pass whose kernels are queued.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn end_pass(&mut self, gpu: &Gpu) -> Result<(), ModelError> {
        if self.pass.is_empty() {
            return Ok(());
        }
        let is_last = self.host_is_done && self.ready.is_empty() && self.hits_are_done;
        if is_last {
            // The next layer's copies start after its ids have arrived, and the ids arrive after these kernels have
            // run.
            self.pass.iter().for_each(|&expert| self.tier.release(self.layer, expert));
            return Ok(());
        }
        let pass = ExpertPass { experts: self.pass.len(), done: self.copies.mark(gpu)? };
        self.in_passes.extend(&self.pass);
        self.passes.push_back(pass);
        Ok(())
    }

    /// Ends a batch whose kernels are all queued.
    pub fn end(&mut self) {
        while let Some(pass) = self.passes.pop_front() {
            self.release(&pass);
        }
    }

    /// Releases the experts of the oldest pass.
    fn release(&mut self, pass: &ExpertPass) {
        let experts = self.in_passes.drain(..pass.experts);
        experts.for_each(|expert| self.tier.release(self.layer, expert));
    }
}
