//! Files of the repository: every file that git tracks or would track, with the contents of text files.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::Finding;
use super::scan::RustSource;

const LARGEST_FILE_BYTES: u64 = 10_000_000;
/// The only folder that may hold a larger file: the demo model.
const LARGE_FILE_FOLDER: &str = "models/";

/// One file. `path` is relative to the root, with `/` between folders.
pub struct File {
    pub path: String,
    pub bytes: u64,
    /// Contents, or `None` for binary files.
    pub text: Option<String>,
}

/// All files, with the Rust sources among them already scanned.
pub struct Repository {
    root: PathBuf,
    files: Vec<File>,
    paths: BTreeSet<String>,
    rust: Vec<RustSource>,
}

impl Repository {
    pub fn open(root: &Path) -> Result<Self> {
        let output = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(root)
            .output()
            .context("git is needed to list the files of the repository")?;
        if !output.status.success() {
            bail!("git ls-files: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let listing = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
        let mut files = Vec::new();
        for path in listing.split('\0').filter(|path| !path.is_empty()) {
            // A file that is deleted but not yet committed is still listed.
            let Ok(metadata) = root.join(path).metadata() else { continue };
            let text = read_text(&root.join(path), metadata.len())?;
            files.push(File { path: path.to_owned(), bytes: metadata.len(), text });
        }
        Ok(Self::new(root.to_path_buf(), files))
    }

    pub fn new(root: PathBuf, files: Vec<File>) -> Self {
        let paths = files.iter().map(|file| file.path.clone()).collect();
        let rust = files
            .iter()
            .filter(|file| file.path.ends_with(".rs"))
            .filter_map(|file| Some(RustSource::new(&file.path, file.text.as_deref()?)))
            .collect();
        Self { root, files, paths, rust }
    }

    #[cfg(test)]
    pub fn from_texts(texts: &[(&str, &str)]) -> Self {
        let file = |(path, text): &(&str, &str)| File {
            path: (*path).to_owned(),
            bytes: text.len() as u64,
            text: Some((*text).to_owned()),
        };
        Self::new(PathBuf::from("nowhere"), texts.iter().map(file).collect())
    }

    pub fn files(&self) -> &[File] {
        &self.files
    }

    pub fn rust_sources(&self) -> &[RustSource] {
        &self.rust
    }

    pub fn text(&self, path: &str) -> Option<&str> {
        self.files.iter().find(|file| file.path == path)?.text.as_deref()
    }

    /// Returns true if `path` is a file of the repository or a folder that contains one.
    pub fn exists(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        if path.is_empty() || path == "." || self.paths.contains(path) {
            return true;
        }
        let folder = format!("{path}/");
        let first_inside = self.paths.range(folder.clone()..).next();
        first_inside.is_some_and(|inside| inside.starts_with(&folder))
            || self.root.join(path).is_dir()
    }

    /// Returns true if the path of some file in a folder ends with `end`.
    pub fn has_end(&self, end: &str) -> bool {
        self.paths.iter().any(|path| path.strip_suffix(end).is_some_and(|rest| rest.ends_with('/')))
    }

    /// Returns true if some file has this name, in any folder.
    pub fn has_name(&self, name: &str) -> bool {
        self.paths.iter().any(|path| file_name(path) == name)
    }
}

/// Returns the part after the last slash.
pub fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Returns the part before the last slash, or nothing.
pub fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn read_text(path: &Path, bytes: u64) -> Result<Option<String>> {
    if bytes > LARGEST_FILE_BYTES {
        return Ok(None);
    }
    let data = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(String::from_utf8(data).ok().filter(|text| !text.contains('\0')))
}

pub fn check_sizes(repository: &Repository, findings: &mut Vec<Finding>) {
    for file in repository.files() {
        if file.bytes > LARGEST_FILE_BYTES && !file.path.starts_with(LARGE_FILE_FOLDER) {
            let message = format!(
                "{} bytes; files over {LARGEST_FILE_BYTES} belong in {LARGE_FILE_FOLDER} or outside",
                file.bytes
            );
            findings.push(Finding::fail(&file.path, 0, message));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_names_are_found() {
        let repository = Repository::from_texts(&[("crates/a/src/lib.rs", ""), ("README.md", "")]);
        assert!(repository.exists("crates/a/"));
        assert!(repository.exists("crates/a/src/lib.rs"));
        assert!(!repository.exists("crates/b"));
        assert!(!repository.exists("crates/a/s"));
        assert!(repository.has_name("lib.rs"));
        assert!(!repository.has_name("b.rs"));
        assert_eq!((folder("a/b/c"), file_name("a/b/c"), folder("c")), ("a/b", "c", ""));
    }

    #[test]
    fn a_large_file_fails_outside_models() {
        let file = |path: &str| File { path: path.to_owned(), bytes: 20_000_000, text: None };
        let files = vec![file("models/demo.gguf"), file("bench/trace.bin")];
        let mut findings = Vec::new();
        check_sizes(&Repository::new(PathBuf::new(), files), &mut findings);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].path, "bench/trace.bin");
    }
}
