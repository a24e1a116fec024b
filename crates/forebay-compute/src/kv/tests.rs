use half::f16;

use super::*;
use crate::testing::{cpus, random};

const SHAPE: KvShape = KvShape {
    kv_heads: 3,
    head_dim_k: 20,
    head_dim_v: 8,
    values_in_keys: false,
    context: 10,
    window: None,
    rows: 10,
};

const KINDS: [KvType; 4] = [KvType::F16, KvType::F32, KvType::Q8_0, KvType::Q4_0];

/// Rounds a row as the definition of its type says.
pub(crate) fn stored(row: &[f32], kind: KvType) -> Vec<f32> {
    let block = |x: &[f32]| -> Vec<f32> {
        let largest = x.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        if kind == KvType::Q8_0 {
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            let scale = f16::from_f32(largest / 127.0).to_f32();
            return x.iter().map(|x| (x * inverse).round_ties_even() * scale).collect();
        }
        let scale = x.iter().find(|x| x.abs() == largest).unwrap() / -8.0;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let scale = f16::from_f32(scale).to_f32();
        let code = |x: &f32| (x * inverse + 8.5).floor().min(15.0) - 8.0;
        x.iter().map(|x| code(x) * scale).collect()
    };
    match kind {
        KvType::F32 => row.to_vec(),
        KvType::F16 => row.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        KvType::Q8_0 | KvType::Q4_0 => row.chunks(32).flat_map(block).collect(),
    }
}

#[test]
fn rows_land_by_head_and_position_rounded_to_the_kind() {
    for cpu in cpus() {
        for (kind, row_bytes) in KINDS.into_iter().zip([64, 128, 68, 36]) {
            let mut cache = KvCache::new(&[SHAPE; 2], kind).unwrap();
            assert_eq!(cache.bytes(), 2 * 3 * 10 * row_bytes);
            let (k, v) = (random(1, 4 * 3 * 20), random(2, 4 * 3 * 8));
            cache.append(&cpu, 1, 0, &k[..60], &v[..24]).unwrap();
            cache.append(&cpu, 1, 1, &k[60..], &v[24..]).unwrap();
            assert_eq!((cache.len(), cache.layer_len(1)), (0, 4));
            for (token, head) in (0..4).flat_map(|t| (0..3).map(move |h| (t, h))) {
                let at = token * 3 + head;
                assert_eq!(cache.key(&cpu, 1, head, token), stored(&k[at * 20..][..20], kind));
                assert_eq!(cache.value(&cpu, 1, head, token), stored(&v[at * 8..][..8], kind));
            }
        }
    }
}

#[test]
fn blocks_of_every_kind_of_numbers_are_rounded_as_defined() {
    let shape = KvShape { kv_heads: 1, head_dim_k: 64, ..SHAPE };
    let mut rows = vec![vec![0.0; 64], vec![-0.0; 64], vec![7.0; 64], vec![-7.0; 64]];
    // The element farthest from 0 occurs twice, with either sign first. Then come numbers whose
    // scale is subnormal.
    rows.push((0..64).map(|i| if i % 2 == 0 { 3.0 } else { -3.0 }).collect());
    rows.push((0..64).map(|i| if i % 2 == 0 { -3.0 } else { 3.0 }).collect());
    rows.push(random(7, 64).iter().map(|x| x * 1e-6).collect());
    rows.extend((0..3).map(|seed| random(seed, 64)));
    for cpu in cpus() {
        for kind in [KvType::Q8_0, KvType::Q4_0] {
            let mut cache = KvCache::new(&[shape], kind).unwrap();
            cache.append(&cpu, 0, 0, &rows.concat(), &[1.0; 80]).unwrap();
            for (position, row) in rows.iter().enumerate() {
                assert_eq!(cache.key(&cpu, 0, 0, position), stored(row, kind), "row {position}");
            }
            let farthest = random(0, 64).iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let step = farthest / if kind == KvType::Q8_0 { 127.0 } else { 8.0 };
            let got = cache.key(&cpu, 0, 0, rows.len() - 3);
            let error = |(x, y): (&f32, &f32)| (x - y).abs();
            let worst = got.iter().zip(&random(0, 64)).map(error).fold(0.0, f32::max);
            // The bound is half a step. With four bits, one end of the range has no code and is a
            // whole step away.
            let most = if kind == KvType::Q8_0 { 0.51 } else { 1.01 } * step;
            assert!(worst < most && worst > 0.3 * step, "{kind:?}: {worst}, a step is {step}");
        }
    }
}

