//! The choice of the keys that a token attends to.

use forebay_compute::RopeLayout;
use forebay_cuda::{
    ChosenKeys, Indexer, IndexerInputs, IndexerScores, KvLayer, KvLayerShape, Rotation,
};

use super::backend::CudaBackend;
use super::kv_size::KvSize;
use super::products::Product;
use crate::ModelError;
use crate::arch::{self, Attention, INDEXER_NORM_EPSILON};
use crate::backend::Step;
use crate::weights::LatentWeights;

impl KvSize {
    /// Returns the shape of the keys of this attention's indexer, if it has one.
    pub fn index_shape(&self, attention: &Attention) -> Option<KvLayerShape> {
        attention.indexer.as_ref().map(|indexer| KvLayerShape {
            element: self.element,
            kv_heads: 1,
            dim_k: indexer.head_dim,
            dim_v: indexer.head_dim,
            values_in_keys: true,
            chosen: false,
            context: self.context,
            span: 1,
        })
    }
}

impl CudaBackend {
    /// Returns the products of queries, keys and weights of heads, if the layer has an indexer.
    pub(super) fn indexer_products(
        &self,
        step: &Step<'_>,
        weights: &LatentWeights,
    ) -> Option<[Product; 3]> {
        let at = self.at().indexer;
        weights.indexer.as_ref().and_then(|of| {
            let products = [(of.q, at.q), (of.k, at.k), (of.weights?, at.weights)];
            Some(products.map(|(matrix, out)| self.product(step, matrix, out)))
        })
    }

    /// Queues the norm of the indexer's keys, the rotation of its queries and keys, and the writes to the cache.
    pub(super) fn take_indexer_inputs(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let Some(of) = step.attention().indexer.as_ref() else { return Ok(()) };
        let index = of.rope.expect("such indexers rotate");
        let (at, rope) = (self.at(), &step.architecture.ropes[index]);
        let [norm, bias] = self.layer_vectors(step).indexer_norm.expect("the indexer has a norm");
        let inputs = IndexerInputs {
            q: self.float(at.indexer.q),
            k: self.float(at.indexer.k),
            norm: self.vectors().offset(norm),
            bias: self.vectors().offset(bias),
            epsilon: INDEXER_NORM_EPSILON,
            rotation: Rotation {
                angles: self.float(at.ropes[index]),
                rotary_dim: rope.rotary_dim,
                rotary_from: 0,
                interleaved: rope.layout == RopeLayout::Interleaved,
            },
        };
        let layer = self.plan.kv.index_layer(step.layer, &self.kv_layer(step));
        let layer = layer.expect("the indexer's keys are cached");
        let shape = self.indexer_shape(of);
        Ok(self.gpu.indexer_inputs(&shape, &inputs, &layer, &self.pass_rows(step))?)
    }

    fn indexer_shape(&self, of: &arch::Indexer) -> Indexer {
        Indexer { heads: of.heads, dim: of.head_dim, most: self.at().indexer.most }
    }

    /// Queues the choice of keys, if the layer has an indexer. `layer` is the cache that attention reads.
    pub(super) fn choose_keys(&self, step: &Step<'_>, layer: &KvLayer) -> Result<(), ModelError> {
        let Some(of) = step.attention().indexer.as_ref() else { return Ok(()) };
        let at = self.at().indexer;
        let inputs = IndexerScores {
            q: self.float(at.q),
            weights: self.float(at.weights),
            scores: self.float(at.scores),
            room: at.room,
        };
        let layer = self.plan.kv.index_layer(step.layer, layer);
        let layer = layer.expect("the indexer's keys are cached");
        let (shape, lists) = (self.indexer_shape(of), self.arena.activation(at.lists));
        Ok(self.gpu.choose_keys(&shape, &inputs, &layer, &self.pass_rows(step), lists)?)
    }

    /// Returns the choice of the layer's indexer, if it has one.
    pub(super) fn chosen_keys(&self, step: &Step<'_>) -> Option<ChosenKeys> {
        let at = self.at().indexer;
        let lists = || self.arena.activation(at.lists);
        step.attention().indexer.as_ref().map(|_| ChosenKeys { lists: lists(), most: at.most })
    }
}
