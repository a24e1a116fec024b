//! Compares the gated activations with the CPU and with the published formulas.

use anyhow::Result;
use forebay_cuda::{DevicePtr, Gate, GateBiases};
use forebay_ops::Gating;

use super::halves::Halves;
use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

/// gpt-oss's clamped gating.
const CLAMPED: Gating = Gating::Clamped { alpha: 1.702, limit: 7.0 };
const XIELU: Gating = Gating::Xielu { positive: 0.7, negative: 1.1, slope: 0.5, floor: -0.01 };
const SITU: Gating = Gating::Situ { limit: 4.0, up_limit: 2.5 };

pub fn checks() -> Vec<Check> {
    let kinds = [
        ("silu", Gating::Silu),
        ("gelu", Gating::GeluTanh),
        ("clamped", CLAMPED),
        ("clamped silu", Gating::ClampedSilu { limit: 10.0 }),
        ("silu clamped", Gating::SiluClamped { limit: 7.0 }),
        ("relu", Gating::Relu),
        ("squared relu", Gating::SquaredRelu),
        ("situ", SITU),
    ];
    let check = |(name, gating): (&str, Gating)| {
        let plain = Check::new(format!("gating {name}"), move |context| plain(context, gating));
        let biased =
            Check::new(format!("gating {name} of experts"), move |context| biased(context, gating));
        [plain, biased]
    };
    let alone = [
        ("squared relu", Gating::SquaredRelu),
        ("gelu", Gating::PlainGelu),
        ("gelu with tanh", Gating::PlainGeluTanh),
        ("xielu", XIELU),
    ];
    let without_gate = |(name, gating): (&str, Gating)| {
        Check::new(format!("activation without a gate {name}"), move |context| {
            activated(context, gating)
        })
    };
    kinds.into_iter().flat_map(check).chain(alone.map(without_gate)).collect()
}

/// Compares activations of rows, with a bias and without, with the CPU.
fn activated(context: &Context, gating: Gating) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width) in [(1, 1), (3, 7), (5, 128), (70, 1000)] {
        for biased in [false, true] {
            let mut random = Random::new((rows * width) as u64);
            let x: Vec<f32> = random.gaussians(rows * width).iter().map(|x| x * 4.0).collect();
            let bias = random.gaussians(width);
            let (device, device_bias) = (context.upload(&x)?, context.upload(&bias)?);
            let at = if biased { device_bias.ptr() } else { DevicePtr::null() };
            context.gpu.activate_rows(device.ptr(), at, rows, width, gating)?;
            let mut cpu = x;
            if biased {
                context.cpu.add_bias_rows(&mut cpu, &bias);
            }
            context.cpu.activate_in_place(gating, &mut cpu);
            let cpu: Vec<f64> = cpu.into_iter().map(f64::from).collect();
            let got = context.gpu.download::<f32>(device.ptr(), rows * width)?;
            // Far below zero, GELU is a difference of nearly equal numbers.
            let beside = |i: usize| cpu[i].abs().max(0.1);
            outcome = outcome.worse(Outcome::of(&got, &cpu, beside, 4e-6));
        }
    }
    Ok(outcome)
}

pub fn benches() -> Vec<Bench> {
    let cases = [
        ("silu", Gating::Silu, 1, 12_288, false),
        ("silu", Gating::Silu, 512, 12_288, false),
        ("clamped of experts", CLAMPED, 4, 2880, true),
        ("clamped of experts", CLAMPED, 2048, 2880, true),
    ];
    let bench = |(name, gating, rows, width, biased)| {
        Bench::new(format!("gating {name} {rows}x{width}"), move |context| {
            measure(context, gating, rows, width, biased)
        })
    };
    cases.into_iter().map(bench).collect()
}

