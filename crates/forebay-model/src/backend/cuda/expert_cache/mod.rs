//! Streaming of experts that do not all fit in VRAM. Some are in VRAM slots, the others in RAM slots of pinned host
//! memory.
//!
//! The router's choice is copied to the host within the layer. Experts in VRAM slots are computed where they are. The
//! others are copied into slots beside the kernels, in several passes if they do not fit at once, or computed by the
//! CPU. Single tokens that run as CUDA graphs fetch experts themselves: see `serve`.
//!
//! Every pair of a token and an expert has an output row of its own, and rows are added in the router's order. The
//! result does not depend on where each expert was.

mod fetch;
mod given_up;
mod returns;
mod serve;
mod service;

use std::collections::VecDeque;

use forebay_cuda::{
    CopyStream, CudaError, DevicePtr, Gpu, HostWords, InFlight, Marker, Pinned, TableStaging,
};
use forebay_stream::{ExpertIndex, ExpertTier, LayerIndex, Lease, Residency, Returning, TierBatch};

use self::service::Service;
use super::memory::{DeviceArena, DevicePlan};
use super::on_cpu::{BatchRows, CpuExperts, ExpertMatrices, OffloadCpu};
use crate::ModelError;
use crate::sharing::{CpuOffloadControl, MissSplit};
use crate::statistics::DeviceExperts;

/// Host memory of the experts that are not in VRAM. Fields are dropped in order, so memory is unpinned only after its
/// leases have ended.
pub struct HostExperts {
    pub residency: Residency,
    /// Pins all memory of `residency`, because the GPU copies from it.
    pub pinned: Pinned,
    /// The CPU that computes some of the experts missing in VRAM.
    pub cpu: Option<OffloadCpu>,
}

/// State of experts that are streamed through a GPU.
pub struct ExpertCache {
    // Dropped before the memory that the copies read.
    in_flight: VecDeque<InFlight<Lease>>,
    /// Evicted experts on their way back to host memory.
    returning: VecDeque<InFlight<Returning>>,
    /// State for tokens that run as CUDA graphs; `None` if the kernels of all tokens are queued one by one.
    service: Option<Service>,
    passes: VecDeque<ExpertPass>,
    /// Experts of `passes`, pass by pass.
    in_passes: VecDeque<ExpertIndex>,
    /// Experts that have arrived in host memory and are for the GPU.
    ready: Vec<(ExpertIndex, Lease)>,
    /// Experts that have arrived in host memory and are for the CPU.
    for_cpu: Vec<(ExpertIndex, Lease)>,
    host: Residency,
    pinned: Pinned,
    cpu: Option<CpuExperts>,
    tier: ExpertTier,
    copies: CopyStream,
    /// Chosen ids, as sent by the GPU.
    ids: HostWords,
    /// Staging memory for uploads of tables, one for every pass of a layer.
    tables: TableStaging,
    tables_used: usize,
    tables_max: usize,
    /// Contents of every layer's table on the GPU, if known.
    on_device: Vec<Vec<u64>>,
    /// By layer, true if `on_device` is up to date. Kernels may have changed the table.
    is_known: Vec<bool>,
    layer: LayerIndex,
    touched: Vec<ExpertIndex>,
    batch: TierBatch,
    /// Experts of the batch that are not on the GPU.
    wanted: Vec<ExpertIndex>,
    seen: Vec<bool>,
    pass: Vec<ExpertIndex>,
    /// Maximum number of misses in one pass.
    pass_misses: usize,
    hits_are_done: bool,
    host_is_done: bool,
    experts_copied: u64,
    bytes_copied: u64,
    experts_returned: u64,
    bytes_returned: u64,
    experts_on_cpu: u64,
    passes_done: u64,
}

/// A part of a batch that is queued and whose slots are not yet free.
pub(super) struct ExpertPass {
    experts: usize,
    done: Marker,
}

