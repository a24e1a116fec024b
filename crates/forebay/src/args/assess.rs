//! Arguments of `forebay assess`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::{BudgetArgs, RoutingArgs, count};

#[derive(Args)]
pub struct AssessArgs {
    /// Models with experts, each a GGUF file, pack or Hugging Face folder; several are compared
    #[arg(value_name = "MODEL", required = true, num_args = 1.., value_hint = ValueHint::AnyPath)]
    pub models: Vec<PathBuf>,
    /// Replay this log of requests through prefix caches of all sizes, instead of experts: JSON lines as for
    /// forebay batch. The model may be dense
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath,
        conflicts_with_all = ["prompts", "raw", "csv", "profile", "trace_routing", "tokens", "seed", "ram", "vram", "device",
            "threads"])]
    pub kv: Option<PathBuf>,
    /// Record on these instead of the prompts that ship with the program: JSON lines or plain text
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub prompts: Option<PathBuf>,
    /// Do not apply the chat template to chat prompts, for models that were not trained with the template
    /// in their file
    #[arg(long)]
    pub raw: bool,
    /// Tokens to generate after each prompt; fewer where the model ends its text before
    #[arg(long, value_name = "N", default_value_t = 96, value_parser = count())]
    pub tokens: usize,
    /// Seed of the random choices; the same gives the same recording
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Predict speeds for the machine of this profile, as doctor saves it [default: this machine's]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub profile: Option<PathBuf>,
    #[command(flatten)]
    pub budget: BudgetArgs,
    #[command(flatten)]
    pub routing: RoutingArgs,
    /// Write the report: one page without network access
    #[arg(short, long, value_name = "OUT", value_hint = ValueHint::FilePath, help_heading = "Output")]
    pub output: Option<PathBuf>,
    /// Write the curves of all policies and domains as lines of comma-separated values
    #[arg(long, value_name = "OUT", value_hint = ValueHint::FilePath, help_heading = "Output")]
    pub csv: Option<PathBuf>,
    /// Write every figure as an SVG file into this folder, which must be empty or not exist yet
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, help_heading = "Output")]
    pub svg: Option<PathBuf>,
    /// Replace output files that exist
    #[arg(long, help_heading = "Output")]
    pub force: bool,
    /// Print one JSON document with all figures
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}
