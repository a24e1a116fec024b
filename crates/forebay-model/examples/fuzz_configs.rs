//! Describes models by false metadata, many in a short time. The metadata are those of the reference models with other values:
//! `config.json` of folders, and the keys of GGUF files. A panic, or more memory than ten times the size of the model's files,
//! ends the program with an error.
//!
//! `cargo run --release -p forebay-model --example fuzz_configs -- INPUTS [SEED] [THREADS]`
//!
//! The models are in `fixtures/`, or in the folders of `FOREBAY_FIXTURES`, with `:` between them. Overflow checks make it
//! stricter: `CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS=true CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true`.

#[path = "../../forebay-codec/examples/common/fuzz.rs"]
mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use common::Fuzz;
use forebay_format::{
    Array, Catalog, GgufMetadata, HfMetadata, Source, Value, parse_config_bytes, parse_gguf_bytes,
};
use forebay_model::{Architecture, Weights};
use forebay_store::FileSet;
use serde_json::Value as Json;

/// Largest multiple of the size of a model's files that describing it may take.
const TIMES: usize = 10;
/// Weights are described for one of so many inputs that are accepted. That reads files.
const WEIGHTS_EACH: u32 = 32;
/// A whole GGUF header is parsed for one of so many inputs. That copies a file.
const HEADER_EACH: u32 = 50;

/// Counts the bytes that each thread has.
struct Counting;

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn more(bytes: usize) {
    let now = NOW.get().wrapping_add(bytes);
    NOW.set(now);
    PEAK.set(PEAK.get().max(now));
}

// SAFETY: memory is the system allocator's. Counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        more(layout.size());
        // SAFETY: the caller's promises are those that the system's allocator needs.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // Another thread may have allocated it.
        NOW.set(NOW.get().saturating_sub(layout.size()));
        // SAFETY: the caller's promises are those that the system's allocator needs.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A model that inputs are made of.
#[derive(Clone)]
struct Model {
    name: String,
    catalog: Catalog,
    bytes: usize,
    files: FileSet,
    metadata: Metadata,
}

#[derive(Clone)]
enum Metadata {
    Config(Json),
    /// Keys without the vocabulary, and the whole file.
    Gguf(Vec<(String, Value)>, Vec<u8>),
}

fn main() -> ExitCode {
    let Some(fuzz) = Fuzz::from_arguments("fuzz_configs") else { return ExitCode::from(2) };
    let models = models();
    println!("{} models", models.len());
    if models.is_empty() {
        return ExitCode::from(2);
    }
    let worker = || Worker { models: models.clone() };
    fuzz.run(worker, |worker, random| worker.step(random).map_err(|wrong| println!("{wrong}")).ok())
}

/// Opens the reference models.
fn models() -> Vec<Model> {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let folders = std::env::var("FOREBAY_FIXTURES");
    let folders = folders.map_or(vec![project], |all| all.split(':').map(PathBuf::from).collect());
    let mut paths = Vec::new();
    for folder in &folders {
        for below in ["models", "gguf", "."] {
            let entries = std::fs::read_dir(folder.join(below)).into_iter().flatten().flatten();
            paths.extend(entries.map(|entry| entry.path()));
        }
    }
    let inner = |path: PathBuf| match path.is_dir() {
        true => {
            std::fs::read_dir(&path).into_iter().flatten().flatten().map(|e| e.path()).collect()
        }
        false => vec![path],
    };
    let mut all = paths.clone();
    all.extend(paths.into_iter().flat_map(inner));
    all.sort();
    all.dedup();
    all.iter().filter_map(|path| model(path)).collect()
}