/// Computes the published formula.
pub fn exact(gating: Gating, gate: f64, up: f64) -> f64 {
    match gating {
        Gating::Silu => gate / (1.0 + (-gate).exp()) * up,
        Gating::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
            0.5 * gate * (1.0 + inner.tanh()) * up
        }
        Gating::Clamped { alpha, limit } => {
            let limit = f64::from(limit);
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            (up + 1.0) * gate / (1.0 + (-gate * f64::from(alpha)).exp())
        }
        Gating::ClampedSilu { limit } => {
            let limit = f64::from(limit);
            let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
            gate / (1.0 + (-gate).exp()) * up
        }
        Gating::SiluClamped { limit } => {
            let limit = f64::from(limit);
            (gate / (1.0 + (-gate).exp())).min(limit) * up.clamp(-limit, limit)
        }
        Gating::Relu | Gating::SquaredRelu => gate.max(0.0) * up,
        Gating::Situ { limit, up_limit } => {
            let within = |x: f64, limit: f32| f64::from(limit) * (x / f64::from(limit)).tanh();
            within(gate, limit) / (1.0 + (-gate).exp()) * within(up, up_limit)
        }
        Gating::PlainGelu | Gating::PlainGeluTanh | Gating::Xielu { .. } => {
            unreachable!("{gating:?} is compared with the CPU only")
        }
    }
}

/// Compares with the formula and with the CPU.
fn compare(context: &Context, gating: Gating, gate: &[f32], up: &[f32], got: &[f32]) -> Outcome {
    let pairs = gate.iter().zip(up);
    let expected: Vec<f64> =
        pairs.map(|(g, u)| exact(gating, f64::from(*g), f64::from(*u))).collect();
    let mut cpu = gate.to_vec();
    context.cpu.gate_in_place(gating, &mut cpu, up);
    let cpu: Vec<f64> = cpu.iter().map(|x| f64::from(*x)).collect();
    // Far below zero, results of SiLU are smaller than any f32. The other formulas lose digits there, even in f64.
    // Also, the relative error of an exponential is the absolute rounding error of its argument, which grows with the
    // argument.
    let (floor, tolerance) = match gating {
        Gating::Silu => (1e-28, 1e-6),
        // The tangents on the CPU are within 2e-6 each.
        Gating::Situ { .. } => (1e-6, 6e-6),
        _ => (1e-6, 4e-6),
    };
    let outcome = Outcome::of(got, &expected, |i| expected[i].abs().max(floor), tolerance);
    let beside = |i: usize| expected[i].abs().max(1e-6);
    outcome.worse(Outcome::of(got, &cpu, beside, 2.0 * tolerance))
}

fn inputs(count: usize) -> (Vec<f32>, Vec<f32>) {
    let mut random = Random::new(count as u64);
    let mut gate: Vec<f32> = random.gaussians(count).iter().map(|x| x * 10.0).collect();
    gate[0] = -200.0;
    gate[count - 1] = 150.0;
    (gate, random.gaussians(count).iter().map(|x| x * 5.0).collect())
}

fn plain(context: &Context, gating: Gating) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width) in [(1, 1), (1, 3), (1, 4), (3, 341), (1, 40_001), (70_000, 3)] {
        let count = rows * width;
        let (gate, up) = inputs(count);
        let (device, device_up) = (context.upload(&gate)?, context.upload(&up)?);
        let out = context.poisoned(count)?;
        let to = |out| {
            let (gate, up) = (device.ptr(), device_up.ptr());
            let halves = None;
            gpu.gate(&Gate { gate, up, out, rows, width, gating, biases: None, halves })
        };
        to(out.ptr())?;
        let got = gpu.download(out.ptr(), count)?;
        to(device.ptr())?;
        let in_place = gpu.download(device.ptr(), count)?;
        outcome = outcome.worse(compare(context, gating, &gate, &up, &got));
        outcome = outcome.worse(Outcome::same(&in_place, &got));
    }
    Ok(outcome)
}