#[test]
fn values_that_lie_in_their_keys_take_no_memory() {
    for cpu in cpus() {
        let shape = KvShape { kv_heads: 1, values_in_keys: true, ..SHAPE };
        let mut cache = KvCache::new(&[shape, SHAPE], KvType::F32).unwrap();
        assert_eq!(cache.bytes(), (4 * 10 * (24 + 3 * (24 + 8))) as u64);
        let k = random(1, 4 * 20);
        cache.append(&cpu, 0, 0, &k, &[]).unwrap();
        assert_eq!((cache.value_stride(0), cache.value_width(0)), (24, 8));
        for (position, k) in k.chunks(20).enumerate() {
            assert_eq!(cache.value(&cpu, 0, 0, position), k[..8]);
        }
    }
}

#[test]
fn the_context_is_a_hard_end_and_truncation_moves_back() {
    let cpu = &cpus()[0];
    let mut cache = KvCache::new(&[SHAPE; 2], KvType::F16).unwrap();
    let (k, v) = (random(1, 10 * 60), random(2, 10 * 24));
    for layer in 0..2 {
        cache.append(cpu, layer, 0, &k, &v).unwrap();
    }
    let full = cache.append(cpu, 0, 10, &k[..60], &v[..24]);
    assert_eq!(full, Err(ComputeError::ContextFull { first: 10, end: 11, context: 10 }));
    assert_eq!(cache.len(), 10);
    assert_eq!(cache.resumable(4), 4);
    cache.truncate(4);
    assert_eq!(cache.len(), 4);
    cache.append(cpu, 0, 4, &k[..60], &v[..24]).unwrap();
    assert_eq!((cache.layer_len(0), cache.len()), (5, 4));
}

#[test]
fn a_window_keeps_its_rows_and_says_how_far_back_it_goes() {
    let cpu = &cpus()[0];
    let (window, batch, context) = (100, 30, 2000);
    let rows = KvShape::rows_for_window(window, batch, context);
    assert_eq!((rows, KvShape::rows_for_window(window, batch, 200)), (256, 200));
    assert_eq!(KvShape::rows_for_window(228, 30, context), 512);
    let shape =
        KvShape { kv_heads: 1, head_dim_k: 8, context, window: Some(window), rows, ..SHAPE };
    let full = KvShape { rows: context, window: None, ..shape };
    let mut cache = KvCache::new(&[shape, full], KvType::F32).unwrap();
    let (k, v) = (random(1, 1500 * 8), random(2, 1500 * 8));
    let append = |cache: &mut KvCache, from: usize, to: usize| {
        for layer in 0..2 {
            let (k, v) = (&k[from * 8..to * 8], &v[from * 8..to * 8]);
            cache.append(cpu, layer, from, k, v).unwrap();
        }
    };
    for from in (0..1500).step_by(30) {
        append(&mut cache, from, from + 30);
    }
    for position in 1500 - rows..1500 {
        assert_eq!(cache.key(cpu, 0, 0, position), k[position * 8..][..8]);
    }
    // The oldest row is position 1244. A token at 1343 sees it; one at 1342 would see one more.
    assert_eq!((cache.resumable(1343), cache.resumable(1342)), (1343, 0));
    assert_eq!((cache.resumable(1500), cache.resumable(0)), (1500, 0));
    cache.truncate(1400);
    // Rows beyond 1400 still count as written, although new positions overwrite them.
    append(&mut cache, 1400, 1410);
    assert_eq!((cache.resumable(1343), cache.resumable(1342)), (1343, 0));
    cache.truncate(0);
    append(&mut cache, 0, 30);
    assert_eq!(cache.resumable(10), 10);
    // The layer has no spare rows: beside the window there is room for a run of exactly 157.
    let all = std::panic::catch_unwind(|| shape.check_run(157));
    let more = std::panic::catch_unwind(|| shape.check_run(158));
    assert!(all.is_ok() && more.is_err());
}

#[test]
fn absurd_shapes_are_errors() {
    for shape in [
        KvShape { context: usize::MAX, rows: usize::MAX, ..SHAPE },
        KvShape { head_dim_k: usize::MAX, ..SHAPE },
        KvShape { kv_heads: 1 << 30, context: 1 << 30, rows: 1 << 30, ..SHAPE },
    ] {
        for kind in KINDS {
            assert!(KvCache::new(&[SHAPE, shape], kind).is_err(), "{shape:?}");
        }
    }
}
