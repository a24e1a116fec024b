//! Arguments of `forebay logits`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use super::{BudgetArgs, TracingArgs};

#[derive(Args)]
pub struct LogitsArgs {
    /// GGUF file, pack or Hugging Face folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,
    /// Token ids, as in 1,2,3, or @FILE that holds them
    #[arg(long, value_name = "IDS")]
    pub tokens: String,
    /// The safetensors file to write: `logits`, f32 [tokens, vocab]
    #[arg(short, long, value_name = "OUT", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Also write the chosen experts: `routing`, i32 [tokens, layers, experts per token]
    #[arg(long)]
    pub routing: bool,
    /// Also write the logits of the layer for multi-token prediction: `mtp_logits`, f32 [tokens, vocab]
    #[arg(long)]
    pub mtp: bool,
    #[command(flatten)]
    pub budget: BudgetArgs,
    #[command(flatten)]
    pub tracing: TracingArgs,
    /// Print one JSON document about the work
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}
