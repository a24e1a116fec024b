//! `forebay bench --shared-prefix` measures requests that begin alike.

use std::path::Path;

use forebay_engine::engine::EngineOptions;
use forebay_engine::{Engine, ModelInfo, PrefixRun, Session, SessionStatistics, median};
use serde::Serialize;

use crate::args::BenchArgs;
use crate::failure::Outcome;
use crate::output::{self, Align};
use crate::progress::StepProgress;
use crate::statistics::{self, After};

#[derive(Serialize)]
struct Document<'a> {
    path: &'a Path,
    model: &'a ModelInfo,
    prefixes: &'a [PrefixRun],
    statistics: SessionStatistics,
}

/// Measures every number of requests that `args` ask for, and prints the results. Returns the session.
pub fn run(session: Session, args: &BenchArgs, prefix: usize) -> Outcome<Session> {
    let mut engine = Engine::new(session, &EngineOptions::default());
    let progress = StepProgress::new("measured", (args.parallel.len() * (args.repeat + 1)) as u64);
    let mut runs = Vec::new();
    for &requests in &args.parallel {
        // The first run warms up the processor's caches, the memory and the residency.
        for run in 0..=args.repeat {
            let measured = engine.bench_prefix(requests, prefix, run as u64)?;
            if run > 0 {
                runs.push(measured);
            }
            progress.step();
        }
    }
    drop(progress);
    let session = engine.into_session();
    match args.json {
        true => output::json(&Document {
            path: &args.model,
            model: session.info(),
            prefixes: &runs,
            statistics: session.statistics(),
        })?,
        false => print(&session, args, &runs)?,
    }
    Ok(session)
}

fn print(session: &Session, args: &BenchArgs, runs: &[PrefixRun]) -> Outcome {
    let head = ["requests", "first token s", "of later ones", "times sooner", "KV / once"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for runs in runs.chunks(args.repeat) {
        let of = |what: fn(&PrefixRun) -> f64| median(runs.iter().map(what));
        rows.push(vec![
            runs[0].requests.to_string(),
            format!("{:.4}", of(|run| run.first_seconds)),
            format!("{:.4}", of(|run| run.later_seconds)),
            format!("{:.1}", of(|run| run.first_seconds / run.later_seconds)),
            format!("{:.2}", of(|run| run.kv_bytes as f64 / run.kv_bytes_once as f64)),
        ]);
    }
    output::print(&output::table(&[Align::Right; 5], &rows))?;
    output::say_labelled(&statistics::block(session, &args.model, After::Benchmark));
    Ok(())
}
