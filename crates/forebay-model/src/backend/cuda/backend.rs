//! The GPU backend: the order of its steps.

use std::ops::Range;
use std::sync::Arc;

use forebay_compute::Cpu;
use forebay_cuda::{
    Added, AttentionSplits, CudaError, DeviceKvLayer, DevicePtr, FiniteFlag, Gpu, HostBytes,
    HostUploads, HostWords, KvLayerShape, LANES, Norm, Normed, TOP_K_MAX, shares_reads,
};
use forebay_ops::RowKind;
use forebay_store::{Arena, SlotBuffer};
use forebay_stream::{LayerUses, MemoryPlan, Residency};

use super::embedding::EmbeddingRows;
use super::exchange::Exchange;
use super::graphs::Graphs;
use super::kv_layout::{BlockPlace, KvLayerLayout, TableMirror};
use super::lanes::PassLanes;
use super::layout::ActivationLayout;
use super::memory::{Device, DeviceArena, DevicePlan};
use super::ngram_tables::NGramTable;
use super::products::{Product, Products};
use super::selections::SelectionWords;
use super::source::WeightSource;
use super::vectors::{GateVectors, LayerVectors};
use crate::ModelError;
use crate::arch::Architecture;
use crate::backend::{
    Backend, Batch, Begun, BlockContent, ComputeInfo, End, HostReserver, KvGroup, NextBlock,
    Restoring, Selector, Step, record_routing,
};
use crate::sharing::{SubLayerPlan, attention_of, feed_forward_of};
use crate::statistics::{DeviceExperts, DeviceSubLayers, VramUse};
use crate::weights::{PartMatrix, Weights};

/// A GPU with a model in its memory.
pub struct CudaBackend {
    pub(super) gpu: Gpu,
    pub(super) plan: DevicePlan,
    pub(super) arena: DeviceArena,
    pub(super) exchange: Exchange,
    pub(super) selections: SelectionWords,
    pub(super) graphs: Graphs,
    /// Rows of the embedding table, if the table is not on the GPU.
    pub(super) embedding_rows: Option<EmbeddingRows>,
    /// Tables of n-grams, which are never on the GPU.
    pub(super) ngram_tables: Vec<NGramTable>,
    /// Rows of the table of embeddings for layers, which is never on the GPU.
    pub(super) layer_rows: Option<EmbeddingRows>,
    /// Rows of the predicting layer's own table of embeddings, which is never on the GPU.
    pub(super) mtp_rows: Option<EmbeddingRows>,
    pub(super) source: WeightSource,
    /// Weight types that are read again for every decode row, as a text for [`ComputeInfo`].
    one_by_one: String,
    pub(super) lanes: PassLanes,
    /// How attention of each shape cuts the contexts of the pass's rows, in every lane. Empty before the first pass.
    pub(super) splits: Vec<AttentionSplits>,
    /// Number of tokens for which the rows of latent attention are sorted by head.
    pub(super) sorted_heads: usize,
    /// KV blocks for which there is no room in VRAM.
    kv_in_ram: Option<HostWords>,
    /// Copies of KV blocks that return from host memory.
    uploads: HostUploads,
    /// KV tables of all sequences.
    pub(super) tables: TableMirror,
    pub(super) vocabulary: usize,
    pub(super) flags: Vec<u32>,
    pub(super) chosen: Vec<u32>,
}

