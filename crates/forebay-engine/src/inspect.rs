//! Description of a model from its catalog alone. No weight bytes are read.

use std::path::{Path, PathBuf};

use forebay_format::{Catalog, Source, TensorInfo, TensorType};
use forebay_model::Architecture;
use forebay_model::arch::Layer;
use forebay_text::{TextError, Tokenizer};
use serde::Serialize;

use crate::features::{Feature, features, left_out};
use crate::plan::Coding;
use crate::{EngineError, quantization};

/// Bytes and number of tensors of one kind of block.
#[derive(Debug, Clone, Serialize)]
pub struct BlockKindBytes {
    pub kind: &'static str,
    pub tensors: usize,
    pub bytes: u64,
    /// Bytes of the same weights without compression.
    pub plain_bytes: u64,
    /// Bytes of them in the file: fewer than in memory where a pack has coded blocks.
    pub stored_bytes: u64,
}

/// Bytes and number of tensors of one tensor type.
#[derive(Debug, Clone, Serialize)]
pub struct TypeBytes {
    #[serde(rename = "type")]
    pub name: &'static str,
    pub tensors: usize,
    pub bytes: u64,
}

/// Figures that describe a model.
#[derive(Debug, Clone, Serialize)]
pub struct ModelInfo {
    pub path: PathBuf,
    /// Format of the file: `GGUF v3` or `Hugging Face`. For a pack it includes the source format: `pack v1.0 of GGUF
    /// v3`.
    pub format: String,
    pub architecture: &'static str,
    pub name: Option<String>,
    pub parameters: u64,
    pub file_bytes: u64,
    /// Bytes of all tensors, without metadata and padding.
    pub weights_bytes: u64,
    pub expert_bytes: u64,
    /// Average bytes of one expert, 0 for a dense model.
    pub bytes_per_expert: u64,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocabulary: usize,
    pub context_trained: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    pub tied_embeddings: bool,
    /// Name of the quantisation of the whole model, as in `Q4_K_M`.
    pub quantization: &'static str,
    pub types: Vec<TypeBytes>,
    pub kinds: Vec<BlockKindBytes>,
    /// How the blocks that are read again and again are stored.
    #[serde(skip)]
    pub(crate) coding: Coding,
    /// Description of the tensors that are never read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_out: Option<String>,
}

/// Output of `inspect`.
#[derive(Debug, Serialize)]
pub struct Inspection {
    #[serde(flatten)]
    pub model: ModelInfo,
    /// Features that distinguish the model from a plain decoder.
    pub features: Vec<Feature>,
    /// Bytes of key/value cache in f16 for one position in all layers.
    pub kv_bytes_per_position: u64,
    /// The part of these bytes in layers that keep every position. The other layers keep only the positions of their
    /// window.
    pub kv_bytes_per_position_kept: u64,
    /// Bytes of the state of recurrent layers for one sequence, however long it is; 0 without such layers.
    pub state_bytes_per_sequence: u64,
    /// Description of the tokenizer, or the reason why there is none.
    pub tokenizer: String,
    pub has_chat_template: bool,
    /// Where the chat template was found.
    pub chat_template: Option<String>,
    /// Where the chat template for requests with tools was found, if there is one of its own for them.
    pub tools_template: Option<String>,
    #[serde(skip)]
    pub catalog: Catalog,
}

/// Describes a model without reading its weights.
///
/// # Errors
/// Returns an error if a file cannot be read or is damaged, or if the architecture is unknown.
pub fn inspect(model: &Path) -> Result<Inspection, EngineError> {
    let catalog = Catalog::open(model)?;
    let architecture = Architecture::from_catalog(&catalog)?;
    let tokenizer = match Tokenizer::from_catalog(&catalog) {
        Ok(tokenizer) => format!("{}, {} tokens", tokenizer.kind(), tokenizer.vocab_size()),
        Err(TextError::NoTokenizerFile | TextError::MissingKey { key: "tokenizer.ggml.model" }) => {
            "none".into()
        }
        Err(error) => format!("unusable: {error}"),
    };
    let template = forebay_text::ChatTemplate::from_catalog(&catalog)?;
    let of_tools = template.as_ref().and_then(|template| template.of_tools());
    Ok(Inspection {
        model: ModelInfo::new(&catalog, &architecture),
        features: features(&architecture, &catalog),
        kv_bytes_per_position: kv_bytes(&architecture, |_| true),
        kv_bytes_per_position_kept: kv_bytes(&architecture, |layer| layer.window.is_none()),
        state_bytes_per_sequence: architecture.states_bytes(1),
        tokenizer,
        has_chat_template: template.is_some(),
        chat_template: template.as_ref().map(|template| template.origin().to_owned()),
        tools_template: of_tools.map(|template| template.origin().to_owned()),
        catalog,
    })
}

