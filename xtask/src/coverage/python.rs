//! Tables in the sources of other programs: dictionaries of Python and maps of C++, as far as those programs write them.

use std::collections::BTreeMap;

/// A piece of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Token {
    /// A bracket that opens.
    Open(char),
    /// A bracket that closes.
    Close(char),
    /// A literal of text, without its quotes.
    Text(String),
    /// A name, with the dots inside it, or a number.
    Word(String),
    /// Another character.
    Sign(char),
}

/// Splits Python, or C++ without comments, into tokens. Comments of Python are left out.
pub fn tokens(source: &str) -> Vec<Token> {
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
        let length = match first {
            '#' => rest.find('\n').unwrap_or(rest.len()),
            '"' | '\'' => {
                let inner = &rest[1..];
                let end = inner.find(first).unwrap_or(inner.len());
                found.push(Token::Text(inner[..end].to_owned()));
                (end + 2).min(rest.len())
            }
            '(' | '[' | '{' => {
                found.push(Token::Open(first));
                1
            }
            ')' | ']' | '}' => {
                found.push(Token::Close(first));
                1
            }
            c if is_word(c) => {
                let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                found.push(Token::Word(rest[..end].to_owned()));
                end
            }
            c => {
                if !c.is_whitespace() {
                    found.push(Token::Sign(c));
                }
                c.len_utf8()
            }
        };
        rest = &rest[length..];
    }
    found
}

/// Returns the value of a variable that a line without indentation sets: the tokens inside its outer brackets. Returns `None`
/// if no line sets it, or if the value has no brackets.
pub fn value_of(source: &str, variable: &str) -> Option<Vec<Token>> {
    let mut at = 0;
    for line in source.split_inclusive('\n') {
        let rest = line.strip_prefix(variable);
        if rest.is_some_and(|rest| rest.starts_with([' ', ':', '='])) && line.contains('=') {
            let equals = source[at..].find('=')?;
            return inside(&tokens(&source[at + equals..]));
        }
        at += line.len();
    }
    None
}

/// Returns the tokens between the first bracket that opens and the one that closes it.
pub fn inside(tokens: &[Token]) -> Option<Vec<Token>> {
    let start = tokens.iter().position(|token| matches!(token, Token::Open(_)))?;
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate().skip(start) {
        match token {
            Token::Open(_) => depth += 1,
            Token::Close(_) => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(tokens[start + 1..index].to_vec());
        }
    }
    None
}

/// Splits tokens at the commas outside of brackets.
pub fn items(tokens: &[Token]) -> Vec<&[Token]> {
    let mut depth = 0;
    let separates = |token: &Token| {
        match token {
            Token::Open(_) => depth += 1,
            Token::Close(_) => depth -= 1,
            _ => {}
        }
        depth == 0 && *token == Token::Sign(',')
    };
    tokens.split(separates).filter(|item| !item.is_empty()).collect()
}

/// Returns the pairs of an `OrderedDict([("key", "value"), ...])`. The first text of a value that is a tuple counts.
pub fn ordered_pairs(source: &str, variable: &str) -> Option<BTreeMap<String, String>> {
    let list = inside(&value_of(source, variable)?)?;
    let pair = |item: &[Token]| {
        let mut texts = item.iter().filter_map(|token| match token {
            Token::Text(text) => Some(text.clone()),
            _ => None,
        });
        Some((texts.next()?, texts.next()?))
    };
    Some(items(&list).into_iter().filter_map(pair).collect())
}

/// Returns keys and values of a `{KEY: value, ...}` whose keys are names.
pub fn dictionary(source: &str, variable: &str) -> Option<BTreeMap<String, Vec<Token>>> {
    let tokens = value_of(source, variable)?;
    let entry = |item: &[Token]| match item {
        [Token::Word(key), Token::Sign(':'), value @ ..] => Some((key.clone(), value.to_vec())),
        _ => None,
    };
    Some(items(&tokens).into_iter().filter_map(entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_an_ordered_dictionary_are_found() {
        let source = "A = 1\nNAMES_OF = OrderedDict([(\"no\", \"No\")])\nNAMES = OrderedDict(\n    [\n        # (\"old\", \"Old\"),\n        \
                      (\"a\", \"A\"),  # (not one)\n        (\n            \"b-1\",\n            (\"B\", \"C\"),\n        ),\n    ]\n)\nUSE(NAMES)\n";
        let pairs = ordered_pairs(source, "NAMES").unwrap();
        let expected = [("a", "A"), ("b-1", "B")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(pairs, BTreeMap::from(expected));
        assert_eq!(ordered_pairs(source, "OTHER"), None);
        assert_eq!(ordered_pairs("NAMES = other\n", "NAMES"), None);
    }

    #[test]
    fn brackets_in_comments_and_literals_do_not_count() {
        let source = "T: dict[A, list[B]] = {\n    A.X: [\n        B.ONE,\n        # holds [q|gate] and }\n        B.TWO,\n    ],\n    \
                      A.Y:    \"}\",\n}\nOTHER = {}\n";
        let found = dictionary(source, "T").unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["A.X", "A.Y"]);
        let words: Vec<&Token> =
            found["A.X"].iter().filter(|token| matches!(token, Token::Word(_))).collect();
        assert_eq!(words.len(), 2);
        assert_eq!(found["A.Y"], [Token::Text("}".to_owned())]);
    }
}
