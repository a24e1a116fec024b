//! Alternating updates (Baykal et al. 2023, "Alternating Updates for Efficient Transformers"): a layer computes one stream of a row.
//! The others are predicted before the layer and corrected after it.

use super::{STREAMS_MAX, StreamShape, load, store};
use crate::cpu::Cpu;
use crate::ops::{row_scale, share};
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Least mean of squares of a stream that is brought to the magnitude of another.
const SQUARE_MIN: f32 = 1e-5;

/// Weights of a prediction or a correction of streams.
#[derive(Debug, Clone, Copy)]
pub struct StreamPrediction<'a> {
    /// Number of the stream that layers compute.
    pub active: usize,
    /// Matrix `[streams, width]`. Its products with a row that is divided by its root mean square are passed through the hyperbolic
    /// tangent.
    pub router: &'a [f32],
    /// Matrix that turns these numbers into coefficients: `[streams * streams, streams]` for a prediction, `[streams, streams]` for
    /// a correction.
    pub coefficients: &'a [f32],
    /// Number that is added to the mean square of a row.
    pub epsilon: f32,
}

impl StreamPrediction<'_> {
    fn check(&self, shape: StreamShape, coefficients: usize) {
        let StreamShape { count, .. } = shape;
        let lengths = (self.router.len(), self.coefficients.len());
        assert_eq!(
            lengths,
            (shape.row(), coefficients * count),
            "prediction of streams: {shape:?}"
        );
        assert!(self.active < count, "prediction of streams: {} of {count}", self.active);
    }

    /// Writes the coefficients of the active stream of a row of streams.
    fn of_active(&self, cpu: &Cpu, x: &[f32], shape: StreamShape, out: &mut [f32]) {
        self.of_row(cpu, &x[self.active * shape.width..][..shape.width], out);
    }

    /// Writes the products of the coefficients' matrix with the numbers of a row `[width]`.
    fn of_row(&self, cpu: &Cpu, row: &[f32], out: &mut [f32]) {
        let scale = row_scale(cpu, row, self.epsilon);
        let mut numbers = [0.0; STREAMS_MAX];
        let weights = self.router.chunks_exact(row.len());
        let streams = weights.len();
        for (number, weights) in numbers.iter_mut().zip(weights) {
            *number = (scale * dispatch(cpu, Dot { a: row, b: weights })).tanh();
        }
        for (out, weights) in out.iter_mut().zip(self.coefficients.chunks_exact(streams)) {
            *out = weights.iter().zip(&numbers).map(|(weight, number)| weight * number).sum();
        }
    }
}

impl Cpu {
    /// Multiplies every stream but the first one of the rows of `x` by a number, so that its root mean square becomes that of the
    /// first. Streams with a mean square below 1e-5 stay smaller.
    ///
    /// # Panics
    /// Panics if `x` is no whole number of rows.
    pub fn match_streams(&self, x: &mut [f32], shape: StreamShape) {
        shape.rows_of(x);
        let share = share(x.len(), shape.row());
        self.pool.for_each_chunk_mut(x, share, |_, _, x| {
            for row in x.chunks_exact_mut(shape.row()) {
                let (first, others) = row.split_at_mut(shape.width);
                let magnitude = mean_square(self, first).sqrt();
                for stream in others.chunks_exact_mut(shape.width) {
                    let own = mean_square(self, stream).max(SQUARE_MIN).sqrt();
                    stream.iter_mut().for_each(|value| *value = *value * magnitude / own);
                }
            }
        });
    }

