//! The interface between the decoder and the device that computes.
//!
//! The decoder drives a backend step by step and never sees numbers. The backend holds the residual stream, the pools of
//! key/value blocks, the tables of the sequences, and its weights. The decoder calls the steps of a layer in the order of the methods below. The residual stream is
//! complete after [`Backend::norm`] with `add`, so another backend could continue from there.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod largest_context;
mod recorded;
mod selector;

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use forebay_ops::RowKind;
use forebay_stream::{LayerUses, MemoryPlan, Residency};

pub use self::largest_context::largest_context;
pub use self::selector::{CHANGES_MAX, RowSelection, Selector};
use crate::ModelError;
use crate::arch::{Architecture, Attention, Experts, FeedForward, Mixer, NormLayout};
use crate::sharing::SubLayerPlan;
use crate::statistics::{DeviceExperts, DeviceSubLayers, VramUse};
use crate::weights::{LayerWeights, ResidualGate, Weights};
pub use recorded::{record_routing, record_rows};

/// Experts chosen by the caller instead of the routers. Benchmarks use it for models with random weights, whose routers
/// are untrained.
pub trait ChosenExperts: Send {
    /// Begins a pass with the rows of `runs`.
    fn begin(&mut self, runs: &[Run]);

    /// Returns the experts of the pass's rows in a layer, `[rows, k]`. All are valid experts of that layer.
    fn experts(&self, layer: usize) -> &[u32];
}

/// Consecutive rows of one sequence in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Number of the sequence's tables in the backend ([`Backend::set_block`]).
    pub table: usize,
    pub kind: RowKind,
    /// Position of the first row.
    pub position: usize,
    pub count: usize,
}

/// Places of the states of a run in a backend, in states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatePlaces {
    /// The state before the run's first row. `None` means that the sequence begins.
    pub from: Option<usize>,
    /// The state after the run's last row.
    pub to: usize,
}

/// A pass on its way through one layer.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    pub architecture: &'a Architecture,
    pub weights: &'a Weights,
    /// Index of the layer. The number of layers means the steps after the last layer.
    pub layer: usize,
    /// The rows of the pass. All decode rows come before all prompt rows.
    pub runs: &'a [Run],
    /// Where the states of the runs are in recurrent layers; empty if the model has none.
    pub states: &'a [StatePlaces],
    /// Number of rows.
    pub count: usize,
    /// Number of decode rows, which are the first.
    pub decode: usize,
    /// Rows whose logits are wanted, ascending.
    pub outputs: &'a [u32],
    /// Experts `[rows, k]` that replace the router's choice in this layer.
    pub chosen: Option<&'a [u32]>,
}

