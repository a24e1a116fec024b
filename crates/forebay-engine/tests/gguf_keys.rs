//! Tests that no key of GGUF metadata passes in silence: each one is used, known to be harmless, or refused by name.

#[path = "support/gguf_file.rs"]
mod gguf_file;
mod support;

use std::io::Write as _;
use std::path::{Path, PathBuf};

use forebay_format::{Array, Value};
use forebay_model::Architecture;
use forebay_model::arch::NormLayout;
use gguf_file::{GgufFile, words};

/// Returns the GGUF files of all sets of fixtures, one of each model.
fn files() -> Vec<PathBuf> {
    let sets = support::all_sets().into_iter();
    let folders = sets.filter_map(|set| std::fs::read_dir(set.join("gguf")).ok());
    let mut files: Vec<PathBuf> =
        folders.flatten().filter_map(|entry| smallest(&entry.unwrap().path())).collect();
    files.sort();
    files
}

fn smallest(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let files = entries.map(|entry| entry.unwrap().path());
    // Files of split sets hold parts of a model.
    let is_gguf = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.ends_with(".gguf") && !name.contains("-of-")
    };
    files.filter(is_gguf).min_by_key(|path| path.metadata().unwrap().len())
}

/// Keys that llama.cpp reads below `rope.` and `attention.`, with a value of the type that it reads.
fn core_keys() -> Vec<(&'static str, Value)> {
    let mut keys: Vec<(&str, Value)> = Vec::new();
    for key in [
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "attention.key_length_swa",
        "attention.value_length_swa",
        "attention.q_lora_rank",
        "attention.kv_lora_rank",
        "attention.decay_lora_rank",
        "attention.iclr_lora_rank",
        "attention.value_residual_mix_lora_rank",
        "attention.gate_lora_rank",
        "attention.relative_buckets_count",
        "attention.group_norm_groups",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.temperature_length",
        "attention.indexer.head_count",
        "attention.indexer.key_length",
        "attention.indexer.top_k",
        "attention.indexer.block_size",
        "attention.indexer.kpool",
        "attention.output_group_count",
        "attention.output_lora_rank",
        "attention.compress_ratios",
        "attention.shared_kv_layers",
        "rope.dimension_count",
        "rope.dimension_count_swa",
        "rope.scaling.original_context_length",
    ] {
        keys.push((key, Value::U32(3)));
    }
    for key in [
        "attention.max_alibi_bias",
        "attention.clamp_kqv",
        "attention.layer_norm_epsilon",
        "attention.layer_norm_rms_epsilon",
        "attention.group_norm_epsilon",
        "attention.scale",
        "attention.output_scale",
        "attention.value_scale",
        "attention.temperature_scale",
        "attention.compress_rope_freq_base",
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.alpha",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_log_multiplier",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.a_key_of_the_future",
        "attention.a_key_of_the_future",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "router_logit_softcapping",
        "residual_scale",
        "embedding_scale",
        "logit_scale",
        "expert_group_scale",
        "expert_latent_length",
        "hyper_connection.magnitude",
    ] {
        keys.push((key, Value::F32(0.37)));
    }
    keys.push(("rope.scaling.type", Value::from("su")));
    keys.push(("attention.causal", Value::Bool(false)));
    keys.push(("attention.indexer.types", Array::Bool(vec![true, false]).into()));
    keys.push(("attention.recurrent_layers", Array::Bool(vec![true; 2]).into()));
    keys.push(("ssm.dt_b_c_rms", Value::Bool(true)));
    keys.push(("use_parallel_residual", Value::Bool(true)));
    keys.push(("hidden_activation", Value::from("tanh")));
    keys
}

