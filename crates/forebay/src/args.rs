//! Command-line arguments as the user types them. [`crate::config`] resolves them into a configuration.

mod assess;
mod bench;
mod cpu_offload;
mod doctor;
pub mod foreign;
mod kv;
mod library;
mod logits;
mod mtp;
pub mod parse;
mod plan;
mod program;
mod ps;
mod run;
mod serve;

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::{
    Args, FromArgMatches as _, Parser, Subcommand, ValueEnum, ValueHint,
    builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser},
};
use clap_complete::ArgValueCompleter;
use forebay_engine::{KvInVram, SessionOptions};
use forebay_lab::replay::{Predictor, ReplayPolicy};
use forebay_lab::synth;
use forebay_stream::routing::RoutingProfile;
use forebay_stream::{Capacity, PolicyKind};
use serde::Serialize;

use crate::commands::completions;
use crate::help;
use crate::log::LogFilter;
use crate::size;

pub use assess::AssessArgs;
pub use bench::{BatchArgs, BenchArgs, Parallel};
pub use cpu_offload::CpuOffloadArgs;
pub use doctor::DoctorArgs;
pub use kv::{KvAction, KvArgs, KvCommandArgs, KvDiskTypeArg};
pub use library::{ListArgs, PullArgs, RmArgs};
pub use logits::LogitsArgs;
pub use mtp::MtpArgs;
pub use plan::PlanArgs;
pub use program::{CompletionsArgs, ConfigArgs, ManArgs};
pub use ps::PsArgs;
pub use run::{ChatArgs, OnFullArg, RunArgs, SamplingArgs};
pub use serve::{ServeArgs, SharePrefixes};

/// Runs language models that are larger than VRAM or RAM: their weights are streamed from the SSD
/// through a bounded cache.
#[derive(Parser)]
#[command(name = "forebay", version, max_term_width = 100, after_help = help::TOP)]
#[command(arg_required_else_help = true, subcommand_required = true, styles = help::STYLES)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    /// Log to standard error: error, warn, info, debug, trace or off, or a filter such as forebay_store=debug
    /// [default: $FOREBAY_LOG, else warn]
    #[arg(long, global = true, value_name = "LEVEL", value_parser = LogFilter::parse)]
    #[arg(help_heading = "Log", hide_short_help = true)]
    pub log: Option<LogFilter>,
    /// Folder of the model library, whose names may stand for MODEL [default: $FOREBAY_MODELS, else
    /// ~/.local/share/forebay/models]
    #[arg(long, global = true, value_name = "DIR", value_hint = ValueHint::DirPath)]
    #[arg(help_heading = "Library", hide_short_help = true)]
    pub models: Option<PathBuf>,
}

