//! Measures the rates of copies to a GPU and of reads in its memory.

use std::time::Duration;

use forebay_cuda::{CudaError, Direction, Gpu, PcieLink, Timer};
use forebay_store::Interrupt;

use super::DoctorError;
use super::disk::Subject;
use super::gpu::{BesideCpu, GpuRates, GpuReport, PcieRates, PinnedCopyRate, none};
use super::{ProfiledRead, compute, cufile_measure, gpu_kernels};
use crate::load::LoadError;

/// Sizes of the measured copies, in bytes.
const COPY_SIZES: [usize; 6] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
const COPY_TIME: Duration = Duration::from_millis(100);
/// Bytes of host memory that smaller copies cycle through.
const COPY_SPAN: usize = 64 << 20;
/// Size of the copies beside the CPU, in bytes. They are large and come from more memory than a cache holds. They go on
/// long enough that whole products fit in that time.
const BESIDE_BYTES: usize = 16 << 20;
const BESIDE_SPAN: usize = 512 << 20;
const BESIDE_TIME: Duration = Duration::from_secs(1);
/// Bytes of device memory that are read or copied: more than any GPU's cache holds.
const MEMORY_BYTES: usize = 1 << 30;
const MEMORY_ROUNDS: usize = 9;

/// Measures the first GPU, with a file for the readers that load to it. If there is no GPU or it fails, the report says
/// so in words, because the rest of the machine can still be measured.
///
/// An interrupted measurement looks like a failed one, so the caller must check `interrupt` afterwards.
pub(crate) fn measure(subject: &Subject, read: &ProfiledRead, interrupt: &Interrupt) -> GpuReport {
    let count = match Gpu::count() {
        Ok(0) => return none(0, &CudaError::NoGpu),
        Ok(count) => count,
        Err(error) => return none(0, &error),
    };
    let opened = Gpu::open(0).map_err(DoctorError::from);
    let measured = opened.and_then(|gpu| Ok((rates(&gpu, interrupt)?, gpu)));
    let (mut rates, gpu) = match measured {
        Ok(measured) => measured,
        Err(error) => return none(count, &error),
    };
    match beside_cpu(&gpu, interrupt) {
        Ok(both) => rates.beside_cpu = Some(both),
        Err(error) => return none(count, &error),
    }
    let mut why_not_cufile = String::new();
    match cufile_measure::measure(&gpu, subject, read) {
        Ok(measured) => rates.cufile = Some(measured),
        // Reports the cause alone. The outer error mentions `--io cufile`, which the user did not give here.
        Err(DoctorError::Load(LoadError::CuFile(error))) => why_not_cufile = error.to_string(),
        Err(error) => why_not_cufile = error.to_string(),
    }
    GpuReport { count, first: Some(rates), why: String::new(), why_not_cufile }
}

fn beside_cpu(gpu: &Gpu, interrupt: &Interrupt) -> Result<BesideCpu, DoctorError> {
    let copy = || gpu.pinned_copy_rate(Direction::ToDevice, BESIDE_BYTES, BESIDE_SPAN, BESIDE_TIME);
    let (cpu_bytes_per_second, copy) = compute::beside(BESIDE_TIME, copy, interrupt)?;
    Ok(BesideCpu { copy_bytes_per_second: copy?, cpu_bytes_per_second })
}

fn rates(gpu: &Gpu, interrupt: &Interrupt) -> Result<GpuRates, DoctorError> {
    let pinned = |direction, bytes| gpu.pinned_copy_rate(direction, bytes, COPY_SPAN, COPY_TIME);
    let pinned_copies = COPY_SIZES.into_iter().map(|bytes| {
        interrupt.check()?;
        Ok(PinnedCopyRate {
            bytes,
            to_device_bytes_per_second: pinned(Direction::ToDevice, bytes)?,
            from_device_bytes_per_second: pinned(Direction::FromDevice, bytes)?,
        })
    });
    let pinned_copies = pinned_copies.collect::<Result<_, DoctorError>>()?;
    let (read, copy) = memory(gpu)?;
    interrupt.check()?;
    let pcie =
        gpu.pcie()?.map(|PcieLink { address, speed, lanes }| PcieRates { address, speed, lanes });
    Ok(GpuRates {
        name: gpu.name().to_owned(),
        compute_capability: gpu.compute_capability(),
        multiprocessors: gpu.multiprocessors(),
        memory_bytes: gpu.memory_bytes()?.1,
        driver: Gpu::driver_version(),
        pcie,
        pinned_copies,
        pageable_copy_bytes_per_second: gpu.pageable_copy_rate(COPY_SPAN, COPY_TIME)?,
        memory_read_bytes_per_second: read,
        memory_copy_bytes_per_second: copy,
        kernels: gpu_kernels::measure(gpu)?,
        beside_cpu: None,
        cufile: None,
    })
}

/// Returns the bytes per second of reading device memory, and of copying it.
fn memory(gpu: &Gpu) -> Result<(f64, f64), CudaError> {
    let free = gpu.memory_bytes()?.0 as usize;
    let bytes = MEMORY_BYTES.min(free / 8 / 16 * 16);
    let (from, to) = (gpu.allocate(bytes)?, gpu.allocate(bytes)?);
    let words = gpu.allocate(4 * gpu.read_all_words())?;
    gpu.fill(from.ptr(), 1, bytes)?;
    let timer = Timer::new(gpu)?;
    let best = |work: &dyn Fn() -> Result<(), CudaError>| {
        (0..MEMORY_ROUNDS).try_fold(f64::INFINITY, |best, _| Ok(best.min(timer.time(gpu, work)?)))
    };
    let read = best(&|| gpu.read_all(from.ptr(), bytes, words.ptr()))?;
    let copy = best(&|| gpu.copy(from.ptr(), to.ptr(), bytes))?;
    Ok((bytes as f64 / read, bytes as f64 / copy))
}