    /// Adds to every stream of the rows of `x` a sum of all streams. The factors of the sums are coefficients of the row's active
    /// stream: those of stream `k` are the products with rows `k * streams` and following ones of the matrix.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn predict_streams(&self, x: &mut [f32], shape: StreamShape, of: &StreamPrediction<'_>) {
        shape.rows_of(x);
        of.check(shape, shape.count * shape.count);
        let share = share(x.len(), shape.row());
        self.pool.for_each_chunk_mut(x, share, |_, _, x| {
            let mut factors = [0.0; STREAMS_MAX * STREAMS_MAX];
            let factors = &mut factors[..shape.count * shape.count];
            for x in x.chunks_exact_mut(shape.row()) {
                of.of_active(self, x, shape, factors);
                dispatch(self, Predict { x, factors, width: shape.width });
            }
        });
    }

    /// Adds to every stream of the rows of `x` the difference of `activated` `[rows, width]` and the active stream, times a factor:
    /// one more than the stream's coefficient of the row of `activated`.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn correct_streams(
        &self,
        x: &mut [f32],
        shape: StreamShape,
        activated: &[f32],
        of: &StreamPrediction<'_>,
    ) {
        let rows = shape.rows_of(x);
        of.check(shape, shape.count);
        assert_eq!(activated.len(), rows * shape.width, "correct_streams: {rows} rows");
        let share = share(x.len(), shape.row());
        self.pool.for_each_chunk_mut(x, share, |_, start, x| {
            let mut factors = [0.0; STREAMS_MAX];
            let factors = &mut factors[..shape.count];
            for (row, x) in x.chunks_exact_mut(shape.row()).enumerate() {
                let row = start / shape.row() + row;
                let activated = &activated[row * shape.width..][..shape.width];
                of.of_row(self, activated, factors);
                factors.iter_mut().for_each(|factor| *factor += 1.0);
                dispatch(self, Correct { x, factors, active: of.active, activated });
            }
        });
    }

    /// Adds `added` `[rows, width]` to every stream but the first one of the rows of `x`.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn add_to_other_streams(&self, x: &mut [f32], shape: StreamShape, added: &[f32]) {
        let rows = shape.rows_of(x);
        assert_eq!(added.len(), rows * shape.width, "add_to_other_streams: {rows} rows");
        let share = share(x.len(), shape.row());
        self.pool.for_each_chunk_mut(x, share, |_, start, x| {
            for (row, x) in x.chunks_exact_mut(shape.row()).enumerate() {
                let added = &added[(start / shape.row() + row) * shape.width..][..shape.width];
                for stream in x.chunks_exact_mut(shape.width).skip(1) {
                    stream.iter_mut().zip(added).for_each(|(value, added)| *value += added);
                }
            }
        });
    }

    /// Copies stream `stream` of the rows of `x` to `out` `[rows, width]`, each element times one of `factors` `[width]` if there are
    /// any.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn take_stream(
        &self,
        x: &[f32],
        shape: StreamShape,
        stream: usize,
        factors: Option<&[f32]>,
        out: &mut [f32],
    ) {
        let rows = shape.rows_of(x);
        assert_eq!(out.len(), rows * shape.width, "take_stream: {rows} rows");
        let from = x.chunks_exact(shape.row()).map(|row| &row[stream * shape.width..]);
        for (out, from) in out.chunks_exact_mut(shape.width).zip(from) {
            out.copy_from_slice(&from[..shape.width]);
            if let Some(factors) = factors {
                assert_eq!(factors.len(), shape.width, "take_stream: factors");
                out.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor);
            }
        }
    }
}

fn mean_square(cpu: &Cpu, x: &[f32]) -> f32 {
    dispatch(cpu, Dot { a: x, b: x }) / x.len() as f32
}

struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl Kernel for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut sums = [simd.splat(0.0); 4];
        for at in (0..self.a.len()).step_by(LANES) {
            let sum = &mut sums[at / LANES % 4];
            *sum = simd.mul_add(load(simd, self.a, at), load(simd, self.b, at), *sum);
        }
        simd.sum(simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3])))
    }
}

struct Predict<'a> {
    x: &'a mut [f32],
    /// `[streams after, streams before]`
    factors: &'a [f32],
    width: usize,
}

impl Kernel for Predict<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let streams = self.x.len() / self.width;
        for at in (0..self.width).step_by(LANES) {
            let mut before = [simd.splat(0.0); STREAMS_MAX];
            for (before, x) in before.iter_mut().zip(self.x.chunks_exact(self.width)) {
                *before = load(simd, x, at);
            }
            for (after, x) in self.x.chunks_exact_mut(self.width).enumerate() {
                let mut sum = before[after];
                for (from, before) in before[..streams].iter().enumerate() {
                    let factor = simd.splat(self.factors[after * streams + from]);
                    sum = simd.mul_add(*before, factor, sum);
                }
                store(simd, sum, x, at);
            }
        }
    }
}

struct Correct<'a> {
    x: &'a mut [f32],
    factors: &'a [f32],
    active: usize,
    activated: &'a [f32],
}

