//! Measures attention of one token and of prompts, by context. The bytes are those of the visible positions.

use anyhow::Result;
use forebay_cuda::{
    AttentionScratch, DeviceAttention, DeviceKvLayer, DevicePtr, KvLayerShape, KvPool, KvTables,
    PassRows, PromptRun,
};
use forebay_ops::{KV_BLOCK, KvType, RowKind};

use super::super::paged::Tiles;
use crate::bench::{Bench, Measured, ROTATION_BYTES, median_seconds};
use crate::harness::Context;
use crate::random::Random;

/// Numbers of query and key/value heads, of 128 elements each.
const SHAPES: [(usize, usize); 2] = [(32, 8), (32, 4)];

pub fn benches() -> Vec<Bench> {
    let mut benches = Vec::new();
    for (heads, kv_heads) in SHAPES {
        for (element, name) in
            [(KvType::F16, "f16"), (KvType::Q8_0, "q8_0"), (KvType::Q4_0, "q4_0")]
        {
            for context in [1024, 16_384] {
                benches.push(bench("decode", name, element, (heads, kv_heads), (context - 1, 1)));
            }
            for tokens in [512, 4096] {
                benches.push(bench("prompt", name, element, (heads, kv_heads), (0, tokens)));
            }
        }
    }
    // DeepSeek-V2-Lite and DeepSeek-V3.
    for heads in [16, 128] {
        for (element, name) in
            [(KvType::F16, "f16"), (KvType::Q8_0, "q8_0"), (KvType::Q4_0, "q4_0")]
        {
            let spans = [(511, 1), (1023, 1), (4095, 1), (16_383, 1), (16_383, 8), (0, 512)];
            for (first, tokens) in spans {
                benches.push(latent(name, element, heads, (first, tokens)));
            }
        }
    }
    for (heads, position) in [(16, 4095), (16, 16_383), (128, 4095)] {
        benches.push(expanded(heads, position));
    }
    for (element, name) in [(KvType::F16, "f16"), (KvType::Q8_0, "q8_0")] {
        benches.push(windowed(name, element, (64, 8), 64, 128));
        benches.push(windowed(name, element, (8, 4), 256, 1024));
    }
    benches
}

/// Measures one token of a layer that keeps only a window, at a position far beyond the window: gpt-oss and Gemma 3.
fn windowed(
    name: &str,
    element: KvType,
    (heads, kv_heads): (usize, usize),
    dim: usize,
    window: usize,
) -> Bench {
    let context = 16_384;
    let shape = KvLayerShape::new(element, kv_heads, (dim, dim), context);
    let label = format!("attention window {name} {heads}/{kv_heads}x{dim}, {window} of {context}");
    let call = Call { heads, first: context - 1, tokens: 1, window: Some(window) };
    Bench::new(label, move |context| measure(context, &shape, &call))
}

/// Measures rows of 576 that all heads share.
fn latent(name: &str, element: KvType, heads: usize, (first, tokens): (usize, usize)) -> Bench {
    let context = first + tokens;
    let shape = KvLayerShape::new(element, 1, (576, 512), context);
    let shape = KvLayerShape { values_in_keys: true, ..shape };
    let label = format!("attention latent {name} {heads} heads, {tokens} tokens at {context}");
    let call = Call { heads, first, tokens, window: None };
    Bench::new(label, move |context| measure(context, &shape, &call))
}

/// Measures one token over keys of 192 and values of 128 for every head. DeepSeek's attention would be this if latent
/// vectors were expanded.
fn expanded(heads: usize, first: usize) -> Bench {
    let shape = KvLayerShape::new(KvType::F16, heads, (192, 128), first + 1);
    let label = format!("attention latent, expanded f16 {heads} heads, 1 tokens at {first}");
    let call = Call { heads, first, tokens: 1, window: None };
    Bench::new(label, move |context| measure(context, &shape, &call))
}

fn bench(
    family: &str,
    name: &str,
    element: KvType,
    (heads, kv_heads): (usize, usize),
    (first, tokens): (usize, usize),
) -> Bench {
    let context = first + tokens;
    let label = format!("attention {family} {name} {heads}/{kv_heads}x128 at {context}");
    let shape = KvLayerShape::new(element, kv_heads, (128, 128), context);
    let call = Call { heads, first, tokens, window: None };
    Bench::new(label, move |context| measure(context, &shape, &call))
}

