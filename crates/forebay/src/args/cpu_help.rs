//! Whether the CPU helps a GPU with experts.

use clap::Args;
use forebay_engine::CpuHelp;

/// Flattened into commands that compute, and into plan.
#[derive(Args, Clone, Default)]
pub struct HelpArgs {
    /// Have the CPU compute a share of the experts that a GPU has no room for, where they are, however few are
    /// missing [default: while so many are missing that it is faster by the machine profile]
    #[arg(long)]
    pub cpu_experts: bool,
    /// Have the GPU compute all experts: what comes out is what a GPU that holds all computes, bit for bit, where
    /// the CPU would round a little otherwise (--exact implies it)
    #[arg(long, conflicts_with = "cpu_experts")]
    pub no_cpu_experts: bool,
}

impl HelpArgs {
    /// What they come to.
    pub fn resolve(&self) -> CpuHelp {
        match (self.cpu_experts, self.no_cpu_experts) {
            (true, _) => CpuHelp::Always,
            (false, true) => CpuHelp::Never,
            (false, false) => CpuHelp::Auto,
        }
    }
}