/// One layer, and the GPU with its plan and memory.
pub struct LayerOfDevice<'a> {
    pub gpu: &'a Gpu,
    pub plan: &'a DevicePlan,
    pub arena: &'a DeviceArena,
    pub layer: usize,
}

impl ExpertCache {
    /// Creates the state for the tier of `plan`, with batches of `tokens` tokens that choose `used` experts each. The
    /// CPU may take part in batches of up to `few` tokens. The matrices in `of` have the shapes of those in all
    /// layers with experts. `serves` allows decode rows to run as CUDA graphs.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if `plan` has no tier.
    pub fn new(
        (gpu, plan, arena): (&Gpu, &DevicePlan, &DeviceArena),
        host: HostExperts,
        (tokens, few, used): (usize, usize, usize),
        of: &ExpertMatrices<'_>,
        serves: bool,
    ) -> Result<ExpertCache, CudaError> {
        let device = plan.tier.as_ref().expect("some experts are not on the GPU");
        let HostExperts { residency: host, pinned, cpu } = host;
        let counts = || plan.weights.experts_of.iter().map(|of| of.map_or(0, |of| of.count));
        let layers = counts().filter(|&count| count > 0).count();
        let sizes = (few, layers, used);
        let cpu = cpu.map(|cpu| CpuExperts::new(gpu, cpu, &host, of, sizes)).transpose()?;
        let experts = counts().max().unwrap_or(0);
        let tables_max = experts + 2;
        let hidden = if cpu.is_some() { of.gate.cols } else { 0 };
        let width = of.gate.cols;
        let on = (gpu, plan, arena);
        let service = serves.then(|| Service::new(on, used, width, hidden)).transpose()?;
        Ok(ExpertCache {
            service,
            in_flight: VecDeque::with_capacity(experts),
            returning: VecDeque::with_capacity(experts),
            passes: VecDeque::new(),
            in_passes: VecDeque::with_capacity(experts),
            ready: Vec::with_capacity(experts),
            for_cpu: Vec::with_capacity(experts),
            host,
            pinned,
            cpu,
            tier: ExpertTier::new(device.plan.clone()),
            copies: gpu.copy_stream()?,
            ids: gpu.host_words(tokens * used)?,
            tables: gpu.table_staging(tables_max * 2 * experts)?,
            tables_used: 0,
            tables_max,
            is_known: vec![true; plan.weights.experts_of.len()],
            on_device: counts().map(|count| vec![0; count]).collect(),
            layer: LayerIndex(0),
            touched: Vec::with_capacity(experts),
            batch: TierBatch::default(),
            wanted: Vec::with_capacity(experts),
            seen: vec![false; experts],
            pass: Vec::with_capacity(experts),
            pass_misses: 0,
            hits_are_done: true,
            host_is_done: true,
            experts_copied: 0,
            bytes_copied: 0,
            experts_returned: 0,
            bytes_returned: 0,
            experts_on_cpu: 0,
            passes_done: 0,
        })
    }

    pub fn host(&self) -> &Residency {
        &self.host
    }

    pub fn host_mut(&mut self) -> &mut Residency {
        &mut self.host
    }

    pub fn statistics(&self) -> DeviceExperts {
        let times = self.service.as_ref().map(Service::times).unwrap_or_default();
        DeviceExperts {
            tier: self.tier.statistics(),
            pinned_bytes: self.pinned.bytes() as u64,
            answer_wait_seconds: times.answer_wait_seconds,
            answer_seconds: times.host_seconds,
            copy_seconds: times.copy_seconds,
            layers_served: times.layers,
            rows_served: times.rows,
            layers_resident: times.resident,
            tokens_given_up: times.given_up,
            experts_copied: self.experts_copied,
            bytes_copied: self.bytes_copied,
            experts_returned: self.experts_returned,
            bytes_returned: self.bytes_returned,
            experts_on_cpu: self.experts_on_cpu,
            cpu_offload: self.cpu.as_ref().map(|cpu| cpu.cpu_offload.statistics()),
            passes: self.passes_done,
        }
    }

