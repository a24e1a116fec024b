//! Tests folders whose weights need a relayout. They give the same results streamed, resident and from a pack.
//! Inconsistent folders are refused with a readable error.

mod support;

use std::fs;
use std::path::Path;

use forebay_engine::pack::pack;
use forebay_engine::{EngineError, Session, SessionOptions};
use forebay_store::{IoKind, OutputFile};
use forebay_stream::PolicyKind;
use serde_json::{Value, json};
use support::{needed_bytes, write_safetensors};

const LAYERS: usize = 2;
const EXPERTS: usize = 6;
const HIDDEN: usize = 64;
const WIDTH: usize = 32;
const VOCABULARY: usize = 48;

/// A tensor of random bytes that are valid values of its type.
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
}

struct Folder {
    config: Value,
    tensors: Vec<Tensor>,
}

impl Folder {
    fn new(config: Value) -> Folder {
        let mut folder = Folder { config, tensors: Vec::new() };
        folder.add("model.embed_tokens.weight", &[VOCABULARY, HIDDEN]);
        folder.add("lm_head.weight", &[VOCABULARY, HIDDEN]);
        folder.add("model.norm.weight", &[HIDDEN]);
        folder
    }

    fn add(&mut self, name: &str, shape: &[usize]) {
        self.tensors.push(Tensor { name: name.into(), dtype: "BF16", shape: shape.to_vec() });
    }

    fn layer(&mut self, layer: usize, tensors: &[(&str, &[usize])]) {
        for (name, shape) in tensors {
            self.add(&format!("model.layers.{layer}.{name}"), shape);
        }
    }

    fn gpt_oss() -> Folder {
        let mut folder = Folder::new(json!({
            "model_type": "gpt_oss", "hidden_size": HIDDEN, "intermediate_size": WIDTH,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": VOCABULARY,
            "num_hidden_layers": LAYERS, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
            "max_position_embeddings": 256, "sliding_window": 16, "attention_bias": true,
            "rope_theta": 150_000, "tie_word_embeddings": false,
            "layer_types": ["sliding_attention", "full_attention"],
            "quantization_config": { "quant_method": "mxfp4" },
        }));
        for layer in 0..LAYERS {
            folder.layer(
                layer,
                &[
                    ("input_layernorm.weight", &[HIDDEN]),
                    ("post_attention_layernorm.weight", &[HIDDEN]),
                    ("self_attn.q_proj.weight", &[64, HIDDEN]),
                    ("self_attn.q_proj.bias", &[64]),
                    ("self_attn.k_proj.weight", &[32, HIDDEN]),
                    ("self_attn.k_proj.bias", &[32]),
                    ("self_attn.v_proj.weight", &[32, HIDDEN]),
                    ("self_attn.v_proj.bias", &[32]),
                    ("self_attn.o_proj.weight", &[HIDDEN, 64]),
                    ("self_attn.o_proj.bias", &[HIDDEN]),
                    ("self_attn.sinks", &[2]),
                    ("mlp.router.weight", &[EXPERTS, HIDDEN]),
                    ("mlp.router.bias", &[EXPERTS]),
                    ("mlp.experts.gate_up_proj_bias", &[EXPERTS, 2 * WIDTH]),
                    ("mlp.experts.down_proj_bias", &[EXPERTS, HIDDEN]),
                    ("mlp.experts.gate_up_proj_blocks", &[EXPERTS, 2 * WIDTH, HIDDEN / 32, 16]),
                    ("mlp.experts.gate_up_proj_scales", &[EXPERTS, 2 * WIDTH, HIDDEN / 32]),
                    ("mlp.experts.down_proj_blocks", &[EXPERTS, HIDDEN, WIDTH / 32, 16]),
                    ("mlp.experts.down_proj_scales", &[EXPERTS, HIDDEN, WIDTH / 32]),
                ],
            );
        }
        for tensor in &mut folder.tensors {
            if tensor.name.ends_with("_blocks") || tensor.name.ends_with("_scales") {
                tensor.dtype = "U8";
            }
        }
        folder
    }