#[derive(Subcommand)]
pub enum Command {
    /// Generate text or chat; without MODEL, run the demo model that ships with the project
    #[command(after_help = help::RUN)]
    Run(RunArgs),
    /// Predict where a machine keeps a model's weights, how fast it runs, and what limits it
    #[command(after_help = help::PLAN)]
    Plan(PlanArgs),
    /// Answer a file of requests, several at a time, and resume interrupted work
    #[command(after_help = help::BATCH)]
    Batch(BatchArgs),
    /// Answer requests of other programs, with the interfaces of OpenAI, Anthropic and Ollama
    #[command(after_help = help::SERVE)]
    Serve(ServeArgs),
    /// List the models that a running server has loaded
    #[command(after_help = help::PS)]
    Ps(PsArgs),
    /// Download a model from Hugging Face into the library, or resume an earlier pull
    #[command(after_help = help::PULL)]
    Pull(PullArgs),
    /// List the models of the library
    #[command(after_help = help::LIST, alias = "ls")]
    List(ListArgs),
    /// Remove models from the library
    #[command(after_help = help::RM, alias = "remove")]
    Rm(RmArgs),
    /// List, check or empty a folder of keys and values (--kv-disk of serve)
    #[command(after_help = help::KV)]
    Kv(KvCommandArgs),
    /// Measure prompt and generation speed
    #[command(after_help = help::BENCH)]
    Bench(BenchArgs),
    /// Find out how small an expert cache can be: record routing, replay it at all cache sizes, and
    /// explain the result
    #[command(after_help = help::ASSESS)]
    Assess(AssessArgs),
    /// Report how a model was read, from a file that --trace-io wrote
    #[command(after_help = help::TRACE_IO)]
    TraceIo(TraceIoArgs),
    /// Replay recorded routing under any cache policy and capacity
    #[command(after_help = help::REPLAY)]
    Replay(ReplayArgs),
    /// Load all weights of a model into memory and compare the rate with the disk's limit
    #[command(after_help = help::LOAD)]
    Load(LoadArgs),
    /// Measure this machine (disk, page cache, memory, kernels) and save a profile that loads and plans
    /// use
    #[command(after_help = help::DOCTOR)]
    Doctor(DoctorArgs),
    /// Show what a model file holds, without reading its weights
    #[command(after_help = help::INSPECT, alias = "show")]
    Inspect(InspectArgs),
    /// Write the logits of given tokens to a safetensors file
    #[command(after_help = help::LOGITS)]
    Logits(LogitsArgs),
    /// Turn text into token ids
    #[command(after_help = help::TOKENIZE)]
    Tokenize(TokenizeArgs),
    /// Convert messages (JSON on standard input) into a prompt with the model's chat template
    #[command(after_help = help::RENDER)]
    Render(RenderArgs),
    /// Write a model of a real architecture's exact shape with random weights
    #[command(after_help = help::SYNTH)]
    Synth(SynthArgs),
    /// Convert a model to a pack, the container made for streaming, or back
    #[command(after_help = help::PACK)]
    Pack(PackArgs),
    /// Check every checksum of a pack
    #[command(after_help = help::VERIFY)]
    Verify(VerifyArgs),
    /// Print the completion script of a shell
    #[command(after_help = help::COMPLETIONS)]
    Completions(CompletionsArgs),
    /// Show the settings in force, and who set each of them
    #[command(after_help = help::CONFIG)]
    Config(ConfigArgs),
    /// Write manual pages
    #[command(hide = true)]
    Man(ManArgs),
}

/// Where the weights may be and who reads and computes.
#[derive(Args, Clone)]
#[command(next_help_heading = "Memory and devices")]
pub struct BudgetArgs {
    /// RAM for weights: 8GiB, 8G or 8g (GB is decimal) [default: what the model needs, at most three
    /// quarters of the free RAM]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true)]
    pub ram: Option<u64>,
    /// VRAM for everything on the GPU, the driver's context included [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true)]
    pub vram: Option<u64>,
    /// Where to compute: cpu, cuda or cuda:N. auto takes the first GPU if it can be used, else the CPU.
    /// The CPU computes part of a dense model that does not fit in VRAM
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: Device,
    /// Type of the KV cache. q8_0 takes half the memory of f16, q4_0 a quarter; both lose some accuracy
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = KvTypeArg::F16)]
    pub kv_type: KvTypeArg,
    /// VRAM for the KV cache. What does not fit is in pinned RAM, where the GPU reads it over PCIe: contexts may be longer than
    /// VRAM. auto takes what fits beside the dense weights [default: auto]
    #[arg(long, value_name = "SIZE|auto", value_parser = parse::kv_vram, allow_hyphen_values = true)]
    pub kv_vram: Option<KvInVram>,
    /// On a GPU, launch every kernel by itself instead of one CUDA graph per token: slower, same results
    #[arg(long)]
    pub no_cuda_graph: bool,

    #[command(flatten)]
    pub cpu_offload: CpuOffloadArgs,
    /// Positions of context to reserve [default: what the model was trained for, at most 4096]
    #[arg(short, long, value_name = "N", value_parser = count())]
    pub ctx: Option<usize>,
    /// Compute threads of the CPU [default: one per physical core]
    #[arg(short, long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=256))]
    pub threads: Option<usize>,
    /// Expert eviction policy, per layer (layer-...) or for all layers: by recency (lru, slru),
    /// frequency (lfu), both (lfru), order of layers (least-stale), or random
    #[arg(long, value_name = "NAME", default_value_t = SessionOptions::default().policy)]
    #[arg(value_parser = policy())]
    pub policy: PolicyKind,
    /// Prefetch the next layer's experts as its router predicts them: faster if predictions are good
    /// and the disk is often idle
    #[arg(long)]
    pub prefetch: bool,
    /// How weights are read: auto takes io_uring if it works, else pread in threads; mmap is a slow
    /// memory map, for comparison
    #[arg(long, value_enum, value_name = "NAME", default_value_t = IoArg::Auto)]
    pub io: IoArg,
    /// Do not verify the checksums of a pack
    #[arg(long)]
    pub no_verify: bool,
    /// Compute with f32 activations and an f32 KV cache: slower, for comparisons
    #[arg(long)]
    pub exact: bool,
}