    /// Decides whether the CPU computes experts in the batch that starts. Returns true if it does.
    pub fn decide_cpu_offload(&mut self) -> bool {
        self.cpu.as_mut().is_some_and(|cpu| cpu.cpu_offload.decide())
    }

    /// Returns how the GPU and the CPU share missing experts in the current batch, or `None` if CPU offload is off.
    fn split(&self) -> Option<MissSplit> {
        self.cpu.as_ref().map(|cpu| &cpu.cpu_offload).and_then(CpuOffloadControl::split)
    }

    /// Copies the ids that the router chose, `[tokens, k]`, to the host. Waits for all queued work.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub fn take_ids(
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

    /// Releases what the previous batch, which has finished, still holds.
    fn finish_before(&mut self, gpu: &Gpu) {
        self.passes.clear();
        self.in_passes.clear();
        self.in_flight.clear();
        self.tables_used = 0;
        self.finish_returns();
        self.let_go(gpu);
    }

    /// Looks up the experts of a layer's batch and decides which device computes those that are not on the GPU.
    /// Starts to bring them to host memory. `rows` is given if the batch has few tokens, so the CPU may take part.
    ///
    /// # Errors
    /// Returns an error if ids are no experts because the router's scores were not finite, or if a read fails.
    pub fn begin(
        &mut self,
        on: &LayerOfDevice<'_>,
        chosen: &[u32],
        rows: Option<&BatchRows>,
    ) -> Result<(), ModelError> {
        if let Some(service) = &mut self.service {
            service.forget_tables();
        }
        self.touch(on.layer, chosen)?;
        let split = rows.and_then(|_| self.split());
        let admits = |misses: usize| split.map_or(misses, |split| split.brought(misses));
        self.tier.begin(self.layer, &self.touched, admits, &mut self.batch);
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
        let begun = self.begin_elsewhere(on, rows);
        if begun.is_err() {
            self.give_up();
        }
        let free = self.tier.free_slots(self.layer);
        let misses = self.batch.misses.len();
        self.pass_misses = if misses <= free { free } else { (free / 2).max(1) };
        begun
    }

    /// Notes which experts of a layer are chosen.
    ///
    /// # Errors
    /// Returns an error if ids are no experts.
    fn touch(&mut self, layer: usize, chosen: &[u32]) -> Result<(), ModelError> {
        let count = self.on_device[layer].len();
        self.seen[..count].fill(false);
        for id in chosen {
            let seen = self.seen[..count].get_mut(*id as usize);
            *seen.ok_or(ModelError::NumericFailure { layer, token: 0 })? = true;
        }
        self.layer = LayerIndex(layer as u32);
        self.touched.clear();
        let touched = (0..count).filter(|&expert| self.seen[expert]);
        self.touched.extend(touched.map(|expert| ExpertIndex(expert as u32)));
        Ok(())
    }

    fn begin_elsewhere(
        &mut self,
        on: &LayerOfDevice<'_>,
        rows: Option<&BatchRows>,
    ) -> Result<(), ModelError> {
        if !self.host_is_done {
            self.host.begin_experts(self.layer, &self.wanted)?;
        }
        self.hand_over();
        self.begin_returns(on.plan, on.arena)?;
        if let (Some(cpu), Some(rows), false) =
            (&mut self.cpu, rows, self.batch.elsewhere.is_empty())
        {
            // This waits for all queued work, so it must come before new kernels are queued.
            cpu.take_input(on.gpu, rows)?;
        }
        Ok(())
    }

    /// Ends a batch that failed. Removes experts that did not arrive from the tier.
    fn give_up(&mut self) {
        self.host.end_experts();
        self.ready.clear();
        self.for_cpu.clear();
        self.end();
        for &expert in &self.touched {
            match self.tier.slot(self.layer, expert) {
                Some(_) => self.tier.release(self.layer, expert),
                None => self.tier.forget(self.layer, expert),
            }
        }
        (self.hits_are_done, self.host_is_done) = (true, true);
    }
}