    fn deepseek() -> Folder {
        let mut folder = Folder::new(json!({
            "model_type": "deepseek_v2", "hidden_size": HIDDEN, "intermediate_size": 96,
            "moe_intermediate_size": WIDTH, "num_attention_heads": 3, "vocab_size": VOCABULARY,
            "num_hidden_layers": LAYERS, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
            "first_k_dense_replace": 1, "n_shared_experts": 1, "max_position_embeddings": 256,
            "kv_lora_rank": 48, "q_lora_rank": null, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
            "v_head_dim": 32, "topk_method": "greedy", "tie_word_embeddings": false,
        }));
        for layer in 0..LAYERS {
            folder.layer(
                layer,
                &[
                    ("input_layernorm.weight", &[HIDDEN]),
                    ("post_attention_layernorm.weight", &[HIDDEN]),
                    ("self_attn.q_proj.weight", &[3 * 32, HIDDEN]),
                    ("self_attn.kv_a_proj_with_mqa.weight", &[48 + 16, HIDDEN]),
                    ("self_attn.kv_a_layernorm.weight", &[48]),
                    ("self_attn.kv_b_proj.weight", &[3 * (16 + 32), 48]),
                    ("self_attn.o_proj.weight", &[HIDDEN, 3 * 32]),
                ],
            );
        }
        let gated = |folder: &mut Folder, of: &str, width: usize| {
            folder.add(&format!("{of}.gate_proj.weight"), &[width, HIDDEN]);
            folder.add(&format!("{of}.up_proj.weight"), &[width, HIDDEN]);
            folder.add(&format!("{of}.down_proj.weight"), &[HIDDEN, width]);
        };
        gated(&mut folder, "model.layers.0.mlp", 96);
        folder.add("model.layers.1.mlp.gate.weight", &[EXPERTS, HIDDEN]);
        gated(&mut folder, "model.layers.1.mlp.shared_experts", WIDTH);
        for expert in 0..EXPERTS {
            gated(&mut folder, &format!("model.layers.1.mlp.experts.{expert}"), WIDTH);
        }
        folder
    }

    fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name.ends_with(name)).unwrap()
    }

    fn write(&self, folder: &Path) {
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        let mut state = 1_u64;
        for Tensor { name, dtype, shape } in &self.tensors {
            let start = data.len();
            for _ in 0..shape.iter().product::<usize>() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                let random = (state >> 40) as u32;
                match *dtype {
                    // The scales are around 2^-3.
                    "U8" if name.ends_with("_scales") => data.push(122 + (random % 4) as u8),
                    "U8" => data.push(random as u8),
                    "F64" => data.extend(0.5_f64.to_le_bytes()),
                    _ => {
                        let value = (random % 1000) as f32 / 2000.0 - 0.25;
                        data.extend(&value.to_le_bytes()[2..]);
                    }
                }
            }
            let at = [start, data.len()];
            let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": at });
            header.insert(name.clone(), entry);
        }
        write_safetensors(folder, &header, &data);
    }

    /// Returns the error of opening the folder.
    fn refused(&self) -> String {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path());
        match open(folder.path(), &options(None)) {
            Ok(_) => panic!("it must be refused"),
            Err(error) => error.to_string(),
        }
    }
}

fn options(ram_bytes: Option<u64>) -> SessionOptions {
    SessionOptions { ram_bytes, context: Some(64), threads: Some(2), ..SessionOptions::default() }
}

fn open(path: &Path, options: &SessionOptions) -> Result<Session, EngineError> {
    Session::open(path, options, &mut |_, _| {})
}

fn bits(session: &mut Session) -> Vec<u32> {
    let tokens: Vec<u32> = (0..40).map(|index| (index * 31 + 5) % VOCABULARY as u32).collect();
    let mut logits = session.logits(&tokens, None).unwrap();
    logits.extend(session.logits(&tokens[..1], None).unwrap());
    assert!(logits.iter().any(|value| *value != logits[0]));
    logits.iter().map(|value| value.to_bits()).collect()
}

fn smallest(path: &Path) -> u64 {
    needed_bytes(open(path, &options(Some(1))))
}

