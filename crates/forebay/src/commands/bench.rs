//! `forebay bench` measures prompt and generation speed.

mod arrival;
mod parallel;
mod prefix;

use std::cell::OnceCell;
use std::path::Path;

use forebay_engine::plan::{HitCurve, PredictedRate, Work};
use forebay_engine::{
    ARRIVAL_PROMPT, BenchRun, ModelInfo, OWN_TOKENS, Session, SessionOptions, SessionStatistics,
    median,
};
use forebay_stream::{MemoryPlan, PolicyKind};
use serde::Serialize;

use self::parallel::ParallelSummary;
use crate::args::BenchArgs;
use crate::commands::plan;
use crate::config;
use crate::failure::{Outcome, usage};
use crate::open;
use crate::output::{self, Align};
use crate::outputs;
use crate::progress::StepProgress;
use crate::routing_file::{self, RoutingFile};
use crate::session_plan;
use crate::statistics::{self, After};
use crate::tracing_file::TracingFile;

#[derive(Serialize)]
struct Document<'a> {
    path: &'a Path,
    model: &'a ModelInfo,
    prompt: Option<Summary>,
    generate: Option<Summary>,
    runs: &'a [BenchRun],
    /// Measurements of several sequences together.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    parallel: Vec<ParallelSummary>,
    /// Source of the chosen experts, if not the model's routers.
    #[serde(skip_serializing_if = "Option::is_none")]
    routing_from: Option<&'a Path>,
    plan: Option<&'a MemoryPlan>,
    statistics: SessionStatistics,
}

/// Summary of one measurement over all runs.
#[derive(Serialize)]
struct Summary {
    tokens: usize,
    tokens_per_second_median: f64,
    tokens_per_second_min: f64,
    tokens_per_second_max: f64,
    /// Rate predicted from the machine profile, or `None` where a number would mislead.
    tokens_per_second_predicted: Option<f64>,
    /// Prediction with its range, or the reason why there is none.
    predicted: PredictedRate,
}

