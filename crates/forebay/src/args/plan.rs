//! Arguments of `forebay plan`.

use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueHint};
use forebay_engine::{KvInVram, SessionOptions};
use forebay_stream::PolicyKind;

use super::{CpuOffloadArgs, Device, KvTypeArg, count, parse, policy};
use crate::size;

#[derive(Args)]
pub struct PlanArgs {
    /// GGUF file (or one file of a split set), pack, Hugging Face folder, name of the library, or a
    /// repository on Hugging Face, OWNER/REPO[:QUANT], of which only headers are read
    #[arg(value_hint = ValueHint::AnyPath)]
    pub model: Option<PathBuf>,
    /// Plan for a model of this shape, without a file; no NAME or an unknown one lists the shapes
    #[arg(long, value_name = "NAME", num_args = 0..=1, default_missing_value = "", conflicts_with = "model")]
    pub shape: Option<String>,
    /// With --shape: type of the weights, as in Q4_K_M, Q8_0, BF16 [default: that of published files]
    #[arg(long, value_name = "TYPE", requires = "shape")]
    pub quantisation: Option<String>,
    /// With a repository: branch, tag or commit
    #[arg(long, value_name = "REV", default_value = "main")]
    pub revision: String,
    /// VRAM for everything on the GPU, the driver's context included [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true)]
    pub vram: Option<u64>,
    /// RAM for weights: 8GiB, 8G or 8g (GB is decimal) [default: what the model needs, at most three
    /// quarters of the free RAM]
    #[arg(long, value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true)]
    pub ram: Option<u64>,
    /// Positions of context to reserve [default: what the model was trained for, at most 4096]
    #[arg(short, long, value_name = "N", value_parser = count())]
    pub ctx: Option<usize>,
    /// Where to compute: cpu, cuda or cuda:N; auto takes the device that is predicted to generate faster
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: Device,
    /// Type of the KV cache
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = KvTypeArg::F16)]
    pub kv_type: KvTypeArg,
    /// VRAM for the KV cache; the rest is in pinned RAM. auto takes what fits beside the dense weights
    /// [default: all in VRAM]
    #[arg(long, value_name = "SIZE|auto", value_parser = parse::kv_vram, allow_hyphen_values = true)]
    pub kv_vram: Option<KvInVram>,
    #[command(flatten)]
    pub cpu_offload: CpuOffloadArgs,
    /// Compute threads of the CPU [default: as many as the machine profile was made with]
    #[arg(short, long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=256))]
    pub threads: Option<usize>,
    /// Expert eviction policy
    #[arg(long, value_name = "NAME", default_value_t = SessionOptions::default().policy)]
    #[arg(value_parser = policy())]
    pub policy: PolicyKind,
    /// Machine profile that forebay doctor saved, for example on another machine [default: this
    /// machine's]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub profile: Option<PathBuf>,
    /// Take hit rates from this recorded routing (--trace-routing, or the CSV form) [default: a published
    /// recording of Qwen3-30B-A3B]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub routing: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}
