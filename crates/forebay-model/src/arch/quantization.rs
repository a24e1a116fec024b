//! How a Hugging Face folder stores quantised weights: `quantization_config` of its `config.json`.
//!
//! Which matrices are quantised is seen from their tensors, so lists of modules that are left out need no reading. The
//! configuration says what tensors do not, and forms that forebay does not know are refused here.

use forebay_format::Catalog;
use serde_json::Value;

use super::config::short;
use crate::ModelError;

/// What tensors of a quantised folder do not say about themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    pub method: Method,
    /// Rows and columns that share a scale of 8-bit codes, if the configuration has them.
    pub tile: Option<[usize; 2]>,
}

/// The program whose form the tensors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The experts of gpt-oss.
    Mxfp4,
    /// E4M3 as DeepSeek publishes it.
    Fp8,
    ModelOpt,
    CompressedTensors,
    /// `zero_offset` is added to the stored zero points. If `is_ordered` is true, every matrix says which columns form a
    /// group.
    Gptq {
        zero_offset: u32,
        is_ordered: bool,
    },
    Awq,
    /// AWQ as its version `gemv` has it. `group` columns share a scale.
    AwqRows {
        group: usize,
    },
    /// NF4 of bitsandbytes.
    Nf4,
}

fn refuse<T>(key: &str, value: &Value, expected: &str) -> Result<T, ModelError> {
    Err(ModelError::BadValue {
        key: format!("quantization_config.{key}"),
        value: short(value),
        expected: expected.into(),
    })
}

impl Quantization {
    /// Returns the quantisation of a catalog, or `None` for weights that are not quantised and for GGUF files.
    ///
    /// # Errors
    /// Returns an error if forebay does not know the form.
    pub fn of_catalog(catalog: &Catalog) -> Result<Option<Quantization>, ModelError> {
        match catalog.hugging_face() {
            Some(metadata) => Quantization::of_config(&metadata.config),
            None => Ok(None),
        }
    }

    /// Returns the quantisation that a `config.json` describes.
    ///
    /// # Errors
    /// Returns an error if forebay does not know the form.
    pub fn of_config(config: &Value) -> Result<Option<Quantization>, ModelError> {
        let inner = |key: &str| config.get("text_config").and_then(|text| text.get(key));
        let set =
            |key: &str| config.get(key).or_else(|| inner(key)).filter(|value| !value.is_null());
        let Some(json) = set("quantization_config").or_else(|| set("compression_config")) else {
            return Ok(None);
        };
        let none = Value::Null;
        let method = json.get("quant_method").unwrap_or(&none);
        let plain = |method| Ok(Some(Quantization { method, tile: None }));
        match method.as_str().unwrap_or_default() {
            "mxfp4" => plain(Method::Mxfp4),
            "fp8" => fp8(json),
            "modelopt" => modelopt(json),
            "compressed-tensors" => compressed_tensors(json),
            "gptq" => gptq(json),
            "awq" => awq(json),
            "bitsandbytes" => bitsandbytes(json),
            _ => refuse(
                "quant_method",
                method,
                "forebay reads fp8, modelopt, compressed-tensors, gptq, awq, bitsandbytes nf4, and mxfp4 of gpt-oss; convert the model to GGUF",
            ),
        }
    }
}

fn fp8(json: &Value) -> Result<Option<Quantization>, ModelError> {
    if let Some(format) = json.get("fmt").filter(|format| *format != "e4m3") {
        return refuse("fmt", format, "forebay knows e4m3");
    }
    let tile = json.get("weight_block_size").map(|size| tile("weight_block_size", size));
    Ok(Some(Quantization { method: Method::Fp8, tile: tile.transpose()?.flatten() }))
}

/// Reads the rows and columns of a tile. `null` counts as absent.
fn tile(key: &str, value: &Value) -> Result<Option<[usize; 2]>, ModelError> {
    if value.is_null() {
        return Ok(None);
    }
    let side = |index: usize| {
        let side = value.get(index).and_then(Value::as_u64).unwrap_or(0);
        usize::try_from(side).ok().filter(|side| (1..=1 << 20).contains(side))
    };
    match (side(0), side(1), value.get(2)) {
        (Some(rows), Some(cols), None) => Ok(Some([rows, cols])),
        _ => refuse(key, value, "it must be two sizes of a tile"),
    }
}

fn modelopt(json: &Value) -> Result<Option<Quantization>, ModelError> {
    let none = Value::Null;
    let algorithm = json.get("quant_algo").unwrap_or(&none);
    let tile = match algorithm.as_str().unwrap_or_default() {
        "NVFP4" | "FP8" | "MIXED_PRECISION" => None,
        "FP8_PB_WO" => Some([128, 128]),
        _ => return refuse("quant_algo", algorithm, "forebay knows NVFP4, FP8 and FP8_PB_WO"),
    };
    Ok(Some(Quantization { method: Method::ModelOpt, tile }))
}

