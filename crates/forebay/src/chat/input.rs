//! Reads the user's input: with a line editor on a terminal, otherwise as plain lines.

use std::borrow::Cow;
use std::fs;
use std::io::{self, BufRead as _, IsTerminal as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};

use anyhow::Context as _;
use reedline::{
    Color, ColumnarMenu, EditCommand, Emacs, FileBackedHistory, Highlighter, KeyCode, KeyModifiers,
    MenuBuilder as _, Prompt, PromptEditMode, PromptHistorySearch, Reedline, ReedlineEvent,
    ReedlineMenu, Signal, StyledText, ValidationResult, Validator, default_emacs_keybindings,
};

use super::command;
use super::complete::ChatCompleter;
use crate::failure::{Failure, Outcome};
use crate::interrupt;
use crate::output;
use crate::state;

const PROMPT: &str = "> ";
const CONTINUED: &str = ". ";

/// Name of the menu of completions.
const COMPLETIONS: &str = "completions";

/// Number of inputs kept in the history file.
const HISTORY_LENGTH: usize = 1000;

/// Largest line, in bytes, that the kernel's terminal driver passes on; it drops the rest.
const TERMINAL_LINE_BYTES: usize = 4095;

/// One input from the user.
pub enum Input {
    Text(String),
    /// End of input, or Ctrl-D.
    End,
    /// Ctrl-C at the prompt.
    Interrupted,
}

/// Source of the user's inputs.
pub enum Reader {
    Editor(Box<Reedline>),
    Plain,
}

impl Reader {
    /// Creates a line editor if standard input, output and error are terminals; otherwise reads plain lines.
    pub fn new() -> Reader {
        match has_editor() {
            true => Reader::Editor(Box::new(editor())),
            false => Reader::Plain,
        }
    }

    /// Reads the next input. Pasted lines and lines between `\"\"\"` delimiters form one input.
    pub fn read(&mut self) -> Outcome<Input> {
        let _waiting = interrupt::waiting_for_input();
        match self {
            Reader::Plain => plain(),
            Reader::Editor(editor) => match edited(editor) {
                Ok(input) => Ok(input),
                Err(error) => {
                    output::tell!("note: the line editor does not work on this terminal: {error}");
                    *self = Reader::Plain;
                    plain()
                }
            },
        }
    }
}

/// Returns true if there is a line editor: standard input, output and error are terminals.
pub fn has_editor() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal() && io::stderr().is_terminal()
}

/// Reads an input with the line editor. Ctrl-C clears the line, and ends the chat if there is nothing to clear.
fn edited(editor: &mut Reedline) -> io::Result<Input> {
    loop {
        return Ok(match editor.read_line(&Mark)? {
            Signal::Success(text) => Input::Text(text),
            Signal::HostCommand(_) if !editor.current_buffer_contents().is_empty() => {
                editor.run_edit_commands(&[EditCommand::Clear]);
                continue;
            }
            Signal::HostCommand(_) | Signal::CtrlC => {
                output::tell!();
                Input::Interrupted
            }
            _ => Input::End,
        });
    }
}

fn editor() -> Reedline {
    let mut keys = default_emacs_keybindings();
    let new_line = ReedlineEvent::Edit(vec![EditCommand::InsertNewline]);
    keys.add_binding(KeyModifiers::ALT, KeyCode::Enter, new_line);
    let interrupt = ReedlineEvent::ExecuteHostCommand(String::new());
    let interrupt = ReedlineEvent::Multiple(vec![ReedlineEvent::Esc, interrupt]);
    keys.add_binding(KeyModifiers::CONTROL, KeyCode::Char('c'), interrupt);
    let complete = vec![ReedlineEvent::Menu(COMPLETIONS.to_owned()), ReedlineEvent::MenuNext];
    keys.add_binding(KeyModifiers::NONE, KeyCode::Tab, ReedlineEvent::UntilFound(complete));
    let completions = ColumnarMenu::default().with_name(COMPLETIONS);
    let editor = Reedline::create()
        .with_edit_mode(Box::new(Emacs::new(keys)))
        .with_completer(Box::new(ChatCompleter))
        .with_menu(ReedlineMenu::EngineCompleter(Box::new(completions)))
        .with_quick_completions(true)
        .with_partial_completions(true)
        .with_validator(Box::new(Blocks))
        .with_highlighter(Box::new(Unstyled))
        .with_ansi_colors(output::styled())
        .use_bracketed_paste(true);
    match history() {
        Ok(history) => editor.with_history(Box::new(history)),
        Err(error) => {
            output::tell!("note: the input history cannot be saved: {error:#}");
            editor
        }
    }
}

/// Opens the history of earlier inputs. Only its owner may read the file.
fn history() -> anyhow::Result<FileBackedHistory> {
    let folder = state::folder().context("neither XDG_STATE_HOME nor HOME is set")?;
    let path = folder.join("chat-history");
    let failed = || format!("{}: cannot be written", path.display());
    if let Some(folder) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).with_context(failed)?;
    }
    fs::OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(&path)
        .with_context(failed)?;
    FileBackedHistory::with_file(HISTORY_LENGTH, path.clone()).with_context(failed)
}

/// Reads lines until the open block is closed.
fn plain() -> Outcome<Input> {
    let mut text = String::new();
    loop {
        output::say(format_args!("{}", if text.is_empty() { PROMPT } else { CONTINUED }));
        let start = text.len();
        let length = io::stdin().lock().read_line(&mut text).map_err(|error| {
            Failure::Work(anyhow::Error::new(error).context("standard input cannot be read"))
        })?;
        if length == 0 && start == 0 {
            output::tell!();
            return Ok(Input::End);
        }
        if length > TERMINAL_LINE_BYTES && io::stdin().is_terminal() {
            output::tell!(
                "error: a terminal cuts lines at {TERMINAL_LINE_BYTES} bytes, so this one may be cut and is \
                 not sent: put the text into a file and use -f FILE"
            );
            text.truncate(start);
            continue;
        }
        if length == 0 || !command::is_open(&text) {
            return Ok(Input::Text(text.strip_suffix('\n').unwrap_or(&text).to_owned()));
        }
    }
}

/// Makes Enter send the text unless a block is open.
struct Blocks;

impl Validator for Blocks {
    fn validate(&self, text: &str) -> ValidationResult {
        match command::is_open(text) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Complete,
        }
    }
}

/// Shows the typed text in the terminal's own colours.
struct Unstyled;

impl Highlighter for Unstyled {
    fn highlight(&self, line: &str, _: usize) -> StyledText {
        let mut text = StyledText::new();
        text.push((Color::Default.normal(), line.to_owned()));
        text
    }
}

struct Mark;

impl Prompt for Mark {
    fn render_prompt_left(&self) -> Cow<'_, str> {
        Cow::Borrowed("")
    }

    fn render_prompt_right(&self) -> Cow<'_, str> {
        Cow::Borrowed("")
    }

    fn render_prompt_indicator(&self, _: PromptEditMode) -> Cow<'_, str> {
        Cow::Borrowed(PROMPT)
    }

    fn render_prompt_multiline_indicator(&self) -> Cow<'_, str> {
        Cow::Borrowed(CONTINUED)
    }

    fn render_prompt_history_search_indicator(&self, search: PromptHistorySearch) -> Cow<'_, str> {
        Cow::Owned(format!("(search: {}) ", search.term))
    }

    fn get_prompt_multiline_color(&self) -> Color {
        Color::Default
    }

    fn get_indicator_color(&self) -> Color {
        Color::Default
    }
}
