//! Compares the largest logits and their ids with a sort.

use std::cmp::Ordering;

use anyhow::Result;
use forebay_cuda::TopK;

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    vec![Check::new("top_k sorted", sorted), Check::new("top_k argmax", argmax)]
}

pub fn benches() -> Vec<Bench> {
    vec![
        Bench::new("top_k 64 of 151936", |context| measure(context, 64)),
        Bench::new("top_k 256 of 151936", |context| measure(context, 256)),
        Bench::new("top_k argmax of 151936", |context| measure(context, 1)),
    ]
}

const SHAPES: [(usize, usize); 8] =
    [(1, 1), (2, 7), (3, 2048), (1, 2049), (2, 32_000), (1, 151_936), (1, 262_145), (5, 5000)];

/// Returns logits with many ties, zeroes of both signs, infinities and NaN.
fn logits(rows: usize, vocabulary: usize) -> Vec<f32> {
    let mut random = Random::new((rows + vocabulary) as u64);
    let mut logits: Vec<f32> =
        random.gaussians(rows * vocabulary).iter().map(|x| (x * 20.0).round() / 20.0).collect();
    for (i, x) in logits.iter_mut().enumerate() {
        match i % 97 {
            3 => *x = -0.0,
            4 => *x = 0.0,
            50 => *x = f32::NAN,
            60 => *x = f32::NEG_INFINITY,
            _ => {}
        }
    }
    logits
}

fn best(row: &[f32], k: usize) -> (Vec<u32>, Vec<f32>) {
    let mut ids: Vec<u32> =
        (0..row.len() as u32).filter(|&id| !row[id as usize].is_nan()).collect();
    ids.sort_by(|&a, &b| {
        let (a, b) = (row[a as usize], row[b as usize]);
        b.partial_cmp(&a).unwrap_or(Ordering::Equal)
    });
    ids.resize(k.max(ids.len()), u32::MAX);
    ids.truncate(k);
    let values = ids.iter().map(|&id| row.get(id as usize).copied().unwrap_or(f32::NAN)).collect();
    (ids, values)
}

fn sorted(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, vocabulary) in SHAPES {
        let logits = logits(rows, vocabulary);
        let device = context.upload(&logits)?;
        for k in [1, 5, 64, 256] {
            let what = TopK { rows, vocabulary, k };
            let scratch = context.poisoned(2 * what.scratch_words())?;
            let (ids, values) = (context.poisoned(rows * k)?, context.poisoned(rows * k)?);
            gpu.top_k(&what, device.ptr(), scratch.ptr(), ids.ptr(), values.ptr())?;
            let got_ids = gpu.download::<u32>(ids.ptr(), rows * k)?;
            let got_values = gpu.download::<f32>(values.ptr(), rows * k)?;
            let (mut expected_ids, mut expected_values) = (Vec::new(), Vec::new());
            for row in logits.chunks(vocabulary) {
                let (ids, values) = best(row, k);
                expected_ids.extend(ids);
                expected_values.extend(values);
            }
            let numbers = |x: &[f32]| {
                x.iter().map(|x| if x.is_nan() { f32::MAX } else { *x }).collect::<Vec<_>>()
            };
            let mut next = Outcome::same(&got_ids, &expected_ids)
                .worse(Outcome::same(&numbers(&got_values), &numbers(&expected_values)));
            next.place.insert_str(0, &format!("{what:?} "));
            outcome = outcome.worse(next);
        }
    }
    Ok(outcome)
}

fn argmax(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, vocabulary) in SHAPES {
        let mut logits = logits(rows, vocabulary);
        if rows > 1 {
            logits[..vocabulary].fill(f32::NAN);
        }
        let device = context.upload(&logits)?;
        let what = TopK { rows, vocabulary, k: 1 };
        let scratch = context.poisoned(2 * what.scratch_words())?;
        let (ids, values) = (context.poisoned(rows)?, context.poisoned(rows)?);
        gpu.top_k(&what, device.ptr(), scratch.ptr(), ids.ptr(), values.ptr())?;
        let got = gpu.download::<u32>(ids.ptr(), rows)?;
        let expected: Vec<u32> = logits
            .chunks(vocabulary)
            .map(|row| context.cpu.argmax(row).map_or(u32::MAX, |id| id as u32))
            .collect();
        outcome = outcome.worse(Outcome::same(&got, &expected));
    }
    Ok(outcome)
}

fn measure(context: &Context, k: usize) -> Result<Measured> {
    let (gpu, vocabulary) = (&context.gpu, 151_936);
    let what = TopK { rows: 1, vocabulary, k };
    let logits = context.upload(&logits(1, vocabulary))?;
    let scratch = context.poisoned(2 * what.scratch_words())?;
    let (ids, values) = (context.poisoned(k)?, context.poisoned(k)?);
    let seconds = median_seconds(context, |_| {
        gpu.top_k(&what, logits.ptr(), scratch.ptr(), ids.ptr(), values.ptr())
    })?;
    Ok(Measured { seconds, bytes: vocabulary as f64 * 4.0, flops: 0.0 })
}
