//! A single attention problem: its inputs, the expected output, and the run on the GPU.

use std::collections::BTreeMap;

use anyhow::Result;
use forebay_compute::{Attention, AttentionRun, KvCache, KvLayer, KvShape, RelativeBias};
use forebay_cuda::{
    DeviceKvLayer, DeviceMemory, DevicePtr, KvLayerShape, PassRows, RelativeBiases,
};
use forebay_ops::{KV_BLOCK, KvType, RowKind};
use half::f16;

use super::super::attention_rows::{Call, attend};
use super::super::paged::{PagedCache, Rows, Tiles};
use crate::harness::{Context, Outcome};
use crate::random::Random;

/// Number of positions for which the cache has room beyond the last one. They stay poisoned.
const SPARE: usize = 5;
const SCALE: f32 = 0.17;

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub element: KvType,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim_k: usize,
    pub dim_v: usize,
    /// True if values are the first elements of keys.
    pub values_in_keys: bool,
    /// The window that the cache keeps, or `None` if it keeps all positions.
    pub kept: Option<usize>,
    pub kind: RowKind,
    /// Position of the first query token.
    pub first: usize,
    pub tokens: usize,
}

/// Rules of masking and scoring.
#[derive(Clone, Copy, Debug)]
pub struct Variation {
    pub window: Option<usize>,
    pub chunked: bool,
    pub softcap: Option<f32>,
    pub sinks: bool,
}

impl Variation {
    pub fn windowed(window: usize, sinks: bool) -> Variation {
        Variation { window: Some(window), sinks, ..Variation::plain() }
    }

    /// Returns the rules of plain causal attention.
    pub fn plain() -> Variation {
        Variation { window: None, chunked: false, softcap: None, sinks: false }
    }

