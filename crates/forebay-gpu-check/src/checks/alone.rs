//! Checks that a row's product has the same bits alone and among others of its kind.

use std::sync::Arc;

use anyhow::Result;
use forebay_cuda::{
    DECODE_ROWS, DeviceMatmul, DeviceMatrix, DeviceMemory, DevicePtr, ExpertPairs, ExpertPart,
    ExpertTable, GateBiases, MatmulWeights, NO_EXPERT, Pairing, SortedPairs, narrow_form,
};
use forebay_format::TensorType;
use forebay_ops::Gating;

use super::{matmul, matvec};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;
use crate::weights::{Weights, types};

/// Numbers of decode rows of a pass.
pub const ROW_COUNTS: [usize; 8] = [1, 2, 3, 5, 8, 9, 17, DECODE_ROWS];
/// Number of prompt rows.
const PROMPT_ROWS: usize = 100;
/// Output bits that no kernel has written.
const POISON: u32 = u32::MAX;

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for ty in types() {
        let mut add = |name: &str, run: fn(&Context, TensorType) -> Result<Outcome>| {
            checks.push(Check::new(format!("alone {name} {ty}"), move |context| run(context, ty)));
        };
        add("matvec", decode);
        add("matvec-experts", decode_experts);
        add("exact", |context, ty| prompt(context, ty, true));
        if narrow_form(ty, 256).is_some() {
            add("matmul", |context, ty| prompt(context, ty, false));
        }
    }
    checks
}

fn widths(ty: TensorType) -> Vec<usize> {
    let block = ty.block_elements();
    match block {
        1 => vec![5, 264, 1025, 2304],
        2048 => vec![2048, 6144],
        _ => vec![3 * block, 1792, 2048 + 3 * block.max(256)],
    }
}

/// Compares the rows of passes of each number in [`ROW_COUNTS`] with the same rows alone.
fn compare(run: impl Fn(usize, usize) -> Result<Vec<Vec<u32>>>) -> Result<Outcome> {
    let mut alone = Vec::new();
    for row in 0..DECODE_ROWS {
        alone.extend(run(row, 1)?);
    }
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for count in ROW_COUNTS {
        for (row, got) in run(0, count)?.iter().enumerate() {
            worst =
                worst.worse(Outcome::same(got, &alone[row]).at(&format!("row {row} of {count}")));
        }
    }
    Ok(worst)
}

/// Returns the bits of `out [rows, width]` row by row.
fn rows_of(
    context: &Context,
    out: &[(&DeviceMemory, usize)],
    rows: usize,
) -> Result<Vec<Vec<u32>>> {
    let mut all = vec![Vec::new(); rows];
    for (memory, width) in out {
        let values = context.gpu.download::<u32>(memory.ptr(), rows * width)?;
        all.iter_mut().zip(values.chunks(*width)).for_each(|(all, row)| all.extend(row));
    }
    Ok(all)
}

/// Checks three separate matrices in one launch, and a gated pair.
fn decode(context: &Context, ty: TensorType) -> Result<Outcome> {
    let (gpu, rows) = (&context.gpu, [7, 7, 4]);
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for cols in widths(ty) {
        let mut random = Random::new(cols as u64);
        let weights = rows.map(|rows| Weights::random(context, ty, rows, cols, &mut random));
        let weights = weights.into_iter().collect::<Result<Vec<_>>>()?;
        let x = random.gaussians(DECODE_ROWS * cols);
        let outcome = compare(|first, count| {
            let input = matvec::Input::new(context, ty, &x[first * cols..][..count * cols], cols)?;
            let out =
                [rows[0], rows[1], rows[2], rows[0]].map(|rows| context.poisoned(count * rows));
            let out = out.into_iter().collect::<Result<Vec<_>, _>>()?;
            let matrix = |i: usize, to: usize| DeviceMatrix {
                data: weights[i].ptr,
                rows: rows[i],
                out: out[to].ptr(),
            };
            let separate = [matrix(0, 0), matrix(1, 1), matrix(2, 2)];
            gpu.matvec(ty, &separate, input.dense, count, cols, Pairing::Separate)?;
            let pair = [matrix(0, 3), matrix(1, 3)];
            gpu.matvec(ty, &pair, input.dense, count, cols, Pairing::gated(Gating::Silu))?;
            let widths = [rows[0], rows[1], rows[2], rows[0]];
            rows_of(context, &out.iter().zip(widths).collect::<Vec<_>>(), count)
        })?;
        worst = worst.worse(outcome.at(&format!("{cols} columns")));
    }
    Ok(worst)
}

