//! A tokenizer in the form that the parser expects.

use std::sync::Arc;

use forebay_text::Tokenizer;
use llguidance::toktrie::{TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::GrammarError;

pub struct Environment {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
}

impl Environment {
    /// Builds the tree of all tokens that are text. Control tokens can only be named by a grammar.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Result<Environment, GrammarError> {
        let count = tokenizer.vocab_size();
        let ends: Vec<u32> =
            tokenizer.eog_ids().iter().copied().filter(|id| (*id as usize) < count).collect();
        let Some(&end) = ends.first() else {
            return Err(GrammarError::Tokenizer("no token ends an answer".into()));
        };
        let words: Vec<Vec<u8>> = (0..count as u32).map(|id| word(tokenizer, id)).collect();
        let trie = TokTrie::from(&TokRxInfo::new(count as u32, end), &words).with_eos_tokens(&ends);
        Ok(Environment { tokenizer: tokenizer.clone(), trie })
    }
}

/// Returns the bytes of a token. Those of a control token begin with the byte 0xFF, which text never has.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    const MARK: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
    match tokenizer.control_text(id) {
        Some(name) => [&[MARK], name.as_bytes()].concat(),
        None => match tokenizer.token_bytes(id, false) {
            bytes if bytes.first() == Some(&MARK) => Vec::new(),
            bytes => bytes,
        },
    }
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            // A text has no tokens only if it is too long or the vocabulary lacks bytes. The tree then finds tokens.
            let ids = self.tokenizer.encode(text, false, false);
            ids.unwrap_or_else(|_| self.trie.greedy_tokenize(text.as_bytes()))
        })
    }

    fn tokenize_is_canonical(&self) -> bool {
        !self.tokenizer.adds_first_space()
    }
}
