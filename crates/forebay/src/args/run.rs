//! Arguments of `forebay run`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use forebay_chat::Think;
use serde_json::Value;

use super::{BudgetArgs, MtpArgs, RoutingArgs, TracingArgs, count, parse};

#[derive(Args)]
pub struct RunArgs {
    /// GGUF file (or one file of a split set), pack, or Hugging Face folder [default: the demo model]
    #[arg(value_hint = ValueHint::AnyPath)]
    pub model: Option<PathBuf>,
    /// Answer this and quit, like --prompt
    #[arg(value_name = "TEXT", conflicts_with_all = ["prompt", "file"])]
    pub text: Option<String>,
    /// Answer this and quit; text on standard input is added to it. Without a prompt, standard input
    /// is the prompt, or on a terminal there is a chat
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "file")]
    pub prompt: Option<String>,
    /// Answer the text in FILE and quit
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: Option<PathBuf>,
    #[command(flatten)]
    pub chat: ChatArgs,
    #[command(flatten)]
    pub budget: BudgetArgs,
    #[command(flatten)]
    pub mtp: MtpArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub tracing: TracingArgs,
    #[command(flatten)]
    pub routing: RoutingArgs,
    /// Print statistics on standard error at the end
    #[arg(long, help_heading = "Output")]
    pub stats: bool,
    /// Print one JSON document with the answer and the statistics
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// How a conversation becomes a prompt.
#[derive(Args, Clone)]
#[command(next_help_heading = "Chat")]
pub struct ChatArgs {
    /// System message: instructions that stay before the conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "system_file")]
    pub system: Option<String>,
    /// System message from a file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub system_file: Option<PathBuf>,
    /// How much the model thinks before it answers: on, off, low, medium or high, as far as its chat
    /// template supports it
    #[arg(long, value_name = "LEVEL")]
    pub think: Option<Think>,
    /// Do not show what the model thinks
    #[arg(long)]
    pub hide_thinking: bool,
    /// Set a variable of the chat template; VALUE is JSON, or else text (repeatable)
    #[arg(long, value_name = "NAME=VALUE", value_parser = template_arg)]
    pub template_arg: Vec<(String, Value)>,
    /// Let special tokens in messages, such as <|im_end|>, be special tokens. Whoever writes a part of a
    /// message can then end it and begin another one [default: they are text]
    #[arg(long)]
    pub special_tokens_in_messages: bool,
    /// When the context is full: drop the oldest turns and read the rest again (shift), or stop
    #[arg(long, value_enum, value_name = "ACTION")]
    pub on_full: Option<OnFullArg>,
    /// Continue the text as it is, without the chat template. Special tokens written in it, such as
    /// <|im_start|>, count as such, and a BOS token at its beginning is not added again
    #[arg(long, conflicts_with_all = [
        "system", "system_file", "think", "hide_thinking", "template_arg", "special_tokens_in_messages",
    ])]
    pub raw: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum OnFullArg {
    Shift,
    Stop,
}

/// How the next token is chosen and when the answer ends.
#[derive(Args, Clone)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Stop after this many tokens [default: the end of the context]
    #[arg(short = 'n', long, value_name = "N", value_parser = count())]
    pub max_tokens: Option<usize>,
    /// Sampling temperature; 0 always takes the likeliest token [default: 0.8]
    #[arg(long, value_name = "X", value_parser = parse::non_negative, allow_hyphen_values = true)]
    pub temperature: Option<f32>,
    /// Choose among the N likeliest tokens; 0 for all
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub top_k: usize,
    /// Choose among the likeliest tokens that together reach this probability
    #[arg(long, value_name = "X", default_value_t = 0.95, value_parser = parse::probability)]
    pub top_p: f32,
    /// Leave out tokens less likely than this share of the likeliest
    #[arg(long, value_name = "X", default_value_t = 0.05, value_parser = parse::probability)]
    pub min_p: f32,
    /// Divide the logits of recent tokens by this; 1 is off [default: 1]
    #[arg(long, value_name = "X", value_parser = parse::positive)]
    pub repeat_penalty: Option<f32>,
    /// Seed of the random choices [default: a new one for each run]
    #[arg(short, long, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop before this text (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
}

fn template_arg(text: &str) -> Result<(String, Value), String> {
    let (name, value) =
        text.split_once('=').ok_or("write NAME=VALUE, as in enable_thinking=false")?;
    if name.is_empty() {
        return Err("the name before = is missing".to_owned());
    }
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
    Ok((name.to_owned(), value))
}
