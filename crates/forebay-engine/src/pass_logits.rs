//! The logits of a pass: which are wanted, and what the pass returned of them.

use forebay_model::sampling::{LARGEST_MAX, Largest, LogitChange, Needs, RowLogits, Sampler};
use forebay_model::{CHANGES_MAX, RowSelection, Selector};

use crate::runner::Outputs;

/// A row of logits, with what its request wants of it.
pub(crate) struct WantedRow<'a> {
    /// `None` if the logits are not used, because the next token is known.
    sampler: Option<&'a Sampler>,
    /// True if all logits are wanted as they are.
    all: bool,
    /// How many of the largest logits are wanted, beside what the choice needs, with the total of all at a divisor of 1: logarithms
    /// of probabilities follow from them. `None` if these are not wanted, or if `all` are.
    probabilities: Option<usize>,
    /// True if a grammar decides which tokens are allowed. Its mask may come while the pass runs.
    has_grammar: bool,
    changes: Vec<LogitChange>,
}

/// Gives the masks of a pass.
pub(crate) trait Masks {
    /// Waits until the masks are there.
    fn wait(&mut self);

    /// Returns the mask of a row; `None` if all tokens are allowed.
    fn of_row(&self, row: usize) -> Option<&[u32]>;
}

/// Masks of rows without grammars.
pub(crate) struct NoMasks;

impl Masks for NoMasks {
    fn wait(&mut self) {}

    fn of_row(&self, _: usize) -> Option<&[u32]> {
        None
    }
}

/// Holds the logits that a pass returned of its rows. Buffers are reused from pass to pass.
#[derive(Default)]
pub(crate) struct PassLogits {
    way: Way,
    logits: Vec<f32>,
    largest: Vec<(f32, u32)>,
    rows: Vec<ReturnedRow>,
}

/// How logits come from the device.
#[derive(Clone, Copy, Default)]
enum Way {
    /// All of them.
    #[default]
    All,
    /// So many of the largest of each row.
    Largest(usize),
    /// Those that each row wants ([`Selecting`]).
    Selected,
}

/// A row that was selected on the device.
enum ReturnedRow {
    Unused,
    Largest { logits: Vec<(f32, u32)>, is_all: bool, total: f32 },
    All(Vec<f32>),
    Changed(Vec<f32>),
}

/// Answers the device what each row wants, and takes it.
pub(crate) struct Selecting<'a, M> {
    wanted: Vec<WantedRow<'a>>,
    masks: &'a mut M,
    rows: &'a mut Vec<ReturnedRow>,
}

impl<'a> WantedRow<'a> {
    /// Returns a row whose logits are not used.
    pub fn unused() -> WantedRow<'a> {
        let changes = Vec::new();
        WantedRow { sampler: None, all: false, probabilities: None, has_grammar: false, changes }
    }

    /// Returns a row whose logits are all wanted, and from which no token is chosen.
    pub fn whole() -> WantedRow<'a> {
        WantedRow { all: true, ..WantedRow::unused() }
    }

    /// Returns a row from which a token is chosen. `recent` holds the tokens so far. With `probabilities`, the request also
    /// reports the probability of the token and those of so many of the likeliest ones.
    pub fn chooses(
        sampler: &'a Sampler,
        recent: &[u32],
        has_grammar: bool,
        probabilities: Option<usize>,
    ) -> WantedRow<'a> {
        let mut changes = Vec::new();
        sampler.changes(recent, &mut changes);
        // Probabilities are those of the model, before all changes. A row has one total.
        let follow = |count: usize| {
            let has_total = matches!(sampler.needs().total_at, None | Some(1.0));
            has_total && !has_grammar && changes.is_empty() && count <= LARGEST_MAX
        };
        let all = probabilities.is_some_and(|count| !follow(count)) || changes.len() > CHANGES_MAX;
        if all {
            changes.clear();
        }
        let probabilities = probabilities.filter(|_| !all);
        WantedRow { sampler: Some(sampler), all, probabilities, has_grammar, changes }
    }

    /// Returns what is needed of the logits if not `all` are.
    fn needs(&self, sampler: &Sampler) -> Needs {
        let needs = sampler.needs();
        match self.probabilities {
            None => needs,
            Some(count) => Needs { count: needs.count.max(count), total_at: Some(1.0) },
        }
    }

    /// Returns how many of the largest logits of the model are enough; `None` if that is not all that is wanted.
    fn plain(&self) -> Option<usize> {
        let Some(sampler) = self.sampler else { return (!self.all).then_some(1) };
        let needs = self.needs(sampler);
        let is_plain =
            !self.all && !self.has_grammar && self.changes.is_empty() && needs.total_at.is_none();
        is_plain.then_some(needs.count)
    }
}