    /// Returns the first position that a token sees.
    pub fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |window| match self.chunked {
            true => position / window * window,
            false => (position + 1).saturating_sub(window),
        })
    }

    pub fn all() -> [Variation; 8] {
        let plain = Variation::plain();
        [
            plain,
            Variation { window: Some(16), ..plain },
            Variation { window: Some(100), sinks: true, ..plain },
            Variation { window: Some(5000), ..plain },
            Variation { softcap: Some(5.0), sinks: true, ..plain },
            Variation { window: Some(1), softcap: Some(30.0), ..plain },
            Variation { window: Some(48), chunked: true, ..plain },
            Variation { window: Some(100), chunked: true, sinks: true, ..plain },
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
    paged: PagedCache,
    device_q: DeviceMemory,
    device_sinks: DeviceMemory,
    rows: Rows,
    tiles: Tiles,
}

/// Rounds a row as the cache does.
fn stored(row: &[f32], element: KvType) -> Vec<f32> {
    match element {
        KvType::F32 => row.to_vec(),
        KvType::F16 => row.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        KvType::Q8_0 => row.chunks(32).flat_map(stored_bytes).collect(),
        KvType::Q4_0 => row.chunks(32).flat_map(stored_nibbles).collect(),
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

impl Case {
    /// Creates a case with a cache that keeps all positions and stores values separately from keys.
    pub fn of(
        element: KvType,
        (heads, kv_heads): (usize, usize),
        (dim_k, dim_v): (usize, usize),
        kind: RowKind,
        (first, tokens): (usize, usize),
    ) -> Case {
        let (values_in_keys, kept) = (false, None);
        Case { element, heads, kv_heads, dim_k, dim_v, values_in_keys, kept, kind, first, tokens }
    }

    fn end(&self) -> usize {
        self.first + self.tokens
    }

    fn shape(&self) -> KvLayerShape {
        let Case { element, kv_heads, dim_k, dim_v, values_in_keys, .. } = *self;
        let context = self.end() + SPARE;
        let shape = KvLayerShape::new(element, kv_heads, (dim_k, dim_v), context);
        KvLayerShape { values_in_keys, ..shape }
    }

    /// Returns the tolerance for what the kernels of this case round.
    pub fn tolerance(&self) -> f64 {
        // Kernels for generated tokens and short heads split queries and weights into two halves.
        match (self.element, self.dim_k <= 256, self.kind == RowKind::Decode) {
            (KvType::F32, ..) | (KvType::F16, true, true) => super::EXACT,
            (KvType::F16, true, false) => super::HALVES,
            (KvType::F16, false, _) => super::LATENT_HALVES,
            (KvType::Q8_0, true, true) => super::BYTES_AS_HALVES,
            (KvType::Q8_0, true, false) => super::BYTES_AND_HALVES,
            (KvType::Q8_0, false, _) => super::LATENT_BYTES,
            // As for q8_0. The reference uses the stored values, so the tolerance covers only rounding outside the
            // cache.
            (KvType::Q4_0, true, true) => super::BYTES_AS_HALVES,
            (KvType::Q4_0, true, false) => super::BYTES_AND_HALVES,
            (KvType::Q4_0, false, _) => super::LATENT_BYTES,
        }
    }

    /// Creates random inputs. The positions before the query tokens are written to the cache first, then their own.
    pub fn inputs(self, context: &Context) -> Result<Inputs> {
        let Case { element, heads, kv_heads, dim_k, dim_v, first, tokens, .. } = self;
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
        let ring = self.kept.map(|window| shape.blocks_for_window(window, tokens));
        let paged = PagedCache::new(context, shape, 1, ring)?;
        let device_q = context.upload(&q)?;
        let (keys, values) = (context.upload(&k)?, context.upload(&v)?);
        let (keys, values) = (keys.ptr::<f32>(), values.ptr::<f32>());
        paged.fill(context, 0, 0..first, keys, values)?;
        let own = first * kv_heads;
        let (keys, values) = (keys.offset(own * dim_k), values.offset(own * dim_v));
        paged.fill(context, 0, first..self.end(), keys, values)?;
        let rows = Rows::run(context, self.kind, 0, first..self.end())?;
        let tiles = rows.tiles(context, &shape, heads)?;
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
            paged,
            device_q,
            device_sinks,
            rows,
            tiles,
        })
    }

    fn cpu_cache(&self, context: &Context, k: &[f32], v: &[f32]) -> Result<KvCache> {
        let Case { kv_heads, dim_k: head_dim_k, dim_v: head_dim_v, values_in_keys, .. } = *self;
        let shape = KvShape { kv_heads, head_dim_k, head_dim_v, values_in_keys };
        let (layer, table) = (KvLayer::new(shape, 0), self.cpu_table());
        let mut cache = KvCache::new(&[layer], &[table.len() + 1], self.element)?;
        cache.write(&context.cpu, 0, &table, 0, k, if values_in_keys { &[] } else { v });
        Ok(cache)
    }

    /// Returns the blocks of the CPU's cache.
    fn cpu_table(&self) -> Vec<u32> {
        (1..=self.end().div_ceil(KV_BLOCK) as u32).collect()
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
        let cpu = self.on_cpu(context, variation, None);
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
        let sinks = if variation.sinks { self.device_sinks.ptr() } else { DevicePtr::null() };
        let call = Call {
            q: self.device_q.ptr(),
            rows: PassRows { tiles: self.tiles.on_device(), ..self.rows.pass() },
            heads: self.case.heads,
            end: self.case.end(),
            scale: SCALE,
            variation: *variation,
            sinks,
            relative: None,
            chosen: None,
            limit: splits,
        };
        attend(context, &call, &self.paged.layer())
    }

    /// Compares attention with biases by distance with the CPU.
    pub fn check_biases(
        &self,
        context: &Context,
        variation: &Variation,
        (rank, extent): (usize, usize),
    ) -> Result<Outcome> {
        let Case { heads, tokens, .. } = self.case;
        let mut random = Random::new((rank + extent) as u64);
        let (mixes, profiles) =
            (random.gaussians(tokens * heads * rank), random.gaussians(rank * extent));
        let relative = RelativeBias { mixes: &mixes, profiles: &profiles, rank };
        let expected = self.on_cpu(context, variation, Some(relative));
        let expected: Vec<f64> = expected.iter().map(|&x| f64::from(x)).collect();
        let divided: Vec<f32> = mixes.iter().map(|x| x / SCALE).collect();
        let (mixes, profiles) = (context.upload(&divided)?, context.upload(&profiles)?);
        let (mixes, profiles) = (mixes.ptr(), profiles.ptr());
        let layer = self.paged.layer();
        let layer = DeviceKvLayer { shape: KvLayerShape { biased: true, ..layer.shape }, ..layer };
        let call = Call {
            q: self.device_q.ptr(),
            rows: self.rows.pass(),
            heads,
            end: self.case.end(),
            scale: SCALE,
            variation: *variation,
            sinks: if variation.sinks { self.device_sinks.ptr() } else { DevicePtr::null() },
            relative: Some(RelativeBiases { mixes, profiles, rank, extent }),
            chosen: None,
            limit: None,
        };
        let got = attend(context, &call, &layer)?;
        // Values are at most 1.
        let outcome = Outcome::of(&got, &expected, |_| 1.0, 2.0 * super::EXACT);
        let label = format!("{:?} {variation:?} {rank} profiles of {extent}: ", self.case);
        Ok(prefixed(outcome, &label))
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
            let from = variation.first_visible(position);
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

    fn on_cpu(
        &self,
        context: &Context,
        variation: &Variation,
        relative: Option<RelativeBias<'_>>,
    ) -> Vec<f32> {
        let Case { heads, dim_v, first, tokens, .. } = self.case;
        let what = Attention {
            window: variation.window,
            chunked: variation.chunked,
            softcap: variation.softcap,
            sinks: variation.sinks.then_some(&self.sinks[..]),
            relative,
            ..Attention::causal(0, heads, SCALE)
        };
        let mut out = vec![f32::NAN; tokens * heads * dim_v];
        let table = self.case.cpu_table();
        let kind = RowKind::Prompt;
        let run = AttentionRun { kind, first_position: first, tokens, table: &table };
        context.cpu.attention(&self.q, &self.cache, &what, &[run], &mut out);
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
