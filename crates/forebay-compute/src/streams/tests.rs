//! Streams against the formulas in f64.

use forebay_ops::StreamMixing;

use super::StreamShape;
use crate::testing::{cpus, random};

fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

fn assert_close(found: &[f32], expected: &[f64], limit: f64) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(*found) - expected).abs();
        assert!(difference <= limit * (1.0 + expected.abs()), "{index}: {found} {expected}");
    }
}

/// Coefficients of a row in f64, by the definition.
fn coefficients(
    x: &[f32],
    shape: StreamShape,
    of: &StreamMixing<&[f32]>,
    products: &[f32],
) -> Vec<f64> {
    let n = shape.count;
    let squares: f64 = wide(x).iter().map(|x| x * x).sum();
    let scale = 1.0 / (squares / x.len() as f64 + f64::from(of.norm_epsilon)).sqrt();
    let epsilon = f64::from(of.epsilon);
    let value = |index: usize| {
        let part = (index / n).min(2);
        f64::from(products[index]) * scale * f64::from(of.scales[part]) + f64::from(of.base[index])
    };
    let mut all: Vec<f64> = (0..n).map(|index| logistic(value(index)) + epsilon).collect();
    if products.len() == n {
        return all;
    }
    let (factor, added) = (f64::from(of.outputs.0), f64::from(of.outputs.1));
    all.extend((n..2 * n).map(|index| factor * logistic(value(index)) + added));
    if products.len() == 2 * n {
        return all;
    }
    let mut matrix = vec![vec![0.0; n]; n];
    for (i, row) in matrix.iter_mut().enumerate() {
        let powers: Vec<f64> = (0..n).map(|j| value(2 * n + i * n + j).exp()).collect();
        let sum: f64 = powers.iter().sum();
        row.iter_mut().zip(powers).for_each(|(value, power)| *value = power / sum + epsilon);
    }
    for round in 0..of.iterations {
        if round > 0 {
            for row in &mut matrix {
                let sum = row.iter().sum::<f64>() + epsilon;
                row.iter_mut().for_each(|value| *value /= sum);
            }
        }
        for j in 0..n {
            let sum = matrix.iter().map(|row| row[j]).sum::<f64>() + epsilon;
            matrix.iter_mut().for_each(|row| row[j] /= sum);
        }
    }
    all.extend(matrix.into_iter().flatten());
    all
}

const SHAPES: [(usize, StreamShape); 4] = [
    (1, StreamShape { count: 2, width: 3 }),
    (3, StreamShape { count: 4, width: 64 }),
    (2, StreamShape { count: 16, width: 37 }),
    (70, StreamShape { count: 4, width: 129 }),
];

#[test]
fn coefficients_agree_with_f64_and_make_a_doubly_stochastic_matrix() {
    for cpu in cpus() {
        for (rows, shape) in SHAPES {
            let x = random(1, rows * shape.row());
            let widths = [shape.count, shape.factors(), shape.coefficients()];
            for (parts, width) in (1..).zip(widths) {
                let base = random(3, width);
                let mixing = StreamMixing {
                    scales: &[1.5, 0.7, 2.0][..parts],
                    base: &base,
                    iterations: 20,
                    epsilon: 1e-6,
                    outputs: (1.7, 0.25),
                    norm_epsilon: 1e-5,
                };
                let products = random(2, rows * width);
                let mut found = products.clone();
                cpu.stream_coefficients(&x, shape, &mixing, &mut found);
                for row in 0..rows {
                    let x = &x[row * shape.row()..][..shape.row()];
                    let products = &products[row * width..][..width];
                    let own = &found[row * width..][..width];
                    assert_close(own, &coefficients(x, shape, &mixing, products), 1e-5);
                    let matrix = &own[own.len().min(2 * shape.count)..];
                    // The columns were divided last.
                    for column in 0..matrix.len() / shape.count {
                        let column = matrix[column..].iter().step_by(shape.count);
                        assert!((column.sum::<f32>() - 1.0).abs() < 1e-4);
                    }
                    for row in matrix.chunks_exact(shape.count) {
                        assert!((row.iter().sum::<f32>() - 1.0).abs() < 0.05);
                    }
                }
            }
        }
    }
}

