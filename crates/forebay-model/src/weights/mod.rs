//! Turns a catalog into what the decoder needs: the bytes of each block, and the small vectors that stay in memory.
//!
//! Matrices are not read here. They are described as parts of blocks, which the residency reads. If a file holds a
//! matrix in another form than products need, the block has a relayout (`relayout.rs`, `quantized.rs`). Norm weights and biases are
//! read at once, because they are small and every token needs them.

mod delta;
mod ends;
mod indexer;
mod layer;
mod mtp;
mod ngrams;
mod norms;
mod outputs;
mod parts;
mod quantized;
mod relayout;
mod shared_keys;
mod streams;
mod tensors;
mod token_experts;

use forebay_compute::NormForm;
use forebay_format::{Catalog, Extent, TensorType};
use forebay_store::FileSet;
use forebay_stream::ModelBlocks;

use crate::ModelError;
use crate::arch::{
    Architecture, EmbeddingNorm, LONG_FACTORS, Names, NormLayout, RopeFactors, SHORT_FACTORS,
    by_name,
};
pub use ends::Embedding;
use ends::{embedding, head, head_bias};
use layer::LayerBuilder;
pub use mtp::MtpWeights;
pub use parts::{
    AttentionWeights, CompressorWeights, DeltaParts, DeltaWeights, DenseBiases,
    EntryIndexerWeights, EntryWeights, ExpertNorms, ExpertVectors, FeedForwardWeights,
    GroupedWeights, HeadChunk, HeadMatrices, IndexerWeights, LatentWeights, LayerEmbeddingWeights,
    LayerWeights, NGramWeights, PartMatrix, PredictedWeights, RecurrenceBeside, RelativeWeights,
    ResidentMatrix, ResidualGate, SelectiveWeights, SharedKeyWeights, StreamWeights, TokenExperts,
    distinct,
};
use tensors::Tensors;

/// Description of all weights, for the decoder.
#[derive(Debug)]
pub struct Weights {
    pub layers: Vec<LayerWeights>,
    /// Norm before the output projection, unless collapsing the residual streams norms them.
    pub final_norm: Option<Vec<f32>>,
    /// Projections of the usual embeddings to the other residual streams, if those are no copies.
    pub streams_begin: Vec<ResidentMatrix>,
    /// Weights that collapse the residual streams behind the last layer, if there are several.
    pub streams_end: Option<StreamWeights<ResidentMatrix>>,
    pub head: Vec<HeadChunk>,
    /// Bias of the logits `[vocabulary]`, if the model has one.
    pub head_bias: Option<Vec<f32>>,
    pub embedding: Embedding,
    /// Weights of the norm of embeddings, if they are normed.
    pub embedding_norm: Option<Vec<f32>>,
    /// Table of the tokens' embeddings for all layers, one after the other in each row, if the model has such embeddings.
    pub layer_embeddings: Option<Embedding>,
    /// Divisors of the rotary frequencies for each pair of dimensions, if the file has them.
    pub rope_factors: Option<RopeFactors>,
    pub blocks: ModelBlocks,
    /// What the predicting layer has beside [`Weights::layers`], if there is such a layer.
    pub mtp: Option<Box<MtpWeights>>,
    /// Bytes of the vectors held in memory, and of caches of table rows.
    pub small_bytes: u64,
}

impl Weights {
    /// Describes the blocks of a model and reads its small vectors.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing, a shape contradicts the metadata, or a file cannot be read.
    pub fn new(
        catalog: &Catalog,
        architecture: &Architecture,
        files: &FileSet,
    ) -> Result<Weights, ModelError> {
        let family = by_name(architecture.family).expect("descriptions are of known families");
        let mtp = architecture.mtp.map(|of| of.names);
        let names = Names::new(architecture.naming, family).with_mtp(mtp);
        let mut tensors = Tensors::new(catalog, files, names)?;
        let mut blocks = ModelBlocks {
            dense: Vec::new(),
            experts: Vec::new(),
            experts_per_token: architecture.experts_per_token(),
        };
        let mut layers = Vec::with_capacity(architecture.layers.len());
        let mut join = None;
        for index in 0..architecture.layers.len() {
            let builder = LayerBuilder { architecture, names: &names, index };
            let (layer, mut dense, experts) = builder.build(&mut tensors)?;
            if index >= architecture.main_layers() {
                join = Some(mtp::join(architecture, &names, &tensors, &mut dense)?);
            }
            layers.push(layer);
            blocks.dense.push(dense);
            blocks.experts.push(experts);
        }
        let embedding_norm = match architecture.embedding_norm {
            EmbeddingNorm::None => None,
            EmbeddingNorm::Weightless => Some(tensors.ones(architecture.hidden)),
            EmbeddingNorm::Weighted => {
                Some(tensors.norm(&names.embedding_norm(), architecture.hidden)?)
            }
        };
        let layer_embeddings = match architecture.layer_embeddings {
            Some(of) => {
                let width = of.width * layers.len();
                Some(embedding(of.tokens, &names.layer_embeddings(), width, &tensors)?)
            }
            None => None,
        };
        let embedding = ends::padded_embedding(architecture, &names.embedding(), &tensors)?;
        let name = if architecture.tied_embeddings { names.embedding() } else { names.head() };
        let head = head(architecture, &name, &tensors, &mut blocks)?;
        let head_bias = head_bias(architecture, &names.head(), &mut tensors)?;
        let final_norm = final_norm(architecture, &names, &mut tensors)?;
        let streams_begin = streams::at_begin(architecture, &names, &mut tensors)?;
        let streams_end = streams::at_end(architecture, &names, &mut tensors)?;
        let mtp = match join {
            Some(join) => {
                let of = MtpWeights::new(architecture, &names, &mut tensors, &mut blocks, join)?;
                Some(Box::new(of))
            }
            None => None,
        };
        let rope_factors = match architecture.ropes.first() {
            Some(rope) => rope_factors(&mut tensors, rope.rotary_dim / 2)?,
            None => None,
        };
        let tables = layers.iter().filter_map(|layer| layer.ngrams.as_ref());
        let cached: u64 = tables.map(|of| of.table.cache_bytes()).sum();
        let small_bytes = tensors.vector_bytes() + cached;
        Ok(Weights {
            layers,
            final_norm,
            streams_begin,
            streams_end,
            head,
            head_bias,
            embedding,
            embedding_norm,
            layer_embeddings,
            rope_factors,
            blocks,
            mtp,
            small_bytes,
        })
    }

