//! A single attention problem: its inputs, the expected output, and the run on the GPU.

use std::collections::BTreeMap;

use anyhow::Result;
use forebay_compute::{Attention as CpuAttention, KvCache, KvShape, KvType};
use forebay_cuda::{
    Attention, AttentionInputs, AttentionScratch, AttentionScratchSize, DeviceMemory, DevicePtr,
    HeadInput, KvElement, KvLayer, KvLayerShape,
};
use half::f16;

use crate::harness::{Context, Outcome};
use crate::random::Random;

/// Number of positions for which the cache has room beyond the last one. They stay poisoned.
const SPARE: usize = 5;
const SCALE: f32 = 0.17;

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub element: KvElement,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim_k: usize,
    pub dim_v: usize,
    /// True if values are the first elements of keys.
    pub values_in_keys: bool,
    /// The window that the cache keeps, or `None` if it keeps all positions.
    pub kept: Option<usize>,
    /// Position of the first query token.
    pub first: usize,
    pub tokens: usize,
}

/// Rules of masking and scoring.
#[derive(Clone, Copy, Debug)]
pub struct Variation {
    window: Option<usize>,
    softcap: Option<f32>,
    sinks: bool,
}

impl Variation {
    pub fn windowed(window: usize, sinks: bool) -> Variation {
        Variation { window: Some(window), softcap: None, sinks }
    }

    pub fn all() -> [Variation; 6] {
        let plain = Variation { window: None, softcap: None, sinks: false };
        [
            plain,
            Variation { window: Some(16), ..plain },
            Variation { window: Some(100), sinks: true, ..plain },
            Variation { window: Some(5000), ..plain },
            Variation { softcap: Some(5.0), sinks: true, ..plain },
            Variation { window: Some(1), softcap: Some(30.0), ..plain },
        ]
    }
}

/// A cache that the GPU kernel filled, and the same numbers on the host, rounded as the cache rounds them.
pub struct Inputs {
    case: Case,
    q: Vec<f32>,
    sinks: Vec<f32>,
    /// `[positions, kv_heads, dim]`
    keys: Vec<f32>,
    values: Vec<f32>,
    /// The CPU's cache, which keeps all positions.
    cache: KvCache,
    layer: KvLayer,
    /// Memory that the addresses in `layer` point to.
    _planes: [DeviceMemory; 2],
    device_q: DeviceMemory,
    device_sinks: DeviceMemory,
    positions: DeviceMemory,
}

/// Rounds a row as the cache does.
fn stored(row: &[f32], element: KvElement) -> Vec<f32> {
    match element {
        KvElement::F32 => row.to_vec(),
        KvElement::F16 => row.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        KvElement::Q8_0 => row.chunks(32).flat_map(stored_bytes).collect(),
        KvElement::Q4_0 => row.chunks(32).flat_map(stored_nibbles).collect(),
    }
}

fn leading(row: &[f32], count: usize) -> Vec<f32> {
    row[..count].to_vec()
}

fn stored_bytes(block: &[f32]) -> Vec<f32> {
    let largest = block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    let scale = f16::from_f32(largest / 127.0).to_f32();
    block.iter().map(|x| (x * inverse).round_ties_even() * scale).collect()
}

fn stored_nibbles(block: &[f32]) -> Vec<f32> {
    let largest = block.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let extreme = block.iter().find(|x| x.abs() == largest).copied().unwrap_or_default();
    let scale = extreme / -8.0;
    let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    let scale = f16::from_f32(scale).to_f32();
    block.iter().map(|x| ((x * inverse + 8.5).floor().min(15.0) - 8.0) * scale).collect()
}

/// Returns the CPU's name for a type.
pub fn cpu_type(element: KvElement) -> KvType {
    match element {
        KvElement::F16 => KvType::F16,
        KvElement::F32 => KvType::F32,
        KvElement::Q8_0 => KvType::Q8_0,
        KvElement::Q4_0 => KvType::Q4_0,
    }
}

