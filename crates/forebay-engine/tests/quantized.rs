//! Quantised Hugging Face folders that are damaged or of a form that forebay does not know. Whole ones are among the
//! models of the other tests.

mod support;

use std::fs;
use std::path::Path;

use forebay_engine::{Session, SessionOptions};
use serde_json::{Map, Value, json};
use support::{fixture, write_safetensors};

/// Returns the error of opening fixture `name` after a change of its tensor table and configuration, or `None` if the
/// fixture is not there.
fn refused(name: &str, change: impl FnOnce(&mut Map<String, Value>, &mut Value)) -> Option<String> {
    let from = fixture(&format!("models/{name}"))?;
    let folder = tempfile::tempdir().unwrap();
    write_changed(&from, folder.path(), change);
    let options = SessionOptions { context: Some(64), ..SessionOptions::default() };
    let error = Session::open(folder.path(), &options, &mut |_, _| {}).err();
    Some(error.unwrap_or_else(|| panic!("{name} was opened")).to_string())
}

fn write_changed(from: &Path, to: &Path, change: impl FnOnce(&mut Map<String, Value>, &mut Value)) {
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut table = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut config = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    change(&mut table, &mut config);
    write_safetensors(to, &table, &bytes[8 + length..]);
    fs::write(to.join("config.json"), serde_json::to_vec(&config).unwrap()).unwrap();
    fs::copy(from.join("tokenizer.json"), to.join("tokenizer.json")).unwrap();
}

type Change = fn(&mut Map<String, Value>, &mut Value);

/// Hides a tensor. Its bytes must keep a name.
fn remove(table: &mut Map<String, Value>, name: &str) {
    rename(table, name, &format!("hidden.{name}"));
}

fn rename(table: &mut Map<String, Value>, name: &str, to: &str) {
    let tensor = table.remove(&format!("model.layers.1.{name}")).expect(name);
    table.insert(format!("model.layers.1.{to}"), tensor);
}

fn set(table: &mut Map<String, Value>, name: &str, key: &str, value: Value) {
    table[&format!("model.layers.1.{name}")][key] = value;
}

#[test]
fn unknown_and_damaged_folders_are_refused_by_name() {
    let cases: [(&str, Change, &[&str]); 21] = [
        (
            "deepseek_v3_fp8",
            |_, c| c["quantization_config"]["fmt"] = json!("e5m2"),
            &["fmt", "e5m2"],
        ),
        (
            "deepseek_v3_fp8",
            |_, c| c["quantization_config"]["weight_block_size"] = json!([128, 0]),
            &["weight_block_size"],
        ),
        (
            "deepseek_v3_fp8",
            |_, c| c["quantization_config"]["weight_block_size"] = json!([128, 48]),
            &["weight_scale", "tile"],
        ),
        (
            "deepseek_v3_fp8",
            |_, c| c["quantization_config"] = Value::Null,
            &["weight_scale_inv", "weight_block_size"],
        ),
        (
            "deepseek_v3_fp8",
            |t, _| remove(t, "mlp.experts.3.up_proj.weight_scale_inv"),
            &["no tensor", "experts.3.up_proj.weight_scale"],
        ),
        (
            "deepseek_v3_fp8",
            |t, _| set(t, "mlp.experts.3.up_proj.weight_scale_inv", "shape", json!([2, 1])),
            &["experts.3.up_proj.weight_scale_inv", "[2, 1]"],
        ),
        (
            "deepseek_v3_fp8",
            |t, _| set(t, "self_attn.o_proj.weight_scale_inv", "dtype", json!("I32")),
            &["o_proj.weight_scale_inv", "I32"],
        ),
        (
            "deepseek_v3_fp8",
            |t, _| set(t, "self_attn.kv_b_proj.weight", "shape", json!([96, 384])),
            &["kv_b_proj", "shape"],
        ),
        (
            "llama_nvfp4_modelopt",
            |_, c| c["quantization_config"]["quant_algo"] = json!("INT4_AWQ"),
            &["quant_algo", "INT4_AWQ"],
        ),
        (
            "llama_nvfp4_modelopt",
            |t, _| remove(t, "mlp.up_proj.weight_scale_2"),
            &["no tensor", "up_proj.weight_scale_2"],
        ),
        (
            "llama_nvfp4_modelopt",
            |t, _| rename(t, "mlp.up_proj.input_scale", "mlp.up_proj.pre_quant_scale"),
            &["pre_quant_scale", "activations"],
        ),
        (
            "llama_nvfp4_modelopt",
            |t, _| set(t, "mlp.up_proj.weight_scale", "shape", json!([8, 256])),
            &["up_proj.weight_scale", "shape"],
        ),
        (
            "qwen3_nvfp4_ct",
            |t, _| remove(t, "mlp.up_proj.weight_global_scale"),
            &["no tensor", "weight_global_scale"],
        ),
        (
            "qwen3_nvfp4_ct",
            |t, _| remove(t, "mlp.up_proj.weight_packed"),
            &["no tensor", "up_proj.weight"],
        ),
        (
            "qwen3_int4_ct",
            |t, _| set(t, "mlp.up_proj.weight_scale", "shape", json!([1024])),
            &["up_proj.weight_scale"],
        ),
        (
            "qwen3_int4_ct",
            |t, _| rename(t, "mlp.up_proj.weight_shape", "mlp.up_proj.weight_g_idx"),
            &["weight_g_idx", "adjacent"],
        ),
        (
            "qwen3_int4_ct",
            |_, c| {
                let group = &mut c["quantization_config"]["config_groups"]["group_0"];
                group["weights"]["symmetric"] = json!(false);
            },
            &["symmetric"],
        ),
        (
            "llama_gptq",
            // Scales in the place of an order of columns.
            |t, _| {
                remove(t, "mlp.up_proj.g_idx");
                rename(t, "mlp.down_proj.scales", "mlp.up_proj.g_idx");
                set(t, "mlp.up_proj.g_idx", "dtype", json!("I32"));
                set(t, "mlp.up_proj.g_idx", "shape", json!([128]));
            },
            &["up_proj.g_idx", "groups"],
        ),
        (
            "llama_gptq",
            |t, _| set(t, "mlp.up_proj.scales", "shape", json!([256, 1])),
            &["up_proj.scales", "[256, 1]"],
        ),
        ("llama_awq", |_, c| c["quantization_config"]["bits"] = json!(3), &["bits", "3"]),
        ("llama_awq", |t, _| remove(t, "mlp.up_proj.qzeros"), &["no tensor", "up_proj.qzeros"]),
    ];
    expect_refused(&cases);
}

