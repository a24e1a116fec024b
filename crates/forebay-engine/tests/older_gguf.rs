//! Tests DeepSeek's GGUF files with both matrices of a head in one tensor, as converters wrote them until 2025. They
//! give the same results as files with separate matrices, which other tests compare with llama.cpp.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use forebay_engine::pack::pack;
use forebay_engine::{EngineError, Session, SessionOptions};
use forebay_format::convert::transpose;
use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{Catalog, TensorType, Value, dequantize};
use forebay_store::{IoKind, OutputFile};
use forebay_stream::StreamError;
use half::f16;

const HEADS: usize = 4;

type Contents = (TensorType, Vec<u64>, Vec<u8>);

/// A GGUF file that tests modify.
struct Model {
    values: Vec<(String, Value)>,
    tensors: Vec<(String, Contents)>,
}

impl Model {
    fn read() -> Model {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fixtures/gguf/deepseek_v3/deepseek_v3-BF16.gguf");
        let (catalog, bytes) = (Catalog::open(&path).unwrap(), std::fs::read(&path).unwrap());
        let values = catalog.gguf().unwrap().iter();
        let tensors = catalog.tensors().iter().map(|tensor| {
            let data = &bytes[tensor.extent.offset as usize..tensor.extent.end() as usize];
            (tensor.name.clone(), (tensor.ty, tensor.shape.clone(), data.to_vec()))
        });
        Model {
            values: values.map(|(key, value)| (key.to_owned(), value.clone())).collect(),
            tensors: tensors.collect(),
        }
    }

    fn write(&self, path: PathBuf) -> PathBuf {
        let mut writer = GgufWriter::new(&path);
        self.values.iter().for_each(|(key, value)| writer.set(key, value.clone()).unwrap());
        for (name, (ty, shape, _)) in &self.tensors {
            writer.add_tensor(name, *ty, shape).unwrap();
        }
        let mut data = writer.start(Vec::new()).unwrap();
        self.tensors.iter().for_each(|(_, (.., bytes))| data.write(bytes).unwrap());
        std::fs::write(&path, data.finish().unwrap()).unwrap();
        path
    }

    fn contents(&self, name: &str) -> &Contents {
        &self.tensors.iter().find(|tensor| tensor.0 == name).unwrap().1
    }

    /// Merges rows of keys and values head by head into one tensor of type `ty`. `quantise` encodes a row of values.
    fn in_one_tensor(mut self, ty: TensorType, quantise: fn(&[f32]) -> Vec<u8>) -> Model {
        let apart: Vec<String> = self.layers("attn_k_b");
        let merged: Vec<_> = apart.iter().map(|name| self.merged(name, ty, quantise)).collect();
        self.tensors.retain(|(name, _)| !name.contains("attn_k_b") && !name.contains("attn_v_b"));
        let names = apart.iter().map(|name| name.replace("attn_k_b", "attn_kv_b"));
        self.tensors.extend(names.zip(merged));
        let mut values: HashMap<String, Value> = self.values.drain(..).collect();
        for key in ["key_length", "value_length"] {
            let of_head = values.remove(&format!("deepseek2.attention.{key}_mla")).unwrap();
            values.insert(format!("deepseek2.attention.{key}"), of_head);
        }
        values.insert("deepseek2.attention.head_count_kv".into(), (HEADS as u32).into());
        self.values = values.into_iter().collect();
        self
    }

    fn layers(&self, tensor: &str) -> Vec<String> {
        let names = self.tensors.iter().map(|tensor| &tensor.0);
        names.filter(|name| name.contains(tensor)).cloned().collect()
    }

    /// Merges `[heads, rank, plain]` and `[heads, value, rank]` of bf16 into `[heads * (plain + value), rank]`.
    fn merged(&self, keys: &str, ty: TensorType, quantise: fn(&[f32]) -> Vec<u8>) -> Contents {
        let (key_type, key_shape, keys_bytes) = self.contents(keys);
        let (.., value_shape, values) = self.contents(&keys.replace("attn_k_b", "attn_v_b"));
        assert_eq!((*key_type, key_shape[0]), (TensorType::BF16, HEADS as u64));
        let (rank, plain) = (key_shape[1] as usize, key_shape[2] as usize);
        let value = value_shape[1] as usize;
        let mut rows = Vec::new();
        for head in 0..HEADS {
            let mut of_head = vec![0; plain * rank * 2];
            let keys = &keys_bytes[head * of_head.len()..][..of_head.len()];
            transpose(keys, rank, plain, 2, &mut of_head);
            of_head.extend(&values[head * value * rank * 2..][..value * rank * 2]);
            for row in of_head.chunks_exact(rank * 2) {
                let mut floats = vec![0.0; rank];
                dequantize(TensorType::BF16, row, &mut floats).unwrap();
                rows.extend(quantise(&floats));
            }
        }
        (ty, vec![(HEADS * (plain + value)) as u64, rank as u64], rows)
    }

