//! Compares recurrent layers and gates of rows with the CPU and with f64 arithmetic.

use anyhow::Result;
use forebay_compute::{DeltaColumns, DeltaInputs, DeltaVectors, ProductRows, StateRun};
use forebay_cuda::{
    CompressedParts, Delta, DeltaRuns, DeltaStates, DevicePtr, HeadGates, NO_STATE, ProductColumns,
};
use forebay_ops::{DeltaRule, DeltaShape, GateFunction, HeadColumns};

use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const EPSILON: f32 = 1e-6;

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("delta steps", |context| over_layers(context, agrees)),
        Check::new("delta cut anywhere and beside others", |context| over_layers(context, cuts)),
        Check::new("delta norms of compressed parts", compressed_parts),
        Check::new("gates of heads", gates_of_heads),
        Check::new("gates of whole heads", gates_of_whole_heads),
        Check::new("gates of rows", gates_of_rows),
    ]
}

fn over_layers(
    context: &Context,
    check: fn(&Context, &Layer) -> Result<Outcome>,
) -> Result<Outcome> {
    let shape = |key_heads, value_heads, key_dim, value_dim, tiled| DeltaShape {
        rule: DeltaRule::GatedDelta,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        convolution: 4,
        tiled,
        norm_width: value_dim,
        sigmoid_gate: false,
        decay_bound: 0.0,
        share_scale: 1.0,
    };
    let kimi = |heads, dim| DeltaShape {
        rule: DeltaRule::KimiDelta,
        sigmoid_gate: true,
        ..shape(heads, heads, dim, dim, false)
    };
    let mamba = |groups: usize, heads: usize, key_dim, value_dim: usize| DeltaShape {
        rule: DeltaRule::Mamba2,
        norm_width: heads / groups * value_dim,
        ..shape(groups, heads, key_dim, value_dim, false)
    };
    let lightning = |heads: usize, dim: usize| DeltaShape {
        rule: DeltaRule::Lightning,
        convolution: 1,
        norm_width: heads * dim,
        sigmoid_gate: true,
        ..shape(heads, heads, dim, dim, false)
    };
    let layers = [
        Layer::separate(shape(2, 4, 16, 16, false)),
        Layer::separate(shape(2, 6, 64, 32, true)),
        Layer::separate(DeltaShape { convolution: 2, ..shape(1, 1, 72, 40, false) }),
        Layer::separate(DeltaShape { sigmoid_gate: true, ..shape(2, 4, 16, 16, false) }),
        Layer::apart(DeltaShape { share_scale: 2.0, ..shape(2, 4, 16, 32, false) }),
        Layer::by_key_head(shape(2, 4, 128, 128, false)),
        Layer::by_key_head(shape(1, 2, 256, 64, false)),
        Layer::apart(kimi(3, 16)),
        Layer::apart(DeltaShape { convolution: 3, ..kimi(2, 128) }),
        Layer::apart(DeltaShape { decay_bound: -5.0, ..kimi(3, 64) }),
        Layer::together(mamba(2, 8, 32, 16)),
        Layer::together(mamba(1, 5, 128, 64)),
        Layer::together(DeltaShape { norm_width: 96, ..mamba(1, 6, 64, 32) }),
        Layer::together(mamba(2, 2, 256, 8)),
        Layer::together(DeltaShape { norm_width: 0, ..mamba(2, 4, 64, 32) }),
        Layer::by_key_head(lightning(3, 32)),
        Layer::by_key_head(lightning(5, 128)),
        Layer::apart(lightning(2, 64)),
        Layer::selective(136, 16, 4),
        Layer::selective(24, 8, 2),
        Layer::selective(40, 72, 3),
        Layer::short_convolution(3, 328),
        Layer::short_convolution(2, 8),
    ];
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for layer in layers {
        let next = check(context, &layer)?.at(&format!("{:?}", layer.shape));
        outcome = outcome.worse(next);
    }
    Ok(outcome)
}

