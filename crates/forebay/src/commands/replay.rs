//! `forebay replay` replays recorded routing with any cache policy and capacity.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use forebay_engine::Interrupt;
use forebay_lab::csv::quoted;
use forebay_lab::replay::{Prediction, Predictor, ReplayPolicy, predict, replay_while};
use forebay_store::{OutputFile, OutputStream};
use forebay_stream::{
    CacheCounters, Capacity, Lookups, Phase, ReplayCounters, RoutingTrace, routing,
};
use serde::Serialize;

use crate::args::{CapacityArg, PhaseArg, ReplayArgs};
use crate::failure::{Outcome, usage};
use crate::interrupt;
use crate::output::{self, Align, grouped};
use crate::outputs;
use crate::size::format as bytes;

#[derive(Serialize)]
struct Document {
    phase: PhaseArg,
    /// True if a batch is kept whole even if it is larger than the capacity.
    batch_may_exceed: bool,
    traces: Vec<Report>,
}

/// Results for one trace.
#[derive(Serialize)]
struct Report {
    path: PathBuf,
    model: String,
    architecture: String,
    prompt_tokens: u64,
    generated_tokens: u64,
    lookups: u64,
    experts_bytes: u64,
    cycle_bytes: u64,
    replays: Vec<Replay>,
    predictions: Vec<Predictions>,
}

/// Result of one policy at one capacity.
#[derive(Serialize)]
struct Replay {
    policy: ReplayPolicy,
    capacity: String,
    /// Hit rate of the tokens that `phase` of the document names.
    hit_rate: f64,
    /// Misses of generated tokens, divided by their number, whatever `phase` says. `null` without generated tokens.
    generated_misses_per_token: Option<f64>,
    counters: ReplayCounters,
}

/// Result of one predictor at one capacity.
#[derive(Serialize)]
struct Predictions {
    predictor: &'static str,
    policy: ReplayPolicy,
    capacity: String,
    predictions_per_layer: usize,
    #[serde(flatten)]
    prediction: Prediction,
}

/// Default capacities, as shares of the experts.
const DEFAULT_SHARES: [&str; 6] = ["5%", "10%", "25%", "50%", "75%", "90%"];

pub fn run(args: ReplayArgs) -> Outcome {
    if args.csv && args.json {
        return usage("--csv and --json are two forms of one answer: give one of them");
    }
    if (args.to_csv.is_some() || args.to_trace.is_some()) && args.traces.len() > 1 {
        return usage("--to-csv and --to-trace convert one trace: give one");
    }
    let mut outputs = outputs::begin(args.force, args.to_csv.is_some() || args.to_trace.is_some())?;
    args.traces.iter().for_each(|trace| outputs.protect(trace));
    let to_csv =
        args.to_csv.as_deref().map(|path| outputs::create(&mut outputs, path)).transpose()?;
    let to_trace =
        args.to_trace.as_deref().map(|path| outputs::create(&mut outputs, path)).transpose()?;
    let mut traces = Vec::new();
    for path in &args.traces {
        traces.push((path, open(path)?));
    }
    if to_csv.is_some() || to_trace.is_some() {
        let (to_csv, to_trace) =
            (to_csv.map(OutputFile::into_stream), to_trace.map(OutputFile::into_stream));
        return convert(&traces[0].1, to_csv, to_trace);
    }
    let mut reports = Vec::new();
    for (path, trace) in traces {
        reports.push(report(path, &trace, &args)?);
    }
    let document =
        Document { phase: args.phase, batch_may_exceed: args.keep_batches, traces: reports };
    if args.json {
        return output::json(&document);
    }
    output::print(&if args.csv { csv(&document) } else { text(&document) })
}

/// Reads a trace in any of its forms.
pub fn open(path: &Path) -> anyhow::Result<RoutingTrace> {
    let named = || path.display().to_string();
    let file = File::open(path).with_context(named)?;
    let file = Interruptible { file, interrupt: interrupt::token() };
    routing::read_any(file).with_context(named)
}

/// A file whose reads fail once the command is interrupted. Large traces take seconds to read.
struct Interruptible {
    file: File,
    interrupt: Interrupt,
}

impl Read for Interruptible {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.interrupt.check().map_err(io::Error::other)?;
        self.file.read(buffer)
    }
}

fn convert(
    trace: &RoutingTrace,
    to_csv: Option<OutputStream>,
    to_trace: Option<OutputStream>,
) -> Outcome {
    if let Some(mut file) = to_csv {
        let path = outputs::shown(file.path());
        trace.write_csv(&mut file).with_context(|| path.clone())?;
        file.commit()?;
        output::tell!("{}: {} tokens as CSV", path, grouped(trace.tokens() as u64));
    }
    if let Some(file) = to_trace {
        let path = outputs::shown(file.path());
        let file = trace.write(file).with_context(|| path.clone())?;
        file.commit()?;
        output::tell!("{}: a trace of {} tokens", path, grouped(trace.tokens() as u64));
    }
    Ok(())
}

