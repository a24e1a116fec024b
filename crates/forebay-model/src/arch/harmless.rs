//! Keys of files that change no answer although nothing reads them, each list with its reason.

/// Keys of GGUF metadata behind the name of the architecture. Those that end in `.` stand for all keys that begin with them.
const GGUF: &[(&[&str], &str)] = &[
    (&["vocab_size"], "the embedding table has as many rows as the model has tokens"),
    (
        &["leading_dense_block_count", "moe_every_n_layers", "interleave_moe_layer_step"],
        "a layer has experts if the file has a router for it",
    ),
    (&["expert_count"], "the router of each layer has as many rows as the layer has experts"),
    (&["rope.dimension_sections"], "positions of text are the same in all sections"),
    (&["rope.scaling.finetuned"], "a remark on how the model was trained"),
    (
        &["vision.", "audio.", "mm.", "projector.", "n_deepstack_layers", "deepstack_mapping"],
        "images and sound",
    ),
    (
        &["embedding_length_out"],
        "the width of all residual streams, which follows from their number",
    ),
    (&["pooling_type", "classifier.output_labels"], "embeddings of texts"),
    (&["tensor_data_layout"], "converters order rows for the architecture"),
    (
        &["hash_layer_count"],
        "only families with tables of experts have such layers, and those read it",
    ),
];

/// Keys of `config.json`, at any level.
const CONFIG: &[(&[&str], &str)] = &[
    (
        &[
            "_commit_hash",
            "_name_or_path",
            "architectures",
            "auto_map",
            "custom_pipelines",
            "finetuning_task",
            "model_type",
            "name",
            "task_specific_params",
            "tokenizer_class",
            "transformers_version",
            "version",
        ],
        "they say what the files are, not what they compute",
    ),
    (
        &[
            "altup_lr_multiplier",
            "aux_loss_alpha",
            "embd_pdrop",
            "ep_size",
            "hidden_dropout",
            "initializer_range",
            "learnable_sink_init",
            "linear_a_log_max",
            "linear_a_log_min",
            "linear_dt_init_floor",
            "linear_dt_max",
            "linear_dt_min",
            "load_balance_coeff",
            "moe_capacity",
            "moe_gate",
            "moe_norm_min",
            "output_attentions",
            "output_hidden_states",
            "output_router_logits",
            "pretraining_tp",
            "rescale_prenorm_residual",
            "resid_pdrop",
            "router_aux_loss_coef",
            "seed",
            "seq_aux",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
            "time_step_rank",
        ],
        "training",
    ),
    (
        &[
            "bos_token_id",
            "decoder_start_token_id",
            "eod_token_id",
            "eos_token_id",
            "pad_token_id",
            "sep_token_id",
            "pad_id",
            "im_start_id",
            "im_end_id",
            "text_start_id",
            "text_end_id",
            "mask_init_id",
            "org_vocab_size",
            "generation_config",
            "suppress_tokens",
            "begin_suppress_tokens",
            "forced_bos_token_id",
        ],
        "tokens, which the tokenizer and the generation settings give",
    ),
    (
        &[
            "cache_implementation",
            "dtype",
            "enable_moe_fp32_combine",
            "need_fp32_gate",
            "expert_dtype",
            "kv_cache_dtype",
            "mamba_ssm_cache_dtype",
            "mamba_ssm_dtype",
            "num_logits_to_keep",
            "residual_in_fp32",
            "return_dict",
            "torch_dtype",
            "torchscript",
            "use_bfloat16",
            "use_cache",
            "use_grouped_mm",
            "use_mamba_kernels",
            "use_parallel_embedding",
            "for_llm_compressor",
            "chunk_size_feed_forward",
            "chunk_size",
            "mamba_chunk_size",
            "is_decoder",
            "unsloth_fixed",
            "unsloth_version",
            "gradient_checkpointing",
        ],
        "how another program runs the model",
    ),
    (
        &[
            "num_nextn_predict_layers",
            "num_mtp_layers",
            "num_mtp_modules",
            "mtp_num_layers",
            "num_mtp_heads",
        ],
        "the files show their layers that predict further tokens",
    ),
    (
        &[
            "mamba_conv_bias",
            "lm_head_bias",
            "use_conv_bias",
            "tie_encoder_decoder",
            "moe_shared_expert_overlap",
            "use_embedding_sharing",
        ],
        "the files show which tensors there are",
    ),
    (
        &[
            "audio_config",
            "vision_config",
            "encoder_config",
            "text_hidden_size",
            "merged_hidden_size",
            "out_hidden_size",
            "projection_layer_norm_eps",
        ],
        "images and sound",
    ),
    (&["cla_share_factor"], "it counts for models with `use_cla` only, which are refused"),
    (
        &[
            "mamba_expand",
            "mlp_expansion_factor",
            "expand",
            "qk_head_dim",
            "ngram_vocab_size_base",
            "split_ngram_parts",
            "number_of_conv_states",
            "make_ngram_vocab_size_divisible_by",
        ],
        "sizes that follow from others or from the tensors",
    ),
    (&["quantization_config", "compression_config"], "the reader of quantised weights checks it"),
    (&["initial_context_length"], "the parameters of the rotation have it too"),
];

/// Keys of objects with the parameters of a rotation.
const ROTATION: &[(&[&str], &str)] = &[
    (
        &["mrope_section", "mrope_interleaved", "xdrope_section"],
        "positions of text are the same in all sections",
    ),
    (&["finetuned"], "a remark on how the model was trained"),
];

fn lists(list: &[(&'static [&'static str], &str)], key: &str) -> bool {
    let is = |known: &&str| *known == key || known.ends_with('.') && key.starts_with(known);
    list.iter().any(|(keys, _)| keys.iter().any(is))
}

/// Returns true if a key of GGUF metadata, without the architecture's name, changes no answer.
pub(super) fn in_gguf(key: &str) -> bool {
    lists(GGUF, key)
}

/// Returns true if a key of `config.json` changes no answer.
pub(super) fn in_config(key: &str) -> bool {
    lists(CONFIG, key)
}

/// Returns true if a parameter of a rotation changes no answer.
pub(super) fn in_rotation(key: &str) -> bool {
    lists(ROTATION, key)
}