impl Case {
    /// Creates a case with a cache that keeps all positions and stores values separately from keys.
    pub fn of(
        element: KvElement,
        (heads, kv_heads): (usize, usize),
        (dim_k, dim_v): (usize, usize),
        (first, tokens): (usize, usize),
    ) -> Case {
        let (values_in_keys, kept) = (false, None);
        Case { element, heads, kv_heads, dim_k, dim_v, values_in_keys, kept, first, tokens }
    }

    fn end(&self) -> usize {
        self.first + self.tokens
    }

    fn shape(&self) -> KvLayerShape {
        let Case { element, kv_heads, dim_k, dim_v, values_in_keys, .. } = *self;
        let context = self.end() + SPARE;
        let rows_of = |window| KvLayerShape::rows_for_window(window, self.tokens, context);
        let rows = self.kept.map_or(context, rows_of);
        KvLayerShape { element, kv_heads, dim_k, dim_v, values_in_keys, context, rows }
    }

    /// Returns the tolerance for what the kernels of this case round.
    pub fn tolerance(&self) -> f64 {
        // Kernels for few tokens and short heads split queries and weights into two halves.
        match (self.element, self.dim_k <= 256, self.tokens <= 8) {
            (KvElement::F32, ..) | (KvElement::F16, true, true) => super::EXACT,
            (KvElement::F16, true, false) => super::HALVES,
            (KvElement::F16, false, _) => super::LATENT_HALVES,
            (KvElement::Q8_0, true, true) => super::BYTES_AS_HALVES,
            (KvElement::Q8_0, true, false) => super::BYTES_AND_HALVES,
            (KvElement::Q8_0, false, _) => super::LATENT_BYTES,
            // As for q8_0. The reference uses the stored values, so the tolerance covers only rounding outside the
            // cache.
            (KvElement::Q4_0, true, true) => super::BYTES_AS_HALVES,
            (KvElement::Q4_0, true, false) => super::BYTES_AND_HALVES,
            (KvElement::Q4_0, false, _) => super::LATENT_BYTES,
        }
    }

    /// Creates random inputs. The positions before the query tokens are written to the cache first, then their own.
    pub fn inputs(self, context: &Context) -> Result<Inputs> {
        let Case { element, heads, kv_heads, dim_k, dim_v, first, tokens, .. } = self;
        let gpu = &context.gpu;
        let mut random = Random::new((first * 31 + tokens * 7 + dim_k) as u64);
        let mut random_values =
            |count: usize| (0..count).map(|_| random.unit()).collect::<Vec<f32>>();
        let (k, v) = (
            random_values(self.end() * kv_heads * dim_k),
            random_values(self.end() * kv_heads * dim_v),
        );
        let q: Vec<f32> = random_values(tokens * heads * dim_k).iter().map(|x| x * 4.0).collect();
        let sinks: Vec<f32> = random_values(heads).iter().map(|x| x * 4.0).collect();

        let shape = self.shape();
        let (key_bytes, value_bytes) = (shape.key_bytes() as usize, shape.value_bytes() as usize);
        let planes =
            [context.poisoned(key_bytes.div_ceil(4))?, context.poisoned(value_bytes.div_ceil(4))?];
        let layer = KvLayer { shape, keys: planes[0].ptr(), values: planes[1].ptr() };
        let device_q = context.upload(&q)?;
        let before =
            (0..first).step_by(shape.rows).map(|from| (from, first.min(from + shape.rows)));
        for (from, to) in before.chain([(first, self.end())]) {
            let numbers: Vec<u32> = (from as u32..to as u32).collect();
            let (positions, k) = (
                context.upload(&numbers)?,
                context.upload(&k[from * kv_heads * dim_k..to * kv_heads * dim_k])?,
            );
            let v = context.upload(&v[from * kv_heads * dim_v..to * kv_heads * dim_v])?;
            let values = match self.values_in_keys {
                true => HeadInput::none(),
                false => HeadInput::plain(v.ptr()),
            };
            // The kernel also takes queries. Their results are not used here, so the memory can hold anything.
            let q = context.poisoned((to - from) * heads * dim_k)?;
            let inputs = AttentionInputs {
                q: HeadInput::plain(q.ptr()),
                k: HeadInput::plain(k.ptr()),
                key_norm_dim: dim_k,
                v: values,
                heads,
                norm_epsilon: 0.0,
                rotation: None,
                positions: positions.ptr(),
            };
            gpu.attention_inputs(&inputs, &layer, to - from)?;
            gpu.synchronize()?;
        }
        let positions = context.upload(&[first as u32])?;
        let device_sinks = context.upload(&sinks)?;
        let cache = self.cpu_cache(context, &k, &v)?;
        let keys = k.chunks(dim_k).flat_map(|row| stored(row, element)).collect();
        let values = match self.values_in_keys {
            true => k.chunks(dim_k).flat_map(|row| leading(&stored(row, element), dim_v)).collect(),
            false => v.chunks(dim_v).flat_map(|row| stored(row, element)).collect(),
        };
        Ok(Inputs {
            case: self,
            q,
            sinks,
            keys,
            values,
            cache,
            layer,
            _planes: planes,
            device_q,
            device_sinks,
            positions,
        })
    }