/// Recording of reads; flattened into every command that reads weights.
#[derive(Args, Clone, Default)]
pub struct TracingArgs {
    /// Record every read and write the record to FILE, for `forebay trace-io`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Output")]
    pub trace_io: Option<PathBuf>,
    /// Replace output files that exist
    #[arg(long, help_heading = "Output")]
    pub force: bool,
}

/// Routing that replaces the model's own; flattened into the commands that measure.
#[derive(Args, Clone, Default)]
pub struct FollowedArgs {
    /// Use experts from a recorded trace (--trace-routing, or the CSV form) or uniform random ones
    /// (`uniform`) instead of the router's choice, which means nothing for random weights
    #[arg(long, value_name = "FILE|uniform", value_hint = ValueHint::FilePath)]
    pub routing_trace: Option<PathBuf>,
    /// Use experts that an LRU cache finds as often as in the published recording of a model, instead of
    /// the router's choice: qwen3.8-flash-next
    #[arg(long, value_name = "NAME", value_parser = routing_profile(), conflicts_with_all = ["routing_trace", "unrelated"])]
    pub routing_profile: Option<RoutingProfile>,
    /// With --routing-trace FILE: renumber the experts for every sequence, as if the sequences had
    /// nothing in common
    #[arg(long, requires = "routing_trace")]
    pub unrelated: bool,
}

/// Recording of routing; flattened into the commands that generate.
#[derive(Args, Clone, Default)]
pub struct RoutingArgs {
    /// Record which experts every token chooses and write the record to FILE, for `forebay replay`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, help_heading = "Output")]
    pub trace_routing: Option<PathBuf>,
    /// Also record each layer's router scores one layer earlier, for `forebay replay --predict
    /// next-router`: a larger file, and some percent slower
    #[arg(long, requires = "trace_routing", help_heading = "Output")]
    pub trace_scores: bool,
}

impl FollowedArgs {
    /// Returns what the routing is from, if it is not the model's own: a file, `uniform` or a profile.
    pub fn source(&self) -> Option<&Path> {
        let profile = self.routing_profile.map(|profile| Path::new(profile.name));
        self.routing_trace.as_deref().or(profile)
    }
}

#[derive(Args)]
pub struct ReplayArgs {
    /// Files that --trace-routing wrote, or routing in its CSV form
    #[arg(required = true, value_name = "TRACE", value_hint = ValueHint::FilePath)]
    pub traces: Vec<PathBuf>,
    /// A policy of run, or one that knows the trace: hot-list, belady, both also with layer-
    /// (repeatable) [default: all]
    #[arg(long, value_name = "NAME", value_parser = replay_policy())]
    pub policy: Vec<ReplayPolicy>,
    /// Cache capacity: a size (4GiB), a share of the experts (25%), or a number of experts per layer
    /// (32/layer) (repeatable) [default: shares from 5% to 90%]
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true)]
    pub capacity: Vec<CapacityArg>,
    /// Tokens whose hits are reported; the prompt warms the cache in any case
    #[arg(long, value_enum, value_name = "PHASE", default_value_t = PhaseArg::All)]
    pub phase: PhaseArg,
    /// Keep a batch that is larger than the capacity in the cache until the next one, like the engine of
    /// published traces; without this option, the capacity holds, like in forebay's engine
    #[arg(long)]
    pub keep_batches: bool,
    /// Also report what prefetching predicted experts would bring and cost: lag (the previous token's
    /// experts), hot-list, next-router (needs scores) (repeatable)
    #[arg(long, value_name = "NAME", value_parser = predictor())]
    pub predict: Vec<Predictor>,
    /// Experts to predict per layer [default: as many as a token uses]
    #[arg(long, value_name = "N", value_parser = count())]
    pub predictions: Option<usize>,
    /// Write the trace in its CSV form, and do nothing else
    #[arg(long, value_name = "OUT", value_hint = ValueHint::FilePath)]
    pub to_csv: Option<PathBuf>,
    /// Write the trace in its binary form, and do nothing else
    #[arg(long, value_name = "OUT", value_hint = ValueHint::FilePath)]
    pub to_trace: Option<PathBuf>,
    /// Replace an output file that exists
    #[arg(long)]
    pub force: bool,
    /// Print lines of comma-separated values
    #[arg(long)]
    pub csv: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Capacity as the user typed it, and its parsed form.
