//! Norm weights and biases, which every token needs. They are copied to the device once, one after the other.

use forebay_cuda::DevicePtr;

use crate::weights::{
    AttentionWeights, DeltaWeights, DenseBiases, FeedForwardWeights, LayerWeights, ResidentMatrix,
    ResidualGate, StreamWeights, Weights,
};

/// Alignment of a vector's start, in floats. Norms read 16 bytes at once.
const ALIGNMENT: usize = 64;

/// Vectors of an indexer, in the same way.
#[derive(Debug, Clone, Copy, Default)]
pub struct IndexerVectors {
    /// Norm of queries.
    pub q_norm: Option<usize>,
    /// Weight and bias of the norm of keys.
    pub norm: Option<usize>,
    pub bias: Option<usize>,
    /// Numbers that are added to the gates of a pool's keys.
    pub gate_bias: Option<usize>,
}

/// Vectors of one layer, each as an index into all floats; `None` if the layer has no such vector.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerVectors {
    /// Biases of a dense feed-forward.
    pub biases: BiasVectors,
    pub attention_norm: Option<usize>,
    pub attention_post_norm: Option<usize>,
    pub feed_forward_norm: Option<usize>,
    pub feed_forward_post_norm: Option<usize>,
    /// Gates that mix the residual stream with the outputs of attention and the feed-forward.
    pub attention_gate: Option<GateVectors>,
    pub feed_forward_gate: Option<GateVectors>,
    /// Norm of attention's output, with its length.
    pub attention_output_norm: Option<(usize, usize)>,
    /// Weights of the short convolutions, in the order of `Convolved`.
    pub convolutions: Option<[usize; 4]>,
    /// Profiles of biases by distance.
    pub profiles: Option<usize>,
    /// Vectors of what collapses residual streams for the layer's blocks, if there are several.
    pub attention_streams: Option<StreamVectors>,
    pub feed_forward_streams: Option<StreamVectors>,
    pub q_bias: Option<usize>,
    pub k_bias: Option<usize>,
    pub v_bias: Option<usize>,
    pub o_bias: Option<usize>,
    pub q_norm: Option<usize>,
    pub k_norm: Option<usize>,
    pub v_norm: Option<usize>,
    pub sinks: Option<usize>,
    /// Norm of compressed queries in latent attention.
    pub q_a_norm: Option<usize>,
    /// Norm of latent vectors in latent attention, followed by that of the rotating part of keys, if this is normed.
    pub kv_a_norm: Option<usize>,
    /// Bias of the gates and norm of compressed entries and of the keys of their indexer.
    pub compressors: [Option<[usize; 2]>; 2],
    pub indexer: IndexerVectors,
    /// Vectors of a recurrent layer.
    pub delta: Option<DeltaVectors>,
    pub router_bias: Option<usize>,
    pub correction_bias: Option<usize>,
    /// Table with the experts of every token, as the bits of floats.
    pub by_token: Option<usize>,
    /// Gate of the shared experts.
    pub shared_scale: Option<usize>,
    /// Biases of all experts' gate, up and down.
    pub expert_biases: [Option<usize>; 3],
    pub expert_scales: Option<usize>,
    /// Factors of the output of every expert, and the weight of the norm after them.
    pub expert_output_norm: Option<[usize; 2]>,
    /// Norms of a layer whose router and experts have norms of their own. It has no [`LayerVectors::feed_forward_post_norm`].
    pub expert_norms: Option<ExpertNormVectors>,
    /// Norm in the space of the experts, if they have one.
    pub latent_norm: Option<usize>,
    /// Norm of the residual stream before the layer, if router and experts take that.
    pub input_norm: Option<usize>,
    /// Vectors of a layer that adds embeddings of n-grams.
    pub ngrams: Option<NGramVectors>,
    /// Norms of the use of the tokens' embeddings for the layer.
    pub embeddings: Option<EmbeddingVectors>,
    /// Vectors of predicted residual streams.
    pub predicted: Option<PredictedVectors>,
}

/// Vectors of a layer that computes one of several residual streams, each as an index into all floats.
#[derive(Debug, Clone, Copy)]
pub struct PredictedVectors {
    pub router: usize,
    pub prediction: usize,
    pub correction: usize,
    pub output_scale: Option<usize>,
    pub branch_norm: usize,
}

