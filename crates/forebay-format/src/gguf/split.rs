//! Opens a GGUF model in one file, or in a split set such as `NAME-00001-of-00003.gguf` and its
//! siblings.

use std::path::{Path, PathBuf};

use super::parse::{GgufHeader, parse_file};
use crate::catalog::{Absent, folder_of};
use crate::model_files::split_stem;
use crate::{Catalog, FileIndex, FormatError, Source, Storage};

/// Upper limit on the number of files in a set, larger than any real set. It keeps a hostile count
/// from opening files without end.
const FILES_MAX: u64 = 9999;

/// Opens a GGUF model. `path` may be any file of a split set.
///
/// # Errors
/// Returns an error if the model cannot be opened, see [`Catalog::open`].
pub fn open(storage: &dyn Storage, path: &Path) -> Result<Catalog, FormatError> {
    let (header, file_bytes) = parse_file(storage, path, FileIndex(0))?;
    let root = folder_of(path).to_owned();
    let count = header.metadata.u64("split.count").unwrap_or(1);
    if count <= 1 {
        let files = vec![(path.to_owned(), file_bytes)];
        let mut catalog = Catalog::new(root, files, Source::Gguf(header.metadata), header.tensors)?;
        catalog.absent = without_elements(header.empty).collect();
        return Ok(catalog);
    }
    let name = SplitName::parse(path, count)?;
    open_set(storage, path, root, &name)
}

/// The parts of a split file's name.
struct SplitName {
    prefix: String,
    count: u64,
}

impl SplitName {
    fn parse(path: &Path, count: u64) -> Result<Self, FormatError> {
        let error = || FormatError::SplitName { path: path.to_owned(), count };
        if count > FILES_MAX {
            return Err(FormatError::LimitExceeded {
                path: path.to_owned(),
                what: "split.count",
                offset: 0,
                found: count,
                limit: FILES_MAX,
            });
        }
        let name = path.file_name().and_then(|name| name.to_str()).ok_or_else(error)?;
        match name.strip_suffix(".gguf").and_then(split_stem) {
            Some((prefix, _, named)) if named == format!("{count:05}") => {
                Ok(Self { prefix: prefix.to_owned(), count })
            }
            _ => Err(error()),
        }
    }

    /// Returns the name of file `index`, counted from 0.
    fn file(&self, index: u64) -> String {
        format!("{}-{:05}-of-{:05}.gguf", self.prefix, index + 1, self.count)
    }
}

fn open_set(
    storage: &dyn Storage,
    opened: &Path,
    root: PathBuf,
    name: &SplitName,
) -> Result<Catalog, FormatError> {
    let paths: Vec<PathBuf> = (0..name.count).map(|index| root.join(name.file(index))).collect();
    storage.expect(&paths);
    let mut files = Vec::new();
    let (mut tensors, mut absent) = (Vec::new(), Vec::new());
    let mut metadata = None;
    for (index, path) in (0..).zip(paths) {
        if !storage.exists(&path).map_err(FormatError::io(&path))? {
            return Err(FormatError::MissingSplitFile { path: opened.to_owned(), missing: path });
        }
        let (header, file_bytes) = parse_file(storage, &path, FileIndex(index as u32))?;
        check_number(&path, &header, "split.no", index)?;
        check_number(&path, &header, "split.count", name.count)?;
        files.push((path, file_bytes));
        tensors.extend(header.tensors);
        absent.extend(without_elements(header.empty));
        metadata.get_or_insert(header.metadata);
    }
    let metadata = metadata.unwrap_or_default();
    if let Some(expected) = metadata.u64("split.tensors.count") {
        let found = (tensors.len() + absent.len()) as u64;
        if found != expected {
            let path = opened.to_owned();
            let what = "the number of tensors in all files";
            return Err(FormatError::SplitMismatch { path, what, expected, found });
        }
    }
    let mut catalog = Catalog::new(root, files, Source::Gguf(metadata), tensors)?;
    catalog.absent = absent;
    Ok(catalog)
}

fn without_elements(names: Vec<String>) -> impl Iterator<Item = Absent> {
    names.into_iter().map(|tensor| Absent { tensor, shard: None })
}

fn check_number(
    path: &Path,
    header: &GgufHeader,
    key: &'static str,
    expected: u64,
) -> Result<(), FormatError> {
    match header.metadata.u64(key) {
        Some(found) if found == expected => Ok(()),
        Some(found) => {
            Err(FormatError::SplitMismatch { path: path.to_owned(), what: key, expected, found })
        }
        None => Err(FormatError::NotInSplitSet { path: path.to_owned(), key }),
    }
}
