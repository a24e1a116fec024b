//! What the decoder asks of the device that computes.
//!
//! The decoder drives a backend step by step and never sees numbers: a backend holds the residual stream, the
//! key/value cache and the weights it computes with, wherever they are. Steps of a layer come in the order of the
//! methods below. The residual stream is complete after [`Backend::norm`] with `add`, so that a block is a place where
//! another backend could go on.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

use forebay_stream::{MemoryPlan, Residency};

use crate::ModelError;
use crate::arch::{Architecture, Experts, FeedForward};
use crate::sharing::SubLayerPlan;
use crate::statistics::{DeviceExperts, DeviceSubLayers, VramUse};
use crate::weights::{LayerWeights, Weights};

/// Experts chosen by the caller instead of the routers: for measurements of models whose routers know
/// nothing.
pub trait ChosenExperts {
    /// Begins a batch of so many tokens.
    fn begin(&mut self, tokens: usize);

    /// The experts of the batch's tokens in a layer, `[tokens, k]`, all of them the layer's.
    fn experts(&self, layer: usize) -> &[u32];
}

/// A batch of tokens on its way through one layer.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    pub architecture: &'a Architecture,
    pub weights: &'a Weights,
    /// The number of layers stands for what comes after the last.
    pub layer: usize,
    /// Position of the batch's first token.
    pub position: usize,
    /// Tokens in the batch.
    pub count: usize,
    /// Experts `[tokens, k]` that the layer's tokens are to have instead of those that the router chooses.
    pub chosen: Option<&'a [u32]>,
}

impl<'a> Step<'a> {
    pub fn layer_weights(&self) -> &'a LayerWeights {
        &self.weights.layers[self.layer]
    }

    /// The description of this layer's experts.
    ///
    /// # Panics
    /// When the layer has none: weights with experts come from a description with experts.
    pub fn experts(&self) -> &'a Experts {
        match &self.architecture.layers[self.layer].feed_forward {
            FeedForward::Experts(experts) => experts,
            FeedForward::Dense { .. } => unreachable!("the caller looked at the weights"),
        }
    }

    /// The layer whose output [`Backend::norm`] adds.
    pub fn added_layer(&self, block: NextBlock) -> usize {
        match block {
            NextBlock::FeedForward => self.layer,
            NextBlock::Attention | NextBlock::Head => self.layer.saturating_sub(1),
        }
    }
}

/// What comes in with a batch, and what is wanted of it.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    pub tokens: &'a [u32],
    pub end: End,
    /// Whether [`Backend::route`] and [`Backend::recorded_routing`] will be asked for the experts.
    pub routing: bool,
    /// Who says which experts the tokens have, if not the routers do.
    pub chosen: Option<&'a dyn ChosenExperts>,
    /// Whether [`Backend::early_scores`] will be asked; only of a backend that gives them.
    pub scores: bool,
}

/// How a batch ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// With [`Backend::end`].
    Nothing,
    /// With [`Backend::head`].
    Logits,
    /// With [`Backend::largest`] of so many.
    Largest(usize),
}

/// What has to follow after [`Backend::begin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    /// All steps of all layers, then the head or the end.
    Layers,
    /// The end alone: the backend knows the other steps from an earlier batch and does them there.
    Recorded,
}

/// What a norm prepares the input of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextBlock {
    Attention,
    FeedForward,
    Head,
}

/// How a backend computes, for statistics.
#[derive(Debug, Clone)]
pub struct ComputeInfo {
    /// Host threads that compute.
    pub threads: usize,
    /// The kernel family.
    pub isa: String,
    /// The device and its arithmetic, in words.
    pub description: String,
    /// Device memory, where it is not the host's.
    pub vram: Option<VramUse>,
}

/// A device that runs the steps of a decoder.
pub trait Backend {
    fn info(&self) -> ComputeInfo;

    /// Most tokens of a batch.
    fn batch_tokens(&self) -> usize;

    /// Positions that the key/value cache can hold.
    fn context(&self) -> usize;

    /// Bytes reserved for keys and values.
    fn cache_bytes(&self) -> u64;

    /// Forgets keys and values from `position` on, or all of them where a layer with a window has given up what a token
    /// there would see. The position to go on from: `position` or 0.
    fn truncate(&mut self, position: usize) -> usize;

    /// The blocks in host memory that it computes with, if it does.
    fn residency(&self) -> Option<&Residency>;

    fn residency_mut(&mut self) -> Option<&mut Residency>;

    /// The slots of a device that does not hold all experts.
    fn slots(&self) -> Option<&MemoryPlan> {
        None
    }

    /// What experts did on a device that does not hold all of them.
    fn device_experts(&self) -> Option<DeviceExperts> {
        None
    }

    /// Where the units of a dense model are, on a device that does not hold all of them.
    fn sub_layers(&self) -> Option<&SubLayerPlan> {
        None
    }

    /// What moved there.
    fn device_sub_layers(&self) -> Option<DeviceSubLayers> {
        None
    }

    /// Makes the embedding of the batch's tokens the residual stream.
    ///
    /// # Errors
    /// A failed read or device.
    fn begin(&mut self, step: &Step<'_>, batch: &Batch<'_>) -> Result<Begun, ModelError>;