impl PassLogits {
    /// Begins a pass with these rows. `most` is the number of largest logits that the device can select, 0 if it cannot. Calls
    /// `run` with where the pass writes its logits.
    pub fn of_pass<'a, M: Masks, T>(
        &'a mut self,
        most: usize,
        wanted: impl Iterator<Item = WantedRow<'a>>,
        masks: &'a mut M,
        run: impl FnOnce(&mut Outputs<'_>) -> T,
    ) -> T {
        self.logits.clear();
        self.largest.clear();
        self.rows.clear();
        // If all logits come to the host, the samplers find out there what they need.
        let wanted: Vec<_> = if most == 0 { Vec::new() } else { wanted.collect() };
        let plain =
            wanted.iter().map(WantedRow::plain).try_fold(1, |most, row| Some(row?.max(most)));
        self.way = match plain {
            _ if most == 0 => Way::All,
            Some(count) => Way::Largest(count.min(most)),
            None => Way::Selected,
        };
        let mut selecting;
        run(&mut match self.way {
            Way::All => Outputs::Logits(&mut self.logits),
            Way::Largest(count) => Outputs::Largest(count, &mut self.largest),
            Way::Selected => {
                selecting = Selecting { wanted, masks, rows: &mut self.rows };
                Outputs::Selected(&mut selecting)
            }
        })
    }

    /// Returns what the last pass returned of a row, for a sampler that needs `count` of the largest. `None` if it is a row
    /// whose logits are not used.
    pub fn row(&self, row: usize, vocabulary: usize, count: usize) -> Option<RowLogits<'_>> {
        Some(match self.way {
            Way::All => RowLogits::All(&self.logits[row * vocabulary..][..vocabulary]),
            Way::Largest(returned) => {
                let logits = &self.largest[row * returned..][..returned.min(count)];
                let is_all = logits.len() < count;
                RowLogits::Largest(Largest { logits, is_all, total: 0.0 })
            }
            Way::Selected => match &self.rows[row] {
                ReturnedRow::Unused => return None,
                ReturnedRow::Largest { logits, is_all, total } => {
                    RowLogits::Largest(Largest { logits, is_all: *is_all, total: *total })
                }
                ReturnedRow::All(logits) => RowLogits::All(logits),
                ReturnedRow::Changed(logits) => RowLogits::Changed(logits),
            },
        })
    }
}

impl<M: Masks> Selector for Selecting<'_, M> {
    fn selections(&mut self, outputs: usize) -> Vec<RowSelection<'_>> {
        self.masks.wait();
        let first = self.rows.len();
        let rows = self.wanted[first..first + outputs].iter().zip(first..);
        rows.map(|(row, index)| match row.sampler {
            Some(sampler) if !row.all => {
                let Needs { count, total_at } = row.needs(sampler);
                let allowed = self.masks.of_row(index);
                RowSelection { count, total_at, changes: &row.changes, allowed }
            }
            _ => RowSelection { count: 1, total_at: None, changes: &[], allowed: None },
        })
        .collect()
    }

    fn take(&mut self, largest: Largest<'_>) -> bool {
        let wanted = &self.wanted[self.rows.len()];
        let (returned, needs_all) = match wanted.sampler {
            _ if wanted.all => (ReturnedRow::All(Vec::new()), true),
            None => (ReturnedRow::Unused, false),
            Some(sampler) if !largest.logits.is_empty() && !sampler.can_choose(&largest) => {
                (ReturnedRow::Changed(Vec::new()), true)
            }
            Some(_) => {
                let Largest { logits, is_all, total } = largest;
                (ReturnedRow::Largest { logits: logits.to_vec(), is_all, total }, false)
            }
        };
        self.rows.push(returned);
        needs_all
    }

    fn take_all(&mut self, all: Vec<f32>) {
        if let Some(ReturnedRow::All(logits) | ReturnedRow::Changed(logits)) = self.rows.last_mut()
        {
            *logits = all;
        }
    }

    fn taken(&self) -> usize {
        self.rows.len()
    }

    fn truncate(&mut self, taken: usize) {
        self.rows.truncate(taken);
    }
}
