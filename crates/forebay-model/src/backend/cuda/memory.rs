//! Device memory: how much of it a model needs, and which weights go where.

use std::fmt;
use std::sync::Arc;

use forebay_compute::RopeTable;
use forebay_cuda::{
    ATTENTION_DIM_MAX, AddressTable, AddressTables, CudaError, DeviceMemory, DevicePtr, Gpu,
    Indexer, LANES, Pod, SHARED_KEY_DIM_MAX, STREAMS, TableSize, supports_weights, takes_delta,
    weight_alignment,
};
use forebay_format::at_least;
use forebay_stream::{Budget, LayerIndex, MemoryPlan, PolicyKind, StreamError};

use super::kv_layout::KvLayout;
use super::kv_size::KvSize;
use super::layout::{
    ActivationLayout, BATCH_TOKENS, EXPERT_TABLES, ExpertLayout, LONG_BATCHES, WeightLayout,
};
use super::relayout_kernels::workspace_bytes;
use super::vectors::Vectors;
use crate::ModelError;
use crate::arch::{Architecture, Attention, IndexerRule, KvInVram, Latent};
use crate::backend::largest_context;
use crate::sharing::{ALIGNMENT, DeviceShare, SubLayerPlan};
use crate::statistics::VramUse;
use crate::weights::{LayerWeights, Weights};

/// Device memory assumed for the code of kernels, whose modules are loaded when they are first used.
const CODE_BYTES: u64 = 64 << 20;

/// Largest size assumed of a driver context. Memory in use beyond it belongs to other programs.
const CONTEXT_BYTES_MAX: u64 = 1 << 30;

/// Size assumed of the driver's context, before any allocation, if no GPU was queried. On an H200 it was 0.51 GiB.
const CONTEXT_BYTES_USUAL: u64 = 525 << 20;

/// Properties of a GPU that a memory plan depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceFacts {
    pub multiprocessors: u32,
    /// Free device memory, with a context open.
    pub free_bytes: u64,
    pub total_bytes: u64,
}

impl DeviceFacts {
    /// Queries the facts of an open GPU.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn of(gpu: &Gpu) -> Result<DeviceFacts, CudaError> {
        let (free_bytes, total_bytes) = gpu.memory_bytes()?;
        Ok(DeviceFacts { multiprocessors: gpu.multiprocessors(), free_bytes, total_bytes })
    }

    /// Estimates the facts of a GPU that is not open. Assumes that no program uses it and that a context has the
    /// usual size.
    pub fn estimate(multiprocessors: u32, total_bytes: u64) -> DeviceFacts {
        let free_bytes = total_bytes.saturating_sub(CONTEXT_BYTES_USUAL);
        DeviceFacts { multiprocessors, free_bytes, total_bytes }
    }

    /// Returns the memory that the driver's context and the code of kernels take.
    pub fn context_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.free_bytes).min(CONTEXT_BYTES_MAX) + CODE_BYTES
    }

    /// Returns the memory that a plan may use, within a budget for everything on the GPU. The driver's context already
    /// exists, so only the rest has to fit in free memory.
    fn budget_bytes(&self, vram_bytes: Option<u64>) -> u64 {
        let available = self.free_bytes + self.context_bytes() - CODE_BYTES;
        vram_bytes.map_or(available, |vram| vram.min(available))
    }

    /// Returns the memory that is left for models within a budget for everything on the GPU.
    pub fn room_bytes(&self, vram_bytes: Option<u64>) -> u64 {
        self.budget_bytes(vram_bytes).saturating_sub(self.context_bytes())
    }

    /// Returns the plan that [`super::CudaPlan::new`] makes for such a GPU.
    ///
    /// # Errors
    /// Returns [`ModelError::VramTooSmall`] if VRAM is too small, and an error for weights or routers that have no
    /// kernels.
    pub fn plan(
        &self,
        architecture: &Architecture,
        weights: &Weights,
        cache: KvSize,
        vram_bytes: Option<u64>,
        policy: PolicyKind,
    ) -> Result<DeviceShare, ModelError> {
        let plan = DevicePlan::new(self, architecture, weights, cache, vram_bytes, policy)?;
        let DevicePlan { sub_layers, vram, tier, activations, .. } = plan;
        let slots = tier.map(|tier| tier.plan);
        Ok(DeviceShare { sub_layers, vram, slots, batch_tokens: activations.batch })
    }
}