impl<'a> Step<'a> {
    /// Returns the shape of this layer's attention.
    pub fn attention(&self) -> &'a Attention {
        self.architecture.attention_of(self.layer)
    }

    pub fn layer_weights(&self) -> &'a LayerWeights {
        &self.weights.layers[self.layer]
    }

    /// Returns the description of this layer's experts.
    ///
    /// # Panics
    /// Panics if the layer has no experts.
    pub fn experts(&self) -> &'a Experts {
        match &self.architecture.layers[self.layer].feed_forward {
            FeedForward::Experts(experts) => experts,
            FeedForward::None | FeedForward::Dense { .. } => {
                unreachable!("the caller looked at the weights")
            }
        }
    }

    /// Returns what is subtracted from the gates of this layer's dense feed-forward, in standard deviations above their mean, if they
    /// are sparse.
    pub fn cut(&self) -> Option<f32> {
        self.architecture.layers[self.layer].cut()
    }

    /// Returns true if the layer has attention or is recurrent.
    pub fn has_mixer(&self) -> bool {
        self.architecture.layers[self.layer].mixer != Mixer::None
    }

    pub fn has_feed_forward(&self) -> bool {
        !self.architecture.layers[self.layer].feed_forward.is_none()
    }

    /// Returns true if the block is the first of its layer, so that [`Backend::norm`] adds the last output of the layer before.
    pub fn is_first(&self, block: NextBlock) -> bool {
        match block {
            NextBlock::NGrams | NextBlock::Attention | NextBlock::Head => true,
            NextBlock::FeedForward => !self.has_mixer(),
            NextBlock::Embeddings => false,
        }
    }

    /// Returns true if the block takes the residual stream as it was before the layer: the feed-forward of a parallel block.
    pub fn takes_layer_input(&self, block: NextBlock) -> bool {
        block == NextBlock::FeedForward && self.has_parallel_blocks()
    }

    /// Returns true if attention and feed-forward of a layer take the same input.
    pub fn has_parallel_blocks(&self) -> bool {
        self.architecture.norms == NormLayout::Parallel
    }

    /// Returns the layer whose output [`Backend::norm`] adds, and true if the layer's attention or recurrence gave it, or is the
    /// layer's only block.
    pub fn added(&self, block: NextBlock) -> (usize, bool) {
        let has_no_feed_forward =
            |layer: usize| self.architecture.layers[layer].feed_forward.is_none();
        match self.is_first(block) {
            true => {
                let layer = self.layer.saturating_sub(1);
                (layer, has_no_feed_forward(layer))
            }
            false => {
                (self.layer, block == NextBlock::FeedForward || has_no_feed_forward(self.layer))
            }
        }
    }

    /// Returns the norm of the output that [`Backend::norm`] adds for the next block, and the factor of the sum.
    pub fn added_norm(&self, block: NextBlock) -> (Option<&'a [f32]>, f32) {
        let (layer, is_mixer) = self.added(block);
        let layer = &self.weights.layers[layer];
        let of_block = match is_mixer {
            true => layer.attention_post_norm.as_deref(),
            false => layer.feed_forward_post_norm.as_deref(),
        };
        match (self.is_first(block), &layer.embeddings) {
            (false, _) => (of_block, 1.0),
            (true, Some(of)) => (Some(&of.post_norm), layer.scale),
            (true, None) => (of_block, layer.scale),
        }
    }

    /// Returns true if the states of tokens after the last layer are kept as they are before the last norm.
    pub fn keeps_raw_states(&self) -> bool {
        self.architecture.mtp.is_some_and(|mtp| mtp.raw_states)
    }

    /// Returns the gates of the output that [`Backend::norm`] adds for the next block, if the model has such.
    pub fn added_gate(&self, block: NextBlock) -> Option<&'a ResidualGate> {
        let (layer, is_mixer) = self.added(block);
        let layer = &self.weights.layers[layer];
        if is_mixer { layer.attention_gate.as_ref() } else { layer.feed_forward_gate.as_ref() }
    }

    /// Returns the number of residual streams that hold something before a block of a layer ([`crate::arch::Streams::filled`]).
    pub fn filled_streams(&self, layer: usize, after_mixer: bool) -> usize {
        self.architecture.streams.map_or(1, |streams| streams.filled(layer, after_mixer))
    }

    /// Returns the stream to which the state moves when [`Backend::norm`] adds the last output for the next block, if it moves.
    pub fn banked_stream(&self, block: NextBlock) -> Option<usize> {
        let (layer, is_mixer) = self.added(block);
        self.architecture.streams?.banked(layer).filter(|_| is_mixer)
    }

    /// Returns the kind of the rows of a pass whose rows are all of one kind.
    pub fn kind(&self) -> RowKind {
        if self.decode > 0 { RowKind::Decode } else { RowKind::Prompt }
    }

    /// Returns the position of a row in its sequence.
    ///
    /// # Panics
    /// Panics if there is no such row.
    pub fn position_of(&self, row: usize) -> usize {
        let mut first = 0;
        for run in self.runs {
            if row < first + run.count {
                return run.position + row - first;
            }
            first += run.count;
        }
        panic!("row {row} of {}", self.count);
    }
}

