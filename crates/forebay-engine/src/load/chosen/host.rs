//! Chosen tensors in host memory.

use std::ops::ControlFlow;
use std::sync::Arc;

use forebay_store::{
    Arena, BlockLabel, BlockLayout, LoadItem, Loaded, ReadError, SLOT_ALIGNMENT, SlotBuffer,
};

use super::plan::Planned;
use super::staged;
use super::{ChosenPlan, LoadedTensor, Memory, TensorMemory};
use crate::load::error::LoadError;
use crate::load::hold::DEVICE_ALIGNMENT;
use crate::load::host::Reader;
use crate::memory::DoesNotFit;
use crate::memory::free_bytes;

/// Smallest amount of memory that is freed at once. Smaller tensors share such a piece.
const GROUP_BYTES: u64 = 1 << 20;
/// Largest number of pieces of memory. Linux allows a process 65,530 mappings.
const GROUPS: u64 = 4096;

/// Memory of one tensor.
struct Place {
    layout: Option<BlockLayout>,
    slot_bytes: usize,
    /// Number of the piece of memory.
    group: usize,
    /// Offset of the tensor in its slot.
    at: usize,
}

/// Tensors that were read to host memory, in the order of the plan.
pub(super) struct Filled {
    places: Vec<Place>,
    slots: Vec<SlotBuffer>,
    /// Number of pieces of memory.
    groups: usize,
}

impl Filled {
    /// Returns the bytes of each tensor of the plan.
    #[cfg(feature = "cuda")]
    pub fn contents<'a>(&'a self, planned: &'a [Planned]) -> impl Iterator<Item = &'a [u8]> {
        let slots = planned.iter().zip(&self.places).zip(&self.slots);
        slots.map(|((planned, place), slot)| {
            &slot.as_slice()[place.at..place.at + planned.bytes() as usize]
        })
    }
}

pub(super) fn load(
    plan: &ChosenPlan<'_>,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<LoadedTensor>, LoadError> {
    Ok(finish(&plan.planned, fill(plan, progress)?))
}

/// Reads the tensors of a plan to host memory. Its device does not matter.
pub(super) fn fill(
    plan: &ChosenPlan<'_>,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Filled, LoadError> {
    let mut places: Vec<Place> = plan.planned.iter().map(|it| place(plan, it)).collect();
    let shares = staged::shares(plan);
    let groups = group(&mut places);
    let staging_bytes = staged::staging_bytes(plan, &shares);
    let needed_bytes = groups.iter().fold(staging_bytes, |sum, bytes| sum.saturating_add(*bytes));
    let free = free_bytes();
    if needed_bytes > free {
        return Err(DoesNotFit { needed_bytes, free_bytes: free }.into());
    }
    let arenas = groups
        .into_iter()
        .map(|bytes| Arena::map(bytes as usize))
        .collect::<Result<Vec<_>, _>>()?;
    let carve = |place: &Place| arenas[place.group].carve(place.slot_bytes);
    let mut slots: Vec<Option<SlotBuffer>> =
        places.iter().map(|place| carve(place).map(Some)).collect::<Result<_, _>>()?;
    // Registering memory with the kernel would first make all of it resident.
    let mut reader = Reader::open(plan.request.io, plan.sources, &Arena::map(0)?, plan.choice)?;

    let total: u64 = plan.planned.iter().map(Planned::wanted_bytes).sum();
    let direct = read_direct(plan, &places, &mut slots, &mut reader, &mut |done| {
        progress(done.min(total), total)
    })?;
    let mut tell = |done: u64| progress((direct + done).min(total), total);
    staged::read(plan, &shares, &mut slots, &mut reader, &mut tell)?;

    let mut slots: Vec<SlotBuffer> =
        slots.into_iter().map(|slot| slot.expect("every load gives its buffers back")).collect();
    for ((planned, place), slot) in plan.planned.iter().zip(&mut places).zip(&mut slots) {
        align(planned, place, slot);
    }
    Ok(Filled { places, slots, groups: arenas.len() })
}

fn place(plan: &ChosenPlan<'_>, planned: &Planned) -> Place {
    let files = &plan.sources.checked;
    let layout = planned.direct().map(|extent| files.plan(&[extent], SLOT_ALIGNMENT));
    let slot_bytes = layout.as_ref().map_or(planned.bytes() as usize, |layout| layout.slot_bytes);
    let at = layout.as_ref().and_then(|layout| layout.parts.first()).map_or(0, |part| part.at);
    Place { layout, slot_bytes, group: 0, at }
}