#[derive(Clone, Debug, PartialEq)]
pub struct CapacityArg {
    pub text: String,
    pub capacity: Capacity,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PhaseArg {
    All,
    Prompt,
    Generate,
}

impl PhaseArg {
    pub fn name(self) -> &'static str {
        match self {
            PhaseArg::All => "all",
            PhaseArg::Prompt => "prompt",
            PhaseArg::Generate => "generate",
        }
    }
}

#[derive(Args)]
pub struct TraceIoArgs {
    /// A file that --trace-io wrote
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Also draw the trace: one page without network access
    #[arg(long, value_name = "OUT", value_hint = ValueHint::FilePath)]
    pub html: Option<PathBuf>,
    /// Also write the trace as Chrome trace events, which Perfetto (https://ui.perfetto.dev) opens
    #[arg(long, value_name = "OUT", value_hint = ValueHint::FilePath)]
    pub chrome: Option<PathBuf>,
    /// Replace OUT if it exists
    #[arg(long)]
    pub force: bool,
    /// Disk limit per second, for example 3.3GiB [default: what doctor measured on this machine, else
    /// the best 100 ms of the trace]
    #[arg(long, value_name = "RATE", value_parser = size::parse, allow_hyphen_values = true)]
    pub limit: Option<u64>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct LoadArgs {
    /// GGUF file (or one file of a split set), pack, or Hugging Face folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,
    /// Read engine for data that is not in the page cache: io_uring, threads with pread, a memory map,
    /// or the machine profile's choice; cufile, NVIDIA's library, reads everything from the disk to the
    /// GPU
    #[arg(long, value_enum, value_name = "NAME", default_value_t = LoadIoArg::Auto)]
    pub io: LoadIoArg,
    /// Drop the model's files from the page cache before every run. Also read the disk before and after
    /// each run, together as much as the run reads, at most 10 seconds, to measure its sustained rate
    #[arg(long)]
    pub cold: bool,
    /// Only load: do not measure what disk and page cache give
    #[arg(long)]
    pub no_limit: bool,
    /// Number of runs; from the second run on, the memory is already allocated
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count())]
    pub repeat: usize,
    /// Device to load to: cpu (host memory), cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: Device,
    /// Limit on the GPU memory in use after loading, for example 8GiB; more is an error [default: all
    /// free memory]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true)]
    pub vram: Option<u64>,
    /// After the last run, read everything back from the GPU and compare it with the files
    #[arg(long)]
    pub check: bool,
    /// Decode the compact weights of a pack to BF16, as for other programs
    #[arg(long)]
    pub decode: bool,
    /// Do not verify the checksums of a pack
    #[arg(long)]
    pub no_verify: bool,
    #[command(flatten)]
    pub tracing: TracingArgs,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct InspectArgs {
    /// GGUF file, pack or Hugging Face folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,
    /// List every tensor with type, shape and place
    #[arg(long)]
    pub tensors: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct TokenizeArgs {
    /// GGUF file, pack or Hugging Face folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,
    /// The text; else standard input, as it is
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub text: Option<String>,
    /// Add no special tokens (such as the one that begins a text)
    #[arg(long)]
    pub no_special: bool,
    /// Read special tokens that are written in the text, such as <|im_start|>
    #[arg(long)]
    pub parse_special: bool,
    /// Print one JSON document with the text of every token
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct RenderArgs {
    /// GGUF file, pack or Hugging Face folder
    #[arg(value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,
    /// End after the last message instead of opening an answer
    #[arg(long)]
    pub no_generation_prompt: bool,
    /// With --json: the ids of a prompt in which special tokens of messages, such as <|im_end|>, are
    /// special tokens [default: they are text]
    #[arg(long, requires = "json")]
    pub special_tokens_in_messages: bool,
    /// Print one JSON document with the prompt, its ids, and where its template was found
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct SynthArgs {
    /// Architecture whose shape is written
    #[arg(value_parser = PossibleValuesParser::new(synth::architectures()))]
    pub arch: String,
    /// The GGUF file to write
    #[arg(value_hint = ValueHint::FilePath)]
    pub out: PathBuf,
    /// Type of the weights, as in Q4_K_M, Q8_0, BF16 [default: that of published files]
    #[arg(long, value_name = "TYPE")]
    pub quantisation: Option<String>,
    /// Layers to write, counted from the first: each keeps its kind, so a hybrid model needs enough to
    /// reach one with attention [default: as many as the architecture has]
    #[arg(long, value_name = "N", value_parser = count())]
    pub layers: Option<usize>,
    /// Experts of a token [default: as many as the architecture has]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    pub experts_used: Option<u32>,
    /// Positions that the model says it was trained for [default: as many as the architecture]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// Also write the layer for multi-token prediction that the published model has
    #[arg(long)]
    pub mtp: bool,
    /// Seed of the random weights
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Replace OUT if it exists
    #[arg(long)]
    pub force: bool,
    /// Print one JSON document about the work
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
#[command(group = clap::ArgGroup::new("target").required(true))]
pub struct PackArgs {
    /// GGUF file (or one file of a split set) or Hugging Face folder; a pack for --to-gguf and
    /// --to-huggingface
    #[arg(value_hint = ValueHint::AnyPath)]
    pub model: PathBuf,
    /// The pack to write
    #[arg(short, long, value_name = "OUT", value_hint = ValueHint::FilePath, group = "target")]
    pub output: Option<PathBuf>,
    /// Write the GGUF file that the pack MODEL was made from
    #[arg(long, value_name = "OUT", value_hint = ValueHint::FilePath, group = "target")]
    pub to_gguf: Option<PathBuf>,
    /// Write the Hugging Face folder that the pack MODEL was made from
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, group = "target")]
    pub to_huggingface: Option<PathBuf>,
    /// How the pack stores weights, with the same answers: BF16 in compact blocks, and blocks
    /// coded on disk with this codec or the best one; none stores everything as it is
    #[arg(long, value_enum, value_name = "NAME", default_value_t = CodecArg::Auto, requires = "output")]
    pub codec: CodecArg,
    /// Replace the output if it exists
    #[arg(long, conflicts_with = "to_huggingface")]
    pub force: bool,
    /// How MODEL is read: io_uring, threads with pread, or what works best
    #[arg(long, value_enum, value_name = "NAME", default_value_t = IoArg::Auto)]
    pub io: IoArg,
    /// Print one JSON document about the work
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct VerifyArgs {
    /// The pack (.fbay)
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// How the file is read: io_uring, threads with pread, or what works best
    #[arg(long, value_enum, value_name = "NAME", default_value_t = IoArg::Auto)]
    pub io: IoArg,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum KvTypeArg {
    F16,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_0")]
    Q4_0,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum IoArg {
    Auto,
    Uring,
    Pread,
    Mmap,
}

/// How a pack stores weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum CodecArg {
    Auto,
    None,
    Compact,
    Exponents,
    Zstd,
    Gdeflate,
}

/// Read engines of [`IoArg`], and cuFile, which reads directly to GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum LoadIoArg {
    Auto,
    Uring,
    Pread,
    Mmap,
    Cufile,
}

/// Device to compute on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    Auto,
    Cpu,
    Cuda(Option<u32>),
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        match text {
            "auto" => Ok(Device::Auto),
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(None)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|index| index.parse().ok())
                .map(|index| Device::Cuda(Some(index)))
                .ok_or_else(|| "no such device: use auto, cpu, cuda or cuda:N".to_string()),
        }
    }
}