/// Layout of everything in device memory.
pub struct DevicePlan {
    pub sub_layers: SubLayerPlan,
    pub weights: WeightLayout,
    /// Slots for experts, if not all of them fit.
    pub tier: Option<DeviceTier>,
    pub kv: KvLayout,
    pub activations: ActivationLayout,
    pub vectors: Vectors,
    pub vram: VramUse,
}

/// Slots for experts on a device that does not hold all of them.
pub struct DeviceTier {
    pub plan: MemoryPlan,
    /// Offset of each pool's first slot.
    pub pools: Vec<u64>,
}

/// Returns the plan with the most keys and values in VRAM that leaves room for all dense weights in `room_bytes`. If there is none,
/// returns what there is with the least.
fn most_in_vram(
    room_bytes: u64,
    plan: impl Fn(KvInVram) -> Result<DevicePlan, ModelError>,
) -> Result<DevicePlan, ModelError> {
    /// The plan has as much as fits, less at most this.
    const STEP_BYTES: u64 = 1 << 20;
    let is_right = |plan: &DevicePlan| plan.sub_layers.all_in_vram();
    let all = plan(KvInVram::All);
    if all.as_ref().is_ok_and(is_right) {
        return all;
    }
    let bytes_min = match plan(KvInVram::Bytes(0)) {
        Err(ModelError::KvVramTooSmall { bytes_min, .. }) => bytes_min,
        other => return other,
    };
    let mut best = plan(KvInVram::Bytes(bytes_min))?;
    if !is_right(&best) {
        return Ok(best);
    }
    let (mut low, mut high) = (bytes_min, room_bytes.max(bytes_min));
    while high - low > STEP_BYTES {
        let middle = low + (high - low) / 2;
        match plan(KvInVram::Bytes(middle)) {
            Ok(found) if is_right(&found) => (best, low) = (found, middle),
            _ => high = middle,
        }
    }
    Ok(best)
}

/// Returns the plan with the longest passes for prompts that are worth their memory. `plan` makes a plan for a number of
/// tokens in a pass.
///
/// A pass of a prompt copies all experts that are not in VRAM, so four times as many tokens in a pass read a long prompt
/// up to four times as fast. The memory for their activations holds fewer experts, which slows generated tokens.
fn with_long_passes(
    cache: &KvSize,
    plan: impl Fn(usize) -> Result<DevicePlan, ModelError>,
) -> Result<DevicePlan, ModelError> {
    /// Longer passes may take this part of the memory that gives way: that of experts, and of keys and values that would go to
    /// RAM instead.
    const PART: u64 = 16;
    let usual = plan(BATCH_TOKENS)?;
    if usual.tier.is_none() {
        return Ok(usual);
    }
    // Windows of keys and values have room for a pass. Wherever keys and values are, longer passes take this much more.
    let bytes = |DevicePlan { vram, .. }: &DevicePlan| {
        vram.activation_bytes + vram.kv_cache_bytes + vram.kv_cache_in_ram_bytes
    };
    let kv_bytes = match usual.vram.kv_cache_in_ram_bytes {
        0 => 0,
        _ => usual.vram.kv_cache_bytes,
    };
    let bytes_max = bytes(&usual) + (usual.weights.experts.bytes() + kv_bytes) / PART;
    let positions = cache.context * cache.sequences;
    let longer = LONG_BATCHES.into_iter().filter(|tokens| 2 * tokens <= positions);
    let mut plans = longer.filter_map(|tokens| plan(tokens).ok());
    Ok(plans.find(|plan| bytes(plan) <= bytes_max).unwrap_or(usual))
}