/// Opens a model if there is one at the path.
fn model(path: &Path) -> Option<Model> {
    let is_gguf = path.extension().is_some_and(|extension| extension == "gguf");
    if !is_gguf && !path.join("config.json").exists() {
        return None;
    }
    let catalog = Catalog::open(path).ok()?;
    let metadata = match &catalog.source {
        Source::HuggingFace(metadata) => Metadata::Config(metadata.config.clone()),
        Source::Gguf(metadata) => {
            let keys = metadata.iter().filter(|(key, _)| !key.starts_with("tokenizer."));
            let keys = keys.map(|(key, value)| (key.to_owned(), value.clone())).collect();
            Metadata::Gguf(keys, std::fs::read(path).ok()?)
        }
    };
    let files = FileSet::open(&catalog.files).ok()?;
    let bytes = catalog.file_bytes.iter().sum::<u64>() as usize;
    Some(Model { name: path.display().to_string(), catalog, bytes, files, metadata })
}

struct Worker {
    models: Vec<Model>,
}

/// Metadata that are made of those of models.
enum Input {
    /// The text of a `config.json`.
    Config(String),
    Keys(Vec<(String, Value)>),
    /// A whole file.
    Header(Vec<u8>),
}

impl Worker {
    /// Describes one model. Returns whether its metadata were accepted, or what is wrong.
    fn step(&mut self, random: &mut fastrand::Rng) -> Result<bool, String> {
        let (at, other) = (random.usize(..self.models.len()), random.usize(..self.models.len()));
        let (model, other) = (&self.models[at].metadata, &self.models[other].metadata);
        let input = match (model, other) {
            (Metadata::Config(config), Metadata::Config(other)) => {
                Input::Config(changed_config(config, other, random))
            }
            (Metadata::Config(config), _) => Input::Config(changed_config(config, config, random)),
            (Metadata::Gguf(_, file), _) if random.u32(..HEADER_EACH) == 0 => {
                Input::Header(changed_header(file, random))
            }
            (Metadata::Gguf(keys, _), Metadata::Gguf(other, _)) => {
                Input::Keys(changed_keys(keys, other, random))
            }
            (Metadata::Gguf(keys, _), _) => Input::Keys(changed_keys(keys, keys, random)),
        };
        let model = &mut self.models[at];
        let with_weights = random.u32(..WEIGHTS_EACH) == 0;
        let before = NOW.get();
        PEAK.set(before);
        let run = || describe(model, &input, with_weights);
        let accepted = catch_unwind(AssertUnwindSafe(run));
        let taken = PEAK.get() - before;
        let Ok(accepted) = accepted else {
            return Err(format!("a panic: {}: {}", self.models[at].name, told(&input)));
        };
        let model = &self.models[at];
        if taken > TIMES * model.bytes {
            let bytes = model.bytes;
            let (name, input) = (&model.name, told(&input));
            return Err(format!("{taken} bytes of memory for {bytes} of files: {name}: {input}"));
        }
        Ok(accepted)
    }
}

/// Returns the text of an input.
fn told(input: &Input) -> String {
    match input {
        Input::Config(text) => text.clone(),
        Input::Keys(keys) => format!("{keys:?}"),
        Input::Header(file) => format!("{:02x?}", &file[..file.len().min(16 << 10)]),
    }
}

/// Describes a model by other metadata. Returns whether they were accepted.
fn describe(model: &mut Model, input: &Input, with_weights: bool) -> bool {
    let source = match input {
        Input::Config(text) => parse_config_bytes(text.as_bytes()).map(|config| {
            Source::HuggingFace(Box::new(HfMetadata {
                config,
                tokenizer_json: None,
                tokenizer_config: None,
                generation_config: None,
                tiktoken: None,
                chat_templates: Default::default(),
            }))
        }),
        Input::Keys(keys) => {
            let mut metadata = GgufMetadata::new(3);
            for (key, value) in keys {
                metadata.insert(key.clone(), value.clone());
            }
            Ok(Source::Gguf(metadata))
        }
        Input::Header(file) => parse_gguf_bytes(file).map(|header| Source::Gguf(header.metadata)),
    };
    let Ok(source) = source else { return false };
    model.catalog.source = source;
    let Ok(architecture) = Architecture::from_catalog(&model.catalog) else { return false };
    let proposing = Architecture::with_mtp(&model.catalog);
    if with_weights {
        for architecture in [Some(architecture), proposing.ok()].iter().flatten() {
            let _ = Weights::new(&model.catalog, architecture, &model.files);
        }
    }
    true
}

