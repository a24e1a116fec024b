//! Residual streams beside each other.

/// How products of residual streams become coefficients. `V` is where a device has vectors.
#[derive(Debug, Clone, Copy)]
pub struct StreamMixing<V> {
    /// Factors of the products: one for those of inputs, and, if there are such, one for those of outputs and one for those of the matrix.
    pub scales: V,
    /// Numbers that are added to the products of a row after that, as many as there are products.
    pub base: V,
    /// Number of times that the columns of the matrix are divided by their sums. Its rows are divided between.
    pub iterations: usize,
    /// Number that is added to factors of inputs, to the matrix before the first division, and to its sums.
    pub epsilon: f32,
    /// Factor of the logistic function in factors of outputs, and what is added to these.
    pub outputs: (f32, f32),
    /// Number that is added to the mean square of a row before its products are divided by the root.
    pub norm_epsilon: f32,
}
