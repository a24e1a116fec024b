//! Tensor names by role, for each naming scheme.

use forebay_format::Catalog;

use super::architecture::Naming;
use super::family::{Family, OwnNames};
use super::mtp_shape::MtpNames;

/// Role, name after `blk.N.` in GGUF, and name after `model.layers.N.` in Hugging Face's scheme, common to the
/// families.
const LAYER: &[(&str, &str, &str)] = &[
    ("q", "attn_q.weight", "self_attn.q_proj.weight"),
    ("k", "attn_k.weight", "self_attn.k_proj.weight"),
    ("v", "attn_v.weight", "self_attn.v_proj.weight"),
    ("o", "attn_output.weight", "self_attn.o_proj.weight"),
    // Queries, keys and values in one matrix, in this order.
    ("qkv", "attn_qkv.weight", "self_attn.qkv_proj.weight"),
    ("qkv_bias", "attn_qkv.bias", "self_attn.qkv_proj.bias"),
    ("q_bias", "attn_q.bias", "self_attn.q_proj.bias"),
    ("k_bias", "attn_k.bias", "self_attn.k_proj.bias"),
    ("v_bias", "attn_v.bias", "self_attn.v_proj.bias"),
    ("o_bias", "attn_output.bias", "self_attn.o_proj.bias"),
    // Those of queries, keys and values in one vector.
    ("qkv_bias", "attn_qkv.bias", "self_attn.qkv_proj.bias"),
    ("output_gate", "attn_gate.weight", "self_attn.g_proj.weight"),
    ("q_norm", "attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("k_norm", "attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("sinks", "attn_sinks.weight", "self_attn.sinks"),
    ("attention_norm", "attn_norm.weight", "input_layernorm.weight"),
    ("attention_post_norm", "post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("feed_forward_norm", "ffn_norm.weight", "post_attention_layernorm.weight"),
    ("feed_forward_post_norm", "post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    // Latent attention.
    ("q_a", "attn_q_a.weight", "self_attn.q_a_proj.weight"),
    ("q_a_norm", "attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"),
    ("q_b", "attn_q_b.weight", "self_attn.q_b_proj.weight"),
    ("kv_a", "attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ("kv_a_norm", "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
    ("rotary_norm", "attn_k_norm.weight", "self_attn.k_rope_only_layernorm.weight"),
    ("kv_b", "attn_kv_b.weight", "self_attn.kv_b_proj.weight"),
    ("k_b", "attn_k_b.weight", ""),
    ("v_b", "attn_v_b.weight", ""),
    // The indexer.
    ("indexer_q", "indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight"),
    ("indexer_k", "indexer.attn_k.weight", "self_attn.indexer.wk.weight"),
    ("indexer_k_norm", "indexer.k_norm.weight", "self_attn.indexer.k_norm.weight"),
    ("indexer_k_norm_bias", "indexer.k_norm.bias", "self_attn.indexer.k_norm.bias"),
    ("indexer_weights", "indexer.proj.weight", "self_attn.indexer.weights_proj.weight"),
    ("indexer_q_norm", "indexer.q_norm.weight", "self_attn.indexer.q_layernorm.weight"),
    // Queries and keys in one matrix, in this order.
    ("indexer_qk", "", "self_attn.indexer.index_qk_proj.weight"),
    (
        "indexer_gate",
        "indexer_compressor_gate.weight",
        "self_attn.indexer.index_kpool_compress_gate",
    ),
    (
        "indexer_gate_bias",
        "indexer_compressor_ape.weight",
        "self_attn.indexer.index_kpool_compress_ape",
    ),
    // Recurrent layers. Some models hold several projections in one matrix, ordered by key head.
    ("delta_qkvz", "", "linear_attn.in_proj_qkvz.weight"),
    ("delta_qkv", "attn_qkv.weight", "linear_attn.in_proj_qkv.weight"),
    ("delta_z", "attn_gate.weight", "linear_attn.in_proj_z.weight"),
    // OLMo Hybrid has a matrix for each.
    ("delta_q", "", "linear_attn.q_proj.weight"),
    ("delta_k", "", "linear_attn.k_proj.weight"),
    ("delta_v", "", "linear_attn.v_proj.weight"),
    ("delta_ba", "ssm_ba.weight", "linear_attn.in_proj_ba.weight"),
    ("delta_b", "ssm_beta.weight", "linear_attn.in_proj_b.weight"),
    ("delta_a", "ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
    ("delta_decay", "ssm_a", "linear_attn.A_log"),
    ("delta_step", "ssm_dt.bias", "linear_attn.dt_bias"),
    ("delta_convolution", "ssm_conv1d.weight", "linear_attn.conv1d.weight"),
    ("delta_norm", "ssm_norm.weight", "linear_attn.norm.weight"),
    ("delta_o", "ssm_out.weight", "linear_attn.out_proj.weight"),
    // Mamba-2.
    ("delta_in", "ssm_in.weight", "mamba.in_proj.weight"),
    ("delta_convolution_bias", "ssm_conv1d.bias", "linear_attn.conv1d.bias"),
    ("delta_skip", "ssm_d", "mamba.D"),
    // Mamba.
    ("delta_compressed", "ssm_x.weight", "mamba.x_proj.weight"),
    ("delta_steps", "ssm_dt.weight", "mamba.dt_proj.weight"),
    ("delta_steps_norm", "ssm_dt_norm.weight", "mamba.dt_layernorm.weight"),
    ("delta_k_norm", "ssm_b_norm.weight", "mamba.b_layernorm.weight"),
    ("delta_q_norm", "ssm_c_norm.weight", "mamba.c_layernorm.weight"),
    // Kimi Delta Attention, beside `q`, `k` and `v`.
    ("delta_convolution_q", "ssm_conv1d_q.weight", "self_attn.q_conv1d.weight"),
    ("delta_convolution_k", "ssm_conv1d_k.weight", "self_attn.k_conv1d.weight"),
    ("delta_convolution_v", "ssm_conv1d_v.weight", "self_attn.v_conv1d.weight"),
    ("delta_f", "ssm_f_a.weight", "self_attn.f_proj.weight"),
    ("delta_g", "ssm_g_a.weight", "self_attn.g_proj.weight"),
    ("delta_f_a", "ssm_f_a.weight", "self_attn.f_a_proj.weight"),
    ("delta_f_b", "ssm_f_b.weight", "self_attn.f_b_proj.weight"),
    ("delta_g_a", "ssm_g_a.weight", "self_attn.g_a_proj.weight"),
    ("delta_g_b", "ssm_g_b.weight", "self_attn.g_b_proj.weight"),
    // Embeddings of layers.
    ("layer_gate", "inp_gate.weight", "per_layer_input_gate.weight"),
    ("layer_out", "proj.weight", "per_layer_projection.weight"),
    ("layer_post_norm", "post_norm.weight", "post_per_layer_input_norm.weight"),
    ("layer_scale", "layer_output_scale.weight", "layer_scalar"),
    // Residual streams beside each other: a bank, then mixed ones, then gated ones.
    ("attention_streams_scores", "attn_res_score.weight", ""),
    ("feed_forward_streams_scores", "ffn_res_score.weight", ""),
    ("attention_streams_mix", "hc_attn_fn.weight", "hc_attn_fn"),
    ("attention_streams_base", "hc_attn_base.weight", "hc_attn_base"),
    ("attention_streams_scale", "hc_attn_scale.weight", "hc_attn_scale"),
    ("feed_forward_streams_mix", "hc_ffn_fn.weight", "hc_ffn_fn"),
    ("feed_forward_streams_base", "hc_ffn_base.weight", "hc_ffn_base"),
    ("feed_forward_streams_scale", "hc_ffn_scale.weight", "hc_ffn_scale"),
    ("attention_streams_norm", "hc_attn_norm.weight", "attn_hyper_connection.hc_norm.weight"),
    (
        "attention_streams_down",
        "hc_attn_down.weight",
        "attn_hyper_connection.input_mix_weight_down.weight",
    ),
    (
        "attention_streams_up",
        "hc_attn_up.weight",
        "attn_hyper_connection.input_mix_weight_up.weight",
    ),
    (
        "attention_streams_inject",
        "hc_attn_inject.weight",
        "attn_hyper_connection.block_inject_weight.weight",
    ),
    ("feed_forward_streams_norm", "hc_ffn_norm.weight", "mlp_hyper_connection.hc_norm.weight"),
    (
        "feed_forward_streams_down",
        "hc_ffn_down.weight",
        "mlp_hyper_connection.input_mix_weight_down.weight",
    ),
    (
        "feed_forward_streams_up",
        "hc_ffn_up.weight",
        "mlp_hyper_connection.input_mix_weight_up.weight",
    ),
    (
        "feed_forward_streams_inject",
        "hc_ffn_inject.weight",
        "mlp_hyper_connection.block_inject_weight.weight",
    ),
    // Embeddings of n-grams.
    ("ngram_table", "", "ple.ple_embedding.ngram_embedding.weight"),
    ("ngram_table_part", "", "ple.ple_embedding.ngram_embedding.shard_{part}.weight"),
    ("ngram_multipliers", "", "ple.ple_embedding.layer_multipliers"),
    ("ngram_firsts", "", "ple.ple_embedding.ngram_heads_offsets"),
    ("ngram_rows", "", "ple.ple_embedding.ngram_heads_vocab_sizes"),
    ("ngram_key", "ple_key.weight", "ple.key_proj.weight"),
    ("ngram_value", "ple_value.weight", "ple.value_proj.weight"),
    ("ngram_key_norm", "ple_norm_key.weight", "ple.norm_key.weight"),
    ("ngram_stream_norm", "ple_norm_query.weight", "ple.norm_query.weight"),
    ("ngram_convolution_norm", "ple_norm_conv.weight", "ple.norm_conv.weight"),
    ("ngram_convolution", "ple_conv1d.weight", "ple.conv1d.weight"),
    // Feed-forwards.
    ("gate", "ffn_gate.weight", "mlp.gate_proj.weight"),
    ("up", "ffn_up.weight", "mlp.up_proj.weight"),
    ("down", "ffn_down.weight", "mlp.down_proj.weight"),
    // Gate and up in one matrix, in this order.
    ("gate_up", "", "mlp.gate_up_proj.weight"),
    ("shared_gate_up", "", "mlp.shared_experts.gate_up_proj.weight"),
    ("router", "ffn_gate_inp.weight", "mlp.gate.weight"),
    ("token_experts", "ffn_gate_tid2eid.weight", "mlp.gate.tid2eid"),
    ("correction_bias", "exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ("expert_gate", "ffn_gate_exps.weight", "mlp.experts.{expert}.gate_proj.weight"),
    ("expert_up", "ffn_up_exps.weight", "mlp.experts.{expert}.up_proj.weight"),
    ("expert_down", "ffn_down_exps.weight", "mlp.experts.{expert}.down_proj.weight"),
    // The name, or its beginning: gpt-oss appends `_blocks` or `_scales`.
    ("expert_gate_up", "", "mlp.experts.gate_up_proj"),
    ("expert_down_stack", "", "mlp.experts.down_proj"),
    ("expert_gate_bias", "ffn_gate_exps.bias", ""),
    ("expert_up_bias", "ffn_up_exps.bias", ""),
    ("expert_gate_up_bias", "", "mlp.experts.gate_up_proj_bias"),
    ("expert_down_bias", "ffn_down_exps.bias", "mlp.experts.down_proj_bias"),
    // Projections around experts.
    ("latent_down", "ffn_routed_down.weight", ""),
    ("latent_norm", "ffn_routed_norm.weight", ""),
    ("latent_up", "ffn_routed_up.weight", ""),
    ("shared_scale", "ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
    ("shared_gate", "ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
    ("shared_up", "ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
    ("shared_down", "ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
];

/// Returns the GGUF and Hugging Face names with a role, if the list has it.
fn with_role(names: OwnNames, role: &str) -> Option<(&'static str, &'static str)> {
    names.iter().find(|(of, _, _)| *of == role).map(|(_, gguf, hf)| (*gguf, *hf))
}

#[derive(Clone, Copy)]
pub struct Names {
    naming: Naming,
    family: &'static Family,
    mtp: Option<MtpNames>,
}

impl Names {
    pub fn new(naming: Naming, family: &'static Family) -> Names {
        Names { naming, family, mtp: None }
    }

    /// Returns these names with those of the predicting layer.
    pub fn with_mtp(self, mtp: Option<MtpNames>) -> Names {
        Names { mtp, ..self }
    }

    /// Returns the name of a tensor of the predicting layer that no other layer has; `None` if the source has none with this role.
    ///
    /// # Panics
    /// Panics if there is no such layer.
    pub fn mtp(&self, role: &str) -> Option<String> {
        let mtp = self.mtp.expect("the model has a predicting layer");
        let (name, prefix) = mtp.name(role, self.naming == Naming::Gguf)?;
        Some(match prefix {
            Some(prefix) => format!("{prefix}{name}"),
            None => self.of_layer(mtp.layer, name, name),
        })
    }

    pub fn family(&self) -> &'static str {
        self.family.name
    }

    /// Returns the offset that must be added to the file's norm weights.
    pub fn norm_offset(&self) -> f32 {
        match self.naming {
            Naming::HuggingFace { .. } if self.family.files.norms_less_one => 1.0,
            _ => 0.0,
        }
    }

    /// Returns true if rows of gate and up are one matrix, alternately.
    pub fn interleaves_gate_up(&self) -> bool {
        self.naming != Naming::Gguf && self.family.files.interleaved_gate_up
    }

    /// Returns true if the file has weights of norms.
    pub fn has_norm_weights(&self) -> bool {
        !self.family.layers.weightless_norms
    }

    /// Returns true if blocks beside each other have one norm.
    pub fn has_one_norm(&self) -> bool {
        self.family.layers.one_norm
    }

    /// Returns true if the rates of decay in the file are positive numbers.
    pub fn has_positive_rates(&self) -> bool {
        self.family.recurrence.positive_rates
    }

    /// Returns the offset that must be added to the weights of the norm before the output projection.
    pub fn final_norm_offset(&self) -> f32 {
        if self.family.files.whole_final_norm { 0.0 } else { self.norm_offset() }
    }

    pub fn embedding(&self) -> String {
        self.outer("embedding", ("token_embd.weight", "embed_tokens.weight"))
    }

    pub fn embedding_norm(&self) -> String {
        self.outer("embedding_norm", ("token_embd_norm.weight", "embed_norm.weight"))
    }

    pub fn head(&self) -> String {
        let (gguf, hf) = self.or_usual("head", ("output.weight", "lm_head.weight"));
        self.pick(gguf, hf)
    }

    pub fn final_norm(&self) -> String {
        self.outer("final_norm", ("output_norm.weight", "norm.weight"))
    }

    /// Returns the name of a part of what collapses the residual streams behind the last layer.
    pub fn streams_end(&self, part: &str) -> String {
        let (gguf, hf) = match part {
            "mix" => ("output_hc_fn.weight", "model.hc_head_fn"),
            "base" => ("output_hc_base.weight", "model.hc_head_base"),
            "scale" => ("output_hc_scale.weight", "model.hc_head_scale"),
            "scores" => ("output_res_score.weight", ""),
            "norm" => ("output_hc_norm.weight", "model.hyper_connection_mixer.hc_norm.weight"),
            "down" => (
                "output_hc_down.weight",
                "model.hyper_connection_mixer.input_mix_weight_down.weight",
            ),
            "up" => {
                ("output_hc_up.weight", "model.hyper_connection_mixer.input_mix_weight_up.weight")
            }
            _ => unreachable!("streams have no {part}"),
        };
        let own = self.or_usual(&format!("streams_end_{part}"), (gguf, hf));
        self.pick(own.0, own.1)
    }

    /// Returns the names of the projections of the usual embedding to residual streams 1 and following, or of these streams behind
    /// the last layer. GGUF files have one tensor for all.
    pub fn stream_projections(&self, streams: usize, at_end: bool) -> Vec<String> {
        let (gguf, folder) = match at_end {
            true => ("altup_unembd_proj.weight", "altup_unembed_projections"),
            false => ("altup_proj.weight", "altup_projections"),
        };
        match self.naming {
            Naming::Gguf => vec![gguf.into()],
            Naming::HuggingFace { .. } => {
                let name = |number| self.pick("", &format!("model.{folder}.{number}.weight"));
                (0..streams - 1).map(name).collect()
            }
        }
    }

    /// Returns the family's names with a role. An empty one stands for the usual one.
    fn or_usual<'a>(&self, role: &str, usual: (&'a str, &'a str)) -> (&'a str, &'a str) {
        let (gguf, hf) = with_role(self.family.files.names, role).unwrap_or(usual);
        let or = |own: &'a str, usual: &'a str| if own.is_empty() { usual } else { own };
        (or(gguf, usual.0), or(hf, usual.1))
    }

    /// Returns the name of a tensor that belongs to no layer, by its role or these usual names.
    fn outer(&self, role: &str, usual: (&str, &str)) -> String {
        let (gguf, hf) = self.or_usual(role, usual);
        self.pick(gguf, &format!("model.{hf}"))
    }

    /// Returns the name of the table with the embeddings of tokens for each layer.
    pub fn layer_embeddings(&self) -> String {
        self.pick("per_layer_token_embd.weight", "model.embed_tokens_per_layer.weight")
    }

    /// Returns the name of the table of n-grams of a layer. GGUF files have one table.
    pub fn ngram_table(&self, layer: usize) -> String {
        match self.naming {
            Naming::Gguf => self.layer_embeddings(),
            Naming::HuggingFace { .. } => self.layer(layer, "ngram_table"),
        }
    }

    /// Returns the name of the projection of a token's embedding to those for each layer.
    pub fn layer_projection(&self) -> String {
        self.pick("per_layer_model_proj.weight", "model.per_layer_model_projection.weight")
    }

    pub fn layer_projection_norm(&self) -> String {
        self.pick("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight")
    }

    fn pick(&self, gguf: &str, huggingface: &str) -> String {
        match self.naming {
            Naming::Gguf => gguf.into(),
            Naming::HuggingFace { root, .. } => match huggingface.strip_prefix("model.") {
                Some(rest) => format!("{root}{rest}"),
                // The head is beside the language model's `model.`, if that is part of a larger model's names.
                None => match root.strip_suffix(".model.") {
                    Some(outer) => format!("{outer}.{huggingface}"),
                    None => huggingface.into(),
                },
            },
        }
    }

    /// Returns another name that a tensor of layer `layer` may have in folders of the family, if there is one: that with the role
    /// and `_renamed`.
    pub fn renamed(&self, layer: usize, role: &str) -> Option<String> {
        let role = format!("{role}_renamed");
        with_role(self.family.files.names, &role).map(|_| self.layer(layer, &role))
    }

    /// Returns the name of a tensor of layer `layer` by its role in the decoder.
    pub fn layer(&self, layer: usize, role: &str) -> String {
        let predicting = |_| with_role(self.family.files.names, &format!("predicting_{role}"));
        let of_mtp = self.mtp.filter(|mtp| mtp.layer == layer).and_then(predicting);
        if let Some((gguf, hf)) = of_mtp {
            return self.of_layer(layer, gguf, hf);
        }
        let own = with_role(self.family.files.names, role);
        let usual = with_role(LAYER, role).or(own);
        let usual = usual.unwrap_or_else(|| unreachable!("no tensor has the role {role}"));
        let (gguf, hf) = self.or_usual(role, usual);
        match self.mtp {
            Some(MtpNames { layer: own, prefix: Some(prefix), .. }) if own == layer => {
                format!("{prefix}layers.0.{hf}")
            }
            _ => self.of_layer(layer, gguf, hf),
        }
    }

    fn of_layer(&self, layer: usize, gguf: &str, hf: &str) -> String {
        let layers = match self.naming {
            Naming::HuggingFace { layers, .. } => layers,
            Naming::Gguf => "",
        };
        self.pick(&format!("blk.{layer}.{gguf}"), &format!("model.{layers}.{layer}.{hf}"))
    }

    /// Returns the name of an expert's matrix. GGUF stacks all experts in one tensor, so its names do not depend on
    /// `expert`.
    pub fn expert(&self, layer: usize, expert: usize, role: &str) -> String {
        self.layer(layer, role).replace("{expert}", &expert.to_string())
    }

    /// Returns the number of experts for which the router of a layer `[experts, hidden]` has rows, if the files have one.
    pub fn routed_experts(&self, catalog: &Catalog, layer: usize) -> Option<usize> {
        let router = catalog.tensor(&self.layer(layer, "router"))?;
        match router.shape[..] {
            [experts, _] => usize::try_from(experts).ok(),
            _ => None,
        }
    }

    /// Returns the width of the dense feed-forward of a layer, whose matrix is `[width, hidden]`, if the files have a plain one.
    pub fn dense_width(&self, catalog: &Catalog, layer: usize) -> Option<usize> {
        match catalog.tensor(&self.layer(layer, "up"))?.shape[..] {
            [width, _] => usize::try_from(width).ok(),
            _ => None,
        }
    }

    /// Returns the name that an expert's matrix has in GGUF files until 2024, which have a tensor for each expert of Mixtral. Returns
    /// `None` for folders.
    pub fn split_expert(&self, layer: usize, expert: usize, role: &str) -> Option<String> {
        let stack = self.layer(layer, role);
        let is_gguf = self.naming == Naming::Gguf && stack.contains("_exps.");
        is_gguf.then(|| stack.replace("_exps.", &format!(".{expert}.")))
    }
}
