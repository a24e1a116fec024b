//! The models that `forebay serve` offers: those of the command line, and those in a folder.

use std::path::{Path, PathBuf};

use forebay_server::{Entry, KeepAlive, Library};

use crate::failure::{Outcome, usage};
use crate::open;

/// Models of the command line, then those in a folder, which is read anew each time.
#[derive(Clone)]
pub struct ServedModels {
    pub named: Vec<Entry>,
    folder: Option<PathBuf>,
}

impl ServedModels {
    /// Names the models of the command line. `name` is for the only one. A model that is alone on the command line stays in
    /// memory unless the user says otherwise.
    pub fn new(
        paths: &[PathBuf],
        name: Option<&str>,
        folder: Option<&Path>,
        keep_alive: Option<KeepAlive>,
    ) -> Outcome<ServedModels> {
        if name.is_some() && paths.len() != 1 {
            return usage("--name is for one MODEL: several are called by their files' names");
        }
        let is_alone = paths.len() == 1;
        let keep_alive = keep_alive.or(is_alone.then_some(KeepAlive::Forever));
        let mut named: Vec<Entry> = Vec::new();
        for path in paths {
            open::check(path)?;
            let name = name.map_or_else(|| open::name(path), str::to_owned);
            if let Some(other) = named.iter().find(|entry| entry.name == name) {
                return usage(format!(
                    "{} and {} are both called {name}: rename one of them",
                    other.path.display(),
                    path.display()
                ));
            }
            named.push(Entry { name, path: path.clone(), keep_alive });
        }
        if let Some(folder) = folder {
            open::check(folder)?;
            if !folder.is_dir() {
                return usage(format!("--models {}: is not a folder", folder.display()));
            }
        }
        Ok(ServedModels { named, folder: folder.map(Path::to_owned) })
    }

    fn in_folder(&self) -> Vec<Entry> {
        let files = self.folder.iter().filter_map(|folder| std::fs::read_dir(folder).ok());
        let paths = files.flatten().flatten().map(|file| file.path());
        let mut entries: Vec<Entry> = paths
            .filter_map(|path| Some(Entry { name: name_in_folder(&path)?, path, keep_alive: None }))
            .filter(|entry| self.named.iter().all(|named| named.name != entry.name))
            .collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        entries.dedup_by(|a, b| a.name == b.name);
        entries
    }
}

/// Returns the name of a model in a folder of models, or `None` if the path is no model or a later file of a split set.
fn name_in_folder(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    if path.is_dir() {
        return path.join("config.json").is_file().then(|| name.to_owned());
    }
    let stem = name.strip_suffix(".gguf").or_else(|| name.strip_suffix(".fbay"))?;
    match stem.rsplit_once("-of-").and_then(|(rest, count)| Some((rest.rsplit_once('-')?, count))) {
        Some(((name, number), count)) if is_number(number) && is_number(count) => {
            (number == "00001").then(|| name.to_owned())
        }
        _ => Some(stem.to_owned()),
    }
}

/// Returns true for a number as in the names of split sets.
fn is_number(text: &str) -> bool {
    text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit())
}

impl Library for ServedModels {
    fn list(&self) -> Vec<Entry> {
        self.named.iter().cloned().chain(self.in_folder()).collect()
    }

    fn find(&self, name: &str) -> Option<Entry> {
        let named = self.named.iter().find(|entry| entry.name == name);
        named.cloned().or_else(|| self.in_folder().into_iter().find(|entry| entry.name == name))
    }

    fn preferred(&self) -> Option<Entry> {
        self.named.first().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_shows_its_models_as_they_come_and_go() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in [
            "b.gguf",
            "a.fbay",
            "s-00001-of-00002.gguf",
            "s-00002-of-00002.gguf",
            "x.gguf.partial",
            "note.txt",
        ] {
            std::fs::write(at(name), "").unwrap();
        }
        for name in ["folder", "empty"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::fs::write(at("folder/config.json"), "{}").unwrap();
        let named = [at("b.gguf")];
        let Ok(models) = ServedModels::new(&named, None, Some(folder.path()), None) else {
            panic!("the models are there")
        };
        let names = || models.list().into_iter().map(|entry| entry.name).collect::<Vec<_>>();
        assert_eq!(names(), ["b", "a", "folder", "s"]);
        assert_eq!(models.find("s").unwrap().path, at("s-00001-of-00002.gguf"));
        assert_eq!(models.find("b").unwrap().keep_alive, Some(KeepAlive::Forever));
        for none in ["../b", "b.gguf", "", ".", "s-00002-of-00002", "note"] {
            assert!(models.find(none).is_none(), "{none}");
        }
        std::fs::write(at("new.gguf"), "").unwrap();
        assert!(models.find("new").is_some());
        std::fs::remove_file(at("new.gguf")).unwrap();
        assert!(models.find("new").is_none());
    }

    #[test]
    fn two_models_need_two_names() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["m.gguf", "m.fbay"].map(|name| folder.path().join(name));
        paths.iter().for_each(|path| std::fs::write(path, "").unwrap());
        assert!(ServedModels::new(&paths, None, None, None).is_err());
        assert!(ServedModels::new(&paths, Some("name"), None, None).is_err());
        assert!(ServedModels::new(&paths[..1], Some("name"), None, None).is_ok());
    }
}
