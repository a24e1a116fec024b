//! Rates of matrix products for each weight type, beside the memory bandwidth of the same run.
//!
//! `cargo run --release -p forebay-compute --example matmul_bench [threads=N] [isa=NAME]
//! [tokens=N,N] [rows=N] [cols=N] [rounds=N] [clock=cpu] [TYPE]...`
//!
//! The weights of one measurement are larger than the caches. For one token, the rate is bytes of
//! weights per second, with its share of the bandwidth of plain reading. For many tokens, it is
//! multiply-adds per second.
//!
//! `clock=cpu` uses the processor time of this process instead of wall-clock time. This measures
//! kernels that memory does not limit, even on a busy machine.

use std::time::{Duration, Instant};

use forebay_compute::{Activations, Arithmetic, Cpu, Isa, MatmulJob, Matrix};
use forebay_format::TensorType;
use forebay_ops::RowKind;

#[path = "../tests/weights/mod.rs"]
#[allow(dead_code, reason = "only a part of the tests' helper is of use here")]
mod weights;

/// Size in bytes of the weights that one token is multiplied with.
const STREAM_BYTES: usize = 160 << 20;

struct Options {
    threads: Vec<usize>,
    isa: Isa,
    tokens: Vec<usize>,
    rows: usize,
    cols: usize,
    rounds: usize,
    processor_clock: bool,
    types: Vec<TensorType>,
}

fn options() -> Options {
    let mut options = Options {
        threads: vec![1, forebay_compute::default_threads()],
        isa: Isa::selected().expect("FOREBAY_ISA"),
        tokens: vec![512],
        rows: 1024,
        cols: 4096,
        rounds: 5,
        processor_clock: false,
        types: vec![],
    };
    let numbers = |list: &str| list.split(',').map(|n| n.parse().expect("a number")).collect();
    for argument in std::env::args().skip(1) {
        match argument.split_once('=') {
            Some(("threads", list)) => options.threads = numbers(list),
            Some(("tokens", list)) => options.tokens = numbers(list),
            Some(("rounds", count)) => options.rounds = count.parse().expect("a number"),
            Some(("rows", count)) => options.rows = count.parse().expect("a number"),
            Some(("cols", count)) => options.cols = count.parse().expect("a number"),
            Some(("clock", "cpu")) => options.processor_clock = true,
            Some(("isa", name)) => options.isa = name.parse().expect("a family"),
            _ => options.types.push(TensorType::from_name(&argument).expect("a weight type")),
        }
    }
    if options.types.is_empty() {
        let known = |ty: &&TensorType| Cpu::supports(**ty) && !ty.name().starts_with("F8");
        options.types = TensorType::all().iter().filter(known).copied().collect();
    }
    options.threads.dedup();
    options
}

/// Returns the processor time that this process has used.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes only to the given structure.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the shortest time of several rounds: the machine's speed without interference.
fn fastest(options: &Options, threads: usize, mut work: impl FnMut()) -> Duration {
    work();
    let mut time = |()| {
        if options.processor_clock {
            let start = processor_time();
            work();
            return (processor_time() - start) / threads as u32;
        }
        let start = Instant::now();
        work();
        start.elapsed()
    };
    (0..options.rounds).map(|_| time(())).min().unwrap_or_default()
}

/// Returns the rate at which the pool's threads read all of `data`, in bytes per second.
fn bandwidth(options: &Options, cpu: &Cpu, data: &[u8]) -> f64 {
    let time = fastest(options, cpu.pool().threads(), || {
        cpu.pool().for_each_chunk(data.len(), 256 << 10, |range| {
            let words = data[range].as_chunks::<8>().0;
            let sum = words.iter().fold(0, |sum, w| sum ^ u64::from_le_bytes(*w));
            std::hint::black_box(sum);
        });
    });
    data.len() as f64 / time.as_secs_f64()
}

fn product(options: &Options, cpu: &Cpu, w: Matrix<'_>, tokens: usize, kind: RowKind) -> Duration {
    let mut random = weights::Random::new(2);
    let x = random.gaussians(tokens * w.cols);
    let mut activations = Activations::new();
    activations.prepare(cpu, &x, tokens, w.cols, &[w.ty]);
    let mut out = vec![0.0; tokens * w.rows];
    fastest(options, cpu.pool().threads(), || {
        cpu.matmul(&mut [MatmulJob { w, x: &activations, tokens: None, kind, out: &mut out }]);
    })
}

fn main() {
    let options = options();
    let cpus: Vec<Cpu> =
        options.threads.iter().map(|&n| Cpu::new(n, options.isa, Arithmetic::Fast)).collect();
    let mut random = weights::Random::new(1);
    println!("{:8}{:>8}  measure", "type", "threads");
    for &ty in &options.types {
        let row_bytes = ty.row_bytes(options.cols as u64).expect("whole blocks") as usize;
        let rows = STREAM_BYTES / row_bytes;
        // A few random rows are repeated, because making all of them would take longer than
        // measuring.
        let elements = 64 * options.cols;
        let some = match ty.compact() {
            None => weights::random_weights(ty, elements, &mut random),
            Some(_) => weights::gaussian_bf16(ty, elements, &mut random),
        };
        let data: Vec<u8> = some.iter().cycle().take(rows * row_bytes).copied().collect();
        for cpu in &cpus {
            let w = Matrix { ty, rows, cols: options.cols, data: &data };
            print!("{:8}{:>8}", ty.name(), cpu.pool().threads());
            if options.rounds <= 100 {
                let limit = bandwidth(&options, cpu, &data);
                let rate =
                    data.len() as f64 / product(&options, cpu, w, 1, RowKind::Decode).as_secs_f64();
                print!("  1 token: {:6.2} GB/s", rate / 1e9);
                print!(" ({:3.0} % of {:5.2})", 100.0 * rate / limit, limit / 1e9);
            }
            for &tokens in &options.tokens {
                let rows = options.rows;
                let w = Matrix { ty, rows, cols: options.cols, data: &data[..rows * row_bytes] };
                for (name, kind) in [("decode", RowKind::Decode), ("prompt", RowKind::Prompt)] {
                    let time = product(&options, cpu, w, tokens, kind).as_secs_f64();
                    let rate = (tokens * options.rows * options.cols) as f64 / time;
                    print!("  {tokens} {name} rows: {:6.1} GMAC/s", rate / 1e9);
                }
            }
            println!();
        }
    }
}
