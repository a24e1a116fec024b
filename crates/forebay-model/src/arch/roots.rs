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
/// vision tower have.
const LAYERS: [&str; 2] = ["layers", "blocks"];

/// Returns the prefixes of the tensor names: those under which the folder has the embedding table.
pub(super) fn naming(catalog: &Catalog, family: &'static Family) -> Naming {
    let of = |root: &'static str| Naming::HuggingFace { root, layers: LAYERS[0] };
    let has = |root: &&&'static str| {
        let name = Names::new(of(root), family).embedding();
        catalog.tensor(&name).is_some()
    };
    let root = *ROOTS.iter().find(has).unwrap_or(&ROOTS[0]);
    let is_renamed =
        catalog.tensor(&format!("{root}{}.0.input_layernorm.weight", LAYERS[1])).is_some();
    Naming::HuggingFace { root, layers: LAYERS[usize::from(is_renamed)] }
}
