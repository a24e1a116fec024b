//! Device addresses of blocks, and the file extents that are loaded there.

use std::ops::Range;

use forebay_cuda::DevicePtr;
use forebay_format::{Block, Extent};
use forebay_store::{BlockLabel, UploadPart};

use super::layout::EmbeddingLocation;
use super::memory::{DeviceArena, DevicePlan};
use crate::weights::Weights;

/// A block and the device address of each of its parts, if the part is on the device.
pub struct DeviceBlock<'a> {
    pub label: BlockLabel,
    pub block: &'a Block,
    pub parts: Vec<Option<DevicePtr<u8>>>,
}

impl DeviceBlock<'_> {
    /// Returns the address where each extent is loaded, which is that of its part. Extents that a relayout converts
    /// together are loaded one after the other, starting at the first part that they become. All these parts together
    /// have room for them, and may have more.
    pub fn landings(&self) -> Vec<Option<DevicePtr<u8>>> {
        let Some(relayout) = &self.block.relayout else { return self.parts.clone() };
        let Range { start, end } = relayout.extents.clone();
        let mut landings = self.parts[..start].to_vec();
        for group in relayout.groups() {
            let mut at = self.parts[group.parts.start];
            landings.extend(self.block.extents[group.extents].iter().map(|extent| {
                let next = at.map(|at| at.offset(extent.length as usize));
                std::mem::replace(&mut at, next)
            }));
        }
        debug_assert_eq!(landings.len(), end);
        landings.extend(&self.parts[start + relayout.parts()..]);
        landings
    }
}

/// Returns all dense blocks, and all experts unless experts have slots. A dense block's parts may be outside the
/// device.
pub fn placed_blocks<'a>(
    plan: &DevicePlan,
    arena: &DeviceArena,
    weights: &'a Weights,
) -> Vec<DeviceBlock<'a>> {
    let (layout, mut placed) = (&plan.weights, Vec::new());
    let mut head = layout.head;
    for (index, block) in weights.blocks.dense.iter().enumerate() {
        let parts = match layout.layers.get(index) {
            Some(parts) => parts.iter().map(|at| at.map(|at| arena.dense(at))).collect(),
            None => {
                if index == weights.layers.len() + weights.head.len() {
                    head = layout.mtp_head.expect("more blocks are those of another head");
                }
                let bytes: u64 = block.part_bytes().iter().sum();
                head += bytes;
                vec![Some(arena.dense(head - bytes))]
            }
        };
        placed.push(DeviceBlock { label: BlockLabel::Dense(index as u32), block, parts });
    }
    let all = weights.blocks.experts.iter().enumerate();
    for ((layer, experts), layout) in all.zip(&layout.experts_of) {
        let Some(slots) = layout.as_ref().filter(|_| plan.tier.is_none()) else {
            continue;
        };
        for (expert, block) in experts.iter().enumerate() {
            let label = BlockLabel::Expert { layer: layer as u32, expert: expert as u32 };
            let slot = slots.first + expert as u64 * slots.slot_bytes;
            let parts = slots.parts.iter().take(block.part_bytes().len());
            let parts = parts.map(|at| Some(arena.experts(slot + at))).collect();
            placed.push(DeviceBlock { label, block, parts });
        }
    }
    placed
}

/// Returns the extents of files to load and their device addresses, for all matrices that stay on the device.
pub fn upload_parts(plan: &DevicePlan, arena: &DeviceArena, weights: &Weights) -> Vec<UploadPart> {
    let mut parts = Vec::new();
    let mut add = |label, extent: &Extent, to: DevicePtr<u8>| {
        parts.push(UploadPart { label, extent: *extent, to: to.address() });
    };
    for placed in placed_blocks(plan, arena, weights) {
        for (extent, to) in placed.block.extents.iter().zip(placed.landings()) {
            if let Some(to) = to {
                add(placed.label, extent, to);
            }
        }
    }
    if let EmbeddingLocation::Table(at) = plan.weights.embedding {
        add(BlockLabel::Other(0), &weights.embedding.extent, arena.dense(at));
    }
    parts
}