/// Vectors of a layer, and the columns and widths of its products: queries, keys, values, gates, shares, steps.
struct Layer {
    shape: DeltaShape,
    columns: DeltaColumns,
    widths: [usize; 6],
    convolution: Vec<f32>,
    /// Bias of the convolution, and factors of the values that are added to the output.
    extra: Option<[Vec<f32>; 2]>,
    decay: Vec<f32>,
    step: Vec<f32>,
    norm: Vec<f32>,
}

impl Layer {
    /// Products of which each has one part.
    fn separate(shape: DeltaShape) -> Layer {
        let per_key = shape.value_heads / shape.key_heads;
        let (keys, values) = (shape.key_heads * shape.key_dim, per_key * shape.value_dim);
        let columns = |first, step| HeadColumns { first, step };
        let widths = [
            shape.channels(),
            shape.channels(),
            shape.channels(),
            shape.value_width(),
            shape.value_heads,
            shape.value_heads,
        ];
        let all = DeltaColumns {
            q: columns(0, shape.key_dim),
            k: columns(keys, shape.key_dim),
            v: columns(2 * keys, values),
            z: columns(0, values),
            b: columns(0, per_key),
            a: columns(0, per_key),
        };
        Layer::with(shape, all, widths)
    }

    /// Products with all parts of a key head together: one for queries, keys, values and gates, one for shares and steps.
    fn by_key_head(shape: DeltaShape) -> Layer {
        let per_key = shape.value_heads / shape.key_heads;
        let (dim, values) = (shape.key_dim, per_key * shape.value_dim);
        let step = 2 * dim + 2 * values;
        let columns = |first, step| HeadColumns { first, step };
        let (wide, narrow) = (shape.key_heads * step, 2 * shape.value_heads);
        let all = DeltaColumns {
            q: columns(0, step),
            k: columns(dim, step),
            v: columns(2 * dim, step),
            z: columns(2 * dim + values, step),
            b: columns(0, 2 * per_key),
            a: columns(per_key, 2 * per_key),
        };
        Layer::with(shape, all, [wide, wide, wide, wide, narrow, narrow])
    }

