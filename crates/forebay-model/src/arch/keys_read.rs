//! The rule for keys of a file that its reader does not use.
//!
//! A reader records every key that it asks for ([`KeysRead`]). When it has finished, every other key of the file must be known to be
//! harmless ([`super::harmless`]). What is left is an unknown key. It is refused by name if it may change the answer, and mentioned
//! once otherwise.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// The keys that a reader has asked for.
#[derive(Debug, Default)]
pub(super) struct KeysRead(RefCell<BTreeSet<String>>);

impl KeysRead {
    /// Records a key below a path, which is empty or ends in `.`.
    pub fn note(&self, path: &str, key: &str) {
        // Readers ask for the same keys for every layer.
        if path.is_empty() && self.has(key) {
            return;
        }
        self.0.borrow_mut().insert(format!("{path}{key}"));
    }

    pub fn has(&self, key: &str) -> bool {
        self.0.borrow().contains(key)
    }

    /// Returns true if some key of the object `path` was asked for.
    pub fn has_below(&self, path: &str) -> bool {
        let below = format!("{path}.");
        self.0.borrow().range(below.clone()..).next().is_some_and(|key| key.starts_with(&below))
    }
}

/// What an unknown key holds, as far as it tells whether the key has an effect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Held {
    /// Nothing: null, an empty list, an empty text.
    Nothing,
    Flag(bool),
    Number(f64),
    Other,
}

/// Words of keys that describe computation. A key is split at `_`, `.` and `-`.
const COMPUTES: [&str; 68] = [
    "act",
    "activation",
    "alibi",
    "alpha",
    "altup",
    "attention",
    "attn",
    "beta",
    "bias",
    "block",
    "blocks",
    "cap",
    "capping",
    "causal",
    "chunk",
    "clamp",
    "clamping",
    "clip",
    "connection",
    "cross",
    "embeddings",
    "eps",
    "epsilon",
    "expert",
    "experts",
    "factor",
    "gate",
    "gated",
    "gating",
    "group",
    "groups",
    "hyper",
    "interleave",
    "interleaved",
    "latent",
    "laurel",
    "limit",
    "limits",
    "logit",
    "logits",
    "magnitude",
    "mask",
    "moe",
    "multiplier",
    "multipliers",
    "norm",
    "normalization",
    "normalize",
    "parallel",
    "pattern",
    "position",
    "residual",
    "rope",
    "rotary",
    "router",
    "routing",
    "scale",
    "scaled",
    "scales",
    "scaling",
    "shared",
    "sink",
    "sinks",
    "sliding",
    "softcap",
    "softcapping",
    "sparsity",
    "temperature",
];

/// Words of keys about training, formats, images and sound, and how a program runs the model. None of these changes what text the
/// weights give.
const DOES_NOT_COMPUTE: [&str; 53] = [
    "architecture",
    "architectures",
    "audio",
    "aux",
    "balance",
    "cache",
    "capacity",
    "checkpointing",
    "class",
    "coef",
    "coeff",
    "commit",
    "deepstack",
    "drop",
    "dropout",
    "dtype",
    "enabled",
    "ep",
    "flash",
    "freeze",
    "frozen",
    "fused",
    "hash",
    "image",
    "impl",
    "implementation",
    "init",
    "initializer",
    "jitter",
    "kernel",
    "kernels",
    "label",
    "labels",
    "lora",
    "loss",
    "mm",
    "mtp",
    "nextn",
    "noise",
    "path",
    "plan",
    "pp",
    "precision",
    "projector",
    "speech",
    "token",
    "tokenizer",
    "tokens",
    "tp",
    "version",
    "video",
    "vision",
    "visual",
];

/// Words of keys that switch something on that is usual. Such a key has an effect if it is false.
const USUAL: [&str; 3] = ["causal", "rope", "rotary"];

fn has_word(key: &str, list: &[&str]) -> bool {
    key.split(['_', '.', '-']).any(|word| list.contains(&word))
}

/// Returns true if a key may be about text: its name says nothing of training, images and the like.
pub(super) fn may_be_about_text(key: &str) -> bool {
    !has_word(key, &DOES_NOT_COMPUTE)
}

/// Returns true if an unknown key with this name and content may change the answer.
pub(super) fn may_change_answers(key: &str, held: Held) -> bool {
    let has = |list: &[&str]| has_word(key, list);
    if !has(&COMPUTES) || !may_be_about_text(key) {
        return false;
    }
    match held {
        Held::Nothing => false,
        Held::Flag(set) => set || has(&USUAL),
        Held::Number(0.0) => false,
        // A factor of 1 changes nothing.
        Held::Number(1.0) => {
            !has(&["alpha", "factor", "multiplier", "scale", "scaling", "temperature"])
        }
        Held::Number(_) | Held::Other => true,
    }
}

/// Mentions unknown keys in the log, once for each list of them in the life of the process.
pub(super) fn mention(source: &str, family: &str, unknown: &[String]) {
    static MENTIONED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if unknown.is_empty() {
        return;
    }
    let list = unknown.join(", ");
    let text = format!(
        "{source} ({family}) has keys that forebay does not know and leaves out: {list:.1000}"
    );
    let mut mentioned = MENTIONED.lock().unwrap_or_else(PoisonError::into_inner);
    // A process that opens hostile files for ever must not collect their keys for ever.
    if mentioned.len() < 1000 && mentioned.insert(text.clone()) {
        tracing::warn!("{text}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_keys_that_compute_are_told_from_others() {
        for (key, held) in [
            ("query_scale", Held::Number(2.0)),
            ("residual_multiplier_2", Held::Number(0.5)),
            ("sliding_window_2", Held::Number(4096.0)),
            ("router_logit_softcapping", Held::Number(30.0)),
            ("add_bias", Held::Flag(true)),
            ("new_norm_type", Held::Other),
            ("is_causal", Held::Flag(false)),
            ("rope_new_thing", Held::Number(1.0)),
        ] {
            assert!(may_change_answers(key, held), "{key}");
        }
        for (key, held) in [
            ("query_scale", Held::Number(1.0)),
            ("query_scale", Held::Nothing),
            ("add_bias", Held::Flag(false)),
            ("attention_probs_dropout_prob", Held::Number(0.1)),
            ("router_aux_loss_coef", Held::Number(0.001)),
            ("attn_implementation", Held::Other),
            ("unsloth_fixed", Held::Flag(true)),
            ("image_token_index", Held::Number(10.0)),
            ("vision_config.scale", Held::Number(10.0)),
        ] {
            assert!(!may_change_answers(key, held), "{key}");
        }
    }

    #[test]
    fn keys_below_an_object_are_found() {
        let read = KeysRead::default();
        read.note("rope.", "factor");
        assert!(read.has("rope.factor") && !read.has("rope"));
        assert!(read.has_below("rope") && !read.has_below("rop") && !read.has_below("rope.factor"));
    }
}
