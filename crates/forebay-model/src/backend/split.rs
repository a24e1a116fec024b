//! A dense model that does not fit a GPU: the CPU computes the first layers from host memory, the GPU the others and the
//! head.
//!
//! What both do is one decoder's work: every step goes to the device that has its layer. The residual stream changes sides
//! once in a batch, as it is after the CPU's last block was added, through pinned memory. Each side keeps keys and values
//! of its own layers, in its own type.

use forebay_stream::Residency;

use super::cpu::CpuBackend;
use super::cuda::CudaBackend;
use super::{Backend, Batch, Begun, ComputeInfo, End, LayerSplit, NextBlock, Step};
use crate::ModelError;

/// The CPU for the first layers, a GPU for the others.
pub struct SplitBackend {
    cpu: CpuBackend,
    gpu: CudaBackend,
    layers: usize,
    // The batch at hand, for when it comes to the GPU.
    tokens: Vec<u32>,
    end: End,
    routing: bool,
    /// The GPU does the other steps of the batch when it ends.
    recorded: bool,
}

impl SplitBackend {
    /// Of two backends for a model of `layers` layers: `cpu` has those before the first one of `gpu`.
    pub fn new(cpu: CpuBackend, gpu: CudaBackend, layers: usize) -> SplitBackend {
        let tokens = Vec::with_capacity(cpu.batch_tokens());
        let (end, routing, recorded) = (End::Nothing, false, false);
        SplitBackend { cpu, gpu, layers, tokens, end, routing, recorded }
    }

    /// Who computes the layer; `None`: its work is recorded.
    fn side(&mut self, step: &Step<'_>) -> Option<&mut dyn Backend> {
        match step.layer < self.gpu.first_layer() {
            true => Some(&mut self.cpu),
            false if self.recorded => None,
            false => Some(&mut self.gpu),
        }
    }

    /// Whether the layer is the GPU's first.
    fn changes_sides(&self, step: &Step<'_>) -> bool {
        step.layer == self.gpu.first_layer()
    }

    fn on_side(
        &mut self,
        step: &Step<'_>,
        compute: impl FnOnce(&mut dyn Backend) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        self.side(step).map_or(Ok(()), compute)
    }
}

impl Backend for SplitBackend {
    fn info(&self) -> ComputeInfo {
        let (cpu, gpu) = (self.cpu.info(), self.gpu.info());
        let first = self.gpu.first_layer();
        ComputeInfo {
            threads: cpu.threads,
            isa: format!("{} and {}", cpu.isa, gpu.isa),
            description: format!(
                "the first {first} layers: {}; the other {} and the head: {}",
                cpu.description,
                self.layers - first,
                gpu.description
            ),
            vram: gpu.vram,
        }
    }

    fn batch_tokens(&self) -> usize {
        self.cpu.batch_tokens().min(self.gpu.batch_tokens())
    }

    fn context(&self) -> usize {
        self.cpu.context().min(self.gpu.context())
    }

    fn cache_bytes(&self) -> u64 {
        self.cpu.cache_bytes() + self.gpu.cache_bytes()
    }

    fn truncate(&mut self, position: usize) {
        self.cpu.truncate(position);
        self.gpu.truncate(position);
    }

    fn residency(&self) -> Option<&Residency> {
        self.cpu.residency()
    }

    fn residency_mut(&mut self) -> Option<&mut Residency> {
        self.cpu.residency_mut()
    }

    fn split(&self) -> Option<LayerSplit> {
        let cpu_layers = self.gpu.first_layer();
        let gpu_layers = self.layers - cpu_layers;
        Some(LayerSplit { cpu_layers, gpu_layers, cpu_kv_cache_bytes: self.cpu.cache_bytes() })
    }

    fn begin(&mut self, step: &Step<'_>, batch: &Batch<'_>) -> Result<Begun, ModelError> {
        self.tokens.clear();
        self.tokens.extend_from_slice(batch.tokens);
        (self.end, self.routing, self.recorded) = (batch.end, batch.routing, false);
        self.cpu.begin(step, batch)
    }

    fn enter_layer(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        if self.changes_sides(step) {
            let (tokens, end, routing) = (&self.tokens[..], self.end, self.routing);
            let batch = Batch { tokens, end, routing, chosen: None, scores: false };
            let x = self.cpu.hand_over(step)?;
            self.recorded = self.gpu.begin_with(step, &batch, x)? == Begun::Recorded;
        }
        self.on_side(step, |side| side.enter_layer(step))
    }

    fn norm(&mut self, step: &Step<'_>, block: NextBlock, add: bool) -> Result<(), ModelError> {
        // What the CPU's last block gave was added before the stream changed sides.
        let added = self.changes_sides(step) && block == NextBlock::Attention;
        self.on_side(step, |side| side.norm(step, block, add && !added))
    }

    fn project(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.on_side(step, |side| side.project(step))
    }

    fn attend(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.on_side(step, |side| side.attend(step))
    }

    fn project_output(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.on_side(step, |side| side.project_output(step))
    }

    fn dense_feed_forward(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.on_side(step, |side| side.dense_feed_forward(step))
    }

    fn route(&mut self, step: &Step<'_>, routing: Option<&mut [i32]>) -> Result<(), ModelError> {
        self.on_side(step, |side| side.route(step, routing))
    }

    fn experts(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.on_side(step, |side| side.experts(step))
    }

    fn head(
        &mut self,
        step: &Step<'_>,
        first: usize,
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        self.gpu.head(step, first, logits)
    }

    fn largest_count(&self) -> usize {
        self.gpu.largest_count()
    }

    fn largest(
        &mut self,
        step: &Step<'_>,
        count: usize,
        largest: &mut Vec<(f32, u32)>,
    ) -> Result<(), ModelError> {
        self.gpu.largest(step, count, largest)
    }

    fn end(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.gpu.end(step)
    }
}
