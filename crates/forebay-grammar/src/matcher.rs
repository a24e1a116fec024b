//! An answer that follows a grammar, token by token.

use std::sync::Arc;

use forebay_text::Tokenizer;

use crate::GrammarError;

/// Text before the part of an answer that the grammar applies to, such as reasoning.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Preamble {
    /// Control or other token that begins it. Without that token, the answer has no preamble. `None` if the prompt has
    /// begun it.
    pub open: Option<String>,
    /// Texts that follow each other, with others between them. The preamble ends with the last one.
    pub close: Vec<String>,
}

/// The preamble as the matcher needs it.
#[derive(Debug, Clone, Default)]
pub struct Opening {
    /// Token that begins the preamble, if it has not begun.
    open: Option<u32>,
    close: Vec<Vec<u8>>,
    /// Tokens of line ends alone, which models write behind a preamble.
    line_ends: Arc<[u32]>,
}

/// Most tokens of line ends between a preamble and the rest.
const LINE_ENDS_MAX: usize = 2;

impl Opening {
    pub fn new(
        preamble: Option<&Preamble>,
        tokenizer: &Tokenizer,
        line_ends: &Arc<[u32]>,
    ) -> Opening {
        let Some(preamble) = preamble else { return Opening::default() };
        let open = preamble.open.as_ref().map(|text| tokenizer.token_id(text));
        match open {
            // A tokenizer without the token has no such preambles.
            Some(None) => Opening::default(),
            open => Opening {
                open: open.flatten(),
                line_ends: line_ends.clone(),
                close: preamble.close.iter().map(|text| text.clone().into_bytes()).collect(),
            },
        }
    }
}

#[derive(Debug, Clone)]
enum State {
    /// Nothing came yet, and the preamble may begin.
    Begins,
    /// In the preamble: the index of the text that is searched for, and the bytes that it may begin in.
    Preamble {
        next: usize,
        tail: Vec<u8>,
    },
    /// Behind the preamble: how many tokens of line ends may come before the rest.
    Between(usize),
    Ruled,
}

/// State of one answer.
pub struct Matcher {
    inner: llguidance::Matcher,
    state: State,
    opening: Opening,
    tokenizer: Arc<Tokenizer>,
    ends: Arc<[u32]>,
}

impl Matcher {
    pub(crate) fn new(
        inner: llguidance::Matcher,
        opening: Opening,
        tokenizer: Arc<Tokenizer>,
        ends: Arc<[u32]>,
    ) -> Matcher {
        let state = match (&opening.open, opening.close.is_empty()) {
            (_, true) => State::Ruled,
            (Some(_), false) => State::Begins,
            (None, false) => State::Preamble { next: 0, tail: Vec::new() },
        };
        Matcher { inner, state, opening, tokenizer, ends }
    }

    /// Returns true if the answer is complete, and nothing can follow.
    pub fn is_complete(&self) -> bool {
        matches!(self.state, State::Ruled | State::Between(_)) && self.inner.is_stopped()
    }

    /// Computes which tokens may come next: bit `id % 32` of word `id / 32` is set. Ids behind the last word may not.
    ///
    /// # Errors
    /// Returns an error if no token may, or if the parser needs more work than its limits allow.
    pub fn mask(&mut self, words: &mut Vec<u32>) -> Result<(), GrammarError> {
        words.clear();
        if matches!(self.state, State::Preamble { .. }) {
            // Everything may come but the answer's end.
            words.resize(self.tokenizer.vocab_size().div_ceil(32), u32::MAX);
            self.ends.iter().for_each(|&id| set(words, id, false));
            return Ok(());
        }
        let allowed = self.inner.compute_mask_or_eos();
        let allowed = allowed.map_err(|error| stuck(&error))?;
        words.extend_from_slice(allowed.as_slice());
        match (&self.state, self.opening.open) {
            (State::Begins, Some(open)) => set(words, open, true),
            (State::Between(1..), _) => {
                self.opening.line_ends.iter().for_each(|&id| set(words, id, true));
            }
            _ => {}
        }
        match words.iter().all(|word| *word == 0) {
            true => Err(GrammarError::Stuck("no token fits".into())),
            false => Ok(()),
        }
    }

    /// Takes the next token of the answer.
    ///
    /// # Errors
    /// Returns an error if the grammar does not allow the token.
    pub fn accept(&mut self, id: u32) -> Result<(), GrammarError> {
        match &mut self.state {
            State::Begins if Some(id) == self.opening.open => {
                self.state = State::Preamble { next: 0, tail: Vec::new() };
                return Ok(());
            }
            State::Begins => self.state = State::Ruled,
            State::Preamble { .. } => return self.accept_free(id),
            State::Between(left) => {
                if *left > 0 && self.opening.line_ends.contains(&id) {
                    *left -= 1;
                    return Ok(());
                }
                self.state = State::Ruled;
            }
            State::Ruled => {}
        }
        self.inner.consume_token(id).map_err(|error| stuck(&error))
    }

    /// Takes a token of the preamble.
    fn accept_free(&mut self, id: u32) -> Result<(), GrammarError> {
        let State::Preamble { next, tail } = &mut self.state else { return Ok(()) };
        tail.extend(self.tokenizer.token_bytes(id, true));
        while let Some(close) = self.opening.close.get(*next) {
            let Some(at) = find(tail, close) else {
                // Keep only what may be the beginning of the text.
                let kept = tail.len().saturating_sub(close.len().saturating_sub(1));
                tail.drain(..kept);
                return Ok(());
            };
            tail.drain(..at + close.len());
            *next += 1;
        }
        let rest = std::mem::take(tail);
        let rest = rest.trim_ascii_start();
        if rest.is_empty() {
            self.state = State::Between(LINE_ENDS_MAX);
            return Ok(());
        }
        self.state = State::Ruled;
        // The token that ended the preamble has the beginning of the rest, too.
        let Ok(environment) = self.inner.tok_env() else { return Ok(()) };
        let ids = environment.tokenize_bytes(rest);
        self.inner.consume_tokens(&ids).map_err(|error| stuck(&error))
    }

    /// Returns the tokens that must come next, because the grammar allows no other text. They are not taken yet.
    pub fn forced(&mut self) -> Vec<u32> {
        match self.state {
            State::Ruled if !self.inner.is_stopped() => self.inner.compute_ff_tokens(),
            _ => Vec::new(),
        }
    }
}

/// Returns the error of a parser that cannot go on. Its text ends with a remark on what it leaves out.
fn stuck(error: &impl ToString) -> GrammarError {
    let why = error.to_string();
    GrammarError::Stuck(why.trim_end().trim_end_matches("<non-verbose/>").trim_end().to_owned())
}

/// Returns where `text` begins in `bytes`.
fn find(bytes: &[u8], text: &[u8]) -> Option<usize> {
    bytes.windows(text.len()).position(|window| window == text)
}

fn set(words: &mut [u32], id: u32, value: bool) {
    if let Some(word) = words.get_mut(id as usize / 32) {
        *word = *word & !(1 << (id % 32)) | u32::from(value) << (id % 32);
    }
}