/// Gates of the residual stream, each as an index into all floats.
#[derive(Debug, Clone, Copy)]
pub struct GateVectors {
    /// Factors of the residual stream before a block's output is added.
    pub keep: usize,
    /// Factors of the output before its norm, if there are such.
    pub scale: Option<usize>,
}

/// Biases of a dense feed-forward, each as an index into all floats.
#[derive(Debug, Clone, Copy, Default)]
pub struct BiasVectors {
    pub gate: Option<usize>,
    pub up: Option<usize>,
    pub down: Option<usize>,
}

/// Vectors of what collapses residual streams, each as an index into all floats.
#[derive(Debug, Clone, Copy, Default)]
pub struct StreamVectors {
    pub base: Option<usize>,
    pub scales: Option<usize>,
    pub norm: Option<usize>,
    /// Weights that choose among the streams of a bank.
    pub scores: Option<usize>,
    /// The first matrices in f32, if no block has them.
    pub matrices: [usize; 3],
}

/// Norms around a router, experts and shared experts, each as an index into all floats.
#[derive(Debug, Clone, Copy)]
pub struct ExpertNormVectors {
    pub router: usize,
    pub input: usize,
    pub shared: usize,
    pub output: usize,
    /// Norm of the sum of both outputs.
    pub sum: usize,
}

/// Norms of embeddings for a layer, each as an index into all floats.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddingVectors {
    pub norm: usize,
    pub post_norm: usize,
}

/// Vectors of a layer that adds embeddings of n-grams, each as an index into all floats.
#[derive(Debug, Clone, Copy)]
pub struct NGramVectors {
    pub key_norm: usize,
    pub stream_norm: usize,
    pub convolution_norm: usize,
    pub convolution: usize,
}

/// Vectors of a recurrent layer, each as an index into all floats.
#[derive(Debug, Clone, Copy)]
pub struct DeltaVectors {
    pub convolution: usize,
    pub convolution_bias: Option<usize>,
    pub decay: usize,
    pub step: usize,
    pub skip: Option<usize>,
    pub norm: usize,
    /// Factors of the columns of the first product.
    pub factors: Option<usize>,
    /// Norms of compressed steps, keys and queries.
    pub selective_norms: Option<[usize; 3]>,
}

/// All vectors, concatenated.
#[derive(Debug, Default)]
pub struct Vectors {
    pub floats: Vec<f32>,
    pub layers: Vec<LayerVectors>,
    /// Norm of embeddings, if they are normed.
    pub embedding_norm: Option<usize>,
    /// Norm before the output projection, if there is one.
    pub final_norm: Option<usize>,
    /// Bias of the logits, if there is one.
    pub head_bias: Option<usize>,
    /// Norms of the predicting layer, if there is one.
    pub mtp: Option<MtpVectors>,
    /// Vectors and matrices of what collapses residual streams behind the last layer, if there are several.
    pub streams_end: Option<StreamVectors>,
    /// Projections of the usual embeddings to the other streams, if the model predicts streams.
    pub streams_begin: [usize; 3],
}

/// Norms of the embeddings and the states that the predicting layer joins, and that before its logits, each as an index into all
/// floats.
#[derive(Debug, Clone, Copy)]
pub struct MtpVectors {
    pub embedding_norm: usize,
    pub hidden_norm: usize,
    pub norm: usize,
}

impl Vectors {
    pub fn new(weights: &Weights) -> Vectors {
        let mut vectors = Vectors::default();
        for layer in &weights.layers {
            let of = vectors.layer(layer);
            vectors.layers.push(of);
        }
        vectors.embedding_norm = vectors.optional(&weights.embedding_norm);
        vectors.final_norm = vectors.optional(&weights.final_norm);
        vectors.head_bias = vectors.optional(&weights.head_bias);
        vectors.mtp = weights.mtp.as_ref().map(|of| MtpVectors {
            embedding_norm: vectors.append(&of.embedding_norm),
            hidden_norm: vectors.append(&of.hidden_norm),
            norm: vectors.append(&of.norm),
        });
        vectors.streams_end = weights.streams_end.as_ref().map(|of| {
            let mut found = vectors.streams(of);
            vectors.matrices(&mut found.matrices, of.matrices());
            found
        });
        let mut found = [0; 3];
        vectors.matrices(&mut found, weights.streams_begin.iter());
        vectors.streams_begin = found;
        vectors
    }

