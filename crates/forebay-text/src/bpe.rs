//! Byte pair encoding from a list of merges.

use ahash::AHashMap;

use crate::merge::Merger;
use crate::pretokenize::Splitter;
use crate::vocabulary::Vocabulary;
use crate::{TextError, byte_level};

/// Alphabet in which the vocabulary is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Alphabet {
    /// Every byte is one character of the byte-level alphabet.
    ByteLevel,
    /// Plain characters with `▁` for the space. Bytes of unknown characters are `<0xXX>`.
    Characters,
}

/// Which neighbours are joined.
enum Merges {
    /// Maps (left token, right token) to (rank, joined token). The lowest rank is merged first.
    Pairs(AHashMap<(u32, u32), (u32, u32)>),
    /// Maps bytes to tokens. All neighbours that form a token are joined, the lowest token first.
    Ranks(AHashMap<Box<[u8]>, u32>),
}

/// Byte pair encoding. A [`Splitter`] makes words, and merges apply by rank.
pub struct Bpe {
    splitter: Splitter,
    alphabet: Alphabet,
    merges: Merges,
    /// Smallest piece of each byte: one byte-level character, or `<0xXX>`.
    byte_tokens: [Option<u32>; 256],
    /// True if a word that is a token becomes that token, whatever the merges say.
    whole_words: bool,
    unknown: Option<u32>,
}

impl Bpe {
    /// Builds the encoder. `merges` are texts of the form `left right`, the best first. `unknown`
    /// is the token for bytes without one of their own.
    ///
    /// # Errors
    /// Returns an error if a merge has a part or a result that is not a token.
    pub fn new<'a>(
        vocabulary: &Vocabulary,
        merges: impl ExactSizeIterator<Item = &'a [u8]>,
        splitter: Splitter,
        alphabet: Alphabet,
        unknown: Option<u32>,
    ) -> Result<Self, TextError> {
        let mut table = AHashMap::with_capacity(merges.len());
        let mut joined = Vec::new();
        for (index, merge) in merges.enumerate() {
            let parsed = parse_merge(vocabulary, merge, &mut joined);
            let Some((left, right, token)) = parsed else {
                let merge = String::from_utf8_lossy(merge).into_owned();
                return Err(TextError::MergeOfUnknownToken { index, merge });
            };
            table.entry((left, right)).or_insert((index as u32, token));
        }
        let byte_tokens = match alphabet {
            Alphabet::Characters => vocabulary.byte_tokens(),
            Alphabet::ByteLevel => byte_level_tokens(vocabulary),
        };
        let whole_words = splitter.whole_words();
        let merges = Merges::Pairs(table);
        Ok(Self { splitter, alphabet, merges, byte_tokens, whole_words, unknown })
    }

    /// Builds the encoder of a byte-level vocabulary that begins with `tokens`, the best first.
    pub fn of_ranks(vocabulary: &Vocabulary, splitter: Splitter, tokens: &[Vec<u8>]) -> Self {
        let ranks = tokens.iter().zip(0..).map(|(token, rank)| (token.as_slice().into(), rank));
        Self {
            splitter,
            alphabet: Alphabet::ByteLevel,
            merges: Merges::Ranks(ranks.collect()),
            byte_tokens: byte_level_tokens(vocabulary),
            whole_words: true,
            unknown: None,
        }
    }

    /// Appends the tokens of `text`, which must not contain special tokens.
    ///
    /// # Errors
    /// Returns [`TextError::NoTokenForByte`] if a byte has no token.
    pub fn encode(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        merger: &mut Merger,
        out: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let spaced;
        let text = match self.alphabet {
            Alphabet::ByteLevel => text,
            Alphabet::Characters => {
                spaced = text.replace(' ', "▁");
                &spaced
            }
        };
        for word in self.splitter.split(text) {
            match self.whole_word(vocabulary, word) {
                Some(token) => out.push(token),
                None => self.encode_word(vocabulary, word, merger, out)?,
            }
        }
        Ok(())
    }

    fn whole_word(&self, vocabulary: &Vocabulary, word: &str) -> Option<u32> {
        match self.alphabet {
            _ if !self.whole_words => None,
            Alphabet::Characters => vocabulary.id(word.as_bytes()),
            Alphabet::ByteLevel => {
                let written: String = word.bytes().map(byte_level::char_of_byte).collect();
                vocabulary.id(written.as_bytes())
            }
        }
    }

    fn encode_word(
        &self,
        vocabulary: &Vocabulary,
        word: &str,
        merger: &mut Merger,
        out: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        merger.clear();
        match self.alphabet {
            Alphabet::ByteLevel => {
                word.bytes().for_each(|byte| merger.push(1, self.byte_tokens[byte as usize]));
            }
            Alphabet::Characters => word.chars().for_each(|character| {
                let token = vocabulary.id(character.encode_utf8(&mut [0; 4]).as_bytes());
                merger.push(character.len_utf8() as u32, token);
            }),
        }
        match &self.merges {
            Merges::Pairs(pairs) => {
                merger.merge(|left, right| pairs.get(&(left.token?, right.token?)).copied());
            }
            Merges::Ranks(ranks) => merger.merge(|left, right| {
                let end = (right.start + right.bytes) as usize;
                let token = *ranks.get(&word.as_bytes()[left.start as usize..end])?;
                Some((token, token))
            }),
        }
        for piece in merger.finished() {
            if let Some(token) = piece.token {
                out.push(token);
                continue;
            }
            for byte in &word.as_bytes()[piece.start as usize..][..piece.bytes as usize] {
                let token = self.byte_tokens[*byte as usize].or(self.unknown);
                out.push(token.ok_or(TextError::NoTokenForByte { byte: *byte })?);
            }
        }
        Ok(())
    }
}

fn byte_level_tokens(vocabulary: &Vocabulary) -> [Option<u32>; 256] {
    std::array::from_fn(|byte| {
        let character = byte_level::char_of_byte(byte as u8);
        vocabulary.id(character.encode_utf8(&mut [0; 4]).as_bytes())
    })
}

/// Returns the tokens of `left right` and of `leftright`. A text may itself begin with a space, so
/// the separator is the first space after the first byte.
fn parse_merge(
    vocabulary: &Vocabulary,
    merge: &[u8],
    joined: &mut Vec<u8>,
) -> Option<(u32, u32, u32)> {
    let separator = 1 + merge.get(1..)?.iter().position(|byte| *byte == b' ')?;
    let (left, right) = (&merge[..separator], &merge[separator + 1..]);
    joined.clear();
    joined.extend_from_slice(left);
    joined.extend_from_slice(right);
    Some((vocabulary.id(left)?, vocabulary.id(right)?, vocabulary.id(joined)?))
}