    /// One product for each part.
    fn apart(shape: DeltaShape) -> Layer {
        let per_key = shape.value_heads / shape.key_heads;
        let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_width());
        let decays = shape.decay_width();
        let columns = |step| HeadColumns { first: 0, step };
        let all = DeltaColumns {
            q: columns(shape.key_dim),
            k: columns(shape.key_dim),
            v: columns(per_key * shape.value_dim),
            z: columns(per_key * shape.value_dim),
            b: columns(per_key),
            a: columns(per_key * decays),
        };
        let heads = shape.value_heads;
        Layer::with(shape, all, [keys, keys, values, values, heads, heads * decays])
    }

    /// One product for all parts, in the order of Mamba-2: gates, values, keys, queries, steps.
    fn together(shape: DeltaShape) -> Layer {
        let per_key = shape.value_heads / shape.key_heads;
        let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_width());
        let columns = |first, step| HeadColumns { first, step };
        let all = DeltaColumns {
            q: columns(2 * values + keys, shape.key_dim),
            k: columns(2 * values, shape.key_dim),
            v: columns(values, per_key * shape.value_dim),
            z: columns(0, per_key * shape.value_dim),
            b: columns(0, per_key),
            a: columns(2 * values + 2 * keys, per_key),
        };
        Layer::with(shape, all, [shape.channels() + values + shape.value_heads; 6])
    }

    /// One product for a gated short convolution: factors of the values, factors of the output, values.
    fn short_convolution(convolution: usize, channels: usize) -> Layer {
        let shape = DeltaShape {
            rule: DeltaRule::ShortConvolution,
            key_heads: 1,
            value_heads: 1,
            key_dim: 0,
            value_dim: channels,
            convolution,
            tiled: false,
            norm_width: channels,
            sigmoid_gate: false,
            decay_bound: 0.0,
            share_scale: 1.0,
        };
        let columns = |first| HeadColumns { first, step: channels };
        let all = DeltaColumns {
            q: columns(0),
            k: columns(0),
            v: columns(2 * channels),
            z: columns(channels),
            b: columns(0),
            a: columns(0),
        };
        Layer::with(shape, all, [3 * channels; 6])
    }

    /// Products of Mamba: keys and queries behind others, values and gates, steps.
    fn selective(values: usize, key_dim: usize, convolution: usize) -> Layer {
        const BEFORE_KEYS: usize = 3;
        let shape = DeltaShape {
            rule: DeltaRule::Mamba,
            key_heads: 1,
            value_heads: 1,
            key_dim,
            value_dim: values,
            convolution,
            tiled: false,
            norm_width: 0,
            sigmoid_gate: false,
            decay_bound: 0.0,
            share_scale: 1.0,
        };
        let columns = |first| HeadColumns { first, step: values };
        let all = DeltaColumns {
            q: columns(BEFORE_KEYS + key_dim),
            k: columns(BEFORE_KEYS),
            v: columns(0),
            z: columns(values),
            b: columns(0),
            a: columns(0),
        };
        let (keys, both) = (BEFORE_KEYS + 2 * key_dim, 2 * values);
        Layer::with(shape, all, [keys, keys, both, both, values, values])
    }

    fn with(shape: DeltaShape, columns: DeltaColumns, widths: [usize; 6]) -> Layer {
        let mut random = Random::new(shape.key_dim as u64);
        // Every value of Mamba has rates, a step and a factor of its own.
        let [rates, steps, skips] = match shape.rule {
            DeltaRule::Mamba => [shape.value_dim * shape.key_dim, shape.value_dim, shape.value_dim],
            DeltaRule::Lightning => [shape.value_heads, 0, shape.value_heads],
            _ => [shape.value_heads, shape.value_heads * shape.decay_width(), shape.value_heads],
        };
        Layer {
            shape,
            columns,
            widths,
            convolution: random.gaussians(shape.convolution * shape.channels()),
            decay: random.gaussians(rates).iter().map(|x| -0.05 - x.abs()).collect(),
            step: random.gaussians(steps.max(1)),
            norm: random.gaussians(shape.norm_weights().max(1)),
            extra: matches!(shape.rule, DeltaRule::Mamba | DeltaRule::Mamba2)
                .then(|| [random.gaussians(shape.channels()), random.gaussians(skips)]),
        }
    }

    /// Products of the same width have the same values, so they may be one product.
    fn products(&self, tokens: usize) -> [Vec<f32>; 6] {
        [0, 1, 2, 3, 4, 5].map(|index| {
            let of = self.widths.iter().position(|width| *width == self.widths[index]);
            Random::new(90 + of.unwrap_or(0) as u64).gaussians(tokens * self.widths[index])
        })
    }

    /// Computes the runs on the GPU: numbers of rows, and of the states before and after them. Returns the outputs.
    fn run(
        &self,
        context: &Context,
        products: &[Vec<f32>; 6],
        first: usize,
        runs: &[[u32; 3]],
        states: &DeltaStates,
    ) -> Result<Vec<f32>> {
        let rows: u32 = runs.iter().map(|[count, _, _]| count).sum();
        let rows = rows as usize;
        let mut words = Vec::new();
        let mut at = 0;
        for &[count, from, to] in runs {
            words.extend([at, count, from, to]);
            at += count;
        }
        // A run without rows changes nothing.
        words.extend([0, 0, NO_STATE, 0]);
        let words = context.upload(&words)?;
        let mut uploaded = Vec::new();
        for (product, width) in products.iter().zip(self.widths) {
            uploaded.push(context.upload(&product[first * width..][..rows * width])?);
        }
        let vectors = [&self.convolution, &self.decay, &self.step, &self.norm];
        let vectors = vectors.map(|values| context.upload(values));
        let [convolution, decay, step, norm] = vectors;
        let (convolution, decay, step, norm) = (convolution?, decay?, step?, norm?);
        let extra = match &self.extra {
            Some(extra) => Some([context.upload(&extra[0])?, context.upload(&extra[1])?]),
            None => None,
        };
        let [convolution_bias, skip] = match &extra {
            Some(extra) => extra.each_ref().map(|buffer| buffer.ptr()),
            None => [DevicePtr::null(); 2],
        };
        let width = self.shape.value_width();
        let mixed = context.poisoned(rows * self.shape.channels())?;
        let out = context.poisoned(rows * width)?;
        let product = |index: usize, columns: HeadColumns| ProductColumns {
            values: uploaded[index].ptr(),
            row: self.widths[index],
            columns,
        };
        let delta = Delta {
            shape: self.shape,
            q: product(0, self.columns.q),
            k: product(1, self.columns.k),
            v: product(2, self.columns.v),
            z: product(3, self.columns.z),
            b: product(4, self.columns.b),
            a: product(5, self.columns.a),
            convolution: convolution.ptr(),
            convolution_bias,
            skip,
            decay: decay.ptr(),
            step: step.ptr(),
            norm: norm.ptr(),
            epsilon: EPSILON,
            states: *states,
            mixed: mixed.ptr(),
            out: out.ptr(),
        };
        let runs = DeltaRuns { words: words.ptr(), count: runs.len() + 1, first_row: 0, rows };
        match self.shape.rule {
            DeltaRule::Mamba => {
                context.gpu.mix_values(&delta, &runs)?;
                context.gpu.selective_scan(&delta, &runs)?;
            }
            _ => context.gpu.gated_delta(&delta, &runs)?,
        }
        Ok(context.gpu.download(out.ptr(), rows * width)?)
    }

    /// Computes one run from the empty state on the CPU. Returns the outputs and the state.
    fn on_cpu(
        &self,
        context: &Context,
        products: &[Vec<f32>; 6],
        tokens: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let shape = self.shape;
        let rows = |index: usize| ProductRows { values: &products[index], row: self.widths[index] };
        let inputs = DeltaInputs {
            columns: self.columns,
            q: rows(0),
            k: rows(1),
            v: rows(2),
            z: rows(3),
            b: rows(4),
            a: rows(5),
        };
        let extra = self.extra.as_ref();
        let weights = DeltaVectors {
            convolution: &self.convolution,
            convolution_bias: extra.map(|[bias, _]| &bias[..]),
            skip: extra.map(|[_, skip]| &skip[..]),
            decay: &self.decay,
            step: if shape.rule == DeltaRule::Lightning { &[] } else { &self.step },
            norm: &self.norm[..self.shape.norm_weights()],
            epsilon: EPSILON,
        };
        let run = [StateRun { tokens, from: None, to: 0 }];
        let mut state = vec![0.0; shape.state_floats()];
        let mut scratch = vec![0.0; tokens * shape.scratch_floats()];
        let mut out = vec![0.0; tokens * shape.value_width()];
        let cpu = &context.cpu;
        if shape.rule == DeltaRule::Mamba {
            cpu.mix_values(&shape, &weights, &inputs, &run, &mut state, &mut scratch);
            cpu.selective_scan(&shape, &weights, &inputs, &scratch, &run, &mut state, &mut out);
            return (out, state);
        }
        cpu.gated_delta(&shape, &weights, &inputs, &run, &mut state, &mut scratch, &mut out);
        (out, state)
    }
}

