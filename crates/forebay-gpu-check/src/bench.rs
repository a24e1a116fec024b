//! Measures kernels and compares them with the speed of device memory.

use anyhow::Result;
use forebay_cuda::{CudaError, DevicePtr, Timer};
use serde_json::{Value, json};

use crate::harness::Context;

/// Number of samples, of which the median is reported.
const REPETITIONS: usize = 25;
/// More bytes than any L2 cache holds, so that no copy of the weights is still cached when its turn comes again.
pub const ROTATION_BYTES: usize = 512 << 20;

/// Time and work of one run of a kernel.
pub struct Measured {
    pub seconds: f64,
    /// Minimum number of bytes that the kernel must read and write.
    pub bytes: f64,
    /// Number of multiplications and additions, if they are the limit.
    pub flops: f64,
}

type Run = Box<dyn Fn(&Context) -> Result<Measured>>;

/// A named measurement: one kernel with one shape.
pub struct Bench {
    pub name: String,
    run: Run,
}

impl Bench {
    pub fn new(
        name: impl Into<String>,
        run: impl Fn(&Context) -> Result<Measured> + 'static,
    ) -> Bench {
        Bench { name: name.into(), run: Box::new(run) }
    }
}

/// Returns the median seconds of one call of `work`, which gets the number of the repetition.
///
/// Each sample is several calls in a row, so that the previous call hides the launch overhead, as in a model.
pub fn median_seconds(
    context: &Context,
    mut work: impl FnMut(usize) -> Result<(), CudaError>,
) -> Result<f64> {
    const CALLS: usize = 8;
    let timer = Timer::new(&context.gpu)?;
    let mut turn = 0;
    let mut sample = || {
        let seconds = timer.time(&context.gpu, || {
            (0..CALLS).try_for_each(|_| {
                turn += 1;
                work(turn)
            })
        });
        seconds.map(|seconds| seconds / CALLS as f64)
    };
    for _ in 0..3 {
        sample()?;
    }
    let mut samples = (0..REPETITIONS).map(|_| sample()).collect::<Result<Vec<_>, _>>()?;
    samples.sort_by(f64::total_cmp);
    Ok(samples[REPETITIONS / 2])
}

/// Returns the measured bytes per second of reading and of copying (read and written bytes together).
fn memory_speed(context: &Context) -> Result<(f64, f64)> {
    let gpu = &context.gpu;
    let bytes = 1 << 30;
    let (from, to) = (gpu.allocate(bytes)?, gpu.allocate(bytes)?);
    let words = gpu.allocate(4 * gpu.read_all_words())?;
    gpu.fill(from.ptr(), 1, bytes)?;
    let read = median_seconds(context, |_| gpu.read_all(from.ptr(), bytes, words.ptr()))?;
    let copy = median_seconds(context, |_| gpu.copy(from.ptr(), to.ptr(), bytes))?;
    Ok((bytes as f64 / read, 2.0 * bytes as f64 / copy))
}

/// Copies of one buffer, together larger than the L2 cache.
pub struct Rotation {
    memory: forebay_cuda::DeviceMemory,
    stride: usize,
    copies: usize,
}

impl Rotation {
    pub fn new(context: &Context, data: &[u8]) -> Result<Rotation> {
        let stride = data.len().next_multiple_of(256);
        let copies = ROTATION_BYTES.div_ceil(stride).max(2);
        let memory = context.gpu.allocate(stride * copies)?;
        context.gpu.upload(data, memory.ptr())?;
        for copy in 1..copies {
            context.gpu.copy(memory.ptr(), memory.ptr().offset(copy * stride), data.len())?;
        }
        Ok(Rotation { memory, stride, copies })
    }

    pub fn turn(&self, number: usize) -> DevicePtr<u8> {
        self.memory.ptr().offset(number % self.copies * self.stride)
    }
}

/// Runs all measurements and prints their results.
pub fn run(context: &Context, benches: &[Bench]) -> Result<Value> {
    let (read, copy) = memory_speed(context)?;
    println!("device memory: read {:.0} GB/s, copy {:.0} GB/s (both ways)", read / 1e9, copy / 1e9);
    let mut rows = Vec::new();
    for bench in benches {
        match (bench.run)(context) {
            Ok(measured) => {
                let rate = measured.bytes / measured.seconds;
                let tflops = measured.flops / measured.seconds / 1e12;
                let (micros, gigabytes, share) =
                    (measured.seconds * 1e6, rate / 1e9, rate / read * 100.0);
                println!(
                    "{:<44} {micros:9.1} us {gigabytes:8.1} GB/s ({share:5.1} % of read) {tflops:7.2} TFLOP/s",
                    bench.name
                );
                rows.push(json!({ "name": bench.name, "seconds": measured.seconds,
                    "bytes_per_second": rate, "share_of_read": rate / read, "tflops": tflops }));
            }
            Err(error) => {
                println!("{:<44} error: {error:#}", bench.name);
                rows.push(json!({ "name": bench.name, "error": format!("{error:#}") }));
            }
        }
    }
    Ok(json!({ "gpu": context.describe(), "read_bytes_per_second": read,
        "copy_bytes_per_second": copy, "benches": rows }))
}
