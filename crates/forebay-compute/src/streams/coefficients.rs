//! Coefficients of rows of streams, from products with the streams.

use forebay_ops::StreamMixing;

use super::{STREAMS_MAX, StreamShape};
use crate::cpu::Cpu;
use crate::ops::{logistic, row_scale, share};

impl Cpu {
    /// Replaces the products of rows of streams `x` with a matrix, `[rows, base.len()]`, by coefficients. If there are only as
    /// many products as streams, they become factors of inputs. Otherwise, the factors of outputs follow ([`StreamShape::factors`]),
    /// and the matrix if there are products for it ([`StreamShape::coefficients`]).
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn stream_coefficients(
        &self,
        x: &[f32],
        shape: StreamShape,
        mixing: &StreamMixing<&[f32]>,
        products: &mut [f32],
    ) {
        let (rows, width) = (shape.rows_of(x), mixing.base.len());
        let widths = [shape.count, shape.factors(), shape.coefficients()];
        let parts = mixing.scales.len();
        assert_eq!(Some(&width), widths.get(parts.wrapping_sub(1)), "stream_coefficients: {parts}");
        assert_eq!(products.len(), rows * width, "stream_coefficients: {rows} rows");
        // The mean square of a row is most of the work.
        let share = share(x.len(), shape.row()) / shape.row();
        self.pool.for_each_chunk_mut(products, share.max(1) * width, |_, start, products| {
            for (row, products) in products.chunks_exact_mut(width).enumerate() {
                let x = &x[(start / width + row) * shape.row()..][..shape.row()];
                let scale = row_scale(self, x, mixing.norm_epsilon);
                coefficients_of_row(shape.count, scale, mixing, products);
            }
        });
    }

    /// Replaces products of rows of streams with a matrix by twice the logistic function of the product, divided by the number of
    /// streams: the factors of outputs of gated residuals.
    pub fn stream_injections(&self, products: &mut [f32], streams: usize) {
        let divisor = streams as f32;
        products.iter_mut().for_each(|product| *product = 2.0 * logistic(*product / divisor));
    }
}

fn coefficients_of_row(
    streams: usize,
    scale: f32,
    mixing: &StreamMixing<&[f32]>,
    products: &mut [f32],
) {
    let StreamMixing { scales, base, iterations, epsilon, outputs: (factor, added), .. } = *mixing;
    let part_of = |index: usize| (index / streams).min(2);
    for (index, (product, base)) in products.iter_mut().zip(base).enumerate() {
        *product = *product * scale * scales[part_of(index)] + base;
    }
    let (inputs, rest) = products.split_at_mut(streams);
    inputs.iter_mut().for_each(|value| *value = logistic(*value) + epsilon);
    if rest.is_empty() {
        return;
    }
    let (outputs, matrix) = rest.split_at_mut(streams);
    outputs.iter_mut().for_each(|value| *value = factor * logistic(*value) + added);
    if matrix.is_empty() {
        return;
    }
    for row in matrix.chunks_exact_mut(streams) {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|value| *value = (*value - largest).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|value| *value = *value / sum + epsilon);
    }
    divide_columns(matrix, streams, epsilon);
    for _ in 1..iterations {
        for row in matrix.chunks_exact_mut(streams) {
            let sum = row.iter().sum::<f32>() + epsilon;
            row.iter_mut().for_each(|value| *value /= sum);
        }
        divide_columns(matrix, streams, epsilon);
    }
}

/// Divides every element of a matrix by the sum of its column and `epsilon`.
fn divide_columns(matrix: &mut [f32], streams: usize, epsilon: f32) {
    let mut sums = [0.0; STREAMS_MAX];
    for row in matrix.chunks_exact(streams) {
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
    }
    for row in matrix.chunks_exact_mut(streams) {
        row.iter_mut().zip(&sums).for_each(|(value, sum)| *value /= sum + epsilon);
    }
}
