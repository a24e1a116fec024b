//! Attention whose heads share keys that are values, with compressed entries ([`crate::arch::SharedKeys`]).

use forebay_cuda::{
    Added, AttentionInputs, AttentionScratch, Compressor, DeviceKvLayer, HeadInput, Indexer,
    IndexerScores, Norm, Normed, Rotation, SharedKeyAttention,
};
use forebay_ops::{ChosenKeys, Pools};

use super::attention::HeadInputs;
use super::backend::CudaBackend;
use super::kv_layout::KvLayerLayout;
use super::products::Rows;
use super::vectors::optional;
use crate::ModelError;
use crate::arch::{EntryShape, SharedKeys};
use crate::backend::Step;
use crate::weights::SharedKeyWeights;

/// Most products of one call, and of a layer's input: queries, the key, four projections, and weights of an indexer's heads.
const PRODUCTS: usize = 4;
const OF_INPUT: usize = 7;

impl CudaBackend {
    fn shared(&self, step: &Step<'_>) -> SharedKeys {
        step.attention().shared.expect("the layer has shared keys")
    }

    /// Returns where the layer's entries are, and their shape, if it has such.
    fn entries(&self, step: &Step<'_>) -> Option<(KvLayerLayout, EntryShape)> {
        self.plan.kv.entries_of(step.layer).zip(self.shared(step).entries)
    }

    fn own_rotation(&self, step: &Step<'_>) -> Rotation {
        let index = step.architecture.layers[step.layer].rope.expect("such layers rotate");
        self.rotation(step, index)
    }

    /// Queues queries and keys, and what entries and their choice are computed from, then the entries that end with the rows.
    pub(super) fn project_shared_keys(
        &mut self,
        step: &Step<'_>,
        weights: &SharedKeyWeights,
    ) -> Result<(), ModelError> {
        self.sort_heads(step)?;
        let (at, vectors, rows) = (self.at(), self.layer_vectors(step), step.count);
        let (gpu, epsilon) = (&self.gpu, step.architecture.norm_epsilon);
        let q_a = self.product(step, weights.q_a, at.latent.q_a);
        let mut products = [q_a; OF_INPUT];
        products[1] = self.product(step, weights.key, at.k);
        let mut count = 2;
        let entries = weights.entries.as_ref();
        let outputs = at.shared_keys.projected.into_iter().chain([at.shared_keys.weights]);
        let of_input = entries.into_iter().flat_map(|of| of.of_input()).zip(outputs);
        for (matrix, out) in of_input {
            products[count] = self.product(step, *matrix, out);
            count += 1;
        }
        for products in products[..count].chunks(PRODUCTS) {
            self.products().dense(gpu, self.float(at.normed), Rows::of(step), products)?;
        }
        let weight = vectors.q_a_norm.expect("queries that pass through have a norm");
        let width = weights.q_a.rows;
        let norm = Norm { weight: self.vectors().offset(weight), width, epsilon };
        let also = self.products().converted_too(q_a.out, Rows::of(step), width);
        let out = Normed { rows: q_a.out, also };
        gpu.rms_norm(q_a.out, Added::Nothing, &norm, out, rows, None)?;
        let q = self.product(step, weights.q_b, at.q);
        let indexer = entries.and_then(|of| of.indexer.as_ref());
        match indexer {
            None => self.products().dense(gpu, q_a.out, Rows::of(step), &[q])?,
            Some(of) => {
                let own = self.product(step, of.q, at.shared_keys.indexer_q);
                self.products().dense(gpu, q_a.out, Rows::of(step), &[q, own])?;
            }
        }
        let input = |projected: u64, norm: Option<usize>| HeadInput {
            norm: optional(self.vectors(), norm),
            ..HeadInput::plain(self.float(projected))
        };
        let (q, k) = (input(at.q, vectors.q_norm), input(at.k, vectors.k_norm));
        let key_norm_dims = [step.attention().head_dim, 0];
        let rotary_from = self.own_rotation(step).rotary_from;
        self.take_inputs(
            step,
            HeadInputs { q, k, v: HeadInput::none(), key_norm_dims, rotary_from },
        )?;
        self.write_entries(step)
    }