#[test]
fn sums_of_streams_agree_with_f64() {
    for cpu in cpus() {
        for (rows, shape) in SHAPES {
            let StreamShape { count, width } = shape;
            let (x, added) = (random(4, rows * shape.row()), random(5, rows * width));
            let coefficients = random(6, rows * shape.coefficients());
            let mut out = vec![0.0; rows * width];
            cpu.collapse_streams(&x, shape, &coefficients, &mut out);
            let [mut mixed, mut injected, mut behind] = [(); 3].map(|()| x.clone());
            cpu.add_to_streams(&mut mixed, shape, &coefficients, &added);
            let factors = random(7, rows * count);
            cpu.add_to_streams(&mut injected, shape, &factors, &added);
            // The same factors, behind those for inputs.
            let both: Vec<f32> = factors
                .chunks(count)
                .flat_map(|of| [vec![f32::NAN; count], of.to_vec()].concat())
                .collect();
            cpu.add_to_streams(&mut behind, shape, &both, &added);
            assert_eq!(behind, injected);
            let (x, added, of) = (wide(&x), wide(&added), wide(&coefficients));
            let factors = wide(&factors);
            let [mut collapsed, mut all_mixed, mut all_injected] = [(); 3].map(|()| Vec::new());
            for row in 0..rows {
                let own = &of[row * shape.coefficients()..];
                let at = |stream: usize, i: usize| x[row * shape.row() + stream * width + i];
                for i in 0..width {
                    collapsed.push((0..count).map(|j| own[j] * at(j, i)).sum::<f64>());
                }
                for k in 0..count {
                    for i in 0..width {
                        let added = added[row * width + i];
                        let before = |j: usize| own[2 * count + j * count + k] * at(j, i);
                        let mixed = (0..count).map(before).sum::<f64>();
                        all_mixed.push(own[count + k] * added + mixed);
                        all_injected.push(at(k, i) + factors[row * count + k] * added);
                    }
                }
            }
            assert_close(&out, &collapsed, 2e-6);
            assert_close(&mixed, &all_mixed, 2e-6);
            assert_close(&injected, &all_injected, 2e-6);
        }
    }
}

#[test]
fn gated_streams_agree_with_f64() {
    for cpu in cpus() {
        for (rows, shape) in SHAPES {
            let StreamShape { count, width } = shape;
            let (x, weight) = (random(8, rows * shape.row()), random(9, shape.row()));
            let mut normed = vec![0.0; x.len()];
            cpu.norm_streams(&x, shape, &weight, 1e-6, &mut normed);
            let mut expected = Vec::new();
            for (index, stream) in wide(&x).chunks(width).enumerate() {
                let squares: f64 = stream.iter().map(|x| x * x).sum();
                let scale = 1.0 / (squares / width as f64 + 1e-6).sqrt();
                let weight = &weight[index % count * width..];
                expected.extend(stream.iter().zip(weight).map(|(x, w)| x * scale * f64::from(*w)));
            }
            assert_close(&normed, &expected, 2e-6);
            let gates = random(10, x.len());
            let mut out = vec![0.0; rows * width];
            cpu.collapse_gated_streams(&normed, shape, &gates, &mut out);
            let mut expected = Vec::new();
            for row in 0..rows {
                for i in 0..width {
                    let of = |stream: usize| {
                        let at = row * shape.row() + stream * width + i;
                        f64::from(normed[at]) * logistic(f64::from(gates[at]))
                    };
                    expected.push((0..count).map(of).sum::<f64>() / count as f64);
                }
            }
            assert_close(&out, &expected, 2e-6);
            let mut low = gates.clone();
            cpu.activate_stream_gates(&mut low, count);
            let silu = |x: f64| x * logistic(x);
            let expected: Vec<f64> = wide(&gates).iter().map(|x| silu(x / count as f64)).collect();
            assert_close(&low, &expected, 2e-6);
            let mut factors = gates.clone();
            cpu.stream_injections(&mut factors, count);
            let expected: Vec<f64> =
                wide(&gates).iter().map(|x| 2.0 * logistic(x / count as f64)).collect();
            assert_close(&factors, &expected, 2e-6);
        }
    }
}

