//! Tests predicting layers of families: against references of other programs, against models of one layer that compute the same, and
//! answers with their proposals against answers without.

#[path = "support/gguf_file.rs"]
mod gguf_file;
#[path = "support/logits.rs"]
#[allow(dead_code, reason = "every test file uses a part of it")]
mod logits;
#[path = "support/proposing.rs"]
mod proposing;
mod support;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use forebay_engine::{GenerateOptions, MtpStatistics, Session, SessionOptions};
use forebay_format::{Array, TensorType, Value};
use forebay_model::sampling::{Sampling, argmax};
use gguf_file::GgufFile;
use logits::{Distance, References, json, numbers, prompt};
use proposing::{SOME, Tensor, alike_to, config, tensors, written};
use support::{fixture, needed_bytes};
use tempfile::TempDir;

/// Models with a predicting layer and references for it: of the third set, and by `fixtures/llamacpp/mtp.py`.
const REFERENCED: [&str; 6] = [
    "glm4_moe_mtp",
    "qwen3_next_mtp",
    "mimo2_mtp",
    "nemotron_h_mtp",
    "step3p7_mtp",
    "deepseek_v4_mtp",
];

fn options(exact: bool) -> SessionOptions {
    SessionOptions { mtp: true, exact, context: Some(96), ..SessionOptions::default() }
}

fn open(model: &Path, options: &SessionOptions) -> Session {
    Session::open(model, options, &mut |_, _| {})
        .unwrap_or_else(|error| panic!("{}: {error}", model.display()))
}

/// Returns the models of [`REFERENCED`]: file or folder, its references, and the name of those of the layer.
fn referenced() -> Vec<(PathBuf, PathBuf, String, PathBuf)> {
    let mut all = Vec::new();
    for name in REFERENCED {
        let mut of_folder = None;
        if let Some(folder) = fixture(&format!("models/{name}")) {
            let (logits, reference) =
                (folder.join("reference.safetensors"), folder.join("reference.json"));
            all.push((folder, logits, "mtp.short.logits".into(), reference.clone()));
            of_folder = Some(reference);
        }
        let Some(folder) = fixture(&format!("gguf/{name}")) else { continue };
        let reference = of_folder.unwrap_or_else(|| folder.join("reference.json"));
        let files = json(&folder.join("llamacpp.json"))["files"].clone();
        for (label, of) in files.as_object().unwrap() {
            let file = folder.join(of["file"].as_str().unwrap());
            let name = format!("{label}.exact.mtp.short.logits");
            let logits = folder.join("llamacpp.safetensors");
            all.push((file, logits, name, reference.clone()));
        }
    }
    all
}

#[test]
fn logits_are_the_references() {
    for (model, references, name, reference) in referenced() {
        let expected = References::open(&references).floats(&name).unwrap();
        let reference = json(&reference);
        let ids = prompt(&reference, "short");
        let mut session = open(&model, &options(true));
        let vocabulary = session.vocab_size();
        let (own, predicted) = session.logits_and_predictions(&ids, None).unwrap();
        // The last row of the references follows from the choice of the model that is not quantised.
        let next = reference["mtp"]["next"].as_u64().unwrap() as u32;
        let from_next =
            session.proposal_logits(&[&ids[..], &[next][..]].concat(), ids.len()).unwrap();
        let known = &predicted[..predicted.len() - vocabulary];
        let tested = [known, &from_next[..]].concat();
        let distance = Distance::between(&expected, &tested, vocabulary);
        let (most, kl) = (distance.max_abs, distance.kl_mean());
        eprintln!("{}: max abs {most:.1e}, mean KL {kl:.1e}", model.display());
        assert!(most <= 1e-3 && kl <= 1e-7, "{}: {most}, {kl}", model.display());
        if model.is_dir() {
            assert_eq!(argmax(&own[own.len() - vocabulary..]), next);
            let likeliest: Vec<u32> = predicted.chunks_exact(vocabulary).map(argmax).collect();
            assert_eq!(likeliest, numbers(&reference["mtp"]["proposals"]));
        }
        // Generation computes the same rows one by one. The last one follows from another token.
        let one_by_one = session.proposal_logits(&ids, 5).unwrap();
        let together = &predicted[4 * vocabulary..predicted.len() - vocabulary];
        let distance = Distance::between(together, &one_by_one, vocabulary);
        assert!(distance.max_abs <= 5e-5, "{}: {}", model.display(), distance.max_abs);
    }
}

