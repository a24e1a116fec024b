//! Compares the largest logits and their ids with a sort.

use std::cmp::Ordering;

use anyhow::Result;
use forebay_cuda::{DeviceMemory, Selections, TopK, TopKBuffers};

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

pub fn checks() -> Vec<Check> {
    vec![
        Check::new("top_k sorted", sorted),
        Check::new("top_k argmax", argmax),
        Check::new("top_k of selections", selected),
    ]
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

/// Device memory of a selection.
struct Memory {
    logits: DeviceMemory,
    scratch: DeviceMemory,
    ids: DeviceMemory,
    values: DeviceMemory,
}

impl Memory {
    fn new(context: &Context, what: &TopK, logits: &[f32]) -> Result<Memory> {
        Ok(Memory {
            logits: context.upload(logits)?,
            scratch: context.poisoned(2 * what.scratch_words())?,
            ids: context.poisoned(what.rows * what.k)?,
            values: context.poisoned(what.rows * what.k)?,
        })
    }

    fn buffers(&self) -> TopKBuffers {
        TopKBuffers {
            logits: self.logits.ptr(),
            scratch: self.scratch.ptr(),
            ids: self.ids.ptr(),
            values: self.values.ptr(),
        }
    }
}

fn sorted(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, vocabulary) in SHAPES {
        let logits = logits(rows, vocabulary);
        for k in [1, 5, 64, 256] {
            let what = TopK { rows, vocabulary, k };
            let memory = Memory::new(context, &what, &logits)?;
            gpu.top_k(&what, &memory.buffers(), None)?;
            let got_ids = gpu.download::<u32>(memory.ids.ptr(), rows * k)?;
            let got_values = gpu.download::<f32>(memory.values.ptr(), rows * k)?;
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
        let what = TopK { rows, vocabulary, k: 1 };
        let memory = Memory::new(context, &what, &logits)?;
        gpu.top_k(&what, &memory.buffers(), None)?;
        let got = gpu.download::<u32>(memory.ids.ptr(), rows)?;
        let expected: Vec<u32> = logits
            .chunks(vocabulary)
            .map(|row| context.cpu.argmax(row).map_or(u32::MAX, |id| id as u32))
            .collect();
        outcome = outcome.worse(Outcome::same(&got, &expected));
    }
    Ok(outcome)
}

/// A row's mask, changes (id, divisor, subtracted, added) and divisor of its total.
type Wanted = (Option<Vec<u32>>, Vec<(u32, [f32; 3])>, f32);

/// Returns wanted selections of every kind, one for each row.
fn wanted(rows: usize, vocabulary: usize) -> Vec<Wanted> {
    let words = vocabulary.div_ceil(32);
    let kinds = (0..rows).map(|row| {
        let mask = match row % 4 {
            0 => None,
            1 => Some((0..words as u32).map(|word| 0x1248_0f01_u32.rotate_left(word)).collect()),
            2 => Some((0..words as u32).map(|word| u32::from(word % 37 == 1) << 9).collect()),
            _ => Some(vec![0; words]),
        };
        let changed = (0..vocabulary as u32).step_by(7 + row).take(300 * (row % 2));
        let change = |id: u32| (id, [1.0 + id as f32 / 9.0, 0.25 * (id % 3) as f32, 0.7]);
        let beyond = (row % 2 == 1).then_some((vocabulary as u32 + 5, [1.0, 0.0, 9.0]));
        (mask, changed.map(change).chain(beyond).collect(), [0.0, 1.0, 0.7][row % 3])
    });
    kinds.collect()
}

/// Returns the words of selections, as the kernels read them.
fn words_of(wanted: &[Wanted]) -> Vec<u32> {
    let mut words = vec![0; 4 * wanted.len()];
    for (row, (mask, changes, divisor)) in wanted.iter().enumerate() {
        let first_change = words.len();
        for (id, values) in changes {
            words.push(*id);
            words.extend(values.map(f32::to_bits));
        }
        let first_of_mask = words.len();
        words.extend(mask.iter().flatten());
        let at = if mask.is_some() { first_of_mask } else { 0 };
        let of_row = Selections::row(at, first_change, changes.len(), *divisor);
        words[4 * row..4 * row + 4].copy_from_slice(&of_row);
    }
    words
}

/// Compares masked and changed logits and their totals with those that the host computes.
fn selected(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (rows, vocabulary) in [(1, 40), (5, 2049), (4, 32_000), (6, 151_936)] {
        let mut logits = logits(rows, vocabulary);
        let wanted = wanted(rows, vocabulary);
        let words = words_of(&wanted);
        let on_device = context.upload(&words)?;
        for (k, has_totals) in [(1, false), (1, true), (5, true), (256, true)] {
            let what = TopK { rows, vocabulary, k };
            let memory = Memory::new(context, &what, &logits)?;
            let totals = context.upload(&vec![0.0_f32; rows])?;
            let has_changes = wanted.iter().any(|(_, changes, _)| !changes.is_empty());
            let (words, count, totals_at) = (on_device.ptr(), words.len(), totals.ptr());
            let selections =
                Selections { words, count, totals: totals_at, has_totals, has_changes };
            gpu.top_k(&what, &memory.buffers(), Some(&selections))?;
            let got_ids = gpu.download::<u32>(memory.ids.ptr(), rows * k)?;
            let got_totals = gpu.download::<f32>(totals.ptr(), rows)?;
            let (mut expected_ids, mut expected_totals) = (Vec::new(), Vec::new());
            for (row, (mask, changes, divisor)) in logits.chunks(vocabulary).zip(&wanted) {
                let mut row = row.to_vec();
                for (id, [quotient, subtracted, added]) in changes {
                    let Some(x) = row.get_mut(*id as usize) else { continue };
                    *x = if *x > 0.0 { *x / quotient } else { *x * quotient };
                    *x = *x - subtracted + added;
                }
                for (id, x) in row.iter_mut().enumerate() {
                    let allows = |words: &Vec<u32>| words[id / 32] >> (id % 32) & 1 == 1;
                    if !mask.as_ref().is_none_or(allows) {
                        *x = f32::NAN;
                    }
                }
                let (ids, values) = best(&row, k);
                let weight = |x: &f32| (f64::from(x - values[0]) / f64::from(*divisor)).exp();
                let numbers = row.iter().filter(|x| !x.is_nan());
                let has_total = has_totals && *divisor > 0.0;
                let total = if has_total { numbers.map(weight).sum::<f64>() } else { 0.0 };
                expected_totals.push(total as f32);
                expected_ids.extend(ids);
            }
            let mut next = Outcome::same(&got_ids, &expected_ids);
            let relative = got_totals.iter().zip(&expected_totals);
            let off = relative.map(|(got, expected)| (got - expected).abs() / expected.max(1.0));
            let worst = off.fold(0.0, f32::max);
            next = next.worse(Outcome::same(&[worst < 1e-5], &[true]));
            next.place.insert_str(0, &format!("{what:?} "));
            outcome = outcome.worse(next);
            // Rows with candidates of one logit only.
            logits.iter_mut().take(vocabulary).for_each(|x| *x = x.signum());
        }
    }
    Ok(outcome)
}

fn measure(context: &Context, k: usize) -> Result<Measured> {
    let (gpu, vocabulary) = (&context.gpu, 151_936);
    let what = TopK { rows: 1, vocabulary, k };
    let memory = Memory::new(context, &what, &logits(1, vocabulary))?;
    let buffers = memory.buffers();
    let seconds = median_seconds(context, |_| gpu.top_k(&what, &buffers, None))?;
    Ok(Measured { seconds, bytes: vocabulary as f64 * 4.0, flops: 0.0 })
}
