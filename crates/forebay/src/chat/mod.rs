//! Conversations of `forebay run`: one answer, or an interactive chat.

pub mod answer;
mod command;
mod complete;
mod conversation;
mod display;
mod files;
mod input;
pub mod keyboard;
mod settings;

use std::path::{Path, PathBuf};

use forebay_chat::{History, Message, Think};
use forebay_engine::{Generation, Session};

use crate::config::{AnswerConfig, RunConfig};
use crate::demo;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::output;
use crate::size;
use crate::statistics::{self, After, ChatFigures};
use answer::{Answer, End};
use command::Line;
pub use conversation::Conversation;
pub use display::Display;
use input::{Input, Reader};

/// A chat in progress.
pub struct Chat<'a> {
    session: &'a mut Session,
    config: &'a RunConfig,
    /// Settings from the command line, with the changes made by `/set`.
    answer: AnswerConfig,
    think: Option<Think>,
    conversation: Conversation,
    figures: ChatFigures,
    /// True if the user has already been told about a context shift.
    announced_shift: bool,
    /// File that the conversation was last written to or read from. Only this one may be replaced.
    own_file: Option<PathBuf>,
}

/// Creates a conversation with the settings of the command line.
pub fn begin(session: &Session, config: &RunConfig) -> Outcome<Conversation> {
    let templated =
        session.chat_template().is_some() && !config.raw && !demo::is_demo(session.info());
    if !templated && !config.raw {
        let why = match demo::is_demo(session.info()) {
            true => "the demo model was not trained to chat",
            false => "this model has no chat template",
        };
        output::tell!("note: {why}: it continues the text as plain text");
    }
    let special_tokens = config.template.special_tokens_in_messages;
    let mut conversation = Conversation::new(session, templated, special_tokens)?;
    conversation.history.set_system(config.template.system.clone());
    conversation.variables = config.template.variables(conversation.format())?;
    Ok(conversation)
}

/// Reads messages and answers them until the user quits.
pub fn run(session: &mut Session, config: &RunConfig) -> Outcome {
    let conversation = begin(session, config)?;
    // Templates leave out earlier reasoning, so a turn often begins before the end of what is cached.
    session.keep_states();
    output::tell!("{}", statistics::place(session, &config.model));
    output::tell!("/help lists the commands, /bye or Ctrl-D quits");
    let mut chat = Chat {
        session,
        config,
        answer: config.answer.clone(),
        think: config.template.think,
        conversation,
        figures: ChatFigures::default(),
        announced_shift: false,
        own_file: None,
    };
    let mut reader = Reader::new();
    let ended = loop {
        match reader.read()? {
            Input::End => break Ok(()),
            Input::Interrupted => break Err(Failure::Interrupted),
            Input::Text(text) => match command::parse(&text) {
                Line::Bye => break Ok(()),
                line => chat.obey(line)?,
            },
        }
    };
    if config.stats {
        output::say_labelled(&chat.statistics());
    }
    ended
}

