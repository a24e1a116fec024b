//! Comparisons of texts that may have stand-ins for characters (see `content.rs`).
//!
//! Templates look for marks such as `</think>` in the text of messages. There, stand-ins have to count as the characters that
//! they stand for. So the operands of `in`, `==` and `!=` go through a filter, and the methods, filters and tests that compare
//! texts look at the characters.

use std::ops::Range;

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, ValueKind, from_args};
use minijinja::{Environment, Error, State, Value};

use crate::content::{has_marks, unmarked, unmarked_text};

/// Filter that puts characters in place of their stand-ins.
const FILTER: &str = "__without_marks";

/// Returns the source with the operands of comparisons passed to [`FILTER`], as far as they may be text of messages.
pub fn with_filtered_operands(source: &str, syntax: SyntaxConfig) -> String {
    let tokens: Result<Vec<_>, _> = tokenize(source, false, syntax).collect();
    // The compiler says what is wrong with such a source.
    let Ok(tokens) = tokens else { return source.to_owned() };
    let kinds: Vec<&Token> = tokens.iter().map(|(token, _)| token).collect();
    let mut ends = Vec::new();
    for at in operators(&kinds) {
        let left = match kinds.get(at.wrapping_sub(1)) {
            Some(Token::Ident("not")) => at.wrapping_sub(2),
            _ => at.wrapping_sub(1),
        };
        let Some(right) = operand_end(&kinds, at + 1) else { continue };
        if ends_operand(&kinds, left) && may_be_content(&kinds, at, left, right) {
            ends.extend([left, right].map(|index| tokens[index].1.end_offset as usize));
        }
    }
    ends.sort_unstable();
    let (mut out, mut from) = (String::with_capacity(source.len()), 0);
    for end in ends {
        let Some(part) = source.get(from..end) else { return source.to_owned() };
        out.push_str(part);
        out.push('|');
        out.push_str(FILTER);
        from = end;
    }
    out + source.get(from..).unwrap_or_default()
}

/// Returns the indices of the operators that compare texts.
fn operators(tokens: &[&Token]) -> Vec<usize> {
    let mut found = Vec::new();
    // The first `in` of a loop, outside of brackets, belongs to the loop.
    let (mut loop_head, mut depth) = (false, 0_usize);
    for (at, token) in tokens.iter().enumerate() {
        let before = at.checked_sub(1).and_then(|at| tokens.get(at));
        match token {
            Token::Ident("for") if matches!(before, Some(Token::BlockStart)) => loop_head = true,
            Token::BlockEnd => (loop_head, depth) = (false, 0),
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => depth += 1,
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                depth = depth.saturating_sub(1);
            }
            Token::Ident("in") if loop_head && depth == 0 => loop_head = false,
            Token::Ident("in") if matches!(before, Some(Token::Dot | Token::Pipe)) => {}
            Token::Eq | Token::Ne | Token::Ident("in") => found.push(at),
            _ => {}
        }
    }
    found
}

/// Returns true if the token is the last one of an operand.
fn ends_operand(tokens: &[&Token], at: usize) -> bool {
    const OPERATORS: [&str; 8] = ["and", "or", "not", "is", "in", "if", "else", "elif"];
    match tokens.get(at) {
        Some(Token::Ident(name)) => {
            let before = at.checked_sub(1).and_then(|at| tokens.get(at));
            // The name of a test is no operand.
            !OPERATORS.contains(name) && !matches!(before, Some(Token::Ident("is" | "not")))
        }
        Some(token) => {
            is_text(token)
                || matches!(token, Token::ParenClose | Token::BracketClose | Token::BraceClose)
        }
        None => false,
    }
}

/// Returns the index of the last token of the operand that begins at `at`, or `None` if it begins with an operator.
fn operand_end(tokens: &[&Token], at: usize) -> Option<usize> {
    let mut end = match tokens.get(at)? {
        Token::Ident("not") => return None,
        Token::Ident(_) => at,
        token if is_text(token) => at,
        _ => closing(tokens, at)?,
    };
    loop {
        let next = match tokens.get(end + 1) {
            Some(Token::Dot | Token::Pipe) => match tokens.get(end + 2) {
                Some(Token::Ident(_)) => Some(end + 2),
                _ => None,
            },
            Some(Token::BracketOpen | Token::ParenOpen) => closing(tokens, end + 1),
            _ => None,
        };
        match next {
            Some(next) => end = next,
            None => return Some(end),
        }
    }
}

/// Returns the index of the bracket that closes the one at `at`.
fn closing(tokens: &[&Token], at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(at) {
        match token {
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => depth += 1,
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                depth = depth.checked_sub(1)?;
            }
            Token::BlockEnd | Token::VariableEnd => return None,
            _ => {}
        }
        if depth == 0 {
            return (index > at).then_some(index);
        }
    }
    None
}

fn is_text(token: &Token) -> bool {
    matches!(token, Token::Str(_) | Token::String(_))
}

