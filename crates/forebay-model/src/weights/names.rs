//! Names of tensors by role, for each form a model comes in.

use crate::arch::{HfExpertNames, Naming};

pub struct Names {
    naming: Naming,
}

impl Names {
    pub fn new(naming: Naming) -> Names {
        Names { naming }
    }

    pub fn embedding(&self) -> String {
        self.pick("token_embd.weight", "model.embed_tokens.weight")
    }

    pub fn head(&self) -> String {
        self.pick("output.weight", "lm_head.weight")
    }

    pub fn final_norm(&self) -> String {
        self.pick("output_norm.weight", "model.norm.weight")
    }

    fn pick(&self, gguf: &str, huggingface: &str) -> String {
        match self.naming {
            Naming::Gguf => gguf.into(),
            Naming::HuggingFace(_) => huggingface.into(),
        }
    }

    /// A tensor of layer `layer` by its role in the decoder.
    pub fn layer(&self, layer: usize, role: &str) -> String {
        match self.naming {
            Naming::Gguf => format!("blk.{layer}.{}", gguf_suffix(role)),
            Naming::HuggingFace(experts) => {
                format!("model.layers.{layer}.{}", huggingface_suffix(role, experts))
            }
        }
    }

    /// An expert's matrix: GGUF stacks all experts in one tensor, so `expert` does not show there.
    pub fn expert(&self, layer: usize, expert: usize, role: &str) -> String {
        match self.naming {
            Naming::Gguf => format!("blk.{layer}.{}", gguf_suffix(role)),
            Naming::HuggingFace(names) => {
                let (prefix, projection) = match (names, role) {
                    (HfExpertNames::Mlp, "expert_gate") => ("mlp", "gate_proj"),
                    (HfExpertNames::Mlp, "expert_up") => ("mlp", "up_proj"),
                    (HfExpertNames::Mlp, _) => ("mlp", "down_proj"),
                    (HfExpertNames::BlockSparse, "expert_gate") => ("block_sparse_moe", "w1"),
                    (HfExpertNames::BlockSparse, "expert_up") => ("block_sparse_moe", "w3"),
                    (HfExpertNames::BlockSparse, _) => ("block_sparse_moe", "w2"),
                };
                format!("model.layers.{layer}.{prefix}.experts.{expert}.{projection}.weight")
            }
        }
    }
}

fn gguf_suffix(role: &str) -> &'static str {
    match role {
        "q" => "attn_q.weight",
        "k" => "attn_k.weight",
        "v" => "attn_v.weight",
        "o" => "attn_output.weight",
        "q_bias" => "attn_q.bias",
        "k_bias" => "attn_k.bias",
        "v_bias" => "attn_v.bias",
        "o_bias" => "attn_output.bias",
        "q_norm" => "attn_q_norm.weight",
        "k_norm" => "attn_k_norm.weight",
        "attention_norm" => "attn_norm.weight",
        "feed_forward_norm" => "ffn_norm.weight",
        "gate" => "ffn_gate.weight",
        "up" => "ffn_up.weight",
        "down" => "ffn_down.weight",
        "router" => "ffn_gate_inp.weight",
        "expert_gate" => "ffn_gate_exps.weight",
        "expert_up" => "ffn_up_exps.weight",
        "expert_down" => "ffn_down_exps.weight",
        other => unreachable!("no tensor has the role {other}"),
    }
}

fn huggingface_suffix(role: &str, experts: HfExpertNames) -> &'static str {
    match (role, experts) {
        ("q", _) => "self_attn.q_proj.weight",
        ("k", _) => "self_attn.k_proj.weight",
        ("v", _) => "self_attn.v_proj.weight",
        ("o", _) => "self_attn.o_proj.weight",
        ("q_bias", _) => "self_attn.q_proj.bias",
        ("k_bias", _) => "self_attn.k_proj.bias",
        ("v_bias", _) => "self_attn.v_proj.bias",
        ("o_bias", _) => "self_attn.o_proj.bias",
        ("q_norm", _) => "self_attn.q_norm.weight",
        ("k_norm", _) => "self_attn.k_norm.weight",
        ("attention_norm", _) => "input_layernorm.weight",
        ("feed_forward_norm", _) => "post_attention_layernorm.weight",
        ("gate", _) => "mlp.gate_proj.weight",
        ("up", _) => "mlp.up_proj.weight",
        ("down", _) => "mlp.down_proj.weight",
        ("router", HfExpertNames::Mlp) => "mlp.gate.weight",
        ("router", HfExpertNames::BlockSparse) => "block_sparse_moe.gate.weight",
        (other, _) => unreachable!("no tensor has the role {other}"),
    }
}