/// Everything that a GPU holds of a model, before experts are placed.
struct Share {
    sub_layers: SubLayerPlan,
    vectors: Vectors,
    weights: WeightLayout,
    kv: KvLayout,
    activations: ActivationLayout,
}

impl Share {
    /// Lays out the share. It includes the embedding table unless the table `stays_on_disk`.
    fn new(
        facts: &DeviceFacts,
        architecture: &Architecture,
        weights: &Weights,
        (cache, batch_tokens): (&KvSize, usize),
        sub_layers: SubLayerPlan,
        stays_on_disk: bool,
    ) -> Result<Share, ModelError> {
        let vectors = Vectors::new(weights);
        let (multiprocessors, floats) = (facts.multiprocessors, vectors.floats.len());
        let activations =
            ActivationLayout::new(multiprocessors, architecture, cache, batch_tokens, floats);
        Ok(Share {
            weights: WeightLayout::new(architecture, weights, &sub_layers, stays_on_disk)?,
            kv: KvLayout::new(cache, architecture, activations.batch)
                .with_room_for(workspace_bytes(weights)),
            activations,
            vectors,
            sub_layers,
        })
    }

    fn bytes(&self) -> u64 {
        let dense = self.weights.dense.bytes() + self.weights.experts.bytes();
        dense + self.kv.layout.bytes() + self.activations.bytes()
    }
}

impl DevicePlan {
    /// Plans a model with a KV cache of this size. If the whole model fits, all of it is on the device.
    /// Otherwise:
    ///
    /// - For a model with experts, everything but experts is on the device, with slots for as many experts as fit
    ///   beside it. Prompts are read in longer passes, because every pass copies all other experts.
    /// - For a dense model, the embedding table stays on the disk. If this is not enough, as many sub-layers as fit
    ///   are in VRAM, beside a ring for the others.
    ///
    /// # Errors
    /// Returns an error for weights of types that have no kernels and for routers beyond the kernels' limits. Returns
    /// [`ModelError::VramTooSmall`], with the bytes that would be enough and the largest context that fits, if VRAM
    /// is too small.
    pub fn new(
        facts: &DeviceFacts,
        architecture: &Architecture,
        weights: &Weights,
        cache: KvSize,
        vram_bytes: Option<u64>,
        policy: PolicyKind,
    ) -> Result<DevicePlan, ModelError> {
        check_kernels(architecture, weights)?;
        let plan = |context: usize| {
            let cache = KvSize { context, ..cache };
            let with = |batch_tokens: usize, in_vram: KvInVram| {
                let cache = (KvSize { in_vram, ..cache }, batch_tokens);
                Self::within(facts, architecture, weights, cache, vram_bytes, policy)
            };
            let room_bytes = facts.room_bytes(vram_bytes);
            with_long_passes(&cache, |batch_tokens| match cache.in_vram {
                KvInVram::AsMuchAsFits => {
                    most_in_vram(room_bytes, |in_vram| with(batch_tokens, in_vram))
                }
                in_vram => with(batch_tokens, in_vram),
            })
        };
        plan(cache.context).map_err(|error| match error {
            ModelError::VramTooSmall { needed_bytes, given_bytes, why, .. } => {
                let largest_context = largest_context(cache.context, |less| plan(less).is_ok());
                ModelError::VramTooSmall { needed_bytes, given_bytes, why, largest_context }
            }
            error => error,
        })
    }

