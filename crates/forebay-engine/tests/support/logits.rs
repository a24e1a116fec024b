//! Reads reference logits and compares logits with them.

use std::path::Path;

use safetensors::SafeTensors;

/// Names of the fixtures in Hugging Face form, one for each family that this build runs.
pub const HUGGING_FACE: &[&str] = &[
    "llama",
    "llama3_rope",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "gemma3",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v2_noq",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "glm4_moe_lite",
    "minimax_m2",
    "kimi_k25",
    "qwen2_moe",
    "ernie4_5_moe",
    "olmo2",
    "olmo3",
    "phi3",
    "llama4",
    "kimi_linear",
    "deepseek_v3_fp8",
    "llama_nvfp4_modelopt",
    "qwen3_nvfp4_ct",
    "qwen3_int4_ct",
    "llama_gptq",
    "llama_awq",
    "qwen3_w8a16_ct",
    "llama_w8a8_ct",
    "llama_fp8_ct_head",
    "llama_gptq_actorder",
    "llama_bnb_nf4",
    "gemma4_moe",
    "gemma4_ple",
    "mimo_v2_flash",
    "deepseek_v32",
    "glm_moe_dsa",
    "nemotron_h",
    "nemotron_h_dense",
    "lfm2_moe",
    "granitemoehybrid",
    "minimax_m3",
    "qwen4_exp",
    "deepseek_v4",
    "glm5_next",
    "glm4_moe_mtp",
    "qwen3_next_mtp",
    "qwen3_vl",
    "qwen3_vl_moe",
    "mistral3",
    "mistral4",
    "laguna",
    "hy_v3",
    "hy_v4",
    "afmoe",
    "exaone_moe",
    "seed_oss",
    "smollm3",
    "glm4",
    "dots1",
    "bailing_hybrid",
    "step3p7",
    "muse_glimmer",
    "muse_spark",
    "inkling",
    "falcon_h1",
    "olmo_hybrid",
    "gemma3n",
    // Made by a script in `fixtures/formulas`.
    "hunyuan_v1_moe",
    "hunyuan_v1_dense",
    "cohere2_moe",
    // Made by `fixtures/transformers/make.py`.
    "arcee",
    "ernie4_5",
    "exaone",
    "gemma",
    "vaultgemma",
    "cwm",
    "internlm3",
    "iquestcoder",
    "ministral",
    "glm",
    "youtu",
    "minicpm3",
    "qwen2_vl",
    "qwen2_5_vl",
    "paddleocr_vl",
    "mellum",
    "granite_swa",
    "granitemoe_swa",
    "granitemoeshared",
    "flex_olmo",
    "helium",
    "hunyuan_vl",
    "solar_open",
    "phimoe",
    "dots3_note",
    "minimax",
    "cohere",
    "cohere2",
    "starcoder2",
    "stablelm",
    "stablelm_parallel",
    "olmo",
    "nemotron",
    "phi",
];
/// Names of the fixtures in GGUF form.
pub const GGUF: &[&str] = &[
    "llama",
    "llama3_rope",
    "llama_k",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_moe_k",
    "mixtral",
    "olmoe",
    "gemma3",
    "glm4_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v2_k",
    "deepseek_v2_lite",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_k",
    "glm4_moe_lite",
    "minimax_m2",
    "kimi_linear",
    "gemma4_moe",
    "gemma4_ple",
    "deepseek_v32",
    "nemotron_h",
    "deepseek_v4",
    "qwen4_exp",
    "qwen4_exp_k",
    "glm5_next",
    "minimax_m3",
    "mimo2",
    "lfm2",
    "lfm2moe",
    "granitehybrid",
    "llama4_gguf",
    "solar_open",
    "glm4_moe_mtp",
    "qwen3_next_mtp",
    "qwen3_vl",
    "qwen3_vl_moe",
    "mistral3",
    "mistral4",
    "laguna",
    "afmoe",
    "exaone4",
    "exaone_moe",
    "granite",
    "granitemoe",
    "glm4",
    "bailing_hybrid",
    "step3p7",
    "muse_glimmer",
    "falcon_h1",
    "jamba",
    // Made by `fixtures/llamacpp/mtp.py`.
    "mimo2_mtp",
    "nemotron_h_mtp",
    "step3p7_mtp",
    "deepseek_v4_mtp",
    // Made by `fixtures/llamacpp/make.py`.
    "deepseek",
    "deepseek2_ocr",
    "bailingmoe",
    "bailingmoe2",
    "minicpm",
    "mellum",
    "maple",
    "granite_swa",
    "grok",
    "arcee",
    "baichuan",
    "internlm2",
    "xverse",
    "deci",
    "ernie4_5",
    "exaone",
    "paddleocr",
    "cogvlm",
    "pangu_embedded",
    "chatglm",
    "qwen",
    "qwen2vl",
    "maincoder",
    "hunyuan_vl",
    "plm",
    "minicpm3",
    "mistral3_moe",
    "dots3note",
    "minimax_01",
    "spark2_5",
    "plamo3",
    "gemma",
    "dbrx",
    "smallthinker",
    "arctic",
    "apertus",
    "orion",
    "codeshell",
    "jais2",
    "gptneox",
    "gptneox_serial",
    "falcon",
    "falcon_one_norm",
    "cohere2_moe",
    "kimi_k3",
    "hy_v4",
];

