//! Chosen tensors in VRAM.
//!
//! Bytes that stay as they are in the file go through pinned memory. Weights that are converted, and slices of compact weights,
//! are decoded in host memory, a few tensors at a time, and copied from there.

use std::ops::ControlFlow;
use std::sync::{Arc, PoisonError};

use forebay_cuda::{CallersContext, DevicePtr, Gpu};
use forebay_options::{BadOption, OptionName};
use forebay_store::{BlockLabel, Extent, UploadPart};

use super::plan::Planned;
use super::{ChosenPlan, LoadedTensor, Memory, TensorMemory, host};
use crate::load::device::MARGIN;
use crate::load::error::LoadError;
use crate::load::hold::DEVICE_ALIGNMENT;
use crate::load::hold_device::{DeviceFill, Filled, KeptRing, Pool};

/// Largest number of runs that a load copies to a GPU. Each is a copy of its own.
const RUNS_MAX: u64 = 1 << 22;

/// Loads chosen tensors to a GPU.
pub(crate) fn hold_chosen(
    plan: &ChosenPlan<'_>,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<LoadedTensor>, LoadError> {
    let Some(device) = plan.request.device else { return Ok(Vec::new()) };
    // Declared first, so that it is dropped after everything that uses the GPU.
    let _context = CallersContext::remember();
    let unchanged = || plan.planned.iter().filter(|planned| !planned.is_converted());
    let runs = unchanged().fold(0_u64, |sum, it| sum.saturating_add(it.count));
    if runs > RUNS_MAX {
        return Err(LoadError::Option(BadOption {
            name: OptionName::Slices,
            value: format!("{runs} runs of bytes"),
            expected: format!(
                "a load to a GPU copies at most {RUNS_MAX}: load to the CPU, or slice an outer dimension"
            ),
        }));
    }
    let Placed { addresses, parts, contents, pool_bytes } = Placed::new(&plan.planned);
    let total: u64 = plan.planned.iter().map(Planned::wanted_bytes).sum();
    if total == 0 {
        // No tensor has elements. A GPU that cannot be used is an error all the same.
        Gpu::open(device.ordinal)?;
        return Ok(loaded(plan, device.ordinal, (0, addresses), Memory::Host(Vec::new())));
    }
    let fill = DeviceFill {
        sources: plan.sources,
        io: plan.request.io,
        choice: plan.choice,
        request: device,
        parts,
        pool_bytes,
        workspace_bytes: 0,
        contents: &contents,
        is_for_several: plan.kept.is_some(),
    };
    let mut kept = plan.kept.map(|kept| kept.lock().unwrap_or_else(PoisonError::into_inner));
    let (ring, gpu) = match kept.as_mut().and_then(|kept| kept.take()) {
        Some(KeptRing { ring, gpu }) => (Some(ring), gpu),
        None => (None, Gpu::open(device.ordinal)?),
    };
    let unchanged_bytes: u64 = unchanged().map(Planned::wanted_bytes).sum();
    let Filled { pool, ring, .. } = fill.run(&gpu, ring, &mut |done, of| {
        // If the GPU decodes, bytes of the file are counted.
        let share = done as f64 / of.max(1) as f64;
        progress((unchanged_bytes as f64 * share) as u64, total)
    })?;
    let mut tell = |done: u64| progress(unchanged_bytes + done, total);
    convert(plan, &gpu, (pool.ptr(), &addresses), &mut tell)?;
    match kept {
        Some(mut kept) => *kept = ring.map(|ring| KeptRing { ring, gpu }),
        None => {
            let _span = tracing::debug_span!("free_ring").entered();
            drop(ring);
        }
    }
    let first = pool.ptr().address();
    let memory = Memory::Device(Pool::new(pool));
    Ok(loaded(plan, device.ordinal, (first, addresses), memory))
}

/// Decodes tensors in host memory and copies them to `memory`, in which their addresses count from its first byte. `progress` is
/// called with the bytes that are done.
fn convert(
    plan: &ChosenPlan<'_>,
    gpu: &Gpu,
    (memory, addresses): (DevicePtr<u8>, &[u64]),
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<(), LoadError> {
    let tensors = plan.planned.iter().zip(addresses);
    let is_converted = |(planned, _): &(&Planned, _)| planned.is_converted() && planned.count > 0;
    let converted: Vec<_> = tensors.filter(is_converted).collect();
    let (mut rest, mut done) = (&converted[..], 0);
    while !rest.is_empty() {
        let mut bytes = 0_u64;
        let fits = |(planned, _): &&(&Planned, _)| {
            bytes = bytes.saturating_add(planned.bytes());
            bytes <= plan.request.staging_bytes as u64
        };
        // However large a tensor is, it comes whole.
        let (batch, behind) = rest.split_at(rest.iter().take_while(fits).count().max(1));
        rest = behind;
        let planned = batch.iter().map(|(planned, _)| Planned::clone(planned)).collect();
        let plan = ChosenPlan { planned, kept: None, ..*plan };
        let filled = host::fill(&plan, &mut |read, _| progress(done + read))?;
        for (content, (_, address)) in filled.contents(&plan.planned).zip(batch) {
            let place = memory.at(memory.address() + *address);
            gpu.upload(content, place.expect("tensors lie in the memory planned for them"))?;
        }
        done += plan.planned.iter().map(Planned::wanted_bytes).sum::<u64>();
    }
    Ok(())
}

/// Describes the tensors, whose addresses count from `first`.
fn loaded(
    plan: &ChosenPlan<'_>,
    ordinal: usize,
    (first, addresses): (u64, Vec<u64>),
    memory: Memory,
) -> Vec<LoadedTensor> {
    let memory = Arc::new(TensorMemory(memory));
    let tensors = plan.planned.iter().zip(addresses).map(|(planned, address)| LoadedTensor {
        name: planned.name.clone(),
        ty: planned.ty,
        shape: planned.shape.clone(),
        address: if planned.bytes() > 0 { first + address } else { 0 },
        bytes: planned.bytes(),
        stride: None,
        device: Some(ordinal),
        memory: Arc::clone(&memory),
    });
    tensors.collect()
}

/// Where tensors go, counted from 0.
struct Placed {
    addresses: Vec<u64>,
    parts: Vec<UploadPart>,
    contents: Vec<(String, Extent)>,
    pool_bytes: usize,
}

impl Placed {
    fn new(planned: &[Planned]) -> Placed {
        let (mut addresses, mut parts, mut contents) = (Vec::new(), Vec::new(), Vec::new());
        let mut end = MARGIN as u64;
        for (index, tensor) in planned.iter().enumerate() {
            // A saturated address does not fit into any device.
            let address = end.checked_next_multiple_of(DEVICE_ALIGNMENT).unwrap_or(u64::MAX);
            addresses.push(address);
            let runs = if tensor.is_converted() { 0 } else { tensor.count };
            for run in 0..runs {
                let extent = tensor.run(run);
                let to = address.saturating_add(run * tensor.length);
                parts.push(UploadPart { label: BlockLabel::Other(index as u64), extent, to });
            }
            if runs > 0 {
                let (first, last) = (tensor.run(0), tensor.run(runs - 1));
                let length = last.end() - first.offset;
                contents.push((format!("tensor {:?}", tensor.name), Extent { length, ..first }));
            }
            end = address.saturating_add(tensor.bytes());
        }
        let pool_bytes = end.saturating_add(MARGIN as u64) as usize;
        Placed { addresses, parts, contents, pool_bytes }
    }
}