impl Chat<'_> {
    fn obey(&mut self, line: Line) -> Outcome {
        match line {
            Line::Empty | Line::Bye => {}
            Line::Wrong(what) => output::tell!("error: {what}"),
            Line::Help => output::tell!("{}", command::help()),
            Line::Statistics => output::say_labelled(&self.statistics()),
            Line::Clear => {
                self.conversation.history.clear();
                self.figures.turns_dropped = 0;
                self.announced_shift = false;
                output::tell!("the conversation is forgotten");
            }
            Line::System(None) => match self.conversation.history.system() {
                Some(text) => output::tell!("{text}"),
                None => output::tell!("there is no system message"),
            },
            Line::System(Some(_)) if !self.conversation.templated() => {
                output::tell!("error: a system message needs a chat template");
            }
            Line::System(text) => {
                self.conversation.history.set_system(text);
                output::tell!("the system message is set");
            }
            Line::Set(None) => output::say_labelled(&self.settings()),
            Line::Set(Some((name, value))) => match self.set(&name, &value) {
                Ok(()) => output::tell!("{name} is {value}"),
                Err(reason) => output::tell!("error: /set {name} {value}: {reason}"),
            },
            Line::Show => self.show(),
            Line::Retry => return self.retry(),
            Line::Save(file) => match file.map(PathBuf::from).or_else(|| self.own_file.clone()) {
                Some(file) => self.save(&file),
                None => output::tell!("error: /save needs a file name"),
            },
            Line::Load(file) => self.load(Path::new(&file)),
            Line::Say(text) => return self.say(text),
        }
        Ok(())
    }

    /// Shows the model, where it is, the settings and the system message.
    fn show(&self) {
        let mut lines = vec![("model", statistics::place(self.session, &self.config.model))];
        lines.extend(self.settings());
        let history = &self.conversation.history;
        lines.push(("turns", history.turns().to_string()));
        lines.push(("system", history.system().unwrap_or("(none)").to_owned()));
        output::say_labelled(&lines);
    }

    fn save(&mut self, file: &Path) {
        let is_own = self.own_file.as_deref() == Some(file);
        let saved = files::save(&self.conversation.history, self.session, file, is_own);
        if saved.is_ok() {
            self.own_file = Some(file.to_owned());
        }
        match saved {
            Ok(None) => output::tell!("the conversation is in {}", file.display()),
            Ok(Some(bytes)) => output::tell!(
                "the conversation is in {}, its keys and values in {} ({})",
                file.display(),
                files::kv_path(file).display(),
                size::format(bytes)
            ),
            Err(error) => tell(&error.into()),
        }
    }

    fn load(&mut self, file: &Path) {
        match files::load(file) {
            Ok(history) => {
                let turns = output::counted(history.turns(), "turn");
                output::tell!("{turns} from {}", file.display());
                self.conversation.history = history;
                self.own_file = Some(file.to_owned());
            }
            Err(error) => return tell(&error.into()),
        }
        match files::load_kv(self.session, file) {
            Ok(None) => {}
            Ok(Some(tokens)) => {
                output::tell!("keys and values of {tokens} tokens need not be computed again")
            }
            Err(error) => output::tell!(
                "note: {}: {error}: the conversation will be read again",
                files::kv_path(file).display()
            ),
        }
    }

    /// Runs one turn. After a failure, prints the error and drops the turn, so the conversation can continue. A closed
    /// standard output ends the chat.
    fn say(&mut self, text: String) -> Outcome {
        let before = self.conversation.history.clone();
        self.conversation.history.push(Message::new("user", text));
        self.answer_or_return_to(before)
    }

    /// Answers the last message again. The random choices are other ones.
    fn retry(&mut self) -> Outcome {
        let before = self.conversation.history.clone();
        if !self.conversation.history.drop_newest_answer() {
            output::tell!("error: there is no answer to try again");
            return Ok(());
        }
        self.answer.sampling.seed = self.answer.sampling.seed.wrapping_add(1);
        self.answer_or_return_to(before)
    }

    /// Answers the last message. Without an answer, the conversation is again what it was before.
    fn answer_or_return_to(&mut self, before: History) -> Outcome {
        interrupt::reset();
        let quiet = keyboard::quiet();
        let answered = self.respond();
        drop(quiet);
        match answered {
            Ok(End::Interrupted) if self.conversation.history.ends_with_user() => {
                self.conversation.history = before;
                output::tell!("note: interrupted before the answer began: the message is not kept");
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(failure) if failure.line().is_none() => Err(failure),
            Err(failure) => {
                tell(&failure);
                self.conversation.history = before;
                self.session.reset();
                Ok(())
            }
        }
    }

    /// Answers the last message. Does not add an answer that was interrupted before its first token.
    fn respond(&mut self) -> Outcome<End> {
        let mut display = Display::new(self.config.hide_thinking);
        let answered =
            answer::generate(self.session, &mut self.conversation, &self.answer, &mut |event| {
                display.show(event)
            });
        display.finish(answered.is_ok())?;
        let answer = answered?;
        self.account(&answer);
        if answer.end == End::Interrupted && answer.generation.tokens.is_empty() {
            return Ok(answer.end);
        }
        self.conversation.history.push(answer.message);
        match answer.end {
            End::ContextFull => output::tell!("note: {}", answer::context_full(self.session)),
            End::MaxTokens => output::tell!("note: cut at --max-tokens"),
            _ => {}
        }
        Ok(answer.end)
    }

    fn account(&mut self, answer: &Answer) {
        let Generation { tokens, prompt_tokens, prompt_seconds, generate_seconds, .. } =
            &answer.generation;
        self.figures.prompt_tokens += prompt_tokens;
        self.figures.prompt_seconds += prompt_seconds;
        // The first token is part of prompt processing.
        self.figures.generated_tokens += tokens.len().saturating_sub(1);
        self.figures.generate_seconds += generate_seconds;
        self.figures.turns_dropped += answer.turns_dropped;
        if answer.turns_dropped > 0 && !self.announced_shift {
            self.announced_shift = true;
            output::tell!(
                "note: the context of {} tokens is full: the oldest turns are dropped from now on (/stats counts \
                 them); use --on-full stop to end answers instead",
                self.session.context()
            );
        }
    }

    fn statistics(&self) -> Vec<(&'static str, String)> {
        let mut figures = self.figures;
        figures.context_used = self.session.cached_tokens().len();
        statistics::block(self.session, &self.config.model, After::Chat(&figures))
    }
}

fn tell(failure: &Failure) {
    if let Some(line) = failure.line() {
        output::tell!("error: {line}");
    }
}
