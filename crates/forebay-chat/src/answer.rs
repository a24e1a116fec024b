//! The way from generated tokens to a message.

use std::ops::Deref;

use forebay_text::{TextStream, Tokenizer};

use crate::stops::{Passed, StopFilter};
use crate::{Event, Format, Message, Parser};

/// Turns the tokens of one answer into events and, in the end, a message. Content ends before the first stop text.
pub struct AnswerStream<T> {
    tokenizer: T,
    stream: TextStream<T>,
    parser: Parser,
    output: Output,
}

/// Sends events on. Content passes through the stop filter first.
struct Output {
    filter: StopFilter,
    content: String,
    stopped: Option<usize>,
}

impl<T: Deref<Target = Tokenizer> + Clone> AnswerStream<T> {
    /// Creates the stream of an answer to `prompt`. `continues` says that the answer continues the prompt's text, as
    /// without a chat template.
    pub fn new(
        tokenizer: T,
        format: &Format,
        prompt: &str,
        continues: bool,
        stops: &[String],
    ) -> AnswerStream<T> {
        let stream = match continues {
            true => TextStream::continuing(tokenizer.clone()),
            false => TextStream::new(tokenizer.clone()),
        };
        AnswerStream {
            tokenizer,
            stream,
            parser: Parser::new(format, prompt),
            output: Output {
                filter: StopFilter::new(stops),
                content: String::new(),
                stopped: None,
            },
        }
    }

    /// Has the stop text that ends the content be a part of it.
    pub fn keep_stop(&mut self) {
        self.output.filter.keep_stop();
    }

    /// Continues `text`, with which the prompt ends. It is no part of the answer.
    #[must_use]
    pub fn with_continued(mut self, format: &Format, prompt: &str, text: &str) -> AnswerStream<T> {
        self.parser = Parser::continuing(format, prompt, text);
        self
    }

    /// Sends each tool call when it is complete. Otherwise the arguments are sent as they are generated.
    #[must_use]
    pub fn with_whole_calls(mut self) -> AnswerStream<T> {
        self.parser = self.parser.with_whole_calls();
        self
    }

    /// Takes the next token, and sends the events that it completes to `sink`. Returns true if a stop text is complete. The
    /// answer ends there, and later tokens have no effect.
    pub fn push(&mut self, id: u32, sink: &mut dyn FnMut(Event<'_>)) -> bool {
        let AnswerStream { tokenizer, stream, parser, output } = self;
        let mut take = |event: Event<'_>| output.take(event, sink);
        match tokenizer.control_text(id) {
            None => parser.text(&stream.push(id), &mut take),
            Some(name) => {
                parser.text(&stream.flush(), &mut take);
                parser.control(&name, &mut take);
            }
        }
        self.output.stopped.is_some()
    }

    /// Sends the text that is still held back. Returns the message, and the index of the stop text that ended it.
    pub fn finish(self, sink: &mut dyn FnMut(Event<'_>)) -> (Message, Option<usize>) {
        let AnswerStream { stream, mut parser, mut output, .. } = self;
        let mut take = |event: Event<'_>| output.take(event, sink);
        parser.text(&stream.finish(), &mut take);
        let mut message = parser.finish(&mut take);
        if output.stopped.is_none() {
            let text = output.filter.finish();
            output.pass(Passed { text, stopped: None }, sink);
        }
        message.content = output.content;
        (message, output.stopped)
    }
}

impl Output {
    fn take(&mut self, event: Event<'_>, sink: &mut dyn FnMut(Event<'_>)) {
        if self.stopped.is_some() {
            return;
        }
        match event {
            Event::Content(text) => {
                let passed = self.filter.push(text);
                self.pass(passed, sink);
            }
            other => sink(other),
        }
    }

    fn pass(&mut self, passed: Passed, sink: &mut dyn FnMut(Event<'_>)) {
        self.stopped = self.stopped.or(passed.stopped);
        if !passed.text.is_empty() {
            self.content.push_str(&passed.text);
            sink(Event::Content(&passed.text));
        }
    }
}