/// Checks pairs in the order of experts. Some rows have no experts, and one expert has no slot.
fn decode_experts(context: &Context, ty: TensorType) -> Result<Outcome> {
    let (gpu, used, experts, rows) = (&context.gpu, 4, 6, 5);
    let mut worst = Outcome::same::<u8>(&[], &[]);
    let block = ty.block_elements().max(256);
    for cols in [3 * block, 2048 + block] {
        let mut random = Random::new(cols as u64);
        let pool = matvec::Pool::random(context, ty, rows, cols, &mut random)?;
        let expert = |pair: usize| match pair / used {
            2 | 7 => NO_EXPERT,
            // Neighbours choose different experts, most of which others choose, too.
            row => ((row * 5 + pair % used) % experts) as u32,
        };
        let ids: Vec<u32> = (0..DECODE_ROWS * used).map(expert).collect();
        let x = random.gaussians(DECODE_ROWS * used * cols);
        let outcome = compare(|first, count| {
            let (ids, pairs) = (&ids[first * used..][..count * used], count * used);
            let device_ids = context.upload(ids)?;
            let sorted = Sorted::new(context, pairs, experts)?;
            gpu.sort_pairs(device_ids.ptr(), &sorted.places, count, used, experts)?;
            let order = if count > 1 { sorted.places.pairs } else { DevicePtr::null() };
            let table = ExpertTable { slots: pool.table.table(0), rows };
            let out = [0, 1, 2].map(|_| context.poisoned(pairs * rows));
            let out = out.into_iter().collect::<Result<Vec<_>, _>>()?;
            let part = |offset: u64, to: usize| ExpertPart { offset, out: out[to].ptr() };
            let biases = GateBiases {
                gate: pool.biases.ptr(),
                up: pool.biases.ptr(),
                ids: device_ids.ptr(),
                pairs: DevicePtr::null(),
            };
            let gating = Gating::Clamped { alpha: 1.702, limit: 7.0 };
            let gated = Pairing::Gated { gating, biases: Some(biases) };
            let up = pool.part_bytes;
            let launches = [
                (used, vec![part(0, 0), part(up, 0)], gated),
                (used, vec![part(0, 1)], Pairing::Separate),
                (1, vec![part(up, 2)], Pairing::Separate),
            ];
            for (per_row, parts, pairing) in launches {
                let width = used / per_row * cols;
                let x = &x[first * width..][..count * width];
                let input = matvec::Input::new(context, ty, x, cols)?;
                let pairs = ExpertPairs { ids: device_ids.ptr(), order, count: pairs, per_row };
                gpu.matvec_experts(ty, table, &parts, pairs, input.form, cols, pairing)?;
            }
            let out: Vec<_> = out.iter().map(|out| (out, used * rows)).collect();
            let all = rows_of(context, &out, count)?;
            for (row, all) in all.iter().enumerate() {
                for (i, values) in all.chunks(rows).enumerate() {
                    let id = ids[row * used + i % used];
                    let absent = id == NO_EXPERT || id == matvec::MISSING;
                    let untouched = values.iter().all(|bits| *bits == POISON);
                    anyhow::ensure!(absent == untouched, "row {row} of {count}, expert {id}");
                }
            }
            Ok(all)
        })?;
        worst = worst.worse(outcome.at(&format!("{cols} columns")));
    }
    Ok(worst)
}

/// Room for sorted pairs.
struct Sorted {
    places: SortedPairs,
    _memory: DeviceMemory,
}

impl Sorted {
    fn new(context: &Context, pairs: usize, experts: usize) -> Result<Sorted> {
        let memory = context.poisoned(experts + 1 + 3 * pairs)?;
        let at = |index: usize| memory.ptr::<u32>().offset(index * pairs);
        let places =
            SortedPairs { pair_tokens: at(0), pairs: at(1), row_of_pair: at(2), starts: at(3) };
        Ok(Sorted { places, _memory: memory })
    }
}

/// Checks one prompt row alone and among others: with a matrix, and with two experts.
fn prompt(context: &Context, ty: TensorType, exact: bool) -> Result<Outcome> {
    let (gpu, rows) = (&context.gpu, 131);
    let block = ty.block_elements();
    let mut worst = Outcome::same::<u8>(&[], &[]);
    let widths = match block {
        1 => vec![8, 264],
        _ => vec![block, 3 * block.max(32)],
    };
    for cols in widths {
        let mut random = Random::new(cols as u64);
        let weights = Weights::random(context, ty, rows, cols, &mut random)?;
        let slots = Arc::new(gpu.allocate(16 + weights.data.len() + 16)?);
        gpu.upload(&weights.data, slots.ptr::<u8>().offset(16))?;
        let address = slots.ptr::<u8>().offset(16).address();
        // One matrix serves both experts.
        let table = context.table(&slots, weights.data.len(), &[address, address])?;
        let x = random.gaussians(PROMPT_ROWS * cols);
        let run = |first: usize, count: usize| -> Result<Vec<Vec<u32>>> {
            let form = if exact { None } else { narrow_form(ty, cols) };
            let x = &x[first * cols..][..count * cols];
            let input = matmul::Input::new(context, form, x, cols)?;
            let out = [context.poisoned(count * rows)?, context.poisoned(count * rows)?];
            // The second expert has two thirds of the rows. They begin inside a tile.
            let starts = context.upload(&[0, count as u32 / 3, count as u32])?;
            let dense = MatmulWeights::Dense { data: weights.ptr, tokens: count };
            let experts = MatmulWeights::Experts {
                slots: table.table(0),
                experts: 2,
                offset: 0,
                starts: starts.ptr(),
                token_rows: DevicePtr::null(),
                out_rows: DevicePtr::null(),
                entries: count,
            };
            for (weights, out) in [dense, experts].into_iter().zip(&out) {
                let out = out.ptr();
                gpu.matmul(&DeviceMatmul { ty, weights, rows, cols, x: input.form, out })?;
            }
            rows_of(context, &[(&out[0], rows), (&out[1], rows)], count)
        };
        let all = run(0, PROMPT_ROWS)?;
        for row in [0, 1, 33, 70, PROMPT_ROWS - 1] {
            let case = format!("{cols} columns, row {row}");
            worst = worst.worse(Outcome::same(&all[row], &run(row, 1)?[0]).at(&case));
        }
        for (row, alone) in run(40, 3)?.iter().enumerate() {
            let case = format!("{cols} columns, row {row} of 3");
            worst = worst.worse(Outcome::same(&all[40 + row], alone).at(&case));
        }
        // Small F32 matrices have a kernel of their own, which adds in another order. Experts of that type do not use it.
        let comparable = all.iter().filter(|_| ty != TensorType::F32);
        for (expert, dense) in comparable.map(|row| row.split_at(rows)) {
            worst = worst.worse(Outcome::same(expert, dense).at("experts beside dense"));
        }
    }
    Ok(worst)
}
