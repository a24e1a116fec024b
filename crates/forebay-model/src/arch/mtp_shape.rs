//! The forms of layers that predict further tokens, and the names of their tensors.

use forebay_compute::NormForm;
use serde::Serialize;

/// Where Hugging Face folders have layers that predict further tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MtpForm {
    /// In a module `mtp` beside the model's layers (Qwen3-Next, Qwen3.5).
    Beside,
    /// After the last of the model's layers (DeepSeek-V3, GLM-4.5). GGUF files of all families have this form.
    Behind,
    /// Known in GGUF files only.
    InGguf,
}

/// What differs between the predicting layers of families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MtpRule {
    pub form: MtpForm,
    /// True if the layer takes the state of a token before the model's last norm: all residual streams, if there are several.
    pub raw_states: bool,
    /// Form of the norm before the layer's output projection.
    pub norm_form: NormForm,
}

impl MtpRule {
    pub const fn of(form: MtpForm) -> MtpRule {
        MtpRule { form, raw_states: false, norm_form: NormForm::RootMeanSquare }
    }
}

/// The predicting layer, which is the last one of [`Architecture::layers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Mtp {
    /// Number of such layers in the file. Only the first one is used.
    pub published: usize,
    /// True if it takes embeddings from a table of its own.
    pub own_embedding: bool,
    /// True if its logits come from an output projection of its own.
    pub own_head: bool,
    /// True if it has a norm before the output projection. Otherwise it uses the model's.
    pub own_norm: bool,
    /// True if it takes the state of a token before the model's last norm.
    pub raw_states: bool,
    /// Form of its norm before the output projection.
    #[serde(skip)]
    pub(crate) norm_form: NormForm,
    #[serde(skip)]
    pub(crate) names: MtpNames,
}

/// Names of the tensors of the predicting layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MtpNames {
    /// Number of the layer.
    pub layer: usize,
    /// Prefix of the module beside the model's layers; `None` if the tensors are behind those of the last layer.
    pub prefix: Option<&'static str>,
    /// True if the norm before the output projection is named as the last norm of the layer, not as a part of the projection
    /// (Hy3, Ling 3).
    pub last_norm: bool,
}

/// Most rows of a pass that checks a proposal: up to two tokens and the proposal.
pub const MTP_ROWS_MAX: usize = 3;

/// Role, name in GGUF, name in a layer behind the last one, and name in a module beside the layers.
const ROLES: &[(&str, &str, &str, &str)] = &[
    ("join", "nextn.eh_proj.weight", "eh_proj.weight", "fc.weight"),
    ("embedding_norm", "nextn.enorm.weight", "enorm.weight", "pre_fc_norm_embedding.weight"),
    ("hidden_norm", "nextn.hnorm.weight", "hnorm.weight", "pre_fc_norm_hidden.weight"),
    ("norm", "nextn.shared_head_norm.weight", "shared_head.norm.weight", "norm.weight"),
    ("last_norm", "layer_output_norm.weight", "final_layernorm.weight", ""),
    ("head", "nextn.shared_head_head.weight", "shared_head.head.weight", ""),
    ("embedding", "nextn.embed_tokens.weight", "embed_tokens.weight", "embed_tokens.weight"),
];

impl MtpNames {
    /// Returns the name with a role, and the prefix if it is not behind that of the layer.
    pub fn name(self, role: &str, is_gguf: bool) -> Option<(&'static str, Option<&'static str>)> {
        let role = if role == "norm" && self.last_norm { "last_norm" } else { role };
        let of = ROLES.iter().find(|(of, ..)| *of == role);
        let (_, gguf, behind, beside) = of.unwrap_or_else(|| unreachable!("no tensor has {role}"));
        let name = match self.prefix {
            Some(_) => *beside,
            None if is_gguf => *gguf,
            None => *behind,
        };
        (!name.is_empty()).then_some((name, self.prefix))
    }
}