fn expect_refused(cases: &[(&str, Change, &[&str])]) {
    for (name, change, words) in cases {
        let Some(said) = refused(name, change) else { return };
        assert!(words.iter().all(|word| said.contains(word)), "{name} {words:?}: {said}");
    }
}

#[test]
fn damaged_folders_with_integers_and_nf4_are_refused_by_name() {
    const NF4: &str = "mlp.up_proj.weight.quant_state.bitsandbytes__nf4";
    let cases: [(&str, Change, &[&str]); 12] = [
        ("llama_w8a8_ct", |t, _| remove(t, "mlp.up_proj.weight_scale"), &["up_proj.weight"]),
        (
            "llama_w8a8_ct",
            |t, _| set(t, "mlp.up_proj.weight_scale", "shape", json!([96])),
            &["up_proj.weight_scale", "groups"],
        ),
        (
            "llama_w8a8_ct",
            |t, _| set(t, "mlp.up_proj.weight_scale", "dtype", json!("I16")),
            &["up_proj.weight_scale", "I16"],
        ),
        (
            "qwen3_w8a16_ct",
            |t, _| rename(t, "mlp.up_proj.weight_shape", "mlp.up_proj.weight_zero_point"),
            &["weight_zero_point", "symmetric"],
        ),
        (
            "qwen3_w8a16_ct",
            |t, _| set(t, "mlp.up_proj.weight_packed", "shape", json!([16, 96])),
            &["up_proj.weight_packed", "shape"],
        ),
        (
            "llama_gptq_actorder",
            // Columns of a group that has no scales.
            |t, _| set(t, "mlp.up_proj.scales", "shape", json!([1, 256])),
            &["up_proj.g_idx", "group 1", "of 1 groups"],
        ),
        (
            "llama_gptq_actorder",
            |t, _| remove(t, "mlp.up_proj.g_idx"),
            &["no tensor", "up_proj.g_idx"],
        ),
        ("llama_bnb_nf4", |t, _| remove(t, NF4), &["no tensor", "quant_state"]),
        (
            "llama_bnb_nf4",
            |t, _| {
                remove(t, NF4);
                rename(t, "mlp.down_proj.weight.quant_state.bitsandbytes__nf4", NF4);
            },
            &["quant_state", "[64, 128]"],
        ),
        (
            "llama_bnb_nf4",
            |t, _| remove(t, "mlp.up_proj.weight.nested_absmax"),
            &["no tensor", "nested_absmax"],
        ),
        (
            "llama_bnb_nf4",
            |t, _| set(t, "mlp.up_proj.weight.absmax", "shape", json!([64, 2])),
            &["weight.absmax", "shape"],
        ),
        (
            "llama_bnb_nf4",
            |_, c| c["quantization_config"]["bnb_4bit_quant_type"] = json!("fp4"),
            &["bnb_4bit_quant_type", "fp4"],
        ),
    ];
    expect_refused(&cases);
}
