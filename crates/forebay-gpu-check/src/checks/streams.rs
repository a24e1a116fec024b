//! Compares residual streams beside each other with the CPU.

use anyhow::Result;
use forebay_compute::StreamShape;
use forebay_cuda::{
    Added, BankRows, DevicePtr, ExpertOutputs, FiniteFlag, MixedProducts, STREAMS,
    StreamCoefficients, StreamFactors, StreamRows,
};
use forebay_ops::StreamMixing;

use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

/// Numbers of rows, and widths.
pub(super) const SHAPES: [(usize, usize); 4] = [(1, 4), (3, 64), (9, 1028), (2, 7168)];

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("streams: bank of earlier states", bank),
        Check::new("streams: collapsed and mixed", mixed),
        Check::new("streams: gated", gated),
        Check::new("streams: outputs of experts", experts),
        Check::new("streams: values that are not finite", not_finite),
    ]
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// Compares numbers of which some are sums that may cancel.
pub(super) fn compare(found: &[f32], expected: &[f32], limit: f64) -> Outcome {
    let expected = wide(expected);
    Outcome::of(found, &expected, |i| expected[i].abs().max(1.0), limit)
}

/// Checks coefficients, the input of a block, and the sum with its output. A row must have the bits that it has alone.
fn mixed(context: &Context) -> Result<Outcome> {
    let (gpu, cpu) = (&context.gpu, &context.cpu);
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width) in SHAPES {
        let shape = StreamShape { count: STREAMS, width };
        let mut random = Random::new((rows + width) as u64);
        let (from, added) = (random.gaussians(rows * width), random.gaussians(rows * width));
        let mut x = vec![0.0; rows * shape.row()];
        for (row, from) in x.chunks_exact_mut(shape.row()).zip(from.chunks_exact(width)) {
            row[..width].copy_from_slice(from);
        }
        cpu.spread_streams(&mut x, shape);
        let device_x = context.upload(&vec![0.0_f32; x.len()])?;
        let device = StreamRows { x: device_x.ptr(), rows, width };
        let device_from = context.upload(&from)?;
        gpu.spread_streams(device_from.ptr(), &device)?;
        let found = gpu.download::<f32>(device.x, x.len())?;
        outcome = outcome.worse(Outcome::same(&found, &x));

        let x = random.gaussians(rows * shape.row());
        gpu.upload(&x, device.x)?;
        let out = context.upload(&vec![0.0_f32; rows * width])?;
        gpu.collapse_streams(&device, StreamFactors::Mean, out.ptr())?;
        let mut mean = vec![0.0; rows * width];
        cpu.collapse_streams(&x, shape, &vec![0.25; rows * STREAMS], &mut mean);
        let found = gpu.download::<f32>(out.ptr(), mean.len())?;
        outcome = outcome.worse(compare(&found, &mean, 1e-6));

        for count in [STREAMS, shape.factors(), shape.coefficients()] {
            let (products, base) = (random.gaussians(rows * count), random.gaussians(count));
            let scales = &[1.5_f32, 0.7, 2.0][..(count / STREAMS).min(3)];
            let mixing = StreamMixing {
                scales,
                base: &base[..],
                iterations: 20,
                epsilon: 1e-6,
                outputs: (1.7, 0.25),
                norm_epsilon: 1e-5,
            };
            let mut expected = products.clone();
            cpu.stream_coefficients(&x, shape, &mixing, &mut expected);
            let mut collapsed = vec![0.0; rows * width];
            cpu.collapse_streams(&x, shape, &expected, &mut collapsed);
            let (device_scales, device_base) = (context.upload(scales)?, context.upload(&base)?);
            let run = |rows: usize, x: &[f32], products: &[f32], added: &[f32]| {
                let (x, products) = (context.upload(x)?, context.upload(products)?);
                let out = context.upload(&vec![0.0_f32; rows * width])?;
                let device = StreamRows { x: x.ptr(), rows, width };
                let factors = StreamFactors::Mixed(MixedProducts {
                    products: products.ptr(),
                    count,
                    mixing: StreamMixing {
                        scales: device_scales.ptr(),
                        base: device_base.ptr(),
                        iterations: mixing.iterations,
                        epsilon: mixing.epsilon,
                        outputs: mixing.outputs,
                        norm_epsilon: mixing.norm_epsilon,
                    },
                });
                gpu.collapse_streams(&device, factors, out.ptr())?;
                if count > STREAMS {
                    let added = context.upload(added)?;
                    let of = match count == shape.factors() {
                        true => StreamCoefficients::Independent(products.ptr()),
                        false => StreamCoefficients::Mixed(products.ptr()),
                    };
                    gpu.add_to_streams(&device, Added::Rows(added.ptr()), of, None)?;
                }
                anyhow::Ok((
                    gpu.download::<f32>(products.ptr(), rows * count)?,
                    gpu.download::<f32>(out.ptr(), rows * width)?,
                    gpu.download::<f32>(x.ptr(), rows * shape.row())?,
                ))
            };
            let (coefficients, out, sum) = run(rows, &x, &products, &added)?;
            let at = |what: &str| format!("{what}, {rows}x{width}");
            outcome = outcome.worse(compare(&out, &collapsed, 1e-5).at(&at("input")));
            if count > STREAMS {
                let of_row = |values: &[f32]| -> Vec<f32> {
                    values.chunks_exact(count).flat_map(|row| row[STREAMS..].to_vec()).collect()
                };
                let next = compare(&of_row(&coefficients), &of_row(&expected), 1e-5);
                outcome = outcome.worse(next.at(&at("coefficients")));
                let mut expected_sum = x.clone();
                cpu.add_to_streams(&mut expected_sum, shape, &expected, &added);
                outcome = outcome.worse(compare(&sum, &expected_sum, 2e-5).at(&at("sum")));
            }
            let last = rows - 1;
            let alone = run(
                1,
                &x[last * shape.row()..],
                &products[last * count..],
                &added[last * width..],
            )?;
            outcome = outcome.worse(Outcome::same(&alone.0, &coefficients[last * count..]));
            outcome = outcome.worse(Outcome::same(&alone.1, &out[last * width..]));
            outcome = outcome.worse(Outcome::same(&alone.2, &sum[last * shape.row()..]));
        }
    }
    Ok(outcome)
}

