//! Arguments of the commands about the model library, and the models that other commands open by name.

use std::path::PathBuf;

use clap::Args;
use clap::builder::RangedU64ValueParser;

use super::Command;

#[derive(Args)]
pub struct PullArgs {
    /// Repository on Hugging Face: OWNER/REPO, OWNER/REPO:QUANT or hf.co/OWNER/REPO:QUANT. Without
    /// QUANT, Q4_K_M or the only model; safetensors if there is no GGUF
    #[arg(value_name = "REPO[:QUANT]")]
    pub name: String,
    /// Branch, tag or commit
    #[arg(long, value_name = "REV", default_value = "main")]
    pub revision: String,
    /// Download the model even if it cannot run on this machine
    #[arg(long)]
    pub no_check: bool,
    /// Connections at a time
    #[arg(short, long, value_name = "N", default_value_t = 8)]
    #[arg(value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    pub jobs: usize,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct ListArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct RmArgs {
    /// Names as `forebay list` shows them
    #[arg(value_name = "NAME", required = true, num_args = 1..)]
    pub names: Vec<String>,
}

impl Command {
    /// Returns the models that the command opens. Each is a path or a name of the library.
    pub fn models_mut(&mut self) -> Vec<&mut PathBuf> {
        match self {
            Command::Run(args) => args.model.iter_mut().collect(),
            Command::Serve(args) => args.model.iter_mut().collect(),
            Command::Assess(args) => args.models.iter_mut().collect(),
            Command::Plan(args) => args.model.iter_mut().collect(),
            Command::Batch(args) => vec![&mut args.model],
            Command::Bench(args) => vec![&mut args.model],
            Command::Load(args) => vec![&mut args.model],
            Command::Inspect(args) => vec![&mut args.model],
            Command::Logits(args) => vec![&mut args.model],
            Command::Tokenize(args) => vec![&mut args.model],
            Command::Render(args) => vec![&mut args.model],
            Command::Pack(args) => vec![&mut args.model],
            Command::Pull(_)
            | Command::List(_)
            | Command::Rm(_)
            | Command::Kv(_)
            | Command::Ps(_)
            | Command::TraceIo(_)
            | Command::Replay(_)
            | Command::Doctor(_)
            | Command::Synth(_)
            | Command::Verify(_)
            | Command::Completions(_)
            | Command::Config(_)
            | Command::Man(_) => Vec::new(),
        }
    }

    /// Returns true if the command works on the library itself.
    pub fn is_about_library(&self) -> bool {
        matches!(
            self,
            Command::Pull(_)
                | Command::List(_)
                | Command::Rm(_)
                | Command::Serve(_)
                | Command::Plan(_)
                | Command::Doctor(_)
                | Command::Config(_)
        )
    }
}
