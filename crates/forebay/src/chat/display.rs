//! Shows an answer: content on standard output, thinking and tool calls on standard error.

use forebay_chat::Event;

use crate::failure::Outcome;
use crate::output::{self, TextStream};

/// Shows one answer while it is generated. Thinking is dim; without styles it is between two marker lines.
pub struct Display {
    hide_thinking: bool,
    styled: bool,
    shown: Shown,
    content: TextStream,
    aside: TextStream,
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
        let (content, aside) = (TextStream::result(), TextStream::aside());
        Display { hide_thinking, styled: output::styled(), shown: Shown::Nothing, content, aside }
    }

    /// Creates the display of an answer that continues `text`, which is printed first.
    pub fn after(text: &str, hide_thinking: bool) -> Outcome<Display> {
        let mut display = Display::new(hide_thinking);
        output::print(text)?;
        display.content.begin_after(text);
        Ok(display)
    }

    pub fn show(&mut self, event: Event<'_>) -> Outcome {
        match event {
            Event::Reasoning(_) if self.hide_thinking => Ok(()),
            Event::Reasoning(text) => {
                self.turn_to(Shown::Thinking)?;
                self.aside.push(text)
            }
            Event::Content(text) => {
                self.turn_to(Shown::Content)?;
                self.content.push(text)
            }
            Event::ToolCall { name, .. } => {
                self.end_part()?;
                self.shown = Shown::ToolCall;
                self.aside.push(&format!("[tool call] {name} "))
            }
            Event::Arguments { text, .. } => self.aside.push(text),
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
        self.aside.flush()?;
        self.content.flush()?;
        match self.shown {
            Shown::Nothing => {}
            Shown::Thinking => {
                self.aside.push("\n")?;
                match self.styled {
                    true => output::tell!(),
                    false => output::tell!("[end of thinking]"),
                }
            }
            Shown::ToolCall => self.aside.push("\n")?,
            Shown::Content if !self.content.is_at_line_start() => self.content.push("\n")?,
            Shown::Content => {}
        }
        Ok(())
    }
}