/// Checks norms, gates and factors of gated streams. A row must have the bits that it has alone.
fn gated(context: &Context) -> Result<Outcome> {
    let (gpu, cpu) = (&context.gpu, &context.cpu);
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width) in SHAPES {
        let shape = StreamShape { count: STREAMS, width };
        let rank = width / 4 + 1;
        let mut random = Random::new((rows * width) as u64);
        let (x, weight) = (random.gaussians(rows * shape.row()), random.gaussians(shape.row()));
        let (low, gates) = (random.gaussians(rows * rank), random.gaussians(x.len()));
        let (factors, added) = (random.gaussians(rows * STREAMS), random.gaussians(rows * width));
        let device_weight = context.upload(&weight)?;
        let run = |rows: usize, last: usize| {
            let own = |values: &[f32], of_row: usize| {
                context.upload(&values[last * of_row..(last + rows) * of_row])
            };
            let (x, low) = (own(&x, shape.row())?, own(&low, rank)?);
            let (gates, factors) = (own(&gates, shape.row())?, own(&factors, STREAMS)?);
            let added = own(&added, width)?;
            let normed = context.upload(&vec![0.0_f32; rows * shape.row()])?;
            let out = context.upload(&vec![0.0_f32; rows * width])?;
            let device = StreamRows { x: x.ptr(), rows, width };
            gpu.norm_streams(&device, (device_weight.ptr(), 1e-6), normed.ptr())?;
            gpu.activate_streams((low.ptr(), rows * rank), Some(factors.ptr()), rows)?;
            let device_normed = StreamRows { x: normed.ptr(), ..device };
            gpu.collapse_gated_streams(&device_normed, gates.ptr(), out.ptr())?;
            let of = StreamCoefficients::Gated(factors.ptr());
            gpu.add_to_streams(&device, Added::Rows(added.ptr()), of, None)?;
            anyhow::Ok([
                gpu.download::<f32>(normed.ptr(), rows * shape.row())?,
                gpu.download::<f32>(low.ptr(), rows * rank)?,
                gpu.download::<f32>(factors.ptr(), rows * STREAMS)?,
                gpu.download::<f32>(out.ptr(), rows * width)?,
                gpu.download::<f32>(x.ptr(), rows * shape.row())?,
            ])
        };
        let found = run(rows, 0)?;
        let mut normed = vec![0.0; x.len()];
        cpu.norm_streams(&x, shape, &weight, 1e-6, &mut normed);
        let mut collapsed = vec![0.0; rows * width];
        cpu.collapse_gated_streams(&normed, shape, &gates, &mut collapsed);
        let (mut low, mut factors, mut sum) = (low.clone(), factors.clone(), x.clone());
        cpu.activate_stream_gates(&mut low, STREAMS);
        cpu.stream_injections(&mut factors, STREAMS);
        cpu.add_to_streams(&mut sum, shape, &factors, &added);
        let expected = [normed, low, factors, collapsed, sum];
        let alone = run(1, rows - 1)?;
        for (index, found) in found.iter().enumerate() {
            let next = compare(found, &expected[index], 4e-6);
            outcome = outcome.worse(next.at(&format!("{index}, {rows}x{width}")));
            let of_row = alone[index].len();
            let last = &found[(rows - 1) * of_row..];
            outcome = outcome.worse(Outcome::same(&alone[index], last));
        }
    }
    Ok(outcome)
}

