//! Fetches a layer's experts for kernels that the host queues one by one, in several passes if they do not fit at once.
//! Experts that have arrived in host memory are copied to slots while the kernels of the previous pass run and the disk
//! reads the next experts.

use forebay_cuda::{CudaError, DevicePtr, Gpu};
use forebay_stream::{BatchPart, ExpertIndex, Lease, Scope, TierBatch};

use super::super::memory::Device;
use super::super::on_cpu::BatchRows;
use super::{ExpertCache, ExpertPass, ExpertWork};
use crate::ModelError;

/// Maximum number of bytes of expert copies that are queued at a time. If many more are queued, the driver blocks the
/// calling thread. A prompt's 147 copies of 27 MB each took 63 ms to queue on an H200. A blocked thread cannot send
/// the next reads to the disk.
const QUEUED_BYTES: u64 = 64 << 20;

/// Devices that have work in a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassWork {
    pub gpu: bool,
    pub cpu: bool,
}

impl ExpertCache {
    /// Copies the ids that the router chose, `[tokens, k]`, to the host. Waits for all queued work.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub(super) fn take_ids(
        &mut self,
        gpu: &Gpu,
        ids: DevicePtr<u32>,
        chosen: &mut [u32],
    ) -> Result<(), CudaError> {
        gpu.queue_download(ids, &self.ids, 0..chosen.len())?;
        gpu.synchronize()?;
        self.ids.read(0, chosen);
        self.finish_before(gpu);
        Ok(())
    }

    /// Looks up the experts of a layer's batch and decides which device computes those that are not on the GPU.
    /// Starts to bring them to host memory.
    ///
    /// # Errors
    /// Returns an error if ids are no experts because the router's scores were not finite, or if a read fails.
    pub(super) fn prefetch(
        &mut self,
        on: Device<'_>,
        work: &ExpertWork<'_>,
    ) -> Result<(), ModelError> {
        let rows = work.few.then_some(&work.rows);
        // A batch of the predicting layer, which no graph has, leaves the experts that stay in other layers.
        let of_all = self.tier.plan().policy.scope == Scope::Global;
        if let Some(service) = &mut self.service
            && (of_all || service.has_layer(work.layer))
        {
            service.forget_tables();
        }
        self.touch(work.layer, work.chosen)?;
        let split = rows.and_then(|_| self.split());
        let admits = |misses: usize| split.map_or(misses, |split| split.brought(misses));
        let whole = BatchPart::Whole;
        self.tier.begin(self.layer, &self.touched, whole, admits, &mut self.batch);
        let TierBatch { hits, misses, elsewhere, .. } = &self.batch;
        if rows.is_some_and(|rows| rows.tokens == 1)
            && let Some(cpu) = &mut self.cpu
        {
            cpu.cpu_offload.note(misses.len() + elsewhere.len());
        }
        self.host.note_uses(self.layer, hits);
        self.wanted.clear();
        self.wanted.extend(misses.iter().chain(elsewhere));
        self.wanted.sort_unstable();
        self.hits_are_done = hits.is_empty();
        self.host_is_done = self.wanted.is_empty();
        let begun = self.begin_reads(on, rows);
        if begun.is_err() {
            self.give_up();
        }
        let free = self.tier.free_slots(self.layer);
        let misses = self.batch.misses.len();
        self.pass_misses = if misses <= free { free } else { (free / 2).max(1) };
        begun
    }

    /// Starts to bring experts from the disk to host memory, and evicted experts from VRAM. Copies the batch's input to
    /// the host if the CPU computes experts.
    fn begin_reads(&mut self, on: Device<'_>, rows: Option<&BatchRows>) -> Result<(), ModelError> {
        if !self.host_is_done {
            self.host.begin_experts(self.layer, &self.wanted)?;
        }
        self.hand_over();
        self.begin_returns(on)?;
        if let (Some(cpu), Some(rows), false) =
            (&mut self.cpu, rows, self.batch.elsewhere.is_empty())
        {
            // This waits for all queued work, so it must come before new kernels are queued.
            cpu.take_input(on.gpu, rows)?;
        }
        Ok(())
    }

    /// Queues copies of the next experts to the GPU. Makes the layer's table name these experts and no others of the
    /// batch. Returns `None` once the whole batch is computed.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails. This ends the batch.
    pub(super) fn fetch(&mut self, on: Device<'_>) -> Result<Option<PassWork>, ModelError> {
        match self.try_fetch(on) {
            Ok(more) => Ok(more),
            Err(error) => {
                // Queued copies may still write slots that other experts get next.
                let _ = on.gpu.synchronize();
                self.give_up();
                Err(error)
            }
        }
    }

    fn try_fetch(&mut self, on: Device<'_>) -> Result<Option<PassWork>, ModelError> {
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
    pub(super) fn compute_on_cpu(
        &mut self,
        gpu: &Gpu,
        work: &ExpertWork<'_>,
    ) -> Result<(), ModelError> {
        let ExpertCache { cpu, host, for_cpu, experts_on_cpu, .. } = self;
        let cpu = cpu.as_mut().expect("what is the CPU's is for a CPU");
        *experts_on_cpu += for_cpu.len() as u64;
        let computed = cpu.compute(gpu, host, &work.matrices, &work.rows, work.chosen, for_cpu);
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
    fn copy_ready(&mut self, on: Device<'_>) -> Result<(), ModelError> {
        let layout =
            on.plan.weights.experts_of[self.layer.0 as usize].expect("the layer has experts");
        let expert_bytes: u64 = layout.part_bytes.iter().sum();
        let queued_max = (QUEUED_BYTES / expert_bytes.max(1)).max(2) as usize;
        while self.pass.len() < self.pass_misses {
            let Some(expert) = self.ready.last().map(|ready| ready.0) else { break };
            while self.in_flight.len() >= queued_max && self.finish_a_copy() {}
            self.host.progress()?;
            let slot = match self.tier.take(self.layer, expert) {
                Some(slot) => slot,
                None if !self.pass.is_empty() => break,
                None => {
                    let pass = self.passes.pop_front().expect("released slots are enough for one");
                    self.copies.wait_for(&pass.done)?;
                    self.release_pass(&pass);
                    continue;
                }
            };
            let (expert, lease) = self.ready.pop().expect("it was looked at");
            let to = on.plan.slot(on.arena, self.tier.pool(self.layer), slot);
            let parts = layout.parts;
            let host = &self.host;
            let ranges = host.expert_ranges(&lease);
            self.bytes_copied += ranges.iter().map(|range| range.len() as u64).sum::<u64>();
            let copies = ranges.into_iter().zip(parts.map(|part| to.offset(part as usize)));
            let copies = copies.filter(|(range, _)| !range.is_empty());
            self.in_flight.push_back(self.copies.upload(lease, copies)?);
            self.experts_copied += 1;
            self.pass.push(expert);
        }
        Ok(())
    }

    /// Makes the layer's table on the GPU name the experts of the pass, and no others of the batch.
    fn name_pass(&mut self, on: Device<'_>) -> Result<(), ModelError> {
        let ExpertCache { tier, on_device, is_known, touched, pass, layer, seen, .. } = self;
        touched.iter().for_each(|expert| seen[expert.0 as usize] = false);
        pass.iter().for_each(|expert| seen[expert.0 as usize] = true);
        let pool = tier.pool(*layer);
        let layer_number = layer.0 as usize;
        let table = &mut on_device[layer_number];
        let mut changed = !std::mem::replace(&mut is_known[layer_number], true);
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
        Ok(on.gpu.queue_table(tables, layer_number, table, &mut self.tables, at)?)
    }

    /// Releases the experts of a pass whose kernels are queued, once these have run.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub(super) fn release(&mut self, gpu: &Gpu) -> Result<(), ModelError> {
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

    /// Releases the experts of all passes. The kernels of the batch must be queued.
    pub(super) fn release_all(&mut self) {
        while let Some(pass) = self.passes.pop_front() {
            self.release_pass(&pass);
        }
    }

    /// Releases the experts of the oldest pass.
    fn release_pass(&mut self, pass: &ExpertPass) {
        let experts = self.in_passes.drain(..pass.experts);
        experts.for_each(|expert| self.tier.release(self.layer, expert));
    }
}
