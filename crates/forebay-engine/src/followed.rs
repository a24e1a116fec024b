//! Routing that replaces the model's own: a recorded trace, or uniform random routing. It gives models with random
//! weights the locality of a real model, or none.

use forebay_compute::RowKind;
use forebay_model::{ChosenExperts, Run};
use forebay_stream::routing::RoutingLayer;
use forebay_stream::{Phase, RoutingTrace};

use crate::{EngineError, Session};

/// Source of the experts that tokens choose.
#[derive(Debug, Clone)]
pub enum RoutingSource {
    /// A trace of the same shape as the model's routing. Prompts take the tokens of its prompts, and generated tokens take
    /// its generated tokens. Every sequence begins at a place of its own in the trace. At the end of the trace, tokens
    /// start again at its beginning, and all experts are renumbered. Renumbering makes the experts that an earlier pass
    /// left in a cache as useless as a change of subject would.
    Trace(Box<RoutingTrace>),
    /// Uniform random routing: all experts are equally likely.
    Uniform,
}

struct Followed {
    source: RoutingSource,
    layers: Vec<RoutingLayer>,
    /// Tokens of the trace that were part of a prompt.
    prompt: Vec<usize>,
    generated: Vec<usize>,
    /// Number of tokens that each sequence has taken: of prompts, and generated.
    taken: Vec<[usize; 2]>,
    /// Experts of the current batch for each layer, as `[tokens, used]`.
    rows: Vec<Vec<u32>>,
    random: fastrand::Rng,
}

impl Session {
    /// Makes all tokens from now on take their experts from `source`.
    ///
    /// # Errors
    /// Returns [`EngineError::NoExperts`] for a dense model and [`EngineError::OtherRouting`] for a trace of another
    /// shape.
    pub fn follow_routing(&mut self, source: RoutingSource) -> Result<(), EngineError> {
        let sequences = self.runner.decoder.backend().tables();
        let followed = Followed::new(source, self.routing_layers()?, sequences)?;
        self.runner.decoder.follow(Some(Box::new(followed)));
        Ok(())
    }
}

impl Followed {
    fn new(
        source: RoutingSource,
        layers: Vec<RoutingLayer>,
        sequences: usize,
    ) -> Result<Followed, EngineError> {
        let (mut prompt, mut generated) = (Vec::new(), Vec::new());
        if let RoutingSource::Trace(trace) = &source {
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
                return Err(EngineError::OtherRouting { trace, model });
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
                return Err(EngineError::OtherRouting {
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
            taken: vec![[0; 2]; sequences],
            rows,
            random: fastrand::Rng::with_seed(1),
        })
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

impl ChosenExperts for Followed {
    fn begin(&mut self, runs: &[Run]) {
        self.rows.iter_mut().for_each(Vec::clear);
        for run in runs.iter().flat_map(|run| std::iter::repeat_n(run, run.count)) {
            let phase = usize::from(run.kind == RowKind::Decode);
            let list = if phase == 1 { &self.generated } else { &self.prompt };
            let start = list.len() * run.table / self.taken.len();
            let taken = start + self.taken[run.table][phase];
            self.taken[run.table][phase] += 1;
            for layer in 0..self.layers.len() {
                let RoutingSource::Trace(trace) = &self.source else {
                    self.push_uniform(layer);
                    continue;
                };
                let list = if phase == 1 { &self.generated } else { &self.prompt };
                let (token, round) = (list[taken % list.len()], taken / list.len());
                let experts = self.layers[layer].experts;
                // 41 is coprime to the numbers of experts that models have.
                let renamed = |id: u32| (id + (round as u32).wrapping_mul(41)) % experts;
                let ids = trace.experts(token, layer).map(|expert| renamed(expert.0));
                self.rows[layer].extend(ids);
            }
        }
    }

    fn experts(&self, layer: usize) -> &[u32] {
        &self.rows[layer]
    }
}