/// Numbers at which sizes go wrong.
const NUMBERS: [u64; 24] = [
    0,
    1,
    2,
    3,
    7,
    64,
    255,
    256,
    1000,
    4096,
    65_535,
    65_536,
    65_537,
    (1 << 24) - 1,
    1 << 24,
    i32::MAX as u64,
    u32::MAX as u64,
    1 << 32,
    1 << 53,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
    10_000_000,
];

const FLOATS: [f64; 10] =
    [0.0, -0.0, -1.0, 0.5, 1e-300, 1e300, 1e-6, 65504.5, f64::MAX, f64::MIN_POSITIVE];

fn number(random: &mut fastrand::Rng) -> u64 {
    match random.u8(..4) {
        0 => random.u64(..40),
        1 => random.u64(..),
        _ => NUMBERS[random.usize(..NUMBERS.len())],
    }
}

/// Returns the text of a configuration with some values changed. `other` gives values, too.
fn changed_config(config: &Json, other: &Json, random: &mut fastrand::Rng) -> String {
    let mut config = config.clone();
    for _ in 0..random.u32(1..5) {
        change(&mut config, other, random, 0);
    }
    let mut text = config.to_string();
    // These are no JSON, but Python writes them.
    for name in ["Infinity", "-Infinity", "NaN"] {
        text = text.replace(&format!("\"@{name}\""), name);
    }
    if random.u8(..64) == 0 && !text.is_empty() {
        let at = random.usize(..text.len());
        let mut bytes = text.into_bytes();
        bytes[at] = b"{}[]\",:0-9eE.\\N"[random.usize(..15)];
        text = String::from_utf8_lossy(&bytes).into_owned();
    }
    text
}

/// Changes one value within `value`.
fn change(value: &mut Json, other: &Json, random: &mut fastrand::Rng, depth: u32) {
    let goes_deeper = depth == 0 || random.u8(..4) > 0;
    match value {
        Json::Object(members) if goes_deeper && !members.is_empty() => {
            let at = random.usize(..members.len());
            let key = members.keys().nth(at).cloned().unwrap_or_default();
            match random.u8(..24) {
                0 => {
                    members.remove(&key);
                }
                1 => {
                    // The value of another key.
                    let from = random.usize(..members.len());
                    let taken = members.values().nth(from).cloned().unwrap_or_default();
                    members.insert(key, taken);
                }
                2 | 3 => {
                    // A key of another model.
                    let Some(others) = other.as_object().filter(|others| !others.is_empty()) else {
                        return;
                    };
                    let from = random.usize(..others.len());
                    if let Some((key, value)) = others.iter().nth(from) {
                        members.insert(key.clone(), value.clone());
                    }
                }
                _ => {
                    let other = other.get(&key).unwrap_or(other);
                    if let Some(member) = members.get_mut(&key) {
                        change(member, other, random, depth + 1);
                    }
                }
            }
        }
        Json::Array(items) if goes_deeper && !items.is_empty() => {
            let at = random.usize(..items.len());
            match random.u8(..6) {
                0 => items.truncate(at),
                1 => items.extend_from_within(at..),
                _ => change(&mut items[at], other, random, depth + 1),
            }
        }
        value => *value = any_json(value, random),
    }
}

/// Returns a value for the place of another one, mostly of the same type.
fn any_json(value: &Json, random: &mut fastrand::Rng) -> Json {
    let kind = match (value, random.u8(..8)) {
        (_, 0) => random.u8(..8),
        (Json::Bool(_), _) => 2,
        (Json::String(_), _) => 3,
        (Json::Array(_), _) => 4,
        (Json::Object(_), _) => 5,
        (Json::Number(number), _) if number.is_f64() => 1,
        _ => 0,
    };
    match kind {
        0 if random.u8(..16) == 0 => (-(random.u8(1..) as i64)).into(),
        0 => number(random).into(),
        1 => FLOATS[random.usize(..FLOATS.len())].into(),
        2 => random.bool().into(),
        3 => {
            let words = [
                "",
                "yarn",
                "llama3",
                "linear",
                "full_attention",
                "linear_attention",
                "é",
                "sigmoid",
            ];
            let special = ["@Infinity", "@-Infinity", "@NaN"];
            match random.bool() {
                true => words[random.usize(..words.len())].into(),
                false => special[random.usize(..special.len())].into(),
            }
        }
        4 => (0..random.usize(..70)).map(|_| Json::from(random.u64(..9))).collect(),
        5 => serde_json::json!({}),
        6 => ["@Infinity", "@-Infinity", "@NaN"][random.usize(..3)].into(),
        _ => Json::Null,
    }
}

