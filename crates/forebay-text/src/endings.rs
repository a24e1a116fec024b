//! Tokens that end a generation.
//!
//! Files name one end token. Chat models end their turns with other tokens, which are recognised by
//! their texts.

use std::collections::BTreeSet;

use crate::vocabulary::{TokenKind, Vocabulary};

/// Texts that always end a turn or a text.
const ENDINGS: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<start_function_response>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "▁<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<eos>",
    "</s>",
    "<｜end▁of▁sentence｜>",
    // Fill-in-the-middle: another file follows these tokens, or nothing.
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "<|repo_name|>",
    "<repo_name>",
    "<|fim_repo|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
    "<file_sep>",
    "<|file_separator|>",
];

/// Trust in the kinds of tokens in a model's files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kinds {
    /// The kinds are right, as in `tokenizer.json`: a well-known text that is a normal token is
    /// just text.
    Reliable,
    /// The kinds may be wrong, as in GGUF: some files mark well-known end tokens as normal. Their
    /// kind is corrected.
    Doubtful,
}

/// Returns all tokens that end a generation, in ascending order. These are the `named` tokens of
/// the model's files and those recognised by their texts.
pub fn find(
    vocabulary: &mut Vocabulary,
    kinds: Kinds,
    named: impl IntoIterator<Item = u32>,
) -> Vec<u32> {
    let mut endings: BTreeSet<u32> = named.into_iter().collect();
    for text in ENDINGS {
        if let Some(id) = vocabulary.id(text.as_bytes())
            && (kinds == Kinds::Doubtful || vocabulary.kind(id) != Some(TokenKind::Normal))
        {
            vocabulary.set_kind(id, TokenKind::Control);
            endings.insert(id);
        }
    }
    let ends = |text: &str| vocabulary.id(text.as_bytes()).filter(|id| endings.contains(id));
    // In Harmony, `<|end|>` ends a message, and another message continues the same turn.
    let is_harmony = (ends("<|return|>").is_some() && ends("<|call|>").is_some())
        || (ends("<|flush|>").is_some()
            && (ends("<|call|>").is_some() || ends("<|calls|>").is_some()));
    let harmony_end = ends("<|end|>").filter(|_| is_harmony);
    // Gemma 4 has `</s>` as a word of HTML.
    let html_strike = ends("</s>").filter(|_| ends("<|tool_response>").is_some());
    if let Some(id) = harmony_end {
        endings.remove(&id);
    }
    if let Some(id) = html_strike {
        endings.remove(&id);
        vocabulary.set_kind(id, TokenKind::Normal);
    }
    endings.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endings(texts: &[&str]) -> Vec<u32> {
        let kinds = vec![TokenKind::Normal; texts.len()];
        let mut vocabulary =
            Vocabulary::new(texts.iter().map(|text| text.as_bytes()), kinds).unwrap();
        find(&mut vocabulary, Kinds::Doubtful, [0])
    }

    #[test]
    fn known_texts_end_except_inside_harmony_turns() {
        assert_eq!(endings(&["a", "<|end|>", "<|im_end|>", "b"]), [0, 1, 2]);
        assert_eq!(endings(&["a", "<|end|>", "<|return|>", "<|call|>"]), [0, 2, 3]);
        assert_eq!(endings(&["a", "</s>", "<|tool_response>"]), [0, 2]);
    }
}