    /// Makes the plan for [`DevicePlan::new`] with passes of so many tokens. Does not search for a context that fits.
    fn within(
        facts: &DeviceFacts,
        architecture: &Architecture,
        weights: &Weights,
        (cache, batch_tokens): (KvSize, usize),
        vram_bytes: Option<u64>,
        policy: PolicyKind,
    ) -> Result<DevicePlan, ModelError> {
        let share_with = |sub_layers: SubLayerPlan, stays_on_disk: bool| {
            let cache = (&cache, batch_tokens);
            Share::new(facts, architecture, weights, cache, sub_layers, stays_on_disk)
        };
        let mut share = share_with(SubLayerPlan::resident(weights), false)?;
        let (context_bytes, left) = (facts.context_bytes(), facts.room_bytes(vram_bytes));
        let budget_bytes = facts.budget_bytes(vram_bytes);
        let all_experts = share.weights.experts_of.iter().flatten();
        let expert_bytes: u64 = all_experts.map(|of| of.slot_bytes * of.count as u64).sum();
        let too_small = |share: &Share, more_bytes: u64| {
            let what = WhatIsNeeded { share, context_bytes, cache: &cache, more_bytes };
            let needed_bytes = context_bytes + share.bytes() + more_bytes;
            let why = what.to_string();
            let given_bytes = budget_bytes;
            ModelError::VramTooSmall { needed_bytes, given_bytes, why, largest_context: None }
        };
        if let KvInVram::Bytes(given_bytes) = cache.in_vram
            && share.kv.bytes_min() > given_bytes
        {
            return Err(ModelError::KvVramTooSmall {
                given_bytes,
                bytes_min: share.kv.bytes_min(),
            });
        }
        let mut tier = None;
        if share.bytes() + expert_bytes <= left {
            share.weights.place_experts();
        } else if expert_bytes > 0 {
            let left = left.saturating_sub(share.bytes());
            let rows = share.activations.fetch_rows;
            let planned = plan_tier(&share.weights, architecture, rows, left, policy);
            let plan = planned.map_err(|least| too_small(&share, least))?;
            let pools = share.weights.place_pools(&plan);
            tier = Some(DeviceTier { plan, pools });
        } else {
            share = share_with(SubLayerPlan::resident(weights), true)?;
            if share.bytes() > left && architecture.latents().next().is_some() {
                return Err(too_small(&share, 0));
            }
            if share.bytes() > left {
                let sub_layers = SubLayerPlan::resident(weights);
                let rest = share_with(sub_layers.clone().moved_out(), true)?;
                let within = sub_layers.within(left.saturating_sub(rest.bytes()));
                share = share_with(within.map_err(|least| too_small(&rest, least))?, true)?;
            }
        }
        let vram = VramUse {
            budget_bytes: vram_bytes.unwrap_or(budget_bytes),
            budget_chosen_by_user: vram_bytes.is_some(),
            context_bytes,
            weights_bytes: share.weights.dense.bytes() + share.weights.experts.bytes(),
            kv_cache_bytes: share.kv.layout.bytes(),
            kv_cache_in_ram_bytes: share.kv.host_bytes(),
            activation_bytes: share.activations.bytes(),
            total_bytes: context_bytes + share.bytes(),
            driver_used_bytes: None,
            driver_total_bytes: None,
        };
        let Share { sub_layers, vectors, weights, kv, activations } = share;
        Ok(DevicePlan { sub_layers, weights, tier, kv, activations, vectors, vram })
    }

    /// Returns the address of a slot of pool `pool` of the tier.
    ///
    /// # Panics
    /// Panics if all experts are on the device.
    pub fn slot(&self, arena: &DeviceArena, pool: usize, slot: u32) -> DevicePtr<u8> {
        let tier = self.tier.as_ref().expect("slots are for experts that come and go");
        arena.experts(tier.pools[pool] + u64::from(slot) * tier.plan.pools[pool].slot_bytes)
    }
}

/// The least memory that a model needs, for error messages.
struct WhatIsNeeded<'a> {
    /// Everything that must be on the device.
    share: &'a Share,
    context_bytes: u64,
    cache: &'a KvSize,
    /// Bytes for one token's experts, or for streamed sub-layers.
    more_bytes: u64,
}

