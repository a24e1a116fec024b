//! Chooses the files of a repository that belong to a name.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use regex::Regex;

use crate::Error;
use crate::library::USUAL_QUANT;
use crate::manifest::RepositoryFile;

/// Files beside the weights that a safetensors model needs.
const COMPANIONS: [&str; 14] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "tiktoken.model",
    "qwen.tiktoken",
];

/// Number and count in the name of one file of a split GGUF.
static SPLIT: LazyLock<Regex> = LazyLock::new(|| pattern(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$"));
/// Type of the weights in the name of a GGUF file.
static QUANT: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?i)(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))(?:$|[-.])",
    )
});

/// The patterns are constants, and a test compiles them.
fn pattern(text: &str) -> Regex {
    Regex::new(text).unwrap_or_else(|error| unreachable!("{error}"))
}

/// A model of a repository: a GGUF file or split set, a pack, or a folder with safetensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteModel {
    /// Name of the file without folder, number and ending; empty for a folder.
    pub stem: String,
    /// Type of the weights in the name of the file, in capital letters.
    pub quant: Option<String>,
    /// What stands after the colon in the model's name, if anything does.
    pub(crate) tag: Option<String>,
    /// Number of files that the names announce.
    pub(crate) count: usize,
    pub(crate) files: Vec<RepositoryFile>,
    /// Path of the file to open; empty for the folder.
    pub(crate) open: String,
}

impl RemoteModel {
    /// Returns the size of all files in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).fold(0, u64::saturating_add)
    }

    /// Returns what tells the model from others of its repository.
    pub fn key(&self) -> &str {
        &self.open
    }

    /// Returns true if the model is a folder with safetensors.
    pub fn is_folder(&self) -> bool {
        self.open.is_empty()
    }

    /// Returns true if the repository has all files that the names announce.
    pub fn is_complete(&self) -> bool {
        self.is_folder() || self.files.len() == self.count
    }
}

/// Returns all models of a repository, smallest first. A repository with GGUF files or packs has no others.
///
/// # Errors
/// Returns an error if the repository has none.
pub fn models(repository: &str, files: &[RepositoryFile]) -> Result<Vec<RemoteModel>, Error> {
    let mut models = file_models(files);
    if models.is_empty() {
        return Ok(vec![folder(repository, None, files)?]);
    }
    let quants: Vec<Option<String>> = models.iter().map(|model| model.quant.clone()).collect();
    for model in &mut models {
        let has_twin = quants.iter().filter(|quant| **quant == model.quant).count() > 1;
        if has_twin {
            model.tag = Some(model.stem.clone());
        }
    }
    models.sort_by_key(RemoteModel::size_bytes);
    Ok(models)
}

/// Chooses the model of a quant, or the usual one.
pub fn choose(
    repository: &str,
    quant: Option<&str>,
    files: &[RepositoryFile],
) -> Result<RemoteModel, Error> {
    let models = file_models(files);
    if models.is_empty() {
        return folder(repository, quant, files);
    }
    let refused = |why: String| Error::Choice {
        repository: repository.to_owned(),
        why,
        choices: models
            .iter()
            .map(|model| model.quant.clone().unwrap_or(model.stem.clone()))
            .collect(),
    };
    let named = |wanted: &str| -> Vec<&RemoteModel> {
        let is_wanted = |text: &str| text.eq_ignore_ascii_case(wanted);
        let by_stem = models.iter().filter(|model| is_wanted(&model.stem));
        let by_quant = models.iter().filter(|model| model.quant.as_deref().is_some_and(is_wanted));
        let by_stem: Vec<&RemoteModel> = by_stem.collect();
        if by_stem.is_empty() { by_quant.collect() } else { by_stem }
    };
    let found = match quant {
        Some(quant) => named(quant),
        None if models.len() == 1 => models.iter().collect(),
        None => named(USUAL_QUANT),
    };
    let model = match (found.as_slice(), quant) {
        ([model], _) => *model,
        ([], Some(quant)) => return Err(refused(format!("has no {quant}"))),
        ([], None) => return Err(refused("choose one of its models, as in REPO:QUANT".into())),
        (several, _) => {
            return Err(Error::Choice {
                repository: repository.to_owned(),
                why: "several models have this quant: write a file's name after the colon".into(),
                choices: several.iter().map(|model| model.stem.clone()).collect(),
            });
        }
    };
    if !model.is_complete() {
        let why = format!("{} has {} of {} parts", model.stem, model.files.len(), model.count);
        return Err(refused(why));
    }
    let by_stem = quant.is_some_and(|quant| quant.eq_ignore_ascii_case(&model.stem));
    let tag = if by_stem { Some(model.stem.clone()) } else { model.quant.clone() };
    Ok(RemoteModel { tag, ..model.clone() })
}