/// Names of the fixtures with recurrent layers.
#[allow(dead_code, reason = "only some tests need them")]
pub const RECURRENT: &[&str] = &[
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_moe_k",
    "kimi_linear",
    "nemotron_h",
    "nemotron_h_dense",
    "lfm2_moe",
    "granitemoehybrid",
    "qwen4_exp",
    "glm5_next",
    "qwen4_exp_k",
    "lfm2",
    "lfm2moe",
    "granitehybrid",
    "qwen3_next_mtp",
    "nemotron_h_mtp",
    "bailing_hybrid",
    "falcon_h1",
    "jamba",
    "kimi_k3",
    "olmo_hybrid",
    "minimax",
    "minimax_01",
];

/// Returns the context with which a fixture's short prompt and its continuation must be computed, if it matters. Phi-3 rotates
/// with other factors beyond 64 positions, and forebay chooses the factors by the size of the KV cache.
pub fn short_context(name: &str) -> Option<usize> {
    let name = name.trim_start_matches("models/");
    (name.split(' ').next() == Some("phi3")).then_some(64)
}

/// Names of the fixtures whose keys an indexer chooses.
#[allow(dead_code, reason = "only some tests need them")]
pub const INDEXED: &[&str] = &[
    "deepseek_v32",
    "glm_moe_dsa",
    "minimax_m3",
    "qwen4_exp",
    "qwen4_exp_k",
    "glm5_next",
    "hy_v4",
    "dots3_note",
];

/// Returns the beginning of the names of a folder's reference logits. Those of Hy4 are of pairs that rotate, unless its
/// configuration says halves (README of the third set).
pub fn references_of(name: &str) -> &'static str {
    match name.starts_with("hy_v4") && !name.contains("halves") {
        true => "hf_pairs",
        false => "hf",
    }
}

/// Names of the fixtures whose tokens use one or two of a few experts, so that another choice moves the logits far.
#[allow(dead_code, reason = "only some tests need them")]
pub const FEW_EXPERTS: &[&str] =
    &["llama4_gguf", "mimo2", "laguna", "afmoe", "qwen3_vl_moe", "solar_open"];

/// Limits that a GGUF fixture may have.
pub trait Widened {
    /// Returns these limits with this largest difference and mean divergence.
    fn widened(self, max_abs: f64, kl: f64) -> Self;
}

impl Widened for (f64, f64) {
    fn widened(self, max_abs: f64, kl: f64) -> Self {
        (max_abs, kl)
    }
}

impl Widened for () {
    fn widened(self, _: f64, _: f64) -> Self {}
}

/// First row of the tolerance table: largest difference and mean KL divergence.
pub const EXACT: (f64, f64) = (1e-3, 1e-7);

