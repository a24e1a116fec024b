//! Checks and measures the rounding of activations to 8 bits.

use anyhow::Result;
use forebay_cuda::{DeviceMemory, DevicePtr, RoundedActivations};

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    vec![Check::new("quantize q8", q8)]
}

pub fn benches() -> Vec<Bench> {
    vec![Bench::new("quantize q8 1x4096", |context| bench_q8(context, 1, 4096))]
}

/// Rounds 32 activations. Returns their codes, the scale, and the sums of both halves.
pub fn round_group(x: &[f32]) -> (Vec<i8>, f32, [i16; 2]) {
    let largest = x.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
    let inverse = if largest > 1e-36 { 127.0 / largest } else { 0.0 };
    let codes: Vec<i8> = x.iter().map(|x| (x * inverse).round_ties_even() as i8).collect();
    let sum = |codes: &[i8]| codes.iter().map(|&code| i16::from(code)).sum();
    let sums = [sum(&codes[..16]), sum(&codes[16..])];
    (codes, largest / 127.0, sums)
}

/// Returns what the kernel should write for `x [tokens, cols]`.
fn expected(x: &[f32], cols: usize) -> (Vec<i8>, Vec<[u8; 8]>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for x in x.chunks(cols) {
        let groups: Vec<_> = x.chunks(32).map(round_group).collect();
        codes.extend(groups.iter().flat_map(|group| &group.0[..16]));
        codes.extend(groups.iter().flat_map(|group| &group.0[16..]));
        for (_, scale, sums) in &groups {
            let mut bytes = [0; 8];
            bytes[..4].copy_from_slice(&scale.to_le_bytes());
            bytes[4..6].copy_from_slice(&sums[0].to_le_bytes());
            bytes[6..].copy_from_slice(&sums[1].to_le_bytes());
            scales.push(bytes);
        }
    }
    (codes, scales)
}

/// Rounds `x [tokens, cols]` on the device. The returned memory holds both parts of the result.
pub fn rounded(
    context: &Context,
    x: DevicePtr<f32>,
    tokens: usize,
    cols: usize,
) -> Result<(RoundedActivations, DeviceMemory)> {
    let (codes, scales) = RoundedActivations::bytes(tokens, cols);
    let at = codes.next_multiple_of(256);
    let memory = context.poisoned((at + scales) / 4)?;
    let scales = memory.ptr::<u8>().offset(at).cast();
    let out = RoundedActivations { codes: memory.ptr(), scales };
    context.gpu.quantize_q8(x, out, tokens, cols)?;
    Ok((out, memory))
}

fn q8(context: &Context) -> Result<Outcome> {
    let (tokens, cols) = (3, 1056);
    let mut x = Random::new(1).gaussians(tokens * cols);
    x[64..96].fill(0.0);
    x[128] = 1e30;
    let device = context.upload(&x)?;
    let (out, _memory) = rounded(context, device.ptr(), tokens, cols)?;
    let (codes, scales) = expected(&x, cols);
    let got_codes = context.gpu.download(out.codes, tokens * cols)?;
    let got_scales = context.gpu.download(out.scales, tokens * cols / 32)?;
    Ok(Outcome::same(&got_codes, &codes).worse(Outcome::same(&got_scales, &scales)))
}

fn bench_q8(context: &Context, tokens: usize, cols: usize) -> Result<Measured> {
    let x = context.upload(&Random::new(1).gaussians(tokens * cols))?;
    let (out, _memory) = rounded(context, x.ptr(), tokens, cols)?;
    let seconds = median_seconds(context, |_| context.gpu.quantize_q8(x.ptr(), out, tokens, cols))?;
    Ok(Measured { seconds, bytes: (tokens * cols) as f64 * 5.25, flops: 0.0 })
}