/// Groups the GGUF files of a repository, and finds its packs. Projectors of images and importance matrices are no models.
fn file_models(files: &[RepositoryFile]) -> Vec<RemoteModel> {
    let mut models: BTreeMap<String, RemoteModel> = BTreeMap::new();
    for file in files {
        let path = &file.path;
        let lower = path.to_ascii_lowercase();
        let is_model = lower.ends_with(".gguf") || lower.ends_with(".fbay");
        if !is_model || lower.contains("mmproj") || lower.contains("imatrix") {
            continue;
        }
        let (key, count) = match SPLIT.captures(path) {
            Some(found) => (found[1].to_owned(), found[3].parse().unwrap_or(0)),
            None => (path[..path.len() - ".gguf".len()].to_owned(), 1),
        };
        let (folder, stem) = key.rsplit_once('/').unwrap_or(("", &key));
        let quant = quant_of(stem).or_else(|| quant_of(folder));
        let model = RemoteModel {
            stem: stem.to_owned(),
            tag: quant.clone(),
            quant,
            count,
            files: Vec::new(),
            open: String::new(),
        };
        let ending = &lower[lower.len() - ".gguf".len()..];
        models.entry(format!("{key}{ending} {count}")).or_insert(model).files.push(file.clone());
    }
    let mut models: Vec<RemoteModel> = models.into_values().collect();
    for model in &mut models {
        model.files.sort_by(|a, b| a.path.cmp(&b.path));
        model.open.clone_from(&model.files[0].path);
    }
    models
}

/// Returns the quant in a name, in capital letters.
pub(crate) fn quant_of(stem: &str) -> Option<String> {
    let found = QUANT.captures_iter(stem).last()?;
    Some(found[1].to_ascii_uppercase())
}

