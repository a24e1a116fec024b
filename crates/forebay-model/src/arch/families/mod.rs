//! The model families that the decoder runs, as tables of their differences. A file has related families.

mod deepseek;
mod dense;
mod experts;
mod gemma;
mod hybrid;
mod inkling;
mod layer_norms;
mod llama;
mod mixtures;
mod muse;
mod qwen;

use super::family::Family;
use crate::ModelError;

/// The tables of all families.
const TABLES: [&[Family]; 11] = [
    llama::FAMILIES,
    qwen::FAMILIES,
    gemma::FAMILIES,
    deepseek::FAMILIES,
    experts::FAMILIES,
    hybrid::FAMILIES,
    muse::FAMILIES,
    inkling::FAMILIES,
    mixtures::FAMILIES,
    dense::FAMILIES,
    layer_norms::FAMILIES,
];

/// Architectures of GGUF files that predict no next token, and what they do instead.
const WITHOUT_NEXT_TOKEN: &[(&[&str], &str)] = &[
    (
        &["dream", "llada", "llada-moe", "rnd1"],
        "fills in masked tokens in any order, with attention to both sides (diffusion)",
    ),
    (
        &[
            "bert",
            "eurobert",
            "gemma-embedding",
            "jina-bert-v2",
            "jina-bert-v3",
            "llama-embed",
            "modern-bert",
            "neo-bert",
            "nomic-bert",
            "nomic-bert-moe",
            "t5encoder",
        ],
        "turns texts into vectors",
    ),
    (&["clip"], "turns images into embeddings"),
    (&["dflash", "eagle3", "gemma4-assistant"], "drafts tokens for another model"),
    (&["pockettts", "qwen3tts", "wavtokenizer-dec"], "generates sound"),
];

fn families() -> impl Iterator<Item = &'static Family> {
    TABLES.into_iter().flatten()
}

/// Returns the family of a GGUF file. If two families share a name, experts distinguish them.
pub fn from_gguf(architecture: &str, has_experts: bool) -> Option<&'static Family> {
    let fits = |family: &Family| {
        let of = &family.feed_forward;
        of.experts == has_experts || of.dense_too && !has_experts
    };
    families().find(|family| family.files.gguf.contains(&architecture) && fits(family))
}

/// Returns the family of a Hugging Face `model_type`.
pub fn from_huggingface(model_type: &str) -> Option<&'static Family> {
    families().find(|family| family.files.huggingface.contains(&model_type))
}

/// Returns a family by its [`Family::name`].
pub fn by_name(name: &str) -> Option<&'static Family> {
    families().find(|family| family.name == name)
}

/// Returns all families, for documentation and comparisons.
pub fn known_families() -> impl Iterator<Item = &'static Family> {
    families()
}

/// Returns the names of the families of which forebay can use layers that predict further tokens.
pub fn with_mtp() -> impl Iterator<Item = &'static str> {
    families().filter(|family| family.files.mtp.is_some()).map(|family| family.name)
}

/// Returns the error for a GGUF file's architecture that no family has. Says so if forebay runs the family from folders.
pub fn unknown_gguf(name: &str) -> ModelError {
    if let Some((_, instead)) = WITHOUT_NEXT_TOKEN.iter().find(|(names, _)| names.contains(&name)) {
        return ModelError::NoNextToken { name: name.to_owned(), instead };
    }
    match families().find(|family| is_from_folders_only(family, name)) {
        Some(_) => ModelError::FolderOnly { name: name.to_owned() },
        None => {
            let known = families().flat_map(|family| family.files.gguf).copied();
            ModelError::UnknownArchitecture { name: name.to_owned(), known: in_one_line(known) }
        }
    }
}

/// Returns the error for a `model_type` that no family has. Says so if forebay runs the family from GGUF files.
pub fn unknown_huggingface(name: &str) -> ModelError {
    match families().find(|family| is_from_gguf_only(family, name)) {
        Some(_) => ModelError::GgufOnly { name: name.to_owned() },
        None => {
            let known = families().flat_map(|family| family.files.huggingface).copied();
            ModelError::UnknownArchitecture { name: name.to_owned(), known: in_one_line(known) }
        }
    }
}

/// Returns true if this is a name of a family without GGUF files.
fn is_from_folders_only(family: &Family, name: &str) -> bool {
    let mut types = family.files.huggingface.iter().chain([&family.name]);
    family.files.gguf.is_empty() && types.any(|other| plain(other) == plain(name))
}

/// Returns true if this is a name of a family without folders.
fn is_from_gguf_only(family: &Family, name: &str) -> bool {
    let mut names = family.files.gguf.iter().chain([&family.name]);
    family.files.huggingface.is_empty() && names.any(|other| plain(other) == plain(name))
}

/// Returns a name without the marks in which GGUF and Hugging Face differ.
fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase()
}

fn in_one_line(names: impl Iterator<Item = &'static str>) -> String {
    let names: std::collections::BTreeSet<&str> = names.collect();
    names.into_iter().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::super::family::Files;
    use super::*;

    #[test]
    fn a_family_of_one_container_is_told_from_unknown_ones() {
        let folders = Family {
            name: "new-model",
            files: Files { huggingface: &["new_model_text"], ..Files::BASE },
            ..Family::BASE
        };
        for (name, expected) in
            [("new_model", true), ("newmodel", true), ("new-model-text", true), ("other", false)]
        {
            assert_eq!(is_from_folders_only(&folders, name), expected, "{name}");
            assert!(!is_from_gguf_only(&folders, name), "{name}");
        }
        let gguf = Family { files: Files { gguf: &["newmodel"], ..Files::BASE }, ..folders };
        assert!(is_from_gguf_only(&gguf, "new_model") && !is_from_folders_only(&gguf, "newmodel"));
        let error = unknown_huggingface("nemotron_h").to_string();
        assert!(error.contains("from GGUF files only"), "{error}");
        let error = unknown_gguf("vaultgemma").to_string();
        assert!(error.contains("there is no reference"), "{error}");
        for error in [unknown_gguf("new_model"), unknown_huggingface("new_model")] {
            assert!(error.to_string().contains("'new_model' is not supported"), "{error}");
        }
    }

    #[test]
    fn models_that_generate_no_text_are_refused_with_the_reason() {
        for (names, instead) in WITHOUT_NEXT_TOKEN {
            for name in *names {
                assert!(from_gguf(name, true).is_none() && from_gguf(name, false).is_none());
                assert!(unknown_gguf(name).to_string().contains(instead), "{name}");
            }
        }
    }

    #[test]
    fn names_of_files_lead_to_one_family() {
        for family in families() {
            assert!(!family.name.is_empty());
            let files = family.files;
            assert!(!files.gguf.is_empty() || !files.huggingface.is_empty(), "{}", family.name);
            for name in files.huggingface {
                assert_eq!(from_huggingface(name).unwrap().name, family.name, "{name}");
            }
            for name in files.gguf {
                let found = from_gguf(name, family.feed_forward.experts).unwrap();
                assert_eq!(found.name, family.name, "{name}");
            }
            assert_eq!(families().filter(|other| other.name == family.name).count(), 1);
        }
    }
}
