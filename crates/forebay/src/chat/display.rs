//! Shows an answer: content on standard output, thinking and tool calls on standard error.

use forebay_chat::Event;

use crate::failure::Outcome;
use crate::output;

const DIM: &str = "\u{1b}[2m";
const NORMAL: &str = "\u{1b}[0m";

/// Shows one answer while it is generated. Thinking is dim; without styles it is between two marker lines.
pub struct Display {
    hide_thinking: bool,
    styled: bool,
    shown: Shown,
    /// True if the content is empty or ends with a line break.
    at_line_start: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    Nothing,
    Thinking,
    Content,
    ToolCall,
}

impl Display {
    pub fn new(hide_thinking: bool) -> Display {
        let styled = output::styled();
        Display { hide_thinking, styled, shown: Shown::Nothing, at_line_start: true }
    }

    pub fn show(&mut self, event: Event<'_>) -> Outcome {
        match event {
            Event::Reasoning(_) if self.hide_thinking => Ok(()),
            Event::Reasoning(text) => {
                self.turn_to(Shown::Thinking)?;
                // Every piece resets the style, because Ctrl-C may end the program between two pieces.
                match self.styled {
                    true => output::say(format_args!("{DIM}{text}{NORMAL}")),
                    false => output::say(format_args!("{text}")),
                }
                Ok(())
            }
            Event::Content(text) => {
                self.turn_to(Shown::Content)?;
                self.at_line_start = text.ends_with('\n');
                output::print(text)
            }
            Event::ToolCall { name, .. } => {
                self.end_part()?;
                self.shown = Shown::ToolCall;
                output::say(format_args!("[tool call] {name} "));
                Ok(())
            }
            Event::Arguments { text, .. } => {
                output::say(format_args!("{text}"));
                Ok(())
            }
        }
    }

    /// Ends the output with a line break. An empty answer gets one only if generation succeeded.
    pub fn finish(mut self, answered: bool) -> Outcome {
        if self.shown == Shown::Nothing && answered {
            return output::print("\n");
        }
        self.end_part()
    }

    fn turn_to(&mut self, part: Shown) -> Outcome {
        if self.shown == part {
            return Ok(());
        }
        self.end_part()?;
        if part == Shown::Thinking && !self.styled {
            output::tell!("[thinking]");
        }
        self.shown = part;
        Ok(())
    }

    fn end_part(&mut self) -> Outcome {
        match self.shown {
            Shown::Nothing => {}
            Shown::Thinking if self.styled => output::tell!("\n"),
            Shown::Thinking => output::tell!("\n[end of thinking]"),
            Shown::ToolCall => output::tell!(),
            Shown::Content if !self.at_line_start => output::print("\n")?,
            Shown::Content => {}
        }
        self.at_line_start = true;
        Ok(())
    }
}