/// The input of a pass and the outputs that the decoder will ask for.
#[derive(Clone, Copy)]
pub struct Batch<'a> {
    /// Tokens of all rows.
    pub tokens: &'a [u32],
    /// The last tokens before each run, as many as n-grams have before their last one; empty without n-grams.
    pub tokens_before: &'a [u32],
    /// The first layer that the decoder will ask for. It is 0, or the layer before which [`Backend::pause`] was called.
    pub first_layer: usize,
    pub end: End,
    /// True if the decoder will ask [`Backend::route`] and [`Backend::recorded_routing`] for the chosen experts.
    pub routing: bool,
    /// Experts that replace the routers' choice.
    pub chosen: Option<&'a dyn ChosenExperts>,
    /// True if the decoder will call [`Backend::early_scores`]. The backend must support it.
    pub scores: bool,
}

/// A KV block of a layer group with its content, as [`Backend::save_block`] returns it.
pub struct BlockContent<'a> {
    pub group: usize,
    pub block: u32,
    /// Memory with the content, and where it is there.
    pub memory: &'a dyn HostMemory,
    pub range: Range<usize>,
}

impl<'a> BlockContent<'a> {
    /// Returns the content.
    pub fn bytes(&self) -> &'a [u8] {
        &self.memory.as_ref()[self.range.clone()]
    }
}

/// Number of copies that [`Backend::restore_blocks`] began. Those that began earlier have lower numbers. The default is that of
/// copies that have ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Restoring(pub u64);

/// A group of layers with the same attention window and shape of attention, and its pool of KV blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvGroup {
    /// Number of positions that a token sees: itself and the ones before it. `None` means all.
    pub window: Option<usize>,
    /// Number of blocks in the pool. Block 0 is never used and stands for "no block".
    pub blocks: usize,
    /// Number of those that are in the device's own memory, which come first. Others are read over PCIe.
    pub on_device: usize,
    /// Number of bytes of a block: [`forebay_ops::KV_BLOCK`] positions of all layers of the group.
    pub block_bytes: u64,
}

/// Host memory for copies of KV blocks. Calls that ask to change it wait until no device reads it.
pub trait HostMemory: AsRef<[u8]> + AsMut<[u8]> + Send {
    fn as_any(&self) -> &dyn Any;
}

impl<T: AsRef<[u8]> + AsMut<[u8]> + Send + Any> HostMemory for T {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Reserves host memory of so many bytes, all 0, to and from which a device copies at its full rate. Any thread may call it.
pub type HostReserver = Arc<dyn Fn(usize) -> Result<Box<dyn HostMemory>, ModelError> + Send + Sync>;

/// The call that ends a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// [`Backend::end`]: no logits.
    Nothing,
    /// [`Backend::head`]: all logits of the rows in [`Step::outputs`].
    Logits,
    /// [`Backend::largest`] with this count, for the rows in [`Step::outputs`].
    Largest(usize),
    /// [`Backend::select`], for the rows in [`Step::outputs`].
    Selected,
}

/// The steps that the decoder must run after [`Backend::begin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    /// All steps of all layers, then the head or the end.
    Layers,
    /// Only the end. The backend replays the other steps from a CUDA graph.
    Recorded,
}

/// The block whose input a norm prepares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextBlock {
    Attention,
    FeedForward,
    /// The embeddings of n-grams that the layer adds before its attention. It takes the residual streams themselves, without a norm.
    NGrams,
    /// The layer's use of the tokens' embeddings for it. It takes the residual stream itself, without a norm.
    Embeddings,
    Head,
}

/// Description of a backend, for statistics.
#[derive(Debug, Clone)]
pub struct ComputeInfo {
    /// Number of host threads that compute.
    pub threads: usize,
    /// Kernel family, for example an instruction set.
    pub isa: String,
    /// The device and its arithmetic, in words.
    pub description: String,
    /// What the bits of results depend on, in words. It does not have the number of threads, which changes no bit.
    pub arithmetic: String,
    /// Use of device memory, for devices with their own memory.
    pub vram: Option<VramUse>,
}

/// A device that runs the steps of a decoder.
pub trait Backend: Send {
    fn info(&self) -> ComputeInfo;

    /// Returns the largest number of rows in a pass.
    fn batch_tokens(&self) -> usize;

    /// Returns the largest number of decode rows in a pass, which is also the largest number of prompts.
    fn decode_rows(&self) -> usize;

