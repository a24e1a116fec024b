//! Where the weights of a pass come from.
//!
//! | source | VRAM | host memory |
//! | --- | --- | --- |
//! | resident | all weights | |
//! | expert cache | dense weights, and slots for experts | the other experts |
//! | layer ring | some sub-layers, and a ring for the others | the other sub-layers |
//!
//! Host memory is pinned. Where it is too small as well, its residency reads from the disk. An expert cache and a layer
//! ring may let the CPU compute part of what is in host memory.
//!
//! Steps of the backend call the same methods for every source, in this order:
//!
//! 1. [`WeightSource::begin`], then [`WeightSource::begin_graph`] if the pass is a CUDA graph,
//! 2. for each sub-layer with dense weights [`WeightSource::fetch`], its kernels, [`WeightSource::release`],
//! 3. for each layer with experts [`WeightSource::take_choice`], [`WeightSource::download_choice`] and
//!    [`WeightSource::compute_experts`],
//! 4. [`WeightSource::end_lane`] if the pass has two lanes, and [`WeightSource::run_graph`] if it is a CUDA graph,
//! 5. [`WeightSource::end`].

use forebay_compute::Cpu;
use forebay_cuda::{AddressTable, CudaError, DECODE_ROWS, DevicePtr, Gpu, Graph};
use forebay_ops::RowKind;
use forebay_stream::{LayerUses, Residency};

use super::expert_cache::{ExpertCache, ExpertWork, HostExperts, replace_choice};
use super::graphs::SourceKey;
use super::layer_ring::{HostSubLayers, LayerRing};
use super::memory::Device;
use super::on_cpu::expert_matrices;
use crate::ModelError;
use crate::arch::Architecture;
use crate::backend::{Batch, ChosenExperts, End, Step};
use crate::sharing::feed_forward_of;
use crate::statistics::{DeviceExperts, DeviceSubLayers};
use crate::weights::{PartMatrix, Weights};

/// Weights of a model that are in host memory beside a GPU.
pub enum HostWeights {
    Nothing,
    Experts(HostExperts),
    SubLayers(HostSubLayers),
}

/// The source of a model's weights, with its state. A backend never changes its source.
pub enum WeightSource {
    Resident,
    ExpertCache(Box<ExpertCache>),
    LayerRing(Box<LayerRing>),
}

impl WeightSource {
    /// Creates the source for the weights that the plan leaves to `host`. `captures` allows an expert cache to run decode
    /// rows as CUDA graphs.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the plan has no place in VRAM for the weights in `host`.
    pub fn new(
        on: Device<'_>,
        host: HostWeights,
        architecture: &Architecture,
        weights: &Weights,
        captures: bool,
    ) -> Result<WeightSource, CudaError> {
        match host {
            HostWeights::Nothing => Ok(WeightSource::Resident),
            HostWeights::Experts(host) => {
                let batch = on.plan.activations.batch;
                let sizes = (batch, DECODE_ROWS, architecture.experts_per_token());
                let of = weights.layers.iter().find_map(expert_matrices);
                let of = of.expect("a model with slots for experts has some");
                // A graph that gives up waiting overwrites choices that later layers would take when the pass goes on.
                let gives_up = on.gpu.host_wait_bound().is_some();
                let captures = captures && !(gives_up && architecture.shares_choices());
                let serves = captures.then(|| architecture.main_layers());
                let cache = ExpertCache::new(on, host, sizes, &of, serves)?;
                Ok(WeightSource::ExpertCache(Box::new(cache)))
            }
            HostWeights::SubLayers(host) => {
                let sizes = (DECODE_ROWS, architecture.hidden, architecture.dense_width());
                let ring_at = on.arena.dense(on.plan.weights.ring);
                let ring = LayerRing::new(on.gpu, &on.plan.sub_layers, ring_at, host, sizes)?;
                Ok(WeightSource::LayerRing(Box::new(ring)))
            }
        }
    }

    /// Returns the residency of the weights in host memory.
    pub fn host(&self) -> Option<&Residency> {
        match self {
            WeightSource::Resident => None,
            WeightSource::ExpertCache(cache) => Some(cache.host()),
            WeightSource::LayerRing(ring) => Some(ring.host()),
        }
    }

    pub fn host_mut(&mut self) -> Option<&mut Residency> {
        match self {
            WeightSource::Resident => None,
            WeightSource::ExpertCache(cache) => Some(cache.host_mut()),
            WeightSource::LayerRing(ring) => Some(ring.host_mut()),
        }
    }

    pub fn expert_statistics(&self) -> Option<DeviceExperts> {
        match self {
            WeightSource::ExpertCache(cache) => Some(cache.statistics()),
            WeightSource::Resident | WeightSource::LayerRing(_) => None,
        }
    }