impl CudaBackend {
    /// Creates a backend whose tables and weights are on the GPU, or in `source` and `embedding_rows`. `captures` allows
    /// decode rows to run as CUDA graphs.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub(super) fn new(
        (gpu, plan, arena): (Gpu, DevicePlan, DeviceArena),
        source: WeightSource,
        ([embedding_rows, layer_rows, mtp_rows], ngram_tables): (
            [Option<EmbeddingRows>; 3],
            Vec<NGramTable>,
        ),
        (architecture, weights): (&Architecture, &Weights),
        exact: bool,
        captures: bool,
    ) -> Result<CudaBackend, CudaError> {
        let at = &plan.activations;
        Ok(CudaBackend {
            lanes: PassLanes::new(&plan, &arena, (architecture, weights), exact),
            splits: Vec::with_capacity(architecture.attentions.len()),
            exchange: Exchange::new(&gpu, at.exchange_layout, arena.activation(at.exchange))?,
            selections: SelectionWords::new(
                &gpu,
                at.decode_rows,
                architecture.vocabulary,
                arena.activation(at.selections),
            )?,
            graphs: Graphs::new(captures),
            embedding_rows,
            layer_rows,
            mtp_rows,
            ngram_tables,
            source,
            one_by_one: one_by_one(weights, exact),
            sorted_heads: 0,
            kv_in_ram: match plan.kv.host_bytes() {
                0 => None,
                bytes => Some(gpu.host_words(bytes as usize / 4)?),
            },
            uploads: gpu.host_uploads()?,
            tables: TableMirror::new(&gpu, &plan.kv)?,
            vocabulary: architecture.vocabulary,
            flags: vec![0; LANES * at.exchange_layout.lane_flags],
            chosen: vec![0; at.batch * architecture.experts_per_token()],
            gpu,
            plan,
            arena,
        })
    }

    /// Returns the source of the weights, and the GPU with its plan and memory.
    pub(super) fn source_and_device(&mut self) -> (&mut WeightSource, Device<'_>) {
        let CudaBackend { gpu, plan, arena, source, .. } = self;
        (source, Device { gpu, plan, arena })
    }

    pub(super) fn at(&self) -> &ActivationLayout {
        &self.lanes.current().at
    }

    pub(super) fn products(&self) -> &Products {
        &self.lanes.current().products
    }

    pub(super) fn float(&self, at: u64) -> DevicePtr<f32> {
        self.arena.activation(at)
    }

    pub(super) fn vectors(&self) -> DevicePtr<f32> {
        self.arena.activation(self.at().vectors)
    }

    pub(super) fn layer_vectors(&self, step: &Step<'_>) -> LayerVectors {
        self.plan.vectors.layers[step.layer]
    }

    pub(super) fn product(&self, step: &Step<'_>, matrix: PartMatrix, out: u64) -> Product {
        let data = match self.plan.weights.layers[step.layer][matrix.part] {
            Some(at) => self.arena.dense(at),
            None => self.source.part(matrix.part),
        };
        Product { matrix, data, out: self.float(out) }
    }

    /// Copies content to KV blocks: beside other work if it is in memory of [`Backend::host_reserver`] and goes to VRAM, at
    /// once otherwise.
    fn queue_blocks<'a>(
        &mut self,
        blocks: &mut dyn Iterator<Item = BlockContent<'a>>,
    ) -> Result<(), ModelError> {
        let CudaBackend { gpu, plan, arena, kv_in_ram, uploads, .. } = self;
        let mut is_idle = false;
        for of in blocks {
            assert_eq!(of.range.len() as u64, plan.kv.groups[of.group].block_bytes);
            let outside = match plan.kv.block(of.group, of.block) {
                BlockPlace::Vram(at) => {
                    match of.memory.as_any().downcast_ref::<HostBytes<SlotBuffer>>() {
                        Some(memory) => uploads.upload(gpu, memory, of.range, arena.kv(at))?,
                        None => gpu.upload(of.bytes(), arena.kv(at))?,
                    }
                    continue;
                }
                BlockPlace::Host(outside) => outside,
            };
            if !std::mem::replace(&mut is_idle, true) {
                // Queued kernels may still use what the blocks held before.
                gpu.synchronize()?;
            }
            let host = kv_in_ram.as_mut().expect("a block is in host memory");
            for (at, part) in plan.kv.host_parts(of.group, outside) {
                host.write(at / 4, &of.bytes()[part]);
            }
        }
        Ok(())
    }

    /// Returns the shape of the cache of the step's layer.
    pub(super) fn kv_shape(&self, step: &Step<'_>) -> &KvLayerShape {
        self.plan.kv.shape_of(step.layer)
    }

    /// Returns the cache of the step's layer, with blocks in host memory where they are.
    pub(super) fn kv_layer(&self, step: &Step<'_>) -> DeviceKvLayer {
        self.layer_at(self.plan.kv.keys_of(step.layer))
    }

    /// Returns the cache at `of`, with blocks in host memory where they are.
    pub(super) fn layer_at(&self, of: KvLayerLayout) -> DeviceKvLayer {
        let host = self.kv_in_ram.as_ref().map(|host| host.device(0).cast());
        self.plan.kv.layer(self.arena.kv(0), host, of)
    }

    /// Returns the cache of the step's layer for attention. For a prompt, it has copies of the blocks in host memory that the
    /// rows see, because many rows read each of them.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub(super) fn kv_layer_to_read(&self, step: &Step<'_>) -> Result<DeviceKvLayer, ModelError> {
        self.layer_to_read(step, self.plan.kv.keys_of(step.layer))
    }

    /// Returns the cache at `of` as [`CudaBackend::kv_layer_to_read`] does.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub(super) fn layer_to_read(
        &self,
        step: &Step<'_>,
        of: KvLayerLayout,
    ) -> Result<DeviceKvLayer, ModelError> {
        let kv = &self.plan.kv;
        let index = of.group;
        let group = &kv.groups[index];
        let host = self.kv_in_ram.as_ref().filter(|_| group.in_host_memory() > 0);
        let Some(host) = host.filter(|_| step.kind() == RowKind::Prompt) else {
            return Ok(self.layer_at(of));
        };
        let tables = step.runs.iter().map(|run| (run.table, run.position + run.count));
        for blocks in self.tables.in_host_memory(index, group, tables) {
            let (from, to, bytes) = kv.copy_of(of, blocks);
            let words = from as usize / 4..(from + bytes) as usize / 4;
            self.gpu.queue_upload(host, words, self.arena.kv(to).cast())?;
        }
        Ok(kv.layer(self.arena.kv(0), None, of))
    }

    /// Returns the flag in which kernels report rows that are not finite after block number `block`. Blocks are
    /// counted from the attention of layer 0, so the first one wins.
    pub(super) fn finite_flag(&self, block: usize, first_row: usize) -> FiniteFlag {
        let flag = self.exchange.flags(self.lanes.number());
        FiniteFlag { flag, first_tag: block * self.at().batch + first_row }
    }

    /// Norms the output of a block before it is added, if the model has such norms.
    pub(super) fn post_norm(
        &self,
        step: &Step<'_>,
        block: NextBlock,
        added: Added,
    ) -> Result<Added, ModelError> {
        let (layer, is_mixer) = step.added(block);
        let vectors = &self.plan.vectors.layers[layer];
        let weight = match vectors.embeddings {
            Some(of) if step.is_first(block) => Some(of.post_norm),
            _ if is_mixer => vectors.attention_post_norm,
            _ => vectors.feed_forward_post_norm,
        };
        let Some(weight) = weight else { return Ok(added) };
        let width = step.architecture.hidden;
        let norm = Norm {
            weight: self.vectors().offset(weight),
            width,
            epsilon: step.architecture.post_norm_epsilon,
        };
        let scale = self.gate_vectors(step, block).and_then(|gate| gate.scale);
        let added = match scale {
            None => added,
            Some(scale) => {
                let Some(rows) = self.added_rows(step, added)? else { return Ok(added) };
                let scale = self.vectors().offset(scale);
                self.gpu.multiply_columns(rows, scale, step.count, width)?;
                Added::Rows(rows)
            }
        };
        let (rows, more) = match added {
            Added::Nothing => return Ok(added),
            Added::Rows(rows) => (rows, Added::Nothing),
            // The sum of the experts' outputs must be there before it is normed.
            Added::Experts(outputs) => {
                let out = self.float(self.at().block_out);
                self.gpu.fill(out.cast(), 0, 4 * step.count * width)?;
                self.products().changed(out);
                (out, Added::Experts(outputs))
            }
        };
        self.gpu.rms_norm(rows, more, &norm, Normed::plain(rows), step.count, None)?;
        Ok(Added::Rows(rows))
    }

    /// Returns the gates of the output that the norm before a block adds, if the model has such.
    pub(super) fn gate_vectors(&self, step: &Step<'_>, block: NextBlock) -> Option<GateVectors> {
        let (layer, is_mixer) = step.added(block);
        let vectors = &self.plan.vectors.layers[layer];
        if is_mixer { vectors.attention_gate } else { vectors.feed_forward_gate }
    }

    /// Sets how attention of each shape cuts the contexts of the batch's rows. Returns the most parts of one row, added up over
    /// the shapes. They all grow with the longest context, so the sum says what each of them is.
    pub(super) fn cut_contexts(&mut self, step: &Step<'_>) -> usize {
        let ends = step.runs.iter().map(|run| run.position + run.count);
        let end = ends.max().expect("a pass has rows");
        let CudaBackend { gpu, plan, splits, .. } = self;
        let shapes = step.architecture.attentions.iter().zip(&plan.kv.shapes);
        splits.clear();
        splits.extend(shapes.map(|(of, shape)| match of.shared {
            // Its kernel cuts contexts by itself.
            Some(_) => AttentionSplits { limit: 1, most: 1 },
            None => gpu.attention_splits(shape, of.heads, step.kind(), end),
        }));
        splits.iter().map(|splits| splits.most).sum()
    }
}

