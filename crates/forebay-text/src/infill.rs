//! Tokens for filling in the middle: the model gets the texts before and behind a gap, and writes what is between them.
//!
//! GGUF names these tokens by keys. Everything else is recognised by the tokens' texts, as llama.cpp does. A file does not say
//! whether the model was trained with the tokens that its vocabulary has.

use crate::vocabulary::{TokenKind, Vocabulary};

/// Texts of the token before the first text, of the one before the second text, and of the one behind both, by family.
const FAMILIES: &[[&str; 3]] = &[
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    ["<PRE>", "<SUF>", "<MID>"],
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
    ["<|prefix|>", "<|suffix|>", "<|middle|>"],
];

/// Texts of Mistral's tokens. Its models get the second text first, and continue the first one without another token.
const MISTRAL: [&str; 2] = ["[PREFIX]", "[SUFFIX]"];

/// Texts of the token that begins a repository.
const REPOSITORY: &[&str] =
    &["<|fim_repo|>", "<|repo_name|>", "<repo_name>", "<fim-repo>", "<REPO>", "<reponame>"];

/// Texts of the token that begins a file of a repository.
const FILE: &[&str] = &["<|file_sep|>", "<file_sep>", "<|file_separator|>"];

/// Tokens with which a model fills the gap between two texts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InfillTokens {
    /// Token before the text that precedes the gap.
    pub prefix: u32,
    /// Token before the text that follows the gap.
    pub suffix: u32,
    /// Token behind both texts. `None` if the text behind the gap comes first and the answer continues the text before it.
    pub middle: Option<u32>,
    /// Token before the name of a repository.
    pub repository: Option<u32>,
    /// Token before the name of a file.
    pub file: Option<u32>,
}

/// Tokens that the keys of a GGUF name.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Named {
    pub prefix: Option<u32>,
    pub suffix: Option<u32>,
    pub middle: Option<u32>,
    pub repository: Option<u32>,
    pub file: Option<u32>,
}

/// Finds the tokens for filling in the middle, first those that are `named`, then by their texts. Texts of normal tokens are
/// just text. Returns `None` if the vocabulary lacks one that is needed.
pub(crate) fn find(vocabulary: &Vocabulary, named: Named) -> Option<InfillTokens> {
    let special = |text: &&str| {
        let id = vocabulary.id(text.as_bytes())?;
        (vocabulary.kind(id) != Some(TokenKind::Normal)).then_some(id)
    };
    let by_text = |texts: &[&str]| texts.iter().find_map(special);
    let repository = named.repository.or_else(|| by_text(REPOSITORY));
    let file = named.file.or_else(|| by_text(FILE));
    let tokens = |prefix, suffix, middle| InfillTokens { prefix, suffix, middle, repository, file };
    if let (Some(prefix), Some(suffix)) = (named.prefix, named.suffix) {
        // Files of Mistral's models may name a token for the middle, which these models do not use.
        if vocabulary.text(prefix) == Some(MISTRAL[0].as_bytes()) {
            return Some(tokens(prefix, suffix, None));
        }
        if let Some(middle) = named.middle {
            return Some(tokens(prefix, suffix, Some(middle)));
        }
    }
    let family = |[prefix, suffix, middle]: &[&str; 3]| {
        Some(tokens(special(prefix)?, special(suffix)?, Some(special(middle)?)))
    };
    let mistral = || Some(tokens(special(&MISTRAL[0])?, special(&MISTRAL[1])?, None));
    FAMILIES.iter().find_map(family).or_else(mistral)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary(texts: &[&str], kind: TokenKind) -> Vocabulary {
        let texts = texts.iter().map(|text| text.as_bytes());
        let kinds = vec![kind; texts.len()];
        Vocabulary::new(texts, kinds).unwrap()
    }

    fn of(texts: &[&str], named: Named) -> Option<InfillTokens> {
        find(&vocabulary(texts, TokenKind::Control), named)
    }

    #[test]
    fn families_are_recognised_by_their_texts() {
        for [prefix, suffix, middle] in FAMILIES {
            let found = of(&["a", middle, suffix, prefix], Named::default()).unwrap();
            assert_eq!((found.prefix, found.suffix, found.middle), (3, 2, Some(1)), "{prefix}");
            assert_eq!(of(&["a", suffix, prefix], Named::default()), None, "{prefix}");
        }
        let mistral = of(&["[SUFFIX]", "[PREFIX]", "[MIDDLE]"], Named::default()).unwrap();
        assert_eq!((mistral.prefix, mistral.suffix, mistral.middle), (1, 0, None));
        // Families do not mix, and text is no token.
        let mixed = ["<|fim_prefix|>", "<fim_suffix>", "<|fim_middle|>"];
        assert_eq!(of(&mixed, Named::default()), None);
        assert_eq!(find(&vocabulary(&FAMILIES[0], TokenKind::Normal), Named::default()), None);
    }

    #[test]
    fn names_in_the_file_come_first() {
        let texts =
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "p", "s", "m", "<|file_sep|>"];
        let named = Named { prefix: Some(3), suffix: Some(4), middle: Some(5), ..Named::default() };
        let found = of(&texts, named).unwrap();
        assert_eq!((found.prefix, found.suffix, found.middle), (3, 4, Some(5)));
        assert_eq!((found.repository, found.file), (None, Some(6)));
        // A file that names only a part of them is read by the texts.
        let found = of(&texts, Named { middle: None, ..named }).unwrap();
        assert_eq!((found.prefix, found.suffix, found.middle), (0, 1, Some(2)));
        let named = Named { prefix: Some(0), suffix: Some(1), middle: Some(2), ..named };
        assert_eq!(of(&["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], named).unwrap().middle, None);
    }
}
