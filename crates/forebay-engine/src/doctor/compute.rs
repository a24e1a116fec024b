//! Memory bandwidth, and the rate of kernels that read weights which no cache holds.

use std::time::{Duration, Instant};

use forebay_codec::{Compact, Decoder, Encoder, Encoding, encode_compact};
use forebay_compute::{Activations, Arithmetic, Cpu, Isa, MatmulJob, Matrix};
use forebay_format::TensorType;
use forebay_format::pack::CODED_CHUNK_BYTES_MAX;
use forebay_format::random_weights::Content;
use forebay_ops::RowKind;
use forebay_store::{Arena, Interrupt, last_cache_bytes};
use serde::Serialize;
use tracing::field::Empty;

use super::DoctorError;
use super::{DecoderRate, KernelRate};
use crate::memory::free_bytes;
use crate::statistics::median;

const COLS: usize = 4096;
const ROUNDS: usize = 9;
/// Tokens of the prompt products. With these tokens and rows, a round takes some tens of milliseconds on two cores.
const PROMPT_TOKENS: usize = 128;
const PROMPT_ROWS: usize = 4096;
const PROMPT_ROUNDS: usize = 3;
/// Number of chunks that the measurement of a decoder goes through. They do not fit into a core's cache.
const DECODED_CHUNKS: usize = 32;
/// Smallest size of the weights in bytes. They are larger if the last-level cache is large.
const WEIGHTS_BYTES: usize = 256 << 20;
/// Type of the weights that the CPU multiplies beside copies.
pub const BESIDE_TYPE: TensorType = TensorType::Q4_K;
/// Weight types that models use.
pub(super) const TYPES: [TensorType; 11] = [
    TensorType::Q4_K,
    TensorType::Q5_K,
    TensorType::Q6_K,
    TensorType::Q2_K,
    TensorType::Q3_K,
    TensorType::Q4_0,
    TensorType::Q8_0,
    TensorType::IQ4_NL,
    TensorType::IQ4_XS,
    TensorType::MXFP4,
    TensorType::BF16,
];

/// Rates of plain memory accesses by all threads.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct MemoryRate {
    pub read_bytes_per_second: f64,
    /// Bytes copied per second. Each byte is read once and written once.
    pub copy_bytes_per_second: f64,
}

/// Rates of memory and processor.
#[derive(Debug, Clone, Serialize)]
pub struct ComputeReport {
    pub threads: usize,
    pub isa: String,
    /// Bytes of memory that every measurement goes through.
    pub working_set_bytes: usize,
    pub memory: MemoryRate,
    pub kernels: Vec<KernelRate>,
    /// Rates of the decoders of packs' chunks, on one core.
    pub decoders: Vec<DecoderRate>,
}

pub(super) fn measure(interrupt: &Interrupt) -> Result<ComputeReport, DoctorError> {
    // After an interrupt, measurements are cut short and their results are discarded.
    let cpu = Cpu::new(0, Isa::selected()?, Arithmetic::Fast).stopping_on(interrupt.flag());
    let bytes = working_set();
    let arena = reserve(bytes, interrupt)?;
    let mut slot = arena.carve(arena.bytes())?;
    let memory = bandwidth(&cpu, slot.as_mut_slice());
    interrupt.check()?;
    let mut kernels = Vec::new();
    for ty in
        TYPES.into_iter().filter(|&ty| Cpu::supports(ty) && Content::weights(ty, 1.0).is_some())
    {
        let kernel_type = ty.name();
        let span = tracing::debug_span!("doctor_case", kernel_type, bytes_per_second = Empty);
        let _entered = span.enter();
        fill(ty, slot.as_mut_slice(), interrupt);
        let bytes_per_second = kernel(&cpu, ty, slot.as_slice());
        span.record("bytes_per_second", bytes_per_second);
        kernels.push(KernelRate {
            name: kernel_type.to_owned(),
            bytes_per_second,
            prompt_multiply_adds_per_second: Some(prompt(&cpu, ty, slot.as_slice())),
        });
        interrupt.check()?;
    }
    Ok(ComputeReport {
        threads: cpu.pool().threads(),
        isa: cpu.isa().to_string(),
        working_set_bytes: bytes,
        memory,
        kernels,
        decoders: decoders(interrupt)?,
    })
}