    fn cpu_cache(&self, context: &Context, k: &[f32], v: &[f32]) -> Result<KvCache> {
        let Case { kv_heads, dim_k: head_dim_k, dim_v: head_dim_v, values_in_keys, .. } = *self;
        let capacity = self.end();
        let shape = KvShape {
            kv_heads,
            head_dim_k,
            head_dim_v,
            values_in_keys,
            context: capacity,
            window: None,
            rows: capacity,
        };
        let mut cache = KvCache::new(&[shape], cpu_type(self.element))?;
        cache.append(&context.cpu, 0, 0, k, if values_in_keys { &[] } else { v })?;
        Ok(cache)
    }
}

impl Inputs {
    /// Runs twice, into poisoned memory. Compares the result with f64 arithmetic, with the CPU, and with the second
    /// run.
    pub fn check(
        &self,
        context: &Context,
        variation: &Variation,
        splits: Option<usize>,
        tolerance: f64,
    ) -> Result<Outcome> {
        let got = self.run(context, variation, splits)?;
        let again = self.run(context, variation, splits)?;
        let (expected, norms) = self.reference(variation);
        let mut outcome = Outcome::of(&got, &expected, |i| norms[i], tolerance);
        let cpu = self.on_cpu(context, variation);
        let cpu: Vec<f64> = cpu.iter().map(|&x| f64::from(x)).collect();
        let with_cpu = Outcome::of(&got, &cpu, |i| norms[i], 2.0 * tolerance);
        outcome = outcome.worse(prefixed(with_cpu, "against the CPU "));
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let same = Outcome::same(&bits(&again), &bits(&got));
        outcome = outcome.worse(prefixed(same, "second run differs "));
        let label = format!("{:?} {variation:?} splits {splits:?}: ", self.case);
        Ok(prefixed(outcome, &label))
    }

