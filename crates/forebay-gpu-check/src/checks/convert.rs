//! Compares conversions of weights to other layouts with the CPU.

use anyhow::Result;
use forebay_cuda::{DevicePtr, Matrices, SplitMxfp4};
use forebay_format::convert::{self, RowsTaken};

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    vec![Check::new("convert mxfp4 blocks", mxfp4), Check::new("convert transposes", transposes)]
}

pub fn benches() -> Vec<Bench> {
    vec![
        Bench::new("convert mxfp4 blocks 5760x2880", bench_mxfp4),
        Bench::new("convert transpose bf16 128 of 128x512", bench_transpose),
    ]
}

fn bytes(random: &mut Random, count: usize) -> Vec<u8> {
    (0..count).map(|_| random.next() as u8).collect()
}

/// Converts to addresses of every alignment. Bytes beside the output must not change.
fn mxfp4(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<u8>(&[], &[]);
    for (rows, row_blocks) in [(2, 1), (6, 90), (4, 129), (70_000, 2)] {
        let mut random = Random::new(rows as u64);
        let blocks = bytes(&mut random, rows * row_blocks * 16);
        let scales = bytes(&mut random, rows * row_blocks);
        let (device, device_scales) = (context.upload(&blocks)?, context.upload(&scales)?);
        let from =
            SplitMxfp4 { blocks: device.ptr(), scales: device_scales.ptr(), rows, row_blocks };
        let whole = rows * row_blocks * 17;
        let room = gpu.allocate(whole + 32)?;
        for (parts, margin) in [(1, 0), (1, 7), (2, 3)] {
            gpu.fill(room.ptr(), 0xff, whole + 32)?;
            let mut expected = vec![0xff; whole + 32];
            let mut to = [DevicePtr::null(); 2];
            for (part, to) in to.iter_mut().enumerate().take(parts) {
                let at = margin + part * (whole / 2 + 5);
                *to = room.ptr::<u8>().offset(at);
                let taken = RowsTaken { first: part, step: parts };
                let out = &mut expected[at..][..whole / parts];
                convert::mxfp4_blocks(&blocks, &scales, row_blocks, taken, out);
            }
            gpu.mxfp4_blocks(&from, to[0], to[1])?;
            let got = gpu.download::<u8>(room.ptr(), whole + 32)?;
            let next = Outcome::same(&got, &expected);
            outcome = outcome.worse(next.at(&format!("{rows}x{row_blocks} blocks, {parts} parts")));
        }
    }
    Ok(outcome)
}

fn transposes(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<u8>(&[], &[]);
    for (count, rows, cols) in [(1, 1, 1), (3, 128, 512), (2, 33, 70), (1, 5, 300)] {
        for size in [2, 4] {
            let (all, stride) = (rows * cols, rows * cols + 6);
            let mut random = Random::new(rows as u64);
            let values = bytes(&mut random, count * stride * size);
            let device = context.upload(&values)?;
            let out = gpu.allocate(count * all * size)?;
            gpu.fill(out.ptr(), 0xff, count * all * size)?;
            let matrices = Matrices { count, rows, cols, size, stride };
            gpu.transpose(&matrices, device.ptr(), out.ptr(), all)?;
            let mut expected = vec![0; count * all * size];
            for (from, to) in
                values.chunks(stride * size).zip(expected.chunks_exact_mut(all * size))
            {
                convert::transpose(&from[..all * size], rows, cols, size, to);
            }
            let got = gpu.download::<u8>(out.ptr(), expected.len())?;
            let next = Outcome::same(&got, &expected);
            outcome = outcome.worse(next.at(&format!("{count} of {rows}x{cols}, {size} bytes")));
        }
    }
    Ok(outcome)
}

/// Measures the gate and up matrices of one expert of gpt-oss.
fn bench_mxfp4(context: &Context) -> Result<Measured> {
    let (rows, row_blocks) = (5760, 90);
    let (blocks, scales) = (rows * row_blocks * 16, rows * row_blocks);
    let from = context.gpu.allocate(blocks + scales)?;
    let to = context.gpu.allocate(blocks + scales)?;
    context.gpu.fill(from.ptr(), 0x5a, blocks + scales)?;
    let half = (blocks + scales) / 2;
    let from = SplitMxfp4 {
        blocks: from.ptr(),
        scales: from.ptr::<u8>().offset(blocks),
        rows,
        row_blocks,
    };
    let seconds = median_seconds(context, |_| {
        context.gpu.mxfp4_blocks(&from, to.ptr(), to.ptr::<u8>().offset(half))
    })?;
    Ok(Measured { seconds, bytes: 2.0 * (blocks + scales) as f64, flops: 0.0 })
}

/// Measures the matrices of DeepSeek-V3's heads that produce keys, for one layer.
fn bench_transpose(context: &Context) -> Result<Measured> {
    let matrices = Matrices { count: 128, rows: 128, cols: 512, size: 2, stride: 256 * 512 };
    let all = matrices.rows * matrices.cols;
    let from = context.gpu.allocate(matrices.count * matrices.stride * matrices.size)?;
    let to = context.gpu.allocate(matrices.count * all * matrices.size)?;
    context.gpu.fill(from.ptr(), 0x5a, matrices.count * matrices.stride * matrices.size)?;
    let seconds =
        median_seconds(context, |_| context.gpu.transpose(&matrices, from.ptr(), to.ptr(), all))?;
    let bytes = 2.0 * (matrices.count * all * matrices.size) as f64;
    Ok(Measured { seconds, bytes, flops: 0.0 })
}
