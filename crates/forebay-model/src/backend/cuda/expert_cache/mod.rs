//! The source of experts that do not all fit in VRAM. Some are in VRAM slots, the others in RAM slots of pinned host
//! memory.
//!
//! The router's choice is copied to the host within the layer. Experts in VRAM slots are computed where they are. The
//! others are copied into slots beside the kernels, in several passes if they do not fit at once, or computed by the
//! CPU. Decode rows that run as CUDA graphs fetch experts themselves: see `serve`. The backend calls the methods in
//! `steps`, which look at the way that the current pass gets its experts.
//!
//! Every pair of a token and an expert has an output row of its own, and rows are added in the router's order. The
//! result does not depend on where each expert was.

mod fetch;
mod given_up;
mod held;
mod returns;
mod serve;
mod service;
mod steps;
mod turns;

use std::collections::VecDeque;

use forebay_cuda::{
    CopyStream, CudaError, DevicePtr, Gpu, HostWords, InFlight, Marker, Pinned, TableStaging,
};
use forebay_stream::{
    ExpertIndex, ExpertTier, LayerIndex, LayerUses, Lease, Residency, Returning, TierBatch,
};

use self::service::Service;
use super::memory::Device;
use super::on_cpu::{BatchRows, CpuExperts, ExpertMatrices, OffloadCpu};
use crate::ModelError;
use crate::backend::Step;
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

/// How the current pass gets its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fetching {
    /// The host sees a layer's choice and brings the experts before it queues the kernels that read them: see `fetch`.
    ByHost,
    /// The pass is a CUDA graph. Kernels in it ask for experts, and the host answers while they run: see `serve`.
    InGraph,
    /// The graph of the pass gave up. The host answers each remaining layer before it queues the kernel that asks: see
    /// `given_up`.
    AfterGraph,
}

/// A cache of experts in VRAM slots, with the other experts in host memory.
pub struct ExpertCache {
    /// How the current pass gets its experts.
    fetching: Fetching,
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
    /// Experts of the batch's first part, and those that it has brought and that the tables on the GPU do not name yet.
    earlier: Vec<ExpertIndex>,
    there: Vec<ExpertIndex>,
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

/// The experts of one layer's batch that are computed.
pub struct ExpertWork<'a> {
    pub layer: usize,
    /// Lane of the rows.
    pub lane: usize,
    pub matrices: ExpertMatrices<'a>,
    pub rows: BatchRows,
    /// Ids `[tokens, used]`, if [`ExpertCache::download_choice`] copied them.
    pub chosen: &'a [u32],
    /// True if the batch has few tokens, so the CPU may take part.
    pub few: bool,
}

/// Replaces the router's choice at `ids` by the experts that the caller chose, if it did.
///
/// # Errors
/// Returns an error if a driver call fails.
pub fn replace_choice(gpu: &Gpu, step: &Step<'_>, ids: DevicePtr<u32>) -> Result<(), CudaError> {
    step.chosen.map_or(Ok(()), |chosen| gpu.upload(chosen, ids))
}

/// A part of a batch that is queued and whose slots are not yet free.
pub(super) struct ExpertPass {
    experts: usize,
    done: Marker,
}

impl ExpertCache {
    /// Creates the state for the tier of `plan`, with batches of `tokens` tokens that choose `used` experts each. The
    /// CPU may take part in batches of up to `few` tokens. The matrices in `of` have the shapes of those in all
    /// layers with experts. `serves` allows decode rows to run as CUDA graphs through so many layers, which are all but the predicting
    /// one.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if `plan` has no tier.
    pub fn new(
        on: Device<'_>,
        host: HostExperts,
        (tokens, few, used): (usize, usize, usize),
        of: &ExpertMatrices<'_>,
        serves: Option<usize>,
    ) -> Result<ExpertCache, CudaError> {
        let Device { gpu, plan, .. } = on;
        let device = plan.tier.as_ref().expect("some experts are not on the GPU");
        let HostExperts { residency: host, pinned, cpu } = host;
        let counts = || plan.weights.experts_of.iter().map(|of| of.map_or(0, |of| of.count));
        let layers = counts().filter(|&count| count > 0).count();
        let sizes = (few, layers, used);
        let cpu = cpu.map(|cpu| CpuExperts::new(gpu, cpu, &host, of, sizes)).transpose()?;
        let experts = counts().max().unwrap_or(0);
        let tables_max = experts + 2;
        let hidden = if cpu.is_some() { of.gate.cols } else { 0 };
        let width = plan.activations.stream_width;
        let service = serves.map(|layers| Service::new(on, layers, used, width, hidden));
        let service = service.transpose()?;
        Ok(ExpertCache {
            fetching: Fetching::ByHost,
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
            earlier: Vec::with_capacity(experts),
            there: Vec::with_capacity(experts),
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

    pub fn expert_uses(&self) -> Vec<LayerUses> {
        self.tier.expert_uses()
    }

    pub fn host(&self) -> &Residency {
        &self.host
    }

    pub fn host_mut(&mut self) -> &mut Residency {
        &mut self.host
    }

    /// Returns the state for passes that run as CUDA graphs.
    ///
    /// # Panics
    /// Panics if no pass does.
    fn service(&self) -> &Service {
        self.service.as_ref().expect("passes run as CUDA graphs")
    }

    fn service_mut(&mut self) -> &mut Service {
        self.service.as_mut().expect("passes run as CUDA graphs")
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
            layers_in_lanes: times.in_lanes,
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

    /// Returns how the GPU and the CPU share missing experts in the current batch, or `None` if CPU offload is off.
    fn split(&self) -> Option<MissSplit> {
        self.cpu.as_ref().map(|cpu| &cpu.cpu_offload).and_then(CpuOffloadControl::split)
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

    /// Ends a batch that failed. Removes experts that did not arrive from the tier.
    fn give_up(&mut self) {
        self.host.end_experts();
        self.ready.clear();
        self.for_cpu.clear();
        self.release_all();
        for &expert in &self.touched {
            match self.tier.slot(self.layer, expert) {
                Some(_) => self.tier.release(self.layer, expert),
                None => self.tier.forget(self.layer, expert),
            }
        }
        (self.hits_are_done, self.host_is_done) = (true, true);
    }
}
