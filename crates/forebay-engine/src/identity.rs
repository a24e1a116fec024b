//! What the bytes of KV blocks depend on beside tokens, so that blocks of another model or arithmetic are never used.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use forebay_format::Catalog;
use sha2::{Digest as _, Sha256};

use crate::{EngineError, Session};

/// Number of the arithmetic of keys and values. Increase it with every change of their bits that [`Session::strong_identity`]
/// does not notice by itself.
const ARITHMETIC: u32 = 3;

/// Bytes that are read of every tensor.
const SAMPLE_BYTES: u64 = 512;

impl Session {
    /// Returns everything on which the bytes of KV blocks depend beside the tokens: the files with a sample of every tensor, the
    /// type of keys and values, the device and its arithmetic, and which parts the CPU computes for a GPU.
    ///
    /// # Errors
    /// Returns an error if the model's files cannot be read.
    pub(crate) fn strong_identity(&self) -> Result<Vec<u8>, EngineError> {
        let catalog = Catalog::open(self.model_path())?;
        let files = of_files(&catalog)
            .map_err(|(path, source)| EngineError::CannotIdentify { path, source })?;
        let compute = self.runner.decoder.backend().info();
        let shared = self.runner.decoder.backend().sub_layers();
        let text = format!(
            "{} {ARITHMETIC} {} {} {} {:?} {shared:?} {files:02x?}",
            env!("CARGO_PKG_VERSION"),
            self.kv_identity(),
            compute.isa,
            compute.arithmetic,
            self.cpu_offload(),
        );
        Ok(text.into_bytes())
    }
}

/// Most tensors of which [`digest`] reads a sample.
const DIGEST_SAMPLES: usize = 16;

/// Returns a digest of a model's content: a hash of its files' sizes, its tensor table and samples of some tensors. It is the same for
/// copies of the model, wherever they are.
///
/// # Errors
/// Returns an error if the model's files cannot be read.
pub fn digest(model: &Path) -> Result<String, EngineError> {
    let catalog = Catalog::open(model)?;
    let mut hash = Sha256::new();
    for bytes in &catalog.file_bytes {
        hash.update(bytes.to_le_bytes());
    }
    let step = catalog.tensors().len().div_ceil(DIGEST_SAMPLES).max(1);
    sample(&catalog, step, &mut hash)
        .map_err(|(path, source)| EngineError::CannotIdentify { path, source })?;
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns a hash of the files' sizes and times, of the tensor table, and of the middle of every tensor.
fn of_files(catalog: &Catalog) -> Result<[u8; 32], (PathBuf, io::Error)> {
    let mut hash = Sha256::new();
    for path in &catalog.files {
        let (bytes, time) = size_and_time(path).map_err(|error| (path.clone(), error))?;
        hash.update(bytes.to_le_bytes());
        hash.update(time.to_le_bytes());
    }
    sample(catalog, 1, &mut hash)?;
    Ok(hash.finalize().into())
}

/// Adds the tensor table to a hash, and the middle of every tensor whose index is a multiple of `step`.
fn sample(catalog: &Catalog, step: usize, hash: &mut Sha256) -> Result<(), (PathBuf, io::Error)> {
    let open = |path: &PathBuf| File::open(path).map_err(|error| (path.clone(), error));
    let files: Vec<File> = catalog.files.iter().map(open).collect::<Result<_, _>>()?;
    let mut sample = vec![0; SAMPLE_BYTES as usize];
    for (index, tensor) in catalog.tensors().iter().enumerate() {
        let extent = tensor.extent;
        let table = (&tensor.name, tensor.ty.name(), &tensor.shape, extent.offset, extent.length);
        hash.update(format!("{table:?} {}", extent.file.0));
        if index % step != 0 {
            continue;
        }
        let stored = catalog.stored(extent);
        let len = SAMPLE_BYTES.min(stored.length);
        let sample = &mut sample[..len as usize];
        let at = stored.offset + (stored.length - len) / 2;
        let (file, path) = (&files[extent.file.0 as usize], &catalog.files[extent.file.0 as usize]);
        file.read_exact_at(sample, at).map_err(|error| (path.clone(), error))?;
        hash.update(sample);
    }
    Ok(())
}

/// Returns the size of a file and the time of its last change, in nanoseconds since 1970.
fn size_and_time(path: &Path) -> io::Result<(u64, u128)> {
    let found = fs::metadata(path)?;
    let since = found.modified()?.duration_since(UNIX_EPOCH);
    Ok((found.len(), since.map_or(0, |since| since.as_nanos())))
}