/// Returns true unless the operands are surely free of stand-ins, as in `role == 'user'`, or cannot be texts.
fn may_be_content(tokens: &[&Token], operator: usize, left: usize, right: usize) -> bool {
    let is_word = |text: &str| text.chars().all(|c| c.is_alphanumeric() || " _-".contains(c));
    let word = |token: &&Token| match token {
        Token::Str(text) => Some(is_word(text)),
        Token::String(text) => Some(is_word(text)),
        _ => None,
    };
    let left_word = tokens.get(left).and_then(word);
    // Texts in the subscripts of a variable are not its value.
    let is_variable = matches!(tokens.get(operator + 1), Some(Token::Ident(_)));
    let operand = if is_variable { None } else { tokens.get(operator + 1..=right) };
    let right_words: Vec<bool> = operand.unwrap_or_default().iter().filter_map(word).collect();
    match tokens.get(operator) {
        Some(Token::Ident(_)) => {
            left_word != Some(true) && (right_words.is_empty() || right_words.contains(&false))
        }
        _ => left_word == Some(false) || right_words.contains(&false),
    }
}

/// Adds the filter of operands, and the filters and tests that compare texts.
pub fn install(environment: &mut Environment<'static>) {
    environment.add_filter(FILTER, without_marks);
    environment.add_filter("replace", |state: &mut State, value: Value, args: Rest<Value>| {
        let texts = args.iter().enumerate().map(|(index, value)| match value.as_str() {
            None if index < 2 => Value::from(value.to_string()),
            _ => value.clone(),
        });
        by_method(state, &value, "replace", &texts.collect::<Vec<_>>())
    });
    environment.add_filter("trim", |state: &mut State, value: Value, args: Rest<Value>| {
        by_method(state, &value, "strip", &args)
    });
    environment.add_filter("split", |state: &mut State, value: Value, args: Rest<Value>| {
        by_method(state, &value, "split", &args)
    });
    for name in ["eq", "equalto", "=="] {
        environment.add_test(name, |a: Value, b: Value| without_marks(a) == without_marks(b));
    }
    for name in ["ne", "!="] {
        environment.add_test(name, |a: Value, b: Value| without_marks(a) != without_marks(b));
    }
    environment.add_test("in", |state: &State, value: Value, all: Value| {
        minijinja::tests::is_in(state, &without_marks(value), &without_marks(all))
    });
}

/// Calls a method of a text. Other values become texts first, as in Jinja's filters.
fn by_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match value.as_str() {
        Some(_) => super::methods::unknown_method(state, value, method, args),
        None => {
            let text = Value::from(value.to_string());
            super::methods::unknown_method(state, &text, method, args)
        }
    }
}

/// Returns a text, or a list of texts, without stand-ins. Other values stay what they are.
fn without_marks(value: Value) -> Value {
    if let Some(text) = value.as_str() {
        return if has_marks(text) { Value::from(unmarked_text(text)) } else { value };
    }
    if value.kind() != ValueKind::Seq {
        return value;
    }
    let marked = |item: &Value| item.as_str().is_some_and(has_marks);
    match value.try_iter() {
        Ok(items) => {
            let items: Vec<Value> = items.collect();
            match items.iter().any(marked) {
                true => items.into_iter().map(without_marks).collect(),
                false => value,
            }
        }
        Err(_) => value,
    }
}

/// Calls a method of a text if the text or an argument has stand-ins and the method compares them.
pub fn method(
    state: &mut State,
    text: &str,
    method: &str,
    args: &[Value],
) -> Option<Result<Value, Error>> {
    let marked = |value: &Value| match value.as_str() {
        Some(text) => has_marks(text),
        None => value.kind() == ValueKind::Seq,
    };
    if !has_marks(text) && !args.iter().any(marked) {
        return None;
    }
    let whole = || Value::from(unmarked_text(text));
    let plain_args = || args.iter().cloned().map(without_marks).collect::<Vec<_>>();
    match method {
        // These return no text, so that the marks do not matter.
        "startswith" | "endswith" | "find" | "rfind" | "index" | "rindex" | "count" | "isascii" => {
            Some(super::methods::unknown_method(state, &whole(), method, &plain_args()))
        }
        "replace" => Some(replace(text, args)),
        "split" | "rsplit" | "partition" | "rpartition" => parts(text, method, args).transpose(),
        "removeprefix" | "removesuffix" | "strip" | "lstrip" | "rstrip" => {
            cut(text, method, args).transpose()
        }
        _ => None,
    }
}

/// A text with and without stand-ins.
struct Both<'a> {
    text: &'a str,
    plain: String,
    /// For each character, where it begins in the plain text and in the text.
    places: Vec<(usize, usize)>,
}

impl<'a> Both<'a> {
    fn new(text: &'a str) -> Self {
        let (mut plain, mut places) = (String::with_capacity(text.len()), Vec::new());
        for (at, character) in text.char_indices() {
            places.push((plain.len(), at));
            plain.push(unmarked(character));
        }
        Self { text, plain, places }
    }

