//! The command `forebay run`: one answer, or a chat.

use std::path::Path;

use anyhow::anyhow;
use forebay_chat::{Format, Message};
use forebay_engine::plan::PredictedRate;
use forebay_engine::{ModelInfo, Session, SessionStatistics};
use forebay_stream::MemoryPlan;
use forebay_text::ChatTemplate;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::RunArgs;
use crate::chat::answer::{self, Answer, End};
use crate::chat::{self, Display, keyboard};
use crate::commands::plan;
use crate::config::{self, RunConfig};
use crate::demo;
use crate::failure::{Failure, Outcome, usage};
use crate::open;
use crate::output;
use crate::outputs;
use crate::routing_file::RoutingFile;
use crate::session_plan;
use crate::size;
use crate::statistics::{self, After};
use crate::text_input;
use crate::tracing_file::TracingFile;

#[derive(Serialize)]
struct Document<'a> {
    path: &'a Path,
    prompt: &'a str,
    /// The answer, without thinking and tool calls.
    text: &'a str,
    /// The model's thinking before the answer.
    reasoning: Option<&'a str>,
    tool_calls: Value,
    end: End,
    tokens: &'a [u32],
    prompt_tokens: usize,
    generated_tokens: usize,
    prompt_seconds: f64,
    generate_seconds: f64,
    prompt_tokens_per_second: f64,
    generate_tokens_per_second: f64,
    /// Prediction from the machine profile; `None` if a single number would mislead.
    generate_tokens_per_second_predicted: Option<f64>,
    /// The prediction with its range, or the reason why there is none.
    generate_predicted: PredictedRate,
    seed: u64,
    model: &'a ModelInfo,
    plan: Option<&'a MemoryPlan>,
    statistics: SessionStatistics,
}

pub fn run(args: RunArgs) -> Outcome {
    let mut config = config::run(args)?;
    let named = config.tracing.trace_io.is_some() || config.routing.trace_routing.is_some();
    let mut outputs = outputs::begin(config.tracing.force, named)?;
    outputs::protect_model(&mut outputs, &config.model);
    config.inputs.iter().for_each(|input| outputs.protect(input));
    check_template(&config)?;
    let tracing = TracingFile::start(&config.tracing, &mut outputs, &mut config.session)?;
    let routing = RoutingFile::create(&config.routing, &mut outputs)?;
    if config.demo && config.session.ram_bytes.is_none() {
        config.session.ram_bytes = Some(demo_budget(&config.model)?);
    }
    let prompt = prompt(&config)?;
    if !config.demo {
        session_plan::follow(&config.model, &mut config.session);
    }
    // What is typed while a chat's model loads appears at its prompt.
    let quiet = prompt.is_none().then(keyboard::quiet);
    let mut session = open::session(&config.model, &config.session, "--ctx")?;
    drop(quiet);
    routing.record(&mut session)?;
    if config.demo {
        announce(&session);
    }
    let outcome = match prompt {
        Some(prompt) => single(&mut session, &config, &prompt),
        None => chat::run(&mut session, &config),
    };
    // The traces of a failed run are written, too. Its own error takes precedence.
    let routed = routing.finish(&mut session);
    let traced = tracing.finish(session, "run");
    outcome.and(routed).and(traced)
}

/// Returns half of the experts' bytes, so the demo already streams.
fn demo_budget(model: &Path) -> Outcome<u64> {
    Ok(open::inspect(model)?.model.expert_bytes / 2)
}

fn announce(session: &Session) {
    let statistics = session.statistics();
    output::tell!(
        "streaming {} of weights from disk through a weight cache of {} of RAM\n",
        size::format(statistics.weights_bytes),
        size::format(statistics.budget_bytes),
    );
}

/// Checks options that need a chat template, before any weight is read.
fn check_template(config: &RunConfig) -> Outcome {
    let Some(option) = config.template.option() else { return Ok(()) };
    let inspection = open::inspect(&config.model)?;
    let template = ChatTemplate::from_catalog(&inspection.catalog)
        .map_err(|error| open::named(error, &config.model))?
        .filter(|_| !demo::is_demo(&inspection.model));
    let Some(template) = template else {
        return usage(format!("{option}: this model has no chat template that could use it"));
    };
    config.template.variables(&Format::recognise(Some(&template), None)?).map(drop)
}

/// Returns the prompt followed by piped standard input, or `None` for a chat.
fn prompt(config: &RunConfig) -> Outcome<Option<String>> {
    let piped = if config.prompt.piped { text_input::standard()? } else { String::new() };
    let has_piped = !piped.trim().is_empty();
    Ok(match &config.prompt.given {
        Some(text) if has_piped => Some(format!("{text}\n\n{piped}")),
        Some(text) => Some(text.clone()),
        None if has_piped => Some(piped),
        None if config.demo => Some(demo::PROMPT.to_owned()),
        None if config.prompt.piped => {
            return Err(anyhow!(
                "there is no prompt: give --prompt TEXT or write it to standard input"
            )
            .into());
        }
        None => None,
    })
}

/// Answers one prompt.
fn single(session: &mut Session, config: &RunConfig, prompt: &str) -> Outcome {
    let mut conversation = chat::begin(session, config)?;
    conversation.history.push(Message::new("user", prompt));
    let mut display = match config.demo && !config.json {
        // The model continues this text, so show the text first.
        true => Display::after(prompt, config.hide_thinking)?,
        false => Display::new(config.hide_thinking),
    };
    let answered =
        answer::generate(
            session,
            &mut conversation,
            &config.answer,
            &mut |event| match config.json {
                true => Ok(()),
                false => display.show(event),
            },
        );
    if config.json {
        let answer = answered?;
        return document(session, config, prompt, &answer).and(outcome(answer.end));
    }
    display.finish(answered.is_ok())?;
    let answer = answered?;
    let outcome = outcome(answer.end);
    if answer.end == End::ContextFull {
        output::tell!("note: {}", answer::context_full(session));
    }
    if config.stats {
        let after = After::Answer(&answer.generation);
        output::tell!();
        output::say_labelled(&statistics::block(session, &config.model, after));
    }
    if config.demo && outcome.is_ok() {
        output::tell!("\n{}", demo::NEXT);
    }
    outcome
}

/// Returns a failure for an answer that Ctrl-C ended.
fn outcome(end: End) -> Outcome {
    match end {
        End::Interrupted => Err(Failure::Interrupted),
        _ => Ok(()),
    }
}

fn document(session: &Session, config: &RunConfig, prompt: &str, answer: &Answer) -> Outcome {
    let generation = &answer.generation;
    let predicted = plan::predicted_answer(&config.model, session, generation);
    output::json(&Document {
        path: &config.model,
        prompt,
        text: &answer.message.content,
        reasoning: answer.message.reasoning.as_deref(),
        tool_calls: answer.message.to_json().get("tool_calls").cloned().unwrap_or(json!([])),
        end: answer.end,
        tokens: &generation.tokens,
        prompt_tokens: generation.prompt_tokens,
        generated_tokens: generation.tokens.len(),
        prompt_seconds: generation.prompt_seconds,
        generate_seconds: generation.generate_seconds,
        prompt_tokens_per_second: generation.prompt_tokens_per_second(),
        generate_tokens_per_second: generation.generate_tokens_per_second(),
        generate_tokens_per_second_predicted: predicted.tokens_per_second,
        generate_predicted: predicted,
        seed: config.answer.sampling.seed,
        model: session.info(),
        plan: session.plan(),
        statistics: session.statistics(),
    })
}
