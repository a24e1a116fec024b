//! Where blocks lie in device memory, and what of which file goes there.

use std::ops::Range;

use forebay_cuda::DevicePtr;
use forebay_format::{Block, Extent};
use forebay_store::{BlockLabel, UploadPart};

use super::memory::{DeviceArena, DevicePlan};
use super::places::EmbeddingPlace;
use crate::weights::Weights;

/// A block, and where each of its parts is on the device, if it is there.
pub struct PlacedBlock<'a> {
    pub label: BlockLabel,
    pub block: &'a Block,
    pub parts: Vec<Option<DevicePtr<u8>>>,
}

impl PlacedBlock<'_> {
    /// Where each extent goes: to its part's place, but those that are recast one behind the other from the place of the
    /// first part that they become. All these parts together have room for them, and may have more.
    pub fn landings(&self) -> Vec<Option<DevicePtr<u8>>> {
        let Some(recast) = &self.block.recast else { return self.parts.clone() };
        let Range { start, end } = recast.extents.clone();
        let mut at = self.parts[start];
        let together = self.block.extents[start..end].iter().map(|extent| {
            let next = at.map(|at| at.offset(extent.length as usize));
            std::mem::replace(&mut at, next)
        });
        let mut landings = self.parts[..start].to_vec();
        landings.extend(together);
        landings.extend(&self.parts[start + recast.parts()..]);
        landings
    }
}

/// All blocks that are on the device, wholly or in part.
pub fn placed_blocks<'a>(
    plan: &DevicePlan,
    arena: &DeviceArena,
    weights: &'a Weights,
) -> Vec<PlacedBlock<'a>> {
    let (places, mut placed) = (&plan.weights, Vec::new());
    let mut head = places.head;
    for (index, block) in weights.blocks.dense.iter().enumerate() {
        let parts = match places.layers.get(index) {
            Some(parts) => parts.iter().map(|at| at.map(|at| arena.dense(at))).collect(),
            None => {
                head += block.bytes();
                vec![Some(arena.dense(head - block.bytes()))]
            }
        };
        placed.push(PlacedBlock { label: BlockLabel::Dense(index as u32), block, parts });
    }
    let all = weights.blocks.experts.iter().enumerate();
    for ((layer, experts), places) in all.zip(&places.experts_of) {
        let Some(slots) = places.as_ref().filter(|_| plan.tier.is_none()) else {
            continue;
        };
        for (expert, block) in experts.iter().enumerate() {
            let label = BlockLabel::Expert { layer: layer as u32, expert: expert as u32 };
            let slot = slots.first + expert as u64 * slots.slot_bytes;
            let parts = slots.parts.iter().map(|at| Some(arena.experts(slot + at))).collect();
            placed.push(PlacedBlock { label, block, parts });
        }
    }
    placed
}

/// What of which file goes to which address of the device: all matrices that stay there.
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
    if let EmbeddingPlace::Table(at) = plan.weights.embedding {
        add(BlockLabel::Other(0), &weights.embedding.extent, arena.dense(at));
    }
    parts
}