impl fmt::Display for WhatIsNeeded<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Share { weights, kv, activations, .. } = self.share;
        let (what, more) = match weights.experts_of.iter().flatten().next() {
            Some(_) => ("weights that every token needs", "one token's experts"),
            None => ("the output projection", "layers on their way"),
        };
        let (dense, kv, activations) =
            (weights.dense.bytes(), kv.layout.bytes(), activations.bytes());
        let (context, positions) = (self.context_bytes, self.cache.context);
        write!(
            out,
            "{} of {what}, {} for {more}, {} of KV cache for {positions} positions, {} of activations, {} for the \
             driver's context and kernels",
            at_least(dense),
            at_least(self.more_bytes),
            at_least(kv),
            at_least(activations),
            at_least(context)
        )
    }
}

/// Plans slots within `bytes`. If they are too few, the error is the number of bytes that would be enough.
fn plan_tier(
    layout: &WeightLayout,
    architecture: &Architecture,
    rows: usize,
    bytes: u64,
    policy: PolicyKind,
) -> Result<MemoryPlan, u64> {
    let of_layer =
        |of: &Option<ExpertLayout>| of.map_or((0, 0), |of| (of.count as u32, of.slot_bytes));
    let layers: Vec<(u32, u64)> = layout.experts_of.iter().map(of_layer).collect();
    let used = architecture.experts_per_token();
    // Offsets of pools are aligned.
    let bytes = bytes.saturating_sub(ALIGNMENT * layers.len() as u64);
    let plan = |at_once: usize| Budget::plan_experts(&layers, at_once, bytes, policy);
    let least = plan(used).map_err(|error| match error {
        StreamError::BudgetTooSmall { needed_bytes, .. } => {
            needed_bytes + ALIGNMENT * layers.len() as u64
        }
        _ => u64::MAX,
    })?;
    // A kernel fetches the experts of several rows only if they have slots at once. More slots for experts in transit
    // make room for that, and for rows in two lanes. They are worth it if most slots remain for experts that are kept.
    let missing = |plan: &MemoryPlan, rows: usize, lanes: usize| {
        let of_layer = |(layer, &(experts, _)): (usize, &(u32, u64))| {
            let layer = LayerIndex(layer as u32);
            let wanted = (experts as usize).min(rows * used);
            let whole = wanted.saturating_sub(plan.slots_at_once(layer, used));
            let in_parts = plan.slots_lacking_for_parts(layer, rows.div_ceil(LANES) * used, used);
            if lanes == 1 { whole } else { whole.max(in_parts) }
        };
        layers.iter().enumerate().map(of_layer).max().unwrap_or(0)
    };
    let transient = least.pools.iter().map(|pool| pool.transient_slots).max().unwrap_or(0);
    let most = layers.iter().map(|&(experts, _)| experts as usize).max().unwrap_or(0);
    let halves = std::iter::successors(Some(rows), |rows| Some(rows / 2));
    let halves = halves.take_while(|&rows| rows > 1);
    for (rows, lanes) in halves.flat_map(|rows| [(rows, LANES), (rows, 1)]) {
        let more = missing(&least, rows, lanes);
        if more == 0 {
            break;
        }
        let mut in_transit = transient as usize + more;
        while let Ok(wider) = plan(in_transit)
            && 4 * wider.kept_slots() >= 3 * least.kept_slots()
        {
            // Each of these slots is one less for all layers together, which costs a layer a slot now and then.
            match missing(&wider, rows, lanes) {
                0 => return Ok(wider),
                more if in_transit < most => in_transit += more,
                _ => break,
            }
        }
    }
    Ok(least)
}

