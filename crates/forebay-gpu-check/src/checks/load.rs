//! Checks that after a load, device memory holds the bytes of the files, whichever way they were read.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Result, ensure};
use forebay_engine::load::{DecodedBy, DeviceRequest, LoadRequest, load};
use forebay_engine::pack::{Codec, PackOptions, pack};
use forebay_format::gguf::writer::GgufWriter;
use forebay_format::pack::checksum;
use forebay_format::{Catalog, TensorType};
use forebay_lab::synth::{SynthOptions, synthesize};
use forebay_store::{Interrupt, IoKind, OutputFile};
use tempfile::TempDir;

use crate::bench::{Bench, Measured};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

/// Bytes of device memory that are mapped and unmapped in a measurement.
const POOL_BYTES: usize = 1 << 30;
/// Number of tensors of 34 MiB each in the file of measurements: 4 GiB together.
const TENSORS: usize = 120;
const MODEL: &str = "model.gguf";

pub fn checks() -> Vec<Check> {
    let cases = [
        ("load/warm", IoKind::Auto, false),
        ("load/cold", IoKind::Auto, true),
        ("load/pread", IoKind::Pread, true),
        ("load/mmap", IoKind::Mmap, false),
    ];
    let check = |(name, io, cold)| Check::new(name, move |_| loaded(io, cold));
    let mut checks: Vec<Check> = cases.into_iter().map(check).collect();
    checks.push(Check::new("load/decoded", |_| decoded()));
    for (shape, quantisation, codec, decode) in [
        ("qwen3moe-tiny", "BF16", Codec::Exponents, false),
        ("qwen3moe-tiny", "BF16", Codec::Exponents, true),
        ("deepseek-v3-tiny", "BF16", Codec::Exponents, false),
        ("llama-tiny", "F16", Codec::Exponents, false),
        ("qwen3moe-tiny", "BF16", Codec::Gdeflate, false),
        ("qwen3moe-tiny", "BF16", Codec::Gdeflate, true),
        ("llama-tiny", "F16", Codec::Gdeflate, false),
    ] {
        let decoded = if decode { " decoded" } else { "" };
        let name = format!("load/coded {shape} {quantisation} {codec:?}{decoded}");
        checks.push(Check::new(name, move |_| coded(shape, quantisation, codec, decode)));
    }
    for codec in [Codec::Exponents, Codec::Gdeflate] {
        checks.push(Check::new(format!("load/coded damaged {codec:?}"), move |_| damaged(codec)));
    }
    checks.push(Check::new("load/pool", pool));
    checks
}

/// Writes a file of large tensors with small ones between them, as in real models.
fn write_model(path: &Path) -> Result<()> {
    let mut writer = GgufWriter::new(path);
    writer.set("general.architecture", "llama")?;
    for layer in 0..24 {
        writer.add_tensor(&format!("blk.{layer}.norm"), TensorType::F32, &[77])?;
        writer.add_tensor(&format!("blk.{layer}.gate"), TensorType::Q4_K, &[1024, 2048])?;
        writer.add_tensor(&format!("blk.{layer}.bias"), TensorType::F16, &[3])?;
        writer.add_tensor(&format!("blk.{layer}.down"), TensorType::Q8_0, &[300 + layer, 1024])?;
    }
    let out = OutputFile::create(path)?.into_stream();
    let (mut data, mut random) = (writer.start(out)?, Random::new(4));
    while let Some((_, bytes)) = data.next_tensor() {
        let words = (0..bytes.div_ceil(4)).flat_map(|_| random.next().to_le_bytes());
        data.write(&words.take(bytes as usize).collect::<Vec<u8>>())?;
    }
    Ok(data.finish()?.commit()?)
}

fn loaded(io: IoKind, cold: bool) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    write_model(&path)?;
    checked_load(&path, io, cold, false)
}

/// Writes a pack of a model of this shape.
fn write_pack(folder: &Path, shape: &str, quantisation: &str, codec: Codec) -> Result<PathBuf> {
    let (source, packed) = (folder.join("source.gguf"), folder.join("packed.fbay"));
    let options =
        SynthOptions { quantisation: Some(quantisation.into()), ..SynthOptions::default() };
    synthesize(shape, OutputFile::create(&source)?, &options, &mut |_, _| true)?;
    let options = PackOptions { codec, ..PackOptions::default() };
    pack(&source, OutputFile::create(&packed)?, options, &mut |_, _| true)?;
    Ok(packed)
}

/// Loads a pack with compact weights, which become BF16.
fn decoded() -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let packed = write_pack(folder.path(), "qwen3moe-tiny", "BF16", Codec::Compact)?;
    checked_load(&packed, IoKind::Auto, false, true)
}

/// Loads a pack with coded blocks, which the GPU decodes.
fn coded(shape: &str, quantisation: &str, codec: Codec, decode: bool) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let packed = write_pack(folder.path(), shape, quantisation, codec)?;
    let report = load(&packed, &request(IoKind::Auto, false, decode), &mut |_, _| {})?;
    let device = report.device.expect("it was loaded to a GPU");
    ensure!(device.decoded_by == Some(DecodedBy::Gpu), "decoded by {:?}", device.decoded_by);
    let bytes = device.read_back.map_or(0, |read_back| read_back.bytes);
    Ok(Outcome::same(&[bytes], &[report.weights_bytes]))
}

