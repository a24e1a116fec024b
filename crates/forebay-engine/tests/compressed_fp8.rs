//! DeepSeek-V4 as it is published: attention weights of 8 bits with scales that are powers of two, beside experts of 4 bits.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use forebay_engine::{Session, SessionOptions};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};
use support::{e4m3, fixture};
use tempfile::TempDir;

/// Rows and columns that share a scale.
const TILE: usize = 128;

/// Tensors by name: type, shape and data.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

#[test]
fn attention_weights_of_8_bits_give_the_logits_of_their_values() {
    let Some(folder) = fixture("models/deepseek_v4") else { return };
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (mut coded, mut plain) = (Tensors::new(), Tensors::new());
    let mut count = 0;
    for (name, tensor) in file.tensors() {
        let own = (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec());
        let parts = [".wq_a.", ".wq_b.", ".wkv.", ".wo_a.", ".wo_b."];
        let is_coded = name.contains(".attn.")
            && !name.contains("compressor")
            && parts.iter().any(|part| name.contains(part));
        if !is_coded {
            coded.insert(name.clone(), own.clone());
            plain.insert(name, own);
            continue;
        }
        let [rows, cols] = tensor.shape().try_into().unwrap();
        let (codes, scales) = quantised(tensor.data(), rows, cols);
        let tiles = vec![rows.div_ceil(TILE), cols.div_ceil(TILE)];
        let value = |at: usize| {
            let scale = scales[at / cols / TILE * tiles[1] + at % cols / TILE];
            e4m3(codes[at]) * power_of_two(scale)
        };
        // Such values are numbers of 16 bits.
        let values =
            (0..rows * cols).flat_map(|at| ((value(at).to_bits() >> 16) as u16).to_le_bytes());
        plain.insert(name.clone(), (Dtype::BF16, vec![rows, cols], values.collect()));
        let stem = name.strip_suffix(".weight").unwrap();
        coded.insert(format!("{stem}.scale"), (Dtype::F8_E8M0, tiles, scales));
        coded.insert(name, (Dtype::F8_E4M3, vec![rows, cols], codes));
        count += 1;
    }
    assert_eq!(count, 4 * 5 + 2, "and the queries of two indexers");
    let quantised =
        json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [TILE, TILE]});
    let coded = written(&folder, &coded, Some(quantised));
    let plain = written(&folder, &plain, None);
    let options = SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
    let logits = |path: &Path| {
        let mut session = Session::open(path, &options, &mut |_, _| {}).unwrap();
        let ids: Vec<u32> = (0..40).map(|at| (at * 37 + 11) % 490).collect();
        session.logits(&ids, None).unwrap()
    };
    let (coded, plain) = (logits(coded.path()), logits(plain.path()));
    let largest = coded.iter().zip(&plain).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-4, "{largest}");
    let original = logits(&folder);
    assert!(original.iter().zip(&plain).any(|(a, b)| (a - b).abs() > 1e-2), "8 bits are fewer");
}

fn written(from: &Path, tensors: &Tensors, quantisation: Option<Value>) -> TempDir {
    let view = |(ty, shape, data)| TensorView::new(ty, shape, data).unwrap();
    let views = tensors.iter().map(|(name, (ty, shape, data))| {
        (name.clone(), view((*ty, shape.clone(), data.as_slice())))
    });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
    let config = fs::read(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["quantization_config"] = quantisation.unwrap_or(Value::Null);
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    fs::copy(from.join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    folder
}

/// Returns the nearest codes of numbers of 16 bits, and a scale for each tile.
fn quantised(data: &[u8], rows: usize, cols: usize) -> (Vec<u8>, Vec<u8>) {
    let bits = |at: usize| u16::from_le_bytes([data[2 * at], data[2 * at + 1]]);
    let value = |at: usize| f32::from_bits(u32::from(bits(at)) << 16);
    let (high, wide) = (rows.div_ceil(TILE), cols.div_ceil(TILE));
    let tile_of = |at: usize| at / cols / TILE * wide + at % cols / TILE;
    let mut largest = vec![0_f32; high * wide];
    for at in 0..rows * cols {
        largest[tile_of(at)] = largest[tile_of(at)].max(value(at).abs());
    }
    // The largest number of 8 bits is 448.
    let scale = |largest: &f32| (127.0 + (largest / 448.0).log2().ceil()) as u8;
    let scales: Vec<u8> = largest.iter().map(scale).collect();
    let nearest = |x: f32| {
        let distance = |code: &u8| (e4m3(*code) - x).abs();
        let codes = (0..=255_u8).filter(|code| code & 127 != 127);
        codes.min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap()
    };
    let code = |at: usize| nearest(value(at) / power_of_two(scales[tile_of(at)]));
    ((0..rows * cols).map(code).collect(), scales)
}

fn power_of_two(scale: u8) -> f32 {
    2f32.powi(i32::from(scale) - 127)
}
