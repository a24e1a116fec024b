//! The states of recurrent layers and of layers with n-grams, and the sequences to which they belong.
//!
//! A backend keeps two states for each table of a sequence. A pass reads one and writes the other, so a pass that fails, or that
//! runs again, finds what it needs. Each state is that after some position, and a state is used only for the rows behind that
//! position. So a sequence never continues with a state of other tokens.

use crate::ModelError;
use crate::arch::{NGrams, STATES_PER_SEQUENCE};
use crate::backend::{Run, StatePlaces};
use crate::ngrams::last_tokens;

/// The states of all tables.
#[derive(Debug, Default)]
pub struct States {
    /// For each table, the number of positions after which its states are. `None` means that a state has no defined content.
    positions: Vec<[Option<usize>; STATES_PER_SEQUENCE]>,
    /// The places of the current pass, one for each run.
    places: Vec<StatePlaces>,
    /// For each place, the last tokens before the position, if n-grams need them: `before` tokens.
    last_tokens: Vec<u32>,
    before: usize,
    separator: u32,
    /// The tokens before each run of the current pass.
    tokens_before: Vec<u32>,
}

impl States {
    /// Creates the states of so many tables, none of which has content.
    pub fn new(tables: usize, ngrams: Option<&NGrams>) -> States {
        let before = ngrams.map_or(0, NGrams::before);
        States {
            positions: vec![[None; STATES_PER_SEQUENCE]; tables],
            places: Vec::with_capacity(tables),
            last_tokens: vec![0; tables * STATES_PER_SEQUENCE * before],
            before,
            separator: ngrams.map_or(0, |of| of.separator),
            tokens_before: Vec::with_capacity(tables * before),
        }
    }

    /// Returns the number of bytes of the tokens that belong to a state.
    pub fn token_bytes(&self) -> usize {
        self.before * size_of::<u32>()
    }

    fn last_tokens(&mut self, place: usize) -> &mut [u32] {
        &mut self.last_tokens[place * self.before..][..self.before]
    }

    /// Copies the tokens before the position of a state to `bytes`.
    pub fn save_tokens(&mut self, place: usize, bytes: &mut [u8]) {
        for (token, bytes) in self.last_tokens(place).iter().zip(bytes.as_chunks_mut().0) {
            *bytes = token.to_le_bytes();
        }
    }

    /// Sets the tokens before the position of a state.
    pub fn restore_tokens(&mut self, place: usize, bytes: &[u8]) {
        for (token, bytes) in self.last_tokens(place).iter_mut().zip(bytes.as_chunks().0) {
            *token = u32::from_le_bytes(*bytes);
        }
    }

    /// Returns the tokens before each run of the current pass, separators where there are none.
    pub fn tokens_before(&self) -> &[u32] {
        &self.tokens_before
    }

    /// Returns true if there is a state after the first `position` positions of a sequence.
    pub fn has(&self, table: usize, position: usize) -> bool {
        position == 0 || self.positions[table].contains(&Some(position))
    }

    /// Drops the states of a table, because another sequence uses it from now on.
    pub fn forget(&mut self, table: usize) {
        if let Some(states) = self.positions.get_mut(table) {
            *states = [None; STATES_PER_SEQUENCE];
        }
    }

    /// Returns the place of the state after the first `position` positions of a sequence.
    pub fn place(&self, table: usize, position: usize) -> Option<usize> {
        let state = self.positions[table].iter().position(|state| *state == Some(position))?;
        Some(table * STATES_PER_SEQUENCE + state)
    }

    /// Returns the place for a state that comes from elsewhere. The table has no states until [`States::set`].
    pub fn begin_set(&mut self, table: usize) -> usize {
        self.forget(table);
        table * STATES_PER_SEQUENCE
    }

    /// Notes that the place of [`States::begin_set`] has the state after the first `position` positions.
    pub fn set(&mut self, table: usize, position: usize) {
        self.positions[table][0] = Some(position);
    }

    /// Chooses the places of a pass. The states that the pass will write have no defined content until [`States::end`].
    ///
    /// # Errors
    /// Returns an error if there is no state before a run's first row. Nothing has changed then.
    pub fn begin(&mut self, runs: &[Run]) -> Result<(), ModelError> {
        if let Some(run) = runs.iter().find(|run| !self.has(run.table, run.position)) {
            return Err(ModelError::NoState { position: run.position });
        }
        self.places.clear();
        self.tokens_before.clear();
        for run in runs {
            let states = &mut self.positions[run.table];
            let from = match run.position {
                0 => None,
                position => states.iter().position(|state| *state == Some(position)),
            };
            let to = from.map_or(0, |from| STATES_PER_SEQUENCE - 1 - from);
            if from.is_none() {
                *states = [None; STATES_PER_SEQUENCE];
            }
            states[to] = None;
            let first = run.table * STATES_PER_SEQUENCE;
            let from = from.map(|state| first + state);
            let kept = self.before;
            match from {
                Some(from) => {
                    self.tokens_before.extend_from_slice(&self.last_tokens[from * kept..][..kept]);
                }
                None => self.tokens_before.resize(self.tokens_before.len() + kept, self.separator),
            }
            self.places.push(StatePlaces { from, to: first + to });
        }
        Ok(())
    }

