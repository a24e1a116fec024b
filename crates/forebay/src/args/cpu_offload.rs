//! Options that decide if the CPU computes experts for a GPU.

use clap::Args;
use forebay_engine::CpuOffload;

/// Flattened into commands that compute, and into plan.
#[derive(Args, Clone, Default)]
pub struct CpuOffloadArgs {
    /// Let the CPU always compute some of the experts that are not in VRAM [default: while the machine
    /// profile says that it is faster]
    #[arg(long)]
    pub cpu_experts: bool,
    /// Let the GPU compute all experts. Output is then bit-identical to a GPU that holds the whole model
    /// (--exact implies it)
    #[arg(long, conflicts_with = "cpu_experts")]
    pub no_cpu_experts: bool,
}

impl CpuOffloadArgs {
    /// Returns the setting that the options select.
    pub fn resolve(&self) -> CpuOffload {
        match (self.cpu_experts, self.no_cpu_experts) {
            (true, _) => CpuOffload::Always,
            (false, true) => CpuOffload::Never,
            (false, false) => CpuOffload::Auto,
        }
    }
}