fn policy() -> impl TypedValueParser<Value = PolicyKind> {
    let names = PossibleValuesParser::new(PolicyKind::ALL.map(PolicyKind::name));
    names.try_map(|name| name.parse::<PolicyKind>())
}

fn routing_profile() -> impl TypedValueParser<Value = RoutingProfile> {
    let names = PossibleValuesParser::new(RoutingProfile::names());
    names.try_map(|name| RoutingProfile::find(&name).ok_or("there is no such profile"))
}

fn replay_policy() -> impl TypedValueParser<Value = ReplayPolicy> {
    let names = ReplayPolicy::all().into_iter().map(ReplayPolicy::name);
    PossibleValuesParser::new(names).try_map(|name| name.parse::<ReplayPolicy>())
}

fn predictor() -> impl TypedValueParser<Value = Predictor> {
    let names = PossibleValuesParser::new(Predictor::ALL.map(Predictor::name));
    names.try_map(|name| name.parse::<Predictor>())
}

fn count() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=u32::MAX.into())
}

/// Returns the definition of the command line. A negative number is a value of the option before it, whose parser
/// then says what is wrong with it. Prose below the options is wrapped to the width of the terminal. `-h` shows the
/// options that people need first, `--help` all.
pub fn command() -> clap::Command {
    let value = |argument: clap::Arg| match argument.is_positional()
        || !argument.get_action().takes_values()
    {
        true => argument,
        false => argument.allow_negative_numbers(true),
    };
    let one = |command: clap::Command| {
        let text = command.get_after_help().map(|text| help::reflow(&text.to_string()));
        let command = help::shortened(command.mut_args(value).mut_args(completed));
        match text {
            Some(text) => command.after_long_help(text),
            None => command,
        }
    };
    one(<Cli as clap::CommandFactory>::command()).mut_subcommands(one)
}

