//! `forebay run`: one answer, or a chat.

use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, anyhow};
use forebay_engine::{ModelInfo, Session, SessionStatistics};
use forebay_stream::MemoryPlan;
use serde::Serialize;

use crate::answer::{self, Answer, End};
use crate::args::RunArgs;
use crate::commands::{chat, plan};
use crate::config::{self, PromptSource, RunConfig};
use crate::conversation::{self, Conversation};
use crate::demo;
use crate::failure::Outcome;
use crate::open;
use crate::output;
use crate::routing_file::RoutingFile;
use crate::size;
use crate::statistics::{self, After};
use crate::tracing_file::TracingFile;

#[derive(Serialize)]
struct Document<'a> {
    path: &'a Path,
    prompt: &'a str,
    text: &'a str,
    end: End,
    tokens: &'a [u32],
    prompt_tokens: usize,
    generated_tokens: usize,
    prompt_seconds: f64,
    generate_seconds: f64,
    prompt_tokens_per_second: f64,
    generate_tokens_per_second: f64,
    /// By the machine profile, if there is one.
    generate_tokens_per_second_predicted: Option<f64>,
    seed: u64,
    model: &'a ModelInfo,
    plan: Option<&'a MemoryPlan>,
    statistics: SessionStatistics,
}

pub fn run(args: RunArgs) -> Outcome {
    let mut config = config::run(args)?;
    if config.demo && config.session.ram_bytes.is_none() {
        config.session.ram_bytes = Some(demo_budget(&config.model)?);
    }
    let prompt = match &config.prompt {
        PromptSource::Text(text) => Some(text.clone()),
        PromptSource::StandardInput => Some(read_prompt()?),
        PromptSource::Chat => None,
    };
    if !config.demo {
        plan::follow(&config.model, &mut config.session);
    }
    let tracing = TracingFile::start(&config.tracing, &mut config.session)?;
    let routing = RoutingFile::create(&config.routing)?;
    let mut session = open::session(&config.model, &config.session, "--ctx")?;
    routing.record(&mut session)?;
    if config.demo {
        announce(&session);
    }
    let outcome = match prompt {
        Some(prompt) => single(&mut session, &config, &prompt),
        None => chat::run(&mut session, &config),
    };
    // A run that failed is worth looking at, too; why it failed is what is said then.
    let routed = routing.finish(&mut session);
    let traced = tracing.finish(session, "run");
    outcome.and(routed).and(traced)
}

/// Half of what the experts take, so that the first run already streams.
fn demo_budget(model: &Path) -> Outcome<u64> {
    Ok(open::inspect(model)?.model.expert_bytes / 2)
}

fn announce(session: &Session) {
    let statistics = session.statistics();
    output::tell!(
        "streaming {} of weights from disk through a basin of {} of RAM\n",
        size::format(statistics.weights_bytes),
        size::format(statistics.budget_bytes),
    );
}

fn read_prompt() -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin()
        .lock()
        .read_to_string(&mut text)
        .context("standard input cannot be read as UTF-8 text")?;
    if text.trim().is_empty() {
        return Err(anyhow!(
            "there is no prompt: give --prompt TEXT or write it to standard input"
        ));
    }
    Ok(text)
}

/// One prompt, one answer.
fn single(session: &mut Session, config: &RunConfig, prompt: &str) -> Outcome {
    let templated = session.chat_template().is_some() && !config.raw;
    if !templated && !config.raw {
        output::tell!(
            "note: this model has no chat template: the prompt is continued as plain text"
        );
    }
    let template = session.chat_template().filter(|_| templated);
    let context = Conversation::default().open(template, prompt)?;
    let ids = conversation::encode(session.tokenizer()?, &context, templated)?;
    // Text that the model continues reads better with its beginning.
    let echo = config.demo && !config.json;
    if echo {
        output::print(prompt)?;
    }
    let json = config.json;
    let answer =
        answer::generate(session, &ids, templated, &config.answer, &mut |piece| match json {
            true => Ok(()),
            false => output::print(piece),
        })?;
    if config.json {
        return document(session, config, prompt, &answer);
    }
    if !answer.text.ends_with('\n') {
        output::print("\n")?;
    }
    if config.stats {
        let after = After::Answer(&answer.generation);
        output::say(format_args!("\n{}", statistics::block(session, &config.model, after)));
    }
    if config.demo {
        output::tell!("\n{}", demo::NEXT);
    }
    Ok(())
}

fn document(session: &Session, config: &RunConfig, prompt: &str, answer: &Answer) -> Outcome {
    let generation = &answer.generation;
    output::json(&Document {
        path: &config.model,
        prompt,
        text: &answer.text,
        end: answer.end,
        tokens: &generation.tokens,
        prompt_tokens: generation.prompt_tokens,
        generated_tokens: generation.tokens.len(),
        prompt_seconds: generation.prompt_seconds,
        generate_seconds: generation.generate_seconds,
        prompt_tokens_per_second: generation.prompt_tokens_per_second(),
        generate_tokens_per_second: generation.generate_tokens_per_second(),
        generate_tokens_per_second_predicted: plan::predicted_answer(
            &config.model,
            session,
            generation,
        ),
        seed: config.answer.sampling.seed,
        model: session.info(),
        plan: session.plan(),
        statistics: session.statistics(),
    })
}