pub fn run(args: BenchArgs) -> Outcome {
    if args.prompt_tokens == 0 && args.gen_tokens == 0 {
        return usage("--prompt-tokens 0 and --gen-tokens 0 leave nothing to measure");
    }
    if args.max_latency.is_some() && !args.scheduled && args.arriving.is_none() {
        return usage("--max-latency is for --scheduled and --arriving");
    }
    let mut options = config::session(&args.budget)?;
    options.mtp = args.mtp.is_on();
    if options.mtp && !args.parallel.is_empty() {
        return usage(
            "--mtp on: proposals are checked for one sequence only: leave out --parallel",
        );
    }
    if options.mtp && (args.routing.trace_routing.is_some() || args.followed.source().is_some()) {
        return usage("--mtp on: proposals follow the model's routers, and are not recorded");
    }
    let context_for = reserve_context(&args, &mut options);
    let named = args.tracing.trace_io.is_some() || args.routing.trace_routing.is_some();
    let mut outputs = outputs::begin(args.tracing.force, named)?;
    outputs::protect_model(&mut outputs, &args.model);
    args.followed.routing_trace.iter().for_each(|trace| outputs.protect(trace));
    let tracing = TracingFile::start(&args.tracing, &mut outputs, &mut options)?;
    let routing = RoutingFile::create(&args.routing, &mut outputs)?;
    session_plan::follow(&args.model, &mut options);
    let mut session = open::session(&args.model, &options, context_for)?;
    if let Some(source) = routing_file::followed(&args.followed)? {
        session.follow_routing(source)?;
    }
    routing.record(&mut session)?;
    if !args.parallel.is_empty() {
        let depth = args.prompt_tokens + args.gen_tokens / 2;
        let curve = OnceCell::new();
        let predict = |session: &Session, sequences: usize| {
            let work = Work { sequences, ..Work::alone(args.prompt_tokens.max(1), depth) };
            let hits = || curve.get_or_init(|| hits(&args, session, options.policy)).clone();
            let predicted = plan::predicted(&args.model, session, hits, work);
            predicted.map_or_else(PredictedRate::none, |of| of.generate.shown)
        };
        if let Some(arriving) = args.arriving {
            let session = arrival::run(session, &args, arriving)?;
            return tracing.finish(session, "bench");
        }
        if let Some(prefix) = args.shared_prefix {
            let session = prefix::run(session, &args, prefix)?;
            return tracing.finish(session, "bench");
        }
        let (session, parallel) = parallel::measure(session, &args, predict)?;
        let shown = match args.json {
            true => output::json(&Document {
                path: &args.model,
                model: session.info(),
                prompt: None,
                generate: None,
                runs: &[],
                parallel,
                routing_from: args.followed.source(),
                plan: session.plan(),
                statistics: session.statistics(),
            }),
            false => parallel::print(&session, &args, &parallel),
        };
        tracing.finish(session, "bench")?;
        return shown;
    }
    let mut runs = Vec::with_capacity(args.repeat);
    let progress = StepProgress::new("measured", args.repeat as u64 + 1);
    for run in 0..=args.repeat {
        // The seed differs from run to run, because the same tokens would find their experts in the cache.
        let measured =
            session.bench(args.prompt_tokens, args.gen_tokens, args.depth, run as u64)?;
        progress.step();
        // The first run warms up the processor's caches, the memory and the residency.
        if run > 0 {
            runs.push(measured);
        }
    }
    drop(progress);
    let mut prompt = summary(args.prompt_tokens, runs.iter().map(|r| r.prompt_tokens_per_second));
    let mut generate = summary(args.gen_tokens, runs.iter().map(|r| r.generate_tokens_per_second));
    let depth = args.depth + args.gen_tokens / 2;
    let work = Work::alone(args.prompt_tokens.max(1), depth);
    let recorded = routing.finish(&mut session);
    let hits = || hits(&args, &session, options.policy);
    let rates = match plan::predicted(&args.model, &session, hits, work) {
        Ok(predicted) => [predicted.prompt.shown, predicted.generate.shown],
        Err(why) => [PredictedRate::none(why.clone()), PredictedRate::none(why)],
    };
    for (summary, rate) in [&mut prompt, &mut generate].into_iter().zip(rates) {
        let Some(summary) = summary else { continue };
        summary.tokens_per_second_predicted = rate.tokens_per_second;
        summary.predicted = rate;
    }
    let shown = match args.json {
        true => output::json(&Document {
            path: &args.model,
            model: session.info(),
            prompt,
            generate,
            runs: &runs,
            parallel: Vec::new(),
            routing_from: args.followed.source(),
            plan: session.plan(),
            statistics: session.statistics(),
        }),
        false => print(&session, &args, prompt.as_ref(), generate.as_ref()),
    };
    tracing.finish(session, "bench")?;
    recorded?;
    shown
}

/// Sets the context and the number of sequences that the measurements need. Returns the option that decides about the
/// context.
fn reserve_context(args: &BenchArgs, options: &mut SessionOptions) -> &'static str {
    options.sequences = args.parallel.iter().copied().max().unwrap_or(1);
    let named = if options.context.is_some() { Some("--ctx") } else { None };
    if let Some(arriving) = args.arriving {
        let generating = ARRIVAL_PROMPT.saturating_add(args.gen_tokens);
        let longest = generating.max(arriving.saturating_add(1));
        let context = *options.context.get_or_insert(longest);
        let together = generating.saturating_mul(options.sequences);
        options.kv_tokens = Some(together.saturating_add(arriving).saturating_add(1).max(context));
        options.sequences += 1;
        return named.unwrap_or("--arriving");
    }
    if let Some(prefix) = args.shared_prefix {
        let context = prefix.saturating_add(OWN_TOKENS + 1);
        let context = *options.context.get_or_insert(context);
        // The blocks of all runs stay. Those at the end of each prompt are filled in part.
        let own = |requests: &usize| requests.saturating_mul(2 * OWN_TOKENS).saturating_add(prefix);
        let run: usize = args.parallel.iter().map(own).fold(0, usize::saturating_add);
        options.kv_tokens = Some(run.saturating_mul(args.repeat + 1).max(context));
        return named.unwrap_or("--shared-prefix");
    }
    // The prompt and the generated tokens both start right after the depth, one after the other. With several sequences,
    // the tokens follow the prompt.
    // Proposals need text, so the tokens follow the prompt then.
    let longest = match args.parallel.is_empty() && !options.mtp {
        true => args.depth.saturating_add(args.prompt_tokens.max(args.gen_tokens)),
        false => args.depth.saturating_add(args.prompt_tokens).saturating_add(args.gen_tokens),
    };
    options.context.get_or_insert(longest);
    let longer = [
        ("--gen-tokens", args.gen_tokens),
        ("--prompt-tokens", args.prompt_tokens),
        ("--depth", args.depth),
    ];
    let longer = longer.into_iter().max_by_key(|(_, tokens)| *tokens);
    named.or(longer.map(|(name, _)| name)).unwrap_or("--depth")
}

