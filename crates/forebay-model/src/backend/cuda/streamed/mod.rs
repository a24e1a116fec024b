//! Experts that do not all fit the GPU: slots there, and the others' homes in pinned host memory.
//!
//! The router's choice comes to the host within the layer. What is in a slot is computed with where it is; the rest is
//! copied into slots beside the kernels, in waves if it is more than fits, or computed by the CPU. Single tokens whose
//! work is recorded fetch it themselves: see `serve`. Every pair of a token and an expert has a row of its own, and rows
//! are added up in the router's order: what comes out does not depend on what was where.

mod given_up;
mod passes;
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

/// Where experts live that are not on the GPU. Fields are dropped in order: nothing is unpinned that is still leased.
pub struct HostExperts {
    pub residency: Residency,
    /// All of its memory, that the GPU copies from.
    pub pinned: Pinned,
    /// Computes some of what is missing on the GPU.
    pub cpu: Option<OffloadCpu>,
}

/// Experts on their way through a GPU.
pub struct Streamed {
    // Before what they copy from.
    in_flight: VecDeque<InFlight<Lease>>,
    /// On their way back.
    returning: VecDeque<InFlight<Returning>>,
    /// Of recorded tokens; `None`: tokens' work is queued as it comes.
    service: Option<Service>,
    passes: VecDeque<ExpertPass>,
    /// Experts of the waves, one after the other.
    in_passes: VecDeque<ExpertIndex>,
    /// What has come to host memory: for the GPU, and for the CPU.
    ready: Vec<(ExpertIndex, Lease)>,
    for_cpu: Vec<(ExpertIndex, Lease)>,
    host: Residency,
    pinned: Pinned,
    cpu: Option<CpuExperts>,
    tier: ExpertTier,
    copies: CopyStream,
    /// Chosen ids as the GPU sends them.
    ids: HostWords,
    /// Tables on their way, one for every wave of a layer.
    tables: TableStaging,
    tables_used: usize,
    tables_max: usize,
    /// What every layer's table on the GPU says.
    on_device: Vec<Vec<u64>>,
    /// Whether it does: kernels may have changed it.
    is_known: Vec<bool>,
    layer: LayerIndex,
    touched: Vec<ExpertIndex>,
    batch: TierBatch,
    /// Of the batch, what is not on the GPU.
    wanted: Vec<ExpertIndex>,
    seen: Vec<bool>,
    pass: Vec<ExpertIndex>,
    /// Most misses of one wave.
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

/// A part of a batch that is queued, and whose slots are not yet free.
pub(super) struct ExpertPass {
    experts: usize,
    done: Marker,
}

/// A layer's part of the GPU.
pub struct LayerOfDevice<'a> {
    pub gpu: &'a Gpu,
    pub plan: &'a DevicePlan,
    pub arena: &'a DeviceArena,
    pub layer: usize,
}

impl Streamed {
    /// For the tier of `plan`, with batches of `tokens` tokens that choose `used` experts each. The CPU may take part
    /// in batches of up to `few` tokens; `of` are matrices as those of all layers with experts. `serves`: single tokens'
    /// work may be recorded.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// Without a tier.
    pub fn new(
        (gpu, plan, arena): (&Gpu, &DevicePlan, &DeviceArena),
        host: HostExperts,
        (tokens, few, used): (usize, usize, usize),
        of: &ExpertMatrices<'_>,
        serves: bool,
    ) -> Result<Streamed, CudaError> {
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
        Ok(Streamed {
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

    /// Decides whether the CPU helps in the batch that begins.
    pub fn decide_cpu_offload(&mut self) -> bool {
        self.cpu.as_mut().is_some_and(|cpu| cpu.cpu_offload.decide())
    }

    /// Whether the CPU helps in the batch at hand, and how much.
    fn split(&self) -> Option<MissSplit> {
        self.cpu.as_ref().map(|cpu| &cpu.cpu_offload).and_then(CpuOffloadControl::split)
    }

    /// Waits for the ids that the router chose `[tokens, k]`, and all that was queued before.
    ///
    /// # Errors
    /// What went wrong in queued work.
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

    /// Whatever a batch before left is done with.
    fn finish_before(&mut self, gpu: &Gpu) {
        self.passes.clear();
        self.in_passes.clear();
        self.in_flight.clear();
        self.tables_used = 0;
        self.finish_returns();
        self.let_go(gpu);
    }

    /// Looks the experts of a layer's batch up, decides who computes what is not on the GPU, and has that brought to host
    /// memory. `rows`, if the batch has few tokens: the CPU may take part.
    ///
    /// # Errors
    /// Ids that are no experts: the router's scores were not finite. A failed read.
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
    /// Ids that are no experts.
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
            // Before the GPU has anything to do: it would have to be waited for.
            cpu.take_input(on.gpu, rows)?;
        }
        Ok(())
    }

    /// Ends a batch that failed: what did not come is not here.
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
