//! The output projection of a Hugging Face folder, and tensors that its index names but its files lack.

use forebay_format::{Absent, Catalog, FormatError};

use super::architecture::{Architecture, Naming};
use super::config::Config;
use super::families::by_name;
use super::family::Family;
use super::names::Names;
use crate::ModelError;

/// Keys that say if the output projection is the embedding table.
const FLAGS: [&str; 2] = ["tie_word_embeddings", "tie_embedding"];

/// Ends of names of tensors in layers that no family needs: frequencies that follow from the configuration, and scales of what other
/// programs quantise while they run.
const NEEDLESS: [&str; 6] =
    ["rotary_emb.inv_freq", ".masked_bias", ".input_scale", ".k_scale", ".v_scale", ".q_scale"];

/// Returns true if the output projection is the embedding table.
///
/// A projection in the files is always used. Without one, the table is used if the configuration says so at either of its levels, the
/// whole and the part about the language model, or if it says nothing and the family means it.
///
/// # Errors
/// Returns [`ModelError::NoHead`] if there is no projection and nothing allows the table in its place.
pub(super) fn is_tied(
    levels: [&Config<'_>; 2],
    family: &'static Family,
    catalog: &Catalog,
    naming: Naming,
) -> Result<bool, ModelError> {
    let mut said: Option<bool> = None;
    for (level, key) in levels.into_iter().flat_map(|level| FLAGS.map(|key| (level, key))) {
        if let Some(flag) = level.flag(key)? {
            said = Some(flag || said == Some(true));
        }
    }
    let head = Names::new(naming, family).head();
    // Quantised projections have other ends of their names.
    let stem = head.strip_suffix("weight").unwrap_or(&head);
    let elsewhere = |name: &str| {
        name != head
            && name.ends_with("lm_head.weight")
            && !name.split('.').any(|part| part == "mtp")
    };
    let names = || catalog.tensors().iter().map(|tensor| &tensor.name);
    if let Some(other) = names().find(|name| elsewhere(name)) {
        return Err(ModelError::BadValue {
            key: other.clone(),
            value: "a tensor of the files".into(),
            expected: format!("forebay knows an output projection '{head}'"),
        });
    }
    let bias = format!("{stem}bias");
    if names().any(|name| name.starts_with(stem) && *name != bias) {
        return Ok(false);
    }
    let is_absent = catalog.absent.iter().find(|of| of.tensor == head);
    match (said, is_absent) {
        (Some(true), _) => Ok(true),
        (None, None) if family.ends.tied => Ok(true),
        (_, Some(absent)) => Err(refused(catalog, absent)),
        (said, None) => Err(ModelError::NoHead {
            head,
            said: match said {
                Some(_) => "tie_word_embeddings is false".into(),
                None => {
                    format!("it has no tie_word_embeddings, and {} does not mean it", family.name)
                }
            },
        }),
    }
}

/// Checks that the files hold every tensor of the model's layers that they name.
///
/// # Errors
/// Returns an error that names the first tensor that they lack.
pub(super) fn expect_complete(
    architecture: &Architecture,
    catalog: &Catalog,
) -> Result<(), ModelError> {
    let family = by_name(architecture.family).expect("descriptions are of known families");
    let names = Names::new(architecture.naming, family);
    let outer = [names.embedding(), names.final_norm()];
    let beginning = match architecture.naming {
        Naming::Gguf => "blk.".to_owned(),
        Naming::HuggingFace { root, layers } => format!("{root}{layers}."),
    };
    let is_needed = |of: &&Absent| {
        let layer = of.tensor.strip_prefix(&beginning).and_then(|rest| rest.split('.').next());
        let layer = layer.and_then(|number| number.parse::<usize>().ok());
        let is_in_layer = layer.is_some_and(|layer| layer < architecture.layers.len());
        let is_needless = NEEDLESS.iter().any(|end| of.tensor.ends_with(end));
        outer.contains(&of.tensor) || is_in_layer && !is_needless
    };
    match catalog.absent.iter().find(is_needed) {
        None => Ok(()),
        Some(absent) => Err(refused(catalog, absent)),
    }
}

/// Returns the error for a tensor that is needed.
fn refused(catalog: &Catalog, absent: &Absent) -> ModelError {
    let tensor = absent.tensor.clone();
    match &absent.shard {
        Some(shard) => {
            FormatError::MissingTensor { path: catalog.root.clone(), tensor, shard: shard.clone() }
                .into()
        }
        None => ModelError::NoElements { name: tensor },
    }
}
