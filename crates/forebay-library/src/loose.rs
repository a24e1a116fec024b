//! Models that lie in the library's folder without a pull: GGUF files, packs and Hugging Face folders.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use forebay_format::split_stem;

use crate::Entry;

/// Returns the models in a folder, by name.
pub fn models(folder: &Path) -> Vec<Entry> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    let mut models: Vec<Entry> = paths.iter().filter_map(|path| model(path, &paths)).collect();
    models.sort_by(|a, b| a.name.cmp(&b.name).then_with(|| a.path.cmp(&b.path)));
    models.dedup_by(|a, b| a.name == b.name);
    models
}

/// Returns the entry of a path, or `None` if it is no model or a later file of a split set.
fn model(path: &Path, beside: &[PathBuf]) -> Option<Entry> {
    let file = path.file_name()?.to_str()?;
    let (name, files) = if path.is_dir() {
        if !path.join("config.json").is_file() {
            return None;
        }
        let files = fs::read_dir(path).ok()?.flatten().map(|entry| entry.path()).collect();
        (file.to_owned(), files)
    } else {
        let stem = stem(path)?;
        match split_stem(stem) {
            Some((name, "00001", _)) => {
                let is_part = |part: &&PathBuf| {
                    let split = self::stem(part).and_then(split_stem);
                    split.is_some_and(|(prefix, ..)| prefix == name)
                };
                (name.to_owned(), beside.iter().filter(is_part).cloned().collect())
            }
            Some(_) => return None,
            None => (stem.to_owned(), vec![path.to_owned()]),
        }
    };
    let bytes = |file: &PathBuf| fs::metadata(file).map_or(0, |found| found.len());
    let modified = fs::metadata(path).ok()?.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    let size_bytes = files.iter().map(bytes).sum();
    Some(Entry { name, path: path.to_owned(), size_bytes, modified, digest: String::new() })
}

/// Returns the name of a GGUF file or pack without its ending.
fn stem(path: &Path) -> Option<&str> {
    let file = path.file_name()?.to_str()?;
    file.strip_suffix(".gguf").or_else(|| file.strip_suffix(".fbay"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_packs_folders_and_split_sets() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["b.gguf", "a.fbay", "s-00001-of-00002.gguf", "s-00002-of-00002.gguf", "x.txt"];
        for name in files {
            fs::write(folder.path().join(name), "12").unwrap();
        }
        fs::create_dir(folder.path().join("folder")).unwrap();
        fs::write(folder.path().join("folder/config.json"), "{}").unwrap();
        fs::create_dir(folder.path().join("empty")).unwrap();
        let found: Vec<(String, u64)> =
            models(folder.path()).into_iter().map(|of| (of.name, of.size_bytes)).collect();
        let expected = [("a", 2), ("b", 2), ("folder", 2), ("s", 4)];
        assert_eq!(found, expected.map(|(name, size)| (name.to_owned(), size)));
    }
}
