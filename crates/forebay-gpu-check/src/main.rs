//! `gpu-check`: compares every kernel with the CPU or with f64 arithmetic, and whole models with references. It also
//! measures the speed of kernels.

mod bench;
mod beside;
mod checks;
mod harness;
mod late;
#[path = "../../forebay-engine/tests/support/logits.rs"]
#[allow(dead_code, reason = "shared with the tests of the engine, which read routing, too")]
mod logits;
mod many;
mod models;
mod mtp;
mod older;
#[path = "../../forebay-engine/tests/support/proposing.rs"]
mod proposing;
#[path = "../../forebay-compute/tests/weights/mod.rs"]
#[allow(dead_code, reason = "shared with the tests of the CPU's products")]
mod random;
mod sessions;
mod slots;
mod split;
mod states;
mod tiers;
mod weights;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use forebay_store::Outputs;

use harness::Context;

/// Checks the CUDA kernels, or measures them.
#[derive(Parser)]
struct Arguments {
    /// Measure instead of checking.
    #[arg(long)]
    bench: bool,
    /// Only checks (or measurements) whose names begin like this; may be given several times.
    #[arg(long, value_name = "PREFIX")]
    only: Vec<String>,
    /// Also write the results to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Replace that file if it exists.
    #[arg(long)]
    force: bool,
    /// Print names and run nothing.
    #[arg(long)]
    list: bool,
    /// Also check whole models: the folder of the fixtures.
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,
    /// Also check passes in two lanes with this model, whose layers have many experts.
    #[arg(long, value_name = "MODEL")]
    mixture: Option<PathBuf>,
    /// Index of the GPU to use, counted from 0.
    #[arg(long, default_value_t = 0)]
    gpu: usize,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("gpu-check: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<bool> {
    let wanted = |name: &str| {
        arguments.only.is_empty() || arguments.only.iter().any(|only| name.starts_with(only))
    };
    let mut checks = checks::checks();
    if let Some(fixtures) = &arguments.models {
        checks.extend(models::checks(fixtures, arguments.gpu)?);
    }
    if let Some(mixture) = arguments.mixture.clone() {
        let ordinal = arguments.gpu;
        checks.push(harness::Check::new("model lanes", move |_| {
            many::check_lanes(&mixture, ordinal)
        }));
    }
    checks.retain(|check| wanted(&check.name));
    let mut benches = checks::benches();
    benches.retain(|bench| wanted(&bench.name));
    if arguments.list {
        checks.iter().for_each(|check| println!("check {}", check.name));
        benches.iter().for_each(|bench| println!("bench {}", bench.name));
        return Ok(true);
    }
    let mut outputs = Outputs::new(arguments.force);
    let report_file = arguments.json.as_deref().map(|path| outputs.create(path)).transpose()?;
    let context = Context::open(arguments.gpu)?;
    println!("{}", context.describe());
    let (passed, report) = if arguments.bench {
        (true, bench::run(&context, &benches)?)
    } else {
        harness::run(&context, &checks)
    };
    if let Some(file) = report_file {
        let mut file = file.into_stream();
        file.write_all(serde_json::to_string_pretty(&report)?.as_bytes())?;
        file.commit()?;
    }
    Ok(passed)
}