/// Returns the bytes of key/value cache in f16 for one position in the layers that `counts` selects.
fn kv_bytes(architecture: &Architecture, counts: impl Fn(&Layer) -> bool) -> u64 {
    let bytes = |layer: usize| {
        let attention = architecture.attention_of(layer);
        let values = if attention.values_in_keys() { 0 } else { attention.value_dim };
        let index = attention.indexer.map_or(0, |of| of.key_width()) as u64;
        let entries = architecture.entries_of(layer);
        let projections = entries.map_or(0, |of| of.projected(attention.head_dim));
        2 * (attention.kv_heads as u64 * (attention.head_dim + values) as u64 + index)
            + 2 * projections as u64
    };
    // Compressed entries of all positions are kept.
    let of_entries = |layer: usize| {
        let head_dim = architecture.attention_of(layer).head_dim;
        architecture.entries_of(layer).map_or(0, |of| of.kept_bytes(head_dim, 2))
    };
    let (all, counted) = (architecture.kv_layers(), architecture.kv_layers());
    let counted = counted.filter(|layer| counts(&architecture.layers[*layer]));
    counted.map(bytes).sum::<u64>() + all.map(of_entries).sum::<u64>()
}

/// Returns the number of weights in a tensor. Tensors of quantised folders have several weights in an element, and their
/// scales, zero points and orders are not weights.
fn parameters(tensor: &TensorInfo) -> u64 {
    const BESIDE: [&str; 11] = [
        "_scales",
        ".scales",
        "_scale",
        "_scale_inv",
        "_scale_2",
        ".qzeros",
        "_zero_point",
        ".g_idx",
        "_g_idx",
        ".weight_shape",
        ".pre_quant_scale",
    ];
    let ends = |of: &str| tensor.name.ends_with(of);
    let is_beside = || BESIDE.into_iter().any(ends);
    match tensor.ty {
        TensorType::U8 | TensorType::F8_E4M3 | TensorType::F8_E8M0 if is_beside() => 0,
        TensorType::F32 | TensorType::F16 | TensorType::BF16 if is_beside() => 0,
        TensorType::I32 | TensorType::I64 if is_beside() => 0,
        TensorType::U8 if ends("_blocks") || ends(".weight_packed") || ends(".weight") => {
            2 * tensor.elements()
        }
        TensorType::I32 if ends(".weight_packed") || ends(".qweight") => 8 * tensor.elements(),
        _ => tensor.elements(),
    }
}

impl ModelInfo {
    pub(crate) fn new(catalog: &Catalog, architecture: &Architecture) -> ModelInfo {
        let tensors = catalog.tensors();
        let attention = &architecture.attentions[0];
        let experts = architecture.expert_layers().map(|experts| experts.count).max().unwrap_or(0);
        let expert_bytes: u64 = tensors
            .iter()
            .filter(|tensor| block_kind(tensor) == EXPERTS)
            .map(|tensor| tensor.bytes())
            .sum();
        let expert_layers = architecture.expert_layers().count() as u64;
        let experts_in_all = expert_layers * experts as u64;
        ModelInfo {
            path: catalog.root.clone(),
            format: format(catalog),
            architecture: architecture.family,
            name: architecture.name.clone(),
            parameters: tensors.iter().map(parameters).sum(),
            file_bytes: catalog.file_bytes.iter().sum(),
            weights_bytes: tensors.iter().map(|tensor| tensor.bytes()).sum(),
            expert_bytes,
            bytes_per_expert: expert_bytes.checked_div(experts_in_all).unwrap_or(0),
            layers: architecture.main_layers(),
            hidden: architecture.hidden,
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            head_dim: attention.head_dim,
            vocabulary: architecture.vocabulary,
            context_trained: architecture.context_trained,
            experts,
            experts_per_token: architecture.experts_per_token(),
            tied_embeddings: architecture.tied_embeddings,
            quantization: quantization::name(catalog, parameters),
            types: types(tensors),
            kinds: kinds(catalog),
            coding: Coding::of(catalog),
            left_out: left_out(architecture, catalog),
        }
    }
}

fn format(catalog: &Catalog) -> String {
    let source = match &catalog.source {
        Source::Gguf(metadata) => format!("GGUF v{}", metadata.version),
        Source::HuggingFace(_) => "Hugging Face".into(),
    };
    match &catalog.pack {
        Some(pack) => format!("pack v{}.{} of {source}", pack.version.0, pack.version.1),
        None => source,
    }
}

const EXPERTS: &str = "experts";
/// Kinds of blocks in display order.
pub(crate) const KINDS: [&str; 6] =
    ["embeddings", "attention", "feed-forward", "router", EXPERTS, "head"];

/// Returns the kind of block that a tensor belongs to, from its GGUF or Hugging Face name.
pub fn block_kind(tensor: &TensorInfo) -> &'static str {
    let name = tensor.name.as_str();
    let has = |part: &str| name.contains(part);
    let is_norm = has("ffn_norm_exps");
    if !is_norm && has("_exps") || has(".experts.") || is_split_expert(name) {
        EXPERTS
    } else if has("_shexp") || has("shared_expert") {
        "feed-forward"
    } else if has("ffn_gate_inp")
        || has("exp_probs_b")
        || has("e_score_correction_bias")
        || has("feed_forward.router")
        || has("mlp.gate.")
        || has("mlp.router.")
        || has("block_sparse_moe.gate")
    {
        "router"
    } else if has("attn") || has(".ssm_") || has(".mamba.") {
        "attention"
    } else if has("ffn")
        || has("ffw")
        || has("feedforward")
        || has("feed_forward")
        || has("pre_ff_layernorm")
        || has("mlp")
        || has("post_attention")
    {
        "feed-forward"
    } else if has("token_embd") || has("embed_tokens") || has(".ple.") {
        "embeddings"
    } else if has("input_layernorm") {
        "attention"
    } else {
        "head"
    }
}