/// Assigns tensors to pieces of memory, and returns the bytes of each.
fn group(places: &mut [Place]) -> Vec<u64> {
    let bytes = |place: &Place| {
        let bytes = place.slot_bytes as u64;
        bytes.checked_next_multiple_of(SLOT_ALIGNMENT as u64).unwrap_or(u64::MAX)
    };
    let total = places.iter().fold(0_u64, |sum, place| sum.saturating_add(bytes(place)));
    let least = GROUP_BYTES.max(total / GROUPS);
    let mut groups: Vec<u64> = Vec::new();
    for place in places {
        match groups.last_mut() {
            Some(last) if *last < least && bytes(place) < least => {
                *last = last.saturating_add(bytes(place));
            }
            _ => groups.push(bytes(place)),
        }
        place.group = groups.len() - 1;
    }
    groups
}

/// Reads everything that needs no further step, and returns its bytes.
fn read_direct(
    plan: &ChosenPlan<'_>,
    places: &[Place],
    slots: &mut [Option<SlotBuffer>],
    reader: &mut Reader,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<u64, LoadError> {
    let (mut items, mut of) = (Vec::new(), Vec::new());
    for (index, (place, slot)) in places.iter().zip(&mut *slots).enumerate() {
        let Some(layout) = place.layout.clone() else { continue };
        let Some(buffer) = slot.take() else { continue };
        items.push(LoadItem { label: BlockLabel::Other(index as u64), layout, buffer });
        of.push(index);
    }
    if items.is_empty() {
        return Ok(0);
    }
    let files = &plan.sources.checked;
    let (loaded, statistics) = reader.load(files, items, &mut |done, _| progress(done))?;
    for (index, buffer) in of.iter().zip(take_back(plan, loaded, &|at| of[at])?) {
        slots[*index] = Some(buffer);
    }
    Ok(statistics.bytes)
}

/// Returns the buffers of a load, or the error of the first read that failed. `tensor` returns the index of the tensor of an item.
pub(super) fn take_back(
    plan: &ChosenPlan<'_>,
    loaded: Vec<Loaded>,
    tensor: &dyn Fn(usize) -> usize,
) -> Result<Vec<SlotBuffer>, LoadError> {
    let (mut buffers, mut failure) = (Vec::with_capacity(loaded.len()), None);
    for (at, Loaded { buffer, result }) in loaded.into_iter().enumerate() {
        buffers.extend(buffer);
        let Err(cause) = result else { continue };
        // Prefer the failure to the cancellations that it caused.
        if matches!(failure, Some((_, ReadError::Cancelled { .. })) | None) {
            failure = Some((at, cause));
        }
    }
    failure.map_or(Ok(buffers), |(at, cause)| {
        let place = format!("tensor {:?}", plan.planned[tensor(at)].name);
        Err(LoadError::Read { place, cause })
    })
}

/// Moves a tensor to an address that is aligned for its elements. Tensors lie at their offset in the file, which is
/// nearly always aligned already.
fn align(planned: &Planned, place: &mut Place, slot: &mut SlotBuffer) {
    let (ty, bytes) = (planned.ty, planned.bytes() as usize);
    if ty.block_elements() > 1 || place.at.is_multiple_of(ty.block_bytes() as usize) {
        return;
    }
    let to = place.at / DEVICE_ALIGNMENT as usize * DEVICE_ALIGNMENT as usize;
    slot.as_mut_slice().copy_within(place.at..place.at + bytes, to);
    place.at = to;
}

fn finish(planned: &[Planned], filled: Filled) -> Vec<LoadedTensor> {
    let Filled { places, slots, groups } = filled;
    let mut memory: Vec<Vec<SlotBuffer>> = (0..groups).map(|_| Vec::new()).collect();
    let mut addresses = Vec::with_capacity(places.len());
    for (place, mut slot) in places.iter().zip(slots) {
        let first = slot.as_mut_slice().as_mut_ptr().expose_provenance();
        addresses.push((first + place.at) as u64);
        memory[place.group].push(slot);
    }
    let memory: Vec<Arc<TensorMemory>> =
        memory.into_iter().map(|slots| Arc::new(TensorMemory(Memory::Host(slots)))).collect();
    let tensors = planned.iter().zip(&places).zip(addresses);
    tensors
        .map(|((planned, place), address)| LoadedTensor {
            name: planned.name.clone(),
            ty: planned.ty,
            shape: planned.shape.clone(),
            address: if planned.bytes() > 0 { address } else { 0 },
            bytes: planned.bytes(),
            stride: None,
            device: None,
            memory: Arc::clone(&memory[place.group]),
        })
        .collect()
}
