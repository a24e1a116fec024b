//! Restores the files that a pack was made from.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Instant;

use forebay_format::pack::{Embedded, RestoredFile, restore_gguf, restore_hugging_face};
use forebay_format::{Catalog, FormatError};
use forebay_store::{
    CopyJob, FileSet, Interrupt, IoKind, OutputFile, Outputs, Sink, StoreError, copy,
};
use serde::Serialize;

use super::PackError;
use super::{PackOptions, Progress};

/// Report of a restoration.
#[derive(Clone, Debug, Serialize)]
pub struct RestoreReport {
    pub path: PathBuf,
    /// Path of the pack.
    pub source: PathBuf,
    pub files: usize,
    pub bytes: u64,
    pub seconds: f64,
    pub bytes_per_second: f64,
}

/// Writes the GGUF file that a pack was made from to `out`. A split set becomes one file. A single file is restored
/// byte for byte, provided that its padding was zeros.
///
/// # Errors
/// Returns an error if the pack has another kind of source or is damaged, if the disk is full, or if a write fails.
/// Returns [`PackError::Interrupted`] if the work was stopped.
pub fn to_gguf(
    pack: &Path,
    out: OutputFile,
    options: impl Into<PackOptions>,
    progress: &mut Progress<'_>,
) -> Result<RestoreReport, PackError> {
    let started = Instant::now();
    let PackOptions { io, interrupt, .. } = options.into();
    let _span = tracing::debug_span!("unpack", from = %pack.display(), to = %out.path().display())
        .entered();
    let source = open(pack, &interrupt)?;
    let restored = restore_gguf(&source.catalog)?;
    let path = out.path().to_path_buf();
    write(&source, &restored, out, io, progress)?;
    Ok(report(pack, &path, 1, restored.bytes, started))
}

/// Writes the Hugging Face folder that a pack was made from: the same weight files and the files beside them. `folder`
/// must be empty or not exist yet.
///
/// # Errors
/// Returns the same errors as [`to_gguf`].
pub fn to_hugging_face(
    pack: &Path,
    folder: &Path,
    options: impl Into<PackOptions>,
    progress: &mut Progress<'_>,
) -> Result<RestoreReport, PackError> {
    let started = Instant::now();
    let PackOptions { io, interrupt, .. } = options.into();
    let _span =
        tracing::debug_span!("unpack", from = %pack.display(), to = %folder.display()).entered();
    let source = open(pack, &interrupt)?;
    let (documents, restored) = restore_hugging_face(&source.catalog)?;
    let failed = |source| PackError::Folder { path: folder.to_path_buf(), source };
    Outputs::new(false).check_folder(folder)?;
    let is_new = !folder.exists();
    std::fs::create_dir_all(folder).map_err(failed)?;
    let mut written = Vec::new();
    match write_folder(&source, &restored, &documents, folder, io, &mut written, progress) {
        Ok(bytes) => Ok(report(pack, folder, restored.len() + documents.len(), bytes, started)),
        Err(error) => {
            // An incomplete model must not be mistaken for a whole one.
            for path in &written {
                let _ = std::fs::remove_file(path);
            }
            if is_new {
                let _ = std::fs::remove_dir(folder);
            }
            Err(error)
        }
    }
}

/// Writes all files, lists them in `written` and returns their total size in bytes.
fn write_folder(
    source: &Opened,
    restored: &[RestoredFile],
    documents: &[Embedded],
    folder: &Path,
    io: IoKind,
    written: &mut Vec<PathBuf>,
    progress: &mut Progress<'_>,
) -> Result<u64, PackError> {
    let total: u64 = restored.iter().map(|file| file.bytes).sum();
    let mut before = 0;
    for file in restored {
        let part = &mut |done, _: u64| progress(before + done, total);
        let target = folder.join(&file.name);
        write(source, file, OutputFile::create(&target)?, io, part)?;
        written.push(target);
        before += file.bytes;
    }
    let mut bytes = total;
    // Documents are written last, so that a folder with a config.json is a complete model.
    for document in documents {
        let target = folder.join(&document.name);
        if let Some(inner) = target.parent().filter(|inner| *inner != folder) {
            std::fs::create_dir_all(inner)
                .map_err(|source| FormatError::Io { path: inner.to_owned(), source })?;
        }
        let file = OutputFile::create(&target)?;
        file.reserve(document.content.len() as u64)?;
        file.write_at(0, &document.content)?;
        file.commit()?;
        written.push(target);
        bytes += document.content.len() as u64;
    }
    Ok(bytes)
}

/// A pack that is restored.
struct Opened {
    catalog: Catalog,
    files: FileSet,
}

fn open(pack: &Path, interrupt: &Interrupt) -> Result<Opened, PackError> {
    let catalog = Catalog::open(pack)?;
    if catalog.pack.is_none() {
        return Err(PackError::NoPack { path: pack.to_path_buf() });
    }
    let files = FileSet::of_catalog(&catalog, true)?.interruptible(interrupt);
    Ok(Opened { catalog, files })
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
    source: &Opened,
    restored: &RestoredFile,
    out: OutputFile,
    io: IoKind,
    progress: &mut Progress<'_>,
) -> Result<(), PackError> {
    out.reserve(restored.bytes)?;
    let damaged = OnceLock::new();
    let job = CopyJob {
        range: 0..restored.bytes,
        header: &restored.header,
        spans: restored.spans.clone(),
        refused: &|tensor| {
            damaged.get_or_init(|| tensor);
        },
        chunk_at: None,
    };
    copy(&source.files, &job, io, &Writing(&out), progress)?;
    if let Some(&tensor) = damaged.get() {
        return Err(source.catalog.damaged(tensor).into());
    }
    out.commit()?;
    Ok(())
}

struct Writing<'a>(&'a OutputFile);

impl Sink for Writing<'_> {
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        Ok(self.0.write_at(offset, bytes)?)
    }
}
