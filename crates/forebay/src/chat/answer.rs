//! Generates one answer: renders the prompt, handles stop texts and a full context, and parses the message.

use std::ops::ControlFlow;

use forebay_chat::{AnswerStream, Event, Message};
use forebay_engine::{GenerateOptions, Generation, Session, StopReason};
use forebay_text::Tokenizer;
use serde::Serialize;

use super::conversation::{self, Conversation, Prompt};
use crate::config::{AnswerConfig, OnFull};
use crate::failure::{Failure, Outcome};
use crate::progress::PromptProgress;

/// Why an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The model ended its turn.
    Finished,
    /// A `--stop` text appeared.
    StopText,
    MaxTokens,
    ContextFull,
    /// Ctrl-C.
    Interrupted,
}

/// The answer to a prompt.
pub struct Answer {
    /// The parsed message. Its content ends before the stop text.
    pub message: Message,
    pub end: End,
    pub generation: Generation,
    /// Number of turns dropped from the conversation because the context was full.
    pub turns_dropped: usize,
}

/// Receives the parts of an answer as they are generated.
pub type Sink<'a> = &'a mut dyn FnMut(Event<'_>) -> Outcome;

/// Generates the answer to the conversation's last message. Returns the answer without adding it to the conversation. The
/// model reads only the tokens that are not in the KV cache.
///
/// With [`OnFull::Shift`] and a full context, drops the oldest turns and reads the shortened conversation again.
pub fn generate(
    session: &mut Session,
    conversation: &mut Conversation,
    config: &AnswerConfig,
    sink: Sink<'_>,
) -> Outcome<Answer> {
    let before = conversation.history.turns();
    let Prompt { text, mut ids } = fitting_prompt(session, conversation, config)?;
    let tokenizer = session.shared_tokenizer()?;
    // With a template the answer is a new text; without one it continues the prompt's text.
    let continues = !conversation.templated();
    let stream =
        AnswerStream::new(&*tokenizer, conversation.format(), &text, continues, &config.stops);
    let mut shown = Shown { stream, sink, failure: None };
    let mut total = Generation {
        tokens: Vec::new(),
        stop_reason: StopReason::End,
        prompt_tokens: 0,
        prompt_seconds: 0.0,
        generate_seconds: 0.0,
    };
    loop {
        let reused = session.truncate(conversation::reusable(session.cached_tokens(), &ids));
        tracing::debug!(tokens = ids.len(), reused, "prompt");
        tracing::trace!(?ids, "prompt");
        let mut options = GenerateOptions {
            max_tokens: config.max_tokens.map(|most| most - total.tokens.len()),
            sampling: config.sampling.clone(),
            ..GenerateOptions::default()
        };
        // A continued answer must not repeat the random choices of its beginning.
        options.sampling.seed = options.sampling.seed.wrapping_add(total.tokens.len() as u64);
        let progress = PromptProgress::watch(session);
        let part = session.generate(&ids[reused..], &options, &mut |id| shown.push(id));
        drop(progress);
        add(&mut total, part?);
        let full = total.stop_reason == StopReason::ContextFull;
        if !(full && config.on_full == OnFull::Shift && conversation.history.drop_oldest_turn()) {
            break;
        }
        ids = shortened(session, conversation, total.tokens.len())?.ids;
        ids.extend_from_slice(&total.tokens);
        if ids.len() >= session.context() {
            break;
        }
    }
    let (message, stopped) = shown.finish()?;
    let end = match total.stop_reason {
        StopReason::Stopped if stopped => End::StopText,
        StopReason::Stopped | StopReason::Interrupted => End::Interrupted,
        StopReason::End => End::Finished,
        StopReason::MaxTokens => End::MaxTokens,
        StopReason::ContextFull => End::ContextFull,
    };
    let turns_dropped = before - conversation.history.turns();
    Ok(Answer { message, end, generation: total, turns_dropped })
}

/// Adds the counts and tokens of the next part of an answer.
fn add(total: &mut Generation, part: Generation) {
    total.tokens.extend_from_slice(&part.tokens);
    total.stop_reason = part.stop_reason;
    total.prompt_tokens += part.prompt_tokens;
    total.prompt_seconds += part.prompt_seconds;
    total.generate_seconds += part.generate_seconds;
}

/// Returns the prompt of the conversation. Shortens it if the context has no room for the prompt and an answer.
fn fitting_prompt(
    session: &Session,
    conversation: &mut Conversation,
    config: &AnswerConfig,
) -> Outcome<Prompt> {
    let context = session.context();
    let mut prompt = conversation.prompt(session)?;
    let quarter = context / 4;
    let room = config.max_tokens.map_or(quarter, |most| most.min(quarter));
    if config.on_full == OnFull::Shift
        && prompt.ids.len() + room > context
        && conversation.history.drop_oldest_turn()
    {
        prompt = shortened(session, conversation, 0)?;
    }
    if prompt.ids.len() > context {
        return Err(Failure::Work(anyhow::anyhow!(
            "the prompt has {} tokens, but the context holds {context}: {}",
            prompt.ids.len(),
            remedy(session, conversation)
        )));
    }
    Ok(prompt)
}

/// Drops the oldest turns until half of the context is free, so that later turns rarely read the history again. Keeps the
/// newest turn. `beside` is the number of answer tokens that follow the prompt.
///
/// Rendering and encoding a long history is slow, so a binary search finds the smallest number of turns to drop.
fn shortened(session: &Session, conversation: &mut Conversation, beside: usize) -> Outcome<Prompt> {
    let whole = conversation.history.clone();
    let without = |turns: usize| {
        let mut history = whole.clone();
        for _ in 0..turns {
            history.drop_oldest_turn();
        }
        history
    };
    let (mut fewest, mut enough) = (0, whole.turns().saturating_sub(1));
    while fewest < enough {
        let middle = fewest.midpoint(enough);
        conversation.history = without(middle);
        match conversation.prompt(session)?.ids.len() + beside <= session.context() / 2 {
            true => enough = middle,
            false => fewest = middle + 1,
        }
    }
    conversation.history = without(enough);
    conversation.prompt(session)
}

/// Lists the remedies for a context that is too small.
fn remedy(session: &Session, conversation: &Conversation) -> String {
    let most = session.info().context_trained;
    let mut ways = Vec::new();
    if session.context() < most {
        ways.push(format!("give a larger --ctx (this model: at most {most})"));
    }
    if conversation.history.turns() > 1 {
        ways.push("forget the conversation (/clear)".to_owned());
    }
    ways.push("write a shorter text".to_owned());
    ways.join(", or ")
}

/// Returns the note for an answer that was cut because the context is full.
pub fn context_full(session: &Session) -> String {
    let (context, most) = (session.context(), session.info().context_trained);
    let more = match context < most {
        true => format!("a larger --ctx holds more (this model: at most {most})"),
        false => "this model has no larger one".to_owned(),
    };
    format!("the answer is cut: the context of {context} tokens is full; {more}")
}

/// Sends the events of an answer to a sink that may fail.
struct Shown<'a, 's> {
    stream: AnswerStream<&'a Tokenizer>,
    sink: Sink<'s>,
    failure: Option<Failure>,
}

impl Shown<'_, '_> {
    fn push(&mut self, id: u32) -> ControlFlow<()> {
        let Shown { stream, sink, failure } = self;
        let stopped = stream.push(id, &mut |event| send(event, sink, failure));
        match stopped || failure.is_some() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// Sends the text that is still held back. Returns the message, and true if a stop text ended it.
    fn finish(self) -> Outcome<(Message, bool)> {
        let Shown { stream, sink, mut failure } = self;
        let finished = stream.finish(&mut |event| send(event, sink, &mut failure));
        match failure {
            Some(failure) => Err(failure),
            None => Ok((finished.0, finished.1.is_some())),
        }
    }
}

/// Sends an event, unless an earlier one failed.
fn send(event: Event<'_>, sink: Sink<'_>, failure: &mut Option<Failure>) {
    if failure.is_none() {
        *failure = sink(event).err();
    }
}