    /// Returns all weight types of matrices in the decoder's products, without repetition.
    pub fn matrix_types(&self) -> Vec<TensorType> {
        let mut types = self.types_without_routers();
        for router in self.routers() {
            if !types.contains(&router.ty) {
                types.push(router.ty);
            }
        }
        types
    }

    /// Returns the extents of the tables of n-grams, of which rows are read one by one.
    pub fn ngram_tables(&self) -> impl Iterator<Item = Extent> {
        self.ngram_layers().flat_map(|of| of.table.parts.iter().copied())
    }

    /// Returns what layers add for n-grams, for the layers that do.
    pub fn ngram_layers(&self) -> impl Iterator<Item = &NGramWeights> {
        self.layers.iter().filter_map(|layer| layer.ngrams.as_deref())
    }

    /// Returns the routers of all layers that have one, each `[experts, hidden]`.
    pub fn routers(&self) -> impl Iterator<Item = &PartMatrix> {
        self.layers.iter().filter_map(|layer| match &layer.feed_forward {
            FeedForwardWeights::Experts { router, .. } => Some(router),
            FeedForwardWeights::None | FeedForwardWeights::Dense { .. } => None,
        })
    }

    /// Returns the weight types of all matrices except routers, without repetition.
    pub fn types_without_routers(&self) -> Vec<TensorType> {
        let mut types = Vec::new();
        let mut add_type = |ty: TensorType| {
            if !types.contains(&ty) {
                types.push(ty);
            }
        };
        let mut add = |matrix: &PartMatrix| add_type(matrix.ty);
        for layer in &self.layers {
            layer.mixer_matrices().iter().for_each(&mut add);
            layer.streams().flat_map(StreamWeights::matrices).for_each(&mut add);
            if let Some(of) = &layer.predicted {
                [&of.left, &of.right].into_iter().for_each(&mut add);
            }
            if let Some(of) = &layer.ngrams {
                [&of.key, &of.value].into_iter().for_each(&mut add);
            }
            if let Some(of) = &layer.embeddings {
                [&of.project, &of.gate, &of.out].into_iter().for_each(&mut add);
            }
            match &layer.feed_forward {
                FeedForwardWeights::None => {}
                FeedForwardWeights::Dense { gate, up, down } => {
                    [gate, up, down].into_iter().for_each(&mut add);
                }
                FeedForwardWeights::Experts { gate, up, down, shared, latent, .. } => {
                    let others = shared.iter().flatten().chain(latent.iter().flatten());
                    [gate, up, down].into_iter().chain(others).for_each(&mut add);
                }
            }
        }
        self.head.iter().for_each(|chunk| add(&chunk.matrix));
        if let Some(mtp) = &self.mtp {
            add(&mtp.join);
            mtp.head.iter().flatten().for_each(|chunk| add(&chunk.matrix));
        }
        // The matrices behind the last layer are always f32.
        let mut at_end = self.streams_end.iter().flat_map(StreamWeights::matrices);
        if at_end.next().is_some() {
            add_type(TensorType::F32);
        }
        types
    }
}

/// Reads the norm before the output projection, unless collapsing the residual streams norms them.
fn final_norm(
    architecture: &Architecture,
    names: &Names,
    tensors: &mut Tensors<'_>,
) -> Result<Option<Vec<f32>>, ModelError> {
    if architecture.norms == NormLayout::None {
        return Ok(None);
    }
    let (name, form) = (names.final_norm(), architecture.norm_form);
    let mut norm = match form {
        // What this norm lacks may differ from what the others lack.
        NormForm::RootMeanSquare if names.has_norm_weights() => {
            let mut norm = tensors.vector(&name, architecture.hidden)?;
            let offset = names.final_norm_offset();
            norm.iter_mut().for_each(|weight| *weight += offset);
            norm
        }
        _ => tensors.stream_norm(form, &name, architecture.hidden)?,
    };
    // The output projection is linear, so a factor of its input is one of the logits.
    norm.iter_mut().for_each(|weight| *weight *= architecture.logit_scale);
    Ok(Some(norm))
}

/// Returns the divisors of the rotary frequencies that the file has.
fn rope_factors(
    tensors: &mut Tensors<'_>,
    pairs: usize,
) -> Result<Option<RopeFactors>, ModelError> {
    if let Some(factors) = tensors.optional_vector("rope_freqs.weight", pairs)? {
        return Ok(Some(RopeFactors::Always(factors)));
    }
    let Some(long) = tensors.optional_vector(LONG_FACTORS, pairs)? else { return Ok(None) };
    let short = tensors.vector(SHORT_FACTORS, pairs)?;
    Ok(Some(RopeFactors::ByContext { short, long }))
}
