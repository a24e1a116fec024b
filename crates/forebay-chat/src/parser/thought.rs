//! Calls of tools at the end of reasoning that the model did not close.
//!
//! Some models go from thinking to calling without the mark between them. Such calls count if the answer ends with them.
//! A call that more reasoning follows is a part of the reasoning: the model only thought about it.

use super::kimi3;
use super::tools::Call;
use crate::ToolSyntax;
use crate::offer::Offer;
use crate::syntax::Tags;

/// Tools whose calls may end the reasoning.
pub struct Ending<'a> {
    pub syntax: ToolSyntax,
    pub tags: Tags,
    pub offer: &'a Offer,
}

impl Ending<'_> {
    /// Returns the marks with which calls may begin.
    pub fn marks(&self) -> impl Iterator<Item = &'static str> {
        self.tags.wrappers.iter().copied().chain([self.tags.open])
    }

    /// Returns true if a text may be the beginning of calls and nothing else. It begins with a mark.
    pub fn may_be_calls(&self, text: &str) -> bool {
        match self.read(text) {
            Read::Calls(_) => true,
            Read::Begun(rest) => match rest.strip_prefix(self.tags.open) {
                Some(body) => self.syntax.may_begin(body),
                None => self.marks().any(|mark| mark.starts_with(rest)),
            },
            Read::Other => false,
        }
    }

    /// Finds calls that a text ends with. Returns where they begin, and the calls.
    pub fn find(&self, text: &str) -> Option<(usize, Vec<Call>)> {
        let mut from = 0;
        while let Some(at) = self.marks().filter_map(|mark| text[from..].find(mark)).min() {
            let at = from + at;
            match self.read(&text[at..]) {
                Read::Calls(calls) if !calls.is_empty() => return Some((at, calls)),
                _ => from = text.ceil_char_boundary(at + 1),
            }
        }
        None
    }

    /// Reads calls with nothing but white space between them.
    fn read<'a>(&self, text: &'a str) -> Read<'a> {
        let mut calls = Vec::new();
        let mut rest = text.trim_start();
        let close = self.tags.close.unwrap_or_default();
        while !rest.is_empty() {
            let wrapper = self.tags.wrappers.iter().find_map(|mark| rest.strip_prefix(mark));
            if let Some(behind) = wrapper {
                rest = behind.trim_start();
                continue;
            }
            let found = rest.strip_prefix(self.tags.open).and_then(|body| body.split_once(close));
            let Some((body, behind)) = found else { return Read::Begun(rest) };
            match self.syntax.parse(body, self.offer) {
                Some(more) if more.iter().all(|call| self.offer.names(&call.name)) => {
                    calls.extend(more);
                }
                _ => return Read::Other,
            }
            rest = behind.trim_start();
        }
        Read::Calls(calls)
    }
}

/// The reading of a text as calls with nothing but white space between them.
enum Read<'a> {
    Calls(Vec<Call>),
    /// Calls, and the beginning of another one or of other text.
    Begun(&'a str),
    /// Something that is no call of an offered tool.
    Other,
}

impl ToolSyntax {
    /// Returns true if what follows the mark may be the beginning of a call.
    fn may_begin(self, body: &str) -> bool {
        let body = body.trim_start();
        let fits = |begin: &str| body.starts_with(begin) || begin.starts_with(body);
        match self {
            ToolSyntax::Json => fits("{"),
            ToolSyntax::FunctionTags | ToolSyntax::Seed => fits("<function="),
            ToolSyntax::Dsml(names) => fits(names.tags()[0]),
            ToolSyntax::MiniMax | ToolSyntax::Dots => fits("<invoke"),
            ToolSyntax::Atem => fits("<atem:invoke"),
            ToolSyntax::Kimi3 => fits(kimi3::CALL),
            ToolSyntax::Cohere => fits("[") || fits("{"),
            ToolSyntax::MiniMax3 => fits(crate::syntax::MINIMAX3),
            ToolSyntax::FunctionGemma | ToolSyntax::Gemma4 => fits("call:"),
            ToolSyntax::Nemotron2 | ToolSyntax::Hunyuan => fits("["),
            ToolSyntax::Lfm2 => fits("[") || fits("{"),
            // A name.
            _ => body.chars().next().is_none_or(|c| c.is_alphanumeric() || c == '_'),
        }
    }
}