    /// Gets the layer's dense block.
    ///
    /// # Errors
    /// A failed read.
    fn enter_layer(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// With `add`, adds the last block's output to the residual stream and looks for values that are not finite; then
    /// norms the stream as input of `block`, which is not the head.
    ///
    /// # Errors
    /// Values that are not finite, now or in [`Backend::head`] or [`Backend::end`], or a failed device.
    fn norm(&mut self, step: &Step<'_>, block: NextBlock, add: bool) -> Result<(), ModelError>;

    /// Queries, keys and values of the normed input: products, biases, norms of heads, rotation; keys and values go into
    /// the cache.
    ///
    /// # Errors
    /// A failed read or device.
    fn project(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// Attention of the queries over the cache.
    ///
    /// # Errors
    /// A failed device.
    fn attend(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// The attention block's output.
    ///
    /// # Errors
    /// A failed read or device.
    fn project_output(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// A dense feed-forward block's output.
    ///
    /// # Errors
    /// A failed read or device.
    fn dense_feed_forward(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// Whether [`Backend::early_scores`] can be asked.
    fn gives_early_scores(&self) -> bool {
        false
    }

    /// What this layer's router says of every token's state one layer earlier: after that layer's attention and before
    /// its feed-forward, or in the first layer of the embedding. That state is what a prediction of this layer's experts can
    /// be made from while the layer before still computes. Rows `[tokens, experts of all layers]` of scores as the
    /// router's product gives them.
    ///
    /// # Errors
    /// Scores that are not finite, a failed read or device.
    ///
    /// # Panics
    /// When the backend does not give them, or the batch began without `scores`.
    fn early_scores(&mut self, step: &Step<'_>, scores: &mut [f32]) -> Result<(), ModelError> {
        let _ = (step, scores);
        panic!("scores of a backend that does not give them");
    }

    /// Chooses experts for every token, with the router's weights for those that [`Step::chosen`] names; `routing`, if
    /// given, gets them as rows `[tokens, layers, k]`, now or from [`Backend::recorded_routing`].
    ///
    /// # Errors
    /// Scores that are not finite, a failed read or device.
    fn route(&mut self, step: &Step<'_>, routing: Option<&mut [i32]>) -> Result<(), ModelError>;

    /// The experts of a single token that the backend has recorded and only done when the batch ended, as rows
    /// `[1, layers, k]`. Asked after the end of every batch with [`Batch::routing`].
    fn recorded_routing(&self, step: &Step<'_>, routing: &mut [i32]) {
        let _ = (step, routing);
    }

    /// Whether [`Backend::routing_weights`] has something to say.
    fn gives_routing_weights(&self) -> bool {
        false
    }

    /// The weights of the experts that [`Backend::route`] chose last, as rows `[tokens, layers, k]`.
    fn routing_weights(&self, step: &Step<'_>, weights: &mut [f32]) {
        let _ = (step, weights);
    }

    /// The chosen experts' outputs, weighted and added up: the feed-forward block's output.
    ///
    /// # Errors
    /// A failed read or device.
    fn experts(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// Adds the last block's output, norms rows `first ..` of the batch, and appends their logits.
    ///
    /// # Errors
    /// Values that are not finite, a failed read or device.
    fn head(
        &mut self,
        step: &Step<'_>,
        first: usize,
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError>;

    /// Whether steps since the last call ended early because of the session's interrupt. What they computed must not be
    /// used then.
    fn was_cut_short(&self) -> bool {
        false
    }

    /// How many of the largest logits [`Backend::largest`] can give; 0: it cannot.
    fn largest_count(&self) -> usize {
        0
    }

    /// As [`Backend::head`] for the batch's last row, but gives only the `count` largest logits with their ids, largest
    /// first, of equals the lower id first.
    ///
    /// # Errors
    /// As [`Backend::head`].
    ///
    /// # Panics
    /// When `count` is 0 or more than [`Backend::largest_count`].
    fn largest(
        &mut self,
        step: &Step<'_>,
        count: usize,
        largest: &mut Vec<(f32, u32)>,
    ) -> Result<(), ModelError> {
        let _ = (step, largest);
        panic!("{count} of the largest logits of a backend that gives all");
    }

    /// Ends a batch that needs no logits.
    ///
    /// # Errors
    /// Values that are not finite, a failed device.
    fn end(&mut self, step: &Step<'_>) -> Result<(), ModelError>;
}

/// Writes the experts `ids` `[tokens, k]` of layer `layer` into rows `[tokens, layers, k]`.
pub fn record_routing(ids: &[u32], routing: &mut [i32], layer: usize, layers: usize, count: usize) {
    record_rows(ids, |id| id as i32, routing, layer, layers, count);
}

/// Writes values `[tokens, k]` of layer `layer` into rows `[tokens, layers, k]`.
pub fn record_rows<T: Copy, R>(
    values: &[T],
    write: impl Fn(T) -> R,
    rows: &mut [R],
    layer: usize,
    layers: usize,
    count: usize,
) {
    let k = rows.len() / (count * layers);
    let used = values.len() / count;
    for (values, row) in values.chunks_exact(used).zip(rows.chunks_exact_mut(layers * k)) {
        for (place, value) in row[layer * k..(layer + 1) * k].iter_mut().zip(values) {
            *place = write(*value);
        }
    }
}

/// The most positions below `context` of which `fits` says so; a context that fits is no larger than one that does not.
pub fn largest_context(context: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    // None fits, or the largest found so far does; `beyond` does not.
    let (mut largest, mut beyond) = (0, context);
    while beyond > largest + 1 {
        let middle = largest.midpoint(beyond);
        if fits(middle) {
            largest = middle;
        } else {
            beyond = middle;
        }
    }
    (largest > 0).then_some(largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_context_is_found() {
        for context in [1, 2, 3, 100, 131_072] {
            for most in [0, 1, 2, 57, 99, 131_071].into_iter().filter(|most| *most < context) {
                let expected = (most > 0).then_some(most);
                assert_eq!(largest_context(context, |tried| tried <= most), expected, "{context}");
            }
        }
    }
}