    /// Returns the part of the text that belongs to a part of the plain text.
    fn part(&self, range: Range<usize>) -> &'a str {
        let place = |byte: usize| {
            let index = self.places.partition_point(|(plain, _)| *plain < byte);
            self.places.get(index).map_or(self.text.len(), |(_, at)| *at)
        };
        &self.text[place(range.start)..place(range.end)]
    }

    /// Returns where `wanted`, which has no stand-ins, is found.
    fn found(&self, wanted: &str) -> Vec<Range<usize>> {
        self.plain.match_indices(wanted).map(|(at, found)| at..at + found.len()).collect()
    }

    /// Returns the parts between matches.
    fn between(&self, matches: &[Range<usize>]) -> Vec<&'a str> {
        let starts = std::iter::once(0).chain(matches.iter().map(|found| found.end));
        let ends = matches.iter().map(|found| found.start).chain([self.plain.len()]);
        starts.zip(ends).map(|(start, end)| self.part(start..end)).collect()
    }
}

/// Implements `replace(old, new, most)`. The new text keeps its stand-ins.
fn replace(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (old, new, most): (&str, &str, Option<i64>) = from_args(args)?;
    let both = Both::new(text);
    let mut matches = both.found(&unmarked_text(old));
    if let Some(most) = most.and_then(|most| usize::try_from(most).ok()) {
        matches.truncate(most);
    }
    Ok(Value::from(both.between(&matches).join(new)))
}

/// Implements the methods that return several parts. Returns `None` for white space as the separator.
fn parts(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
    let Some(separator) = separator.filter(|separator| !separator.is_empty()) else {
        return Ok(None);
    };
    let both = Both::new(text);
    let separator = unmarked_text(separator);
    let mut matches = match method.starts_with('r') {
        false => both.found(&separator),
        true => {
            let found = both.plain.rmatch_indices(&separator);
            found.map(|(at, found)| at..at + found.len()).collect()
        }
    };
    let is_partition = method.ends_with("partition");
    let most =
        if is_partition { Some(1) } else { most.and_then(|most| usize::try_from(most).ok()) };
    matches.truncate(most.unwrap_or(usize::MAX));
    matches.sort_unstable_by_key(|found| found.start);
    let mut all = both.between(&matches);
    if is_partition {
        match matches.first() {
            Some(found) => all.insert(1, both.part(found.clone())),
            None if method.starts_with('r') => all.splice(0..0, ["", ""]).for_each(drop),
            None => all.extend(["", ""]),
        }
    }
    Ok(Some(match <[&str; 3]>::try_from(all) {
        Ok(three) if is_partition => super::methods::tuple(three),
        Ok(three) => Value::from_iter(three),
        Err(all) => Value::from_iter(all),
    }))
}

/// Implements the methods that cut something off. Returns `None` if that is white space.
fn cut(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let (what,): (Option<&str>,) = from_args(args)?;
    let Some(what) = what else { return Ok(None) };
    let what = unmarked_text(what);
    let both = Both::new(text);
    let plain = both.plain.as_str();
    let among = |character: char| what.contains(character);
    let kept = match method {
        "removeprefix" => plain.strip_prefix(&*what).unwrap_or(plain),
        "removesuffix" => plain.strip_suffix(&*what).unwrap_or(plain),
        "lstrip" => plain.trim_start_matches(among),
        "rstrip" => plain.trim_end_matches(among),
        _ => plain.trim_matches(among),
    };
    // A text of which nothing is left has no place in the other one.
    let start = kept.as_ptr() as usize - plain.as_ptr() as usize;
    Ok(Some(Value::from(both.part(start..start + kept.len()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filtered(source: &str) -> String {
        with_filtered_operands(source, SyntaxConfig::default()).replace(FILTER, "F")
    }

    #[test]
    fn operands_of_comparisons_that_may_be_content() {
        for (source, expected) in [
            ("{% if '</x>' in a.b %}", "{% if '</x>'|F in a.b|F %}"),
            ("{% if '</x>' not in a['b'] | lower %}", "{% if '</x>'|F not in a['b'] | lower|F %}"),
            (
                "{% if mark in a.f('x', [1])[0] and b %}",
                "{% if mark|F in a.f('x', [1])[0]|F and b %}",
            ),
            (
                "{% if a == '<x>' or '<y>' != (b + c) %}",
                "{% if a|F == '<x>'|F or '<y>'|F != (b + c)|F %}",
            ),
            ("{% for x in y if x.z in ['<a>'] %}", "{% for x in y if x.z|F in ['<a>']|F %}"),
            ("{% for k, (a, b) in f(c in d) %}", "{% for k, (a, b) in f(c|F in d|F) %}"),
            ("{{ [x in y] }}", "{{ [x|F in y|F] }}"),
        ] {
            assert_eq!(filtered(source), expected);
        }
        for source in [
            "{% for x in messages %}",
            "{% if message.role == 'user' or 'tool_calls' in message %}",
            "{% if role in ['user', 'tool'] %}{{ a == b }}{{ x is in y }}{{ 1 == -1 }}",
            "{% raw %}{% if '<x>' in y %}{% endraw %}{# '<x>' in y #}'<x>' in y",
            "{{ a.in }}{{ '<x>' in not y }}{{ '<x>' in (y }}{{ 'x",
        ] {
            assert_eq!(filtered(source), source);
        }
    }
}
