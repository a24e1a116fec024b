//! Measures the operations between the matrix products: `cargo run --release -p forebay-compute
//! --example ops_bench [threads]`. Rates are the best of several repeats, so that other work on the
//! machine disturbs them least.

use std::hint::black_box;
use std::time::Instant;

use forebay_compute::{
    Arithmetic, Attention, AttentionRun, Cpu, Isa, KvCache, KvLayer, KvShape, RopeConfig,
    RopeLayout, RopeScaling, RopeTable, RouterRule,
};
use forebay_ops::{Gating, KV_BLOCK, KvType, RowKind};

/// Returns the time of the fastest of several runs in seconds.
fn best(mut f: impl FnMut()) -> f64 {
    f();
    let start = Instant::now();
    let mut fastest = f64::INFINITY;
    let mut runs = 0;
    while runs < 5 || (start.elapsed().as_secs_f64() < 0.3 && runs < 20_000) {
        let run = Instant::now();
        f();
        fastest = fastest.min(run.elapsed().as_secs_f64());
        runs += 1;
    }
    fastest
}

fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 504.0).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(0), |arg| arg.parse())?;
    let cpu = Cpu::new(threads, Isa::selected()?, Arithmetic::Fast);
    println!("{}", cpu.describe());
    regions(&cpu);
    elementwise(&cpu)?;
    for (heads, kv_heads, dim) in [(32, 8, 64), (32, 8, 128), (32, 4, 128), (16, 16, 128)] {
        prompt(&cpu, heads, kv_heads, dim);
    }
    for (heads, kv_heads, dim) in [(32, 8, 64), (32, 4, 128), (16, 16, 128)] {
        decode(&cpu, heads, kv_heads, dim);
    }
    Ok(())
}

fn regions(cpu: &Cpu) {
    let rounds = 1000;
    let seconds = best(|| (0..rounds).for_each(|_| cpu.pool().run(&|_| ())));
    println!("empty region, hot: {:.2} us", seconds / f64::from(rounds) * 1e6);
}

fn elementwise(cpu: &Cpu) -> Result<(), Box<dyn std::error::Error>> {
    let (tokens, n) = (512, 2048);
    let (x, y) = (numbers(tokens * n), numbers(tokens * n));
    let mut out = vec![0.0; tokens * n];
    let report = |name: &str, seconds: f64| {
        let rate = (tokens * n) as f64 / seconds / 1e9;
        println!("{name}, {tokens} x {n}: {:.1} us, {rate:.2} G elements/s", seconds * 1e6);
    };
    report("rms_norm", best(|| cpu.rms_norm(&x, &y[..n], 1e-6, black_box(&mut out))));
    for gating in [Gating::Silu, Gating::GeluTanh, Gating::Clamped { alpha: 1.702, limit: 7.0 }] {
        let seconds = best(|| {
            out.copy_from_slice(&x);
            cpu.gate_in_place(gating, black_box(&mut out), &y);
        });
        report(&format!("gate_in_place {gating:?} (with a copy)"), seconds);
    }
    report("add_assign", best(|| cpu.add_assign(black_box(&mut out), &y)));
    let softmax = best(|| {
        out.copy_from_slice(&x);
        cpu.softmax_rows(black_box(&mut out), n);
    });
    report("softmax_rows (with a copy)", softmax);
    let softcap = best(|| {
        out.copy_from_slice(&x);
        cpu.softcap_in_place(black_box(&mut out), 30.0);
    });
    report("softcap_in_place (with a copy)", softcap);
    for layout in [RopeLayout::Interleaved, RopeLayout::Neox] {
        let table = RopeTable::new(&RopeConfig {
            rotary_dim: 64,
            rotary_from: 0,
            theta: 1e4,
            layout,
            scaling: RopeScaling::None,
            frequency_factors: None,
            context: tokens,
        })?;
        let positions: Vec<u32> = (0..tokens as u32).collect();
        let seconds = best(|| cpu.rope(black_box(&mut out), 64, &positions, &table));
        report(&format!("rope {layout:?}"), seconds);
    }
    let one = best(|| cpu.rms_norm(&x[..n], &y[..n], 1e-6, black_box(&mut out[..n])));
    println!("rms_norm, 1 x {n}: {:.2} us", one * 1e6);
    let (mut ids, mut weights) = ([0; 8], [0.0; 8]);
    let rule = RouterRule::softmax(true);
    let route = best(|| cpu.route(&rule, &x[..128], 128, 8, &mut ids, &mut weights).unwrap());
    println!("route 8 of 128, 1 token: {:.2} us", route * 1e6);
    Ok(())
}

/// Returns a cache with `context` positions, and their table.
fn filled(cpu: &Cpu, kv_heads: usize, dim: usize, context: usize) -> (KvCache, Vec<u32>) {
    let shape = KvShape { kv_heads, head_dim_k: dim, head_dim_v: dim, values_in_keys: false };
    let table: Vec<u32> = (1..=context.div_ceil(KV_BLOCK) as u32).collect();
    let layer = KvLayer::new(shape, 0);
    let cache = KvCache::new(&[layer], &[table.len() + 1], KvType::F16);
    let mut cache = cache.expect("the cache fits");
    let rows = numbers(context * kv_heads * dim);
    cache.write(cpu, 0, &table, 0, &rows, &rows);
    (cache, table)
}

fn prompt(cpu: &Cpu, heads: usize, kv_heads: usize, dim: usize) {
    let tokens = 512;
    let (cache, table) = filled(cpu, kv_heads, dim, tokens);
    let q = numbers(tokens * heads * dim);
    let mut out = vec![0.0; q.len()];
    let what = Attention::causal(0, heads, 1.0 / (dim as f32).sqrt());
    let run = AttentionRun { kind: RowKind::Prompt, first_position: 0, tokens, table: &table };
    let seconds = best(|| cpu.attention(&q, &cache, &what, &[run], black_box(&mut out)));
    let products = (tokens * (tokens + 1) / 2 * heads * dim * 2) as f64;
    println!(
        "attention, prompt of {tokens}, {heads}/{kv_heads} heads of {dim}: {:.2} ms, {:.1} G multiply-adds/s for each thread",
        seconds * 1e3,
        products / seconds / 1e9 / cpu.pool().threads() as f64
    );
}

fn decode(cpu: &Cpu, heads: usize, kv_heads: usize, dim: usize) {
    let q = numbers(heads * dim);
    let mut out = vec![0.0; q.len()];
    for context in [128, 1024, 8192] {
        let (cache, table) = filled(cpu, kv_heads, dim, context);
        let what = Attention::causal(0, heads, 1.0 / (dim as f32).sqrt());
        let first_position = context - 1;
        let run = AttentionRun { kind: RowKind::Decode, first_position, tokens: 1, table: &table };
        let seconds = best(|| cpu.attention(&q, &cache, &what, &[run], black_box(&mut out)));
        let bytes = cache.bytes() as f64;
        println!(
            "attention, one token at {context}, {heads}/{kv_heads} heads of {dim}: {:.1} us, {:.1} GB/s of cache",
            seconds * 1e6,
            bytes / seconds / 1e9
        );
    }
}