/// Returns true if a tensor is one expert's matrix in a GGUF file until 2024, such as `blk.0.ffn_gate.7.weight`.
fn is_split_expert(name: &str) -> bool {
    let mut parts = name.split('.').skip(2);
    let is_matrix = parts.next().is_some_and(|part| part.starts_with("ffn_"));
    is_matrix && parts.next().is_some_and(|part| part.parse::<u32>().is_ok())
}

fn kinds(catalog: &Catalog) -> Vec<BlockKindBytes> {
    let tensors = catalog.tensors();
    let stored = |tensor: &TensorInfo| -> u64 {
        tensor.extents().map(|extent| catalog.stored(extent).length).sum()
    };
    let of_kind = |kind: &'static str| {
        let members = || tensors.iter().filter(move |tensor| block_kind(tensor) == kind);
        let bytes = members().map(|tensor| tensor.bytes()).sum();
        let plain = |tensor: &TensorInfo| tensor.ty.plain().tensor_bytes(&tensor.shape);
        let plain_bytes = members().filter_map(plain).sum();
        let stored_bytes = members().map(stored).sum();
        BlockKindBytes { kind, tensors: members().count(), bytes, plain_bytes, stored_bytes }
    };
    KINDS.into_iter().map(of_kind).filter(|entry| entry.tensors > 0).collect()
}

/// Returns the tensor types by bytes, largest first.
fn types(tensors: &[TensorInfo]) -> Vec<TypeBytes> {
    let mut types: Vec<TypeBytes> = Vec::new();
    for tensor in tensors {
        let name = tensor.ty.name();
        match types.iter_mut().find(|entry| entry.name == name) {
            Some(entry) => {
                entry.tensors += 1;
                entry.bytes += tensor.bytes();
            }
            None => types.push(TypeBytes { name, tensors: 1, bytes: tensor.bytes() }),
        }
    }
    types.sort_by_key(|entry| std::cmp::Reverse(entry.bytes));
    types
}

#[cfg(test)]
mod tests {
    use forebay_format::{Extent, FileIndex};

    use super::*;

    #[test]
    fn kinds_are_told_by_the_names_of_both_forms() {
        let names = [
            ("blk.0.ffn_gate_exps.bias", "experts"),
            ("blk.10.ffn_gate.7.weight", "experts"),
            ("blk.10.ffn_gate.weight", "feed-forward"),
            ("model.layers.0.mlp.experts.gate_up_proj_blocks", "experts"),
            ("blk.1.exp_probs_b.bias", "router"),
            ("model.layers.1.mlp.gate.e_score_correction_bias", "router"),
            ("model.layers.1.mlp.router.bias", "router"),
            ("blk.1.ffn_down_shexp.weight", "feed-forward"),
            ("model.layers.1.mlp.shared_experts.up_proj.weight", "feed-forward"),
            ("model.layers.1.mlp.gate_proj.weight", "feed-forward"),
            ("blk.0.post_ffw_norm.weight", "feed-forward"),
            ("model.layers.0.pre_feedforward_layernorm.weight", "feed-forward"),
            ("blk.0.attn_sinks.weight", "attention"),
            ("blk.0.ssm_out.weight", "attention"),
            ("model.layers.0.linear_attn.A_log", "attention"),
            ("blk.0.ffn_gate_inp_shexp.weight", "feed-forward"),
            ("model.layers.0.mlp.shared_expert_gate.weight", "feed-forward"),
            ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "attention"),
            ("output_norm.weight", "head"),
        ];
        for (name, kind) in names {
            let extent = Extent { file: FileIndex(0), offset: 0, length: 4 };
            let tensor = TensorInfo::contiguous(name.into(), TensorType::F32, vec![1], extent);
            assert_eq!(block_kind(&tensor), kind, "{name}");
        }
    }

    #[test]
    fn weights_of_four_bits_are_counted_as_weights() {
        let extent = Extent { file: FileIndex(0), offset: 0, length: 96 };
        let tensor = |name: &str, ty, shape: &[u64]| {
            parameters(&TensorInfo::contiguous(name.into(), ty, shape.to_vec(), extent))
        };
        assert_eq!(tensor("x.down_proj_blocks", TensorType::U8, &[2, 3, 16]), 192);
        assert_eq!(tensor("x.down_proj_scales", TensorType::U8, &[2, 3]), 0);
        assert_eq!(tensor("x.down_proj_bias", TensorType::BF16, &[2, 24]), 48);
    }
}
