//! The device's memory: what a model needs of it, and which weights belong where.

use forebay_compute::RopeTable;
use forebay_cuda::{CudaError, DeviceMemory, DevicePtr, Gpu, KvLayerShape, supports_weights};
use forebay_store::{BlockLabel, Extent, UploadPart};
use serde::Serialize;

use super::places::{ActivationPlaces, KvPlaces, WeightPlaces};
use super::vectors::Vectors;
use crate::ModelError;
use crate::arch::Architecture;
use crate::weights::Weights;

/// What kernels' code may take in device memory, modules being loaded when they are first used.
const CODE_BYTES: u64 = 64 << 20;

/// Most that one context is thought to take; what is in use beyond belongs to other programs.
const CONTEXT_BYTES_MAX: u64 = 1 << 30;

/// Device memory, by what it is for.
#[derive(Debug, Clone, Serialize)]
pub struct VramUse {
    /// `--vram`, else what was free.
    pub budget_bytes: u64,
    /// Whether the user named the budget.
    pub budget_chosen_by_user: bool,
    /// The driver's context before anything was reserved, and room for the code of kernels.
    pub context_bytes: u64,
    pub weights_bytes: u64,
    pub kv_cache_bytes: u64,
    /// Activations, tables and small vectors.
    pub activation_bytes: u64,
    /// The sum of these.
    pub total_bytes: u64,
    /// What the driver says is in use now, by all programs; `None` if it does not say.
    pub driver_used_bytes: Option<u64>,
    /// What the device has.
    pub driver_total_bytes: Option<u64>,
}

/// Where everything will lie.
pub struct DevicePlan {
    pub kv_shape: KvLayerShape,
    pub weights: WeightPlaces,
    pub kv: KvPlaces,
    pub activations: ActivationPlaces,
    pub vectors: Vectors,
    pub vram: VramUse,
}

impl DevicePlan {
    /// Plans a model that stays on the device whole, with `kv_shape.context` positions.
    ///
    /// # Errors
    /// Weights of types that have no kernels, routers beyond the kernels' limits, and
    /// [`ModelError::VramTooSmall`] with the bytes that would do.
    pub fn new(
        gpu: &Gpu,
        architecture: &Architecture,
        weights: &Weights,
        kv_shape: KvLayerShape,
        vram_bytes: Option<u64>,
    ) -> Result<DevicePlan, ModelError> {
        check_kernels(architecture, weights)?;
        let vectors = Vectors::new(weights);
        let places = WeightPlaces::new(architecture, weights)?;
        let kv = KvPlaces::new(&kv_shape, architecture.layers.len());
        let activations = ActivationPlaces::new(gpu, architecture, &kv_shape, vectors.floats.len());
        let (free, total) = gpu.memory_bytes()?;
        let context_bytes = total.saturating_sub(free).min(CONTEXT_BYTES_MAX) + CODE_BYTES;
        let weights_bytes = places.dense.bytes() + places.experts.bytes();
        let (kv_cache_bytes, activation_bytes) = (kv.places.bytes(), activations.places.bytes());
        let needed_bytes = context_bytes + weights_bytes + kv_cache_bytes + activation_bytes;
        // The context is there already, so what is free must hold the others.
        let available = free + context_bytes - CODE_BYTES;
        let budget_bytes = vram_bytes.map_or(available, |vram| vram.min(available));
        if needed_bytes > budget_bytes {
            return Err(ModelError::VramTooSmall {
                needed_bytes,
                given_bytes: budget_bytes,
                why: format!(
                    "{weights_bytes} bytes of weights, {kv_cache_bytes} of KV cache for {} \
                     positions, {activation_bytes} of activations, {context_bytes} for the \
                     driver's context and kernels",
                    kv_shape.context
                ),
            });
        }
        let vram = VramUse {
            budget_bytes: vram_bytes.unwrap_or(available),
            budget_chosen_by_user: vram_bytes.is_some(),
            context_bytes,
            weights_bytes,
            kv_cache_bytes,
            activation_bytes,
            total_bytes: needed_bytes,
            driver_used_bytes: None,
            driver_total_bytes: None,
        };
        Ok(DevicePlan { kv_shape, weights: places, kv, activations, vectors, vram })
    }
}

