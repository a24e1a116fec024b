//! Grammars of llama.cpp (GBNF).
//!
//! Source: llama.cpp, "grammars/README.md". A grammar whose rules do not contain themselves becomes a regular expression. Any other
//! becomes a grammar in Lark's syntax in which every character is a terminal of its own, because GBNF knows no lexer: longer
//! terminals would be matched as far as possible, and then some texts of the grammar could not be written.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use crate::GrammarError;

/// Most parentheses within each other.
const DEPTH_MAX: usize = 200;
/// Longest regular expression. A grammar with a longer one becomes rules, which share what they have in common.
const EXPRESSION_BYTES_MAX: usize = 16 << 10;
/// Most repetitions, as in llama.cpp.
const REPEATS_MAX: usize = 2000;

/// A grammar in a form that the parser takes.
#[derive(Debug, PartialEq, Eq)]
pub enum Translated {
    Regex(String),
    Lark(String),
}

/// Translates a grammar.
///
/// # Errors
/// Returns an error with the number of the line that is wrong.
pub fn translate(text: &str) -> Result<Translated, GrammarError> {
    let rules = Parser { rest: text, text }.rules()?;
    let Some(root) = rules.get("root") else {
        return Err(GrammarError::Invalid("it has no rule `root`".into()));
    };
    for rule in rules.values() {
        check_references(rule, &rules)?;
    }
    let mut expression =
        Expression { rules: &rules, within: BTreeSet::from(["root"]), out: String::new() };
    if expression.write(root).is_some() {
        return Ok(Translated::Regex(expression.out));
    }
    let mut lark = "start: root_0\n".to_owned();
    let numbers: BTreeMap<&str, usize> = rules.keys().map(String::as_str).zip(1..).collect();
    let name = |of: &str| match of {
        "root" => "root_0".to_owned(),
        of => format!("rule_{}", numbers.get(of).copied().unwrap_or_default()),
    };
    for (of, rule) in &rules {
        let _ = write!(lark, "{}: ", name(of));
        write_rule(rule, &name, &mut lark);
        lark.push('\n');
    }
    Ok(Translated::Lark(lark))
}

/// A part of a rule.
#[derive(Debug)]
enum Part {
    /// One character of these ranges, or one of no range.
    Character {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    Sequence(Vec<Part>),
    Choice(Vec<Part>),
    /// Repetitions: the least, and the most if there is one.
    Repeated(Box<Part>, usize, Option<usize>),
    Rule(String),
    /// A special token, as in `<|end|>` or `<[7]>`.
    Token(String),
}

type Rules = BTreeMap<String, Part>;

fn check_references(part: &Part, rules: &Rules) -> Result<(), GrammarError> {
    match part {
        Part::Character { .. } | Part::Token(_) => Ok(()),
        Part::Sequence(parts) | Part::Choice(parts) => {
            parts.iter().try_for_each(|part| check_references(part, rules))
        }
        Part::Repeated(part, ..) => check_references(part, rules),
        Part::Rule(name) if rules.contains_key(name) => Ok(()),
        Part::Rule(name) => {
            Err(GrammarError::Invalid(format!("it has no rule `{name}`, which another one names")))
        }
    }
}

struct Parser<'a> {
    rest: &'a str,
    text: &'a str,
}

impl<'a> Parser<'a> {
    fn rules(mut self) -> Result<Rules, GrammarError> {
        let mut rules = Rules::new();
        loop {
            self.skip(true);
            if self.rest.is_empty() {
                return Ok(rules);
            }
            let name = self.name().ok_or_else(|| self.wrong("a rule needs a name"))?.to_owned();
            self.skip(false);
            if !self.take("::=") {
                return Err(self.wrong("`::=` is missing"));
            }
            self.skip(true);
            let rule = self.choice(0)?;
            self.skip(false);
            if !self.rest.is_empty() && !self.rest.starts_with(['\n', '\r']) {
                return Err(self.wrong("the line should end here"));
            }
            rules.insert(name, rule);
        }
    }

    fn wrong(&self, why: &str) -> GrammarError {
        let before = &self.text[..self.text.len() - self.rest.len()];
        let line = 1 + before.matches('\n').count();
        let shown: String = self.rest.chars().take(20).collect();
        GrammarError::Invalid(format!("line {line}: {why}, before {shown:?}"))
    }

    fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Skips white space and comments.
    fn skip(&mut self, lines: bool) {
        loop {
            let is_space = |c: char| c == ' ' || c == '\t' || lines && (c == '\n' || c == '\r');
            self.rest = self.rest.trim_start_matches(is_space);
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = &self.rest[self.rest.find(['\n', '\r']).unwrap_or(self.rest.len())..];
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    fn choice(&mut self, depth: usize) -> Result<Part, GrammarError> {
        let mut parts = vec![self.sequence(depth)?];
        loop {
            // A rule goes on if the next line begins with another choice.
            let before = self.rest;
            self.skip(true);
            if !self.take("|") {
                self.rest = if depth > 0 { self.rest } else { before };
                break;
            }
            self.skip(true);
            parts.push(self.sequence(depth)?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Part::Choice(parts) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Part, GrammarError> {
        let mut parts = Vec::new();
        while let Some(part) = self.part(depth)? {
            self.skip(depth > 0);
            let part = self.repeated(part)?;
            self.skip(depth > 0);
            parts.push(part);
        }
        Ok(Part::Sequence(parts))
    }

    /// Reads a part without its repetitions. Returns `None` if there is none.
    fn part(&mut self, depth: usize) -> Result<Option<Part>, GrammarError> {
        let Some(first) = self.rest.chars().next() else { return Ok(None) };
        Ok(Some(match first {
            '"' => {
                self.take("\"");
                let mut parts = Vec::new();
                while !self.take("\"") {
                    let character = self.character("a text has no end")?;
                    parts.push(Part::Character {
                        negated: false,
                        ranges: vec![(character, character)],
                    });
                }
                Part::Sequence(parts)
            }
            '[' => {
                self.take("[");
                let negated = self.take("^");
                let mut ranges = Vec::new();
                while !self.take("]") {
                    let from = self.character("a set of characters has no end")?;
                    let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
                    let to = match is_range && self.take("-") {
                        true => self.character("a set of characters has no end")?,
                        false => from,
                    };
                    if to < from {
                        return Err(self.wrong("a range of characters is empty"));
                    }
                    ranges.push((from, to));
                }
                Part::Character { negated, ranges }
            }
            '.' => {
                self.take(".");
                Part::Character { negated: true, ranges: Vec::new() }
            }
            '(' if depth < DEPTH_MAX => {
                self.take("(");
                self.skip(true);
                let choice = self.choice(depth + 1)?;
                self.skip(true);
                if !self.take(")") {
                    return Err(self.wrong("`)` is missing"));
                }
                choice
            }
            '(' => return Err(self.wrong("parentheses are nested too deep")),
            '<' => {
                let end = self.rest.find('>').ok_or_else(|| self.wrong("`>` is missing"))?;
                let (token, rest) = self.rest.split_at(end + 1);
                self.rest = rest;
                Part::Token(token.to_owned())
            }
            '!' => return Err(self.wrong("`!` before a token is not supported")),
            _ => match self.name() {
                Some(name) => Part::Rule(name.to_owned()),
                None => return Ok(None),
            },
        }))
    }

    /// Reads the repetitions of a part.
    fn repeated(&mut self, part: Part) -> Result<Part, GrammarError> {
        let (least, most) = if self.take("*") {
            (0, None)
        } else if self.take("+") {
            (1, None)
        } else if self.take("?") {
            (0, Some(1))
        } else if self.take("{") {
            self.skip(false);
            let least = self.number()?;
            self.skip(false);
            let most = match self.take(",") {
                false => Some(least),
                true => {
                    self.skip(false);
                    if self.rest.starts_with('}') { None } else { Some(self.number()?) }
                }
            };
            self.skip(false);
            if !self.take("}") {
                return Err(self.wrong("`}` is missing"));
            }
            (least, most)
        } else {
            return Ok(part);
        };
        if least.max(most.unwrap_or(0)) > REPEATS_MAX || most.is_some_and(|most| most < least) {
            return Err(self.wrong("a number of repetitions is wrong"));
        }
        Ok(Part::Repeated(Box::new(part), least, most))
    }

    fn number(&mut self) -> Result<usize, GrammarError> {
        let end = self.rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.rest.len());
        let number = self.rest[..end].parse().map_err(|_| self.wrong("a number is missing"))?;
        self.rest = &self.rest[end..];
        Ok(number)
    }

    /// Reads a character of a text or a set.
    fn character(&mut self, missing: &str) -> Result<char, GrammarError> {
        let mut characters = self.rest.chars();
        let first = characters.next().ok_or_else(|| self.wrong(missing))?;
        if first != '\\' {
            self.rest = characters.as_str();
            return Ok(first);
        }
        let kind = characters.next().ok_or_else(|| self.wrong(missing))?;
        let digits = match kind {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        if digits == 0 {
            let character = match kind {
                't' => '\t',
                'r' => '\r',
                'n' => '\n',
                '\\' | '"' | '[' | ']' | '-' | '^' => kind,
                _ => return Err(self.wrong("this escape is not known")),
            };
            self.rest = characters.as_str();
            return Ok(character);
        }
        let code = characters.as_str().get(..digits);
        let code = code.and_then(|code| u32::from_str_radix(code, 16).ok());
        let character = code.and_then(char::from_u32);
        let character = character.ok_or_else(|| self.wrong("a number of a character is wrong"))?;
        self.rest = &characters.as_str()[digits..];
        Ok(character)
    }
}

/// Writes a set of characters in the syntax of regular expressions.
fn write_characters(negated: bool, ranges: &[(char, char)], out: &mut String) {
    let all = [('\0', char::MAX)];
    let (negated, ranges) = match (negated, ranges) {
        (true, []) => (false, &all[..]),
        other => other,
    };
    out.push_str(if negated { "[^" } else { "[" });
    for (from, to) in ranges {
        let _ = write!(out, "\\x{{{:X}}}", *from as u32);
        if to != from {
            let _ = write!(out, "-\\x{{{:X}}}", *to as u32);
        }
    }
    out.push(']');
}

fn write_repetitions(least: usize, most: Option<usize>, out: &mut String) {
    let _ = match (least, most) {
        (0, None) => write!(out, "*"),
        (1, None) => write!(out, "+"),
        (0, Some(1)) => write!(out, "?"),
        (least, None) => write!(out, "{{{least},}}"),
        (least, Some(most)) => write!(out, "{{{least},{most}}}"),
    };
}

/// Writes a grammar as one regular expression.
struct Expression<'a> {
    rules: &'a Rules,
    /// The rules that are being written.
    within: BTreeSet<&'a str>,
    out: String,
}

impl<'a> Expression<'a> {
    /// Writes a part. Returns `None` if a rule contains itself, if there is a token, or if it becomes too long.
    fn write(&mut self, part: &'a Part) -> Option<()> {
        if self.out.len() > EXPRESSION_BYTES_MAX {
            return None;
        }
        match part {
            // No regular expression has a set without characters.
            Part::Character { negated: false, ranges } if ranges.is_empty() => return None,
            Part::Character { negated, ranges } => {
                write_characters(*negated, ranges, &mut self.out);
            }
            Part::Sequence(parts) => parts.iter().try_for_each(|part| self.write(part))?,
            Part::Choice(parts) => {
                self.out.push_str("(?:");
                for (index, part) in parts.iter().enumerate() {
                    self.out.push_str(if index > 0 { "|" } else { "" });
                    self.write(part)?;
                }
                self.out.push(')');
            }
            Part::Repeated(part, least, most) => {
                self.out.push_str("(?:");
                self.write(part)?;
                self.out.push(')');
                write_repetitions(*least, *most, &mut self.out);
            }
            Part::Rule(name) => {
                if !self.within.insert(name) {
                    return None;
                }
                self.write(self.rules.get(name)?)?;
                self.within.remove(name.as_str());
            }
            Part::Token(_) => return None,
        }
        Some(())
    }
}

/// Writes a part of a rule in Lark's syntax.
fn write_rule(part: &Part, name: &impl Fn(&str) -> String, out: &mut String) {
    match part {
        Part::Character { negated, ranges } => {
            out.push('/');
            write_characters(*negated, ranges, out);
            out.push('/');
        }
        Part::Sequence(parts) if parts.is_empty() => out.push_str("\"\""),
        Part::Sequence(parts) => {
            out.push('(');
            for part in parts {
                write_rule(part, name, out);
                out.push(' ');
            }
            out.push(')');
        }
        Part::Choice(parts) => {
            out.push('(');
            for (index, part) in parts.iter().enumerate() {
                out.push_str(if index > 0 { " | " } else { "" });
                write_rule(part, name, out);
            }
            out.push(')');
        }
        Part::Repeated(part, least, most) => {
            out.push('(');
            write_rule(part, name, out);
            out.push(')');
            write_repetitions(*least, *most, out);
        }
        Part::Rule(of) => out.push_str(&name(of)),
        Part::Token(token) => out.push_str(token),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn regex(text: &str) -> String {
        match translate(text).unwrap() {
            Translated::Regex(regex) => regex,
            Translated::Lark(lark) => panic!("{lark}"),
        }
    }

    #[test]
    fn rules_that_do_not_contain_themselves_are_an_expression() {
        assert_eq!(regex("root ::= \"a\"{5,5}"), r"(?:[\x{61}]){5,5}");
        assert_eq!(
            regex(
                "# a comment\nroot ::= a-b\n  | [^x-z\\n]+ # more\na-b ::=\n  \"\\x41\" (\n \"é\" |\n . )?\n"
            ),
            r"(?:[\x{41}](?:(?:[\x{E9}]|[\x{0}-\x{10FFFF}]))?|(?:[^\x{78}-\x{7A}\x{A}])+)"
        );
        assert!(matches!(translate("root ::= \"(\" root? \")\"").unwrap(), Translated::Lark(_)));
        assert!(matches!(translate("root ::= <|end|>").unwrap(), Translated::Lark(_)));
    }

    #[test]
    fn errors_name_the_line() {
        for (text, part) in [
            ("", "no rule `root`"),
            ("root ::= a", "no rule `a`"),
            ("root ::= \"a\"\nb = \"c\"", "line 2"),
            ("root ::= \"a", "line 1"),
            ("root ::= [a", "line 1"),
            ("root ::= (\"a\"", "`)`"),
            ("root ::= \"\\q\"", "escape"),
            ("root ::= \"a\"{3,2}", "repetitions"),
            ("root ::= \"a\"{9999}", "repetitions"),
            ("root ::= [z-a]", "range"),
            ("root ::= \"a\" $", "should end"),
            ("root ::= \"\\uD800\"", "character"),
        ] {
            let error = translate(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let deep = format!("root ::= {}\"a\"{}", "(".repeat(1000), ")".repeat(1000));
        assert!(translate(&deep).unwrap_err().to_string().contains("deep"));
    }
}
