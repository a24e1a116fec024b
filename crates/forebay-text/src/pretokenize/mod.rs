//! Split of text into the words within which byte pair encoding merges.
//!
//! A pre-tokenizer is a sequence of patterns. Each one cuts the pieces that the previous one left.
//! The matches and the text between them become pieces.

mod rules;

use std::ops::Range;

use regex::Regex;

use crate::TextError;
pub use rules::GEMMA_4;
use rules::{Pattern, RULES, Rule};

/// Rule for the last character of a match that is only whitespace.
///
/// The published patterns end in `\s+(?!\S)|\s+`: a run of whitespace leaves its last character to
/// the word that follows. Handling this here instead of by look-ahead keeps every pattern a true
/// regular expression, which runs in linear time on any text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tail {
    /// The pattern has no such ending.
    Whole,
    /// Any run of two or more characters leaves its last one to the next word.
    Any,
    /// Like `Any`, except for runs that end in a line break, which the pattern matches separately.
    NotLineBreak,
}

/// A pre-tokenizer that a model names.
pub struct Splitter {
    name: &'static str,
    rule: &'static Rule,
    stages: Vec<(Regex, Tail)>,
}

impl Splitter {
    /// Returns the splitter for a name in `tokenizer.ggml.pre`.
    ///
    /// # Errors
    /// Returns [`TextError::UnknownPreTokenizer`] for an unknown name, because another
    /// pre-tokenizer would silently give wrong ids.
    pub fn named(name: &str) -> Result<Self, TextError> {
        let mut rules =
            RULES.iter().flat_map(|rule| rule.names.iter().map(move |name| (name, rule)));
        let found = rules.find(|(known, _)| **known == name);
        let (known, rule) = found.ok_or_else(|| TextError::UnknownPreTokenizer {
            name: name.to_owned(),
            known: known_names().collect::<Vec<_>>().join(", "),
        })?;
        let stages = rule.patterns.iter().map(|Pattern(pattern, tail)| {
            let regex = Regex::new(pattern);
            regex.map(|regex| (regex, *tail)).map_err(|error| TextError::UnknownPreTokenizer {
                name: name.to_owned(),
                known: error.to_string(),
            })
        });
        Ok(Self { name: known, rule, stages: stages.collect::<Result<_, _>>()? })
    }

    /// Returns the name that was requested.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns true if a word that is a token is used as it is, without merging.
    pub fn whole_words(&self) -> bool {
        self.rule.whole_words
    }

    /// Returns true if models with this pre-tokenizer begin with BOS unless their file says
    /// otherwise.
    pub fn adds_bos(&self) -> bool {
        self.rule.adds_bos
    }

    /// Returns the words of `text`, in order and without gaps.
    pub fn split<'a>(&self, text: &'a str) -> impl Iterator<Item = &'a str> {
        let mut pieces: Vec<_> = std::iter::once(0..text.len()).collect();
        let mut finer = Vec::new();
        for (regex, tail) in &self.stages {
            finer.clear();
            for piece in &pieces {
                cut(regex, *tail, &text[piece.clone()], piece.start, &mut finer);
            }
            std::mem::swap(&mut pieces, &mut finer);
        }
        pieces.into_iter().filter(|piece| !piece.is_empty()).map(|piece| &text[piece])
    }
}

/// Appends the pieces of `text`, which starts at `offset` in the whole text.
fn cut(regex: &Regex, tail: Tail, text: &str, offset: usize, out: &mut Vec<Range<usize>>) {
    let mut done = 0;
    while let Some(found) = regex.find_at(text, done) {
        if found.is_empty() {
            break;
        }
        let end = found.end() - given_away(text, found.range(), tail);
        if found.start() > done {
            out.push(offset + done..offset + found.start());
        }
        out.push(offset + found.start()..offset + end);
        done = end;
    }
    if done < text.len() {
        out.push(offset + done..offset + text.len());
    }
}

/// Returns the number of bytes at the end of a match that are left to the next word.
fn given_away(text: &str, found: Range<usize>, tail: Tail) -> usize {
    let run = &text[found.clone()];
    let Some(last) = run.chars().next_back() else { return 0 };
    let keeps_all = match tail {
        Tail::Whole => true,
        Tail::Any => false,
        Tail::NotLineBreak => matches!(last, '\r' | '\n'),
    };
    let is_one_character = run.len() == last.len_utf8();
    if keeps_all || is_one_character || found.end == text.len() {
        return 0;
    }
    if run.chars().all(char::is_whitespace) { last.len_utf8() } else { 0 }
}

/// Returns all names that [`Splitter::named`] accepts.
pub fn known_names() -> impl Iterator<Item = &'static str> {
    RULES.iter().flat_map(|rule| rule.names).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split<'a>(name: &str, text: &'a str) -> Vec<&'a str> {
        Splitter::named(name).unwrap().split(text).collect()
    }

    #[test]
    fn every_rule_compiles_and_keeps_all_text() {
        let text = "Hi  you're\t\t12345 ÄÖ中文かな!?\r\n\n  x\u{301}… \u{a0}\u{3000} 가나 end  ";
        let mut names = std::collections::HashSet::new();
        for name in known_names() {
            assert!(names.insert(name), "{name} is named twice");
            assert_eq!(split(name, text).concat(), text, "{name}");
        }
    }

    #[test]
    fn last_space_goes_to_the_word_behind() {
        assert_eq!(split("gpt-2", "a   b \n\n c  "), ["a", "  ", " b", " \n\n", " c", "  "]);
        assert_eq!(split("gpt-2", "\n\nx"), ["\n", "\n", "x"]);
        assert_eq!(split("llama-bpe", "a   b \n\n c  "), ["a", "  ", " b", " \n\n", " c", "  "]);
        assert_eq!(split("llama-bpe", "\n\nx"), ["\n\n", "x"]);
        assert_eq!(split("llama-bpe", "\t\tx 1234"), ["\t", "\tx", " ", "123", "4"]);
        assert_eq!(split("qwen2", "don'T 12"), ["don", "'T", " ", "1", "2"]);
        assert_eq!(split("starcoder", "a  12"), ["a", "  ", "1", "2"]);
    }

    #[test]
    fn long_runs_take_linear_time() {
        let spaces = " ".repeat(1 << 20);
        for name in ["llama-bpe", "gpt-2", "deepseek-llm", "deepseek-v3", "default", "gpt-4o"] {
            let text = format!("{spaces}a{spaces}");
            assert_eq!(split(name, &text).concat().len(), text.len());
        }
    }

    #[test]
    fn unknown_names_are_refused_with_the_known_ones() {
        let error = Splitter::named("nonesuch").err().unwrap().to_string();
        assert!(error.contains("nonesuch") && error.contains("llama-bpe"), "{error}");
    }
}