    /// Queues the writes of the rows' projections, the entries that end with the rows, and the rotation of the indexer's queries.
    fn write_entries(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let Some((place, of)) = self.entries(step) else { return Ok(()) };
        let (at, rows, gpu) = (self.at().shared_keys, self.pass_rows(step), &self.gpu);
        let keys = self.plan.kv.keys_of(step.layer);
        let (own, entries) = (self.kv_layer(step), self.layer_at(place));
        let index_keys = self.plan.kv.beside(place, &entries, 0);
        let rotations = [self.own_rotation(step)]
            .into_iter()
            .chain(of.indexer.map(|indexer| self.rotation(step, indexer.rope)));
        let inputs = |q, k, v, heads, width, rotation| AttentionInputs {
            q,
            k,
            key_norm_dims: [width, 0],
            v,
            heads,
            norm_epsilon: step.architecture.norm_epsilon,
            norms_last: false,
            mixed: 1,
            rotation,
        };
        let vectors = self.layer_vectors(step).compressors;
        let [values, gates, index_values, index_gates] =
            at.projected.map(|at| HeadInput::plain(self.float(at)));
        let projected = [(values, gates), (index_values, index_gates)];
        let targets: [Option<DeviceKvLayer>; 2] = [Some(entries), index_keys];
        for (kind, rotation) in rotations.enumerate() {
            let projections = self.plan.kv.beside(keys, &own, kind).expect("they are cached");
            let target = targets[kind].as_ref().expect("they are cached");
            let [bias, norm] = vectors[kind].expect("entries have a bias and a norm");
            let (k, v) = projected[kind];
            let width = projections.shape.dim_k;
            gpu.attention_inputs(
                &inputs(HeadInput::none(), k, v, 0, width, None),
                &projections,
                &rows,
            )?;
            let compressor = Compressor {
                bias: self.vectors().offset(bias),
                norm: self.vectors().offset(norm),
                epsilon: step.architecture.norm_epsilon,
                rotation,
                parts: of.parts(),
            };
            gpu.compress(&compressor, &projections, target, &rows)?;
        }
        let (Some(indexer), Some(layer)) = (of.indexer, index_keys) else { return Ok(()) };
        let q = HeadInput::plain(self.float(at.indexer_q));
        let rotation = Some(self.rotation(step, indexer.rope));
        let none = HeadInput::none();
        let inputs = inputs(q, none, none, indexer.heads, indexer.head_dim, rotation);
        Ok(gpu.attention_inputs(&inputs, &layer, &rows)?)
    }

    /// Queues attention over the window and, if the layer has them, over entries.
    pub(super) fn attend_shared_keys(&self, step: &Step<'_>) -> Result<(), ModelError> {
        let (attention, at) = (step.attention(), self.at());
        let (out, rows) = (self.float(at.attended), self.pass_rows(step));
        self.products().changed(out);
        let layer = self.kv_layer(step);
        let mut chosen = None;
        let entries = match self.entries(step) {
            None => None,
            Some((place, of)) => {
                let entries = self.layer_to_read(step, place)?;
                if let Some(indexer) = of.indexer {
                    let at = at.shared_keys;
                    let keys = self.plan.kv.beside(place, &entries, 0);
                    let keys = keys.expect("the indexer's keys are cached");
                    let (heads, dim) = (indexer.heads, indexer.head_dim);
                    let inputs = IndexerScores {
                        q: self.float(at.indexer_q),
                        weights: self.float(at.weights),
                        scores: self.float(at.scores),
                        room: at.room,
                    };
                    let lists = self.arena.activation(at.lists);
                    let pools = Pools::positions(at.most);
                    let shape = Indexer { heads, dim, gated: false, by_head: false, pools };
                    self.gpu.choose_keys(&shape, &inputs, &keys, &rows, lists)?;
                    chosen = Some(ChosenKeys { lists, lists_of_row: 1, pools });
                }
                Some(entries)
            }
        };
        let window = step.architecture.layers[step.layer].window;
        let what = SharedKeyAttention {
            q: self.float(at.q),
            out,
            rows,
            heads: attention.heads,
            scale: attention.scale,
            window: window.expect("such layers have a window"),
            sinks: optional(self.vectors(), self.layer_vectors(step).sinks),
            rotation: self.own_rotation(step),
            chosen,
        };
        let scratch = AttentionScratch {
            parts: self.float(at.attention_parts),
            tickets: self.arena.activation(at.attention_tickets),
            size: at.attention_size,
        };
        Ok(self.gpu.attention_with_entries(&what, &layer, entries.as_ref(), &scratch)?)
    }
}