    pub fn run(
        &self,
        context: &Context,
        variation: &Variation,
        splits: Option<usize>,
    ) -> Result<Vec<f32>> {
        let (case, gpu) = (&self.case, &context.gpu);
        let shape = self.layer.shape;
        let (heads, tokens) = (case.heads, case.tokens);
        let splits =
            splits.unwrap_or_else(|| gpu.attention_splits(&shape, heads, tokens, case.end()));
        let size = AttentionScratchSize::of(&shape, heads, tokens, splits);
        let parts = context.poisoned(size.floats.max(1))?;
        let tickets = context.upload(&vec![0_u32; size.tickets.max(1)])?;
        let scratch = AttentionScratch { parts: parts.ptr(), tickets: tickets.ptr(), size };
        let count = tokens * heads * case.dim_v;
        let out = context.poisoned(count)?;
        let what = Attention {
            q: self.device_q.ptr(),
            out: out.ptr(),
            first_position: self.positions.ptr(),
            tokens,
            heads,
            scale: SCALE,
            window: variation.window,
            softcap: variation.softcap,
            sinks: if variation.sinks { self.device_sinks.ptr() } else { DevicePtr::null() },
            inputs: None,
            rounded: None,
        };
        gpu.attention(&what, &self.layer, splits, &scratch)?;
        let left = gpu.download::<u32>(scratch.tickets, size.tickets)?;
        anyhow::ensure!(left.iter().all(|&ticket| ticket == 0), "tickets stay: {left:?}");
        Ok(gpu.download(out.ptr(), count)?)
    }

    /// Returns the result by definition, and the sum of magnitudes that each output was added up from.
    fn reference(&self, variation: &Variation) -> (Vec<f64>, Vec<f64>) {
        let Case { heads, kv_heads, dim_k, dim_v, first, tokens, .. } = self.case;
        // Converts the rows to f64 once, grouped by head.
        let rows = |x: &[f32], dim: usize| {
            let mut by_head: BTreeMap<usize, Vec<Vec<f64>>> = BTreeMap::new();
            for (at, row) in x.chunks(dim).enumerate() {
                let row = row.iter().map(|&x| f64::from(x)).collect();
                by_head.entry(at % kv_heads).or_default().push(row);
            }
            by_head
        };
        let (keys, values) = (rows(&self.keys, dim_k), rows(&self.values, dim_v));
        let (mut out, mut norms) = (Vec::new(), Vec::new());
        for (row, q) in self.q.chunks(dim_k).enumerate().take(tokens * heads) {
            let (position, head) = (first + row / heads, row % heads);
            let kv_head = head / (heads / kv_heads);
            let from = variation.window.map_or(0, |window| (position + 1).saturating_sub(window));
            let q: Vec<f64> = q.iter().map(|&x| f64::from(x)).collect();
            let scores: Vec<f64> =
                keys[&kv_head][from..=position].iter().map(|k| score(&q, k, variation)).collect();
            let sink = variation.sinks.then(|| f64::from(self.sinks[head]));
            let most = scores.iter().copied().chain(sink).fold(f64::MIN, f64::max);
            let sum = scores.iter().chain(&sink).map(|s| (s - most).exp()).sum::<f64>();
            let start = out.len();
            out.resize(start + dim_v, 0.0);
            norms.resize(start + dim_v, 0.0);
            for (s, v) in scores.iter().zip(&values[&kv_head][from..=position]) {
                let weight = (s - most).exp() / sum;
                for (i, v) in v.iter().enumerate() {
                    out[start + i] += weight * v;
                    norms[start + i] += weight * v.abs();
                }
            }
        }
        (out, norms)
    }

    fn on_cpu(&self, context: &Context, variation: &Variation) -> Vec<f32> {
        let Case { heads, dim_v, first, tokens, .. } = self.case;
        let what = CpuAttention {
            window: variation.window,
            softcap: variation.softcap,
            sinks: variation.sinks.then_some(&self.sinks[..]),
            ..CpuAttention::causal(0, heads, first, SCALE)
        };
        let mut out = vec![f32::NAN; tokens * heads * dim_v];
        context.cpu.attention(&self.q, &self.cache, &what, &mut out);
        out
    }
}

fn score(q: &[f64], k: &[f64], variation: &Variation) -> f64 {
    let dot: f64 = q.iter().zip(k).map(|(q, k)| q * k).sum();
    let score = dot * f64::from(SCALE);
    variation.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
}

fn prefixed(mut outcome: Outcome, label: &str) -> Outcome {
    outcome.place.insert_str(0, label);
    outcome
}