/// Loads a pack in which a coded chunk is damaged although its checksum is right, as only a malicious writer makes it.
fn damaged(codec: Codec) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let packed = write_pack(folder.path(), "qwen3moe-tiny", "BF16", codec)?;
    let catalog = Catalog::open(&packed)?;
    let index = &catalog.pack.as_ref().expect("a pack").chunks;
    let mut chunks = index.chunks(index.range().start, index.range().end);
    let chunk =
        chunks.find(|chunk| chunk.codec != forebay_codec::Codec::Raw).expect("a coded chunk");
    let mut bytes = std::fs::read(&packed)?;
    let own = chunk.stored_offset as usize..chunk.stored_end() as usize;
    let place = match codec {
        // The first sub-chunk counts one second code more than its bitmaps have.
        Codec::Exponents => {
            let starts = own.start + 32;
            u32::from_le_bytes(bytes[starts..starts + 4].try_into()?) as usize + 2
        }
        // The first byte of a stream says which format it has.
        _ => 0,
    };
    bytes[own.start + place] ^= 1;
    let sum = checksum(&bytes[own]).to_le_bytes();
    let field = |bytes: &[u8], at: usize| {
        let bytes = bytes[at..at + 8].first_chunk().copied().unwrap_or_default();
        u64::from_le_bytes(bytes) as usize
    };
    let table = field(&bytes, 160);
    bytes[table + 24 * chunk.number as usize + 16..][..8].copy_from_slice(&sum);
    let end = (table + field(&bytes, 168)).next_multiple_of(4096);
    let sum = checksum(&bytes[table..end]).to_le_bytes();
    bytes[184..192].copy_from_slice(&sum);
    let sum = checksum(&bytes[..4088]).to_le_bytes();
    bytes[4088..4096].copy_from_slice(&sum);
    std::fs::write(&packed, bytes)?;
    let unchecked =
        |request: LoadRequest| LoadRequest { device: Some(DeviceRequest::new(0)), ..request };
    let request = unchecked(request(IoKind::Auto, false, false));
    let found = match load(&packed, &request, &mut |_, _| {}) {
        Ok(_) => "no error".to_owned(),
        Err(error) => error.to_string(),
    };
    ensure!(found.contains("cannot be decoded"), "{found}");
    Ok(Outcome::same(&[1], &[1]))
}

fn request(io: IoKind, cold: bool, decode: bool) -> LoadRequest {
    let device = Some(DeviceRequest { check: true, ..DeviceRequest::new(0) });
    LoadRequest {
        io,
        cold,
        limit: false,
        repeat: 2,
        verify: true,
        decode,
        device,
        recorder: None,
        interrupt: Interrupt::new(),
    }
}

fn checked_load(path: &Path, io: IoKind, cold: bool, decode: bool) -> Result<Outcome> {
    // With these options, a wrong byte is an error.
    let report = load(path, &request(io, cold, decode), &mut |_, _| {})?;
    let read_back = report.device.and_then(|device| device.read_back);
    let bytes = read_back.map_or(0, |read_back| read_back.bytes);
    Ok(Outcome::same(&[bytes], &[report.weights_bytes]))
}

/// Checks that mapped memory keeps its bytes while the pool grows and shrinks.
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
    let pool = |megabytes: usize| {
        let name = format!("pool/grow and shrink/{megabytes} MiB chunks");
        Bench::new(name, move |context| map_and_unmap(context, megabytes << 20))
    };
    let rings = [(1, 32), (1, 64), (1, 128), (2, 64), (2, 128), (2, 256), (4, 128), (4, 256)];
    // The folder is deleted after the last measurement.
    let folder: Rc<OnceCell<TempDir>> = Rc::default();
    let load = |(piece, ring): (usize, usize)| {
        let (name, folder) = (format!("load/warm/{piece} MiB of {ring} MiB"), Rc::clone(&folder));
        Bench::new(name, move |_| warm(&folder, piece << 20, ring << 20))
    };
    sizes.into_iter().map(pool).chain(rings.into_iter().map(load)).collect()
}

/// Writes the file of all measurements, which is then in the page cache.
fn write_large_model() -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join(MODEL);
    let mut writer = GgufWriter::new(&path);
    writer.set("general.architecture", "llama")?;
    for number in 0..TENSORS {
        writer.add_tensor(&format!("{number}"), TensorType::Q8_0, &[8192, 4096])?;
    }
    let out = OutputFile::create(&path)?.into_stream();
    let (mut data, mut random) = (writer.start(out)?, Random::new(5));
    let noise: Vec<u8> = (0..1 << 18).flat_map(|_| random.next().to_le_bytes()).collect();
    while let Some((_, bytes)) = data.next_tensor() {
        let mut left = bytes as usize;
        while left > 0 {
            let length = left.min(noise.len());
            data.write(&noise[..length])?;
            left -= length;
        }
    }
    data.finish()?.commit()?;
    Ok(folder)
}

/// Measures the best of several loads of a cached file. Other work on the machine can only slow a load down.
fn warm(folder: &OnceCell<TempDir>, piece_bytes: usize, ring_bytes: usize) -> Result<Measured> {
    let folder = match folder.get() {
        Some(folder) => folder,
        None => {
            let written = write_large_model()?;
            folder.get_or_init(|| written)
        }
    };
    let device = Some(DeviceRequest { piece_bytes, ring_bytes, ..DeviceRequest::new(0) });
    let (io, repeat) = (IoKind::Auto, 5);
    let request = LoadRequest {
        io,
        cold: false,
        limit: false,
        repeat,
        verify: true,
        decode: false,
        device,
        recorder: None,
        interrupt: Interrupt::new(),
    };
    let report = load(&folder.path().join(MODEL), &request, &mut |_, _| {})?;
    let seconds = report.runs.iter().map(|run| run.statistics.seconds);
    let seconds = seconds.fold(f64::INFINITY, f64::min);
    Ok(Measured { seconds, bytes: report.weights_bytes as f64, flops: 0.0 })
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