fn report(path: &Path, trace: &RoutingTrace, args: &ReplayArgs) -> Outcome<Report> {
    let lookups = Lookups::of(trace);
    let tokens = |phase| -> u64 {
        let of_phase = trace.batches().filter(|batch| batch.phase == phase);
        of_phase.map(|batch| batch.tokens.len() as u64).sum()
    };
    let generated_tokens = tokens(Phase::Generate);
    let policies = match args.policy.as_slice() {
        [] => ReplayPolicy::all(),
        policies => policies.to_vec(),
    };
    let capacities = match args.capacity.as_slice() {
        [] => DEFAULT_SHARES.map(|share| share.parse().expect("a share")).to_vec(),
        capacities => capacities.to_vec(),
    };
    let mut replays = Vec::new();
    for &policy in &policies {
        for capacity in &capacities {
            replays.push(one(&lookups, policy, capacity, generated_tokens, args)?);
        }
    }
    let mut predictions = Vec::new();
    for &predictor in &args.predict {
        for capacity in &capacities {
            predictions
                .extend(predict_all(path, trace, &lookups, predictor, &policies, capacity, args)?);
        }
    }
    Ok(Report {
        path: path.to_path_buf(),
        model: trace.header().model.clone(),
        architecture: trace.header().architecture.clone(),
        prompt_tokens: tokens(Phase::Prompt),
        generated_tokens,
        lookups: lookups.len() as u64,
        experts_bytes: lookups.total_bytes(),
        cycle_bytes: lookups.cycle_bytes(),
        replays,
        predictions,
    })
}

fn one(
    lookups: &Lookups,
    policy: ReplayPolicy,
    capacity: &CapacityArg,
    generated_tokens: u64,
    args: &ReplayArgs,
) -> Outcome<Replay> {
    let whole = args.keep_batches;
    let shape = capacity.capacity.shape(policy.scope(), lookups.layers(), whole);
    let interrupt = interrupt::token();
    let counters = replay_while(lookups, policy, &shape, |_| match interrupt.is_requested() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    });
    interrupt.check()?;
    let misses = counters.generate.misses() as f64;
    Ok(Replay {
        policy,
        capacity: capacity.text.clone(),
        hit_rate: of_phase(&counters, args.phase).hit_rate(),
        generated_misses_per_token: (generated_tokens > 0)
            .then(|| misses / generated_tokens as f64),
        counters,
    })
}

fn predict_all(
    path: &Path,
    trace: &RoutingTrace,
    lookups: &Lookups,
    predictor: Predictor,
    policies: &[ReplayPolicy],
    capacity: &CapacityArg,
    args: &ReplayArgs,
) -> Outcome<Vec<Predictions>> {
    let most = trace.header().layers.iter().map(|layer| layer.used as usize).max().unwrap_or(1);
    let depth = args.predictions.unwrap_or(most);
    let mut found = Vec::new();
    for &policy in policies {
        // A policy that knows the future needs no predictions.
        let ReplayPolicy::Online(online) = policy else { continue };
        interrupt::token().check()?;
        let made = predict(trace, lookups, online, capacity.capacity, predictor, depth);
        let Some(prediction) = made else {
            return usage(format!(
                "{}: --predict {predictor} needs router scores, and this trace has none",
                path.display()
            ));
        };
        found.push(Predictions {
            predictor: predictor.name(),
            policy,
            capacity: capacity.text.clone(),
            predictions_per_layer: depth,
            prediction,
        });
    }
    Ok(found)
}

fn of_phase(counters: &ReplayCounters, phase: PhaseArg) -> CacheCounters {
    match phase {
        PhaseArg::All => counters.all,
        PhaseArg::Prompt => counters.prompt,
        PhaseArg::Generate => counters.generate,
    }
}

fn csv(document: &Document) -> String {
    let mut text =
        "trace,policy,capacity,phase,lookups,hits,misses,evictions,hit_rate\n".to_owned();
    for report in &document.traces {
        for replay in &report.replays {
            let counted = of_phase(&replay.counters, document.phase);
            let _ = writeln!(
                text,
                "{},{},{},{},{},{},{},{},{:.6}",
                quoted(&report.path.display().to_string()),
                replay.policy,
                replay.capacity,
                document.phase.name(),
                counted.lookups,
                counted.hits,
                counted.misses(),
                counted.evictions,
                counted.hit_rate()
            );
        }
    }
    text
}

fn text(document: &Document) -> String {
    let mut text = String::new();
    for report in &document.traces {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&summary(report));
        text.push('\n');
        text.push_str(&rates(report, document.phase));
        if !report.predictions.is_empty() {
            text.push('\n');
            text.push_str(&prediction_table(report));
        }
    }
    text
}

