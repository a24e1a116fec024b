//! The CPU as a compute device: which instructions it has, how many threads work, and how
//! activations are rounded.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::buffer::Buffer;
use crate::error::ComputeError;
use crate::matmul::Workspace;
use crate::pool::Pool;

/// A family of kernels, named by the instructions that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// AVX-512 F, BW, DQ, VL and VNNI, on top of everything in [`Isa::Avx2`].
    Avx512Vnni,
    /// AVX2, FMA and F16C.
    Avx2,
    /// No instruction beyond the compilation target's own.
    Portable,
}

impl Isa {
    /// The fastest family that this machine runs. Ignores `FOREBAY_ISA`; see [`Isa::selected`].
    pub fn detect() -> Isa {
        *Isa::supported().first().unwrap_or(&Isa::Portable)
    }

    /// Every family that this machine runs, fastest first; the last is always `Portable`.
    pub fn supported() -> Vec<Isa> {
        [Isa::Avx512Vnni, Isa::Avx2, Isa::Portable]
            .into_iter()
            .filter(|isa| isa.is_supported())
            .collect()
    }

    /// The family that `FOREBAY_ISA` (`portable`, `avx2`, `avx512`) forces, else [`Isa::detect`].
    ///
    /// # Errors
    /// The variable holds another word, or names a family that this machine does not run.
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

    /// Whether this machine runs this family.
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

    /// Whether kernels that need AVX2, FMA and F16C may run.
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

/// How activations meet quantised weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// Activations are rounded to 8 bits for quantised weights; f32 for F32, F16 and BF16 weights.
    Fast,
    /// Activations stay f32, weights are dequantised.
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
/// The kernel family is fixed at construction, where it is checked against the machine; kernels
/// rely on that check.
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
    /// `len` floats at cache-line alignment; their contents are left over from earlier use.
    pub(crate) fn floats(&mut self, len: usize) -> &mut [f32] {
        if self.0.as_ref().is_none_or(|buffer| buffer.as_slice().len() < len) {
            // Some slack, because a growing context asks for a little more each time.
            self.0 = None;
            self.0 = Buffer::zeroed(len + len / 2);
        }
        let buffer = self.0.as_mut().expect("the system refused scratch memory");
        &mut buffer.as_mut_slice()[..len]
    }
}

impl Cpu {
    /// A backend of `threads` workers (0: [`default_threads`]), the calling thread among them.
    ///
    /// # Panics
    /// When this machine does not run `isa`: take one from [`Isa::selected`] or
    /// [`Isa::supported`].
    pub fn new(threads: usize, isa: Isa, arithmetic: Arithmetic) -> Cpu {
        assert!(isa.is_supported(), "this machine cannot run {isa}");
        let pool = Pool::new(if threads == 0 { default_threads() } else { threads });
        let empty = || Mutex::new(Scratch(None));
        let scratch = (0..pool.threads()).map(|_| empty()).collect();
        let matmul = Workspace::new(pool.threads());
        Cpu { pool, isa, arithmetic, scratch, shared_scratch: empty(), matmul }
    }

    /// The same, whose operations end early while `flag` is set; [`Pool::was_cut_short`] says so, and what they wrote must
    /// not be used then.
    pub fn stopping_on(mut self, flag: Arc<AtomicBool>) -> Cpu {
        self.pool.stop_on(flag);
        self
    }

    /// The workers.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The kernel family in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// How activations meet quantised weights.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// One line for people and logs: family, threads, arithmetic.
    pub fn describe(&self) -> String {
        let plural = if self.pool.threads() == 1 { "" } else { "s" };
        format!(
            "cpu, {} kernels, {} thread{plural}, {} arithmetic",
            self.isa,
            self.pool.threads(),
            self.arithmetic
        )
    }

    /// Scratch of one worker. Only that worker takes it, so the lock is never contended.
    pub(crate) fn worker_scratch(&self, worker: usize) -> MutexGuard<'_, Scratch> {
        self.scratch[worker].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Scratch that all workers of one operation share; held by the operation's caller.
    pub(crate) fn shared_scratch(&self) -> MutexGuard<'_, Scratch> {
        self.shared_scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Physical cores that this process may use: the affinity mask and the container's quota count,
/// and two hyper-threads of one core count once, since they share its vector units.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    physical_cores(&affinity()).map_or(allowed, |cores| cores.min(allowed)).max(1)
}

/// Distinct cores among `cpus`, or `None` where the system does not tell.
fn physical_cores(cpus: &[usize]) -> Option<usize> {
    let mut cores = HashSet::new();
    for cpu in cpus {
        let folder = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
        cores.insert(std::fs::read_to_string(format!("{folder}/thread_siblings_list")).ok()?);
    }
    (!cores.is_empty()).then_some(cores.len())
}

/// The processors that this process may run on; empty where the system does not tell.
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