    fn layer(&mut self, layer: &LayerWeights) -> LayerVectors {
        let mut of = LayerVectors {
            biases: self.biases(&layer.biases),
            attention_norm: self.optional(&layer.attention_norm),
            attention_post_norm: self.optional(&layer.attention_post_norm),
            feed_forward_norm: self.optional(&layer.feed_forward_norm),
            feed_forward_post_norm: self.optional(&layer.feed_forward_post_norm),
            attention_gate: layer.attention_gate.as_ref().map(|of| self.gate(of)),
            feed_forward_gate: layer.feed_forward_gate.as_ref().map(|of| self.gate(of)),
            attention_streams: layer.attention_streams.as_ref().map(|of| self.streams(of)),
            feed_forward_streams: layer.feed_forward_streams.as_ref().map(|of| self.streams(of)),
            convolutions: layer
                .convolutions
                .as_ref()
                .map(|of| of.each_ref().map(|weights| self.append(weights))),
            o_bias: self.optional(&layer.o_bias),
            sinks: self.optional(&layer.sinks),
            ..LayerVectors::default()
        };
        if let Some(indexer) = layer.attention.indexer() {
            of.indexer = IndexerVectors {
                q_norm: self.optional(&indexer.q_norm),
                norm: Some(self.append(&indexer.k_norm)),
                bias: self.optional(&indexer.k_norm_bias),
                gate_bias: indexer.gate.as_ref().map(|(_, bias)| self.append(bias)),
            };
        }
        match &layer.attention {
            AttentionWeights::Grouped(weights) => {
                of.q_bias = self.optional(&weights.q_bias);
                of.k_bias = self.optional(&weights.k_bias);
                of.v_bias = self.optional(&weights.v_bias);
                of.q_norm = self.optional(&weights.q_norm);
                of.k_norm = self.optional(&weights.k_norm);
                of.v_norm = self.optional(&weights.v_norm);
                of.profiles = weights.relative.as_ref().map(|of| self.append(&of.profiles));
                let output_norm = weights.output_norm.as_ref();
                of.attention_output_norm =
                    output_norm.map(|weight| (self.append(weight), weight.len()));
            }
            AttentionWeights::Latent(weights) => {
                of.q_a_norm = weights.q_a.as_ref().map(|(_, norm)| self.append(norm));
                let both = [&weights.kv_a_norm[..], weights.rotary_norm.as_deref().unwrap_or(&[])];
                of.kv_a_norm = Some(self.append(&both.concat()));
            }
            AttentionWeights::Delta(_) | AttentionWeights::None => {}
            AttentionWeights::Shared(weights) => {
                of.q_a_norm = Some(self.append(&weights.q_a_norm));
                of.q_norm = Some(self.append(&weights.q_norm));
                of.k_norm = Some(self.append(&weights.key_norm));
                let compressors = weights.entries.iter().flat_map(|of| of.compressors());
                for (to, of) in of.compressors.iter_mut().zip(compressors) {
                    *to = Some([&of.bias, &of.norm].map(|vector| self.append(vector)));
                }
            }
        }
        of.delta = layer.delta().map(|weights| self.delta(weights));
        if let FeedForwardWeights::Experts { vectors, .. } = &layer.feed_forward {
            of.router_bias = self.optional(&vectors.router_bias);
            of.correction_bias = self.optional(&vectors.correction_bias);
            of.by_token = vectors.by_token.as_ref().map(|table| {
                let bits: Vec<f32> = table.iter().map(|id| f32::from_bits(*id)).collect();
                self.append(&bits)
            });
            of.shared_scale = self.optional(&vectors.shared_scale);
            of.expert_scales = self.optional(&vectors.scales);
            let output_norm = vectors.output_norm.as_ref();
            of.expert_output_norm = output_norm.map(|of| of.each_ref().map(|of| self.append(of)));
            of.latent_norm = self.optional(&vectors.latent_norm);
            of.input_norm = self.optional(&vectors.input_norm);
            if let Some(norms) = &vectors.norms {
                of.expert_norms = Some(ExpertNormVectors {
                    router: self.append(&norms.router),
                    input: self.append(&norms.input),
                    shared: self.append(&norms.shared),
                    output: self.append(&norms.output),
                    sum: of.feed_forward_post_norm.take().expect("such layers norm their outputs"),
                });
            }
            if let Some(biases) = &vectors.biases {
                of.expert_biases = biases.each_ref().map(|bias| Some(self.append(bias)));
            }
        }
        of.ngrams = layer.ngrams.as_ref().map(|ngrams| NGramVectors {
            key_norm: self.append(&ngrams.key_norm),
            stream_norm: self.append(&ngrams.stream_norm),
            convolution_norm: self.append(&ngrams.convolution_norm),
            convolution: self.append(&ngrams.convolution),
        });
        of.predicted = layer.predicted.as_ref().map(|predicted| PredictedVectors {
            router: self.append(&predicted.router),
            prediction: self.append(&predicted.prediction),
            correction: self.append(&predicted.correction),
            output_scale: self.optional(&predicted.output_scale),
            branch_norm: self.append(&predicted.branch_norm),
        });
        if let Some(embeddings) = &layer.embeddings {
            of.embeddings = Some(EmbeddingVectors {
                norm: self.append(&embeddings.norm),
                post_norm: self.append(&embeddings.post_norm),
            });
        }
        of
    }

