//! SentencePiece BPE: merges by score, without splitting into words, with bytes for unknown
//! characters.
//!
//! The rule of Kudo and Richardson 2018 (SentencePiece, BPE mode): of all neighbours that form a
//! token, the pair with the highest score is joined first, then the leftmost.

use crate::TextError;
use crate::merge::Merger;
use crate::vocabulary::Vocabulary;

/// A SentencePiece model with scores.
pub struct SentencePiece {
    /// One key per token. A higher score has a lower key.
    keys: Vec<u32>,
    byte_tokens: [Option<u32>; 256],
    unknown: Option<u32>,
    /// True if a space goes before the text and before text that follows a special token.
    space_prefix: bool,
}

impl SentencePiece {
    /// Builds the encoder from one score per token.
    ///
    /// # Errors
    /// Returns an error if there are too few scores, or if one is not a number.
    pub fn new(
        vocabulary: &Vocabulary,
        scores: &[f32],
        unknown: Option<u32>,
        space_prefix: bool,
    ) -> Result<Self, TextError> {
        if scores.len() != vocabulary.len() {
            return Err(TextError::WrongLength {
                key: "tokenizer.ggml.scores",
                expected: vocabulary.len(),
                found: scores.len(),
            });
        }
        if let Some(id) = scores.iter().position(|score| score.is_nan()) {
            return Err(TextError::ScoreNotANumber { id });
        }
        let keys = scores.iter().map(|score| descending_key(*score)).collect();
        Ok(Self { keys, byte_tokens: vocabulary.byte_tokens(), unknown, space_prefix })
    }

    /// Appends the tokens of `text`, which must not contain special tokens. `follows_special` is
    /// true if this is the first text or a special token comes before it.
    ///
    /// # Errors
    /// Returns [`TextError::NoTokenForByte`] if a byte has no token.
    pub fn encode(
        &self,
        vocabulary: &Vocabulary,
        text: &str,
        follows_special: bool,
        merger: &mut Merger,
        out: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let mut spaced = String::with_capacity(text.len() + text.len() / 2 + 3);
        if self.space_prefix && follows_special {
            spaced.push('▁');
        }
        spaced.extend(text.chars().map(|character| if character == ' ' { '▁' } else { character }));
        let bytes = spaced.as_bytes();

        merger.clear();
        for character in spaced.chars() {
            let token = vocabulary.id(character.encode_utf8(&mut [0; 4]).as_bytes());
            merger.push(character.len_utf8() as u32, token);
        }
        merger.merge(|left, right| {
            let end = (right.start + right.bytes) as usize;
            let token = vocabulary.id(&bytes[left.start as usize..end])?;
            Some((self.keys[token as usize], token))
        });
        for piece in merger.finished() {
            if let Some(token) = piece.token {
                out.push(token);
                continue;
            }
            for byte in &bytes[piece.start as usize..][..piece.bytes as usize] {
                // Some vocabularies contain the bytes themselves instead of `<0xXX>`.
                let token = self.byte_tokens[*byte as usize]
                    .or_else(|| vocabulary.id(&[*byte]))
                    .or(self.unknown);
                out.push(token.ok_or(TextError::NoTokenForByte { byte: *byte })?);
            }
        }
        Ok(())
    }
}

/// Returns a number that falls as `score` (not NaN) rises.
fn descending_key(score: f32) -> u32 {
    // -0.0 equals 0.0, so it must get the same key.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    !ascending
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_fall_as_scores_rise() {
        let rising = [f32::NEG_INFINITY, -31740.0, -1.0, -1e-30, 0.0, 1e-30, 2.5, f32::INFINITY];
        for pair in rising.windows(2) {
            assert!(descending_key(pair[0]) > descending_key(pair[1]), "{pair:?}");
        }
        assert_eq!(descending_key(-0.0), descending_key(0.0));
    }
}
