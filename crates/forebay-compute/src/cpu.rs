//! The CPU as a compute device: its instructions, its number of threads, and the rounding of activations.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::buffer::Buffer;
use crate::error::ComputeError;
use crate::matmul::Workspace;
use crate::pool::Pool;

/// A family of kernels, named after the instructions that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// AVX-512 F, BW, DQ, VL and VNNI, on top of everything in [`Isa::Avx2`].
    Avx512Vnni,
    /// AVX2, FMA and F16C.
    Avx2,
    /// Only the instructions of the compilation target.
    Portable,
}

impl Isa {
    /// Returns the fastest family that this machine runs. Ignores `FOREBAY_ISA`; see [`Isa::selected`].
    pub fn detect() -> Isa {
        *Isa::supported().first().unwrap_or(&Isa::Portable)
    }

    /// Returns every family that this machine runs, fastest first. The last is always `Portable`.
    pub fn supported() -> Vec<Isa> {
        [Isa::Avx512Vnni, Isa::Avx2, Isa::Portable]
            .into_iter()
            .filter(|isa| isa.is_supported())
            .collect()
    }

    /// Returns the family that `FOREBAY_ISA` (`portable`, `avx2`, `avx512`) forces, else [`Isa::detect`].
    ///
    /// # Errors
    /// Returns an error if the variable holds another word or names a family that this machine does not run.
    pub fn selected() -> Result<Isa, ComputeError> {
        match std::env::var("FOREBAY_ISA") {
            Ok(name) if !name.is_empty() => {
                let isa: Isa = name.parse()?;
                if isa.is_supported() {
                    return Ok(isa);
                }
                Err(ComputeError::UnsupportedIsa { isa, supported: Isa::supported() })
            }
            Err(std::env::VarError::NotUnicode(name)) => {
                Err(ComputeError::UnknownIsa { name: name.to_string_lossy().into_owned() })
            }
            _ => Ok(Isa::detect()),
        }
    }

    /// Returns true if this machine runs this family.
    pub fn is_supported(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            match self {
                Isa::Portable => true,
                Isa::Avx2 => avx2,
                Isa::Avx512Vnni => {
                    avx2 && is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("avx512bw")
                        && is_x86_feature_detected!("avx512dq")
                        && is_x86_feature_detected!("avx512vl")
                        && is_x86_feature_detected!("avx512vnni")
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Isa::Portable
        }
    }

    /// Returns true if kernels that need AVX2, FMA and F16C may run.
    pub(crate) fn has_avx2(self) -> bool {
        self != Isa::Portable
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Isa::Avx512Vnni => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        })
    }
}

impl FromStr for Isa {
    type Err = ComputeError;

    fn from_str(name: &str) -> Result<Isa, ComputeError> {
        [Isa::Avx512Vnni, Isa::Avx2, Isa::Portable]
            .into_iter()
            .find(|isa| isa.to_string() == name)
            .ok_or_else(|| ComputeError::UnknownIsa { name: name.to_owned() })
    }
}

/// Precision of activations in products with quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Activations are rounded to 8 bits for quantised weights and stay f32 for F32, F16 and BF16 weights.
    Fast,
    /// Activations stay f32, and weights are dequantised.
    Exact,
}

impl fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Arithmetic::Fast => "fast",
            Arithmetic::Exact => "exact",
        })
    }
}

/// The CPU backend: a thread pool, a kernel family, and scratch memory for each worker.
///
/// The kernel family is fixed at construction, where it is checked against the machine. Kernels rely on that check.
pub struct Cpu {
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
    pub(crate) arithmetic: Arithmetic,
    scratch: Box<[Mutex<Scratch>]>,
    shared_scratch: Mutex<Scratch>,
    pub(crate) matmul: Workspace,
}

/// Memory that operations reuse from call to call, so that none allocates once it is warm.
pub(crate) struct Scratch(Option<Buffer<f32>>);

impl Scratch {
    /// Returns `len` floats at cache-line alignment. They hold values of earlier use.
    pub(crate) fn floats(&mut self, len: usize) -> &mut [f32] {
        if self.0.as_ref().is_none_or(|buffer| buffer.as_slice().len() < len) {
            // Some slack, because a growing context needs a little more each time.
            self.0 = None;
            self.0 = Buffer::zeroed(len + len / 2);
        }
        let buffer = self.0.as_mut().expect("the system refused scratch memory");
        &mut buffer.as_mut_slice()[..len]
    }
}