fn check_kernels(architecture: &Architecture, weights: &Weights) -> Result<(), ModelError> {
    let types = weights.matrix_types().into_iter().chain([weights.embedding.ty]);
    for ty in types {
        if !supports_weights(ty) {
            return Err(ModelError::NotOnGpu { what: format!("weights of type {ty}") });
        }
    }
    for experts in architecture.expert_layers() {
        if experts.count > 512 || experts.used > 32 {
            let what = format!("a router that chooses {} of {}", experts.used, experts.count);
            return Err(ModelError::NotOnGpu { what });
        }
    }
    if architecture.attention.head_dim > 576 {
        let what = format!("attention heads of {} elements", architecture.attention.head_dim);
        return Err(ModelError::NotOnGpu { what });
    }
    Ok(())
}

/// Everything that a model has on the device, reserved at once.
pub struct DeviceArena {
    dense: DeviceMemory,
    experts: DeviceMemory,
    kv: DeviceMemory,
    activations: DeviceMemory,
}

impl DeviceArena {
    /// # Errors
    /// Memory that somebody else took meanwhile.
    pub fn reserve(gpu: &Gpu, plan: &DevicePlan) -> Result<DeviceArena, CudaError> {
        let take = |bytes: u64| gpu.allocate(bytes as usize);
        let arena = DeviceArena {
            dense: take(plan.weights.dense.bytes())?,
            experts: take(plan.weights.experts.bytes())?,
            kv: take(plan.kv.places.bytes())?,
            activations: take(plan.activations.places.bytes())?,
        };
        // Tickets of attention begin at 0; no other memory is read before it was written.
        let activations = &arena.activations;
        gpu.fill(activations.ptr(), 0, activations.bytes())?;
        Ok(arena)
    }

    pub fn dense(&self, at: u64) -> DevicePtr<u8> {
        self.dense.ptr::<u8>().offset(at as usize)
    }

    pub fn experts(&self, at: u64) -> DevicePtr<u8> {
        self.experts.ptr::<u8>().offset(at as usize)
    }

    pub fn kv(&self, at: u64) -> DevicePtr<u8> {
        self.kv.ptr::<u8>().offset(at as usize)
    }

    pub fn activation<T>(&self, at: u64) -> DevicePtr<T> {
        self.activations.ptr::<u8>().offset(at as usize).cast()
    }
}

/// What of which file goes to which address of the device: all matrices.
pub fn parts(plan: &DevicePlan, arena: &DeviceArena, weights: &Weights) -> Vec<UploadPart> {
    let (places, mut parts) = (&plan.weights, Vec::new());
    let mut add = |label, extent: &Extent, to: DevicePtr<u8>| {
        parts.push(UploadPart { label, extent: *extent, to: to.address() });
    };
    let mut head = places.head;
    for (index, extents) in weights.blocks.dense.iter().enumerate() {
        for (part, extent) in extents.iter().enumerate() {
            let at = match places.layers.get(index) {
                Some(parts) => parts[part],
                None => {
                    head += extent.length;
                    head - extent.length
                }
            };
            add(BlockLabel::Dense(index as u32), extent, arena.dense(at));
        }
    }
    for (layer, experts) in weights.blocks.experts.iter().enumerate() {
        let Some(slots) = &places.experts_of[layer] else { continue };
        for (expert, extents) in experts.iter().enumerate() {
            let label = BlockLabel::Expert { layer: layer as u32, expert: expert as u32 };
            let slot = slots.first + expert as u64 * slots.slot_bytes;
            for (extent, at) in extents.iter().zip(slots.parts) {
                add(label, extent, arena.experts(slot + at));
            }
        }
    }
    if let Some(at) = places.embedding {
        add(BlockLabel::Other(0), &weights.embedding.extent, arena.dense(at));
    }
    parts
}

/// Copies vectors and tables to the device: what is computed, or already in host memory.
///
/// # Errors
/// A failed device.
pub fn upload_tables(
    gpu: &Gpu,
    plan: &DevicePlan,
    arena: &DeviceArena,
    rope: &RopeTable,
) -> Result<(), CudaError> {
    let activations = &plan.activations;
    gpu.upload(&plan.vectors.floats, arena.activation(activations.vectors))?;
    gpu.upload(rope.angles(), arena.activation(activations.rope))?;
    let identity: Vec<u32> = (0..activations.identity_count as u32).collect();
    gpu.upload(&identity, arena.activation(activations.identity))?;
    for (layer, experts) in plan.weights.experts_of.iter().enumerate() {
        let Some(experts) = experts else { continue };
        let address = |expert| {
            let at = experts.first + expert as u64 * experts.slot_bytes;
            arena.experts(at).address()
        };
        let table: Vec<u64> = (0..experts.count).map(address).collect();
        gpu.upload(&table, arena.activation(activations.tables[layer]))?;
    }
    Ok(())
}