/// Returns true if a key says nothing beside what else the file says.
fn is_idle(key: &str, file: &GgufFile, described: &Architecture) -> bool {
    let text = |key: &str| file.get(key).and_then(Value::as_str).unwrap_or("").to_owned();
    let has = |key: &str| file.get(key).is_some();
    let architecture = file.architecture();
    let is_latent = has("attention.kv_lora_rank");
    let rotates = !described.ropes.is_empty();
    let is_yarn = text("rope.scaling.type") == "yarn" && rotates;
    let windows = has("attention.sliding_window");
    match key {
        // The long factors have a factor of their own.
        "rope.scaling.yarn_attn_factor" => architecture == "minicpm3",
        // The family says the same.
        "use_parallel_residual" => described.norms == NormLayout::Parallel,
        // They are numbers of YaRN, or nothing is scaled.
        "rope.scaling.yarn_beta_fast" | "rope.scaling.yarn_beta_slow" => !is_yarn,
        "rope.scaling.original_context_length" | "rope.scaling.yarn_log_multiplier" => !is_yarn,
        "rope.scaling.factor" => text("rope.scaling.type") == "none" || !rotates,
        // The new key decides, or there is no rotation that could be scaled.
        "rope.scale_linear" => {
            has("rope.scaling.factor") || text("rope.scaling.type") == "none" || !rotates
        }
        // Lengths of windows, of models without windows.
        "rope.freq_base_swa" | "rope.dimension_count_swa" => !windows || !rotates,
        "attention.key_length_swa" | "attention.value_length_swa" => !windows || is_latent,
        // A pattern, of models without windows.
        "attention.sliding_window_pattern" => !windows || architecture == "deepseek4",
        // Latent attention has lengths of its own.
        "attention.key_length" | "attention.value_length" | "attention.head_count_kv"
            if is_latent =>
        {
            true
        }
        // Keys of these have the length of `key_length`.
        "attention.key_length_mla" | "attention.value_length_mla" if is_latent => {
            ["minicpm3", "plm"].contains(&architecture.as_ref())
        }
        // A value is its key.
        "attention.value_length" => architecture == "deepseek4",
        // The other key decides.
        "attention.layer_norm_epsilon" => has("attention.layer_norm_rms_epsilon"),
        // The model takes no notice of it.
        "router_logit_softcapping" => architecture == "grok",
        // It goes with `temperature_scale`, which is refused.
        "attention.temperature_length" => true,
        _ if key.starts_with("rope.") && !rotates => true,
        _ => false,
    }
}

#[test]
fn every_key_is_used_or_harmless_or_refused_by_name() {
    let mut tried = 0;
    for path in files() {
        let plain = GgufFile::read(&path);
        let Ok(architecture) = plain.described() else {
            let _ =
                writeln!(std::io::stderr(), "SKIPPED: {} is no model of forebay", path.display());
            continue;
        };
        let usual = words(&architecture);
        for (key, value) in core_keys() {
            // A number that the file has already would say nothing.
            let value = match (value, plain.get(key)) {
                (Value::U32(number), Some(said)) if said.as_u64() == Some(number.into()) => {
                    Value::U32(number + 1)
                }
                (value, _) => value,
            };
            let file = plain.with(key, value);
            let said = file.described();
            let is_noticed = match &said {
                Ok(other) => words(other) != usual,
                // Numbers that are wrong together with others are refused in other words.
                Err(_) => true,
            };
            let shown = path.display();
            let unnamed = key.ends_with("_of_the_future")
                && !said.as_ref().is_err_and(|error| error.to_string().contains(key));
            assert!(!unnamed, "{shown}: {key} must be refused by name");
            assert!(
                is_noticed || is_idle(key, &plain, &architecture),
                "{shown}: {key} is neither used nor refused"
            );
            tried += 1;
        }
    }
    assert!(tried > 300, "{tried}");
}

/// Returns the error of a file that must be refused.
fn refusal(file: &GgufFile) -> String {
    file.described().expect_err("the file must be refused").to_string()
}

