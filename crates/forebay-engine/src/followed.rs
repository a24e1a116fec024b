//! Routing that replaces the model's own: a recorded trace, or uniform random routing. It gives models with random
//! weights the locality of a real model, or none.

use forebay_model::{ChosenExperts, Run};
use forebay_ops::RowKind;
use forebay_stream::routing::{RoutingLayer, RoutingProfile};
use forebay_stream::{Phase, RoutingTrace};

use crate::routing_error::RoutingError;
use crate::{EngineError, Session};

/// Source of the experts that tokens choose.
#[derive(Debug, Clone)]
pub enum RoutingSource {
    /// A trace of the same shape as the model's routing. Prompts take the tokens of its prompts, and generated tokens take
    /// its generated tokens. Every sequence begins at a place of its own in the trace, and goes on at its beginning after
    /// its end. When a sequence has taken as many tokens as the trace has, all experts are renumbered for it. Renumbering
    /// makes the experts that an earlier round left in a cache as useless as a change of subject would. A sequence begins
    /// in the round of the sequence that has taken most, so sequences that run together use the same numbers.
    Trace(Box<RoutingTrace>),
    /// The same with the experts of every layer in another order for every sequence, as if the sequences had nothing in
    /// common.
    Unrelated(Box<RoutingTrace>),
    /// A trace of this model's shape that is made from a published curve of hit rates.
    Profile(RoutingProfile),
    /// Uniform random routing: all experts are equally likely.
    Uniform,
}

struct Followed {
    source: RoutingSource,
    layers: Vec<RoutingLayer>,
    /// Tokens of the trace that were part of a prompt.
    prompt: Vec<usize>,
    generated: Vec<usize>,
    tables: Vec<Table>,
    /// Number of sequences that have begun.
    begun: u64,
    /// Experts of the current batch for each layer, as `[tokens, used]`.
    rows: Vec<Vec<u32>>,
    random: fastrand::Rng,
}

/// State of the sequence of one table.
#[derive(Clone, Default)]
struct Table {
    /// Number of tokens taken by this and earlier sequences: of prompts, and generated.
    taken: [usize; 2],
    /// Position behind the last row.
    end: usize,
    /// Number of every expert of the trace, for [`RoutingSource::Unrelated`]. Empty before the first sequence.
    order: Vec<Vec<u32>>,
}

impl Session {
    /// Makes all tokens from now on take their experts from `source`.
    ///
    /// # Errors
    /// Returns [`RoutingError::NoExperts`] for a dense model, [`RoutingError::Other`] for a trace of another
    /// shape, and [`RoutingError::Profile`] for a profile that no model of this shape can have.
    pub fn follow_routing(&mut self, source: RoutingSource) -> Result<(), EngineError> {
        self.refuse_mtp("the predicting layer follows its router only")?;
        let sequences = self.runner.decoder.backend().tables();
        let source = match source {
            RoutingSource::Profile(profile) => RoutingSource::Trace(self.profiled(profile)?),
            source => source,
        };
        let followed = Followed::new(source, self.routing_layers()?, sequences)?;
        self.runner.decoder.follow(Some(Box::new(followed)));
        Ok(())
    }

    /// Returns the trace that [`RoutingSource::Profile`] stands for.
    ///
    /// # Errors
    /// Returns [`RoutingError::NoExperts`] for a dense model, and [`RoutingError::Profile`] if no model of this shape can
    /// have the profile.
    pub fn profiled(&self, profile: RoutingProfile) -> Result<Box<RoutingTrace>, RoutingError> {
        const SEED: u64 = 1;
        let trace = profile.trace(&self.routing_layers()?, SEED);
        trace.map(Box::new).map_err(RoutingError::Profile)
    }
}