/// Adds completion by names of models to the arguments that take them.
fn completed(argument: clap::Arg) -> clap::Arg {
    match argument.get_id().as_str() {
        "model" | "models" if argument.is_positional() => {
            argument.add(ArgValueCompleter::new(completions::models))
        }
        "names" => argument.add(ArgValueCompleter::new(completions::names)),
        _ => argument,
    }
}

/// Parses the arguments of a program. The first one is the program's name.
#[cfg(test)]
pub fn parse_all<I: IntoIterator<Item = T>, T: Into<std::ffi::OsString> + Clone>(
    arguments: I,
) -> Result<Cli, clap::Error> {
    parse_with(command(), arguments)
}

/// Parses the arguments of a program by a definition of the command line.
pub fn parse_with<I: IntoIterator<Item = T>, T: Into<std::ffi::OsString> + Clone>(
    mut command: clap::Command,
    arguments: I,
) -> Result<Cli, clap::Error> {
    let matches = command.try_get_matches_from_mut(arguments)?;
    Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    /// The test of outputs must have a row for every path in this list, so a new path argument belongs there.
    #[test]
    fn every_path_argument_is_listed_as_input_or_output() {
        let path = std::any::TypeId::of::<PathBuf>();
        let mut found = Vec::new();
        for command in Cli::command().get_subcommands() {
            for argument in command.get_arguments() {
                if argument.get_value_parser().type_id() == path {
                    let name = match argument.get_long() {
                        Some(long) => format!("--{long}"),
                        None => argument.get_id().to_string(),
                    };
                    found.push(format!("{} {name}", command.get_name()));
                }
            }
        }
        let listed = include_str!("../tests/cli/path_arguments.txt");
        let roles = |line: &str| {
            line.strip_suffix(" input").or(line.strip_suffix(" output")).map(str::to_owned)
        };
        let mut listed: Vec<String> =
            listed.lines().map(|line| roles(line).expect("a role")).collect();
        found.sort();
        listed.sort();
        assert_eq!(found, listed, "list it in tests/cli/path_arguments.txt");
    }
}
