//! The lookups of a trace: layer batches of distinct experts, without the tokens that chose them.

use crate::blocks::{ExpertIndex, LayerIndex};
use crate::routing::{LookupOrder, Phase, RoutingTrace};

/// One layer's batch.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Batch {
    phase: Phase,
    layer: LayerIndex,
    tokens: u32,
    /// Index of the batch in the recording.
    source: u32,
    /// End of its experts in the list.
    end: usize,
}

/// Lookups, batch by batch; the input of a replay.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Lookups {
    /// Number of experts, and bytes of one expert, for each layer.
    layers: Vec<(u32, u64)>,
    batches: Vec<Batch>,
    experts: Vec<ExpertIndex>,
}

impl Lookups {
    /// Creates lookups without batches, for layers with `(experts, bytes of one expert)`.
    pub fn new(layers: Vec<(u32, u64)>) -> Lookups {
        Lookups { layers, batches: Vec::new(), experts: Vec::new() }
    }

    /// Returns every batch of a recording with each expert once, in the order in which the recording engine looks them
    /// up.
    pub fn of(trace: &RoutingTrace) -> Lookups {
        let header = trace.header();
        let mut lookups = Lookups::new(header.layer_sizes());
        let mut open: Vec<ExpertIndex> = Vec::new();
        let most = header.layers.iter().map(|layer| layer.experts).max().unwrap_or(0);
        let mut seen = vec![false; most as usize];
        for (source, batch) in trace.batches().enumerate() {
            for layer in 0..header.layers.len() {
                open.clear();
                // Tokens are visited last to first, so the first occurrence of an expert is its last use.
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

    /// Returns `(experts, bytes of one expert)` of each layer.
    pub fn layers(&self) -> &[(u32, u64)] {
        &self.layers
    }

    /// Appends a batch of `tokens` tokens. The experts must be distinct, with the one used last at the end.
    ///
    /// # Panics
    /// Panics if there is no such layer, or the layer has no such expert.
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

    /// Returns phase, layer and experts of every batch.
    pub fn batches(&self) -> impl Iterator<Item = (Phase, LayerIndex, &[ExpertIndex])> {
        let starts = std::iter::once(0).chain(self.batches.iter().map(|batch| batch.end));
        let experts = &self.experts;
        self.batches
            .iter()
            .zip(starts)
            .map(move |(batch, start)| (batch.phase, batch.layer, &experts[start..batch.end]))
    }

    /// Returns the number of tokens of every batch.
    pub fn tokens(&self) -> impl Iterator<Item = usize> {
        self.batches.iter().map(|batch| batch.tokens as usize)
    }

    /// Returns, for every batch, the index of its batch in the recording ([`RoutingTrace::batch`]).
    pub fn sources(&self) -> impl Iterator<Item = usize> {
        self.batches.iter().map(|batch| batch.source as usize)
    }

    /// Returns the number of lookups.
    pub fn len(&self) -> usize {
        self.experts.len()
    }

    /// Returns true if there are no lookups.
    pub fn is_empty(&self) -> bool {
        self.experts.is_empty()
    }

    /// Returns the bytes T of one token's experts in all layers: the largest sum of any generated token, from one visit
    /// of the first layer to the next. A global LRU cache that is smaller than T by one layer's batch never hits during
    /// generation. Returns 0 if there are no generated tokens.
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

    /// Returns the bytes of all experts.
    pub fn total_bytes(&self) -> u64 {
        let of = |&(experts, bytes): &(u32, u64)| u64::from(experts).saturating_mul(bytes);
        self.layers.iter().map(of).fold(0, u64::saturating_add)
    }
}
