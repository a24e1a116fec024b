//! Relayout of weights whose layout in files differs from the layout that kernels read. They are loaded unchanged to
//! their final memory. The relayout happens there when all of them have arrived.

use std::num::NonZero;
use std::thread;

use forebay_cuda::{CudaError, DevicePtr, Gpu, Matrices, SplitMxfp4};
use forebay_format::{Extent, Relayout, Step};

use super::memory::{DeviceArena, DevicePlan};
use super::placed::placed_blocks;
use super::relayout_kernels::has_kernel;
use crate::weights::Weights;

/// Converts, in stream order, all weights on the device that are still in the layout of their files. The KV cache,
/// which is not in use yet, is the workspace. It has room for one block.
///
/// Budget for gpt-oss-20b: 12 GB of experts are read and written twice. This takes 12 ms at 4 TB/s, in 2304 kernels
/// and as many copies of 5 us. Loading takes 0.3 s at best.
///
/// # Errors
/// Returns an error if a driver call fails.
pub fn relayout_all(
    gpu: &Gpu,
    plan: &DevicePlan,
    arena: &DeviceArena,
    weights: &Weights,
) -> Result<(), CudaError> {
    for placed in placed_blocks(plan, arena, weights) {
        let Some(relayout) = &placed.block.relayout else { continue };
        let landings = placed.landings();
        for group in relayout.groups() {
            let extents = &placed.block.extents[group.extents.clone()];
            let from: Option<Vec<_>> = landings[group.extents].iter().copied().collect();
            let to: Option<Vec<_>> = placed.parts[group.parts].iter().copied().collect();
            // Other blocks pass through host memory and are already converted there.
            let Some((from, to)) = from.zip(to) else { continue };
            match &group.relayout {
                // These bytes are already in their part.
                Relayout { steps, .. } if matches!(steps[..], [Step::Copy { .. }]) => {}
                of if of.steps.iter().all(has_kernel) => run(gpu, of, &from, &to, arena.kv(0))?,
                of => run_on_host(gpu, extents, of, (&from, &to))?,
            }
        }
    }
    Ok(())
}

/// Downloads a block's bytes, converts them with host threads, and uploads the parts.
fn run_on_host(
    gpu: &Gpu,
    extents: &[Extent],
    relayout: &Relayout,
    (from, to): (&[DevicePtr<u8>], &[DevicePtr<u8>]),
) -> Result<(), CudaError> {
    let come = from.iter().zip(extents).map(|(&at, of)| gpu.download(at, of.length as usize));
    let read = come.collect::<Result<Vec<Vec<u8>>, _>>()?;
    let read: Vec<&[u8]> = read.iter().map(Vec::as_slice).collect();
    let mut made = vec![0; relayout.bytes()];
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        let (mut rest, read) = (&mut made[..], &read);
        for share in relayout.shares(relayout.bytes().div_ceil(threads)) {
            let out = rest.split_off_mut(..share.out.len()).expect("parts are made of shares");
            scope.spawn(move || relayout.make(&share, read, out));
        }
    });
    let mut made = &made[..];
    for (&place, bytes) in to.iter().zip(relayout.part_bytes()) {
        let part = made.split_off(..bytes as usize).expect("all parts are made");
        gpu.upload(part, place)?;
    }
    Ok(())
}

fn run(
    gpu: &Gpu,
    relayout: &Relayout,
    from: &[DevicePtr<u8>],
    to: &[DevicePtr<u8>],
    workspace: DevicePtr<u8>,
) -> Result<(), CudaError> {
    let mut made = workspace;
    for step in &relayout.steps {
        let second = made.offset(step.part_bytes(0));
        made = match *step {
            Step::Mxfp4 { blocks, scales, rows, row_blocks, turns } => {
                let (blocks, scales) = (from[blocks], from[scales]);
                let split = SplitMxfp4 { blocks, scales, rows, row_blocks };
                let odd = match turns {
                    1 => DevicePtr::null(),
                    2 => second,
                    _ => unreachable!("rows of one matrix, or of gate and up"),
                };
                gpu.mxfp4_blocks(&split, made, odd)?;
                second.offset(step.part_bytes(1) * (turns - 1))
            }
            Step::Heads { extent, heads, plain, value, rank, ty } => {
                let size = ty.block_bytes();
                let stride = (plain + value) * rank;
                let matrices = Matrices { count: heads, rows: plain, cols: rank, size, stride };
                gpu.transpose(&matrices, from[extent], made, plain * rank)?;
                let bytes = value * rank * size;
                for head in 0..heads {
                    let values = from[extent].offset((head * stride + plain * rank) * size);
                    gpu.copy(values, second.offset(head * bytes), bytes)?;
                }
                second.offset(step.part_bytes(1))
            }
            // The parts follow one another in the transposed matrix.
            Step::Transposed { extent, rows, cols, parts, ty } => {
                let size = ty.block_bytes();
                let matrices = Matrices { count: 1, rows, cols, size, stride: rows * cols };
                gpu.transpose(&matrices, from[extent], made, rows * cols)?;
                made.offset(parts * step.part_bytes(0))
            }
            Step::Turns { .. }
            | Step::Copy { .. }
            | Step::Quantized { .. }
            | Step::QuantizedHeads { .. } => {
                unreachable!("these steps have no kernel")
            }
        };
    }
    let mut made = workspace;
    for (&place, bytes) in to.iter().zip(relayout.part_bytes()) {
        gpu.copy(made, place, bytes as usize)?;
        made = made.offset(bytes as usize);
    }
    Ok(())
}
