//! Templates in processes of their own.
//!
//! The engine bounds the steps of a template, not its memory: a few steps can double a text over and over, and printing a list
//! that holds itself many times takes no steps at all. The memory of a process can be bounded, whatever the template does.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use serde_json::Value;

use super::program::Program;
use super::wire::{self, Rest};
use super::{CivilTime, RenderInput};
use crate::TextError;

/// Memory that a template may use besides its stack, and besides a multiple of the conversation.
const MEMORY_BYTES: u64 = 384 << 20;
/// Memory for each byte of a conversation.
const MEMORY_PER_BYTE: u64 = 64;
/// Longest prompt, or longest list of variables.
const ANSWER_BYTES_MAX: u64 = 256 << 20;
/// Signal for a process that used all its processor time.
const TIME_IS_OVER: i32 = 24;
/// Signals of others: SIGHUP, SIGINT, SIGKILL and SIGTERM.
const ENDED_BY_OTHERS: [i32; 4] = [1, 2, 9, 15];
/// Format of times between the processes.
const TIME: &str = "%Y-%m-%dT%H:%M:%S";

static COMMAND: OnceLock<fn() -> Command> = OnceLock::new();

/// Makes every template that is created from now on run in a process of its own. `command` is the start of this process, which
/// has to call
/// [`serve_template_within_limits`](super::serve_template_within_limits).
pub fn isolate_templates(command: fn() -> Command) {
    // A second call would bring the same command.
    let _ = COMMAND.set(command);
}

/// What a template is made of.
#[derive(Debug)]
struct Setup {
    source: String,
    bos: String,
    eos: String,
}

/// A running process.
#[derive(Debug)]
struct Running {
    child: Child,
    to: BufWriter<ChildStdin>,
    from: BufReader<ChildStdout>,
}

/// A template in a process. A process that ended is started again when it is needed.
#[derive(Debug)]
pub struct Host {
    command: fn() -> Command,
    setup: Setup,
    running: Mutex<Option<Running>>,
}

impl Host {
    /// Starts a process if templates are isolated.
    ///
    /// # Errors
    /// Returns [`TextError::TemplateSyntax`] if the template is not valid, and an error if there is no process for it.
    pub fn start(source: &str, bos: &str, eos: &str) -> Result<Option<Host>, TextError> {
        let Some(command) = COMMAND.get() else { return Ok(None) };
        let [source, bos, eos] = [source, bos, eos].map(str::to_owned);
        let setup = Setup { source, bos, eos };
        let running = Mutex::new(Some(Running::start(*command, &setup)?));
        Ok(Some(Host { command: *command, setup, running }))
    }

    /// Returns the names of all variables, one on each line.
    pub fn variables(&self) -> Result<String, TextError> {
        self.ask(b"v")
    }

    /// Renders a conversation.
    pub fn render(&self, input: &RenderInput) -> Result<String, TextError> {
        let mut question = vec![b'r', u8::from(input.add_generation_prompt)];
        wire::put(&input.messages, &mut question);
        question.push(u8::from(input.tools.is_some()));
        wire::put(input.tools.as_ref().unwrap_or(&Value::Null), &mut question);
        wire::put(&Value::Object(input.variables.clone()), &mut question);
        let now = input.now.map(|now| now.format(TIME)).transpose();
        let now = now.map_err(|error| TextError::TemplateFailed { reason: error.to_string() })?;
        wire::put_text(&now.unwrap_or_default(), &mut question);
        self.ask(&question)
    }

    fn ask(&self, question: &[u8]) -> Result<String, TextError> {
        let mut place = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = match place.take() {
            Some(running) => running,
            None => Running::start(self.command, &self.setup)?,
        };
        let mut answer = running.ask(question);
        // A user or the system may have ended the process while it was idle.
        if answer.as_ref().is_err_and(|error| running.was_ended(error)) {
            running = Running::start(self.command, &self.setup)?;
            answer = running.ask(question);
        }
        match answer {
            Ok(answer) => {
                *place = Some(running);
                answer
            }
            Err(error) => Err(running.failure(&error)),
        }
    }
}

impl Running {
    fn start(command: fn() -> Command, setup: &Setup) -> Result<Running, TextError> {
        let failed =
            |error| TextError::TemplateFailed { reason: format!("no process for it: {error}") };
        let mut command = command();
        // Ctrl-C is for the parent, whose end ends this process.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(failed)?;
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let (to, from) = (to.expect("piped"), from.expect("piped"));
        let (to, from) = (BufWriter::new(to), BufReader::new(from));
        let mut running = Running { child, to, from };
        let mut question = Vec::new();
        for text in [&setup.source, &setup.bos, &setup.eos] {
            wire::put_text(text, &mut question);
        }
        match running.ask(&question) {
            Ok(answer) => answer.map(|_| running),
            Err(error) => Err(running.failure(&error)),
        }
    }