fn check_kernels(architecture: &Architecture, weights: &Weights) -> Result<(), ModelError> {
    if let Some(recurrent) = &architecture.recurrent
        && !takes_delta(&recurrent.delta_shape())
    {
        let (key, value) = (recurrent.key_dim, recurrent.value_dim);
        let what = format!("recurrent layers with keys of {key} and values of {value} elements");
        return Err(ModelError::NotOnGpu { what });
    }
    if let Some(shape) = architecture.stream_shape()
        && (shape.count != STREAMS && !architecture.has_bank() || !shape.width.is_multiple_of(4))
    {
        let what = format!("{} residual streams of {} elements", shape.count, shape.width);
        return Err(ModelError::NotOnGpu { what });
    }
    let own = weights.mtp.as_ref().and_then(|of| of.embedding);
    let tables = [Some(weights.embedding), weights.layer_embeddings, own];
    let tables = tables.into_iter().flatten().map(|table| table.ty);
    let of_ngrams = weights.layers.iter().filter_map(|layer| layer.ngrams.as_ref());
    let tables = tables.chain(of_ngrams.map(|of| of.ty));
    let types = weights.matrix_types().into_iter().chain(tables);
    for ty in types {
        if !supports_weights(ty) {
            return Err(ModelError::NotOnGpu { what: format!("weights of type {ty}") });
        }
    }
    for layer in &weights.layers {
        for stack in layer.attention.head_matrices() {
            let ty = stack.matrix.ty;
            if !stack.bytes.is_multiple_of(weight_alignment(ty)) {
                let what = format!("matrices of {ty} for each head, {} bytes apart", stack.bytes);
                return Err(ModelError::NotOnGpu { what });
            }
        }
    }
    // Embeddings for layers have no buffers in a second lane.
    if weights.layer_embeddings.is_some() && architecture.experts_per_token() > 0 {
        let what = "experts together with embeddings for layers".to_owned();
        return Err(ModelError::NotOnGpu { what });
    }
    for experts in architecture.expert_layers() {
        if experts.count > 512 || experts.used > 32 {
            let what = format!("a router that chooses {} of {}", experts.used, experts.count);
            return Err(ModelError::NotOnGpu { what });
        }
    }
    let head_dim = architecture.most_of_attentions(|of| of.head_dim.max(of.value_dim));
    if head_dim > ATTENTION_DIM_MAX {
        let what = format!("attention heads of {head_dim} elements");
        return Err(ModelError::NotOnGpu { what });
    }
    if let Some(of) = architecture.indexer() {
        // Kernels take lists of such blocks for lists of positions without the row's own.
        if matches!(of.rule, IndexerRule::Blocks { length: 1, .. }) {
            let what = "an indexer of blocks of one position".to_owned();
            return Err(ModelError::NotOnGpu { what });
        }
        // Such rows have kernels of their own, which know positions only.
        let has_kernel = |latent: Latent| (latent.rank, latent.rotary) == (512, 64);
        let has_kernels = architecture.latents().any(|(latent, _)| has_kernel(latent));
        if of.pooled().is_some_and(|length| length > 1) && has_kernels {
            let what = "pools of keys of latent attention with 512 + 64 elements".to_owned();
            return Err(ModelError::NotOnGpu { what });
        }
    }
    for of in architecture.attentions.iter().filter(|of| of.shared.is_some()) {
        if of.head_dim > SHARED_KEY_DIM_MAX || !of.head_dim.is_multiple_of(8) {
            let what = format!("attention with shared keys of {} elements", of.head_dim);
            return Err(ModelError::NotOnGpu { what });
        }
    }
    let of_entries = |of: &Attention| of.shared?.entries?.indexer.map(|of| of.head_dim);
    let indexers = architecture.attentions.iter().filter_map(of_entries);
    let longest = indexers.chain(architecture.indexer().map(|of| of.head_dim)).max();
    if let Some(length) = longest.filter(|length| *length > Indexer::DIM_MAX) {
        let what = format!("heads of an indexer of {length} elements");
        return Err(ModelError::NotOnGpu { what });
    }
    Ok(())
}

