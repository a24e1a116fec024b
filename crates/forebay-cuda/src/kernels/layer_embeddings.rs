//! Embeddings of tokens for a layer.

use forebay_ops::Gating;

use super::elementwise::THREADS;
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Embeddings of a pass's rows for one layer.
#[derive(Clone, Copy)]
pub struct RowEmbeddings {
    /// Embeddings of the rows for all layers `[rows, stride]`.
    pub embeddings: DevicePtr<f32>,
    pub stride: usize,
    /// First element of the layer.
    pub first: usize,
    /// Number of elements for a layer.
    pub width: usize,
    /// Projections `[rows, width]` of the rows' usual embeddings, which are normed and then added.
    pub projected: DevicePtr<f32>,
    /// Weight `[width]` and epsilon of this norm.
    pub weight: DevicePtr<f32>,
    pub epsilon: f32,
}

impl Gpu {
    /// Computes `gates [rows, width] = gating(gates, norm(projected) + embeddings)`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if the layer's elements do not lie in a row.
    pub fn gate_layer_embeddings(
        &self,
        gates: DevicePtr<f32>,
        of: &RowEmbeddings,
        gating: Gating,
        rows: usize,
    ) -> Result<(), CudaError> {
        let RowEmbeddings { embeddings, stride, first, width, projected, weight, epsilon } = *of;
        assert!(width > 0 && first + width <= stride, "{first} + {width} elements of {stride}");
        let (number, alpha, limit) = super::gating::arguments(gating);
        let kernel = self.kernel("layer_embeddings", "gate_layer_embeddings")?;
        // The order of a row's sum depends on the number of threads, so it follows from the width alone.
        let threads = width.next_power_of_two().clamp(32, THREADS) as u32;
        Launch::new(kernel, (rows as u32, 1, 1), (threads, 1, 1))
            .ptr(gates, rows * width)
            .ptr(projected, rows * width)
            .ptr(weight, width)
            .ptr(embeddings, rows * stride)
            .int(width)
            .int(stride)
            .int(first)
            .float(epsilon)
            .int(number)
            .float(alpha)
            .float(limit)
            .run(self)
    }
}
