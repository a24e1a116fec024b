use forebay_ops::KvType;
use half::f16;

use super::*;
use crate::testing::{cpus, random};

const SHAPE: KvShape =
    KvShape { kv_heads: 3, head_dim_k: 20, head_dim_v: 8, values_in_keys: false };

/// Blocks of a sequence whose positions lie in no order.
const TABLE: [u32; 2] = [3, 1];

fn cache(shapes: &[KvShape], kind: KvType) -> KvCache {
    let layers: Vec<KvLayer> = shapes.iter().map(|shape| KvLayer::new(*shape, 0)).collect();
    KvCache::new(&layers, &[4], kind).unwrap()
}

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
fn rows_land_by_table_head_and_position_rounded_to_the_kind() {
    for cpu in cpus() {
        for (kind, row_bytes) in KINDS.into_iter().zip([64, 128, 68, 36]) {
            let mut cache = cache(&[SHAPE; 2], kind);
            assert_eq!(cache.bytes(), 4 * 2 * 3 * 16 * row_bytes);
            assert_eq!(cache.block_bytes(0), 2 * 3 * 16 * row_bytes);
            let (k, v) = (random(1, 20 * 3 * 20), random(2, 20 * 3 * 8));
            cache.write(&cpu, 1, &TABLE, 0, &k[..60], &v[..24]);
            cache.write(&cpu, 1, &TABLE, 1, &k[60..], &v[24..]);
            for (token, head) in (0..20).flat_map(|t| (0..3).map(move |h| (t, h))) {
                let at = token * 3 + head;
                let key = cache.key(&cpu, 1, &TABLE, head, token);
                assert_eq!(key, stored(&k[at * 20..][..20], kind));
                let value = cache.value(&cpu, 1, &TABLE, head, token);
                assert_eq!(value, stored(&v[at * 8..][..8], kind));
            }
            // The other layer and the other blocks are untouched.
            assert_eq!(cache.key(&cpu, 0, &TABLE, 0, 0), stored(&[0.0; 20], kind));
            assert_eq!(cache.key(&cpu, 1, &[2], 0, 0), stored(&[0.0; 20], kind));
        }
    }
}

#[test]
fn copied_and_restored_blocks_are_equal() {
    let cpu = &cpus()[0];
    for kind in KINDS {
        let mut cache = cache(&[SHAPE; 2], kind);
        let (k, v) = (random(1, 16 * 3 * 20), random(2, 16 * 3 * 8));
        cache.write(cpu, 1, &[1], 0, &k, &v);
        cache.copy_block(0, 1, 2);
        let mut bytes = vec![0; cache.block_bytes(0) as usize];
        cache.save_block(0, 2, &mut bytes);
        cache.restore_block(0, 3, &bytes);
        for (position, head) in (0..16).flat_map(|t| (0..3).map(move |h| (t, h))) {
            for block in [2, 3] {
                let of = |block| {
                    let key = cache.key(cpu, 1, &[block], head, position);
                    (key, cache.value(cpu, 1, &[block], head, position))
                };
                assert_eq!(of(block), of(1), "{kind:?} block {block}");
            }
        }
    }
}

#[test]
fn groups_have_their_own_pools() {
    let layers = [KvLayer::new(SHAPE, 0), KvLayer::new(SHAPE, 1)];
    let cpu = &cpus()[0];
    let mut cache = KvCache::new(&layers, &[9, 3], KvType::F32).unwrap();
    let row = 3 * (24 + 8) * 4;
    assert_eq!((cache.blocks(0), cache.blocks(1)), (9, 3));
    assert_eq!(cache.bytes(), 12 * 16 * row);
    let (k, v) = (random(1, 60), random(2, 24));
    cache.write(cpu, 1, &[2], 0, &k, &v);
    assert_eq!(cache.key(cpu, 1, &[2], 0, 0), k[..20]);
    assert_eq!(cache.key(cpu, 0, &[2], 0, 0), [0.0; 20]);
}

#[test]
#[should_panic(expected = "position 0 has no block")]
fn block_0_is_never_written() {
    cache(&[SHAPE], KvType::F32).write(&cpus()[0], 0, &[0], 0, &[1.0; 60], &[1.0; 24]);
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
            let mut cache = cache(&[shape], kind);
            cache.write(&cpu, 0, &TABLE, 0, &rows.concat(), &[1.0; 80]);
            for (position, row) in rows.iter().enumerate() {
                assert_eq!(
                    cache.key(&cpu, 0, &TABLE, 0, position),
                    stored(row, kind),
                    "row {position}"
                );
            }
            let farthest = random(0, 64).iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let step = farthest / if kind == KvType::Q8_0 { 127.0 } else { 8.0 };
            let got = cache.key(&cpu, 0, &TABLE, 0, rows.len() - 3);
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
        let mut cache = cache(&[shape, SHAPE], KvType::F32);
        assert_eq!(cache.bytes(), (4 * 4 * 16 * (24 + 3 * (24 + 8))) as u64);
        let k = random(1, 4 * 20);
        cache.write(&cpu, 0, &TABLE, 0, &k, &[]);
        assert_eq!((cache.value_stride(0), cache.value_width(0)), (24, 8));
        for (position, k) in k.chunks(20).enumerate() {
            assert_eq!(cache.value(&cpu, 0, &TABLE, 0, position), k[..8]);
        }
    }
}

#[test]
fn absurd_shapes_are_errors() {
    for (shape, blocks) in [
        (SHAPE, usize::MAX),
        (KvShape { head_dim_k: usize::MAX, ..SHAPE }, 4),
        (KvShape { kv_heads: 1 << 30, ..SHAPE }, 1 << 30),
    ] {
        let layers = [KvLayer::new(SHAPE, 0), KvLayer::new(shape, 0)];
        for kind in KINDS {
            assert!(KvCache::new(&layers, &[blocks], kind).is_err(), "{shape:?}");
        }
    }
}