/// A GPU with the plan and the memory of a model.
#[derive(Clone, Copy)]
pub struct Device<'a> {
    pub gpu: &'a Gpu,
    pub plan: &'a DevicePlan,
    pub arena: &'a DeviceArena,
}

/// Device memory of a model, reserved at once.
pub struct DeviceArena {
    dense: Arc<DeviceMemory>,
    experts: Arc<DeviceMemory>,
    kv: DeviceMemory,
    activations: DeviceMemory,
    /// Address tables of the experts of each layer, then of the experts that rows choose in each layer. The latter serve
    /// only if not all experts are in VRAM.
    expert_tables: Arc<AddressTables>,
    /// Address tables of the matrices of heads: two for each layer, those of keys and those of values.
    head_tables: AddressTables,
}

impl DeviceArena {
    /// Reserves the memory for `plan`.
    ///
    /// # Errors
    /// Returns an error if memory cannot be allocated, for example because another program has taken it meanwhile.
    pub fn reserve(
        gpu: &Gpu,
        plan: &DevicePlan,
        weights: &Weights,
    ) -> Result<DeviceArena, CudaError> {
        let take = |bytes: u64| gpu.allocate(bytes as usize);
        let (dense, experts) =
            (take(plan.weights.dense.bytes())?, take(plan.weights.experts.bytes())?);
        let (dense, experts) = (Arc::new(dense), Arc::new(experts));
        let size = |of: &Option<ExpertLayout>| match of {
            Some(of) => TableSize { entries: of.count, slot_bytes: of.slot_bytes },
            None => TableSize { entries: 0, slot_bytes: 0 },
        };
        let all: Vec<TableSize> = plan.weights.experts_of.iter().map(size).collect();
        let expert_sizes = all.repeat(EXPERT_TABLES);
        let of_heads = |layer: &LayerWeights| {
            let mut sizes = [TableSize { entries: 0, slot_bytes: 0 }; 2];
            for (size, stack) in sizes.iter_mut().zip(layer.attention.head_matrices()) {
                *size = TableSize { entries: stack.heads, slot_bytes: stack.bytes as u64 };
            }
            sizes
        };
        let head_sizes: Vec<TableSize> = weights.layers.iter().flat_map(of_heads).collect();
        let arena = DeviceArena {
            expert_tables: Arc::new(gpu.address_tables(experts.clone(), &expert_sizes)?),
            head_tables: gpu.address_tables(dense.clone(), &head_sizes)?,
            dense,
            experts,
            kv: take(plan.kv.layout.bytes())?,
            activations: take(plan.activations.layout.bytes())?,
        };
        // Tickets, and the words of kernels that fetch experts, must start at 0. No other memory is read before it is
        // written.
        let activations = &arena.activations;
        gpu.fill(activations.ptr(), 0, activations.bytes())?;
        Ok(arena)
    }

    /// Returns the addresses of all memory that weights are loaded into.
    pub fn of_weights(&self) -> [DevicePtr<u8>; 2] {
        [self.dense.ptr(), self.experts.ptr()]
    }

    /// Returns the address tables of experts. Tables `0 ..` are those of each layer, followed by
    /// [`DeviceArena::chosen_table`] and [`DeviceArena::present_table`] of each layer and lane.
    pub fn expert_tables(&self) -> &Arc<AddressTables> {
        &self.expert_tables
    }

    /// Returns the number of the table of the experts that the rows of a lane have chosen in a layer, by id. The kernel
    /// that fetches experts writes it.
    pub fn chosen_table(plan: &DevicePlan, layer: usize, lane: usize) -> usize {
        (1 + lane) * plan.weights.experts_of.len() + layer
    }

    /// Returns the number of the table of the chosen experts that are on the device before the others are fetched beside
    /// other kernels. [`DeviceArena::chosen_table`] then has only the others.
    pub fn present_table(plan: &DevicePlan, layer: usize, lane: usize) -> usize {
        (1 + LANES + lane) * plan.weights.experts_of.len() + layer
    }

