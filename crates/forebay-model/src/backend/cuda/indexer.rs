//! The choice of the keys that a token attends to.

use forebay_cuda::{
    DeviceKvLayer, DevicePtr, IndexerInputs, IndexerScores, KvLayerShape, PooledKeys,
};
use forebay_ops::ChosenKeys;

use super::backend::CudaBackend;
use super::indexer_layout::indexer_shape;
use super::kv_size::KvSize;
use super::products::Product;
use super::vectors::optional;
use crate::ModelError;
use crate::arch::{Attention, INDEXER_NORM_EPSILON};
use crate::backend::Step;

impl KvSize {
    /// Returns the shape of the keys of this attention's indexer, if it has one.
    pub fn index_shape(&self, attention: &Attention) -> Option<KvLayerShape> {
        let dim = attention.indexer.as_ref()?.key_width();
        let shape = KvLayerShape::new(self.element, 1, (dim, dim), self.context);
        Some(KvLayerShape { values_in_keys: true, ..shape })
    }
}

/// Most products of an indexer.
const PRODUCTS: usize = 4;

impl CudaBackend {
    /// Returns the products of queries, and those of keys, weights of heads and gates, if the layer has an indexer. There are
    /// as many of the second ones as the returned number says.
    pub(super) fn indexer_products(
        &self,
        step: &Step<'_>,
    ) -> Option<(Product, [Product; PRODUCTS - 1], usize)> {
        let at = self.at().indexer;
        let weights = step.layer_weights().attention.indexer()?;
        let q = self.product(step, weights.q, at.q);
        let gate = weights.gate.as_ref().map(|(matrix, _)| *matrix);
        let others = [(Some(weights.k), at.k), (weights.weights, at.weights), (gate, at.gates)];
        let (mut products, mut count) = ([q; PRODUCTS - 1], 0);
        for (matrix, out) in others {
            if let Some(matrix) = matrix {
                products[count] = self.product(step, matrix, out);
                count += 1;
            }
        }
        Some((q, products, count))
    }

    /// Queues the norms and rotations of the indexer's queries and keys, and the writes to the cache.
    pub(super) fn take_indexer_inputs(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let Some(of) = step.attention().indexer.as_ref().filter(|of| of.own) else {
            return Ok(());
        };
        let (at, vectors) = (self.at(), &self.layer_vectors(step).indexer);
        let vector = |index: Option<usize>| optional(self.vectors(), index);
        let gates = match of.key_width() > of.head_dim {
            true => self.float(at.indexer.gates),
            false => DevicePtr::null(),
        };
        let inputs = IndexerInputs {
            q: self.float(at.indexer.q),
            k: self.float(at.indexer.k),
            gates,
            q_norm: vector(vectors.q_norm),
            norm: vector(vectors.norm),
            bias: vector(vectors.bias),
            epsilon: step.architecture.norm_epsilon,
            layer_epsilon: INDEXER_NORM_EPSILON,
            rotation: of.rope.map(|index| self.rotation(step, index)),
            pooled: of.pooled().map(|_| PooledKeys { gate_bias: vector(vectors.gate_bias) }),
        };
        let layer = self.plan.kv.index_layer(step.layer, &self.kv_layer(step));
        let layer = layer.expect("the indexer's keys are cached");
        let shape = indexer_shape(of, at.indexer.pools);
        Ok(self.gpu.indexer_inputs(&shape, &inputs, &layer, &self.pass_rows(step))?)
    }

    /// Queues the choice of keys, if the layer has an indexer. `layer` is the cache that attention reads.
    pub(super) fn choose_keys(
        &self,
        step: &Step<'_>,
        layer: &DeviceKvLayer,
    ) -> Result<(), ModelError> {
        let Some(of) = step.attention().indexer.as_ref().filter(|of| of.own) else {
            return Ok(());
        };
        let at = self.at().indexer;
        let inputs = IndexerScores {
            q: self.float(at.q),
            weights: if of.has_weights() { self.float(at.weights) } else { DevicePtr::null() },
            scores: self.float(at.scores),
            room: at.room,
        };
        let layer = self.plan.kv.index_layer(step.layer, layer);
        let layer = layer.expect("the indexer's keys are cached");
        let (shape, lists) = (indexer_shape(of, at.pools), self.arena.activation(at.lists));
        Ok(self.gpu.choose_keys(&shape, &inputs, &layer, &self.pass_rows(step), lists)?)
    }

    /// Returns the choice of the layer's indexer, or that of a layer before it, if it attends to chosen keys.
    pub(super) fn chosen_keys(&self, step: &Step<'_>) -> Option<ChosenKeys<DevicePtr<u32>>> {
        let at = self.at().indexer;
        step.attention().indexer.as_ref().map(|of| ChosenKeys {
            lists: self.arena.activation(at.lists),
            lists_of_row: of.lists(),
            pools: at.pools,
        })
    }
}
