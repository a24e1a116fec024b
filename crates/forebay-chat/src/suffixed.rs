//! Marks that end in a word of the checkpoint, as those of Hy3 and Hy4: `<think:opensource>`.

use std::sync::{Mutex, PoisonError};

use forebay_text::ChatTemplate;
use serde_json::json;

use crate::probe;

/// Longest suffix, with its colon.
const SUFFIX_BYTES_MAX: usize = 32;

/// Most different sets of marks that a process knows. Templates with further suffixes are not recognised.
const KNOWN_MAX: usize = 64;

/// Marks of each argument of a call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ArgumentMarks {
    pub key: [&'static str; 2],
    pub value: [&'static str; 2],
    /// Mark that may be behind the name.
    pub behind_name: &'static str,
}

impl ArgumentMarks {
    /// Returns the name in the text before the first argument.
    pub fn name<'a>(&self, text: &'a str) -> Option<&'a str> {
        let text = text.trim();
        let name = text.strip_suffix(self.behind_name).unwrap_or(text).trim_end();
        let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
        is_name.then_some(name)
    }
}

/// Marks of GLM.
pub(crate) const PLAIN: ArgumentMarks = ArgumentMarks {
    key: ["<arg_key>", "</arg_key>"],
    value: ["<arg_value>", "</arg_value>"],
    behind_name: "",
};

/// Marks of a checkpoint. They live as long as the process, because marks are compared in many places.
#[derive(Debug, PartialEq, Eq)]
pub struct SuffixedMarks {
    /// Word behind the names of the marks, such as `:opensource`. It may be empty.
    pub(crate) suffix: &'static str,
    pub(crate) think: [&'static str; 2],
    /// Marks around all calls.
    pub(crate) calls: [&'static str; 2],
    /// Marks around a call.
    pub(crate) call: [&'static str; 2],
    pub(crate) arguments: ArgumentMarks,
    /// Marks within a call.
    pub(crate) inner: [&'static str; 5],
    /// True if a mark and a line end are behind the name, and line ends between the others, as in Hy3.
    pub(crate) separated: bool,
    /// Text before the first call, and behind the last one.
    pub(crate) around: [&'static str; 2],
}

static KNOWN: Mutex<Vec<&'static SuffixedMarks>> = Mutex::new(Vec::new());

impl SuffixedMarks {
    /// Returns the marks that a template writes around calls, if it writes them in the form of Hy3 or Hy4. The source
    /// may have them in pieces, so the rendered prompt counts.
    pub(crate) fn recognise(template: &ChatTemplate) -> Option<&'static SuffixedMarks> {
        let source = template.source();
        if !["tool_calls", "arg_key", "arg_value"].iter().all(|name| source.contains(name)) {
            return None;
        }
        let prompt = probe::prompt_of_calls(template, &json!({ "needle": "x" }), 1)?;
        let (_, behind) = prompt.rsplit_once("<tool_calls")?;
        let (suffix, _) = behind.split_once('>')?;
        let is_word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-');
        let is_suffix = match suffix.strip_prefix(':') {
            Some(word) => !word.is_empty() && word.chars().all(is_word),
            None => suffix.is_empty(),
        };
        let call = format!("<tool_call{suffix}>probe0");
        let key = format!("<arg_key{suffix}>needle</arg_key{suffix}>");
        let fits = is_suffix && suffix.len() <= SUFFIX_BYTES_MAX;
        if !fits || !behind.contains(&call) || !behind.contains(&key) {
            return None;
        }
        SuffixedMarks::of(suffix, behind.contains(&format!("{call}<tool_sep{suffix}>")))
    }

    fn of(suffix: &str, separated: bool) -> Option<&'static SuffixedMarks> {
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same =
            |marks: &&&SuffixedMarks| marks.suffix == suffix && marks.separated == separated;
        if let Some(marks) = known.iter().find(is_same) {
            return Some(marks);
        }
        if known.len() == KNOWN_MAX {
            return None;
        }
        let kept = |text: String| -> &'static str { Box::leak(text.into_boxed_str()) };
        let pair =
            |name: &str| [format!("<{name}{suffix}>"), format!("</{name}{suffix}>")].map(kept);
        let separator = kept(format!("<tool_sep{suffix}>"));
        let (calls, key, value) = (pair("tool_calls"), pair("arg_key"), pair("arg_value"));
        let line_end = if separated { "\n" } else { "" };
        let marks = SuffixedMarks {
            suffix: kept(suffix.to_owned()),
            think: pair("think"),
            calls,
            call: pair("tool_call"),
            inner: [separator, key[0], key[1], value[0], value[1]],
            arguments: ArgumentMarks { key, value, behind_name: separator },
            separated,
            around: [kept(format!("{}{line_end}", calls[0])), calls[1]],
        };
        let marks: &'static SuffixedMarks = Box::leak(Box::new(marks));
        known.push(marks);
        Some(marks)
    }
}
