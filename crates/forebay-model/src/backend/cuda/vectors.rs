//! Norm weights and biases, which every token needs: copied to the device once, one behind the other.

use forebay_cuda::DevicePtr;

use crate::weights::Weights;

/// Floats that a vector's beginning is a multiple of: norms read 16 bytes at once.
const ALIGNMENT: usize = 64;

/// The vectors of one layer, each an index into all floats; `None` where the layer has none.
#[derive(Debug, Clone, Copy)]
pub struct LayerVectors {
    pub attention_norm: usize,
    pub feed_forward_norm: usize,
    pub q_bias: Option<usize>,
    pub k_bias: Option<usize>,
    pub v_bias: Option<usize>,
    pub o_bias: Option<usize>,
    pub q_norm: Option<usize>,
    pub k_norm: Option<usize>,
}

/// All vectors in one.
#[derive(Debug, Default)]
pub struct Vectors {
    pub floats: Vec<f32>,
    pub layers: Vec<LayerVectors>,
    pub final_norm: usize,
}

impl Vectors {
    pub fn new(weights: &Weights) -> Vectors {
        let mut vectors = Vectors::default();
        for layer in &weights.layers {
            let mut optional =
                |vector: &Option<Vec<f32>>| vector.as_ref().map(|values| vectors.append(values));
            let (q_bias, k_bias) = (optional(&layer.q_bias), optional(&layer.k_bias));
            let (v_bias, o_bias) = (optional(&layer.v_bias), optional(&layer.o_bias));
            let (q_norm, k_norm) = (optional(&layer.q_norm), optional(&layer.k_norm));
            let attention_norm = vectors.append(&layer.attention_norm);
            let feed_forward_norm = vectors.append(&layer.feed_forward_norm);
            vectors.layers.push(LayerVectors {
                attention_norm,
                feed_forward_norm,
                q_bias,
                k_bias,
                v_bias,
                o_bias,
                q_norm,
                k_norm,
            });
        }
        vectors.final_norm = vectors.append(&weights.final_norm);
        vectors
    }

    fn append(&mut self, values: &[f32]) -> usize {
        let at = self.floats.len().next_multiple_of(ALIGNMENT);
        self.floats.resize(at, 0.0);
        self.floats.extend_from_slice(values);
        at
    }
}

/// A vector that may be missing, as kernels take it.
pub fn optional(vectors: DevicePtr<f32>, at: Option<usize>) -> DevicePtr<f32> {
    at.map_or(DevicePtr::null(), |at| vectors.offset(at))
}