/// Chooses the files of a safetensors model.
fn folder(
    repository: &str,
    quant: Option<&str>,
    files: &[RepositoryFile],
) -> Result<RemoteModel, Error> {
    let is_weights = |path: &str| path.ends_with(".safetensors") && !path.contains('/');
    let weights: Vec<&RepositoryFile> =
        files.iter().filter(|file| is_weights(&file.path)).collect();
    if weights.is_empty() || !files.iter().any(|file| file.path == "config.json") {
        return Err(Error::NoModel { repository: repository.to_owned() });
    }
    if let Some(quant) = quant {
        return Err(Error::Choice {
            repository: repository.to_owned(),
            why: format!("has no GGUF files, so it has no {quant}"),
            choices: vec![format!("{repository} without :{quant}")],
        });
    }
    // Some repositories hold the same weights a second time, as `consolidated.safetensors`.
    let is_usual = |path: &str| path.starts_with("model");
    let has_usual = weights.iter().any(|file| is_usual(&file.path));
    let is_chosen = |path: &str| {
        let index = path.strip_suffix(".index.json").unwrap_or(path);
        let is_weight = is_weights(index) && (is_usual(index) || !has_usual);
        is_weight || COMPANIONS.contains(&path)
    };
    let mut chosen: Vec<RepositoryFile> =
        files.iter().filter(|file| is_chosen(&file.path)).cloned().collect();
    chosen.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(RemoteModel {
        stem: String::new(),
        quant: None,
        tag: None,
        count: chosen.len(),
        files: chosen,
        open: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Checksum;

    fn files(paths: &[&str]) -> Vec<RepositoryFile> {
        let checksum = Checksum::Sha256("0".repeat(64));
        paths
            .iter()
            .map(|path| RepositoryFile {
                path: path.to_string(),
                size: 1,
                checksum: checksum.clone(),
            })
            .collect()
    }

    fn chosen(
        quant: Option<&str>,
        paths: &[&str],
    ) -> Result<(Vec<String>, Option<String>), String> {
        choose("o/r", quant, &files(paths))
            .map(|choice| (choice.files.into_iter().map(|f| f.path).collect(), choice.tag))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn quants_in_names() {
        for (stem, quant) in [
            ("Qwen3-0.6B-Q4_K_M", Some("Q4_K_M")),
            ("llama-2-7b.q4_0", Some("Q4_0")),
            ("gpt-oss-20b-mxfp4", Some("MXFP4")),
            ("Qwen3-30B-UD-Q4_K_XL", Some("UD-Q4_K_XL")),
            ("model-IQ2_XXS-imat", Some("IQ2_XXS")),
            ("model_Q8_0", Some("Q8_0")),
            ("model-bf16", Some("BF16")),
            ("Qwen3-0.6B", None),
        ] {
            assert_eq!(quant_of(stem).as_deref(), quant, "{stem}");
        }
    }

    #[test]
    fn the_usual_quant_the_only_one_or_a_list() {
        let both = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-F16.gguf", "README.md"];
        let q4 = (vec!["m-Q4_K_M.gguf".to_owned()], Some("Q4_K_M".to_owned()));
        assert_eq!(chosen(None, &both), Ok(q4.clone()));
        assert_eq!(chosen(Some("q4_k_m"), &both), Ok(q4));
        let only = (vec!["m-Q8_0.gguf".to_owned()], Some("Q8_0".to_owned()));
        assert_eq!(chosen(None, &["m-Q8_0.gguf"]), Ok(only));
        assert_eq!(chosen(None, &["m.gguf"]), Ok((vec!["m.gguf".to_owned()], None)));
        let error = chosen(None, &["m-Q8_0.gguf", "m-Q5_K_M.gguf"]).unwrap_err();
        assert!(error.contains("Q5_K_M, Q8_0"), "{error}");
        let error = chosen(Some("Q4_K"), &both).unwrap_err();
        assert!(error.contains("has no Q4_K; it has: Q4_K_M, Q8_0"), "{error}");
    }

    #[test]
    fn two_models_of_one_quant_are_named_by_their_files() {
        let two = ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"];
        assert!(chosen(None, &two).unwrap_err().contains("a-Q4_K_M, b-Q4_K_M"));
        let b = (vec!["b-Q4_K_M.gguf".to_owned()], Some("b-Q4_K_M".to_owned()));
        assert_eq!(chosen(Some("B-Q4_K_M"), &two), Ok(b));
    }

    #[test]
    fn all_parts_of_a_split_model() {
        let parts = ["Q8_0/m-Q8_0-00002-of-00002.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf"];
        let (files, _) = chosen(Some("Q8_0"), &parts).unwrap();
        assert_eq!(files, [parts[1], parts[0]]);
        assert!(chosen(None, &parts[..1]).unwrap_err().contains("1 of 2 parts"));
    }

    #[test]
    fn a_folder_without_what_is_not_needed() {
        let all = [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "consolidated.safetensors",
            "onnx/model.safetensors",
            "pytorch_model.bin",
            "tokenizer.json",
            "README.md",
        ];
        let (files, quant) = chosen(None, &all).unwrap();
        assert_eq!(files, [all[0], all[1], all[2], all[3], all[7]]);
        assert_eq!(quant, None);
        assert!(chosen(Some("Q8_0"), &all).unwrap_err().contains("no GGUF files"));
        assert!(chosen(None, &["README.md"]).unwrap_err().contains("no GGUF files"));
    }
}
