//! Models that other programs have downloaded: Ollama, LM Studio and Hugging Face's own tools.
//!
//! They are opened where they lie. Nothing is written there and nothing removed.
//!
//! ```text
//! ollama:NAME[:TAG]         manifests and blobs below OLLAMA_MODELS, else ~/.ollama/models
//! lmstudio:OWNER/REPO:QUANT ~/.lmstudio/models/OWNER/REPO/*.gguf, or ~/.cache/lm-studio/models
//! hf:OWNER/REPO[:QUANT]     snapshots in Hugging Face's cache
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Deserialize;

use crate::choice::quant_of;
use crate::{Entry, Error};

/// Largest manifest of Ollama that is read.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;
/// Most folders below a folder of models that are searched.
const FOLDERS_MAX: usize = 10_000;
/// Type of the layer of a manifest that is the model.
const MODEL_LAYER: &str = "application/vnd.ollama.image.model";
/// Registry and owner that Ollama's short names leave out.
const USUAL: [&str; 2] = ["registry.ollama.ai", "library"];

/// The folders in which other programs keep models.
#[derive(Clone, Debug, Default)]
pub struct Others {
    pub ollama: Vec<PathBuf>,
    pub lm_studio: Vec<PathBuf>,
    pub hugging_face: Vec<PathBuf>,
}

#[derive(Deserialize)]
struct OllamaManifest {
    layers: Vec<OllamaLayer>,
}

#[derive(Deserialize)]
struct OllamaLayer {
    #[serde(rename = "mediaType")]
    media_type: String,
    digest: String,
    size: u64,
}

impl Others {
    /// Returns the usual folders of this user. Those that do not exist are left out.
    pub fn of_user() -> Others {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let home = variable("HOME").map(PathBuf::from);
        let below = |path: &str| home.as_ref().map(|home| home.join(path));
        let named = |name| variable(name).map(PathBuf::from);
        let hub = named("HF_HUB_CACHE")
            .or_else(|| Some(named("HF_HOME")?.join("hub")))
            .or_else(|| below(".cache/huggingface/hub"));
        let system = || Some(PathBuf::from("/usr/share/ollama/.ollama/models"));
        let ollama = match named("OLLAMA_MODELS") {
            Some(folder) => vec![Some(folder)],
            None => vec![below(".ollama/models"), system()],
        };
        let studio = vec![below(".lmstudio/models"), below(".cache/lm-studio/models")];
        let there = |folders: Vec<Option<PathBuf>>| -> Vec<PathBuf> {
            folders.into_iter().flatten().filter(|folder| folder.is_dir()).collect()
        };
        Others { ollama: there(ollama), lm_studio: there(studio), hugging_face: there(vec![hub]) }
    }

    /// Returns true if a name begins like one of these.
    pub fn is_name(name: &str) -> bool {
        ["ollama:", "lmstudio:", "hf:"].iter().any(|start| name.starts_with(start))
    }

    /// Lists all models by name. What cannot be read is left out.
    pub fn list(&self) -> Vec<Entry> {
        let mut entries: Vec<Entry> = Vec::new();
        self.ollama.iter().for_each(|folder| entries.extend(ollama(folder)));
        self.lm_studio.iter().for_each(|folder| entries.extend(lm_studio(folder)));
        self.hugging_face.iter().for_each(|folder| entries.extend(hugging_face(folder)));
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        entries.dedup_by(|a, b| a.name == b.name);
        entries
    }

    /// Finds a model by its name. Upper and lower case are the same, and `:latest` may be left out.
    ///
    /// # Errors
    /// Returns an error if there is no such model, or if the name stands for several.
    pub fn find(&self, name: &str) -> Result<Entry, Error> {
        let entries = self.list();
        let latest = format!("{name}:latest");
        let same = |entry: &&Entry, name: &str| entry.name.eq_ignore_ascii_case(name);
        let exact = entries.iter().find(|entry| same(entry, name) || same(entry, &latest));
        if let Some(entry) = exact {
            return Ok(entry.clone());
        }
        let start = name.to_ascii_lowercase();
        let is_longer = |entry: &&Entry| {
            let rest = entry.name.to_ascii_lowercase();
            rest.strip_prefix(&start).is_some_and(|rest| rest.starts_with([':', '/']))
        };
        let found: Vec<&Entry> = entries.iter().filter(is_longer).collect();
        match found.as_slice() {
            [] => Err(Error::NotThere { name: name.to_owned() }),
            [entry] => Ok((*entry).clone()),
            several => Err(Error::Ambiguous {
                name: name.to_owned(),
                names: several.iter().map(|entry| entry.name.clone()).collect(),
            }),
        }
    }
}

/// Returns the names in a folder, without hidden ones.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| !name.starts_with('.')).collect();
    names.sort();
    names
}

fn entry(name: String, path: PathBuf, size_bytes: u64) -> Option<Entry> {
    let modified = fs::metadata(&path).ok()?.modified().unwrap_or(SystemTime::UNIX_EPOCH);
    Some(Entry { name, path, size_bytes, modified, digest: String::new() })
}

