//! Where norms are and what they compute: what files say of them, and checks.

use forebay_compute::NormForm;

use super::architecture::{Architecture, Layer, Mixer};
use super::check::check;
use super::config::Config;
use super::family::Family;
use super::gguf_keys::Keys;
use super::shapes::NormLayout;
use crate::ModelError;

/// Keys in `config.json` of the number that norms add to the mean of squares.
const EPSILONS: [&str; 6] = [
    "rms_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "norm_eps",
    "layer_norm_eps",
    "norm_epsilon",
];
/// Keys of the same number in GGUF files, for both forms of norms.
const GGUF_EPSILONS: [&str; 2] =
    ["attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"];

impl NormLayout {
    /// Returns true if attention and feed-forward take normed rows of the residual stream.
    pub fn before(self) -> bool {
        matches!(self, NormLayout::Pre | NormLayout::Sandwich | NormLayout::Parallel)
    }

    /// Returns true if their output is normed before it is added to the residual stream.
    pub fn after(self) -> bool {
        matches!(self, NormLayout::Post | NormLayout::Sandwich)
    }
}

/// Returns the form of the norms of a `config.json`, and their epsilon. Command A+ may have norms of either form, and the keys say which.
pub(super) fn of_config(
    config: &Config<'_>,
    family: &Family,
) -> Result<(NormForm, f32), ModelError> {
    let is_other = family.name == "cohere2moe" && config.set("rms_norm_eps").is_some();
    let form = if is_other { NormForm::RootMeanSquare } else { family.layers.norm_form };
    // Configuration classes do not write what is usual.
    let usual = if form == NormForm::Layer { 1e-5 } else { 1e-6 };
    let epsilon = config.first_float(&EPSILONS)?.map_or(usual, |epsilon| epsilon as f32);
    Ok((form, epsilon))
}

/// Returns the form of the norms of a GGUF file, and their epsilon. Some converters write the key of layer norms for models that have
/// other norms only.
pub(super) fn of_gguf(keys: &Keys<'_>, family: &Family) -> Result<(NormForm, f32), ModelError> {
    let [of_squares, of_layers] = GGUF_EPSILONS.map(|key| keys.optional_float(key));
    let (of_squares, of_layers) = (of_squares?, of_layers?);
    let is_other = family.name == "cohere2moe" && of_layers.is_none();
    let form = if is_other { NormForm::RootMeanSquare } else { family.layers.norm_form };
    if let (NormForm::Layer, Some(squares), Some(layers)) = (form, of_squares, of_layers) {
        let expected = "forebay knows one epsilon, that of layer norms";
        check(GGUF_EPSILONS[0], squares, squares == layers, expected)?;
    }
    let (epsilon, key) = match form {
        NormForm::RootMeanSquare => (of_squares.or(of_layers), GGUF_EPSILONS[0]),
        NormForm::Layer => (of_layers.or(of_squares), GGUF_EPSILONS[1]),
    };
    Ok((form, epsilon.ok_or_else(|| keys.missing(key))?))
}

/// Returns where norms are. Some families have blocks beside each other in some models only.
///
/// # Errors
/// Returns an error if the family has such blocks always or never, and the file says otherwise.
pub(super) fn layout(family: &Family, said: Option<bool>) -> Result<NormLayout, ModelError> {
    let usual = family.layers.norms;
    let Some(said) = said else { return Ok(usual) };
    let fits = family.layers.parallel_by_key || said == (usual == NormLayout::Parallel);
    check("use_parallel_residual", said, fits, "forebay knows the other value for this family")?;
    Ok(match said {
        true => NormLayout::Parallel,
        false if usual == NormLayout::Parallel => NormLayout::Pre,
        false => usual,
    })
}

impl Architecture {
    pub(super) fn validate_norms(&self) -> Result<(), ModelError> {
        let is_plain = self.streams.is_none()
            && self.ngrams.is_none()
            && self.layer_embeddings.is_none()
            && self.mtp.is_none()
            && self.expert_layers().all(|of| !of.own_norms && !of.bias);
        check(
            "layer norms",
            "present",
            self.norm_form == NormForm::RootMeanSquare || is_plain && !self.norms.after(),
            "forebay knows them before blocks of one residual stream, without biases of experts",
        )?;
        if let Some(factor) = self.normed_residual {
            let fits = factor.is_finite() && factor > 0.0;
            check("factor of normed inputs", factor, fits, "it must be positive")?;
            let fits = is_plain
                && self.layers.iter().all(|layer| layer.feed_forward.has_experts())
                && (0..self.layers.len()).all(|layer| self.norms_of(layer) == NormLayout::Pre)
                && self.residual_gates.is_none()
                && !self.layer_scales
                && self.residual_scale == 1.0
                && self.convolutions.is_none();
            let expected =
                "forebay knows them with experts, one residual stream, and norms before blocks";
            check("outputs that are added to normed inputs", "present", fits, expected)?;
        }
        let has_both =
            |layer: &Layer| layer.mixer == Mixer::Attention && !layer.feed_forward.is_none();
        let is_whole = is_plain && !self.layer_scales && self.layers.iter().all(has_both);
        check(
            "parallel blocks",
            "present",
            self.norms != NormLayout::Parallel || is_whole,
            "forebay knows them in layers with attention and a feed-forward, and one residual stream",
        )
    }
}