#[test]
fn predictions_change_neither_logits_nor_routing_nor_what_follows() {
    for (model, ..) in referenced() {
        let ids: Vec<u32> = (0..40).map(|at| at * at % 311).collect();
        let answer = |session: &mut Session| {
            let options = GenerateOptions::exactly(12, Sampling::greedy());
            session.generate(&[7, 8], &options, &mut |_| ControlFlow::Continue(())).unwrap().tokens
        };
        let (mut routing, mut expected) = (Vec::new(), Vec::new());
        let mut with = open(&model, &options(false));
        let (own, predicted) = with.logits_and_predictions(&ids, Some(&mut routing)).unwrap();
        assert_eq!(predicted.len(), own.len());
        let mut without = open(&model, &SessionOptions { mtp: false, ..options(false) });
        let logits = without.logits(&ids, Some(&mut expected)).unwrap();
        assert!(own == logits && routing == expected, "{}", model.display());
        assert_eq!(answer(&mut with), answer(&mut without), "{}", model.display());
        assert!(without.logits_and_predictions(&ids, None).is_err());
        assert!(with.logits_and_predictions(&[], None).is_err());
    }
}

/// Returns an answer to each of two prompts, and what became of the proposals.
fn answers(model: &Path, options: &SessionOptions) -> (Vec<Vec<u32>>, Option<MtpStatistics>) {
    let mut session = open(model, options);
    let mut go = |prompt: &[u32]| {
        let options = GenerateOptions::exactly(33, Sampling::greedy());
        session.generate(prompt, &options, &mut |_| ControlFlow::Continue(())).unwrap().tokens
    };
    let all = vec![go(&[3, 17, 90, 41, 41, 5]), go(&[7, 8])];
    (all, session.statistics().mtp)
}

/// Compares answers with proposals with those without, resident and with the smallest budget, and logits of the layer.
fn same(model: &Path) -> MtpStatistics {
    let (expected, none) = answers(model, &SessionOptions { mtp: false, ..options(false) });
    assert_eq!(none, None);
    let one = SessionOptions { ram_bytes: Some(1), ..options(false) };
    let least = needed_bytes(Session::open(model, &one, &mut |_, _| {}));
    let ids: Vec<u32> = (0..40).map(|at| at * at % 311).collect();
    let (mut all, mut logits) = (MtpStatistics::default(), Vec::new());
    for ram_bytes in [None, Some(least), Some(least + 30_000)] {
        let options = SessionOptions { ram_bytes, ..options(false) };
        let (found, of) = answers(model, &options);
        assert_eq!(found, expected, "{}, {ram_bytes:?}", model.display());
        all = of.unwrap();
        assert!(all.proposals > 0, "{}: {all:?}", model.display());
        logits.push(open(model, &options).logits_and_predictions(&ids, None).unwrap());
    }
    assert!(logits.iter().all(|of| *of == logits[0]), "{}: streamed", model.display());
    all
}

#[test]
fn answers_are_the_same() {
    for (model, ..) in referenced() {
        same(&model);
        if model.is_dir() {
            // Some proposals are right, and some are wrong.
            let alike = alike_to(&model, SOME);
            let of = same(alike.path());
            println!("{}: {} of {} accepted", model.display(), of.accepted, of.proposals);
            assert!(of.accepted * 10 > of.proposals && of.accepted < of.proposals, "{of:?}");
        }
    }
}