/// Returns the expected cache hits: those of the routing that the session followed or recorded, if a curve can be made
/// of it.
fn hits(args: &BenchArgs, session: &Session, policy: PolicyKind) -> HitCurve {
    if let Some(profile) = args.followed.routing_profile {
        let trace = session.profiled(profile).ok();
        return trace.and_then(|trace| HitCurve::of_trace(&trace, policy)).unwrap_or_default();
    }
    let followed = args.followed.routing_trace.as_deref();
    if followed == Some(Path::new("uniform")) {
        return HitCurve::uniform();
    }
    // A pipe cannot be read again after it was written.
    let recorded = args.routing.trace_routing.as_deref().filter(|path| path.is_file());
    let trace = followed.or(recorded);
    trace.and_then(|path| plan::hits(path, policy).ok()).unwrap_or_default()
}

fn summary(tokens: usize, rates: impl Iterator<Item = f64>) -> Option<Summary> {
    let mut rates: Vec<f64> = rates.collect();
    rates.sort_by(f64::total_cmp);
    let (&min, &max) = (rates.first()?, rates.last()?);
    (tokens > 0).then_some(Summary {
        tokens,
        tokens_per_second_median: median(rates.iter().copied()),
        tokens_per_second_min: min,
        tokens_per_second_max: max,
        tokens_per_second_predicted: None,
        predicted: PredictedRate::default(),
    })
}

/// Formats a predicted rate for a table.
fn in_words(predicted: &PredictedRate) -> String {
    match (predicted.tokens_per_second, predicted.range()) {
        (Some(rate), _) => format!("{rate:.2}"),
        (None, Some((low, high))) => format!("{low:.2} to {high:.2}"),
        (None, None) => "none".into(),
    }
}

fn print(
    session: &Session,
    args: &BenchArgs,
    prompt: Option<&Summary>,
    generate: Option<&Summary>,
) -> Outcome {
    let head = ["", "tokens", "median tokens/s", "min", "max", "predicted"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for (name, summary) in [("prompt", prompt), ("generate", generate)] {
        let Some(summary) = summary else { continue };
        rows.push(vec![
            name.into(),
            summary.tokens.to_string(),
            format!("{:.2}", summary.tokens_per_second_median),
            format!("{:.2}", summary.tokens_per_second_min),
            format!("{:.2}", summary.tokens_per_second_max),
            in_words(&summary.predicted),
        ]);
    }
    let mut columns = [Align::Right; 6];
    columns[0] = Align::Left;
    output::print(&output::table(&columns, &rows))?;
    let summary = generate.or(prompt);
    if let Some(why) = summary.and_then(|summary| summary.predicted.uncertain_because.as_ref()) {
        output::tell!("prediction: {why}");
    }
    if let Some(source) = args.followed.source() {
        output::say(format_args!("  routing  from {}, not the model's own\n", source.display()));
    }
    output::say_labelled(&statistics::block(session, &args.model, After::Benchmark));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        let median = |rates: &[f64]| {
            summary(1, rates.iter().copied()).map(|summary| summary.tokens_per_second_median)
        };
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        assert!(summary(0, [1.0].into_iter()).is_none());
    }
}
