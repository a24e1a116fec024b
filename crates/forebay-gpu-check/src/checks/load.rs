//! Loads: what lies in device memory afterwards is what the files have, whichever way it came.

use std::path::Path;

use anyhow::{Result, ensure};
use forebay_engine::load::{DeviceRequest, LoadRequest, load};
use forebay_format::TensorType;
use forebay_format::gguf::writer::GgufWriter;
use forebay_store::IoKind;

use crate::bench::{Bench, Measured};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

/// Device memory that is mapped and given back in a measurement.
const POOL_BYTES: usize = 1 << 30;

pub fn checks() -> Vec<Check> {
    let cases = [
        ("load/warm", IoKind::Auto, false),
        ("load/cold", IoKind::Auto, true),
        ("load/pread", IoKind::Pread, true),
        ("load/mmap", IoKind::Mmap, false),
    ];
    let check = |(name, io, cold)| Check::new(name, move |_| loaded(io, cold));
    let mut checks: Vec<Check> = cases.into_iter().map(check).collect();
    checks.push(Check::new("load/pool", pool));
    checks
}

/// A file of large tensors with small ones between them, as models have.
fn write_model(path: &Path) -> Result<()> {
    let mut writer = GgufWriter::new(path);
    writer.set("general.architecture", "llama")?;
    for layer in 0..24 {
        writer.add_tensor(&format!("blk.{layer}.norm"), TensorType::F32, &[77])?;
        writer.add_tensor(&format!("blk.{layer}.gate"), TensorType::Q4_K, &[1024, 2048])?;
        writer.add_tensor(&format!("blk.{layer}.bias"), TensorType::F16, &[3])?;
        writer.add_tensor(&format!("blk.{layer}.down"), TensorType::Q8_0, &[300 + layer, 1024])?;
    }
    let (mut data, mut random) = (writer.start()?, Random::new(4));
    while let Some((_, bytes)) = data.next_tensor() {
        let words = (0..bytes.div_ceil(4)).flat_map(|_| random.next().to_le_bytes());
        data.write(&words.take(bytes as usize).collect::<Vec<u8>>())?;
    }
    Ok(data.finish()?)
}

fn loaded(io: IoKind, cold: bool) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    write_model(&path)?;
    let device = Some(DeviceRequest { ordinal: 0, vram_bytes: None, check: true });
    let request = LoadRequest { io, cold, repeat: 2, verify: true, device, recorder: None };
    // A byte that differs is an error.
    let report = load(&path, &request, &mut |_, _| {})?;
    let read_back = report.device.and_then(|device| device.read_back);
    let bytes = read_back.map_or(0, |read_back| read_back.bytes);
    Ok(Outcome::same(&[bytes], &[report.weights_bytes]))
}

/// What is mapped keeps its bytes while the pool grows and shrinks.
fn pool(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let chunk = 2 << 20;
    let mut pool = gpu.weights_pool(16 * chunk, chunk)?;
    pool.grow(gpu, 3 * chunk)?;
    ensure!(pool.bytes() == 3 * chunk || !pool.is_elastic(), "{} bytes", pool.bytes());
    gpu.fill(pool.ptr(), 7, 3 * chunk)?;
    pool.grow(gpu, 16 * chunk)?;
    gpu.fill(pool.ptr().offset(3 * chunk), 9, 13 * chunk)?;
    gpu.synchronize()?;
    pool.shrink(gpu, 2 * chunk + 1)?;
    pool.grow(gpu, 4 * chunk)?;
    let found = gpu.download(pool.ptr(), 3 * chunk)?;
    Ok(Outcome::same(&found, &vec![7_u8; 3 * chunk]))
}

pub fn benches() -> Vec<Bench> {
    let sizes = [2, 16, 64, 256];
    let bench = |megabytes: usize| {
        let name = format!("pool/grow and shrink/{megabytes} MiB chunks");
        Bench::new(name, move |context| map_and_unmap(context, megabytes << 20))
    };
    sizes.into_iter().map(bench).collect()
}

fn map_and_unmap(context: &Context, chunk_bytes: usize) -> Result<Measured> {
    let gpu = &context.gpu;
    let mut pool = gpu.weights_pool(POOL_BYTES, chunk_bytes)?;
    ensure!(pool.is_elastic(), "this driver cannot map device memory");
    let mut samples = Vec::new();
    for _ in 0..9 {
        let started = std::time::Instant::now();
        pool.grow(gpu, POOL_BYTES)?;
        pool.shrink(gpu, 0)?;
        samples.push(started.elapsed().as_secs_f64());
    }
    samples.sort_by(f64::total_cmp);
    Ok(Measured { seconds: samples[samples.len() / 2], bytes: POOL_BYTES as f64, flops: 0.0 })
}
