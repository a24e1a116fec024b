//! One answer: from token ids to shown text, with stop strings and Ctrl-C.

use std::ops::ControlFlow;

use forebay_engine::{GenerateOptions, Generation, Session, StopReason};
use forebay_text::TextStream;
use serde::Serialize;

use crate::config::AnswerConfig;
use crate::conversation;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::stops::{Passed, StopFilter};

/// Why an answer ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The model said that it is done.
    Finished,
    /// A `--stop` text appeared.
    StopText,
    MaxTokens,
    ContextFull,
    /// Ctrl-C.
    Interrupted,
}

/// What came of a prompt.
pub struct Answer {
    /// What was shown: without special tokens and without the stop string.
    pub text: String,
    pub end: End,
    pub generation: Generation,
}

/// Where the pieces of an answer go as they come.
pub type Sink<'a> = &'a mut dyn FnMut(&str) -> Outcome;

/// Makes the model read `ids` (as far as its cache does not hold them) and answer. `templated`
/// says that the answer is a text of its own, not the continuation of one.
pub fn generate(
    session: &mut Session,
    ids: &[u32],
    templated: bool,
    config: &AnswerConfig,
    sink: Sink<'_>,
) -> Outcome<Answer> {
    let guard = interrupt::Answer::begin();
    let reused = session.truncate(conversation::reusable(session.cached_tokens(), ids));
    tracing::debug!(tokens = ids.len(), reused, "prompt");
    let tokenizer = session.shared_tokenizer()?;
    let stream = match templated {
        true => TextStream::new(&tokenizer),
        false => TextStream::continuing(&tokenizer),
    };
    let mut shown = Shown::new(stream, &config.stops, sink);
    let options = GenerateOptions {
        max_tokens: config.max_tokens,
        sampling: config.sampling.clone(),
        ..GenerateOptions::default()
    };
    let generation = session.generate(&ids[reused..], &options, &mut |id| {
        if guard.interrupted() {
            return ControlFlow::Break(());
        }
        shown.push(id)
    })?;
    let (text, stopped) = shown.finish()?;
    let end = match generation.stop_reason {
        StopReason::Stopped if stopped => End::StopText,
        StopReason::Stopped => End::Interrupted,
        StopReason::End => End::Finished,
        StopReason::MaxTokens => End::MaxTokens,
        StopReason::ContextFull => End::ContextFull,
    };
    Ok(Answer { text, end, generation })
}

/// Text on its way from the model to the reader.
struct Shown<'a, 's> {
    stream: TextStream<'a>,
    filter: StopFilter,
    sink: Sink<'s>,
    text: String,
    stopped: bool,
    failure: Option<Failure>,
}

impl<'a, 's> Shown<'a, 's> {
    fn new(stream: TextStream<'a>, stops: &[String], sink: Sink<'s>) -> Shown<'a, 's> {
        Shown {
            stream,
            filter: StopFilter::new(stops),
            sink,
            text: String::new(),
            stopped: false,
            failure: None,
        }
    }

    fn push(&mut self, id: u32) -> ControlFlow<()> {
        let piece = self.stream.push(id);
        let passed = self.filter.push(&piece);
        self.show(passed)
    }

    fn show(&mut self, passed: Passed) -> ControlFlow<()> {
        self.stopped |= passed.stopped;
        self.text.push_str(&passed.text);
        if !passed.text.is_empty()
            && let Err(failure) = (self.sink)(&passed.text)
        {
            self.failure = Some(failure);
        }
        match self.stopped || self.failure.is_some() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }

    /// Shows what is still held back; returns all that was shown and whether a stop string ended it.
    fn finish(self) -> Outcome<(String, bool)> {
        let Shown { stream, mut filter, sink, mut text, mut stopped, failure } = self;
        if let Some(failure) = failure {
            return Err(failure);
        }
        if !stopped {
            let Passed { text: mut rest, stopped: found } = filter.push(&stream.finish());
            stopped = found;
            if !found {
                rest.push_str(&filter.finish());
            }
            if !rest.is_empty() {
                text.push_str(&rest);
                sink(&rest)?;
            }
        }
        Ok((text, stopped))
    }
}