/// Compares outputs and the state with the CPU's, whose test compares them with f64 arithmetic.
fn agrees(context: &Context, layer: &Layer) -> Result<Outcome> {
    let tokens = 11;
    let products = layer.products(tokens);
    let floats = layer.shape.state_floats();
    let memory = context.poisoned(2 * floats)?;
    let states = DeltaStates { floats: memory.ptr(), count: 2 };
    let runs = [[tokens as u32, NO_STATE, 1]];
    let got = layer.run(context, &products, 0, &runs, &states)?;
    let (expected, state) = layer.on_cpu(context, &products, tokens);
    let wide = |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let (expected, state) = (wide(&expected), wide(&state));
    let outcome = Outcome::of(&got, &expected, |i| 1.0 + expected[i].abs(), 1e-4);
    let got = context.gpu.download(memory.ptr::<f32>().offset(floats), floats)?;
    Ok(outcome.worse(Outcome::of(&got, &state, |i| 1.0 + state[i].abs(), 1e-5)))
}

/// Computes a sequence in pieces, some of them shorter than the convolution, and beside another sequence. All bits must be those
/// of one run.
fn cuts(context: &Context, layer: &Layer) -> Result<Outcome> {
    let tokens = 19;
    let products = layer.products(tokens);
    let floats = layer.shape.state_floats();
    let memory = context.poisoned(4 * floats)?;
    let states = DeltaStates { floats: memory.ptr(), count: 4 };
    let whole = layer.run(context, &products, 0, &[[tokens as u32, NO_STATE, 0]], &states)?;
    let state =
        |number: usize| context.gpu.download(memory.ptr::<f32>().offset(number * floats), floats);
    let expected = state(0)?;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for pieces in [vec![1, 1, 17], vec![2, 1, 3, 13], vec![18, 1]] {
        let (mut done, mut out) = (0, Vec::new());
        for (index, count) in pieces.iter().enumerate() {
            let (from, to) = (1 + (index + 1) % 2, 1 + index % 2);
            let from = if index == 0 { NO_STATE } else { from as u32 };
            let runs = [[*count, from, to as u32]];
            out.extend(layer.run(context, &products, done, &runs, &states)?);
            done += *count as usize;
        }
        let last = 1 + (pieces.len() + 1) % 2;
        outcome = outcome.worse(Outcome::same(&out, &whole));
        outcome = outcome.worse(Outcome::same(&state(last)?, &expected));
    }
    let together =
        layer.run(context, &products, 0, &[[12, NO_STATE, 3], [7, NO_STATE, 1]], &states)?;
    let alone = layer.run(context, &products, 12, &[[7, NO_STATE, 2]], &states)?;
    let (first, second) = together.split_at(12 * whole.len() / tokens);
    outcome = outcome.worse(Outcome::same(first, &whole[..first.len()]));
    outcome = outcome.worse(Outcome::same(second, &alone));
    Ok(outcome.worse(Outcome::same(&state(1)?, &state(2)?)))
}

