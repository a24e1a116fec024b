//! Options of `bench` and `batch`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};

use super::{BudgetArgs, FollowedArgs, KvArgs, MtpArgs, RoutingArgs, TracingArgs, count, parse};

#[derive(Args)]
pub struct BenchArgs {
    /// GGUF file, pack or Hugging Face folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,
    /// Tokens of prompt to process per run; 0 leaves this part out
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub prompt_tokens: usize,
    /// Tokens to generate per run; 0 leaves this part out
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub gen_tokens: usize,
    /// Tokens in the context before either part; their time does not count
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub depth: usize,
    /// Runs to measure, after one to warm up
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = count())]
    pub repeat: usize,
    /// Measure N sequences together, one number after the other (such as 1,2,4,8)
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = count(), conflicts_with_all = ["depth", "trace_routing"])]
    pub parallel: Vec<usize>,
    /// With --parallel: run the sequences as requests, of which the engine lets as many generate at a
    /// time as gives most tokens per second
    #[arg(long, requires = "parallel")]
    pub scheduled: bool,
    /// With --parallel: read a prompt of N tokens while the sequences generate, and show the
    /// longest time between two of their tokens
    #[arg(long, value_name = "N", requires = "parallel", conflicts_with_all = ["scheduled", "prompt_tokens"], value_parser = count())]
    pub arriving: Option<usize>,
    /// With --parallel N: run N requests one after the other, whose prompts have the same first TOKENS tokens
    /// at the start, and show how much sooner the later ones get their first token
    #[arg(long, value_name = "TOKENS", requires = "parallel", conflicts_with_all = ["scheduled", "arriving", "prompt_tokens", "gen_tokens"], value_parser = count())]
    pub shared_prefix: Option<usize>,
    /// With --scheduled or --arriving: aim for at most this time between two tokens of a sequence, such
    /// as 200ms or 2s [default: with --scheduled no limit, with --arriving as an engine chooses it]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub max_latency: Option<Duration>,
    #[command(flatten)]
    pub budget: BudgetArgs,
    #[command(flatten)]
    pub mtp: MtpArgs,
    #[command(flatten)]
    pub tracing: TracingArgs,
    #[command(flatten)]
    pub followed: FollowedArgs,
    #[command(flatten)]
    pub routing: RoutingArgs,
    /// Print one JSON document
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// Number of requests that are answered at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Parallel {
    Auto,
    Fixed(usize),
}

#[derive(Args)]
pub struct BatchArgs {
    /// GGUF file (or one file of a split set), pack, or Hugging Face folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,
    /// Requests, one JSON object a line, as in OpenAI's batch files
    #[arg(value_name = "IN.jsonl", value_hint = ValueHint::FilePath)]
    pub input: PathBuf,
    /// Write the answers to this file, in the order of the requests. Until all are there, they are in
    /// OUT.jsonl.partial
    #[arg(short, long, value_name = "OUT.jsonl", value_hint = ValueHint::FilePath)]
    pub output: PathBuf,
    /// Replace an output that exists, and a .partial file of another batch
    #[arg(long)]
    pub force: bool,
    /// Answer N requests at a time; auto takes as many as the planner finds best, at least 8, or
    /// fewer if memory has no room for their contexts
    #[arg(long, value_name = "N|auto", value_parser = parse::parallel, default_value = "auto")]
    pub parallel: Parallel,
    /// Reserve a KV cache of N positions for all requests together. Requests that have no room
    /// wait, and answers stay the same [default: what the largest requests need]
    #[arg(long, value_name = "N", value_parser = count())]
    pub kv_tokens: Option<usize>,
    /// Most tokens of an answer, if its request names no limit
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1024, value_parser = count())]
    pub max_tokens: usize,
    /// Let special tokens in messages, such as <|im_end|>, be special tokens. Whoever writes a part of a
    /// message can then end it and begin another one [default: they are text]
    #[arg(long)]
    pub special_tokens_in_messages: bool,
    /// Record every read of weights, and every read and write of keys and values, to FILE, for
    /// `forebay trace-io`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub trace_io: Option<PathBuf>,
    #[command(flatten)]
    pub kv: KvArgs,
    #[command(flatten)]
    pub budget: BudgetArgs,
    #[command(flatten)]
    pub mtp: MtpArgs,
}
