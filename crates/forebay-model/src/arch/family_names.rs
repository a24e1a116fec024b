//! Tensor names of families that differ from the usual ones: role, GGUF name, Hugging Face name.

pub(super) const MINIMAX_M3: &[(&str, &str, &str)] = &[
    ("indexer_q", "", "self_attn.index_q_proj.weight"),
    ("indexer_k", "", "self_attn.index_k_proj.weight"),
    ("indexer_q_norm", "", "self_attn.index_q_norm.weight"),
    ("indexer_k_norm", "", "self_attn.index_k_norm.weight"),
    ("router", "", "block_sparse_moe.gate.weight"),
    ("correction_bias", "", "block_sparse_moe.e_score_correction_bias"),
    ("expert_gate", "", "block_sparse_moe.experts.{expert}.w1.weight"),
    ("expert_up", "", "block_sparse_moe.experts.{expert}.w3.weight"),
    ("expert_down", "", "block_sparse_moe.experts.{expert}.w2.weight"),
    ("shared_gate", "", "block_sparse_moe.shared_experts.gate_proj.weight"),
    ("shared_up", "", "block_sparse_moe.shared_experts.up_proj.weight"),
    ("shared_down", "", "block_sparse_moe.shared_experts.down_proj.weight"),
];

pub(super) const NEMOTRON_H_NAMES: &[(&str, &str, &str)] = &[
    ("embedding", "token_embd.weight", "embeddings.weight"),
    ("final_norm", "output_norm.weight", "norm_f.weight"),
    ("attention_norm", "attn_norm.weight", "norm.weight"),
    ("feed_forward_norm", "attn_norm.weight", "norm.weight"),
    ("q", "attn_q.weight", "mixer.q_proj.weight"),
    ("k", "attn_k.weight", "mixer.k_proj.weight"),
    ("v", "attn_v.weight", "mixer.v_proj.weight"),
    ("o", "attn_output.weight", "mixer.o_proj.weight"),
    ("delta_in", "ssm_in.weight", "mixer.in_proj.weight"),
    ("delta_decay", "ssm_a", "mixer.A_log"),
    ("delta_step", "ssm_dt.bias", "mixer.dt_bias"),
    ("delta_convolution", "ssm_conv1d.weight", "mixer.conv1d.weight"),
    ("delta_convolution_bias", "ssm_conv1d.bias", "mixer.conv1d.bias"),
    ("delta_skip", "ssm_d", "mixer.D"),
    ("delta_norm", "ssm_norm.weight", "mixer.norm.weight"),
    ("delta_o", "ssm_out.weight", "mixer.out_proj.weight"),
    ("up", "ffn_up.weight", "mixer.up_proj.weight"),
    ("down", "ffn_down.weight", "mixer.down_proj.weight"),
    ("router", "ffn_gate_inp.weight", "mixer.gate.weight"),
    ("correction_bias", "exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
    ("expert_up", "ffn_up_exps.weight", "mixer.experts.{expert}.up_proj.weight"),
    ("expert_down", "ffn_down_exps.weight", "mixer.experts.{expert}.down_proj.weight"),
    ("shared_up", "ffn_up_shexp.weight", "mixer.shared_experts.up_proj.weight"),
    ("shared_down", "ffn_down_shexp.weight", "mixer.shared_experts.down_proj.weight"),
];

pub(super) const LFM2_NAMES: &[(&str, &str, &str)] = &[
    ("final_norm", "", "embedding_norm.weight"),
    ("attention_norm", "", "operator_norm.weight"),
    ("feed_forward_norm", "", "ffn_norm.weight"),
    ("o", "", "self_attn.out_proj.weight"),
    ("q_norm", "", "self_attn.q_layernorm.weight"),
    ("k_norm", "", "self_attn.k_layernorm.weight"),
    ("delta_in", "", "conv.in_proj.weight"),
    ("delta_convolution", "", "conv.conv.weight"),
    ("delta_o", "", "conv.out_proj.weight"),
    ("gate", "", "feed_forward.w1.weight"),
    ("up", "", "feed_forward.w3.weight"),
    ("down", "", "feed_forward.w2.weight"),
    ("router", "", "feed_forward.gate.weight"),
    ("correction_bias", "", "feed_forward.expert_bias"),
    ("expert_gate", "", "feed_forward.experts.{expert}.w1.weight"),
    ("expert_up", "", "feed_forward.experts.{expert}.w3.weight"),
    ("expert_down", "", "feed_forward.experts.{expert}.w2.weight"),
];

pub(super) const GRANITE_HYBRID: &[(&str, &str, &str)] = &[
    ("delta_decay", "ssm_a", "mamba.A_log"),
    ("delta_step", "ssm_dt.bias", "mamba.dt_bias"),
    ("delta_convolution", "ssm_conv1d.weight", "mamba.conv1d.weight"),
    ("delta_convolution_bias", "ssm_conv1d.bias", "mamba.conv1d.bias"),
    ("delta_norm", "ssm_norm.weight", "mamba.norm.weight"),
    ("delta_o", "ssm_out.weight", "mamba.out_proj.weight"),
    ("router", "ffn_gate_inp.weight", "block_sparse_moe.router.layer.weight"),
    ("expert_gate_up", "", "block_sparse_moe.input_linear.weight"),
    ("expert_down_stack", "", "block_sparse_moe.output_linear.weight"),
    // The MLP beside experts, and without experts.
    ("shared_gate_up", "", "shared_mlp.input_linear.weight"),
    ("shared_down", "ffn_down_shexp.weight", "shared_mlp.output_linear.weight"),
    ("gate_up", "", "shared_mlp.input_linear.weight"),
    ("down", "ffn_down.weight", "shared_mlp.output_linear.weight"),
];

pub(super) const KIMI_LINEAR: &[(&str, &str, &str)] = &[
    ("delta_b", "ssm_beta.weight", "self_attn.b_proj.weight"),
    ("delta_decay", "ssm_a", "self_attn.A_log"),
    ("delta_step", "ssm_dt.bias", "self_attn.dt_bias"),
    ("delta_norm", "ssm_norm.weight", "self_attn.o_norm.weight"),
    ("delta_o", "attn_output.weight", "self_attn.o_proj.weight"),
    ("router", "ffn_gate_inp.weight", "block_sparse_moe.gate.weight"),
    ("correction_bias", "exp_probs_b.bias", "block_sparse_moe.gate.e_score_correction_bias"),
    ("expert_gate", "ffn_gate_exps.weight", "block_sparse_moe.experts.{expert}.w1.weight"),
    ("expert_up", "ffn_up_exps.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
    ("expert_down", "ffn_down_exps.weight", "block_sparse_moe.experts.{expert}.w2.weight"),
    ("shared_gate", "ffn_gate_shexp.weight", "block_sparse_moe.shared_experts.gate_proj.weight"),
    ("shared_up", "ffn_up_shexp.weight", "block_sparse_moe.shared_experts.up_proj.weight"),
    ("shared_down", "ffn_down_shexp.weight", "block_sparse_moe.shared_experts.down_proj.weight"),
];

pub(super) const GEMMA4_NAMES: &[(&str, &str, &str)] = &[
    ("feed_forward_norm", "ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("attention_post_norm", "post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("router", "ffn_gate_inp.weight", "router.proj.weight"),
    ("router_norm", "ffn_gate_inp.scale", "router.scale"),
    ("expert_scales", "ffn_down_exps.scale", "router.per_expert_scale"),
    ("expert_norm", "pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    ("expert_post_norm", "post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
    ("shared_post_norm", "post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    ("expert_gate_up", "ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    ("expert_down_stack", "ffn_down_exps.weight", "experts.down_proj"),
    ("shared_gate", "ffn_gate.weight", "mlp.gate_proj.weight"),
    ("shared_up", "ffn_up.weight", "mlp.up_proj.weight"),
    ("shared_down", "ffn_down.weight", "mlp.down_proj.weight"),
];

pub(super) const QWEN4_EXP: &[(&str, &str, &str)] = &[
    ("indexer_k_norm", "", "self_attn.indexer.k_layernorm.weight"),
    ("shared_gate", "", "mlp.shared_expert.gate_proj.weight"),
    ("shared_up", "", "mlp.shared_expert.up_proj.weight"),
    ("shared_down", "", "mlp.shared_expert.down_proj.weight"),
];

pub(super) const GLM5_NEXT: &[(&str, &str, &str)] = &[
    ("delta_b", "", "self_attn.b_proj.weight"),
    ("delta_decay", "", "self_attn.A_log"),
    ("delta_step", "", "self_attn.dt_bias"),
    ("delta_norm", "", "self_attn.o_norm.weight"),
    ("delta_o", "", "self_attn.o_proj.weight"),
];