/// Compares norms of the three parts of compressed rows with the CPU's. Without norms, nothing changes.
fn compressed_parts(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, rank, key_dim, has_norms) in
        [(1, 4, 16, true), (7, 160, 16, true), (3, 129, 40, true), (5, 48, 16, false)]
    {
        let width = rank + 2 * key_dim;
        let mut random = Random::new(rank as u64);
        let mut expected = random.gaussians(rows * width);
        let device = context.upload(&expected)?;
        let norms = [rank, key_dim, key_dim].map(|length| random.gaussians(length));
        let mut uploaded = Vec::new();
        for (norm, first) in norms.iter().zip([0, rank, rank + key_dim]) {
            uploaded.push(context.upload(norm)?);
            if has_norms {
                context.cpu.rms_norm_columns(&mut expected, width, first, norm, EPSILON);
            }
        }
        let steps = context.poisoned(rows * rank)?;
        let parts = CompressedParts {
            all: device.ptr(),
            rank,
            key_dim,
            norms: [0, 1, 2].map(|of| match has_norms {
                true => uploaded[of].ptr(),
                false => DevicePtr::null(),
            }),
            epsilon: EPSILON,
            steps: steps.ptr(),
        };
        context.gpu.norm_compressed(&parts, rows)?;
        let mut got = context.gpu.download(device.ptr::<f32>(), rows * width)?;
        let steps = context.gpu.download(steps.ptr::<f32>(), rows * rank)?;
        // The steps in the rows stay as they are.
        for (row, steps) in got.chunks_exact_mut(width).zip(steps.chunks_exact(rank)) {
            row[..rank].copy_from_slice(steps);
        }
        let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
        let next = Outcome::of(&got, &expected, |i| 1.0 + expected[i].abs(), 1e-5);
        outcome = outcome.worse(next.at(&format!("{rows} rows, rank {rank}")));
    }
    Ok(outcome)
}

fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn gates_of_heads(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, heads, dim, first, stride) in
        [(1, 1, 3, 0, 3), (5, 4, 32, 32, 64), (3, 7, 40, 10, 60), (70_000, 1, 2, 2, 4)]
    {
        let mut random = Random::new(rows as u64);
        let x = random.gaussians(rows * heads * dim);
        let gates: Vec<f32> =
            random.gaussians(rows * heads * stride).iter().map(|x| x * 5.0).collect();
        let (device, device_gates) = (context.upload(&x)?, context.upload(&gates)?);
        let of = HeadGates { gates: device_gates.ptr(), heads, dim, first, stride };
        context.gpu.gate_heads(device.ptr(), &of, rows)?;
        let got = context.gpu.download(device.ptr(), x.len())?;
        let expected = |i: usize| {
            let gate = gates[i / dim * stride + first + i % dim];
            f64::from(x[i]) * logistic(f64::from(gate))
        };
        let expected: Vec<f64> = (0..x.len()).map(expected).collect();
        outcome =
            outcome.worse(Outcome::of(&got, &expected, |i| expected[i].abs().max(1e-6), 4e-6));
    }
    Ok(outcome)
}

fn gates_of_whole_heads(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, heads, dim) in [(1, 1, 3), (5, 6, 32), (3, 7, 40), (70_000, 2, 2)] {
        let mut random = Random::new(rows as u64);
        let x = random.gaussians(rows * heads * dim);
        let gates: Vec<f32> = random.gaussians(rows * heads).iter().map(|x| x * 15.0).collect();
        let device_gates = context.upload(&gates)?;
        for function in [GateFunction::Sigmoid, GateFunction::Softplus] {
            let device = context.upload(&x)?;
            let is_softplus = function == GateFunction::Softplus;
            let of = (device_gates.ptr(), is_softplus);
            context.gpu.gate_whole_heads(device.ptr(), of, [heads, dim], rows)?;
            let got = context.gpu.download(device.ptr(), x.len())?;
            let expected = |i: usize| {
                let gate = f64::from(gates[i / dim]);
                let factor = if is_softplus { gate.exp().ln_1p() } else { logistic(gate) };
                f64::from(x[i]) * factor
            };
            let expected: Vec<f64> = (0..x.len()).map(expected).collect();
            let bound = |i: usize| expected[i].abs().max(1e-6);
            outcome = outcome.worse(Outcome::of(&got, &expected, bound, 4e-6));
        }
    }
    Ok(outcome)
}

fn gates_of_rows(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, cols, width) in [(1, 1, 1), (3, 37, 5), (9, 2048, 2048), (600, 64, 3)] {
        let mut random = Random::new(cols as u64);
        let (x, weight) = (random.gaussians(rows * cols), random.gaussians(cols));
        let out = random.gaussians(rows * width);
        let (device, device_x) = (context.upload(&out)?, context.upload(&x)?);
        let device_weight = context.upload(&weight)?;
        context.gpu.gate_rows(
            (device.ptr(), width),
            device_x.ptr(),
            (device_weight.ptr(), cols),
            rows,
        )?;
        let got = context.gpu.download(device.ptr(), out.len())?;
        let factors: Vec<f64> = x
            .chunks(cols)
            .map(|x| {
                let terms = x.iter().zip(&weight).map(|(x, w)| f64::from(*x) * f64::from(*w));
                logistic(terms.sum())
            })
            .collect();
        let expected: Vec<f64> =
            (0..out.len()).map(|i| f64::from(out[i]) * factors[i / width]).collect();
        // The error of a long sum is the error of the exponential's argument.
        let tolerance = 2e-5;
        outcome =
            outcome.worse(Outcome::of(&got, &expected, |i| expected[i].abs().max(1e-6), tolerance));
    }
    Ok(outcome)
}