    /// Replaces the matrices by those of `older`, separated: keys are decoded and rounded to f16, values stay as they
    /// are.
    fn apart_as_in(mut self, older: &Model) -> Model {
        for name in self.layers("attn_k_b") {
            let (ty, _, bytes) = older.contents(&name.replace("attn_k_b", "attn_kv_b"));
            let values_name = name.replace("attn_k_b", "attn_v_b");
            let (key_shape, value_shape) =
                (self.contents(&name).1.clone(), self.contents(&values_name).1.clone());
            let (rank, plain) = (key_shape[1] as usize, key_shape[2] as usize);
            let row = ty.row_bytes(rank as u64).unwrap() as usize;
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for head in bytes.chunks_exact(bytes.len() / HEADS) {
                let mut floats = vec![0.0; plain * rank];
                dequantize(*ty, &head[..plain * row], &mut floats).unwrap();
                for col in 0..rank {
                    let column = floats.chunks_exact(rank).map(|row| row[col]);
                    keys.extend(column.flat_map(|value| f16::from_f32(value).to_le_bytes()));
                }
                values.extend(&head[plain * row..]);
            }
            for (tensor, contents) in &mut self.tensors {
                if *tensor == name {
                    *contents = (TensorType::F16, key_shape.clone(), std::mem::take(&mut keys));
                } else if *tensor == values_name {
                    *contents = (*ty, value_shape.clone(), std::mem::take(&mut values));
                }
            }
        }
        self
    }
}

fn bf16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_bits().to_le_bytes()[2..].to_vec()).collect()
}

fn q8_0(values: &[f32]) -> Vec<u8> {
    let block = |values: &[f32]| {
        let most = values.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
        let scale = f16::from_f32(most / 127.0);
        let code = |value: &f32| (value / scale.to_f32()).round().clamp(-127.0, 127.0) as i8 as u8;
        scale.to_le_bytes().into_iter().chain(values.iter().map(code)).collect::<Vec<u8>>()
    };
    values.chunks_exact(32).flat_map(block).collect()
}

fn options(ram_bytes: Option<u64>) -> SessionOptions {
    SessionOptions { ram_bytes, context: Some(64), threads: Some(2), ..SessionOptions::default() }
}

fn open(path: &Path, options: &SessionOptions) -> Result<Session, EngineError> {
    Session::open(path, options, &mut |_, _| {})
}

fn bits(path: &Path, options: &SessionOptions) -> Vec<u32> {
    let mut session = open(path, options).unwrap();
    let tokens: Vec<u32> = (0..40).map(|index| index * 31 % 512).collect();
    let mut logits = session.logits(&tokens, None).unwrap();
    logits.extend(session.logits(&tokens[..1], None).unwrap());
    assert!(logits.iter().any(|value| *value != logits[0]));
    logits.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn one_tensor_for_keys_and_values_answers_as_two() {
    let place = tempfile::tempdir().unwrap();
    let file = |name: &str| place.path().join(name);
    let floats = Model::read().in_one_tensor(TensorType::BF16, bf16);
    let quantised = Model::read().in_one_tensor(TensorType::Q8_0, q8_0);
    let apart = Model::read().apart_as_in(&quantised);
    let original = Model::read().write(file("original.gguf"));
    let pairs = [
        (floats.write(file("floats.gguf")), original),
        (quantised.write(file("quantised.gguf")), apart.write(file("apart.gguf"))),
    ];
    for (older, newer) in pairs {
        let expected = bits(&newer, &options(None));
        let packed = older.with_extension("fbay");
        pack(&older, OutputFile::replace(&packed).unwrap(), IoKind::Auto, &mut |_, _| true)
            .unwrap();
        for path in [&older, &packed] {
            let least = match open(path, &options(Some(1))) {
                Err(EngineError::Stream(StreamError::BudgetTooSmall { needed_bytes, .. })) => {
                    needed_bytes
                }
                other => panic!("one byte must be refused: {:?}", other.map(drop)),
            };
            for ram in [Some(least), Some(least + 100_000), None] {
                for io in [IoKind::Auto, IoKind::Pread, IoKind::Mmap] {
                    let options = SessionOptions { io, ..options(ram) };
                    assert!(bits(path, &options) == expected, "{}: {ram:?} {io}", path.display());
                }
            }
        }
    }
}

#[test]
fn neither_form_is_refused_by_name() {
    let mut model = Model::read();
    model.tensors.retain(|(name, _)| !name.contains("attn_k_b"));
    let place = tempfile::tempdir().unwrap();
    let path = model.write(place.path().join("model.gguf"));
    let said = open(&path, &options(None)).map(drop).unwrap_err().to_string();
    assert!(said.contains("attn_kv_b"), "{said}");
}
