//! `soak`: compares sessions at tight budgets on a failing disk with sessions that have everything in memory, for as
//! long as requested. A wrong token, an unclear error or a resource that grows ends it with status 1.

mod conversation;
mod fault_profile;
mod growth;
mod pair;
#[path = "../../../forebay-compute/tests/weights/mod.rs"]
#[allow(dead_code, reason = "shared with the tests of the CPU's products")]
mod random;
mod together;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use forebay_cuda::Gpu;
use forebay_engine::DeviceChoice;
use forebay_store::{IoKind, OutputFile};
use serde::Serialize;

use conversation::Then;
use fault_profile::FaultProfile;
use growth::Growth;
use pair::{Pair, Place};
use random::Random;

/// Number of conversations of a pair of sessions that is opened for one round.
const CONVERSATIONS: usize = 3;

/// Compares sessions that stream from a bad disk with resident ones, and looks for leaks.
#[derive(Parser)]
struct Arguments {
    /// Models, GGUF files or folders; a pack of each is used, too.
    #[arg(required = true, value_name = "MODEL")]
    models: Vec<PathBuf>,
    /// How long.
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// So many rounds instead, however long they take.
    #[arg(long)]
    rounds: Option<usize>,
    /// `cpu`, `cuda` or `cuda:N`.
    #[arg(long, default_value = "cpu", value_parser = device)]
    device: DeviceChoice,
    /// Threads that compute.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Positions of key/value cache, at most.
    #[arg(long, default_value_t = 1100)]
    context: usize,
    /// Another seed is another soak.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

fn device(text: &str) -> Result<DeviceChoice, String> {
    match text.split_once(':') {
        None if text == "cpu" => Ok(DeviceChoice::Cpu),
        None if text == "cuda" => Ok(DeviceChoice::Cuda(0)),
        Some(("cuda", ordinal)) => {
            ordinal.parse().map(DeviceChoice::Cuda).map_err(|_| "no number of a GPU".into())
        }
        _ => Err("cpu, cuda or cuda:N".into()),
    }
}

/// Counts of what the soak did.
#[derive(Default, Serialize)]
pub struct Tally {
    rounds: usize,
    sessions_opened: u64,
    conversations: u64,
    /// Number of requests that ran beside others.
    together: u64,
    /// Number of tokens that were compared with those of a resident session.
    tokens_compared: u64,
    /// Number of logits that were compared with those of a resident session.
    logits_compared: u64,
    cancelled: u64,
    truncated: u64,
    /// Number of calls that had to fail, in the same way in both sessions.
    bad_calls: u64,
    /// Number of errors that reached the caller, by kind.
    errors: BTreeMap<&'static str, u64>,
    /// Number of errors after which the call was resumed where it was.
    resumed: u64,
    /// Number of errors after which the call was repeated from its beginning.
    repeated: u64,
    /// Number of conversations that both sessions forgot, because layers with a window could not go back to where a
    /// call began.
    forgotten: u64,
    /// Number of disk requests of the streaming sessions that were repeated.
    retries: u64,
    /// Number of checksum mismatches in the streaming sessions.
    checksum_mismatches: u64,
    /// Number of bytes that the streaming sessions read.
    bytes_read: u64,
    /// Duration of the longest round.
    longest_round_seconds: f64,
    /// Description of the sessions of the longest round.
    longest_round: String,
}

#[derive(Serialize)]
struct Report {
    seconds: f64,
    #[serde(flatten)]
    tally: Tally,
    growth: Growth,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(report) => {
            let grown = report.growth.grown();
            let printed = if arguments.json { json(&report) } else { Ok(text(&report)) };
            match printed {
                Ok(text) => println!("{text}"),
                Err(error) => eprintln!("soak: {error:#}"),
            }
            grown.iter().for_each(|what| eprintln!("soak: {what}"));
            ExitCode::from(u8::from(!grown.is_empty()))
        }
        Err(error) => {
            eprintln!("soak: {error:#}");
            ExitCode::from(1)
        }
    }
}

