//! Layers that predict further tokens (multi-token prediction: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2).
//!
//! Such a layer takes the state of a token after the model's last layer, in most families normed as for the logits, and the embedding of
//! the next token. It joins both by a projection and predicts the token after the next one. If the state has several residual streams,
//! each is joined with the embedding. A file may have several of these layers. forebay uses the first one.

use forebay_format::Catalog;

use super::architecture::{
    Architecture, EmbeddingNorm, Experts, FeedForward, Layer, Mixer, Naming,
};
use super::check::check;
use super::compressed::PLAIN_ROPE;
use super::families::{self, by_name};
use super::gguf;
use super::mtp_shape::{Mtp, MtpForm, MtpNames, MtpRule};
use super::names::Names;
use super::shapes::{NormLayout, SharedKeys, StreamRule, Streams};
use crate::ModelError;

/// Prefixes under which folders have the module. The first is that of the published models.
const PREFIXES: [&str; 5] = [
    "mtp.",
    "model.mtp.",
    "model.language_model.mtp.",
    "language_model.mtp.",
    "language_model.model.mtp.",
];

/// Adds the first predicting layer of the files to a description.
///
/// # Errors
/// Returns [`ModelError::NoMtp`] if forebay cannot use such layers of the family, or if the files have none.
pub(super) fn add_mtp(
    architecture: &mut Architecture,
    catalog: &Catalog,
) -> Result<(), ModelError> {
    let family = by_name(architecture.family).expect("descriptions are of known families");
    let Some(MtpRule { form, raw_states, norm_form }) = family.files.mtp else {
        let known = families::with_mtp().collect::<Vec<_>>().join(", ");
        let family = family.name;
        let why = format!("forebay uses such layers of {known}, and this is {family}");
        return Err(ModelError::NoMtp { why });
    };
    if form == MtpForm::InGguf && architecture.naming != Naming::Gguf {
        let family = family.name;
        let why = format!("forebay uses such layers of {family} from GGUF files only");
        return Err(ModelError::NoMtp { why });
    }
    let layer = architecture.layers.len();
    let names = Names::new(architecture.naming, family);
    let of = |prefix| MtpNames { layer, prefix, last_norm: false };
    let has = |of: MtpNames, role: &str| {
        let name = names.with_mtp(Some(of)).mtp(role);
        name.is_some_and(|name| catalog.tensor(&name).is_some())
    };
    let is_behind = architecture.naming == Naming::Gguf || form == MtpForm::Behind;
    // A projection in packed codes has another name, and so do its scales. The norm is always plain.
    let found = match is_behind {
        true => Some(of(None)).filter(|of| has(*of, "embedding_norm")),
        false => PREFIXES.map(|prefix| of(Some(prefix))).into_iter().find(|of| has(*of, "norm")),
    };
    let Some(own) = found else {
        let why = "the model's files have no layers that predict further tokens".into();
        return Err(ModelError::NoMtp { why });
    };
    let own = MtpNames { last_norm: !has(own, "norm") && has(own, "last_norm"), ..own };
    let names = names.with_mtp(Some(own));
    // Attention is that of the last layer that has a window if this one has, too.
    let has_windows = architecture.layers.iter().any(|layer| layer.window.is_some());
    let (window, gatings) = gguf::predicting_layer(catalog, family, (layer, has_windows))?;
    let is_alike =
        |of: &&Layer| of.mixer == Mixer::Attention && of.window.is_some() == window.is_some();
    let Some(mut last) = architecture.layers.iter().rfind(is_alike).cloned() else {
        let why = "forebay knows predicting layers with attention like that of another layer only";
        return Err(ModelError::NoMtp { why: why.into() });
    };
    if family.attention.compressed {
        if catalog.tensor(&names.layer(layer, "entry_values")).is_some() {
            let why = "forebay knows predicting layers that see their window only, and this one has compressed entries";
            return Err(ModelError::NoMtp { why: why.into() });
        }
        (last.attention, last.rope) = without_entries(architecture, last.attention);
    }
    let count = architecture.attentions.len();
    // If only some layers choose their keys, the layer's own tensors say if it does.
    let indexed = |index: &usize| architecture.attentions[*index].indexer.is_some();
    let some_are = (0..count).any(|index| indexed(&index)) && !(0..count).all(|of| indexed(&of));
    let attention = match some_are {
        true => {
            let has_indexer = catalog.tensor(&names.layer(layer, "indexer_k")).is_some();
            (0..count).find(|index| indexed(index) == has_indexer).unwrap_or(last.attention)
        }
        false => last.attention,
    };
    let follows = |number: usize| {
        let norm = match own.prefix {
            Some(prefix) => format!("{prefix}layers.{number}.input_layernorm.weight"),
            None => names.layer(layer + number, "attention_norm"),
        };
        catalog.tensor(&norm).is_some()
    };
    architecture.mtp = Some(Mtp {
        published: (1..catalog.tensors().len()).find(|number| !follows(*number)).unwrap_or(1),
        own_embedding: has(own, "embedding"),
        own_head: has(own, "head"),
        own_norm: has(own, "norm"),
        raw_states,
        norm_form,
        names: own,
    });
    // The layer is a mixture or not whatever the one with that attention is.
    let with_experts = architecture.layers.iter().rfind(|of| of.feed_forward.has_experts());
    let feed_forward = match (names.routed_experts(catalog, layer), with_experts) {
        (Some(count), Some(of)) => match of.feed_forward.clone() {
            // Pruned models may have another number in this layer.
            FeedForward::Experts(experts) => FeedForward::Experts(Experts { count, ..experts }),
            other => other,
        },
        _ => match (names.dense_width(catalog, layer), &last.feed_forward) {
            (Some(width), _) => FeedForward::Dense { width, cut: None },
            (None, of) => of.clone(),
        },
    };
    let gatings = gatings.or(last.gatings);
    architecture.layers.push(Layer { attention, feed_forward, gatings, ..last });
    Ok(())
}