#[test]
fn layers_may_lack_blocks_only_where_the_family_says_so() {
    let plain = |architecture: &str| {
        let mut file = GgufFile::random(architecture, 3);
        file.set("rope.dimension_count", 16u32);
        file
    };
    let heads = |file: &GgufFile, heads: Vec<u32>, kv_heads: Vec<u32>| {
        let file = file.with("attention.head_count", Value::from(heads));
        file.with("attention.head_count_kv", Value::from(kv_heads))
    };
    let deci = plain("deci");
    let without = heads(&deci, vec![4, 0, 4], vec![2, 0, 2]).described().unwrap();
    assert_eq!(without.attention_layers().collect::<Vec<_>>(), [0, 2]);
    // Such a layer multiplies its input by one matrix.
    let error = refusal(&heads(&deci, vec![4, 4, 4], vec![2, 0, 2]));
    assert!(error.contains("attention.head_count_kv"), "{error}");
    let widths = deci.with("feed_forward_length", Value::from(vec![96u32, 0, 96]));
    assert!(widths.described().unwrap().layers[1].feed_forward.is_none());
    let error = refusal(&heads(&widths, vec![4, 0, 4], vec![2, 0, 2]));
    assert!(error.contains("it must have attention"), "{error}");
    let llama = plain("llama");
    let error = refusal(&heads(&llama, vec![4, 0, 4], vec![2, 0, 2]));
    assert!(error.contains("heads"), "{error}");
    let error = refusal(&llama.with("feed_forward_length", Value::from(vec![96u32, 0, 96])));
    assert!(error.contains("width"), "{error}");
}

#[test]
fn variants_of_families_are_refused_by_name() {
    let baichuan = GgufFile::random("baichuan", 40);
    assert!(refusal(&baichuan).contains("baichuan.block_count"), "{}", refusal(&baichuan));
    let granite = GgufFile::random("granite_swa", 2);
    let flags = granite.with("attention.rope_pattern", Array::Bool(vec![true]));
    assert!(refusal(&flags).contains("attention.rope_pattern"), "{}", refusal(&flags));
    let flags = granite.with("attention.rope_pattern", Value::U32(4));
    assert!(refusal(&flags).contains("attention.rope_pattern"), "{}", refusal(&flags));
    let alpha = GgufFile::random("hunyuan-dense", 2).with("rope.scaling.alpha", 50f32);
    assert!(refusal(&alpha).contains("rope.scaling.alpha"), "{}", refusal(&alpha));
    let mut grok = GgufFile::random("grok", 2);
    grok.add("blk.0.ffn_gate_inp.weight", &[4, 64]);
    assert!(refusal(&grok).contains("blk.0.ffn_up.weight"), "{}", refusal(&grok));
    let diffusion = GgufFile::random("llada-moe", 2);
    assert!(refusal(&diffusion).contains("diffusion"), "{}", refusal(&diffusion));
}

#[test]
fn keys_about_other_things_do_not_disturb() {
    let plain = GgufFile::random("gemma3", 2);
    let usual = words(&plain.described().unwrap());
    for (key, value) in [
        ("vocab_size", Value::U32(300)),
        ("vision.block_count", Value::U32(27)),
        ("vision.attention.layer_norm_epsilon", Value::F32(1e-6)),
        ("mm.tokens_per_image", Value::U32(256)),
        ("rope.scaling.finetuned", Value::Bool(true)),
        ("rope.dimension_sections", Value::from(vec![1u32, 2, 3, 4])),
        ("pooling_type", Value::U32(1)),
        ("note_of_a_tool", Value::from("made by hand")),
        ("residual_scale", Value::F32(1.0)),
        ("use_parallel_residual", Value::Bool(false)),
    ] {
        assert_eq!(words(&plain.with(key, value).described().unwrap()), usual, "{key}");
    }
}

#[test]
fn numbers_may_be_of_any_type_but_not_of_none() {
    let plain = GgufFile::random("llama", 2);
    let usual = words(&plain.with("rope.freq_base", 50_000f32).described().unwrap());
    for value in [Value::U32(50_000), Value::F64(50_000.0), Value::I64(50_000)] {
        assert_eq!(words(&plain.with("rope.freq_base", value).described().unwrap()), usual);
    }
    for key in
        ["rope.freq_base", "rope.scaling.factor", "attention.scale", "final_logit_softcapping"]
    {
        let error = plain.with(key, "4.0").described().unwrap_err().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
}