/// The queries of one attention call. Up to 8 tokens are generated ones, all at the first position of sequences that share
/// their blocks.
struct Call {
    heads: usize,
    /// Position of the first token.
    first: usize,
    tokens: usize,
    window: Option<usize>,
}

fn measure(context: &Context, shape: &KvLayerShape, call: &Call) -> Result<Measured> {
    let Call { heads, first, tokens, window } = *call;
    let gpu = &context.gpu;
    let block_bytes = shape.block_bytes() as usize;
    let ring = window.map_or(shape.blocks(), |window| shape.blocks_for_window(window, 512));
    // Rotates through the layers, so that no cache is found in L2.
    let layer_bytes = (1 + ring) * block_bytes;
    let layers = ROTATION_BYTES.div_ceil(layer_bytes).clamp(2, 64);
    let memory = gpu.allocate(layers * layer_bytes)?;
    // Every element is a small number in each of the types.
    gpu.fill(memory.ptr(), 0x11, layers * layer_bytes)?;
    let q = context.upload(&Random::new(3).gaussians(tokens * heads * shape.dim_k))?;
    let out = context.poisoned(tokens * heads * shape.dim_v)?;
    let kind = if tokens <= 8 { RowKind::Decode } else { RowKind::Prompt };
    let own = |row: usize| first + if kind == RowKind::Prompt { row } else { 0 };
    let positions = context.upload(&(0..tokens).map(|row| own(row) as u32).collect::<Vec<_>>())?;
    let tables = context.upload(&vec![0_u32; tokens])?;
    let stride = shape.table_stride();
    let numbers: Vec<u32> = (0..stride).map(|n| 1 + (n % ring) as u32).collect();
    let blocks = context.upload(&numbers)?;
    let splits = gpu.attention_splits(shape, heads, kind, first + tokens);
    let run = (kind == RowKind::Prompt).then_some(PromptRun {
        first: 0,
        count: tokens,
        position: first,
        table: 0,
    });
    let tiles = Tiles::new(context, shape, heads, run.into_iter())?;
    let rows = PassRows {
        kind,
        count: tokens,
        positions: positions.ptr(),
        tables: tables.ptr(),
        tiles: tiles.on_device(),
    };
    let size = gpu.attention_scratch(shape, heads, &rows, splits);
    let parts = context.poisoned(size.floats.max(1))?;
    let tickets = context.upload(&vec![0_u32; size.tickets.max(1)])?;
    let scratch = AttentionScratch { parts: parts.ptr(), tickets: tickets.ptr(), size };
    let what = DeviceAttention {
        q: q.ptr(),
        out: out.ptr(),
        rows,
        heads,
        scale: 1.0 / (shape.dim_k as f32).sqrt(),
        window,
        chunked: false,
        softcap: None,
        sinks: DevicePtr::null(),
        inputs: None,
        relative: None,
        chosen: None,
        also: None,
    };
    let seconds = median_seconds(context, |turn| {
        let memory: DevicePtr<u8> = memory.ptr::<u8>().offset(turn % layers * layer_bytes);
        let pool = KvPool { memory, blocks: 1 + ring, block_bytes };
        let tables = KvTables { blocks: blocks.ptr(), stride, count: 1 };
        let layer = DeviceKvLayer { shape: *shape, pool, tables, offset: 0, elsewhere: None };
        gpu.attention(&what, &layer, splits, &scratch)
    })?;
    // Number of pairs of a query and a key that it sees.
    let pairs = match window {
        None => tokens as f64 * (first as f64 + (tokens + 1) as f64 / 2.0),
        Some(window) => (tokens * window) as f64,
    };
    let rows_seen = window.map_or(shape.context, |window| window);
    let reads = if kind == RowKind::Decode { tokens } else { 1 };
    Ok(Measured {
        seconds,
        bytes: (reads * rows_seen * block_bytes) as f64 / KV_BLOCK as f64,
        flops: pairs * heads as f64 * (shape.dim_k + shape.dim_v) as f64 * 2.0,
    })
}