/// Returns the number of attention with shared keys as number `like` has it, but without compressed entries, and that of its
/// rotation. The last layers of a model may all have entries, so no layer may have such attention.
fn without_entries(architecture: &mut Architecture, like: usize) -> (usize, Option<usize>) {
    let mut own = architecture.attentions[like].clone();
    own.shared = own.shared.map(|shared| SharedKeys { entries: None, ..shared });
    let number = architecture.attentions.iter().position(|of| *of == own);
    let number = number.unwrap_or_else(|| {
        architecture.attentions.push(own);
        architecture.attentions.len() - 1
    });
    (number, Some(PLAIN_ROPE))
}

impl Architecture {
    /// Returns the number of vectors of [`Architecture::hidden`] elements that the state of a token has for the predicting layer.
    pub fn predicted_from(&self) -> usize {
        let raw = self.mtp.is_some_and(|mtp| mtp.raw_states);
        self.streams.filter(|_| raw).map_or(1, |streams| streams.count)
    }

    /// Returns true if a tensor belongs to a layer that predicts further tokens and is not loaded.
    pub fn leaves_out(&self, tensor: &str) -> bool {
        let (root, layers) = match self.naming {
            Naming::Gguf => ("blk.".to_owned(), self.layers.len()),
            Naming::HuggingFace { root, layers } => {
                let is_beside = self.mtp.is_some_and(|of| of.names.prefix.is_some());
                let count = if is_beside { self.main_layers() } else { self.layers.len() };
                (format!("{root}{layers}."), count)
            }
        };
        let number = |rest: &str| rest.split('.').next()?.parse::<usize>().ok();
        if tensor.strip_prefix(&root).and_then(number).is_some_and(|at| at >= layers) {
            return true;
        }
        let beside =
            |prefix: &&'static str| self.naming != Naming::Gguf && tensor.starts_with(prefix);
        let Some(prefix) = PREFIXES.into_iter().find(beside) else { return false };
        let is_first = |rest: &str| rest.strip_prefix("layers.").and_then(number).unwrap_or(0) == 0;
        let is_used = self.mtp.is_some_and(|of| of.names.prefix == Some(prefix));
        !(is_used && is_first(&tensor[prefix.len()..]))
    }

    /// Checks that the predicting layer is of a known kind.
    pub(super) fn validate_mtp(&self) -> Result<(), ModelError> {
        let Some(Mtp { raw_states, .. }) = self.mtp else { return Ok(()) };
        let plain = self.layers.iter().all(|layer| !layer.chunked)
            && self.streams.is_none_or(|streams| has_known_states(&streams, raw_states))
            && self.ngrams.is_none()
            && self.layer_embeddings.is_none()
            && (0..self.layers.len()).all(|layer| self.norms_of(layer) == NormLayout::Pre)
            && self.embedding_norm == EmbeddingNorm::None
            && self.convolutions.is_none()
            && self.residual_gates.is_none()
            && (self.embedding_scale, self.residual_scale, self.logit_scale) == (1.0, 1.0, 1.0);
        let last = self.layers.last().filter(|layer| {
            layer.mixer == Mixer::Attention
                && layer.keys_of.is_none()
                && !layer.feed_forward.is_none()
        });
        check(
            "predicting layer",
            self.main_layers(),
            plain && last.is_some() && self.main_layers() > 0,
            "forebay knows one with attention and a feed-forward, of models without chunks and with one residual stream or \
             mixed ones",
        )
    }
}

/// Returns true if a predicting layer takes these streams one by one.
fn has_known_states(streams: &Streams, raw_states: bool) -> bool {
    raw_states && matches!(streams.rule, StreamRule::Mixed { .. })
}
