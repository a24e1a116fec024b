//! GGUF files that tests make or change.
#![allow(dead_code, reason = "every test file uses a part of it")]

use std::path::{Path, PathBuf};

use forebay_engine::{EngineError, Session, SessionOptions};
use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{Catalog, FormatError, TensorType, Value};
use forebay_model::{Architecture, ModelError};
use tempfile::TempDir;

/// A GGUF file in memory.
#[derive(Clone)]
pub struct GgufFile {
    pub keys: Vec<(String, Value)>,
    pub tensors: Vec<(String, TensorType, Vec<u64>, Vec<u8>)>,
}

impl GgufFile {
    /// Reads a file that is in one piece.
    pub fn read(path: &Path) -> GgufFile {
        let (catalog, bytes) = (Catalog::open(path).unwrap(), std::fs::read(path).unwrap());
        let tensors = catalog.tensors().iter().map(|tensor| {
            let data = &bytes[tensor.extent.offset as usize..tensor.extent.end() as usize];
            (tensor.name.clone(), tensor.ty, tensor.shape.clone(), data.to_vec())
        });
        let keys = catalog.gguf().unwrap().iter();
        GgufFile {
            tensors: tensors.collect(),
            keys: keys.map(|(key, value)| (key.to_owned(), value.clone())).collect(),
        }
    }

    /// Makes a model of random numbers with two heads for each key/value head. Its keys are those that every family needs.
    pub fn random(architecture: &str, layers: u32) -> GgufFile {
        let mut file = GgufFile { keys: Vec::new(), tensors: Vec::new() };
        file.keys.push(("general.architecture".into(), architecture.into()));
        for (key, value) in [
            ("context_length", 512),
            ("embedding_length", 64),
            ("block_count", layers),
            ("feed_forward_length", 96),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("attention.key_length", 16),
            ("attention.value_length", 16),
        ] {
            file.set(key, value);
        }
        file.set("attention.layer_norm_rms_epsilon", 1e-5f32);
        for (name, shape) in
            [("token_embd", &[300, 64][..]), ("output_norm", &[64]), ("output", &[300, 64])]
        {
            file.add(&format!("{name}.weight"), shape);
        }
        for layer in 0..layers {
            for (name, shape) in [
                ("attn_norm", &[64][..]),
                ("attn_q", &[64, 64]),
                ("attn_k", &[32, 64]),
                ("attn_v", &[32, 64]),
                ("attn_output", &[64, 64]),
                ("ffn_norm", &[64]),
                ("ffn_gate", &[96, 64]),
                ("ffn_up", &[96, 64]),
                ("ffn_down", &[64, 96]),
            ] {
                file.add(&format!("blk.{layer}.{name}.weight"), shape);
            }
        }
        file
    }

    /// Returns the name of the architecture.
    pub fn architecture(&self) -> String {
        let found = self.keys.iter().find(|(key, _)| key == "general.architecture");
        found.and_then(|(_, value)| value.as_str()).unwrap().to_owned()
    }

    fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture())
    }

    /// Sets a key of the architecture.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        let path = self.path(key);
        self.keys.retain(|(key, _)| *key != path);
        self.keys.push((path, value.into()));
    }

    /// Returns a copy with another value of a key of the architecture.
    pub fn with(&self, key: &str, value: impl Into<Value>) -> GgufFile {
        let mut file = self.clone();
        file.set(key, value);
        file
    }

    /// Returns what is under a key of the architecture.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let path = self.path(key);
        self.keys.iter().find(|(key, _)| *key == path).map(|(_, value)| value)
    }

    /// Removes a key of the architecture.
    pub fn unset(&mut self, key: &str) {
        let path = self.path(key);
        self.keys.retain(|(key, _)| *key != path);
    }

    /// Adds a tensor of random numbers. Those of vectors are near 1.
    pub fn add(&mut self, name: &str, shape: &[u64]) {
        let count: u64 = shape.iter().product();
        let mut random =
            fastrand::Rng::with_seed(name.bytes().map(u64::from).sum::<u64>() * 31 + count);
        let mut number = || -> f32 {
            match shape.len() {
                1 => 0.8 + 0.4 * random.f32(),
                _ => 0.4 * random.f32() - 0.2,
            }
        };
        let bytes = (0..count).flat_map(|_| number().to_le_bytes()).collect();
        self.tensors.push((name.to_owned(), TensorType::F32, shape.to_vec(), bytes));
    }

    /// Writes the file.
    pub fn write(&self, path: &Path) -> PathBuf {
        let mut writer = GgufWriter::new(path);
        self.keys.iter().for_each(|(key, value)| writer.set(key, value.clone()).unwrap());
        for (name, ty, shape, _) in &self.tensors {
            writer.add_tensor(name, *ty, shape).unwrap();
        }
        let mut data = writer.start(Vec::new()).unwrap();
        self.tensors.iter().for_each(|(.., bytes)| data.write(bytes).unwrap());
        std::fs::write(path, data.finish().unwrap()).unwrap();
        path.to_owned()
    }

    /// Writes the file to a new folder. Returns both.
    pub fn written(&self) -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = self.write(&folder.path().join("model.gguf"));
        (folder, path)
    }

    /// Describes the model of the file.
    pub fn described(&self) -> Result<Architecture, ModelError> {
        let (_folder, path) = self.written();
        Architecture::from_catalog(&Catalog::open(&path)?)
    }

    /// Returns the bits of the logits behind some tokens.
    pub fn logits(&self) -> Result<Vec<u32>, EngineError> {
        let (_folder, path) = self.written();
        logits(&path)
    }
}

/// Returns the bits of the logits of a model behind some tokens.
pub fn logits(path: &Path) -> Result<Vec<u32>, EngineError> {
    let options = SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
    let mut session = Session::open(path, &options, &mut |_, _| {})?;
    let tokens: Vec<u32> = (0..40).map(|number| 3 + 7 * number % 200).collect();
    let logits = session.logits(&tokens, None)?;
    Ok(logits.into_iter().map(f32::to_bits).collect())
}

/// Returns everything that a description says.
pub fn words(architecture: &Architecture) -> String {
    format!("{architecture:?}")
}

/// Returns the error of opening a file for its tables.
pub fn error_of(path: &Path) -> FormatError {
    Catalog::open(path).expect_err("the file must be refused")
}