/// Returns the limits for a comparison with llama.cpp. It computes GELU with a table of f16 values.
pub fn exact_against_llama_cpp(name: &str) -> (f64, f64) {
    match name {
        "gemma3" | "gemma" | "grok" | "spark2_5" | "codeshell" | "gptneox" | "gptneox_serial"
        | "falcon" | "falcon_one_norm" => (1e-2, 1e-6),
        "gemma4_moe" | "gemma4_ple" => (0.1, 1e-4),
        _ => EXACT,
    }
}

/// Returns the limits for the long prompt of a GGUF fixture; `None` if llama.cpp computes something else than the model defines
/// (README of the third set).
pub fn of_long_prompt<L: Widened>(name: &str, usual: L) -> Option<L> {
    match name {
        // llama.cpp sees other keys of the last block than the model.
        "qwen4_exp" => Some(usual.widened(0.1, 1e-4)),
        // llama.cpp sees all keys.
        "minimax_m3" => None,
        _ => Some(usual),
    }
}

/// Reference logits of one file.
pub struct References {
    bytes: Vec<u8>,
}

impl References {
    pub fn open(path: &Path) -> References {
        References { bytes: std::fs::read(path).unwrap() }
    }

    /// Returns the values of a tensor as f32, or `None` if the file lacks it.
    pub fn floats(&self, name: &str) -> Option<Vec<f32>> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = file.tensor(name).ok()?;
        let values = tensor.data().chunks_exact(4);
        Some(values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect())
    }

    pub fn ints(&self, name: &str) -> Option<Vec<i32>> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = file.tensor(name).ok()?;
        let values = tensor.data().chunks_exact(4);
        Some(values.map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap())).collect())
    }
}

/// Distance of tested logits from the reference.
#[derive(Debug)]
pub struct Distance {
    pub max_abs: f32,
    /// KL(reference || tested) of each position.
    pub kl: Vec<f64>,
    /// The reference's gap from the likeliest to the second token, for each position where the likeliest token differs.
    pub top1_misses: Vec<f32>,
}

impl Distance {
    pub fn between(reference: &[f32], tested: &[f32], vocabulary: usize) -> Distance {
        assert_eq!(reference.len(), tested.len(), "logits must have the same shape");
        let pairs = reference.iter().zip(tested);
        let max_abs = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let rows = reference.chunks_exact(vocabulary).zip(tested.chunks_exact(vocabulary));
        let mut kl = Vec::new();
        let mut top1_misses = Vec::new();
        for (reference, tested) in rows {
            kl.push(divergence(reference, tested));
            let (best, gap) = best_and_gap(reference);
            if best_and_gap(tested).0 != best {
                top1_misses.push(gap);
            }
        }
        Distance { max_abs, kl, top1_misses }
    }

    pub fn kl_mean(&self) -> f64 {
        self.kl.iter().sum::<f64>() / self.kl.len() as f64
    }

    pub fn kl_median(&self) -> f64 {
        let mut sorted = self.kl.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }

    /// Returns the largest gap at which the likeliest token differs.
    pub fn worst_miss(&self) -> f32 {
        self.top1_misses.iter().copied().fold(0.0, f32::max)
    }
}

fn best_and_gap(row: &[f32]) -> (usize, f32) {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
    (order[0], row[order[0]] - row[order[1]])
}

fn divergence(reference: &[f32], tested: &[f32]) -> f64 {
    let normalised = |row: &[f32]| {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
        let total: f64 = row.iter().map(|value| (*value as f64 - largest).exp()).sum();
        let shift = largest + total.ln();
        row.iter().map(|value| *value as f64 - shift).collect::<Vec<f64>>()
    };
    let (p, q) = (normalised(reference), normalised(tested));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>().max(0.0)
}

/// Returns `ids` of prompt `which` in a reference.json.
pub fn prompt(reference: &serde_json::Value, which: &str) -> Vec<u32> {
    numbers(&reference[which]["ids"])
}

pub fn numbers(value: &serde_json::Value) -> Vec<u32> {
    let list = value.as_array().expect("a list of numbers");
    list.iter().map(|item| item.as_u64().unwrap() as u32).collect()
}

pub fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