/// Names the weight types that have no kernels for several decode rows, if there are any.
fn one_by_one(weights: &Weights, exact: bool) -> String {
    let types = weights.matrix_types().into_iter().filter(|&ty| !exact && !shares_reads(ty));
    let names: Vec<String> = types.map(|ty| ty.to_string()).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!(", {} read again for every decode row", names.join(" and ")),
    }
}

impl Backend for CudaBackend {
    fn info(&self) -> ComputeInfo {
        let (major, minor) = self.gpu.compute_capability();
        let arithmetic = if self.products().exact { "exact" } else { "fast" };
        let own = format!(
            "{}, compute capability {major}.{minor}, {} multiprocessors, {arithmetic} arithmetic{}",
            self.gpu.name(),
            self.gpu.multiprocessors(),
            self.one_by_one
        );
        let memory = self.gpu.memory_bytes().ok();
        let cpu = self.source.sub_layer_cpu();
        let beside = |what: fn(&Cpu) -> String| cpu.map_or(String::new(), what);
        ComputeInfo {
            threads: cpu.map_or(1, |cpu| cpu.pool().threads()),
            isa: format!("sm_{major}{minor}{}", beside(|cpu| format!(" and {}", cpu.isa()))),
            description: format!("{own}{}", beside(|cpu| format!("; {}", cpu.describe()))),
            arithmetic: format!(
                "{own}{}",
                beside(|cpu| format!("; {}", cpu.describe_arithmetic()))
            ),
            vram: Some(VramUse {
                driver_used_bytes: memory.map(|(free, total)| total - free),
                driver_total_bytes: memory.map(|(_, total)| total),
                ..self.plan.vram.clone()
            }),
        }
    }