/// Checks mixtures of a bank and sums with its state. A row must have the bits that it has alone.
fn bank(context: &Context) -> Result<Outcome> {
    let (gpu, cpu) = (&context.gpu, &context.cpu);
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for ((rows, width), count) in SHAPES.into_iter().zip([2, 5, 16, 3]) {
        let shape = StreamShape { count, width };
        let mut random = Random::new((rows * width + count) as u64);
        let (x, added) = (random.gaussians(rows * shape.row()), random.gaussians(rows * width));
        let scores: Vec<f32> = random.gaussians(width).iter().map(|score| score * 0.3).collect();
        let device_scores = context.upload(&scores)?;
        let states = random.gaussians(rows * width);
        let mut begun = x.clone();
        for (row, state) in begun.chunks_exact_mut(shape.row()).zip(states.chunks(width)) {
            row[..width].copy_from_slice(state);
        }
        let (device_x, device_states) = (context.upload(&x)?, context.upload(&states)?);
        let device = BankRows { x: device_x.ptr(), rows, streams: count, width };
        gpu.begin_bank(device_states.ptr(), &device)?;
        let found = gpu.download::<f32>(device.x, x.len())?;
        outcome = outcome.worse(Outcome::same(&found, &begun));
        for (seen, place) in [(1, None), (count - 1, Some(count - 1)), (count, Some(1))] {
            let run = |rows: usize, last: usize| {
                let x = context.upload(&x[last * shape.row()..(last + rows) * shape.row()])?;
                let added = context.upload(&added[last * width..(last + rows) * width])?;
                let out = context.upload(&vec![0.0_f32; rows * width])?;
                let device = BankRows { x: x.ptr(), rows, streams: count, width };
                gpu.mix_bank(&device, seen, (device_scores.ptr(), 1e-5), out.ptr())?;
                gpu.add_to_bank(&device, Added::Rows(added.ptr()), place, None)?;
                let out = gpu.download::<f32>(out.ptr(), rows * width)?;
                anyhow::Ok([out, gpu.download::<f32>(x.ptr(), rows * shape.row())?])
            };
            let [out, sum] = run(rows, 0)?;
            let mut mixed = vec![0.0; rows * width];
            cpu.mix_bank(&x, shape, seen, (&scores, 1e-5), &mut mixed);
            let mut expected = x.clone();
            cpu.add_to_bank(&mut expected, shape, place, &added);
            let at = format!("{rows}x{width}, {seen} of {count}");
            outcome = outcome.worse(compare(&out, &mixed, 2e-5).at(&at));
            outcome = outcome.worse(Outcome::same(&sum, &expected));
            let [alone, alone_sum] = run(1, rows - 1)?;
            outcome = outcome.worse(Outcome::same(&alone, &out[(rows - 1) * width..]));
            outcome = outcome.worse(Outcome::same(&alone_sum, &sum[(rows - 1) * shape.row()..]));
        }
    }
    Ok(outcome)
}

