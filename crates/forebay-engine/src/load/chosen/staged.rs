//! Tensors whose bytes are not adjacent in the file, or that are converted. They are read in shares to memory of a
//! fixed size, and then copied to their place.

use std::num::NonZero;
use std::ops::{ControlFlow, Range};
use std::sync::{Mutex, PoisonError};
use std::thread;

use forebay_codec::{Compact, decode_compact};
use forebay_format::{FormatError, StoredType, TensorType, dequantize};
use forebay_store::{Arena, BlockLabel, BlockLayout, Extent, LoadItem, SLOT_ALIGNMENT, SlotBuffer};

use super::ChosenPlan;
use super::host::take_back;
use super::plan::Planned;
use crate::load::error::LoadError;
use crate::load::host::Reader;

/// Largest gap in bytes that is read along with the runs beside it, as in loads to a GPU.
pub(super) const READ_OVER: u64 = 64 << 10;
/// Bytes of the file that a share covers at most, if there is memory for it.
const SHARE_BYTES: u64 = 8 << 20;
/// Bytes that a share covers however little memory there is.
const SHARE_BYTES_MIN: u64 = 64 << 10;

/// A part of a tensor that is read and copied at a time.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Index of the tensor.
    tensor: usize,
    /// Range in the concatenation of the tensor's runs, in whole blocks.
    wanted: Range<u64>,
}

/// Returns the shares of all tensors that cannot be read to their place.
pub(super) fn shares(plan: &ChosenPlan<'_>) -> Vec<Share> {
    let mut all = Vec::new();
    for (tensor, planned) in plan.planned.iter().enumerate() {
        if planned.direct().is_none() {
            let share_bytes = share_bytes(plan.request.staging_bytes);
            all.extend(cut(planned, share_bytes).map(|wanted| Share { tensor, wanted }));
        }
    }
    all
}

fn share_bytes(staging_bytes: usize) -> u64 {
    (staging_bytes as u64).clamp(SHARE_BYTES_MIN, SHARE_BYTES)
}

/// Returns the largest number of bytes that [`read`] uses beside a tensor, of which reads begin and end up to `margin` bytes outside
/// of what is wanted.
pub(super) fn staging_bytes_max(planned: &Planned, staging_bytes: usize, margin: u64) -> u64 {
    let share = match planned.kept {
        Some(_) => planned.length.max(share_bytes(staging_bytes)),
        None => share_bytes(staging_bytes),
    };
    (staging_bytes as u64).max(share.saturating_add(margin))
}

fn is_merged(planned: &Planned) -> bool {
    planned.stride - planned.length <= READ_OVER
}

/// Cuts a tensor into ranges of wanted bytes: many short runs, or a part of a long run. Runs of which a part is kept stay whole. Runs
/// that are read together are of one group.
fn cut(planned: &Planned, share_bytes: u64) -> impl Iterator<Item = Range<u64>> + '_ {
    let (length, end) = (planned.length, planned.wanted_bytes());
    let block = planned.stored.block_bytes();
    let cost = if is_merged(planned) { planned.stride } else { length + 2 * SLOT_ALIGNMENT as u64 };
    let of_group = if is_merged(planned) { planned.group * length } else { end };
    let mut at = 0;
    std::iter::from_fn(move || {
        let start = at;
        at = match length > share_bytes {
            true if planned.kept.is_some() => start + length,
            true => {
                let end_of_run = (start / length + 1) * length;
                (start + share_bytes / block * block).min(end_of_run)
            }
            false => {
                let end_of_group = (start / of_group.max(1) + 1) * of_group;
                (start + (share_bytes / cost.max(1)).max(1) * length).min(end_of_group)
            }
        }
        .min(end);
        (start < end).then_some(start..at)
    })
}

/// Returns what is read for a share: one extent with the gaps inside, or every run alone.
fn extents(planned: &Planned, wanted: &Range<u64>) -> Vec<Extent> {
    let runs = pieces(planned, wanted);
    if !is_merged(planned) {
        return runs.collect();
    }
    let (first, last) = (wanted.start / planned.length, (wanted.end - 1) / planned.length);
    let begin = planned.run(first).offset + wanted.start % planned.length;
    let end = planned.run(last).offset + (wanted.end - 1) % planned.length + 1;
    vec![Extent { file: planned.run(0).file, offset: begin, length: end - begin }]
}

/// Returns the parts of runs that a range of wanted bytes consists of.
fn pieces<'a>(planned: &'a Planned, wanted: &Range<u64>) -> impl Iterator<Item = Extent> + 'a {
    let (length, Range { start, end }) = (planned.length, wanted.clone());
    (start / length..end.div_ceil(length)).map(move |index| {
        let run = planned.run(index);
        let (from, to) = (start.max(index * length), end.min((index + 1) * length));
        let offset = run.offset + (from - index * length);
        Extent { file: run.file, offset, length: to - from }
    })
}