fn run(arguments: &Arguments) -> Result<Report> {
    let folder = tempfile::tempdir()?;
    let mut models = Vec::new();
    for (index, model) in arguments.models.iter().enumerate() {
        let pack = folder.path().join(format!("{index}.fbay"));
        let out = OutputFile::create(&pack)?;
        forebay_engine::pack::pack(model, out, IoKind::Auto, &mut |_, _| true)
            .with_context(|| model.display().to_string())?;
        models.extend([model.clone(), pack]);
    }
    let place =
        Place { device: arguments.device, threads: arguments.threads, context: arguments.context };
    let gpu = match arguments.device {
        DeviceChoice::Cuda(ordinal) => Some(Gpu::open(ordinal)?),
        DeviceChoice::Cpu | DeviceChoice::Auto => None,
    };
    let started = Instant::now();
    let over = |rounds: usize| match arguments.rounds {
        Some(count) => rounds >= count,
        None => started.elapsed().as_secs_f64() >= 60.0 * arguments.minutes,
    };
    let mut tally = Tally::default();
    // Sessions that stay open for the whole run, beside those opened for one round.
    let mut lasting = Vec::new();
    for model in &models {
        let mut random = Random::new(arguments.seed);
        let mut pair = Pair::open(model, &place, FaultProfile::Outage, &mut random, &mut tally)?;
        pair.fill(&mut random, &mut tally).with_context(|| pair.to_string())?;
        lasting.push(pair);
    }
    let mut growth = Growth::default();
    let mut last_said = Instant::now();
    while !over(tally.rounds) {
        let mut random = Random::new(arguments.seed ^ (tally.rounds as u64 + 1) << 16);
        let which = random.next() as usize % lasting.len();
        let round = tally.rounds;
        let pair = lasting.swap_remove(which);
        let name = format!("round {round}, a lasting session: {pair}");
        let (pair, then) = talk(pair, &mut random, &mut tally).with_context(|| name.clone())?;
        ensure!(then != Then::Stopped, "it stopped: {name}");
        lasting.push(pair);
        let began = Instant::now();
        let model = &models[random.next() as usize % models.len()];
        let fault_profile = FaultProfile::any(&mut random);
        let mut pair = Pair::open(model, &place, fault_profile, &mut random, &mut tally)
            .with_context(|| format!("round {round}, {}, {fault_profile:?}", model.display()))?;
        let name = format!("round {round}: {pair}");
        for _ in 0..CONVERSATIONS {
            let then;
            (pair, then) = talk(pair, &mut random, &mut tally).with_context(|| name.clone())?;
            if then == Then::Stopped {
                break;
            }
        }
        pair.count_reads(&mut tally);
        let seconds = began.elapsed().as_secs_f64();
        if seconds > tally.longest_round_seconds {
            (tally.longest_round_seconds, tally.longest_round) = (seconds, pair.to_string());
        }
        drop(pair);
        tally.rounds += 1;
        growth.sample(started, gpu.as_ref())?;
        if last_said.elapsed() > Duration::from_secs(60) {
            last_said = Instant::now();
            let (minutes, tokens) = (started.elapsed().as_secs() / 60, tally.tokens_compared);
            eprintln!("{minutes} min: {} rounds, {tokens} tokens", tally.rounds);
        }
    }
    lasting.iter().for_each(|pair| pair.count_reads(&mut tally));
    ensure!(tally.bytes_read > 0, "nothing was read: everything fitted the budgets");
    Ok(Report { seconds: started.elapsed().as_secs_f64(), tally, growth })
}

/// Has a conversation, or runs requests together.
fn talk(mut pair: Pair, random: &mut Random, tally: &mut Tally) -> Result<(Pair, Then)> {
    if random.next().is_multiple_of(4) {
        return pair.run_together(random, tally);
    }
    let then = pair.converse(random, tally)?;
    Ok((pair, then))
}

fn json(report: &Report) -> Result<String> {
    Ok(serde_json::to_string_pretty(report)?)
}

fn text(report: &Report) -> String {
    let tally = &report.tally;
    let errors: Vec<String> =
        tally.errors.iter().map(|(what, count)| format!("{count} {what}")).collect();
    let lines = [
        format!(
            "{:.1} min: {} rounds, {} sessions, {} conversations, {} requests beside others",
            report.seconds / 60.0,
            tally.rounds,
            tally.sessions_opened,
            tally.conversations,
            tally.together
        ),
        format!(
            "{} tokens and {} logits are those of resident sessions",
            tally.tokens_compared, tally.logits_compared
        ),
        format!(
            "{} calls cancelled, {} truncations, {} calls that had to fail",
            tally.cancelled, tally.truncated, tally.bad_calls
        ),
        format!(
            "errors that reached the caller: {}; went on {} times where it was, {} from the beginning, {} with nothing",
            if errors.is_empty() { "none".into() } else { errors.join(", ") },
            tally.resumed,
            tally.repeated,
            tally.forgotten
        ),
        format!(
            "read: {:.2} GB, {} requests repeated, {} checksums did not match",
            tally.bytes_read as f64 / 1e9,
            tally.retries,
            tally.checksum_mismatches
        ),
        format!("longest round: {:.1} s with {}", tally.longest_round_seconds, tally.longest_round),
        report.growth.to_string(),
    ];
    lines.join("\n")
}