impl Cpu {
    /// Creates a backend of `threads` workers (0: [`default_threads`]), including the calling thread.
    ///
    /// # Panics
    /// Panics if this machine does not run `isa`. Values from [`Isa::selected`] and [`Isa::supported`] always run.
    pub fn new(threads: usize, isa: Isa, arithmetic: Arithmetic) -> Cpu {
        assert!(isa.is_supported(), "this machine cannot run {isa}");
        let pool = Pool::new(if threads == 0 { default_threads() } else { threads });
        let empty = || Mutex::new(Scratch(None));
        let scratch = (0..pool.threads()).map(|_| empty()).collect();
        let matmul = Workspace::new(pool.threads());
        Cpu { pool, isa, arithmetic, scratch, shared_scratch: empty(), matmul }
    }

    /// Makes operations end early while `flag` is set. [`Pool::was_cut_short`] tells whether that happened. The caller
    /// must then not use their output.
    pub fn stopping_on(mut self, flag: Arc<AtomicBool>) -> Cpu {
        self.pool.stop_on(flag);
        self
    }

    /// Returns the thread pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the kernel family in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Returns the precision of activations in products with quantised weights.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// Describes the backend in one line for users and logs: family, threads, arithmetic.
    pub fn describe(&self) -> String {
        let plural = if self.pool.threads() == 1 { "" } else { "s" };
        format!(
            "cpu, {} kernels, {} thread{plural}, {} arithmetic",
            self.isa,
            self.pool.threads(),
            self.arithmetic
        )
    }

    /// Returns what the bits of results depend on, in words: all of [`Cpu::describe`] but the number of threads.
    pub fn describe_arithmetic(&self) -> String {
        format!("cpu, {} kernels, {} arithmetic", self.isa, self.arithmetic)
    }

    /// Returns the scratch of one worker. Only that worker locks it, so the lock is never contended.
    pub(crate) fn worker_scratch(&self, worker: usize) -> MutexGuard<'_, Scratch> {
        self.scratch[worker].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the scratch that all workers of one operation share. The operation's caller holds it.
    pub(crate) fn shared_scratch(&self) -> MutexGuard<'_, Scratch> {
        self.shared_scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the number of physical cores that this process may use. The affinity mask and the container's quota limit
/// it. Two hyper-threads of one core count once, since they share its vector units.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    physical_cores(&affinity()).map_or(allowed, |cores| cores.min(allowed)).max(1)
}

/// Counts the distinct cores among `cpus`. Returns `None` if the system does not tell.
fn physical_cores(cpus: &[usize]) -> Option<usize> {
    let mut cores = HashSet::new();
    for cpu in cpus {
        let folder = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
        cores.insert(std::fs::read_to_string(format!("{folder}/thread_siblings_list")).ok()?);
    }
    (!cores.is_empty()).then_some(cores.len())
}

/// Returns the processors that this process may run on, or nothing if the system does not tell.
#[cfg(target_os = "linux")]
fn affinity() -> Vec<usize> {
    // SAFETY: cpu_set_t is a plain bit mask, for which all zeroes is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    let bytes = size_of::<libc::cpu_set_t>();
    // SAFETY: the kernel writes at most `bytes` bytes to `set`, which is that large.
    if unsafe { libc::sched_getaffinity(0, bytes, &mut set) } != 0 {
        return Vec::new();
    }
    // SAFETY: CPU_ISSET reads inside the mask for every index below CPU_SETSIZE.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

#[cfg(not(target_os = "linux"))]
fn affinity() -> Vec<usize> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isa_names_round_trip_and_portable_always_runs() {
        for isa in [Isa::Avx512Vnni, Isa::Avx2, Isa::Portable] {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        }
        assert!("sse9".parse::<Isa>().is_err());
        assert_eq!(Isa::supported().last(), Some(&Isa::Portable));
        assert!(Isa::supported().contains(&Isa::detect()));
    }

    #[test]
    fn default_threads_stays_within_what_the_process_may_use() {
        let threads = default_threads();
        assert!(threads >= 1);
        assert!(threads <= std::thread::available_parallelism().map_or(1, usize::from));
    }

    #[test]
    fn description_names_family_threads_and_arithmetic() {
        let cpu = Cpu::new(2, Isa::Portable, Arithmetic::Exact);
        assert_eq!(cpu.describe(), "cpu, portable kernels, 2 threads, exact arithmetic");
    }
}