impl Kernel for Correct<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.activated.len();
        for at in (0..width).step_by(LANES) {
            let before = load(simd, &self.x[self.active * width..][..width], at);
            let difference = simd.sub(load(simd, self.activated, at), before);
            for (x, factor) in self.x.chunks_exact_mut(width).zip(self.factors) {
                let sum = simd.mul_add(difference, simd.splat(*factor), load(simd, x, at));
                store(simd, sum, x, at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpus, random};

    fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().map(|value| f64::from(*value)).collect()
    }

    fn assert_close(found: &[f32], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            let difference = (f64::from(*found) - expected).abs();
            assert!(difference < 1e-5 * (1.0 + expected.abs()), "{index}: {found} {expected}");
        }
    }

    /// Coefficients of a row in f64, by the definition.
    fn coefficients(of: &StreamPrediction<'_>, row: &[f64]) -> Vec<f64> {
        let square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (square + f64::from(of.epsilon)).sqrt();
        let numbers: Vec<f64> = wide(of.router)
            .chunks_exact(row.len())
            .map(|weights| weights.iter().zip(row).map(|(w, x)| w * x * scale).sum::<f64>().tanh())
            .collect();
        let rows = wide(of.coefficients);
        let rows = rows.chunks_exact(numbers.len());
        rows.map(|weights| weights.iter().zip(&numbers).map(|(w, x)| w * x).sum()).collect()
    }

    #[test]
    fn predictions_and_corrections_agree_with_the_formulas() {
        for cpu in cpus() {
            for (rows, count, width, active) in [(1, 4, 8, 0), (3, 4, 21, 2), (40, 2, 512, 1)] {
                let shape = StreamShape { count, width };
                let router = random(1, count * width);
                let [predicts, corrects] =
                    [count * count * count, count * count].map(|length| random(2, length));
                let of = |coefficients| StreamPrediction {
                    active,
                    router: &router,
                    coefficients,
                    epsilon: 1e-6,
                };
                let (before, activated) = (random(3, rows * shape.row()), random(4, rows * width));
                let mut x = before.clone();
                cpu.predict_streams(&mut x, shape, &of(&predicts));
                let mut expected = Vec::new();
                for row in wide(&before).chunks_exact(shape.row()) {
                    let factors = coefficients(&of(&predicts), &row[active * width..][..width]);
                    for (after, i) in (0..count).flat_map(|k| (0..width).map(move |i| (k, i))) {
                        let sum: f64 = (0..count)
                            .map(|from| row[from * width + i] * factors[after * count + from])
                            .sum();
                        expected.push(row[after * width + i] + sum);
                    }
                }
                assert_close(&x, &expected);
                let before = x.clone();
                cpu.correct_streams(&mut x, shape, &activated, &of(&corrects));
                let mut expected = Vec::new();
                let rows = wide(&before);
                let rows = rows.chunks_exact(shape.row());
                for (row, activated) in rows.zip(wide(&activated).chunks_exact(width)) {
                    let factors = coefficients(&of(&corrects), activated);
                    for (k, i) in (0..count).flat_map(|k| (0..width).map(move |i| (k, i))) {
                        let difference = activated[i] - row[active * width + i];
                        expected.push(row[k * width + i] + (factors[k] + 1.0) * difference);
                    }
                }
                assert_close(&x, &expected);
            }
        }
    }

    #[test]
    fn streams_take_the_magnitude_of_the_first_one() {
        for cpu in cpus() {
            let shape = StreamShape { count: 3, width: 20 };
            let mut before = random(5, 4 * shape.row());
            // A stream that is too small to be brought to any magnitude.
            before[20..40].iter_mut().for_each(|value| *value *= 1e-4);
            let mut x = before.clone();
            cpu.match_streams(&mut x, shape);
            let square = |stream: &[f64]| stream.iter().map(|x| x * x).sum::<f64>() / 20.0;
            let mut expected = Vec::new();
            for row in wide(&before).chunks_exact(shape.row()) {
                let first = square(&row[..20]).sqrt();
                for (number, stream) in row.chunks_exact(20).enumerate() {
                    let own = if number == 0 { first } else { square(stream).max(1e-5).sqrt() };
                    expected.extend(stream.iter().map(|x| x * first / own));
                }
            }
            assert_close(&x, &expected);
        }
    }

    #[test]
    fn single_streams_are_taken_and_passed_over() {
        let cpu = &cpus()[0];
        let shape = StreamShape { count: 2, width: 3 };
        let mut x: Vec<f32> = (0..12).map(|x| x as f32).collect();
        cpu.add_to_other_streams(&mut x, shape, &[10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
        let expected = [0.0, 1.0, 2.0, 13.0, 24.0, 35.0, 6.0, 7.0, 8.0, 49.0, 60.0, 71.0];
        assert_eq!(x, expected);
        let mut out = [0.0; 6];
        cpu.take_stream(&x, shape, 1, None, &mut out);
        assert_eq!(out, [13.0, 24.0, 35.0, 49.0, 60.0, 71.0]);
        cpu.take_stream(&x, shape, 0, Some(&[1.0, 2.0, 0.5]), &mut out);
        assert_eq!(out, [0.0, 2.0, 1.0, 6.0, 14.0, 4.0]);
    }
}
