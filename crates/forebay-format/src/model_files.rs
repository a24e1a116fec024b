//! Lists the files that a model is read from, by their names alone.

use std::path::{Path, PathBuf};

use crate::catalog::folder_of;
use crate::huggingface::folder::{is_safetensors, shard_names};
use crate::pack::restore::FILES;

/// Returns the existing files that a model at `path` is read from. For a split GGUF set, these are
/// all its files. For a Hugging Face folder, these are the weights and the files that describe
/// them.
///
/// The function opens no file except a folder's index. Commands that must not overwrite an input
/// call it before they do anything else.
pub fn model_files(path: &Path) -> Vec<PathBuf> {
    let mut files = vec![path.to_path_buf()];
    let named = |extension: &str| path.extension().is_some_and(|found| found == extension);
    if path.is_dir() || named("json") || named("safetensors") {
        let root = if path.is_dir() { path } else { folder_of(path) };
        files.extend(FILES.iter().map(|name| root.join(name)));
        files.extend(weights(root));
    } else {
        files.extend(split_set(path));
    }
    files.retain(|file| file.is_file());
    files
}

/// Returns all safetensors files that a model in `root` may consist of.
fn weights(root: &Path) -> Vec<PathBuf> {
    let listed: Vec<PathBuf> = shard_names(root).iter().map(|name| root.join(name)).collect();
    if !listed.is_empty() {
        return listed;
    }
    let single = root.join("model.safetensors");
    if single.exists() {
        return vec![single];
    }
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| is_safetensors(path)).collect()
}

/// Returns the prefix, the number and the count in the name of one file of a split set, `PREFIX-00001-of-00003` without its
/// extension. Returns `None` for other names.
pub fn split_stem(stem: &str) -> Option<(&str, &str, &str)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, number) = rest.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(count) && is_number(number)).then_some((prefix, number, count))
}

/// Returns `PREFIX-00001-of-00003.gguf` and its siblings, or nothing for other names.
fn split_set(path: &Path) -> Vec<PathBuf> {
    let stem = || path.file_name()?.to_str()?.strip_suffix(".gguf");
    let Some((prefix, _, count)) = stem().and_then(split_stem) else { return Vec::new() };
    // Five digits limit this to 99,999 names.
    let last: u32 = count.parse().unwrap_or(0);
    let name = |number| folder_of(path).join(format!("{prefix}-{number:05}-of-{count}.gguf"));
    (1..=last).map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &Path) -> Vec<String> {
        let files = model_files(path);
        let name = |file: &PathBuf| file.file_name().unwrap().to_str().unwrap().to_owned();
        let mut names: Vec<String> = files.iter().map(name).collect();
        names.sort();
        names.dedup();
        names
    }

    #[test]
    fn every_file_of_a_model_is_listed_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in [
            "m-00001-of-00002.gguf",
            "m-00002-of-00002.gguf",
            "other.gguf",
            "config.json",
            "tokenizer.json",
            "a.safetensors",
            "b.safetensors",
            "notes.txt",
        ] {
            std::fs::write(at(name), "").unwrap();
        }
        assert_eq!(names(&at("other.gguf")), ["other.gguf"]);
        let set = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
        assert_eq!(names(&at(set[1])), set);
        assert!(names(&at("missing.gguf")).is_empty());
        let all = ["a.safetensors", "b.safetensors", "config.json", "tokenizer.json"];
        assert_eq!(names(folder.path()), all);
        assert_eq!(names(&at("config.json")), all);

        std::fs::write(
            at("model.safetensors.index.json"),
            r#"{"weight_map": {"x": "b.safetensors", "y": "b.safetensors", "z": "../../passwd"}}"#,
        )
        .unwrap();
        let listed =
            ["b.safetensors", "config.json", "model.safetensors.index.json", "tokenizer.json"];
        assert_eq!(names(folder.path()), listed);
    }
}