fn compressed_tensors(json: &Value) -> Result<Option<Quantization>, ModelError> {
    let mut of = Quantization { method: Method::CompressedTensors, tile: None };
    let has_content = |value: &&Value| {
        !value.is_null() && value.as_object().is_none_or(|object| !object.is_empty())
    };
    if let Some(transform) = json.get("transform_config").filter(has_content) {
        return refuse("transform_config", transform, "forebay does not transform activations");
    }
    let sparsity = json.get("sparsity_config").and_then(|sparsity| sparsity.get("format"));
    if let Some(format) = sparsity.filter(|format| !format.is_null() && *format != "dense") {
        return refuse("sparsity_config.format", format, "forebay reads dense weights");
    }
    let none = Value::Null;
    let groups = json.get("config_groups").and_then(Value::as_object);
    for group in groups.into_iter().flatten().map(|(_, group)| group) {
        let weights = group.get("weights").unwrap_or(&none);
        let text = |key: &str| weights.get(key).and_then(Value::as_str).unwrap_or_default();
        let number = |key: &str| weights.get(key).and_then(Value::as_u64);
        match (text("type"), number("num_bits"), number("group_size")) {
            ("float", Some(8), _) => {
                if let Some(structure) = weights.get("block_structure") {
                    of.tile = of.tile.or(tile("weights.block_structure", structure)?);
                }
            }
            ("float", Some(4), Some(16 | 32)) => {}
            ("int", Some(4 | 8), _) => {
                if weights.get("symmetric") == Some(&Value::Bool(false)) {
                    return refuse(
                        "weights.symmetric",
                        &Value::Bool(false),
                        "forebay knows symmetric integers",
                    );
                }
                if let Some(order) = weights.get("actorder").filter(|order| {
                    !order.is_null() && !matches!(order.as_str(), Some("static" | "weight"))
                }) {
                    return refuse(
                        "weights.actorder",
                        order,
                        "forebay knows columns in their order",
                    );
                }
            }
            _ => {
                return refuse(
                    "weights",
                    weights,
                    "forebay knows floats and integers of 8 and 4 bits; convert the model to GGUF",
                );
            }
        }
    }
    Ok(Some(of))
}

/// Checks that codes have four bits.
fn four_bits(json: &Value) -> Result<(), ModelError> {
    let none = Value::Null;
    let bits = json.get("bits").or_else(|| json.get("w_bit")).unwrap_or(&none);
    match bits.as_u64() {
        Some(4) => Ok(()),
        _ => refuse("bits", bits, "forebay knows 4; convert the model to GGUF"),
    }
}

fn gptq(json: &Value) -> Result<Option<Quantization>, ModelError> {
    four_bits(json)?;
    let format = json.get("checkpoint_format").or_else(|| json.get("format"));
    let zero_offset = match format.filter(|format| !format.is_null()) {
        None => 1,
        Some(format) if format == "gptq" => 1,
        Some(format) if format == "gptq_v2" => 0,
        Some(format) => {
            return refuse("checkpoint_format", format, "forebay knows gptq and gptq_v2");
        }
    };
    let is_ordered = json.get("desc_act") == Some(&Value::Bool(true));
    Ok(Some(Quantization { method: Method::Gptq { zero_offset, is_ordered }, tile: None }))
}

fn awq(json: &Value) -> Result<Option<Quantization>, ModelError> {
    four_bits(json)?;
    let none = Value::Null;
    let version = json.get("version").unwrap_or(&none);
    let name = version.as_str().unwrap_or("gemm").to_lowercase();
    let method = match &name[..] {
        "gemm" => Method::Awq,
        "gemv" => {
            let size = json.get("group_size").or_else(|| json.get("q_group_size"));
            let group = size.and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok());
            match group.filter(|group| *group > 0) {
                Some(group) => Method::AwqRows { group },
                None => return refuse("group_size", size.unwrap_or(&none), "it must be positive"),
            }
        }
        _ => {
            let expected = "forebay knows gemm and gemv; convert the model to GGUF";
            return refuse("version", version, expected);
        }
    };
    Ok(Some(Quantization { method, tile: None }))
}

