//! `forebay bench --arriving` measures the gaps of sequences while a long prompt arrives.

use std::path::Path;

use forebay_engine::engine::{EngineOptions, Latency};
use forebay_engine::{ArrivalRun, Engine, ModelInfo, Session, SessionStatistics, median};
use serde::Serialize;

use crate::args::BenchArgs;
use crate::failure::{Outcome, usage};
use crate::output::{self, Align};
use crate::progress::StepProgress;
use crate::statistics::{self, After};

#[derive(Serialize)]
struct Document<'a> {
    path: &'a Path,
    model: &'a ModelInfo,
    /// Bound of `--max-latency` in seconds.
    max_latency_seconds: Option<f64>,
    arrivals: &'a [ArrivalRun],
    statistics: SessionStatistics,
}

/// Measures every number of sequences that `args` ask for, and prints the results. Returns the session.
pub fn run(mut session: Session, args: &BenchArgs, arriving: usize) -> Outcome<Session> {
    if let Some(most) = args.parallel.iter().find(|most| **most >= session.sequences()) {
        let largest = output::counted(session.sequences() - 1, "sequence");
        return usage(format!(
            "--parallel {most}: beside a prompt, this device runs up to {largest}"
        ));
    }
    let progress = StepProgress::new("measured", (args.parallel.len() * (args.repeat + 1)) as u64);
    let mut arrivals = Vec::new();
    for &sequences in &args.parallel {
        let latency = args.max_latency.map_or(Latency::Automatic, Latency::AtMost);
        let running = Some(sequences + 1);
        let options = EngineOptions { running, latency, ..EngineOptions::default() };
        let mut engine = Engine::new(session, &options);
        // The first run warms up the processor's caches, the memory and the residency.
        for run in 0..=args.repeat {
            let measured =
                engine.bench_arrival(sequences, arriving, args.gen_tokens, run as u64)?;
            if run > 0 {
                arrivals.push(measured);
            }
            progress.step();
        }
        session = engine.into_session();
    }
    drop(progress);
    match args.json {
        true => output::json(&Document {
            path: &args.model,
            model: session.info(),
            max_latency_seconds: args.max_latency.map(|most| most.as_secs_f64()),
            arrivals: &arrivals,
            statistics: session.statistics(),
        })?,
        false => print(&session, args, &arrivals)?,
    }
    Ok(session)
}

fn print(session: &Session, args: &BenchArgs, arrivals: &[ArrivalRun]) -> Outcome {
    let head = [
        "sequences",
        "usual gap ms",
        "longest",
        "times usual",
        "pass alone ms",
        "longest / pass",
        "first token s",
        "alone",
        "tokens meanwhile",
        "passes",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    for runs in arrivals.chunks(args.repeat) {
        let of = |what: fn(&ArrivalRun) -> f64| median(runs.iter().map(what));
        let over_usual = |run: &ArrivalRun| run.longest_gap_seconds / run.usual_gap_seconds;
        let over_pass = |run: &ArrivalRun| run.longest_gap_seconds / run.longest_pass_alone_seconds;
        rows.push(vec![
            runs[0].sequences.to_string(),
            format!("{:.2}", 1e3 * of(|run| run.usual_gap_seconds)),
            format!("{:.2}", 1e3 * of(|run| run.longest_gap_seconds)),
            format!("{:.2}", of(over_usual)),
            format!("{:.2}", 1e3 * of(|run| run.longest_pass_alone_seconds)),
            format!("{:.2}", of(over_pass)),
            format!("{:.2}", of(|run| run.first_token_seconds)),
            format!("{:.2}", of(|run| run.first_token_alone_seconds)),
            format!("{:.0}", of(|run| run.generated_meanwhile as f64)),
            format!("{:.0}", of(|run| run.prompt_passes as f64)),
        ]);
    }
    output::print(&output::table(&[Align::Right; 10], &rows))?;
    if let Some(source) = args.followed.source() {
        output::say(format_args!("  routing  from {}, not the model's own\n", source.display()));
    }
    output::say_labelled(&statistics::block(session, &args.model, After::Benchmark));
    Ok(())
}
