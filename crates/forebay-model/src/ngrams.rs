//! The rows of a table that the n-grams of a token choose, and their reads.

use std::ops::Range;

use forebay_store::{FileSet, StoreError};

use crate::arch::NGrams;
use crate::rows::{RowReader, RowTable};

/// Hashes of one layer's n-grams. A hash of an n-gram is the exclusive or of its tokens, each times the multiplier of its distance
/// from the last one. Its remainder by the number of rows of the hash is a row behind the hash's first one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NGramHashes {
    /// Multipliers of the last token, the one before it, and so on.
    pub multipliers: Vec<i64>,
    /// The rows of each hash, for n-grams of two tokens, then of three, and so on.
    pub rows: Vec<Range<u32>>,
}

impl NGramHashes {
    /// Appends the rows of the n-grams that end with each token of runs of so many tokens, `[tokens, rows_per_token]`. `before` has
    /// [`NGrams::before`] tokens for each run.
    fn append_rows(
        &self,
        of: &NGrams,
        runs: impl Iterator<Item = usize>,
        tokens: &[u32],
        before: &[u32],
        rows: &mut Vec<u32>,
    ) {
        let (mut tokens, kept) = (tokens, of.before());
        for (count, before) in runs.zip(before.chunks_exact(kept)) {
            let (own, rest) = tokens.split_at(count);
            tokens = rest;
            for last in 0..own.len() {
                let token = |back: usize| match last.checked_sub(back) {
                    Some(index) => own[index],
                    None => before[kept + last - back],
                };
                self.append_rows_of(of, token, rows);
            }
        }
    }

    /// Appends the rows of the n-grams that end with token 0, which has `token(n)` n tokens before it.
    fn append_rows_of(&self, of: &NGrams, token: impl Fn(usize) -> u32, rows: &mut Vec<u32>) {
        let mixed = |back: usize, token: u32| i64::from(token).wrapping_mul(self.multipliers[back]);
        let mut hash = mixed(0, token(0));
        // A separator ends all n-grams: what is before it counts as a separator, too.
        let mut is_cut = false;
        for (back, hashes) in (1..of.size).zip(self.rows.chunks_exact(of.hashes)) {
            let found = token(back);
            is_cut |= found == of.separator;
            hash ^= mixed(back, if is_cut { of.separator } else { found });
            rows.extend(hashes.iter().map(|of_hash| {
                let count = i64::from(of_hash.end - of_hash.start);
                of_hash.start + hash.rem_euclid(count) as u32
            }));
        }
    }
}

/// Reads the rows of one layer's table that the n-grams of a pass choose.
#[derive(Debug)]
pub struct NGramReader {
    reader: RowReader,
    /// Numbers of the rows `[tokens, rows_per_token]`.
    rows: Vec<u32>,
}

impl NGramReader {
    /// Creates a reader for passes of at most `batch` tokens.
    pub fn new(of: &NGrams, table: &RowTable, files: &FileSet, batch: usize) -> NGramReader {
        let rows = Vec::with_capacity(batch * of.rows_per_token());
        NGramReader { reader: RowReader::new(table, files), rows }
    }

    /// Finds the rows of a pass, given the tokens of its runs and those before each run ([`NGrams::before`]). Asks for them, and
    /// does not wait.
    pub fn ask(
        &mut self,
        of: &NGrams,
        hashes: &NGramHashes,
        runs: impl Iterator<Item = usize>,
        tokens: &[u32],
        before: &[u32],
    ) {
        self.rows.clear();
        hashes.append_rows(of, runs, tokens, before, &mut self.rows);
        self.reader.ask(&self.rows);
    }

    /// Writes the rows that were asked for to the beginning of `out`, as they are in the files. Returns this part of `out`.
    ///
    /// # Errors
    /// Returns an error if a read fails.
    ///
    /// # Panics
    /// Panics if `out` is shorter than the rows.
    pub fn read<'a>(&mut self, out: &'a mut [u8]) -> Result<&'a [u8], StoreError> {
        let out = &mut out[..self.rows.len() * self.reader.row_bytes()];
        self.reader.read(&self.rows, out)?;
        Ok(out)
    }
}

/// Returns what a run's next run finds before its first token: the last `before.len()` of the tokens before the run and its own.
pub fn last_tokens(before: &mut [u32], tokens: &[u32]) {
    let kept = before.len();
    let new = tokens.len().min(kept);
    before.copy_within(new.., 0);
    before[kept - new..].copy_from_slice(&tokens[tokens.len() - new..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ngrams() -> NGrams {
        NGrams {
            size: 3,
            hashes: 2,
            width: 8,
            taps: 4,
            separator: 9,
            layers: vec![0],
            constants: None,
        }
    }

    fn hashes() -> NGramHashes {
        let rows = vec![0..7, 7..18, 18..31, 31..48];
        NGramHashes { multipliers: vec![3, i64::MAX / 5, 77_777], rows }
    }

    /// The rows of one token, by the definition in numbers of 128 bits.
    fn exact(text: &[u32]) -> Vec<u32> {
        let hashes = hashes();
        let cut = |back: usize| {
            let own = &text[text.len() - 1 - back..text.len() - 1];
            if own.contains(&9) { 9 } else { text[text.len() - 1 - back] }
        };
        let mixed =
            |back: usize| (i128::from(cut(back)) * i128::from(hashes.multipliers[back])) as i64;
        let two = mixed(0) ^ mixed(1);
        let of = |hash: i64, rows: &Range<u32>| {
            rows.start + (i128::from(hash).rem_euclid(i128::from(rows.len() as u64))) as u32
        };
        let (first, second) = hashes.rows.split_at(2);
        let of_two = first.iter().map(|rows| of(two, rows));
        of_two.chain(second.iter().map(|rows| of(two ^ mixed(2), rows))).collect()
    }

    #[test]
    fn rows_follow_the_definition_and_cuts_change_nothing() {
        let text = [4, 1, 2, 9, 5, 9, 9, 3, 1, 2, 8];
        let padded: Vec<u32> = [9, 9].into_iter().chain(text).collect();
        let expected: Vec<u32> = (3..=padded.len()).flat_map(|end| exact(&padded[..end])).collect();
        for pieces in [vec![11], vec![1; 11], vec![3, 1, 5, 2], vec![10, 1]] {
            let (mut rows, mut before, mut first) = (Vec::new(), [9, 9], 0);
            for count in pieces {
                let own = &text[first..first + count];
                hashes().append_rows(&ngrams(), [count].into_iter(), own, &before, &mut rows);
                last_tokens(&mut before, own);
                first += count;
            }
            assert_eq!(rows, expected);
        }
    }

    #[test]
    fn runs_of_a_pass_have_their_own_tokens_before() {
        let (of, hashes) = (ngrams(), hashes());
        let (mut together, mut apart) = (Vec::new(), Vec::new());
        hashes.append_rows(&of, [2, 1].into_iter(), &[5, 6, 7], &[1, 2, 3, 4], &mut together);
        hashes.append_rows(&of, [2].into_iter(), &[5, 6], &[1, 2], &mut apart);
        hashes.append_rows(&of, [1].into_iter(), &[7], &[3, 4], &mut apart);
        assert_eq!(together, apart);
    }
}