    fn delta(&mut self, weights: &DeltaWeights) -> DeltaVectors {
        let selective = weights.selective.as_ref().and_then(|of| of.norms.as_ref());
        DeltaVectors {
            convolution: self.append(&weights.convolution),
            convolution_bias: self.optional(&weights.convolution_bias),
            decay: self.append(&weights.decay),
            step: self.append(&weights.step),
            skip: self.optional(&weights.skip),
            norm: self.append(&weights.norm),
            factors: self.optional(&weights.factors),
            selective_norms: selective.map(|norms| norms.each_ref().map(|norm| self.append(norm))),
        }
    }

    fn streams<M>(&mut self, weights: &StreamWeights<M>) -> StreamVectors {
        let none = StreamVectors::default();
        match weights {
            StreamWeights::Mean | StreamWeights::Projected(_) => none,
            StreamWeights::Bank { scores } => {
                StreamVectors { scores: Some(self.append(scores)), ..none }
            }
            StreamWeights::Mixed { base, scales, .. } => StreamVectors {
                base: Some(self.append(base)),
                scales: Some(self.append(scales)),
                ..none
            },
            StreamWeights::Gated { norm, .. } => {
                StreamVectors { norm: Some(self.append(norm)), ..none }
            }
        }
    }

    fn gate(&mut self, gate: &ResidualGate) -> GateVectors {
        GateVectors { keep: self.append(&gate.keep), scale: self.optional(&gate.scale) }
    }

    fn biases(&mut self, of: &DenseBiases) -> BiasVectors {
        let [gate, up, down] = [&of.gate, &of.up, &of.down].map(|bias| self.optional(bias));
        BiasVectors { gate, up, down }
    }

    /// Appends resident matrices, and notes where they begin.
    fn matrices<'a>(
        &mut self,
        found: &mut [usize; 3],
        matrices: impl Iterator<Item = &'a ResidentMatrix>,
    ) {
        for (at, matrix) in found.iter_mut().zip(matrices) {
            let (numbers, _) = matrix.data.as_chunks();
            let numbers: Vec<f32> = numbers.iter().map(|of| f32::from_le_bytes(*of)).collect();
            *at = self.append(&numbers);
        }
    }

    fn optional(&mut self, vector: &Option<Vec<f32>>) -> Option<usize> {
        vector.as_ref().map(|values| self.append(values))
    }

    fn append(&mut self, values: &[f32]) -> usize {
        let at = self.floats.len().next_multiple_of(ALIGNMENT);
        self.floats.resize(at, 0.0);
        self.floats.extend_from_slice(values);
        at
    }
}

/// Returns the address of a vector, or null if there is none, as kernels expect it.
pub fn optional(vectors: DevicePtr<f32>, at: Option<usize>) -> DevicePtr<f32> {
    at.map_or(DevicePtr::null(), |at| vectors.offset(at))
}