/// Checks rows in the order of pairs and in another order. Results must be bit-identical to adding the biases
/// beforehand.
fn biased(context: &Context, gating: Gating) -> Result<Outcome> {
    let (gpu, experts) = (&context.gpu, 7);
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width) in [(1, 1), (4, 2880), (5, 333), (70_000, 6)] {
        let (gate, up) = inputs(rows * width);
        let mut random = Random::new(rows as u64);
        let biases = [0, 1].map(|_| random.gaussians(experts * width));
        let ids: Vec<u32> = (0..rows).map(|_| random.next() % experts as u32).collect();
        let shuffled: Vec<u32> = (0..rows as u32).rev().collect();
        let [gate_bias, up_bias] = [context.upload(&biases[0])?, context.upload(&biases[1])?];
        let (device_ids, device_pairs) = (context.upload(&ids)?, context.upload(&shuffled)?);
        let (device, device_up) = (context.upload(&gate)?, context.upload(&up)?);
        for pairs in [None, Some(&shuffled)] {
            let expert = |row: usize| ids[pairs.map_or(row, |pairs| pairs[row] as usize)] as usize;
            let added = |x: &[f32], bias: &[f32]| -> Vec<f32> {
                let at = |i: usize| x[i] + bias[expert(i / width) * width + i % width];
                (0..rows * width).map(at).collect()
            };
            let (gate, up) = (added(&gate, &biases[0]), added(&up, &biases[1]));
            let out = context.poisoned(rows * width)?;
            let mut call = Gate {
                gate: device.ptr(),
                up: device_up.ptr(),
                out: out.ptr(),
                rows,
                width,
                gating,
                biases: Some(GateBiases {
                    gate: gate_bias.ptr(),
                    up: up_bias.ptr(),
                    ids: device_ids.ptr(),
                    pairs: pairs.map_or(DevicePtr::null(), |_| device_pairs.ptr()),
                }),
                halves: None,
            };
            gpu.gate(&call)?;
            let got = gpu.download(out.ptr(), rows * width)?;
            if width.is_multiple_of(4) {
                let halves = Halves::new(context, rows, width)?;
                call.halves = Some(halves.checked());
                gpu.gate(&call)?;
                call.halves = None;
                let again = gpu.download(out.ptr(), rows * width)?;
                outcome = outcome.worse(Outcome::same::<f32>(&again, &got));
                outcome = outcome.worse(halves.compare(context, out.ptr())?);
            }
            let (before, before_up) = (context.upload(&gate)?, context.upload(&up)?);
            (call.gate, call.up, call.biases) = (before.ptr(), before_up.ptr(), None);
            gpu.gate(&call)?;
            let apart = gpu.download(out.ptr(), rows * width)?;
            let mut next = compare(context, gating, &gate, &up, &got);
            next = next.worse(Outcome::same(&got, &apart));
            outcome = outcome.worse(next.at(&format!("{rows}x{width}, {}", pairs.is_some())));
        }
    }
    Ok(outcome)
}

fn measure(
    context: &Context,
    gating: Gating,
    rows: usize,
    width: usize,
    biased: bool,
) -> Result<Measured> {
    let count = rows * width;
    let gate = context.upload(&Random::new(1).gaussians(count))?;
    let (up, out) = (context.upload(&Random::new(2).gaussians(count))?, context.poisoned(count)?);
    let bias = context.upload(&Random::new(3).gaussians(32 * width))?;
    let ids: Vec<u32> = (0..rows as u32).map(|row| row * 7 % 32).collect();
    let ids = context.upload(&ids)?;
    let biases =
        GateBiases { gate: bias.ptr(), up: bias.ptr(), ids: ids.ptr(), pairs: DevicePtr::null() };
    let gate = Gate {
        gate: gate.ptr(),
        up: up.ptr(),
        out: out.ptr(),
        rows,
        width,
        gating,
        biases: biased.then_some(biases),
        halves: None,
    };
    let seconds = median_seconds(context, |_| context.gpu.gate(&gate))?;
    Ok(Measured { seconds, bytes: count as f64 * 12.0, flops: 0.0 })
}