fn layout(plan: &ChosenPlan<'_>, share: &Share) -> BlockLayout {
    let extents = extents(&plan.planned[share.tensor], &share.wanted);
    plan.sources.checked.plan(&extents, SLOT_ALIGNMENT)
}

/// Returns the number of shares that are read at a time, and the bytes that each needs.
fn slots(plan: &ChosenPlan<'_>, shares: &[Share]) -> (usize, usize) {
    let bytes = shares.iter().map(|share| layout(plan, share).slot_bytes).max().unwrap_or(0);
    let count = (plan.request.staging_bytes / bytes.max(1)).clamp(1, shares.len().max(1));
    (count, bytes)
}

/// Returns the bytes of memory that [`read`] uses beside the tensors.
pub(super) fn staging_bytes(plan: &ChosenPlan<'_>, shares: &[Share]) -> u64 {
    let (count, bytes) = slots(plan, shares);
    (count as u64).saturating_mul(bytes as u64)
}

/// Reads all shares and copies them to the slots of their tensors. `progress` is called with the wanted bytes that are
/// done.
pub(super) fn read(
    plan: &ChosenPlan<'_>,
    shares: &[Share],
    outputs: &mut [Option<SlotBuffer>],
    reader: &mut Reader,
    progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<(), LoadError> {
    let (count, bytes) = slots(plan, shares);
    let arena = Arena::map(count.saturating_mul(bytes))?;
    let mut buffers =
        (0..count).map(|_| arena.carve(bytes)).collect::<Result<Vec<SlotBuffer>, _>>()?;
    let mut done = 0;
    for batch in shares.chunks(count) {
        let layouts: Vec<BlockLayout> = batch.iter().map(|share| layout(plan, share)).collect();
        let rest = buffers.split_off(batch.len().min(buffers.len()));
        let item = |(index, (layout, buffer)): (usize, (&BlockLayout, SlotBuffer))| LoadItem {
            label: BlockLabel::Other(batch[index].tensor as u64),
            layout: layout.clone(),
            buffer,
        };
        let items = layouts.iter().zip(buffers).enumerate().map(item).collect();
        let wanted: u64 = batch.iter().map(|share| share.wanted.end - share.wanted.start).sum();
        let mut tell = |read: u64, total: u64| {
            let part = read as f64 / total.max(1) as f64;
            progress(done + (wanted as f64 * part) as u64)
        };
        let (loaded, _) = reader.load(&plan.sources.checked, items, &mut tell)?;
        buffers = take_back(plan, loaded, &|at| batch[at].tensor)?;
        copy_all(plan, batch, &layouts, &buffers, outputs)?;
        buffers.extend(rest);
        done += wanted;
    }
    Ok(())
}

/// Copies or converts a batch to its tensors, with several threads.
fn copy_all(
    plan: &ChosenPlan<'_>,
    batch: &[Share],
    layouts: &[BlockLayout],
    buffers: &[SlotBuffer],
    outputs: &mut [Option<SlotBuffer>],
) -> Result<(), LoadError> {
    let mut jobs = Vec::with_capacity(batch.len());
    // Shares are in the order of the tensors, and those of a tensor follow each other.
    let mut outputs = outputs.iter_mut().enumerate();
    for of_tensor in batch.chunk_by(|a, b| a.tensor == b.tensor) {
        let (tensor, first) = (of_tensor[0].tensor, of_tensor[0].wanted.start);
        let output =
            outputs.find(|(index, _)| *index == tensor).and_then(|(_, slot)| slot.as_mut());
        let Some(output) = output else { continue };
        let planned = &plan.planned[tensor];
        let mut rest = &mut output.as_mut_slice()[planned.result_bytes(first) as usize..];
        for share in of_tensor {
            let bytes = planned.result_bytes(share.wanted.end - share.wanted.start) as usize;
            let (to, behind) = rest.split_at_mut(bytes);
            rest = behind;
            let (layout, from) = (&layouts[jobs.len()], buffers[jobs.len()].as_slice());
            jobs.push(Job { plan, planned, share, layout, from, to });
        }
    }
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(jobs.len());
    let queue = Mutex::new(jobs.into_iter());
    let work = || {
        while let Some(job) = { queue.lock().unwrap_or_else(PoisonError::into_inner).next() } {
            job.run()?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mine = work();
        let results = workers.into_iter().map(|worker| match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        results.fold(mine, Result::and)
    })
}

/// Copy of one share.
struct Job<'a> {
    plan: &'a ChosenPlan<'a>,
    planned: &'a Planned,
    share: &'a Share,
    layout: &'a BlockLayout,
    from: &'a [u8],
    to: &'a mut [u8],
}

impl Job<'_> {
    fn run(self) -> Result<(), LoadError> {
        let Job { plan, planned, share, layout, from, to } = self;
        let damaged = |piece: &Extent| {
            LoadError::Format(FormatError::PackDamaged {
                path: plan.sources.checked.path(piece.file).unwrap_or_default(),
                offset: piece.offset,
                what: format!(
                    "tensor {:?} has a block that is not {}",
                    planned.name,
                    planned.stored.name()
                ),
            })
        };
        let mut rest = to;
        for (index, piece) in pieces(planned, &share.wanted).enumerate() {
            let part = if is_merged(planned) { layout.parts[0] } else { layout.parts[index] };
            let at = part.at + (piece.offset - part.extent.offset) as usize;
            let bytes = &from[at..at + piece.length as usize];
            let (to, behind) = rest.split_at_mut(planned.result_bytes(piece.length) as usize);
            rest = behind;
            match planned.stored {
                StoredType::Tensor(ty) if let Some(of) = ty.compact() => {
                    expand(planned, of, bytes, to).map_err(|Damaged| damaged(&piece))?;
                }
                StoredType::Tensor(ty) if planned.is_converted() => {
                    dequantize(ty, bytes, bytemuck::cast_slice_mut(to))?;
                }
                _ => to.copy_from_slice(bytes),
            }
        }
        Ok(())
    }
}