    /// Returns the address table of one of a layer's two stacks of per-head matrices: 0 for keys, 1 for values.
    pub fn head_table(&self, layer: usize, stack: usize) -> AddressTable {
        self.head_tables.table(2 * layer + stack)
    }

    pub fn dense(&self, at: u64) -> DevicePtr<u8> {
        self.dense.ptr().offset(at as usize)
    }

    pub fn experts(&self, at: u64) -> DevicePtr<u8> {
        self.experts.ptr().offset(at as usize)
    }

    pub fn kv(&self, at: u64) -> DevicePtr<u8> {
        self.kv.ptr().offset(at as usize)
    }

    pub fn activation<T: Pod>(&self, at: u64) -> DevicePtr<T> {
        self.activations.ptr::<u8>().offset(at as usize).cast()
    }
}

/// Copies vectors and tables to the device. These are computed, or already in host memory.
///
/// # Errors
/// Returns an error if the device fails.
pub fn upload_tables(
    gpu: &Gpu,
    plan: &DevicePlan,
    arena: &DeviceArena,
    ropes: &[RopeTable],
    weights: &Weights,
) -> Result<(), CudaError> {
    let activations = &plan.activations;
    gpu.upload(&plan.vectors.floats, arena.activation(activations.vectors))?;
    for (rope, at) in ropes.iter().zip(&activations.ropes) {
        gpu.upload(rope.angles(), arena.activation(*at))?;
    }
    let identity: Vec<u32> = (0..activations.identity_count as u32).collect();
    gpu.upload(&identity, arena.activation(activations.identity))?;
    let rows: Vec<u32> = (0..activations.embeddings.ids_count as u32).collect();
    gpu.upload(&rows, arena.activation(activations.embeddings.ids))?;
    let joined = activations.prediction.rows();
    gpu.upload(&joined, arena.activation(activations.prediction.ids))?;
    upload_latent_tables(gpu, plan, arena, weights)?;
    plan.kv.clear(gpu, arena.kv(0))?;
    for (layer, experts) in plan.weights.experts_of.iter().enumerate() {
        // If experts have slots, the tables start empty.
        let Some(experts) = experts.as_ref().filter(|_| plan.tier.is_none()) else { continue };
        let address = |expert| {
            let at = experts.first + expert as u64 * experts.slot_bytes;
            arena.experts(at).address()
        };
        let table: Vec<u64> = (0..experts.count).map(address).collect();
        arena.expert_tables.upload(gpu, layer, &table)?;
    }
    Ok(())
}

/// Uploads the addresses of per-head matrices and the tables that go with them, for layers that have such matrices.
fn upload_latent_tables(
    gpu: &Gpu,
    plan: &DevicePlan,
    arena: &DeviceArena,
    weights: &Weights,
) -> Result<(), CudaError> {
    let at = &plan.activations.latent;
    for tables in &at.tables {
        let ids = (0..tables.ids_count).map(|entry| (entry % tables.count) as u32);
        gpu.upload(&ids.collect::<Vec<u32>>(), arena.activation(tables.ids))?;
    }
    if let Some(most) = at.tables.iter().map(|tables| tables.count as u32).max() {
        gpu.upload(&(0..=most).collect::<Vec<u32>>(), arena.activation(at.single))?;
    }
    for (layer, of) in weights.layers.iter().enumerate() {
        let stacks = of.attention.head_matrices();
        let Some(heads) = stacks.first().map(|stack| stack.heads) else { continue };
        for (index, stack) in stacks.into_iter().enumerate() {
            let first = plan.weights.layers[layer][stack.matrix.part];
            let first = arena.dense(first.expect("only experts of such models stay outside"));
            let table: Vec<u64> =
                (0..heads).map(|head| first.offset(head * stack.bytes).address()).collect();
            arena.head_tables.upload(gpu, 2 * layer + index, &table)?;
        }
    }
    Ok(())
}