    fn batch_tokens(&self) -> usize {
        self.at().batch
    }

    fn context(&self) -> usize {
        self.plan.kv.context()
    }

    fn cache_bytes(&self) -> u64 {
        self.plan.vram.kv_cache_bytes
    }

    fn decode_rows(&self) -> usize {
        self.at().decode_rows
    }

    fn mixes_rows(&self) -> bool {
        false
    }

    fn tables(&self) -> usize {
        self.plan.kv.sequences()
    }

    fn kv_groups(&self) -> Vec<KvGroup> {
        self.plan.kv.groups.iter().map(|group| group.described()).collect()
    }

    fn set_block(
        &mut self,
        table: usize,
        group: usize,
        index: usize,
        block: u32,
    ) -> Result<(), ModelError> {
        self.tables.set(table, group, index, block);
        Ok(())
    }

    fn copy_block(&mut self, group: usize, from: u32, to: u32) -> Result<(), ModelError> {
        let kv = &self.plan.kv;
        let bytes = kv.groups[group].block_bytes as usize;
        let [of, into] = [from, to].map(|block| kv.block(group, block));
        if let (BlockPlace::Vram(of), BlockPlace::Vram(into)) = (of, into) {
            self.gpu.copy(self.arena.kv(of), self.arena.kv(into), bytes)?;
            return Ok(());
        }
        let mut bytes = vec![0; bytes];
        self.save_block(group, from, &mut bytes)?;
        let range = 0..bytes.len();
        let copy = BlockContent { group, block: to, memory: &bytes, range };
        self.queue_blocks(&mut std::iter::once(copy))
    }

