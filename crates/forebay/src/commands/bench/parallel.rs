//! `forebay bench --parallel` measures several sequences that run together.

use forebay_engine::engine::{EngineOptions, Latency};
use forebay_engine::plan::PredictedRate;
use forebay_engine::{Engine, ParallelRun, Session};
use serde::Serialize;

use crate::args::BenchArgs;
use crate::failure::{Outcome, usage};
use crate::output::{self, Align};
use crate::progress::StepProgress;
use crate::statistics::{self, After};

/// Medians of the runs with one number of sequences.
#[derive(Serialize)]
pub struct ParallelSummary {
    pub sequences: usize,
    /// Tokens of all sequences per second.
    prompt_tokens_per_second: f64,
    generate_tokens_per_second: f64,
    generate_tokens_per_second_min: f64,
    generate_tokens_per_second_max: f64,
    /// Tokens of one sequence per second.
    generate_tokens_per_second_each: f64,
    first_token_seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    experts_per_pass: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    missing_experts_per_pass: Option<f64>,
    /// Sequences that generate in one pass, on average.
    generating_per_pass: f64,
    /// Predicted rate of this many unrelated sequences.
    #[serde(rename = "generate_predicted")]
    predicted: PredictedRate,
    runs: Vec<ParallelRun>,
}

/// Measures every number of sequences that `args` ask for. Returns the session, too.
pub fn measure(
    mut session: Session,
    args: &BenchArgs,
    predict: impl Fn(&Session, usize) -> PredictedRate,
) -> Outcome<(Session, Vec<ParallelSummary>)> {
    if let Some(most) = args.parallel.iter().find(|most| **most > session.sequences()) {
        let largest = output::counted(session.sequences(), "sequence");
        return usage(format!("--parallel {most}: this device runs up to {largest} at a time"));
    }
    let steps = args.parallel.len() * (args.repeat + 1);
    let progress = StepProgress::new("measured", steps as u64);
    let mut summaries = Vec::with_capacity(args.parallel.len());
    for &sequences in &args.parallel {
        let (prompt, generate) = (args.prompt_tokens, args.gen_tokens);
        // The first run warms up the processor's caches, the memory and the residency.
        let mut runs = Vec::with_capacity(args.repeat + 1);
        if args.scheduled {
            let latency = args.max_latency.map_or(Latency::Unbounded, Latency::AtMost);
            let running = Some(sequences);
            let options = EngineOptions { running, latency, ..EngineOptions::default() };
            let mut engine = Engine::new(session, &options);
            for run in 0..=args.repeat {
                runs.push(engine.bench_parallel(sequences, prompt, generate, run as u64)?);
                progress.step();
            }
            session = engine.into_session();
        } else {
            for run in 0..=args.repeat {
                runs.push(session.bench_parallel(sequences, prompt, generate, run as u64)?);
                progress.step();
            }
        }
        runs.remove(0);
        let predicted = predict(&session, sequences);
        summaries.push(summary(sequences, runs, predicted));
    }
    Ok((session, summaries))
}

fn summary(sequences: usize, runs: Vec<ParallelRun>, predicted: PredictedRate) -> ParallelSummary {
    let sorted = |of: fn(&ParallelRun) -> f64| {
        let mut values: Vec<f64> = runs.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let median = |of: fn(&ParallelRun) -> f64| forebay_engine::median(sorted(of));
    let generate = sorted(|run| run.generate_tokens_per_second);
    let counted = runs.iter().all(|run| run.experts_per_pass.is_some());
    let counts = |of: fn(&ParallelRun) -> f64| counted.then(|| median(of));
    ParallelSummary {
        sequences,
        prompt_tokens_per_second: median(|run| run.prompt_tokens_per_second),
        generate_tokens_per_second: median(|run| run.generate_tokens_per_second),
        generate_tokens_per_second_min: generate.first().copied().unwrap_or(0.0),
        generate_tokens_per_second_max: generate.last().copied().unwrap_or(0.0),
        generate_tokens_per_second_each: median(|run| run.generate_tokens_per_second_each),
        first_token_seconds: median(|run| run.first_token_seconds),
        experts_per_pass: counts(|run| run.experts_per_pass.unwrap_or(0.0)),
        missing_experts_per_pass: counts(|run| run.missing_experts_per_pass.unwrap_or(0.0)),
        generating_per_pass: median(|run| run.generating_per_pass),
        predicted,
        runs,
    }
}

pub fn print(session: &Session, args: &BenchArgs, summaries: &[ParallelSummary]) -> Outcome {
    let head = [
        "sequences",
        "prompt tokens/s",
        "generate tokens/s",
        "predicted",
        "of each",
        "first token s",
        "experts a pass",
        "missing",
        "at a time",
    ];
    let mut rows = vec![head.map(String::from).to_vec()];
    let count = |of: Option<f64>| of.map_or("-".into(), |of| format!("{of:.1}"));
    for summary in summaries {
        rows.push(vec![
            summary.sequences.to_string(),
            format!("{:.2}", summary.prompt_tokens_per_second),
            format!("{:.2}", summary.generate_tokens_per_second),
            super::in_words(&summary.predicted),
            format!("{:.2}", summary.generate_tokens_per_second_each),
            format!("{:.3}", summary.first_token_seconds),
            count(summary.experts_per_pass),
            count(summary.missing_experts_per_pass),
            format!("{:.1}", summary.generating_per_pass),
        ]);
    }
    output::print(&output::table(&[Align::Right; 9], &rows))?;
    if let Some(source) = args.followed.source() {
        output::say(format_args!("  routing  from {}, not the model's own\n", source.display()));
    }
    output::say_labelled(&statistics::block(session, &args.model, After::Benchmark));
    Ok(())
}