/// Returns keys with some values changed. `other` gives values, too.
fn changed_keys(
    keys: &[(String, Value)],
    other: &[(String, Value)],
    random: &mut fastrand::Rng,
) -> Vec<(String, Value)> {
    let mut keys = keys.to_vec();
    for _ in 0..random.u32(1..5) {
        if keys.is_empty() {
            break;
        }
        let at = random.usize(..keys.len());
        match random.u8(..16) {
            0 => {
                keys.swap_remove(at);
            }
            1 => keys[at].1 = other[random.usize(..other.len())].1.clone(),
            2 => keys.push(other[random.usize(..other.len())].clone()),
            3 => {
                // The same key for another architecture.
                let name = keys[at].0.split_once('.').map(|(_, name)| name.to_owned());
                let of = other[random.usize(..other.len())].0.split('.').next().unwrap_or("");
                keys[at].0 = format!("{of}.{}", name.unwrap_or_default());
            }
            _ => keys[at].1 = any_value(&keys[at].1, random),
        }
    }
    keys
}

/// Returns a value for the place of another one, mostly of the same type.
fn any_value(value: &Value, random: &mut fastrand::Rng) -> Value {
    let float = FLOATS[random.usize(..FLOATS.len())];
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, float as f32];
    match (value, random.u8(..10)) {
        (_, 0) => Value::U64(number(random)),
        (_, 1) => Value::I64(number(random) as i64),
        (_, 2) => Value::F64(float),
        (_, 3) if random.bool() => Value::String(b"yarn".to_vec()),
        (Value::Array(array), _) => Value::Array(any_array(array, random)),
        (Value::F32(_), _) => Value::F32(special[random.usize(..special.len())]),
        (Value::Bool(_), _) => Value::Bool(random.bool()),
        (Value::String(text), _) => {
            let mut text = text.clone();
            let at = random.usize(..text.len() + 1);
            text.truncate(at);
            Value::String(text)
        }
        (Value::I32(_), _) => Value::I32(number(random) as i32),
        _ => Value::U32(number(random) as u32),
    }
}

fn any_array(array: &Array, random: &mut fastrand::Rng) -> Array {
    let length = random.usize(..70);
    match array {
        Array::Bool(_) => Array::Bool((0..length).map(|_| random.bool()).collect()),
        Array::F32(_) => {
            let float = |random: &mut fastrand::Rng| FLOATS[random.usize(..FLOATS.len())] as f32;
            Array::F32((0..length).map(|_| float(random)).collect())
        }
        Array::U32(_) => Array::U32((0..length).map(|_| number(random) as u32).collect()),
        _ => Array::I32((0..length).map(|_| number(random) as i32).collect()),
    }
}

/// Returns a file with some bytes of its beginning changed.
fn changed_header(file: &[u8], random: &mut fastrand::Rng) -> Vec<u8> {
    let mut file = file.to_vec();
    let within = file.len().min(16 << 10);
    for _ in 0..random.u32(1..5) {
        let at = random.usize(..within);
        match random.u8(..4) {
            0 => file[at] ^= 1 << random.u8(..8),
            1 => file[at] = random.u8(..),
            2 => file[at] = [0, 1, 0x7f, 0x80, 0xff][random.usize(..5)],
            _ => {
                let word = number(random).to_le_bytes();
                let end = file.len().min(at + 8);
                file[at..end].copy_from_slice(&word[..end - at]);
            }
        }
    }
    file
}