/// Decodes compact blocks to BF16 or F32, and leaves out what is not kept of a run.
fn expand(planned: &Planned, of: Compact, bytes: &[u8], to: &mut [u8]) -> Result<(), Damaged> {
    let elements = of.plain_bytes() / 2;
    let all = bytes.len() / of.bytes() * elements;
    let kept = planned.kept.as_ref();
    let kept = kept.map_or(0..all, |kept| kept.start as usize..kept.end as usize);
    let to_f32 = planned.ty == StoredType::Tensor(TensorType::F32);
    let mut plain = [0_u8; Compact::C2048.plain_bytes()];
    let plain = &mut plain[..of.plain_bytes()];
    let mut rest = to;
    for (block, compact) in bytes.chunks_exact(of.bytes()).enumerate() {
        let begin = block * elements;
        let (from, end) = (kept.start.max(begin), kept.end.min(begin + elements));
        if from >= end {
            continue;
        }
        decode_compact(of, compact, plain).map_err(|_| Damaged)?;
        let part = &plain[2 * (from - begin)..2 * (end - begin)];
        let width = if to_f32 { 4 } else { 2 };
        let (own, behind) = rest.split_at_mut((end - from) * width);
        rest = behind;
        match to_f32 {
            true => dequantize(TensorType::BF16, part, bytemuck::cast_slice_mut(own))
                .map_err(|_| Damaged)?,
            false => own.copy_from_slice(part),
        }
    }
    Ok(())
}

/// A block that is no compact block.
struct Damaged;

#[cfg(test)]
mod tests {
    use forebay_format::{StoredTensor, TensorType};
    use forebay_store::FileIndex;

    use super::*;
    use crate::load::chosen::plan::DimensionSlice;

    fn planned(shape: &[u64], dimension: usize, start: u64, stop: u64) -> Planned {
        let ty = StoredType::Tensor(TensorType::F32);
        let extent =
            Extent { file: FileIndex(0), offset: 4000, length: ty.tensor_bytes(shape).unwrap() };
        let tensor = StoredTensor { name: "t".into(), ty, shape: shape.to_vec(), extent };
        Planned::of(&tensor, None, Some(DimensionSlice { dimension, start, stop }), false).unwrap()
    }

    /// Checks that shares cover all wanted bytes once, and that what is read holds their pieces.
    fn check(planned: &Planned) -> (usize, usize, u64) {
        let (mut next, mut shares, mut reads, mut read_bytes) = (0, 0, 0, 0);
        for wanted in cut(planned, SHARE_BYTES) {
            assert_eq!(wanted.start, next);
            next = wanted.end;
            let extents = extents(planned, &wanted);
            let total: u64 = pieces(planned, &wanted).map(|piece| piece.length).sum();
            assert_eq!(total, wanted.end - wanted.start);
            for piece in pieces(planned, &wanted) {
                let holds =
                    |extent: &Extent| extent.offset <= piece.offset && piece.end() <= extent.end();
                assert!(extents.iter().any(holds));
            }
            shares += 1;
            reads += extents.len();
            read_bytes += extents.iter().map(|extent| extent.length).sum::<u64>();
        }
        assert_eq!(next, planned.wanted_bytes());
        (shares, reads, read_bytes)
    }

    #[test]
    fn near_runs_are_read_as_one_and_far_ones_alone() {
        // 1,000 rows of 4 KiB, of which the last quarter is wanted.
        let near = planned(&[1000, 1024], 1, 768, 1024);
        assert_eq!(check(&near), (1, 1, 999 * 4096 + 1024));
        // Rows of 128 KiB, of which 4 KiB are wanted.
        let far = planned(&[1000, 32768], 1, 0, 1024);
        assert_eq!(check(&far).1, 1000);
        assert_eq!(check(&far).2, 1000 * 4096);
        // Runs that are longer than a share.
        let long = planned(&[3, 5 << 20], 1, 0, 4 << 20);
        assert_eq!(check(&long), (6, 6, 3 * (16 << 20)));
    }
}