fn bitsandbytes(json: &Value) -> Result<Option<Quantization>, ModelError> {
    let none = Value::Null;
    if json.get("load_in_8bit") == Some(&Value::Bool(true)) {
        let expected = "forebay knows nf4; convert the model to GGUF";
        return refuse("load_in_8bit", &Value::Bool(true), expected);
    }
    // The values that bitsandbytes takes where a folder says nothing.
    let expected =
        [("bnb_4bit_quant_type", "fp4", "nf4"), ("bnb_4bit_quant_storage", "uint8", "uint8")];
    for (key, usual, known) in expected {
        let said = json.get(key).filter(|value| !value.is_null());
        if said.map_or(usual, |value| value.as_str().unwrap_or_default()) != known {
            let expected = format!("forebay knows {known}; convert the model to GGUF");
            return refuse(key, said.unwrap_or(&none), &expected);
        }
    }
    Ok(Some(Quantization { method: Method::Nf4, tile: None }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(config: Value) -> Result<Option<Quantization>, String> {
        Quantization::of_config(&json!({ "quantization_config": config }))
            .map_err(|error| error.to_string())
    }

    fn method(config: Value) -> Method {
        of(config).unwrap().unwrap().method
    }

    #[test]
    fn known_forms_are_told_apart() {
        assert_eq!(of(Value::Null), Ok(None));
        let fp8 = json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64] });
        let tile = Some([128, 64]);
        assert_eq!(of(fp8), Ok(Some(Quantization { method: Method::Fp8, tile })));
        let gptq = |format: &str, desc_act: bool| json!({ "quant_method": "gptq", "bits": 4, "desc_act": desc_act, "checkpoint_format": format });
        let of = |zero_offset, is_ordered| Method::Gptq { zero_offset, is_ordered };
        assert_eq!(method(gptq("gptq", false)), of(1, false));
        assert_eq!(method(gptq("gptq_v2", true)), of(0, true));
        assert_eq!(
            method(json!({ "quant_method": "awq", "bits": 4, "version": "GEMM" })),
            Method::Awq
        );
        let rows =
            json!({ "quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "gemv" });
        assert_eq!(method(rows), Method::AwqRows { group: 64 });
        let group = json!({ "weights": { "type": "int", "num_bits": 8, "symmetric": true } });
        let eight =
            json!({ "quant_method": "compressed-tensors", "config_groups": { "a": group } });
        assert_eq!(method(eight), Method::CompressedTensors);
        let nf4 = json!({ "quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4" });
        assert_eq!(method(nf4), Method::Nf4);
        let wrapped = json!({ "text_config": { "quantization_config": {
            "quant_method": "modelopt", "quant_algo": "NVFP4" } } });
        let found = Quantization::of_config(&wrapped).unwrap().unwrap();
        assert_eq!(found.method, Method::ModelOpt);
    }

    #[test]
    fn unknown_forms_are_refused_by_name() {
        let group = |weights: Value| json!({ "quant_method": "compressed-tensors", "config_groups": { "a": { "weights": weights } } });
        for (config, said) in [
            (json!({ "quant_method": "hqq" }), "hqq"),
            (json!({ "quant_method": "bitsandbytes" }), "bnb_4bit_quant_type"),
            (json!({ "quant_method": "bitsandbytes", "load_in_8bit": true }), "load_in_8bit"),
            (
                json!({ "quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16" }),
                "bfloat16",
            ),
            (json!({}), "quant_method"),
            (json!(7), "quant_method"),
            (json!({ "quant_method": "fp8", "fmt": "e5m2" }), "e5m2"),
            (json!({ "quant_method": "fp8", "weight_block_size": [0, 128] }), "weight_block_size"),
            (
                json!({ "quant_method": "fp8", "weight_block_size": [1e300, 1] }),
                "weight_block_size",
            ),
            (json!({ "quant_method": "fp8", "weight_block_size": 128 }), "weight_block_size"),
            (json!({ "quant_method": "gptq", "bits": 8 }), "bits"),
            (json!({ "quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin" }), "marlin"),
            (json!({ "quant_method": "awq", "bits": 4, "version": "gemv" }), "group_size"),
            (
                json!({ "quant_method": "awq", "bits": 4, "version": "gemv", "group_size": -1 }),
                "group_size",
            ),
            (json!({ "quant_method": "awq", "bits": 4, "version": "marlin" }), "marlin"),
            (json!({ "quant_method": "modelopt", "quant_algo": "W4A8_AWQ" }), "W4A8_AWQ"),
            (group(json!({ "type": "int", "num_bits": 2 })), "weights"),
            (group(json!({ "type": "int", "num_bits": 8, "symmetric": false })), "symmetric"),
            (group(json!({ "type": "int", "num_bits": 4, "symmetric": false })), "symmetric"),
            (group(json!({ "type": "int", "num_bits": 4, "actorder": "group" })), "actorder"),
            (group(Value::Null), "weights"),
        ] {
            let error = of(config).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