/// Lists Ollama's models: `manifests/REGISTRY/OWNER/NAME/TAG` names a blob.
fn ollama(folder: &Path) -> Vec<Entry> {
    let mut entries = Vec::new();
    for_each_file(&folder.join("manifests"), &mut |parts| {
        let [registry, owner, name, tag] = parts else { return };
        let shown = match [registry.as_str(), owner.as_str()] {
            USUAL => format!("{name}:{tag}"),
            [first, _] if first == USUAL[0] => format!("{owner}/{name}:{tag}"),
            _ => format!("{registry}/{owner}/{name}:{tag}"),
        };
        let path = folder.join("manifests").join(registry).join(owner).join(name).join(tag);
        let Some(layer) = model_layer(&path) else { return };
        let blob = folder.join("blobs").join(layer.digest.replace(':', "-"));
        if fs::metadata(&blob).is_ok_and(|found| found.is_file() && found.len() == layer.size) {
            entries.extend(entry(format!("ollama:{shown}"), blob, layer.size));
        }
    });
    entries
}

/// Returns the layer of a manifest that is the model. Its digest cannot lead out of the folder of blobs.
fn model_layer(manifest: &Path) -> Option<OllamaLayer> {
    if fs::metadata(manifest).ok()?.len() > MANIFEST_BYTES_MAX {
        return None;
    }
    let manifest: OllamaManifest = serde_json::from_slice(&fs::read(manifest).ok()?).ok()?;
    let layer = manifest.layers.into_iter().find(|layer| layer.media_type == MODEL_LAYER)?;
    let digits = layer.digest.strip_prefix("sha256:")?;
    digits.bytes().all(|c| c.is_ascii_hexdigit()).then_some(layer)
}

/// Lists LM Studio's models: `OWNER/REPO/FILE.gguf`, or a folder with safetensors.
fn lm_studio(folder: &Path) -> Vec<Entry> {
    let mut entries = Vec::new();
    for owner in names(folder) {
        for repository in names(&folder.join(&owner)) {
            let name = format!("lmstudio:{owner}/{repository}");
            models_in(&folder.join(&owner).join(&repository), &name, &mut entries);
        }
    }
    entries
}

/// Lists the models of Hugging Face's cache: `models--OWNER--REPO/snapshots/COMMIT/...`, of which the newest counts.
fn hugging_face(folder: &Path) -> Vec<Entry> {
    let mut entries = Vec::new();
    for cached in names(folder) {
        let Some(name) = cached.strip_prefix("models--").map(|name| name.replace("--", "/")) else {
            continue;
        };
        let folder = folder.join(&cached);
        let commit = fs::read_to_string(folder.join("refs/main")).unwrap_or_default();
        let snapshots = folder.join("snapshots");
        let commit = Some(commit.trim().to_owned()).filter(|commit| {
            commit.bytes().all(|c| c.is_ascii_hexdigit()) && snapshots.join(commit).is_dir()
        });
        let Some(commit) = commit.or_else(|| names(&snapshots).pop()) else { continue };
        models_in(&snapshots.join(commit), &format!("hf:{name}"), &mut entries);
    }
    entries
}

/// Adds the models in a folder of one repository. GGUF files are told apart by their quant, or by their name.
fn models_in(folder: &Path, name: &str, entries: &mut Vec<Entry>) {
    if folder.join("config.json").is_file() {
        let is_weights = |file: &&String| file.ends_with(".safetensors");
        let size = |file: &String| fs::metadata(folder.join(file)).map_or(0, |found| found.len());
        let files = names(folder);
        let sizes: Vec<u64> = files.iter().filter(is_weights).map(size).collect();
        if !sizes.is_empty() {
            entries.extend(entry(name.to_owned(), folder.to_owned(), sizes.iter().sum()));
        }
    }
    let mut files = Vec::new();
    for_each_file(folder, &mut |parts| {
        let file = parts.join("/");
        let lower = file.to_ascii_lowercase();
        if lower.ends_with(".gguf") && !lower.contains("mmproj") && !lower.contains("imatrix") {
            files.push(file);
        }
    });
    let stem = |file: &str| {
        let name = file.rsplit('/').next().unwrap_or(file);
        let stem = name[..name.len() - ".gguf".len()].to_owned();
        match forebay_format::split_stem(&stem) {
            Some((stem, number, _)) => (stem.to_owned(), number == "00001"),
            None => (stem, true),
        }
    };
    for file in &files {
        let (name_of_file, is_first) = stem(file);
        if !is_first {
            continue;
        }
        let parts = files.iter().filter(|other| stem(other).0 == name_of_file);
        let size = parts.filter_map(|part| Some(fs::metadata(folder.join(part)).ok()?.len())).sum();
        let quant = quant_of(&name_of_file);
        let is_alone = |quant: &String| {
            let same = |other: &&String| {
                let (stem, is_first) = stem(other);
                is_first && quant_of(&stem).as_ref() == Some(quant)
            };
            files.iter().filter(same).count() == 1
        };
        let tag = quant.filter(is_alone).unwrap_or(name_of_file);
        entries.extend(entry(format!("{name}:{tag}"), folder.join(file), size));
    }
}

