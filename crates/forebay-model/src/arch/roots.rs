//! The prefixes of the tensor names in a Hugging Face folder.

use forebay_format::Catalog;

use super::architecture::Naming;
use super::family::Family;
use super::names::Names;

/// Prefixes of a language model's tensors. Language models alone have `model.`, or none if only the part without the output
/// projection was saved. Parts of larger models have longer ones.
const ROOTS: [&str; 13] = [
    "model.",
    "language_model.model.",
    "model.language_model.",
    "backbone.",
    "",
    "language_model.",
    "model.language_model.model.",
    "model.model.",
    "text_model.",
    "model.text_model.",
    "transformer.",
    "module.model.",
    "model.llm.",
];

/// Names that the layers have below the root. Transformers 5 saves the text layers of Kimi K2.5 under the name that the layers of its
/// vision tower have, and EXAONE 3 has the names of GPT-2.
const LAYERS: [&str; 3] = ["layers", "blocks", "h"];

/// Returns the prefixes of the tensor names: those under which the folder has the embedding table.
pub(super) fn naming(catalog: &Catalog, family: &'static Family) -> Naming {
    let of = |root, layers| Naming::HuggingFace { root, layers };
    let has = |root: &&&'static str| {
        let name = Names::new(of(root, LAYERS[0]), family).embedding();
        catalog.tensor(&name).is_some()
    };
    let root = *ROOTS.iter().find(has).unwrap_or(&ROOTS[0]);
    let has_layers = |layers: &&&'static str| {
        let name = Names::new(of(root, layers), family).layer(0, "attention_norm");
        catalog.tensor(&name).is_some()
    };
    of(root, LAYERS.iter().find(has_layers).unwrap_or(&LAYERS[0]))
}