#[test]
fn mixtures_of_a_bank_agree_with_f64() {
    for cpu in cpus() {
        for (rows, shape) in SHAPES {
            let StreamShape { count, width } = shape;
            let x = random(11, rows * shape.row());
            let scores: Vec<f32> = random(12, width).iter().map(|score| score * 0.5).collect();
            for seen in [1, 2, count] {
                let mut out = vec![0.0; rows * width];
                cpu.mix_bank(&x, shape, seen, (&scores, 1e-5), &mut out);
                let mut expected = Vec::new();
                for row in x.chunks_exact(shape.row()) {
                    let streams: Vec<Vec<f64>> = row.chunks(width).take(seen).map(wide).collect();
                    let power = |x: &Vec<f64>| {
                        let squares: f64 = x.iter().map(|x| x * x).sum();
                        let dot: f64 = x.iter().zip(&scores).map(|(x, w)| x * f64::from(*w)).sum();
                        (dot / (squares / width as f64 + 1e-5).sqrt()).exp()
                    };
                    let powers: Vec<f64> = streams.iter().map(power).collect();
                    let sum: f64 = powers.iter().sum();
                    let of = |i: usize| streams.iter().zip(&powers).map(move |(x, p)| x[i] * p);
                    expected.extend((0..width).map(|i| of(i).sum::<f64>() / sum));
                }
                assert_close(&out, &expected, 2e-5);
                if seen == 1 {
                    let states: Vec<f32> =
                        x.chunks(shape.row()).flat_map(|row| row[..width].to_vec()).collect();
                    assert_eq!(out, states, "a state without a bank is read as it is");
                }
                let last = &x[(rows - 1) * shape.row()..];
                let mut alone = vec![0.0; width];
                cpu.mix_bank(last, shape, seen, (&scores, 1e-5), &mut alone);
                assert_eq!(alone, out[(rows - 1) * width..]);
            }
        }
    }
}

#[test]
fn a_bank_takes_the_state_before_the_output_replaces_it() {
    let shape = StreamShape { count: 3, width: 2 };
    for cpu in cpus() {
        let before = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut x = [before, before].concat();
        cpu.add_to_bank(&mut x, shape, None, &[10.0, 20.0, 30.0, 40.0]);
        assert_eq!(x, [11.0, 22.0, 3.0, 4.0, 5.0, 6.0, 31.0, 42.0, 3.0, 4.0, 5.0, 6.0]);
        cpu.add_to_bank(&mut x, shape, Some(2), &[7.0, 8.0, 9.0, 0.0]);
        assert_eq!(x, [7.0, 8.0, 3.0, 4.0, 11.0, 22.0, 9.0, 0.0, 3.0, 4.0, 31.0, 42.0]);
    }
}

#[test]
fn a_row_has_the_same_bits_alone() {
    for cpu in cpus() {
        let (rows, shape) = (70, StreamShape { count: 4, width: 129 });
        let (x, added) = (random(1, rows * shape.row()), random(2, rows * shape.width));
        let base = random(3, shape.coefficients());
        let mixing = StreamMixing {
            scales: &[1.0, 2.0, 3.0][..],
            base: &base[..],
            iterations: 20,
            epsilon: 1e-6,
            outputs: (2.0, 0.0),
            norm_epsilon: 1e-6,
        };
        let products = random(4, rows * shape.coefficients());
        let run = |range: std::ops::Range<usize>| {
            let mut x = x[range.start * shape.row()..range.end * shape.row()].to_vec();
            let of_row = shape.coefficients();
            let mut own = products[range.start * of_row..range.end * of_row].to_vec();
            cpu.stream_coefficients(&x, shape, &mixing, &mut own);
            let mut out = vec![0.0; range.len() * shape.width];
            cpu.collapse_streams(&x, shape, &own, &mut out);
            let added = &added[range.start * shape.width..range.end * shape.width];
            cpu.add_to_streams(&mut x, shape, &own, added);
            (x, out)
        };
        let (all, collapsed) = run(0..rows);
        for row in [0, 1, 33, 69] {
            let (x, out) = run(row..row + 1);
            assert_eq!(x, all[row * shape.row()..][..shape.row()]);
            assert_eq!(out, collapsed[row * shape.width..][..shape.width]);
        }
    }
}

#[test]
fn every_stream_begins_as_the_first() {
    let shape = StreamShape { count: 3, width: 2 };
    let mut x = vec![1.0, 2.0, 9.0, 9.0, 9.0, 9.0, 3.0, 4.0, 9.0, 9.0, 9.0, 9.0];
    cpus()[0].spread_streams(&mut x, shape);
    assert_eq!(x, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 3.0, 4.0]);
}