/// Numbers between -1 and 1.
fn noise(seed: u64, count: usize) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..count).map(|_| 2.0 * random.f32() - 1.0).collect()
}

/// What a predicting layer has before its layer, and the norm behind it.
struct Join {
    hidden: usize,
    epsilon: f64,
    embedding_norm: Vec<f32>,
    hidden_norm: Vec<f32>,
    join: Vec<f32>,
    last_norm: Vec<f32>,
}

impl Join {
    fn new(hidden: usize, epsilon: f64) -> Join {
        let norm = |seed| noise(seed, hidden).into_iter().map(|value| 1.0 + 0.3 * value).collect();
        let share = 2.0 / (hidden as f32).sqrt();
        Join {
            hidden,
            epsilon,
            embedding_norm: norm(1),
            hidden_norm: norm(2),
            join: noise(3, 2 * hidden * hidden).into_iter().map(|value| share * value).collect(),
            last_norm: norm(4),
        }
    }

    /// Returns tensors under these names: of the norms of embeddings and states, of the projection, of the norm behind the layer.
    fn tensors(&self, names: [String; 4]) -> [Tensor; 4] {
        let hidden = self.hidden as u64;
        let [embedding_norm, hidden_norm, join, last_norm] = names;
        [
            (embedding_norm, vec![hidden], self.embedding_norm.clone()),
            (hidden_norm, vec![hidden], self.hidden_norm.clone()),
            (join, vec![hidden, 2 * hidden], self.join.clone()),
            (last_norm, vec![hidden], self.last_norm.clone()),
        ]
    }

    /// Returns the layer's input for the embedding of a token and the state of the token before it.
    fn input(&self, embedding: &[f32], state: &[f32]) -> Vec<f32> {
        let normed = |values: &[f32], weights: &[f32]| -> Vec<f64> {
            let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
            let factor = (squares / self.hidden as f64 + self.epsilon).sqrt().recip();
            let pairs = values.iter().zip(weights);
            pairs.map(|(value, weight)| f64::from(*value) * factor * f64::from(*weight)).collect()
        };
        let both =
            [normed(embedding, &self.embedding_norm), normed(state, &self.hidden_norm)].concat();
        let rows = self.join.chunks_exact(2 * self.hidden);
        rows.map(|row| row.iter().zip(&both).map(|(w, x)| f64::from(*w) * x).sum::<f64>() as f32)
            .collect()
    }
}

/// A table whose product with a vector of `hidden` numbers begins with the vector.
fn identity(vocabulary: usize, hidden: usize) -> Vec<f32> {
    let mut table = vec![0.0; vocabulary * hidden];
    (0..hidden).for_each(|at| table[at * hidden + at] = 1.0);
    table
}

/// Compares the layer's logits with those of a model of one layer whose embeddings are the layer's inputs. `states` is the model with
/// an [`identity`] as its output projection; `one_layer` makes the other model from its table of embeddings.
fn compare(
    model: &Path,
    states: &Path,
    join: &Join,
    embeddings: &[f32],
    one_layer: impl FnOnce(Vec<f32>) -> (TempDir, PathBuf),
) {
    let ids: Vec<u32> = (0..23).map(|at| 5 + at * at % 211).collect();
    let (own, predicted) = open(model, &options(true)).logits_and_predictions(&ids, None).unwrap();
    let vocabulary = own.len() / ids.len();
    let without = SessionOptions { mtp: false, ..options(true) };
    let found = open(states, &without).logits(&ids, None).unwrap();
    let states = found.chunks_exact(vocabulary).map(|row| &row[..join.hidden]);
    let next = argmax(&own[own.len() - vocabulary..]);
    let tokens = ids[1..].iter().copied().chain([next]);
    let mut table = vec![0.0; vocabulary * join.hidden];
    let rows = table.chunks_exact_mut(join.hidden);
    for ((row, token), state) in rows.zip(tokens).zip(states) {
        let at = token as usize * join.hidden;
        row.copy_from_slice(&join.input(&embeddings[at..at + join.hidden], state));
    }
    let (_folder, other) = one_layer(table);
    let rows: Vec<u32> = (0..ids.len() as u32).collect();
    let expected = open(&other, &without).logits(&rows, None).unwrap();
    let distance = Distance::between(&expected, &predicted, vocabulary);
    let largest = expected.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
    eprintln!("{}: max abs {:.1e} of {largest:.1}", model.display(), distance.max_abs);
    assert!(largest > 1.0 && distance.max_abs < 1e-4, "{}: {distance:?}", model.display());
    same(model);
}

