//! A quantised folder of which one matrix is stored without quantisation.

mod support;

use std::collections::HashMap;
use std::fs;

use forebay_engine::{Session, SessionOptions};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use support::{e4m3, fixture};

/// Rows and columns that share a scale.
const TILE: usize = 128;

/// The matrix is made into stacks of matrices of heads, beside others that are joined with their scales.
#[test]
fn a_plain_kv_b_beside_quantised_matrices_gives_the_same_logits() {
    let Some(folder) = fixture("models/deepseek_v3_fp8") else { return };
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut plain = HashMap::new();
    for name in file.names().into_iter().filter(|name| name.ends_with("kv_b_proj.weight")) {
        let (codes, scales) =
            (file.tensor(name).unwrap(), file.tensor(&format!("{name}_scale_inv")).unwrap());
        let [rows, cols] = codes.shape().try_into().unwrap();
        let value = |at: usize| {
            let (row, col) = (at / cols / TILE, at % cols / TILE);
            let scale = &scales.data()[4 * (row * cols.div_ceil(TILE) + col)..][..4];
            e4m3(codes.data()[at]) * f32::from_le_bytes(scale.try_into().unwrap())
        };
        let values: Vec<u8> = (0..rows * cols).flat_map(|at| value(at).to_le_bytes()).collect();
        plain.insert(name.to_owned(), (vec![rows, cols], values));
    }
    assert!(plain.len() > 1);
    let kept = file.tensors().into_iter().filter(|(name, _)| !name.contains("kv_b_proj"));
    let changed = plain.iter().map(|(name, (shape, values))| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), values).unwrap())
    });
    let written = serialize(kept.chain(changed), None).unwrap();
    let copy = tempfile::tempdir().unwrap();
    fs::write(copy.path().join("model.safetensors"), written).unwrap();
    for name in ["config.json", "tokenizer.json"] {
        fs::write(copy.path().join(name), fs::read(folder.join(name)).unwrap()).unwrap();
    }
    let options = SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
    let logits = |path| {
        let mut session = Session::open(path, &options, &mut |_, _| {}).unwrap();
        session.logits(&[5, 9, 31, 7, 40, 2], None).unwrap()
    };
    let (quantised, mixed) = (logits(&folder), logits(copy.path()));
    let largest = quantised.iter().zip(&mixed).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-5, "{largest}");
}
