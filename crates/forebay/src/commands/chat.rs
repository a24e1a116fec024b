//! The interactive chat of `forebay run`.

use std::io::{self, BufRead as _};

use forebay_engine::Session;

use crate::answer::{self, End};
use crate::config::{AnswerConfig, RunConfig};
use crate::conversation::{self, Conversation};
use crate::failure::{Failure, Outcome};
use crate::output;
use crate::statistics::{self, After};

/// What a line in the chat asks for.
enum Line {
    Say(String),
    Reset,
    Statistics,
    Help,
    End,
}

/// Reads lines and answers them until `/exit` or the end of input.
pub fn run(session: &mut Session, config: &RunConfig) -> Outcome {
    let templated = session.chat_template().is_some() && !config.raw;
    if !templated {
        let why = if config.raw { "--raw" } else { "this model has no chat template" };
        output::tell!("note: {why}: what you write is continued as plain text");
    }
    output::tell!(
        "/reset forgets the conversation, /stats shows statistics, /exit ends; /help for more"
    );
    let mut conversation = Conversation::default();
    loop {
        match read()? {
            Line::End => break,
            Line::Help => output::tell!(
                "/reset  forget the conversation\n/stats  statistics so far\n/exit   end (also \
                 Ctrl-D)\nCtrl-C  end the answer; pressed again, or here, the program"
            ),
            Line::Statistics => output::say(format_args!(
                "{}",
                statistics::block(session, &config.model, After::Chat)
            )),
            Line::Reset => {
                conversation.reset();
                session.reset();
                output::tell!("the conversation is forgotten");
            }
            Line::Say(text) => {
                let said = say(session, &mut conversation, templated, &text, &config.answer);
                report(said, &mut conversation, session)?;
            }
        }
    }
    if config.stats {
        output::say(format_args!("{}", statistics::block(session, &config.model, After::Chat)));
    }
    Ok(())
}

/// One turn: from the user's text to the answer on standard output.
fn say(
    session: &mut Session,
    conversation: &mut Conversation,
    templated: bool,
    text: &str,
    config: &AnswerConfig,
) -> Outcome {
    let template = session.chat_template().filter(|_| templated);
    let context = conversation.open(template, text)?;
    let ids = conversation::encode(session.tokenizer()?, &context, templated)?;
    let answer = answer::generate(session, &ids, templated, config, &mut output::print)?;
    conversation.close(text, &answer.text);
    if !answer.text.ends_with('\n') {
        output::print("\n")?;
    }
    match answer.end {
        End::ContextFull => output::tell!("note: the context is full: /reset, or a larger --ctx"),
        End::MaxTokens => output::tell!("note: cut at --max-tokens"),
        _ => {}
    }
    Ok(())
}

/// A failed turn is said and forgotten, so that the conversation can go on; a closed standard
/// output ends it.
fn report(said: Outcome, conversation: &mut Conversation, session: &mut Session) -> Outcome {
    let Err(failure) = said else { return Ok(()) };
    let Some(line) = failure.line() else { return Err(failure) };
    output::tell!("error: {line}");
    conversation.abandon();
    session.reset();
    Ok(())
}

fn read() -> Outcome<Line> {
    loop {
        output::say(format_args!("> "));
        let mut line = String::new();
        let length = io::stdin().lock().read_line(&mut line).map_err(|error| {
            Failure::Work(anyhow::Error::new(error).context("standard input cannot be read"))
        })?;
        if length == 0 {
            output::tell!();
            return Ok(Line::End);
        }
        let text = line.strip_suffix('\n').unwrap_or(&line);
        match text.trim() {
            "" => {}
            "/exit" | "/quit" => return Ok(Line::End),
            "/reset" => return Ok(Line::Reset),
            "/stats" => return Ok(Line::Statistics),
            "/help" | "/?" => return Ok(Line::Help),
            command if is_command(command) => {
                output::tell!("note: there is no {command} here: /help lists what there is");
            }
            _ => return Ok(Line::Say(text.to_string())),
        }
    }
}

/// A slash and one word: more likely a command mistyped than something to say.
fn is_command(line: &str) -> bool {
    let word = line.strip_prefix('/').unwrap_or("");
    !word.is_empty() && word.chars().all(|c| c.is_ascii_alphabetic())
}