/// Names of the table of embeddings, and keys that the configuration of one layer has in place of others.
type Folder = (&'static str, &'static str, &'static [(&'static str, u64)]);

const FOLDERS: [Folder; 2] = [
    ("hy_v3", "model.embed_tokens.weight", &[]),
    ("bailing_hybrid", "model.word_embeddings.weight", &[("layer_group_size", 1)]),
];

#[test]
fn a_predicting_layer_of_a_folder_is_a_model_of_one_layer() {
    for (name, embedding, keys) in FOLDERS {
        let Some(folder) = fixture(&format!("models/{name}")) else { continue };
        let (config, mut all) = (config(&folder), tensors(&folder));
        let count = config["num_hidden_layers"].as_u64().unwrap();
        let epsilon = config["rms_norm_eps"].as_f64().unwrap();
        let hidden = config["hidden_size"].as_u64().unwrap() as usize;
        let join = Join::new(hidden, epsilon);
        let (last, own) =
            (format!("model.layers.{}.", count - 1), format!("model.layers.{count}."));
        let layer: Vec<Tensor> = all
            .iter()
            .filter(|(tensor, ..)| tensor.starts_with(&last))
            .map(|(tensor, shape, values)| {
                let other = noise(9, values.len());
                let values = values.iter().zip(other).map(|(value, by)| value * (1.0 + 0.3 * by));
                (tensor.replace(&last, &own), shape.clone(), values.collect())
            })
            .collect();
        let find = |all: &[Tensor], of: &str| all.iter().position(|(name, ..)| name == of).unwrap();
        let embeddings = all[find(&all, embedding)].2.clone();
        let head = all[find(&all, "lm_head.weight")].clone();
        all.extend(layer.iter().cloned());
        let parts = ["enorm", "hnorm", "eh_proj", "final_layernorm"];
        all.extend(join.tensors(parts.map(|part| format!("{own}{part}.weight"))));
        let model = written(&config, &all);
        let at = find(&all, "lm_head.weight");
        all[at].2 = identity(embeddings.len() / hidden, hidden);
        let states = written(&config, &all);
        compare(model.path(), states.path(), &join, &embeddings, |table| {
            let mut config = config.clone();
            let usual = [("num_hidden_layers", 1), ("first_k_dense_replace", 0)];
            for (key, value) in usual.iter().chain(keys) {
                config[*key] = (*value).into();
            }
            let shape = head.1.clone();
            let mut all = vec![head, (embedding.to_owned(), shape, table)];
            all.push(("model.norm.weight".into(), vec![hidden as u64], join.last_norm.clone()));
            let first = layer.into_iter().map(|(tensor, shape, values)| {
                (tensor.replace(&own, "model.layers.0."), shape, values)
            });
            all.extend(first);
            let folder = written(&config, &all);
            let path = folder.path().to_owned();
            (folder, path)
        });
    }
}

/// Adds a tensor of floats in place of one of the same name.
fn put(file: &mut GgufFile, (name, shape, values): Tensor) {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    file.tensors.retain(|(of, ..)| *of != name);
    file.tensors.push((name, TensorType::F32, shape, bytes));
}