    /// Asks the process. The outer error is that of a process that does not answer.
    fn ask(&mut self, question: &[u8]) -> io::Result<Result<String, TextError>> {
        wire::send(&mut self.to, question)?;
        let length = wire::length(&mut self.from)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        if length > ANSWER_BYTES_MAX {
            return Err(io::Error::other("its text is too long"));
        }
        let answer = wire::receive(&mut self.from, length)?;
        let (tag, text) = answer.split_first().ok_or(io::ErrorKind::InvalidData)?;
        let text = String::from_utf8(text.to_vec()).map_err(io::Error::other)?;
        match tag {
            b'o' => Ok(Ok(text)),
            b's' => Ok(Err(TextError::TemplateSyntax { reason: text })),
            b'r' => Ok(Err(TextError::TemplateRefused { message: text })),
            b'f' => Ok(Err(TextError::TemplateFailed { reason: text })),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Returns true if the process does not answer because a signal of another process or of the system ended it.
    fn was_ended(&mut self, error: &io::Error) -> bool {
        if !matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe) {
            return false;
        }
        // Its end has closed the pipe, so this does not take long.
        let ended = self.child.wait().ok().as_ref().and_then(ExitStatus::signal);
        ended.is_some_and(|signal| ENDED_BY_OTHERS.contains(&signal))
    }

    /// Says why a process does not answer.
    fn failure(&mut self, error: &io::Error) -> TextError {
        // It has ended, or is of no use any more.
        let _ = self.child.kill();
        let signal = self.child.wait().ok().as_ref().and_then(ExitStatus::signal);
        let reason = match signal {
            Some(TIME_IS_OVER) => "it takes too long".to_owned(),
            _ if error.kind() == io::ErrorKind::Other => error.to_string(),
            Some(_) => "it needs more memory than a template may use".to_owned(),
            None => format!("its process ended: {error}"),
        };
        TextError::TemplateFailed { reason }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs one template for the parent process, until `input` ends. Before each work, `allow` is told how many bytes of memory the
/// process may use from then on, besides those that it uses; it has to make the process fail beyond that.
///
/// # Errors
/// Returns an error if the parent says something wrong, and the errors of `allow`.
pub fn serve_template(
    mut input: impl Read,
    mut output: impl Write,
    mut allow: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<()> {
    let damaged = || io::Error::from(io::ErrorKind::InvalidData);
    let mut receive = |bytes: &mut dyn FnMut(u64) -> io::Result<()>| {
        let Some(length) = wire::length(&mut input)? else { return Ok(None) };
        // For the question and the values in it.
        bytes(MEMORY_BYTES + MEMORY_PER_BYTE * length)?;
        wire::receive(&mut input, length).map(|frame| Some((frame, length)))
    };
    let Some((frame, _)) = receive(&mut allow)? else { return Ok(()) };
    let mut rest = Rest(&frame);
    let mut text = || rest.text().ok_or_else(damaged);
    let (source, bos, eos) = (text()?, text()?, text()?);
    allow(MEMORY_BYTES + Program::stack_to_compile(&source))?;
    let program = match Program::new(&source) {
        Ok(program) => program,
        Err(error) => return answer(&mut output, Err(error)),
    };
    answer(&mut output, Ok(String::new()))?;
    while let Some((frame, length)) = receive(&mut allow)? {
        let memory = MEMORY_BYTES + MEMORY_PER_BYTE * length;
        match frame.split_first().ok_or_else(damaged)? {
            (b'v', _) => {
                allow(memory + Program::stack_to_compile(&source))?;
                answer(&mut output, program.variables().map(|names| names.join("\n")))?;
            }
            (b'r', question) => {
                let input = render_input(question).ok_or_else(damaged)?;
                allow(memory + Program::stack_to_render(&input))?;
                answer(&mut output, program.render(&input, &bos, &eos))?;
            }
            _ => return Err(damaged()),
        }
    }
    Ok(())
}

fn render_input(question: &[u8]) -> Option<RenderInput> {
    let (add, rest) = question.split_first()?;
    let mut rest = Rest(rest);
    let messages = rest.value()?;
    let (has_tools, after) = rest.0.split_first()?;
    rest.0 = after;
    let tools = rest.value()?;
    let Value::Object(variables) = rest.value()? else { return None };
    let now = rest.text()?;
    let now = if now.is_empty() { None } else { Some(CivilTime::parse(&now)?) };
    Some(RenderInput {
        messages,
        tools: (*has_tools == 1).then_some(tools),
        add_generation_prompt: *add == 1,
        variables,
        now,
    })
}

fn answer(output: &mut impl Write, found: Result<String, TextError>) -> io::Result<()> {
    let (tag, text) = match found {
        Ok(text) => (b'o', text),
        Err(TextError::TemplateSyntax { reason }) => (b's', reason),
        Err(TextError::TemplateRefused { message }) => (b'r', message),
        Err(TextError::TemplateFailed { reason }) => (b'f', reason),
        Err(error) => (b'f', error.to_string()),
    };
    let mut frame = text.into_bytes();
    frame.insert(0, tag);
    wire::send(output, &frame)
}