/// Measures the decoders with chunks of compact BF16 as packs have them, on one core.
fn decoders(interrupt: &Interrupt) -> Result<Vec<DecoderRate>, DoctorError> {
    let of = Compact::C2048;
    let chunk = CODED_CHUNK_BYTES_MAX as usize / of.bytes();
    let mut weights = vec![0; DECODED_CHUNKS * chunk * of.plain_bytes()];
    fill(TensorType::BF16, &mut weights, interrupt);
    let mut blocks = vec![0; DECODED_CHUNKS * chunk * of.bytes()];
    if encode_compact(of, &weights, &mut blocks) != Ok(true) {
        return Ok(Vec::new());
    }
    let encodings =
        [Encoding::Exponents(of.into()), Encoding::Zstd { level: 3 }, Encoding::Gdeflate];
    let mut rates = Vec::new();
    for encoding in encodings {
        let (mut encoder, mut decoder) = (Encoder::new(encoding), Decoder::default());
        let mut chunks = Vec::new();
        for bytes in blocks.chunks(chunk * of.bytes()) {
            let mut encoded = Vec::new();
            if encoder.encode(bytes, &mut encoded).is_ok() {
                chunks.push(encoded);
            }
        }
        let mut decoded = vec![0; chunk * of.bytes()];
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            let started = Instant::now();
            for encoded in &chunks {
                let result = decoder.decode(encoding.codec(), encoded, &mut decoded);
                debug_assert!(result.is_ok(), "what was encoded is decoded");
            }
            let bytes = (chunks.len() * decoded.len()) as f64;
            rounds.push(bytes / started.elapsed().as_secs_f64());
            interrupt.check()?;
        }
        let codec = encoding.codec().name().to_owned();
        rates.push(DecoderRate { codec, bytes_per_second: median(rounds) });
    }
    Ok(rates)
}

/// Rates that are measured several times to see if the machine is steady.
#[derive(Debug, Clone, Copy)]
pub(super) struct SteadyRates {
    pub memory_bytes_per_second: f64,
    pub kernel_bytes_per_second: f64,
}

impl SteadyRates {
    /// Measures the rates as [`measure`] does, but for one type only.
    pub(super) fn measure(interrupt: &Interrupt) -> Result<SteadyRates, DoctorError> {
        let cpu = Cpu::new(0, Isa::selected()?, Arithmetic::Fast).stopping_on(interrupt.flag());
        let arena = reserve(working_set(), interrupt)?;
        let mut slot = arena.carve(arena.bytes())?;
        let memory_bytes_per_second = read_rate(&cpu, slot.as_slice());
        interrupt.check()?;
        fill(BESIDE_TYPE, slot.as_mut_slice(), interrupt);
        let kernel_bytes_per_second = kernel(&cpu, BESIDE_TYPE, slot.as_slice());
        interrupt.check()?;
        Ok(SteadyRates { memory_bytes_per_second, kernel_bytes_per_second })
    }

    /// Returns the same rates from a whole report, or `None` if the report lacks the kernel.
    pub(super) fn of(report: &ComputeReport) -> Option<SteadyRates> {
        let kernel = report.kernels.iter().find(|kernel| kernel.name == BESIDE_TYPE.name())?;
        Some(SteadyRates {
            memory_bytes_per_second: report.memory.read_bytes_per_second,
            kernel_bytes_per_second: kernel.bytes_per_second,
        })
    }
}

/// Measures one token's products while `copy` runs on another thread. Returns the bytes of weights per second, and the
/// result of `copy`. `copy` must spend the last `time` before it returns on copies.
pub(super) fn beside<T: Send>(
    time: Duration,
    copy: impl FnOnce() -> T + Send,
    interrupt: &Interrupt,
) -> Result<(f64, T), DoctorError> {
    let cpu = Cpu::new(0, Isa::selected()?, Arithmetic::Fast);
    let arena = reserve(working_set(), interrupt)?;
    let mut slot = arena.carve(arena.bytes())?;
    fill(BESIDE_TYPE, slot.as_mut_slice(), interrupt);
    interrupt.check()?;
    let mut product = Product::new(&cpu, BESIDE_TYPE, slot.as_slice());
    let (rounds, (copied, end)) = std::thread::scope(|scope| {
        let copying = scope.spawn(|| {
            let copied = copy();
            (copied, Instant::now())
        });
        let mut rounds = Vec::new();
        while !copying.is_finished() {
            let started = Instant::now();
            product.compute(&cpu);
            rounds.push((started, started.elapsed()));
        }
        let copied = copying.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (rounds, copied)
    });
    // Excludes the start and the end of `copy`, where it allocates and frees memory.
    let within = |started: &Instant, spent: &Duration| {
        end.duration_since(*started) < time && end.duration_since(*started + *spent) > time / 8
    };
    let during = rounds.iter().filter(|(started, spent)| within(started, spent));
    let seconds = median(during.map(|(_, spent)| spent.as_secs_f64()));
    // If no round lies in that window, the processor is so slow that the copies make no difference to it.
    let seconds = if seconds > 0.0 { seconds } else { rounds[0].1.as_secs_f64() };
    Ok((product.w.data.len() as f64 / seconds, copied))
}

/// Returns eight times the size of the last-level cache, as far as memory allows. Twice the size was too little on a
/// server with a cache of 300 MiB. The cache still held so much of it that the rate was 1.7 times that of a large
/// model's weights.
fn working_set() -> usize {
    let wanted = (8 * last_cache_bytes()).max(WEIGHTS_BYTES);
    let most = (free_bytes() / 4).max(16 << 20) as usize;
    wanted.min(most) / (1 << 20) * (1 << 20)
}