#[test]
fn a_predicting_layer_of_a_gguf_file_is_a_model_of_one_layer() {
    let Some(path) = fixture("gguf/bailing_hybrid/bailing_hybrid-Q4_0.gguf") else { return };
    let mut file = GgufFile::read(&path);
    let hidden = 64;
    let join = Join::new(hidden, 1e-6);
    let vocabulary = 512;
    let shape = vec![vocabulary as u64, hidden as u64];
    let embeddings = noise(7, vocabulary * hidden);
    put(&mut file, ("token_embd.weight".into(), shape.clone(), embeddings.clone()));
    let layer: Vec<_> =
        file.tensors.iter().filter(|(name, ..)| name.starts_with("blk.2.")).cloned().collect();
    let in_layer = |to: &str| -> Vec<_> {
        let moved = |(name, ty, shape, bytes): &(String, TensorType, Vec<u64>, Vec<u8>)| {
            (name.replace("blk.2.", to), *ty, shape.clone(), bytes.clone())
        };
        layer.iter().map(moved).collect()
    };
    let heads = |of: &[u32]| Value::from(of.to_vec());
    let mut model = file.with("block_count", 4_u32).with("nextn_predict_layers", 1_u32);
    model.set("attention.head_count_kv", heads(&[0, 0, 1, 1]));
    model.tensors.extend(in_layer("blk.3."));
    let names = ["nextn.enorm", "nextn.hnorm", "nextn.eh_proj", "layer_output_norm"];
    let names = names.map(|name| format!("blk.3.{name}.weight"));
    join.tensors(names).into_iter().for_each(|tensor| put(&mut model, tensor));
    let (_model, model_path) = model.written();
    let mut states = model.clone();
    let table = identity(vocabulary, hidden);
    put(&mut states, ("output.weight".into(), shape.clone(), table));
    let (_states, states_path) = states.written();
    compare(&model_path, &states_path, &join, &embeddings, |table| {
        let mut one = file.with("block_count", 1_u32).with("leading_dense_block_count", 0_u32);
        one.set("attention.head_count_kv", heads(&[1]));
        one.set("full_attention_interval", 1_u32);
        one.tensors.retain(|(name, ..)| !name.starts_with("blk."));
        one.tensors.extend(in_layer("blk.0."));
        put(&mut one, ("token_embd.weight".into(), shape, table));
        let norm = join.last_norm.clone();
        put(&mut one, ("output_norm.weight".into(), vec![hidden as u64], norm));
        one.written()
    });
}

/// DeepSeek-V4's layer sees its window only, also where no other layer does. One with compressed entries is refused.
#[test]
fn a_predicting_layer_sees_its_window_only() {
    let Some(path) = fixture("gguf/deepseek_v4_mtp/deepseek_v4_mtp-BF16.gguf") else { return };
    let file = GgufFile::read(&path);
    let mut others = file.with("block_count", 4_u32).with("hash_layer_count", 0_u32);
    others.set("attention.compress_ratios", Value::from(vec![4_u32, 128, 4, 0]));
    for key in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
        others.set(key, Value::Array(Array::F32(vec![3.0; 4])));
    }
    others.tensors.retain(|(name, ..)| !name.starts_with("blk.0."));
    for layer in 1..5 {
        let (from, to) = (format!("blk.{layer}."), format!("blk.{}.", layer - 1));
        others.tensors.iter_mut().for_each(|(name, ..)| *name = name.replace(&from, &to));
    }
    let (_others, path) = others.written();
    same(&path);

    let mut with_entries = file.clone();
    for part in ["kv", "gate", "ape", "norm"] {
        let [from, to] = [2, 4].map(|layer| format!("blk.{layer}.attn_compressor_{part}.weight"));
        let like = file.tensors.iter().find(|(name, ..)| *name == from).cloned().unwrap();
        with_entries.tensors.push((to, like.1, like.2, like.3));
    }
    let (_with_entries, path) = with_entries.written();
    let refused = Session::open(&path, &options(true), &mut |_, _| {}).err().unwrap().to_string();
    assert!(refused.contains("compressed entries"), "{refused}");
}
