//! The models that `forebay serve` offers: those of the command line, and those of the library.

use std::path::PathBuf;

use forebay_library::{Error as LibraryError, Library, Name, RemoteModel, Repository};
use forebay_server::{Catalogue, Entry, KeepAlive, PullError};

use crate::args::ServeArgs;
use crate::commands::plan;
use crate::failure::{Failure, Outcome, usage};
use crate::open;

/// Models of the command line, then those of the library, whose folder is read anew each time.
#[derive(Clone)]
pub struct ServedModels {
    pub named: Vec<Entry>,
    library: Option<Library>,
}

impl ServedModels {
    /// Names the models of the command line. A model that is alone on the command line stays in memory unless the user says
    /// otherwise.
    pub fn new(
        paths: &[PathBuf],
        args: &ServeArgs,
        library: Option<Library>,
    ) -> Outcome<ServedModels> {
        let name = args.name.as_deref();
        if name.is_some() && paths.len() != 1 {
            return usage("--name is for one MODEL: several are called by their files' names");
        }
        let is_alone = paths.len() == 1;
        let keep_alive = args.keep_alive.or(is_alone.then_some(KeepAlive::Forever));
        let mut named: Vec<Entry> = Vec::new();
        for path in paths {
            open::check(path)?;
            let of_library = args.from_library.iter().find(|(from, _)| from == path);
            let usual = || of_library.map_or_else(|| open::name(path), |(_, name)| name.to_owned());
            let name = name.map_or_else(usual, str::to_owned);
            if let Some(other) = named.iter().find(|entry| entry.name == name) {
                return usage(format!(
                    "{} and {} are both called {name}: rename one of them",
                    other.path.display(),
                    path.display()
                ));
            }
            named.push(Entry { name, path: path.clone(), keep_alive });
        }
        Ok(ServedModels { named, library })
    }

    fn in_library(&self) -> Vec<Entry> {
        let mut entries: Vec<Entry> = self.library.iter().flat_map(models).collect();
        entries.retain(|entry| self.named.iter().all(|named| named.name != entry.name));
        entries
    }
}

/// Returns the models of a library: those that were pulled, and files and folders of models that lie in its folder.
pub fn models(library: &Library) -> Vec<Entry> {
    let entry = |name: String, path: PathBuf| Entry { name, path, keep_alive: None };
    let listing = library.list().unwrap_or_else(|error| {
        tracing::warn!("{error}");
        Default::default()
    });
    let all = listing.entries.into_iter().chain(listing.loose);
    let mut entries: Vec<Entry> = all.map(|found| entry(found.name, found.path)).collect();
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    entries
}

impl Catalogue for ServedModels {
    fn list(&self) -> Vec<Entry> {
        self.named.iter().cloned().chain(self.in_library()).collect()
    }

    fn find(&self, name: &str) -> Option<Entry> {
        let own = |entries: &[Entry]| entries.iter().find(|entry| entry.name == name).cloned();
        let by_short_name = || {
            let found = self.library.as_ref()?.find(name).ok()?;
            // A file is called by its name without the ending.
            let is_file = found.path.file_name().is_some_and(|file| file == name);
            (!is_file).then_some(())?;
            Some(Entry { name: found.name, path: found.path, keep_alive: None })
        };
        own(&self.named).or_else(|| own(&self.in_library())).or_else(by_short_name)
    }

    fn library(&self) -> Option<Library> {
        self.library.clone()
    }

    fn offer(&self, name: &Name) -> Result<(Repository, RemoteModel), PullError> {
        let folder = self.library.as_ref().map(|library| library.folder().to_owned());
        match plan::offer(name, "main", folder, true) {
            Ok(offer) => Ok((offer.repository, offer.model)),
            Err(Failure::Work(error)) => Err(match error.downcast::<LibraryError>() {
                Ok(error) => error.into(),
                Err(error) => PullError::CannotRun(Failure::Work(error).line().unwrap_or_default()),
            }),
            Err(failure) => {
                Err(PullError::CannotRun(failure.line().unwrap_or_else(|| "stopped".to_owned())))
            }
        }
    }

    fn preferred(&self) -> Option<Entry> {
        self.named.first().cloned()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};

    fn arguments(more: &[&str]) -> ServeArgs {
        let cli = Cli::parse_from([&["forebay", "serve"], more].concat());
        let Command::Serve(args) = cli.command else { panic!("another command") };
        args
    }

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
        let library = Some(Library::open(folder.path()));
        let Ok(models) = ServedModels::new(&named, &arguments(&[]), library) else {
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
        let named = arguments(&["--name", "name"]);
        assert!(ServedModels::new(&paths, &arguments(&[]), None).is_err());
        assert!(ServedModels::new(&paths, &named, None).is_err());
        assert!(ServedModels::new(&paths[..1], &named, None).is_ok());
    }
}
