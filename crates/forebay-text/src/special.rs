//! Search for special tokens in text before it is split into words.

use std::collections::BTreeMap;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};

use crate::TextError;
use crate::content::Prompt;
use crate::vocabulary::{TokenKind, Vocabulary};

/// Most bytes of all special tokens. Vocabularies in which each token is special have 3 MB.
const BYTES_MAX: usize = 8 << 20;
/// Most bytes for which the automaton may have a table for each state.
const DENSE_BYTES_MAX: usize = 16 << 10;

/// A part of a text: plain text or a special token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fragment<'a> {
    Text(&'a str),
    Token(u32),
}

/// Whitespace that a special token swallows.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Strip {
    pub left: bool,
    pub right: bool,
}

struct Special {
    id: u32,
    bytes: usize,
    /// True if the token is also matched in text that is not parsed for special tokens.
    always: bool,
    /// True if the text of messages must not become this token.
    guarded: bool,
    strip: Strip,
}

/// All tokens that are matched as a whole. If matches overlap, the longer token wins. Among equally
/// long ones, the earlier in the text wins.
pub struct SpecialTokens {
    /// Tokens with the longest first, so that an index is a rank.
    specials: Vec<Special>,
    finder: Option<AhoCorasick>,
}

impl SpecialTokens {
    /// Collects every unknown, control and user-defined token of the vocabulary. `strip` returns
    /// the whitespace that a token swallows.
    ///
    /// # Errors
    /// Returns an error if the special tokens are too much text for the search automaton.
    pub fn new(vocabulary: &Vocabulary, strip: impl Fn(u32) -> Strip) -> Result<Self, TextError> {
        use TokenKind::{Control, Unknown, UserDefined};
        let mut specials: Vec<Special> = vocabulary
            .of_kind(|kind| matches!(kind, Control | Unknown | UserDefined))
            .map(|id| {
                let text = vocabulary.text(id).unwrap_or_default();
                let always = vocabulary.kind(id) == Some(UserDefined);
                let guarded = !always || is_marker(text);
                Special { id, bytes: text.len(), always, guarded, strip: strip(id) }
            })
            .filter(|special| special.bytes > 0)
            .collect();
        specials.sort_by_key(|special| std::cmp::Reverse(special.bytes));
        let texts = specials.iter().map(|special| vocabulary.text(special.id).unwrap_or_default());
        let bytes: usize = specials.iter().map(|special| special.bytes).sum();
        if bytes > BYTES_MAX {
            return Err(TextError::SpecialTokensTooLong { bytes, limit: BYTES_MAX });
        }
        let finder = if specials.is_empty() {
            None
        } else {
            let mut builder = AhoCorasick::builder();
            builder.match_kind(MatchKind::Standard);
            if bytes > DENSE_BYTES_MAX {
                // The faster automaton takes a kilobyte for each byte.
                builder.kind(Some(AhoCorasickKind::ContiguousNFA));
            }
            let built = builder.build(texts);
            Some(built.map_err(|error| TextError::Encode { reason: error.to_string() })?)
        };
        Ok(Self { specials, finder })
    }

    /// Returns true if a token swallows whitespace beside it.
    pub fn swallow(&self) -> bool {
        self.specials.iter().any(|special| special.strip.left || special.strip.right)
    }

    /// Cuts `text` at special tokens. Without `parse_special`, only user-defined tokens count,
    /// because they are text that happens to be one token.
    pub fn split<'a>(&self, text: &'a str, parse_special: bool) -> Vec<Fragment<'a>> {
        fragments(text, self.accepted(text, |special, _| parse_special || special.always))
    }

    /// Cuts a prompt at special tokens that messages did not write. `with_text` is true to cut at tokens that are text, too.
    pub fn split_prompt<'a>(&self, prompt: &'a Prompt, with_text: bool) -> Vec<Fragment<'a>> {
        let accepts = |special: &Special, start: usize| match special.guarded {
            true => prompt.is_free(start, start + special.bytes),
            false => with_text,
        };
        fragments(prompt.text(), self.accepted(prompt.text(), accepts))
    }

    /// Returns true if a message in the prompt has the text of a guarded token.
    pub fn are_in_messages(&self, prompt: &Prompt) -> bool {
        let Some(finder) = &self.finder else { return false };
        prompt.guards()
            && finder.find_overlapping_iter(prompt.text()).any(|found| {
                self.specials[found.pattern().as_usize()].guarded
                    && !prompt.is_free(found.start(), found.end())
            })
    }

    /// Returns the tokens that the text of messages must not become.
    pub fn guarded(&self) -> impl Iterator<Item = u32> {
        self.specials.iter().filter(|special| special.guarded).map(|special| special.id)
    }

    /// Returns the accepted matches, keyed by the byte at which each begins, including the
    /// whitespace that it swallows. `accepts` says whether a token may begin at a byte.
    fn accepted(
        &self,
        text: &str,
        accepts: impl Fn(&Special, usize) -> bool,
    ) -> BTreeMap<usize, Taken> {
        let Some(finder) = &self.finder else { return BTreeMap::new() };
        let mut matches: Vec<(usize, usize)> = finder
            .find_overlapping_iter(text)
            .map(|found| (found.pattern().as_usize(), found.start()))
            .filter(|(rank, start)| {
                let special = &self.specials[*rank];
                accepts(special, *start)
                    // A token can be a piece of a character. Such a token does not match inside
                    // whole characters.
                    && text.is_char_boundary(*start)
                    && text.is_char_boundary(start + special.bytes)
            })
            .collect();
        // Tokens of equal length follow the order of ids, because their ranks come from a stable
        // sort.
        matches.sort_unstable();
        let mut taken: BTreeMap<usize, Taken> = BTreeMap::new();
        for (rank, start) in matches {
            let special = &self.specials[rank];
            let end = start + special.bytes;
            let before = taken.range(..end).next_back().map_or(0, |(_, match_)| match_.end);
            if before > start {
                continue;
            }
            let after = taken.range(end..).next().map_or(text.len(), |(start, _)| *start);
            let swallowed_left = if special.strip.left { &text[before..start] } else { "" };
            let swallowed_right = if special.strip.right { &text[end..after] } else { "" };
            let from = start - trailing_whitespace_bytes(swallowed_left);
            let to = end + leading_whitespace_bytes(swallowed_right);
            taken.insert(from, Taken { end: to, id: special.id });
        }
        taken
    }
}