    fn host_reserver(&self) -> HostReserver {
        let pinner = self.uploads.pinner();
        Arc::new(move |bytes| {
            let arena = Arena::reserve(bytes)?;
            let memory: HostBytes<SlotBuffer> =
                pinner.pin(arena.addresses(), arena.carve(bytes)?)?;
            Ok(Box::new(memory))
        })
    }

    fn save_block(&mut self, group: usize, block: u32, bytes: &mut [u8]) -> Result<(), ModelError> {
        assert_eq!(bytes.len() as u64, self.plan.kv.groups[group].block_bytes);
        match self.plan.kv.block(group, block) {
            BlockPlace::Vram(at) => self.gpu.download_into(self.arena.kv(at), bytes)?,
            BlockPlace::Host(outside) => {
                // Queued kernels may still write the block.
                self.gpu.synchronize()?;
                let CudaBackend { plan, kv_in_ram, .. } = self;
                let host = kv_in_ram.as_ref().expect("a block is in host memory");
                for (at, part) in plan.kv.host_parts(group, outside) {
                    host.read(at / 4, &mut bytes[part]);
                }
            }
        }
        Ok(())
    }

    fn state_bytes(&self) -> usize {
        self.plan.kv.state_bytes()
    }

    fn save_state(&mut self, place: usize, bytes: &mut [u8]) -> Result<(), ModelError> {
        assert_eq!(bytes.len(), self.state_bytes(), "save_state: {place}");
        let mut rest = bytes;
        for (at, bytes) in self.plan.kv.parts_of_state(place) {
            let (part, others) = rest.split_at_mut(bytes);
            self.gpu.download_into(self.arena.kv(at), part)?;
            rest = others;
        }
        Ok(())
    }

    fn restore_state(&mut self, place: usize, bytes: &[u8]) -> Result<(), ModelError> {
        assert_eq!(bytes.len(), self.state_bytes(), "restore_state: {place}");
        let mut rest = bytes;
        for (at, bytes) in self.plan.kv.parts_of_state(place) {
            let (part, others) = rest.split_at(bytes);
            self.gpu.upload(part, self.arena.kv(at))?;
            rest = others;
        }
        Ok(())
    }

