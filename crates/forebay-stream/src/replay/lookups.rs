//! What a cache is asked for: layer batches of distinct experts, without the tokens behind them.

use crate::blocks::{ExpertIndex, LayerIndex};
use crate::routing::{LookupOrder, Phase, RoutingTrace};

/// What one layer's batch touched.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Batch {
    phase: Phase,
    layer: LayerIndex,
    tokens: u32,
    /// The batch of the recording.
    source: u32,
    /// Where its experts end in the list.
    end: usize,
}

/// Lookups, batch by batch: what a replay reads.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Lookups {
    /// Experts, and bytes of one of them, for each layer.
    layers: Vec<(u32, u64)>,
    batches: Vec<Batch>,
    experts: Vec<ExpertIndex>,
}

impl Lookups {
    /// Layers with `(experts, bytes of one expert)` and no batches yet.
    pub fn new(layers: Vec<(u32, u64)>) -> Lookups {
        Lookups { layers, batches: Vec::new(), experts: Vec::new() }
    }

    /// Every batch of a recording, each expert once, in the order in which the engine that recorded it looks them up.
    pub fn of(trace: &RoutingTrace) -> Lookups {
        let header = trace.header();
        let mut lookups = Lookups::new(header.layer_sizes());
        let mut open: Vec<ExpertIndex> = Vec::new();
        let most = header.layers.iter().map(|layer| layer.experts).max().unwrap_or(0);
        let mut seen = vec![false; most as usize];
        for (source, batch) in trace.batches().enumerate() {
            for layer in 0..header.layers.len() {
                open.clear();
                // From the last token on: the first that is seen is the last use.
                for token in batch.tokens.clone().rev() {
                    let chosen = trace.experts(token, layer);
                    for expert in chosen.rev() {
                        if !std::mem::replace(&mut seen[expert.0 as usize], true) {
                            open.push(expert);
                        }
                    }
                }
                open.iter().for_each(|expert| seen[expert.0 as usize] = false);
                match header.order {
                    LookupOrder::Ascending => open.sort_unstable(),
                    LookupOrder::LastUse => open.reverse(),
                }
                if !open.is_empty() {
                    lookups.push(batch.phase, LayerIndex(layer as u32), batch.tokens.len(), &open);
                    lookups.batches.last_mut().expect("just pushed").source = source as u32;
                }
            }
        }
        lookups
    }

    /// `(experts, bytes of one expert)` of each layer.
    pub fn layers(&self) -> &[(u32, u64)] {
        &self.layers
    }

    /// Adds a batch of so many tokens: distinct experts, the one used last at the end.
    ///
    /// # Panics
    /// If there is no such layer or the layer has no such expert.
    pub fn push(
        &mut self,
        phase: Phase,
        layer: LayerIndex,
        tokens: usize,
        experts: &[ExpertIndex],
    ) {
        let known = self.layers[layer.0 as usize].0;
        assert!(experts.iter().all(|expert| expert.0 < known), "no such expert");
        self.experts.extend_from_slice(experts);
        let (tokens, end) = (tokens as u32, self.experts.len());
        self.batches.push(Batch { phase, layer, tokens, source: 0, end });
    }

    /// Every batch: phase, layer, experts.
    pub fn batches(&self) -> impl Iterator<Item = (Phase, LayerIndex, &[ExpertIndex])> {
        let starts = std::iter::once(0).chain(self.batches.iter().map(|batch| batch.end));
        let experts = &self.experts;
        self.batches
            .iter()
            .zip(starts)
            .map(move |(batch, start)| (batch.phase, batch.layer, &experts[start..batch.end]))
    }

    /// Tokens of every batch.
    pub fn tokens(&self) -> impl Iterator<Item = usize> {
        self.batches.iter().map(|batch| batch.tokens as usize)
    }

    /// For every batch, its batch of the recording ([`RoutingTrace::batch`]).
    pub fn sources(&self) -> impl Iterator<Item = usize> {
        self.batches.iter().map(|batch| batch.source as usize)
    }

    /// Lookups in all.
    pub fn len(&self) -> usize {
        self.experts.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.experts.is_empty()
    }

    /// Bytes of the experts of one token in all layers, T: a global list by recency that is smaller, by a layer's batch, hits
    /// nothing while text is generated. The most that any token uses, from one visit of the first layer to the next; 0
    /// without generated tokens.
    pub fn cycle_bytes(&self) -> u64 {
        let (mut most, mut sum, mut last) = (0, 0, u32::MAX);
        for (phase, layer, experts) in self.batches() {
            if phase == Phase::Prompt || layer.0 <= last {
                sum = 0;
            }
            last = layer.0;
            if phase == Phase::Generate {
                sum += experts.len() as u64 * self.layers[layer.0 as usize].1;
                most = most.max(sum);
            }
        }
        most
    }

    /// Bytes of all experts.
    pub fn total_bytes(&self) -> u64 {
        let of = |&(experts, bytes): &(u32, u64)| u64::from(experts).saturating_mul(bytes);
        self.layers.iter().map(of).fold(0, u64::saturating_add)
    }
}