/// Cuts a text at the tokens that were taken from it.
fn fragments(text: &str, taken: BTreeMap<usize, Taken>) -> Vec<Fragment<'_>> {
    let mut fragments = Vec::with_capacity(2 * taken.len() + 1);
    let mut end = 0;
    for (start, match_) in taken {
        if start > end {
            fragments.push(Fragment::Text(&text[end..start]));
        }
        fragments.push(Fragment::Token(match_.id));
        end = match_.end;
    }
    if end < text.len() {
        fragments.push(Fragment::Text(&text[end..]));
    }
    fragments
}

struct Taken {
    end: usize,
    id: u32,
}

/// Names of HTML elements, which some vocabularies have as tokens of text.
const HTML: &[&str] = &[
    "a",
    "abbr",
    "article",
    "aside",
    "b",
    "blockquote",
    "body",
    "br",
    "button",
    "caption",
    "center",
    "cite",
    "code",
    "col",
    "dd",
    "del",
    "details",
    "div",
    "dl",
    "dt",
    "em",
    "figcaption",
    "figure",
    "footer",
    "form",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "head",
    "header",
    "hr",
    "html",
    "i",
    "img",
    "input",
    "ins",
    "kbd",
    "label",
    "li",
    "link",
    "main",
    "mark",
    "meta",
    "nav",
    "ol",
    "option",
    "p",
    "pre",
    "q",
    "samp",
    "script",
    "section",
    "select",
    "small",
    "span",
    "strike",
    "strong",
    "style",
    "sub",
    "summary",
    "sup",
    "svg",
    "table",
    "tbody",
    "td",
    "textarea",
    "tfoot",
    "th",
    "thead",
    "title",
    "tr",
    "tt",
    "u",
    "ul",
    "var",
    "video",
];

/// Returns true if a token of text has the form of a mark, such as `<think>` or `[TOOL_CALLS]`. Many vocabularies do not say
/// that such tokens are control tokens.
fn is_marker(token: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(token) else { return false };
    let between = |open: &str, close: &str| {
        text.strip_prefix(open).and_then(|rest| rest.strip_suffix(close)).filter(|name| {
            name.contains(char::is_alphabetic) && !name.contains(char::is_whitespace)
        })
    };
    if let Some(name) = between("<", ">") {
        let name = name.strip_prefix('/').unwrap_or(name);
        let name = name.strip_suffix('/').unwrap_or(name);
        return !HTML.contains(&name);
    }
    [("[", "]"), ("]", "["), ("]", "]"), ("[", "[")].iter().any(|(a, b)| between(a, b).is_some())
}

/// Returns true for the whitespace of C's `isspace`, which defines the special tokens' attributes.
fn is_space(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t'..=b'\r')
}

fn leading_whitespace_bytes(text: &str) -> usize {
    text.bytes().take_while(is_space).count()
}

fn trailing_whitespace_bytes(text: &str) -> usize {
    text.bytes().rev().take_while(is_space).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str, parse_special: bool, strip: Strip) -> Vec<Fragment<'_>> {
        let texts = ["a", "<s>", "<s><s>", "[x]", "<s>b"];
        let kinds = [
            TokenKind::Normal,
            TokenKind::Control,
            TokenKind::Control,
            TokenKind::UserDefined,
            TokenKind::Unknown,
        ];
        let vocabulary =
            Vocabulary::new(texts.iter().map(|text| text.as_bytes()), kinds.to_vec()).unwrap();
        let specials = SpecialTokens::new(&vocabulary, |_| strip).unwrap();
        let owned = specials.split(text, parse_special);
        owned.into_iter().collect()
    }

    #[test]
    fn longest_wins_wherever_it_is() {
        use Fragment::{Text, Token};
        let none = Strip::default();
        assert_eq!(split("a<s>é", true, none), [Text("a"), Token(1), Text("é")]);
        // "<s><s>" could match from the second "<s>" on. That is later than "<s>" but longer.
        assert_eq!(split("<s><s><s>", true, none), [Token(2), Token(1)]);
        assert_eq!(split("<s><s>b", true, none), [Token(2), Text("b")]);
        assert_eq!(split("<s>[x]", false, none), [Text("<s>"), Token(3)]);
        assert_eq!(split("", true, none), []);
    }

    #[test]
    fn whitespace_is_swallowed_as_far_as_the_neighbour() {
        use Fragment::{Text, Token};
        let both = Strip { left: true, right: true };
        assert_eq!(split("a \n<s>\t b", true, both), [Text("a"), Token(1), Text("b")]);
        assert_eq!(split(" [x]  <s> ", true, both), [Token(3), Token(1)]);
    }
}