    /// Returns true if a pass may have rows of both kinds.
    fn mixes_rows(&self) -> bool;

    /// Returns the number of sequences that can have tables at a time.
    fn tables(&self) -> usize;

    /// Returns the number of positions that one sequence can have.
    fn context(&self) -> usize;

    /// Returns the number of bytes reserved for keys and values, and for the states of recurrent layers.
    fn cache_bytes(&self) -> u64;

    /// Returns the groups of layers and their pools of KV blocks, in the order of [`Architecture::kv_groups`].
    fn kv_groups(&self) -> Vec<KvGroup>;

    /// Makes `block` hold the positions from `index * KV_BLOCK` on of the sequence with number `table`, for the layers of `group`. 0
    /// means that no row of the next passes sees these positions.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn set_block(
        &mut self,
        table: usize,
        group: usize,
        index: usize,
        block: u32,
    ) -> Result<(), ModelError>;

    /// Copies the content of a KV block to another of the same group.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn copy_block(&mut self, group: usize, from: u32, to: u32) -> Result<(), ModelError>;

    /// Returns what reserves host memory for copies of KV blocks.
    fn host_reserver(&self) -> HostReserver {
        Arc::new(|bytes| Ok(Box::new(vec![0_u8; bytes])))
    }

    /// Copies the content of a KV block to `bytes`, and waits for it.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    ///
    /// # Panics
    /// Panics if `bytes` is not [`KvGroup::block_bytes`] long.
    fn save_block(&mut self, group: usize, block: u32, bytes: &mut [u8]) -> Result<(), ModelError>;

    /// Returns the bytes of a state of the recurrent layers; 0 if the model has none.
    fn state_bytes(&self) -> usize {
        0
    }

    /// Copies the state in a place ([`StatePlaces`]) to `bytes`, and waits for it.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    ///
    /// # Panics
    /// Panics if `bytes` is not [`Backend::state_bytes`] long, or if there is no such place.
    fn save_state(&mut self, place: usize, bytes: &mut [u8]) -> Result<(), ModelError> {
        panic!("{} bytes of state {place} of a model without states", bytes.len());
    }

    /// Replaces the state in a place by what [`Backend::save_state`] returned.
    ///
    /// # Errors
    /// Returns an error if the device fails. The place has no defined content then.
    ///
    /// # Panics
    /// Panics as [`Backend::save_state`] does.
    fn restore_state(&mut self, place: usize, bytes: &[u8]) -> Result<(), ModelError> {
        panic!("{} bytes for state {place} of a model without states", bytes.len());
    }

    /// Begins to replace the content of KV blocks by what [`Backend::save_block`] returned. Until [`Backend::has_restored`],
    /// nothing else may use the blocks.
    ///
    /// # Errors
    /// Returns an error if the device fails. Any of the blocks may have been replaced then, and no copy is under way.
    ///
    /// # Panics
    /// Panics if a block's content is not [`KvGroup::block_bytes`] long.
    fn restore_blocks<'a>(
        &mut self,
        blocks: &mut dyn Iterator<Item = BlockContent<'a>>,
    ) -> Result<Restoring, ModelError>;

    /// Returns true if these copies and all that began before have ended. Waits for them if `waits`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn has_restored(&mut self, _restoring: Restoring, _waits: bool) -> Result<bool, ModelError> {
        Ok(true)
    }

    /// Returns the residency of blocks in host memory, if the backend streams weights through it.
    fn residency(&self) -> Option<&Residency>;

    fn residency_mut(&mut self) -> Option<&mut Residency>;

    /// Returns the plan of expert slots on a device that holds part of the experts.
    fn slots(&self) -> Option<&MemoryPlan> {
        None
    }

    /// Returns expert statistics of a device that holds part of the experts.
    fn device_experts(&self) -> Option<DeviceExperts> {
        None
    }

    /// Returns the uses of all experts of a device that holds part of them, by layer.
    fn expert_uses(&self) -> Vec<LayerUses> {
        Vec::new()
    }

    /// Returns the placement of a dense model's sub-layers on a device that holds part of them.
    fn sub_layers(&self) -> Option<&SubLayerPlan> {
        None
    }

    /// Returns sub-layer statistics of a device that holds part of them.
    fn device_sub_layers(&self) -> Option<DeviceSubLayers> {
        None
    }

    /// Returns true if passes can pause, so that other passes run between two layers of a pass ([`Backend::pause`]).
    fn pauses(&self) -> bool {
        false
    }

    /// Writes the embeddings of the batch's tokens into the residual stream, or restores the stream of the pass that
    /// paused before [`Batch::first_layer`].
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    fn begin(&mut self, step: &Step<'_>, batch: &Batch<'_>) -> Result<Begun, ModelError>;

    /// Makes the layer's dense block available.
    ///
    /// # Errors
    /// Returns an error if the read fails.
    fn enter_layer(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// Normalises the residual stream as the input of `block`, which is not the head. With `add`, first adds the output
    /// of the previous block to the stream and checks that all values are finite.
    ///
    /// # Errors
    /// Returns an error if the device fails or values are not finite. A backend may report non-finite values later, from
    /// [`Backend::head`] or [`Backend::end`].
    fn norm(&mut self, step: &Step<'_>, block: NextBlock, add: bool) -> Result<(), ModelError>;

    /// Computes queries, keys and values of the normalised input: products, biases, head norms, rotary embedding. Writes
    /// keys and values to the cache. In a recurrent layer, computes the products of the normalised input.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    fn project(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// Computes attention of the queries over the cache. A recurrent layer reads the states of [`Step::states`] and writes
    /// them.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn attend(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// Computes the output projection of attention, or of a recurrent layer.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    fn project_output(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// Computes a dense feed-forward block.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    fn dense_feed_forward(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// Returns true if the backend supports [`Backend::early_scores`].
    fn gives_early_scores(&self) -> bool {
        false
    }

    /// Computes early scores: the scores that this layer's router gives to each token's state one layer earlier. That
    /// state is the one between attention and feed-forward of the previous layer, or the embedding for the first layer.
    /// A predictor can use these scores while the previous layer still computes. Writes raw router scores as rows
    /// `[tokens, experts of all layers]`.
    ///
    /// # Errors
    /// Returns an error if scores are not finite, or a read or the device fails.
    ///
    /// # Panics
    /// Panics if the backend does not support it, or if the batch began without `scores`.
    fn early_scores(&mut self, step: &Step<'_>, scores: &mut [f32]) -> Result<(), ModelError> {
        let _ = (step, scores);
        panic!("scores of a backend that does not give them");
    }

    /// Chooses experts for every token. Experts from [`Step::chosen`] get the router's weights. Writes the choice to
    /// `routing`, if given, as rows `[tokens, layers, k]`, now or in [`Backend::recorded_routing`].
    ///
    /// # Errors
    /// Returns an error if scores are not finite, or a read or the device fails.
    fn route(&mut self, step: &Step<'_>, routing: Option<&mut [i32]>) -> Result<(), ModelError>;

    /// Writes the experts of a single token that a CUDA graph computed, as rows `[1, layers, k]`. The decoder calls it
    /// after the end of every batch with [`Batch::routing`].
    fn recorded_routing(&self, step: &Step<'_>, routing: &mut [i32]) {
        let _ = (step, routing);
    }

    /// Returns true if the backend supports [`Backend::routing_weights`].
    fn gives_routing_weights(&self) -> bool {
        false
    }

    /// Writes the weights of the experts that [`Backend::route`] chose last, as rows `[tokens, layers, k]`.
    fn routing_weights(&self, step: &Step<'_>, weights: &mut [f32]) {
        let _ = (step, weights);
    }

    /// Computes the feed-forward block: the weighted sum of the chosen experts' outputs.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    fn experts(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// Adds the feed-forward's output, and computes what the tokens' embeddings for the layer add. Only layers with
    /// [`LayerWeights::embeddings`] have this step, behind the feed-forward.
    ///
    /// # Errors
    /// Returns an error if values are not finite, or a read or the device fails.
    fn layer_embeddings(&mut self, step: &Step<'_>) -> Result<(), ModelError>;

    /// Adds the last block's output to the residual streams if `add` is set, then what the layer makes of the n-grams that end at
    /// each token. Only layers with [`LayerWeights::ngrams`] have this step, before all others.
    ///
    /// # Errors
    /// Returns an error if values are not finite, or a read or the device fails.
    fn add_ngrams(&mut self, step: &Step<'_>, add: bool) -> Result<(), ModelError>;

    /// Returns true if the backend can run the predicting layer.
    fn predicts(&self) -> bool {
        false
    }

    /// Begins a pass through the predicting layer alone: joins the embeddings of the batch's tokens with `hidden`, and writes that into
    /// the residual stream. `hidden` has for each row the state of the token before it, as [`Backend::final_rows`] returned it. The
    /// steps of the layer and the head or the end follow. Such a pass never pauses, and its rows are all of one kind.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    ///
    /// # Panics
    /// Panics if the backend cannot do so ([`Backend::predicts`]).
    fn begin_prediction(
        &mut self,
        step: &Step<'_>,
        batch: &Batch<'_>,
        hidden: &[f32],
    ) -> Result<(), ModelError> {
        let _ = (batch, hidden);
        panic!("a backend without a predicting layer {}", step.layer);
    }

    /// Adds the last block's output, normalises the rows in [`Step::outputs`], and appends their logits.
    ///
    /// # Errors
    /// Returns an error if values are not finite, or a read or the device fails.
    fn head(&mut self, step: &Step<'_>, logits: &mut Vec<f32>) -> Result<(), ModelError>;

    /// Returns true if the session's interrupt ended steps early since the last call. Their results are then invalid.
    fn was_cut_short(&self) -> bool {
        false
    }

    /// Returns the largest count that [`Backend::largest`] supports; 0 if it is not supported.
    fn largest_count(&self) -> usize {
        0
    }

    /// Appends the `count` largest logits of every row in [`Step::outputs`], with their ids, in descending order. Equal
    /// logits are sorted by id.
    ///
    /// # Errors
    /// Returns the errors of [`Backend::head`].
    ///
    /// # Panics
    /// Panics if `count` is 0 or larger than [`Backend::largest_count`].
    fn largest(
        &mut self,
        step: &Step<'_>,
        count: usize,
        largest: &mut Vec<(f32, u32)>,
    ) -> Result<(), ModelError> {
        let _ = (step, largest);
        panic!("{count} of the largest logits of a backend that gives all");
    }

    /// Gives `selector` what it wants of the logits of every row in [`Step::outputs`], at most [`Backend::largest_count`] of
    /// each. The selector is asked once the work of the pass is queued.
    ///
    /// # Errors
    /// Returns the errors of [`Backend::head`].
    ///
    /// # Panics
    /// Panics if the backend does not support [`Backend::largest`], or if a row has more than [`CHANGES_MAX`] changes.
    fn select(&mut self, step: &Step<'_>, selector: &mut dyn Selector) -> Result<(), ModelError> {
        let _ = selector;
        panic!("a selection of {} rows by a backend that gives all logits", step.outputs.len());
    }

    /// Appends the residual stream after the last layer, `[rows, hidden]`, of rows of the pass that has just ended. It is normed as for
    /// the logits, if the model's predicting layer does not take it as it is ([`Step::keeps_raw_states`]). If it does, the rows are
    /// `[rows, streams, hidden]`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    fn final_rows(
        &mut self,
        step: &Step<'_>,
        rows: Range<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), ModelError>;

    /// Pauses a pass before the layer [`Step::layer`]: completes the residual stream and keeps a copy of it. The next call of
    /// [`Backend::begin`] may begin another pass. One pass can be paused at a time.
    ///
    /// # Errors
    /// Returns an error if values are not finite or the device fails.
    ///
    /// # Panics
    /// Panics if passes cannot pause.
    fn pause(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        panic!("a backend that cannot pause before layer {}", step.layer);
    }

    /// Ends a batch that needs no logits.
    ///
    /// # Errors
    /// Returns an error if values are not finite or the device fails.
    fn end(&mut self, step: &Step<'_>) -> Result<(), ModelError>;
}