fn summary(report: &Report) -> String {
    let lines = [
        ("trace", report.path.display().to_string()),
        ("model", format!("{}, {}", report.model, report.architecture)),
        (
            "tokens",
            format!(
                "{} of prompts, {} generated; {} lookups of experts",
                grouped(report.prompt_tokens),
                grouped(report.generated_tokens),
                grouped(report.lookups)
            ),
        ),
        (
            "experts",
            format!(
                "{}; {} for one token: a global LRU list below that never hits while text is generated",
                bytes(report.experts_bytes),
                bytes(report.cycle_bytes)
            ),
        ),
    ];
    lines.iter().fold(String::new(), |mut text, (name, line)| {
        let _ = writeln!(text, "{name:>8}  {line}");
        text
    })
}

/// Formats hits per 100 lookups, and misses for each generated token, as tables with a row for each policy and a column for
/// each capacity.
fn rates(report: &Report, phase: PhaseArg) -> String {
    let mut capacities: Vec<&str> = Vec::new();
    for replay in &report.replays {
        if !capacities.contains(&replay.capacity.as_str()) {
            capacities.push(&replay.capacity);
        }
    }
    let title = match phase {
        PhaseArg::All => "hit %, all tokens",
        PhaseArg::Prompt => "hit %, prompts",
        PhaseArg::Generate => "hit %, generated tokens",
    };
    let title = title.to_owned();
    let mut rows =
        vec![std::iter::once(title).chain(capacities.iter().map(|c| c.to_string())).collect()];
    for replays in report.replays.chunks(capacities.len().max(1)) {
        let mut row = vec![replays[0].policy.to_string()];
        row.extend(replays.iter().map(|replay| format!("{:.1}", 100.0 * replay.hit_rate)));
        rows.push(row);
    }
    let mut columns = vec![Align::Right; capacities.len() + 1];
    columns[0] = Align::Left;
    let mut text = output::table(&columns, &rows);
    if report.generated_tokens > 0 {
        let mut rows = vec![rows.swap_remove(0)];
        rows[0][0] = "misses for each generated token".to_owned();
        for replays in report.replays.chunks(capacities.len().max(1)) {
            let misses = |replay: &Replay| replay.generated_misses_per_token.unwrap_or(0.0);
            let mut row = vec![replays[0].policy.to_string()];
            row.extend(replays.iter().map(|replay| format!("{:.1}", misses(replay))));
            rows.push(row);
        }
        text.push('\n');
        text.push_str(&output::table(&columns, &rows));
    }
    text
}

fn prediction_table(report: &Report) -> String {
    let head = [
        "predictions",
        "policy",
        "capacity",
        "recall",
        "precision",
        "misses",
        "waited for",
        "useful reads",
        "wasted",
        "displaced",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    for predictions in &report.predictions {
        let made = &predictions.prediction;
        let share = |part: u64, of: u64| match of {
            0 => "-".to_owned(),
            of => format!("{:.1} %", 100.0 * part as f64 / of as f64),
        };
        rows.push(vec![
            format!("{} {}", predictions.predictor, predictions.predictions_per_layer),
            predictions.policy.to_string(),
            predictions.capacity.clone(),
            share(made.foreseen, made.lookups),
            share(made.foreseen, made.predictions),
            grouped(made.misses_without),
            grouped(made.misses_with),
            share(made.reads_useful, made.reads_prefetched),
            bytes(made.wasted_bytes),
            bytes(made.displaced_bytes),
        ]);
    }
    let mut columns = vec![Align::Right; head.len()];
    columns[..3].fill(Align::Left);
    output::table(&columns, &rows)
}

impl std::str::FromStr for CapacityArg {
    type Err = String;

    fn from_str(text: &str) -> Result<CapacityArg, String> {
        let wrong =
            || "write a size (4GiB), a share of the experts (25%) or experts of a layer (32/layer)";
        let capacity = if let Some(share) = text.strip_suffix('%') {
            let share: f64 = share.parse().map_err(|_| wrong())?;
            if !(0.0..=100.0).contains(&share) {
                return Err("a share of the experts is from 0% to 100%".to_owned());
            }
            Capacity::Share(share / 100.0)
        } else if let Some(count) = text.strip_suffix("/layer") {
            Capacity::ExpertsPerLayer(count.parse().map_err(|_| wrong())?)
        } else {
            Capacity::Bytes(
                crate::size::parse(text).map_err(|why| format!("{why}; or {}", wrong()))?,
            )
        };
        Ok(CapacityArg { text: text.to_owned(), capacity })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities() {
        let of = |text: &str| text.parse::<CapacityArg>().map(|arg| arg.capacity);
        assert_eq!(of("25%"), Ok(Capacity::Share(0.25)));
        assert_eq!(of("32/layer"), Ok(Capacity::ExpertsPerLayer(32)));
        assert_eq!(of("500MiB"), Ok(Capacity::Bytes(500 << 20)));
        for wrong in ["", "%", "101%", "-1%", "NaN%", "x/layer", "-3/layer", "8"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn fields_are_quoted_where_needed() {
        assert_eq!(quoted("a b"), "a b");
        assert_eq!(quoted("a,\"b\""), "\"a,\"\"b\"\"\"");
    }
}