/// Checks that the sum of experts' outputs is added as the CPU adds it.
fn experts(context: &Context) -> Result<Outcome> {
    let (gpu, cpu) = (&context.gpu, &context.cpu);
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, width) in SHAPES {
        for biased in [false, true] {
            let (shape, k, experts) = (StreamShape { count: STREAMS, width }, 3, 5);
            let mut random = Random::new((rows * width + 1) as u64);
            let (x, parts) =
                (random.gaussians(rows * shape.row()), random.gaussians(rows * k * width));
            let (weights, shared) = (random.gaussians(rows * k), random.gaussians(rows * width));
            let (factors, bias) =
                (random.gaussians(rows * STREAMS), random.gaussians(experts * width));
            let row_of_pair: Vec<u32> = (0..(rows * k) as u32).rev().collect();
            let ids: Vec<u32> = (0..(rows * k) as u32).map(|pair| pair * 7 % 5).collect();
            let mut added = shared.clone();
            for pair in 0..rows * k {
                let (row, from) = (pair / k, row_of_pair[pair] as usize);
                for i in 0..width {
                    let own = if biased { bias[ids[pair] as usize * width + i] } else { 0.0 };
                    added[row * width + i] += weights[pair] * (parts[from * width + i] + own);
                }
            }
            let mut expected = x.clone();
            cpu.add_to_streams(&mut expected, shape, &factors, &added);
            let [
                device_x,
                device_parts,
                device_weights,
                device_shared,
                device_factors,
                device_bias,
            ] = [&x, &parts, &weights, &shared, &factors, &bias].map(|of| context.upload(of));
            let (device_x, device_bias) = (device_x?, device_bias?);
            let (device_parts, device_weights) = (device_parts?, device_weights?);
            let (device_shared, device_factors) = (device_shared?, device_factors?);
            let (device_rows, device_ids) = (context.upload(&row_of_pair)?, context.upload(&ids)?);
            let outputs = ExpertOutputs {
                parts: device_parts.ptr(),
                weights: device_weights.ptr(),
                row_of_pair: device_rows.ptr(),
                bias: if biased { device_bias.ptr() } else { forebay_cuda::DevicePtr::null() },
                ids: device_ids.ptr(),
                shared: device_shared.ptr(),
                width,
                k,
            };
            let device = StreamRows { x: device_x.ptr(), rows, width };
            let of = StreamCoefficients::Gated(device_factors.ptr());
            gpu.add_to_streams(&device, Added::Experts(outputs), of, None)?;
            let found = gpu.download::<f32>(device.x, x.len())?;
            let next = compare(&found, &expected, 1e-5);
            outcome = outcome.worse(next.at(&format!("{rows}x{width}, biased: {biased}")));
        }
    }
    Ok(outcome)
}

fn not_finite(context: &Context) -> Result<Outcome> {
    first_is_reported(context, |device, added, report| {
        let factors = context.upload(&vec![1.0_f32; device.rows * STREAMS])?;
        let of = StreamCoefficients::Gated(factors.ptr());
        context.gpu.add_to_streams(device, Added::Rows(added), of, Some(report))?;
        // The factors must live until the kernel has run.
        Ok(context.gpu.synchronize()?)
    })
}

/// Checks that `add`, which adds rows to streams, reports the first row with a value that is not finite, wherever the value is.
pub(super) fn first_is_reported(
    context: &Context,
    add: impl Fn(&StreamRows, DevicePtr<f32>, FiniteFlag) -> Result<()>,
) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let (rows, width) = (9, 1028);
    for (row, at, value) in [(8, 0, f32::NAN), (0, 1027, f32::INFINITY), (5, 4111, f32::NAN)] {
        let mut x = vec![1.0_f32; rows * STREAMS * width];
        x[row * STREAMS * width + at] = value;
        let (x, added) = (context.upload(&x)?, context.upload(&vec![0.5_f32; rows * width])?);
        let flag = context.upload(&[u32::MAX])?;
        let device = StreamRows { x: x.ptr(), rows, width };
        add(&device, added.ptr(), FiniteFlag { flag: flag.ptr(), first_tag: 100 })?;
        let found = context.gpu.download::<u32>(flag.ptr(), 1)?;
        outcome = outcome.worse(Outcome::same(&found, &[100 + row as u32]));
    }
    Ok(outcome)
}