/// Reserves memory. On a busy machine, some gigabytes may take many seconds.
fn reserve(bytes: usize, interrupt: &Interrupt) -> Result<Arena, DoctorError> {
    let arena = Arena::map(bytes)?;
    arena.make_resident_unless(interrupt)?;
    Ok(arena)
}

/// Returns the least time of several rounds in seconds. The round before them does not count.
fn fastest(mut work: impl FnMut()) -> f64 {
    fastest_of(ROUNDS, &mut work)
}

fn fastest_of(rounds: usize, work: &mut dyn FnMut()) -> f64 {
    work();
    let mut time = || {
        let started = Instant::now();
        work();
        started.elapsed().as_secs_f64()
    };
    (0..rounds).map(|_| time()).fold(f64::INFINITY, f64::min)
}

/// Returns the bytes per second of reading memory with all threads.
fn read_rate(cpu: &Cpu, memory: &[u8]) -> f64 {
    let seconds = fastest(|| {
        cpu.pool().for_each_chunk(memory.len(), 256 << 10, |range| {
            let words = memory[range].as_chunks::<8>().0;
            let sum = words.iter().fold(0, |sum, word| sum ^ u64::from_le_bytes(*word));
            std::hint::black_box(sum);
        });
    });
    memory.len() as f64 / seconds
}

fn bandwidth(cpu: &Cpu, memory: &mut [u8]) -> MemoryRate {
    let read_bytes_per_second = read_rate(cpu, memory);
    let half = memory.len() / 2;
    let (from, to) = memory.split_at_mut(half);
    let copied = fastest(|| {
        cpu.pool().for_each_chunk_mut(&mut to[..half], 256 << 10, |_, start, chunk| {
            chunk.copy_from_slice(&from[start..start + chunk.len()]);
        });
    });
    MemoryRate { read_bytes_per_second, copy_bytes_per_second: half as f64 / copied }
}

/// Fills memory with weights of a type: some random rows, repeated. An interrupt stops this early.
pub(super) fn fill(ty: TensorType, memory: &mut [u8], interrupt: &Interrupt) {
    const SOME: usize = 4 << 20;
    let row = ty.row_bytes(COLS as u64).unwrap_or(1) as usize;
    let some = SOME.min(memory.len()) / row * row;
    if let Some(content) = Content::weights(ty, 0.02) {
        content.fill(1, 0, &mut memory[..some]);
    }
    let (first, rest) = memory.split_at_mut(some);
    for chunk in rest.chunks_mut(some).take_while(|_| !interrupt.is_requested()) {
        chunk.copy_from_slice(&first[..chunk.len()]);
    }
}

/// Returns the weights times tokens per second of a product with as many tokens as a prompt has.
fn prompt(cpu: &Cpu, ty: TensorType, memory: &[u8]) -> f64 {
    let row_bytes = ty.row_bytes(COLS as u64).unwrap_or(1) as usize;
    let rows = PROMPT_ROWS.min(memory.len() / row_bytes);
    let w = Matrix { ty, rows, cols: COLS, data: &memory[..rows * row_bytes] };
    let x: Vec<f32> = (0..PROMPT_TOKENS * COLS).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut activations = Activations::new();
    activations.prepare(cpu, &x, PROMPT_TOKENS, COLS, &[ty]);
    let mut out = vec![0.0; rows * PROMPT_TOKENS];
    let kind = RowKind::Prompt;
    let mut work =
        || cpu.matmul(&mut [MatmulJob { w, x: &activations, tokens: None, kind, out: &mut out }]);
    let seconds = fastest_of(PROMPT_ROUNDS, &mut work);
    (rows * COLS * PROMPT_TOKENS) as f64 / seconds
}

/// Product of one token with weights in memory.
struct Product<'a> {
    w: Matrix<'a>,
    activations: Activations,
    out: Vec<f32>,
}

impl<'a> Product<'a> {
    fn new(cpu: &Cpu, ty: TensorType, memory: &'a [u8]) -> Product<'a> {
        let row_bytes = ty.row_bytes(COLS as u64).unwrap_or(1) as usize;
        let rows = memory.len() / row_bytes;
        let w = Matrix { ty, rows, cols: COLS, data: &memory[..rows * row_bytes] };
        let x: Vec<f32> = (0..COLS).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut activations = Activations::new();
        activations.prepare(cpu, &x, 1, COLS, &[ty]);
        Product { w, activations, out: vec![0.0; rows] }
    }

    fn compute(&mut self, cpu: &Cpu) {
        let Product { w, activations, out } = self;
        let kind = RowKind::Decode;
        cpu.matmul(&mut [MatmulJob { w: *w, x: activations, tokens: None, kind, out }]);
    }
}

/// Returns the bytes of weights per second of one token's product.
fn kernel(cpu: &Cpu, ty: TensorType, memory: &[u8]) -> f64 {
    let mut product = Product::new(cpu, ty, memory);
    let seconds = fastest(|| product.compute(cpu));
    product.w.data.len() as f64 / seconds
}