#[test]
fn they_answer_the_same_resident_streamed_and_from_a_pack() {
    for folder in [Folder::gpt_oss(), Folder::deepseek()] {
        let what = folder.config["model_type"].clone();
        let place = tempfile::tempdir().unwrap();
        folder.write(place.path());
        let expected = bits(&mut open(place.path(), &options(None)).unwrap());
        let packed = place.path().join("model.fbay");
        pack(place.path(), OutputFile::replace(&packed).unwrap(), IoKind::Auto, &mut |_, _| true)
            .unwrap();
        for path in [place.path(), &packed] {
            let least = smallest(path);
            for ram_bytes in [Some(least), Some(least + 30_000), None] {
                for io in [IoKind::Auto, IoKind::Pread, IoKind::Mmap] {
                    for policy in [PolicyKind::LAYER_LRU, PolicyKind::LAYER_LFU] {
                        let options = SessionOptions { io, policy, ..options(ram_bytes) };
                        let mut session = open(path, &options).unwrap();
                        assert!(
                            bits(&mut session) == expected,
                            "{what}: {ram_bytes:?} {io} {policy}"
                        );
                        let relayout = session.statistics().stream.unwrap().io.bytes_relaid_out;
                        // Dense blocks may all be pinned, and are then not loaded through the engine. Experts are not
                        // pinned.
                        let streams = ram_bytes == Some(least) && what == "gpt_oss";
                        assert!(relayout > 0 || !streams, "{what}: {ram_bytes:?} {io}");
                    }
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_together_is_refused_in_words() {
    type Change = fn(&mut Folder);
    type Cases<'a> = &'a [(Change, &'a [&'a str])];
    let gpt_oss: [(Change, &[&str]); 8] = [
        (
            |f| f.tensor("1.mlp.experts.gate_up_proj_scales").shape[2] = 3,
            &["gate_up_proj_scales", "shape"],
        ),
        (
            |f| f.tensor("0.mlp.experts.down_proj_scales").shape[0] = 5,
            &["down_proj_scales", "shape"],
        ),
        (
            |f| f.tensors.retain(|of| !of.name.ends_with("0.mlp.experts.gate_up_proj_scales")),
            &["no tensor", "gate_up_proj_scales"],
        ),
        (
            |f| f.tensor("0.mlp.experts.gate_up_proj_blocks").shape[1] = 63,
            &["gate_up_proj_blocks", "shape"],
        ),
        (
            |f| f.tensor("0.mlp.experts.down_proj_blocks").dtype = "BF16",
            &["down_proj_blocks", "BF16"],
        ),
        (|f| f.config["intermediate_size"] = json!(48), &["down_proj", "48", "multiple of 32"]),
        (
            |f| f.add("model.layers.0.mlp.experts.gate_up_proj", &[EXPERTS, HIDDEN, 2 * WIDTH]),
            &["gate_up_proj", "BF16", "MXFP4", "GGUF"],
        ),
        (
            |f| f.config["quantization_config"]["quant_method"] = json!("fp8"),
            &["quantization_config", "fp8", "GGUF"],
        ),
    ];
    let deepseek: [(Change, &[&str]); 4] = [
        (|f| f.tensor("0.self_attn.kv_b_proj.weight").shape[0] = 143, &["kv_b_proj", "shape"]),
        (|f| f.tensor("1.self_attn.kv_b_proj.weight").dtype = "U8", &["kv_b_proj", "U8"]),
        (
            |f| f.tensors.retain(|of| !of.name.ends_with("1.self_attn.kv_b_proj.weight")),
            &["no tensor", "kv_b_proj"],
        ),
        (
            |f| f.config["quantization_config"] = json!({ "quant_method": "hqq" }),
            &["quantization_config", "hqq", "GGUF"],
        ),
    ];
    let sound: [(fn() -> Folder, Cases<'_>); 2] =
        [(Folder::gpt_oss, &gpt_oss), (Folder::deepseek, &deepseek)];
    for (make, changes) in sound {
        for (change, words) in changes {
            let mut folder = make();
            change(&mut folder);
            let said = folder.refused();
            assert!(words.iter().all(|word| said.contains(word)), "{words:?}: {said}");
        }
    }
}