    fn restore_blocks<'a>(
        &mut self,
        blocks: &mut dyn Iterator<Item = BlockContent<'a>>,
    ) -> Result<Restoring, ModelError> {
        let begun = self.queue_blocks(blocks);
        let group = self.uploads.end_group()?;
        if let Err(error) = begun {
            self.uploads.has_ended(group, true)?;
            return Err(error);
        }
        Ok(Restoring(group))
    }

    fn has_restored(&mut self, restoring: Restoring, waits: bool) -> Result<bool, ModelError> {
        Ok(self.uploads.has_ended(restoring.0, waits)?)
    }

    fn residency(&self) -> Option<&Residency> {
        self.source.host()
    }

    fn residency_mut(&mut self) -> Option<&mut Residency> {
        self.source.host_mut()
    }

    fn slots(&self) -> Option<&MemoryPlan> {
        self.plan.tier.as_ref().map(|tier| &tier.plan)
    }

    fn sub_layers(&self) -> Option<&SubLayerPlan> {
        Some(&self.plan.sub_layers).filter(|sub_layers| !sub_layers.all_in_vram())
    }

    fn device_experts(&self) -> Option<DeviceExperts> {
        self.source.expert_statistics()
    }

    fn expert_uses(&self) -> Vec<LayerUses> {
        self.source.expert_uses()
    }

    fn device_sub_layers(&self) -> Option<DeviceSubLayers> {
        self.source.sub_layer_statistics()
    }

    fn pauses(&self) -> bool {
        self.can_pause()
    }

    fn pause(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.pause_pass(step)
    }

    fn begin(&mut self, step: &Step<'_>, batch: &Batch<'_>) -> Result<Begun, ModelError> {
        self.begin_batch(step, batch)
    }

    fn enter_layer(&mut self, _step: &Step<'_>) -> Result<(), ModelError> {
        Ok(())
    }

    fn norm(&mut self, step: &Step<'_>, block: NextBlock, add: bool) -> Result<(), ModelError> {
        self.in_lanes(step, |backend, step| backend.norm_rows(step, block, add))
    }

    fn project(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        // The matrices for n-grams belong to the same sub-layer, which is there then.
        if step.layer_weights().ngrams.is_none() {
            self.source.fetch(&self.gpu, attention_of(step.layer))?;
        }
        self.in_lanes(step, CudaBackend::project_layer)
    }

    fn attend(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.in_lanes(step, CudaBackend::attend_layer)
    }

    fn project_output(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.in_lanes(step, CudaBackend::project_layer_output)?;
        self.source.release(&self.gpu, attention_of(step.layer))
    }

    fn dense_feed_forward(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let sub_layer = feed_forward_of(step.layer);
        self.source.fetch(&self.gpu, sub_layer)?;
        self.in_lanes(step, CudaBackend::multiply_dense)?;
        match step.layer_weights().embeddings {
            // Their matrices belong to the same sub-layer.
            Some(_) => Ok(()),
            None => self.source.release(&self.gpu, sub_layer),
        }
    }

    fn add_ngrams(&mut self, step: &Step<'_>, add: bool) -> Result<(), ModelError> {
        self.source.fetch(&self.gpu, attention_of(step.layer))?;
        self.in_lanes(step, |backend, step| backend.multiply_ngrams(step, add))
    }

    fn layer_embeddings(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.in_lanes(step, CudaBackend::multiply_embeddings)?;
        self.source.release(&self.gpu, feed_forward_of(step.layer))
    }

    fn route(&mut self, step: &Step<'_>, routing: Option<&mut [i32]>) -> Result<(), ModelError> {
        // Where the host gets the choice, passes have one lane.
        let routing = std::cell::Cell::new(routing);
        self.in_lanes(step, |backend, step| backend.choose_experts(step, routing.take()))
    }

    fn recorded_routing(&self, step: &Step<'_>, routing: &mut [i32]) {
        self.source.graph_experts(|layer, ids| {
            record_routing(ids, routing, layer, step.architecture.main_layers(), step.count);
        });
    }

    fn experts(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.in_lanes(step, CudaBackend::multiply_experts)
    }

    fn predicts(&self) -> bool {
        self.can_predict()
    }

    fn begin_prediction(
        &mut self,
        step: &Step<'_>,
        batch: &Batch<'_>,
        hidden: &[f32],
    ) -> Result<(), ModelError> {
        self.join(step, batch, hidden)
    }

    fn head(&mut self, step: &Step<'_>, logits: &mut Vec<f32>) -> Result<(), ModelError> {
        self.finish_logits(step, logits)
    }

    fn largest_count(&self) -> usize {
        TOP_K_MAX.min(self.vocabulary)
    }

    fn largest(
        &mut self,
        step: &Step<'_>,
        count: usize,
        largest: &mut Vec<(f32, u32)>,
    ) -> Result<(), ModelError> {
        self.finish_rows(step, End::Largest(count))?;
        self.exchange.append_largest(count, step.outputs.len(), largest);
        Ok(())
    }

    fn select(&mut self, step: &Step<'_>, selector: &mut dyn Selector) -> Result<(), ModelError> {
        self.finish_selected(step, selector)
    }

    fn final_rows(
        &mut self,
        step: &Step<'_>,
        rows: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let (at, width) = match step.keeps_raw_states() {
            true => (self.at().x, step.architecture.stream_width()),
            false => (self.at().normed, step.architecture.hidden),
        };
        let base = out.len();
        out.resize(base + rows.len() * width, 0.0);
        let from = self.float(at).offset(rows.start * width);
        Ok(self.gpu.download_into(from, &mut out[base..])?)
    }

    fn end(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        self.finish_without_logits(step)
    }
}