impl Followed {
    fn new(
        source: RoutingSource,
        layers: Vec<RoutingLayer>,
        sequences: usize,
    ) -> Result<Followed, RoutingError> {
        let (mut prompt, mut generated) = (Vec::new(), Vec::new());
        if let Some(trace) = source.trace() {
            let of = &trace.header().layers;
            // The model may have been cut to its first layers.
            let same = of.len() >= layers.len()
                && of.iter().zip(&layers).all(|(of, layer)| {
                    // The CSV form of a trace knows only the experts that were chosen, so it may have fewer than the
                    // model.
                    of.experts <= layer.experts && of.used == layer.used
                });
            let sizes = |layers: &[RoutingLayer]| {
                let largest = layers.iter().map(|layer| (layer.experts, layer.used)).max();
                let (experts, used) = largest.unwrap_or((0, 0));
                format!("{} layers, {used} of {experts} experts", layers.len())
            };
            if !same {
                let (trace, model) = (sizes(of), sizes(&layers));
                return Err(RoutingError::Other { trace, model });
            }
            for batch in trace.batches() {
                let list = if batch.phase == Phase::Prompt { &mut prompt } else { &mut generated };
                // A token that did not go through all layers has no experts in the remaining ones.
                list.extend(batch.tokens.filter(|&token| {
                    let whole = |l| trace.experts(token, l).count() == layers[l].used as usize;
                    (0..layers.len()).all(whole)
                }));
            }
            // A trace that has only one phase serves for both.
            if prompt.is_empty() {
                prompt.clone_from(&generated);
            }
            if generated.is_empty() {
                generated.clone_from(&prompt);
            }
            if prompt.is_empty() {
                return Err(RoutingError::Other {
                    trace: "no whole token".into(),
                    model: "one at least to follow".into(),
                });
            }
        }
        let rows = vec![Vec::new(); layers.len()];
        Ok(Followed {
            source,
            layers,
            prompt,
            generated,
            tables: vec![Table::default(); sequences],
            begun: 0,
            rows,
            random: fastrand::Rng::with_seed(1),
        })
    }

    /// Starts a new sequence in a table.
    fn begin_sequence(&mut self, table: usize) {
        let most = |phase: usize| self.tables.iter().map(|of| of.taken[phase]).max().unwrap_or(0);
        let taken = [most(0), most(1)];
        self.begun += 1;
        let order = if matches!(self.source, RoutingSource::Unrelated(_)) {
            let mut random = fastrand::Rng::with_seed(self.begun);
            let shuffled = |layer: &RoutingLayer| {
                let mut order: Vec<u32> = (0..layer.experts).collect();
                random.shuffle(&mut order);
                order
            };
            self.layers.iter().map(shuffled).collect()
        } else {
            Vec::new()
        };
        self.tables[table] = Table { taken, end: 0, order };
    }

    /// Adds the experts of a sequence's next token.
    fn push_row(&mut self, run: &Run) {
        let phase = usize::from(run.kind == RowKind::Decode);
        let tables = self.tables.len();
        let table = &mut self.tables[run.table];
        let taken = table.taken[phase];
        table.taken[phase] += 1;
        let Some(trace) = self.source.trace() else {
            (0..self.layers.len()).for_each(|layer| self.push_uniform(layer));
            return;
        };
        let table = &self.tables[run.table];
        let list = if phase == 1 { &self.generated } else { &self.prompt };
        let start = list.len() * run.table / tables;
        let (token, round) = (list[(start + taken) % list.len()], taken / list.len());
        for (layer, row) in self.rows.iter_mut().enumerate() {
            let experts = self.layers[layer].experts;
            // 41 is coprime to the numbers of experts that models have.
            let renamed = |id: u32| (id + (round as u32).wrapping_mul(41)) % experts;
            let ids = trace.experts(token, layer).map(|expert| renamed(expert.0));
            match table.order.get(layer) {
                Some(order) => row.extend(ids.map(|id| order[id as usize])),
                None => row.extend(ids),
            }
        }
    }

    fn push_uniform(&mut self, layer: usize) {
        let RoutingLayer { experts, used, .. } = self.layers[layer];
        let mut row = std::mem::take(&mut self.rows[layer]);
        let from = row.len();
        while row.len() < from + used as usize {
            let expert = self.random.u32(..experts);
            if !row[from..].contains(&expert) {
                row.push(expert);
            }
        }
        self.rows[layer] = row;
    }
}

impl RoutingSource {
    fn trace(&self) -> Option<&RoutingTrace> {
        match self {
            RoutingSource::Trace(trace) | RoutingSource::Unrelated(trace) => Some(trace),
            RoutingSource::Profile(_) | RoutingSource::Uniform => None,
        }
    }
}

impl ChosenExperts for Followed {
    fn begin(&mut self, runs: &[Run]) {
        self.rows.iter_mut().for_each(Vec::clear);
        for run in runs {
            if run.position == 0 || run.position < self.tables[run.table].end {
                self.begin_sequence(run.table);
            }
            self.tables[run.table].end = run.position + run.count;
            (0..run.count).for_each(|_| self.push_row(run));
        }
    }

    fn experts(&self, layer: usize) -> &[u32] {
        &self.rows[layer]
    }
}