    pub fn expert_uses(&self) -> Vec<LayerUses> {
        match self {
            WeightSource::ExpertCache(cache) => cache.expert_uses(),
            WeightSource::Resident | WeightSource::LayerRing(_) => Vec::new(),
        }
    }

    pub fn sub_layer_statistics(&self) -> Option<DeviceSubLayers> {
        match self {
            WeightSource::LayerRing(ring) => Some(ring.statistics()),
            WeightSource::Resident | WeightSource::ExpertCache(_) => None,
        }
    }

    /// Returns the CPU that computes sub-layers beside the GPU, if there is one.
    pub fn sub_layer_cpu(&self) -> Option<&Cpu> {
        match self {
            WeightSource::LayerRing(ring) => ring.cpu(),
            WeightSource::Resident | WeightSource::ExpertCache(_) => None,
        }
    }

    /// Begins a pass. Returns the source's part of the key of its CUDA graph, or `None` if the pass cannot be a graph.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn begin(
        &mut self,
        gpu: &Gpu,
        step: &Step<'_>,
        batch: &Batch<'_>,
    ) -> Result<Option<SourceKey>, ModelError> {
        match self {
            WeightSource::Resident => {
                // The graph neither reports the chosen ids nor accepts ids chosen by the caller.
                let fits = !batch.routing && batch.chosen.is_none();
                Ok(fits.then_some(SourceKey::default()))
            }
            WeightSource::ExpertCache(cache) => Ok(cache.begin(step.count)),
            WeightSource::LayerRing(ring) => {
                // Addresses in the ring differ from pass to pass, so no graph can hold them.
                ring.begin(gpu, step.kind() == RowKind::Decode, batch.end != End::Nothing)?;
                Ok(None)
            }
        }
    }

    /// Begins a pass that is a CUDA graph, with so many rows in all and in the first lane. `chosen` gives the experts that
    /// replace the routers' choice. This may wait for copies of earlier passes, so it comes before a capture.
    pub fn begin_graph(
        &mut self,
        gpu: &Gpu,
        rows: (usize, usize),
        chosen: Option<&dyn ChosenExperts>,
    ) {
        match self {
            WeightSource::ExpertCache(cache) => cache.begin_graph(gpu, rows, chosen),
            WeightSource::Resident | WeightSource::LayerRing(_) => {}
        }
    }

    /// Queues the copy to the GPU of what the pass's CUDA graph reads. The copy becomes part of the graph.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn queue_graph_input(&self, on: Device<'_>) -> Result<(), CudaError> {
        match self {
            WeightSource::ExpertCache(cache) => cache.queue_run(on),
            WeightSource::Resident | WeightSource::LayerRing(_) => Ok(()),
        }
    }

    /// Queues the CUDA graph of the pass and provides the weights that it asks for.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub fn run_graph(
        &mut self,
        on: Device<'_>,
        graph: &Graph,
        weights: &Weights,
    ) -> Result<(), ModelError> {
        match self {
            WeightSource::ExpertCache(cache) => cache.run_graph(on, graph, weights),
            WeightSource::Resident | WeightSource::LayerRing(_) => Ok(on.gpu.queue_graph(graph)?),
        }
    }

    /// Returns the layer in which the pass's graph gave up waiting for the host, or `None` if the pass is no graph or
    /// its graph did not give up. Waits for graphs that may give up.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub fn given_up(&self, gpu: &Gpu) -> Result<Option<usize>, CudaError> {
        match self {
            WeightSource::ExpertCache(cache) => cache.given_up(gpu),
            WeightSource::Resident | WeightSource::LayerRing(_) => Ok(None),
        }
    }

    /// Restores the residual stream of the layer in which the graph gave up. The pass continues there, kernel by kernel.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if no graph can have given up.
    pub fn resume(&mut self, on: Device<'_>) -> Result<(), CudaError> {
        match self {
            WeightSource::ExpertCache(cache) => cache.resume(on),
            WeightSource::Resident | WeightSource::LayerRing(_) => {
                unreachable!("only graphs that fetch experts give up")
            }
        }
    }

    /// Ends a pass, once all its work is queued. The caller then waits for that work.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub fn end(&mut self, gpu: &Gpu) -> Result<(), ModelError> {
        match self {
            WeightSource::LayerRing(ring) => ring.end(gpu),
            WeightSource::Resident | WeightSource::ExpertCache(_) => Ok(()),
        }
    }

    /// Makes a sub-layer's dense weights available to kernels that are queued from now on, or to the CPU.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub fn fetch(&mut self, gpu: &Gpu, sub_layer: usize) -> Result<(), ModelError> {
        match self {
            WeightSource::LayerRing(ring) => ring.fetch(gpu, sub_layer),
            WeightSource::Resident | WeightSource::ExpertCache(_) => Ok(()),
        }
    }

    /// Releases a sub-layer that was fetched and whose kernels are queued.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub fn release(&mut self, gpu: &Gpu, sub_layer: usize) -> Result<(), ModelError> {
        match self {
            WeightSource::LayerRing(ring) => ring.release(gpu, sub_layer),
            WeightSource::Resident | WeightSource::ExpertCache(_) => Ok(()),
        }
    }

    /// Returns the VRAM address of a part of the fetched sub-layer, for parts that have no address in the plan.
    ///
    /// # Panics
    /// Panics if the part is not in VRAM.
    pub fn part(&self, part: usize) -> DevicePtr<u8> {
        match self {
            WeightSource::LayerRing(ring) => ring.part(part),
            WeightSource::Resident | WeightSource::ExpertCache(_) => {
                unreachable!("all dense weights have an address in the plan")
            }
        }
    }

    /// Returns where the norm before a layer's feed-forward writes its input and where the norm after it reads its
    /// output. Returns `None` unless the CPU computes the feed-forward in this pass.
    pub fn exchanged(&self, layer: usize) -> Option<[DevicePtr<f32>; 2]> {
        match self {
            WeightSource::LayerRing(ring) => ring.exchanged(feed_forward_of(layer)),
            WeightSource::Resident | WeightSource::ExpertCache(_) => None,
        }
    }

    /// Computes the fetched feed-forward (gate, up and down) on the CPU, if it is the CPU's in this pass. Returns the
    /// address of its output, or `None` if kernels compute it.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub fn compute_on_cpu(
        &mut self,
        gpu: &Gpu,
        step: &Step<'_>,
        matrices: [PartMatrix; 3],
    ) -> Result<Option<DevicePtr<f32>>, ModelError> {
        match self {
            WeightSource::LayerRing(ring) => ring.compute_on_cpu(gpu, step, matrices),
            WeightSource::Resident | WeightSource::ExpertCache(_) => Ok(None),
        }
    }

    /// Takes the experts `ids` that a layer's router chose for the normed state `x` of a lane. Experts chosen by the
    /// caller replace them. Queues the kernel that fetches them, if a kernel does.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub fn take_choice(
        &mut self,
        on: Device<'_>,
        step: &Step<'_>,
        lane: usize,
        ids: DevicePtr<u32>,
        x: DevicePtr<f32>,
    ) -> Result<(), ModelError> {
        match self {
            WeightSource::ExpertCache(cache) => cache.take_choice(on, step, lane, ids, x),
            WeightSource::Resident | WeightSource::LayerRing(_) => {
                Ok(replace_choice(on.gpu, step, ids)?)
            }
        }
    }

    /// Queues the end of the first of two lanes.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn end_lane(&self, on: Device<'_>) -> Result<(), CudaError> {
        match self {
            WeightSource::ExpertCache(cache) => cache.end_lane(on),
            WeightSource::Resident | WeightSource::LayerRing(_) => Ok(()),
        }
    }

    /// Copies the experts `ids` to `chosen` on the host, if the source or the caller, as told by `is_wanted`, needs them
    /// there before the layer's experts are computed. Returns true if it did.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub fn download_choice(
        &mut self,
        gpu: &Gpu,
        ids: DevicePtr<u32>,
        chosen: &mut [u32],
        is_wanted: bool,
    ) -> Result<bool, CudaError> {
        match self {
            WeightSource::ExpertCache(cache) => cache.download_choice(gpu, ids, chosen),
            WeightSource::Resident | WeightSource::LayerRing(_) => {
                if is_wanted {
                    gpu.download_into(ids, chosen)?;
                }
                Ok(is_wanted)
            }
        }
    }

    /// Makes the chosen experts of a layer available and computes them. `compute` queues the products of those that
    /// a table of addresses names. It is called several times if the experts do not all fit or do not all come at once.
    ///
    /// # Errors
    /// Returns an error of `compute`, or an error if a read or the device fails.
    pub fn compute_experts(
        &mut self,
        on: Device<'_>,
        work: &ExpertWork<'_>,
        compute: impl Fn(AddressTable) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        match self {
            WeightSource::ExpertCache(cache) => cache.compute(on, work, compute),
            WeightSource::Resident | WeightSource::LayerRing(_) => {
                compute(on.arena.expert_tables().table(work.layer))
            }
        }
    }

    /// Passes the experts that the pass's graph chose, `[rows, k]`, to `take`, layer by layer. Does nothing if
    /// [`WeightSource::download_choice`] copied them.
    pub fn graph_experts(&self, take: impl FnMut(usize, &[u32])) {
        match self {
            WeightSource::ExpertCache(cache) => cache.graph_experts(take),
            WeightSource::Resident | WeightSource::LayerRing(_) => {}
        }
    }
}