/// Calls `found` with the path of every file below a folder, in parts.
fn for_each_file(folder: &Path, found: &mut dyn FnMut(&[String])) {
    let mut left: Vec<Vec<String>> = vec![Vec::new()];
    let mut searched = 0;
    while let Some(parts) = left.pop() {
        searched += 1;
        if searched > FOLDERS_MAX || parts.len() > 6 {
            continue;
        }
        let here = parts.iter().fold(folder.to_owned(), |path, part| path.join(part));
        for name in names(&here) {
            let below = [&parts[..], std::slice::from_ref(&name)].concat();
            match fs::metadata(here.join(&name)) {
                Ok(kind) if kind.is_dir() => left.push(below),
                Ok(kind) if kind.is_file() => found(&below),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, path: &str, text: &str) {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn manifest(digest: &str, size: usize) -> String {
        let config =
            r#"{"mediaType":"application/vnd.ollama.image.license","digest":"x","size":1}"#;
        format!(
            r#"{{"layers":[{config},{{"mediaType":"{MODEL_LAYER}","digest":"{digest}","size":{size}}}]}}"#
        )
    }

    #[test]
    fn models_of_ollama_have_its_names() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        write(at, "blobs/sha256-ab", "gguf");
        let of = |path: &str, digest: &str, size| {
            write(at, &format!("manifests/{path}"), &manifest(digest, size));
        };
        of("registry.ollama.ai/library/llama3/latest", "sha256:ab", 4);
        of("registry.ollama.ai/library/llama3/8b", "sha256:ab", 4);
        of("registry.ollama.ai/me/own/latest", "sha256:ab", 4);
        of("hf.co/o/r/Q4_K_M", "sha256:ab", 4);
        // Missing, of another size, and outside.
        of("registry.ollama.ai/library/a/latest", "sha256:cd", 4);
        of("registry.ollama.ai/library/b/latest", "sha256:ab", 5);
        of("registry.ollama.ai/library/c/latest", "sha256:../../x", 4);
        write(at, "manifests/registry.ollama.ai/library/d/latest", "no json");
        let others = Others { ollama: vec![at.to_owned()], ..Others::default() };
        let names: Vec<String> = others.list().into_iter().map(|entry| entry.name).collect();
        let expected = [
            "ollama:hf.co/o/r:Q4_K_M",
            "ollama:llama3:8b",
            "ollama:llama3:latest",
            "ollama:me/own:latest",
        ];
        assert_eq!(names, expected);
        assert_eq!(others.find("ollama:llama3").unwrap().name, "ollama:llama3:latest");
        assert_eq!(others.find("ollama:LLAMA3:8B").unwrap().path, at.join("blobs/sha256-ab"));
        assert_eq!(others.find("ollama:hf.co/o/r").unwrap().name, "ollama:hf.co/o/r:Q4_K_M");
        assert!(others.find("ollama:a").is_err());
    }

    #[test]
    fn models_of_lm_studio_and_of_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        for file in ["m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"] {
            write(at, &format!("studio/o/r/{file}"), "12345");
        }
        write(at, "studio/o/r/mmproj-F16.gguf", "1");
        write(at, "studio/o/two/a-Q4_0.gguf", "1");
        write(at, "studio/o/two/b-Q4_0.gguf", "1");
        write(at, "hub/models--o--folder/snapshots/ab12/config.json", "{}");
        write(at, "hub/models--o--folder/snapshots/ab12/model.safetensors", "123");
        write(at, "hub/models--o--folder/snapshots/0000/config.json", "{}");
        write(at, "hub/models--o--folder/refs/main", "ab12");
        let others = Others {
            lm_studio: vec![at.join("studio")],
            hugging_face: vec![at.join("hub")],
            ..Others::default()
        };
        let listed: Vec<(String, u64)> =
            others.list().into_iter().map(|entry| (entry.name, entry.size_bytes)).collect();
        let expected = [
            ("hf:o/folder", 3),
            ("lmstudio:o/r:Q4_K_M", 5),
            ("lmstudio:o/r:Q8_0", 10),
            ("lmstudio:o/two:a-Q4_0", 1),
            ("lmstudio:o/two:b-Q4_0", 1),
        ];
        assert_eq!(listed, expected.map(|(name, size)| (name.to_owned(), size)));
        let path = others.find("lmstudio:o/r:q8_0").unwrap().path;
        assert_eq!(path, at.join("studio/o/r/m-Q8_0-00001-of-00002.gguf"));
        let error = others.find("lmstudio:o/r").unwrap_err().to_string();
        assert!(error.contains("Q4_K_M, lmstudio:o/r:Q8_0"), "{error}");
    }
}
