//! Fields for the choice of tokens that several interfaces share.

use super::{Field, Kind, TEXTS, harmless, honoured, refused, refused_unless};

/// Numbers that every interface has, except for their defaults and ranges.
pub(super) static USUAL: [Field; 6] = [
    honoured("temperature", Kind::Number, "0.7"),
    honoured("top_p", Kind::Number, "0.9"),
    honoured("top_k", Kind::Count, "40"),
    honoured("min_p", Kind::Number, "0.05"),
    honoured("presence_penalty", Kind::Number, "0.5"),
    honoured("frequency_penalty", Kind::Number, "0.5"),
];

const NO_SAMPLER: &str = "this server does not have this sampler";
const ANOTHER_SAMPLER: &str = "it belongs to a sampler that is off";

/// Samplers of llama.cpp and Ollama.
pub(super) static LLAMA_CPP: [Field; 21] = [
    refused_unless("typical_p", &["1"], "0.5", NO_SAMPLER),
    refused_unless("tfs_z", &["1"], "0.5", NO_SAMPLER),
    refused_unless("top_n_sigma", &["-1", "0"], "2", NO_SAMPLER),
    refused("dynatemp_range", "0.5", NO_SAMPLER),
    harmless("dynatemp_exponent", "1", ANOTHER_SAMPLER),
    refused("dry_multiplier", "0.8", NO_SAMPLER),
    harmless("dry_base", "1.75", ANOTHER_SAMPLER),
    harmless("dry_allowed_length", "2", ANOTHER_SAMPLER),
    harmless("dry_penalty_last_n", "-1", ANOTHER_SAMPLER),
    harmless("dry_sequence_breakers", r#"["\n"]"#, ANOTHER_SAMPLER),
    refused("xtc_probability", "0.5", NO_SAMPLER),
    harmless("xtc_threshold", "0.1", ANOTHER_SAMPLER),
    refused("mirostat", "2", NO_SAMPLER),
    harmless("mirostat_tau", "5", ANOTHER_SAMPLER),
    harmless("mirostat_eta", "0.1", ANOTHER_SAMPLER),
    refused_unless("adaptive_target", &["-1"], "0.5", NO_SAMPLER),
    harmless("adaptive_decay", "0.9", ANOTHER_SAMPLER),
    refused("min_keep", "2", "the filters keep as many tokens as they say"),
    refused_unless("penalize_nl", &["true"], "false", "penalties count line ends, too"),
    refused_unless("penalize_newline", &["true"], "false", "penalties count line ends, too"),
    refused("lora", r#"[{"id":0,"scale":1}]"#, "this server has no adapters"),
];

/// Fields of llama.cpp's server that say how it works, not what it answers.
pub(super) static SLOTS: [Field; 9] = [
    harmless("cache_prompt", "true", super::messages::CACHES),
    harmless("n_cache_reuse", "0", super::messages::CACHES),
    harmless("backend_sampling", "true", "it is about speed, and never changes the answer"),
    harmless("sse_ping_interval", "5", "comments in a stream are no part of the answer"),
    harmless("id_slot", "-1", "requests have no fixed slots"),
    harmless("slot_id", "-1", "requests have no fixed slots"),
    harmless("n_keep", "0", "the context is never shifted, so nothing is discarded"),
    harmless("n_discard", "0", "the context is never shifted, so nothing is discarded"),
    harmless("t_max_prompt_ms", "500", "there is no limit of time for a prompt"),
];

pub(super) const NO_BUDGET: &str = "a limit for reasoning alone is not supported";
const WHOLE_GRAMMAR: &str = "a grammar holds from the beginning of the answer";

/// Fields of llama.cpp's server that change the answer there.
pub(super) static LLAMA_OTHERS: [Field; 7] = [
    refused("verbose", "true", "/apply-template shows the prompt"),
    refused("grammar_lazy", "true", WHOLE_GRAMMAR),
    refused("grammar_triggers", r#"[{"type":1,"value":"x"}]"#, WHOLE_GRAMMAR),
    refused("preserved_tokens", r#"["<x>"]"#, "special tokens are never in the answer's text"),
    refused_unless("reasoning_budget_tokens", &["-1"], "100", NO_BUDGET),
    refused_unless("thinking_budget_tokens", &["-1"], "100", NO_BUDGET),
    refused("reasoning_control", "true", NO_BUDGET),
];

/// Which tokens end an answer or may not be in it.
pub(super) static ENDS: [Field; 7] = [
    honoured("stop", TEXTS, r#"["\n\n"]"#),
    honoured("stop_token_ids", super::IDS, "[7]"),
    honoured("ignore_eos", Kind::Flag, "true"),
    honoured("min_tokens", Kind::Natural, "2"),
    honoured("bad_words", Kind::List(&Kind::Text), r#"["wolf"]"#),
    honoured("include_stop_str_in_output", Kind::Flag, "true"),
    honoured("logit_bias", BIASES, r#"{"7":-1}"#),
];

/// Biases by token id or by text: an object of OpenAI's form, or llama.cpp's list of pairs. There, `false` forbids a token.
pub(super) const BIASES: Kind = Kind::OneOf(&[
    Kind::Map(&Kind::OneOf(&[Kind::Number, Kind::Flag])),
    Kind::List(&Kind::OneOf(&[
        Kind::List(&Kind::OneOf(&[Kind::Number, Kind::Flag, Kind::Text])),
        Kind::Object(&BIAS),
    ])),
]);

static BIAS: super::Form = super::Form {
    name: "LogitBias",
    paths: &[],
    groups: &[&[
        super::required("id", Kind::Natural, "7"),
        super::required("bias", Kind::OneOf(&[Kind::Number, Kind::Flag]), "-1"),
    ]],
};

/// Other names of the penalty for recent tokens, and its window.
pub(super) static REPEAT: [Field; 3] = [
    honoured("repetition_penalty", Kind::Number, "1.1"),
    super::alias("repeat_penalty", "repetition_penalty", Kind::Number, "1.1"),
    honoured("repeat_last_n", Kind::Integer, "64"),
];

/// Fields of this server.
pub(super) static OWN: [Field; 1] = [honoured("include_statistics", Kind::Flag, "true")];