    /// Returns the places of the current pass.
    pub fn places(&self) -> &[StatePlaces] {
        &self.places
    }

    /// Notes that the pass with these runs has written its states. `tokens` are those of all rows.
    pub fn end(&mut self, runs: &[Run], tokens: &[u32]) {
        let (mut tokens, kept) = (tokens, self.before);
        for (index, run) in runs.iter().enumerate().filter(|_| kept > 0) {
            let (own, rest) = tokens.split_at(run.count);
            tokens = rest;
            let last = &mut self.last_tokens[self.places[index].to * kept..][..kept];
            last.copy_from_slice(&self.tokens_before[index * kept..][..kept]);
            last_tokens(last, own);
        }
        for (run, places) in runs.iter().zip(&self.places) {
            let state = places.to - run.table * STATES_PER_SEQUENCE;
            self.positions[run.table][state] = Some(run.position + run.count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_ops::RowKind;

    fn run(table: usize, position: usize, count: usize) -> Run {
        Run { table, kind: RowKind::Prompt, position, count }
    }

    #[test]
    fn passes_alternate_between_two_states() {
        let mut states = States::new(3, None);
        let runs = [run(2, 0, 5), run(0, 0, 1)];
        states.begin(&runs).unwrap();
        let empty = |to| StatePlaces { from: None, to };
        assert_eq!(states.places(), [empty(4), empty(0)]);
        assert!(!states.has(2, 5), "the pass has not ended");
        states.end(&runs, &[]);
        assert!(states.has(2, 5) && states.has(0, 1) && !states.has(1, 1));
        states.begin(&[run(2, 5, 2)]).unwrap();
        assert_eq!(states.places(), [StatePlaces { from: Some(4), to: 5 }]);
        states.end(&[run(2, 5, 2)], &[]);
        states.begin(&[run(2, 7, 1)]).unwrap();
        assert_eq!(states.places(), [StatePlaces { from: Some(5), to: 4 }]);
        states.end(&[run(2, 7, 1)], &[]);
        assert!(states.has(2, 7) && states.has(2, 8) && !states.has(2, 5));
    }

    #[test]
    fn a_pass_that_failed_can_run_again_and_the_last_one_can_be_undone() {
        let mut states = States::new(1, None);
        for runs in [[run(0, 0, 4)], [run(0, 4, 2)]] {
            states.begin(&runs).unwrap();
            states.end(&runs, &[]);
        }
        // This pass never ends.
        states.begin(&[run(0, 6, 3)]).unwrap();
        assert!(states.has(0, 6) && !states.has(0, 4));
        states.begin(&[run(0, 6, 3)]).unwrap();
        assert_eq!(states.places(), [StatePlaces { from: Some(1), to: 0 }]);
        states.end(&[run(0, 6, 3)], &[]);
        // The sequence drops the last rows and goes on with others.
        states.begin(&[run(0, 6, 1)]).unwrap();
        states.end(&[run(0, 6, 1)], &[]);
        assert!(states.has(0, 7) && !states.has(0, 9));
    }

    #[test]
    fn states_of_other_tokens_are_never_used() {
        let mut states = States::new(2, None);
        let runs = [run(0, 0, 4)];
        states.begin(&runs).unwrap();
        states.end(&runs, &[]);
        assert!(matches!(states.begin(&[run(0, 3, 1)]), Err(ModelError::NoState { position: 3 })));
        assert!(states.begin(&[run(1, 4, 1)]).is_err(), "the other table has no state");
        // A sequence that begins again has neither of the old states.
        states.begin(&[run(0, 0, 2)]).unwrap();
        assert!(!states.has(0, 4));
        states.end(&[run(0, 0, 2)], &[]);
        states.forget(0);
        assert!(!states.has(0, 2) && states.has(0, 0));
        assert_eq!(states.place(0, 2), None);
    }

    #[test]
    fn a_state_can_come_from_elsewhere() {
        let mut states = States::new(2, None);
        assert_eq!(states.begin_set(1), 2);
        assert!(!states.has(1, 32), "it is not there yet");
        states.set(1, 32);
        assert_eq!(states.place(1, 32), Some(2));
        states.begin(&[run(1, 32, 3)]).unwrap();
        assert_eq!(states.places(), [StatePlaces { from: Some(2), to: 3 }]);
        states.end(&[run(1, 32, 3)], &[]);
        assert_eq!(states.place(1, 35), Some(3));
    }
}
