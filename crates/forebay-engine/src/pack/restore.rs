//! Packs turned back into what they were made from.

use std::path::{Path, PathBuf};
use std::time::Instant;

use forebay_format::Catalog;
use forebay_format::pack::{Embedded, RestoredFile, restore_gguf, restore_hugging_face};
use forebay_store::{CopyJob, FileSet, IoKind, OutputFile, Sink, Span, StoreError, copy};
use serde::Serialize;

use super::Progress;
use crate::EngineError;

/// What was written.
#[derive(Clone, Debug, Serialize)]
pub struct RestoreReport {
    pub path: PathBuf,
    /// The pack.
    pub source: PathBuf,
    pub files: usize,
    pub bytes: u64,
    pub seconds: f64,
    pub bytes_per_second: f64,
}

/// Writes the GGUF file that a pack was made from, replacing what has the name `out`; a split set
/// becomes one file. A single file comes back byte for byte, as far as its padding was zeros.
///
/// # Errors
/// Packs of other sources, damage, a disk without room, failed writes; [`StoreError::Interrupted`].
pub fn to_gguf(
    pack: &Path,
    out: &Path,
    io: IoKind,
    progress: &mut Progress<'_>,
) -> Result<RestoreReport, EngineError> {
    let started = Instant::now();
    let (catalog, files) = open(pack)?;
    let restored = restore_gguf(&catalog)?;
    write(&files, &restored, out, io, progress)?;
    Ok(report(pack, out, 1, restored.bytes, started))
}

/// Writes the Hugging Face folder that a pack was made from: the same weight files and the files
/// beside them. `folder` may not exist yet, or must be empty.
///
/// # Errors
/// As [`to_gguf`].
pub fn to_hugging_face(
    pack: &Path,
    folder: &Path,
    io: IoKind,
    progress: &mut Progress<'_>,
) -> Result<RestoreReport, EngineError> {
    let started = Instant::now();
    let (catalog, files) = open(pack)?;
    let (documents, restored) = restore_hugging_face(&catalog)?;
    let failed = |source| EngineError::Folder { path: folder.to_path_buf(), source };
    let is_new = !folder.exists();
    std::fs::create_dir_all(folder).map_err(failed)?;
    if std::fs::read_dir(folder).map_err(failed)?.next().is_some() {
        return Err(EngineError::Exists { path: folder.to_path_buf() });
    }
    match write_folder(&files, &restored, &documents, folder, io, progress) {
        Ok(bytes) => Ok(report(pack, folder, restored.len() + documents.len(), bytes, started)),
        Err(error) => {
            // Half a model must not be taken for one.
            let names = restored.iter().map(|file| &file.name);
            for name in names.chain(documents.iter().map(|document| &document.name)) {
                let _ = std::fs::remove_file(folder.join(name));
            }
            if is_new {
                let _ = std::fs::remove_dir(folder);
            }
            Err(error)
        }
    }
}

/// Writes all files and returns their bytes.
fn write_folder(
    files: &FileSet,
    restored: &[RestoredFile],
    documents: &[Embedded],
    folder: &Path,
    io: IoKind,
    progress: &mut Progress<'_>,
) -> Result<u64, EngineError> {
    let total: u64 = restored.iter().map(|file| file.bytes).sum();
    let mut before = 0;
    for file in restored {
        let part = &mut |done, _: u64| progress(before + done, total);
        write(files, file, &folder.join(&file.name), io, part)?;
        before += file.bytes;
    }
    let mut bytes = total;
    // Last, so that a folder with a config.json is a whole model.
    for document in documents {
        let target = folder.join(&document.name);
        let file = OutputFile::create(&target, document.content.len() as u64)?;
        file.write_at(0, &document.content)?;
        file.commit()?;
        bytes += document.content.len() as u64;
    }
    Ok(bytes)
}

fn open(pack: &Path) -> Result<(Catalog, FileSet), EngineError> {
    let catalog = Catalog::open(pack)?;
    if catalog.pack.is_none() {
        return Err(EngineError::NoPack { path: pack.to_path_buf() });
    }
    let files = FileSet::of_catalog(&catalog, true)?;
    Ok((catalog, files))
}

fn report(pack: &Path, out: &Path, files: usize, bytes: u64, started: Instant) -> RestoreReport {
    let seconds = started.elapsed().as_secs_f64();
    RestoreReport {
        path: out.to_path_buf(),
        source: pack.to_path_buf(),
        files,
        bytes,
        seconds,
        bytes_per_second: bytes as f64 / seconds,
    }
}

fn write(
    files: &FileSet,
    restored: &RestoredFile,
    out: &Path,
    io: IoKind,
    progress: &mut Progress<'_>,
) -> Result<(), EngineError> {
    let file = OutputFile::create(out, restored.bytes)?;
    let job = CopyJob {
        range: 0..restored.bytes,
        header: &restored.header,
        spans: restored.spans.iter().map(|&(to, from)| Span { to, from }).collect(),
        chunks: None,
    };
    copy(files, &job, io, &Writing(&file), progress)?;
    file.commit()?;
    Ok(())
}

struct Writing<'a>(&'a OutputFile);

impl Sink for Writing<'_> {
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        self.0.write_at(offset, bytes)
    }
}
