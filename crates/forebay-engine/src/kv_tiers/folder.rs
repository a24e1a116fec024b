//! Opens the folder of KV blocks that a user chose.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_kv::{Access, DiskError, DiskOptions, DiskStore, DiskWatch, Secret};
use forebay_options::OptionName;

use super::disk::{KvDisk, KvDiskType};
use crate::options::{KvCacheType, SessionOptions};

/// Most bytes of a key file that are read.
const KEY_BYTES: u64 = 1 << 20;

/// A folder for keys and values, as a user asks for it.
#[derive(Debug, Clone)]
pub struct KvFolder {
    pub path: PathBuf,
    /// Most bytes of the folder.
    pub bytes: u64,
    pub ty: KvDiskType,
    /// Most bytes that are written on one day.
    pub bytes_per_day: u64,
    /// File with the key that encrypts the blocks.
    pub key: Option<PathBuf>,
}

/// A folder that was opened, and what the user should know about it.
pub struct OpenedKvFolder {
    /// `None` if the folder cannot be used. One of the notes says why.
    pub disk: Option<KvDisk>,
    pub notes: Vec<KvFolderNote>,
}

/// Something that a user should know about a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvFolderNote {
    pub is_warning: bool,
    pub text: String,
}

impl KvFolderNote {
    fn note(text: String) -> KvFolderNote {
        KvFolderNote { is_warning: false, text }
    }
}

/// Why a folder or its key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvFolderError {
    #[error(
        "{} brings keys and values through RAM: {} must not be 0",
        OptionName::KvDisk,
        OptionName::KvRam
    )]
    NoRam,
    #[error(
        "{} rounds keys and values in f16: leave out {}, and {}",
        OptionName::KvDiskType.with("q8_0"),
        OptionName::Exact,
        OptionName::KvType
    )]
    NotF16,
    #[error("{}: other users may read the key: run `chmod 600` on it", path.display())]
    OthersMayReadKey { path: PathBuf },
    #[error("{}: the key cannot be read", path.display())]
    KeyUnreadable { path: PathBuf, source: io::Error },
    #[error(
        "{}: a key has at least {} bytes: `head -c 32 /dev/urandom` makes one",
        path.display(),
        Secret::BYTES_MIN
    )]
    KeyTooShort { path: PathBuf },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

impl KvFolderError {
    /// Returns true if another option, folder or key would do.
    pub fn is_of_options(&self) -> bool {
        match self {
            KvFolderError::NoRam
            | KvFolderError::NotF16
            | KvFolderError::OthersMayReadKey { .. } => true,
            KvFolderError::KeyUnreadable { .. } | KvFolderError::KeyTooShort { .. } => false,
            KvFolderError::Disk(error) => matches!(
                error,
                DiskError::OthersMayRead { .. }
                    | DiskError::NotAStore { .. }
                    | DiskError::Encrypted { .. }
                    | DiskError::NotEncrypted { .. }
            ),
        }
    }
}

impl KvFolder {
    /// Opens the folder for an engine with these options. A folder whose blocks have another key is not used. `watch` observes
    /// every read and write of a block.
    ///
    /// # Errors
    /// Returns an error if the options contradict each other, or if the key or the folder cannot be used.
    pub fn open(
        &self,
        session: &SessionOptions,
        watch: Option<Arc<dyn DiskWatch>>,
    ) -> Result<OpenedKvFolder, KvFolderError> {
        let is_rounded = self.ty == KvDiskType::Q8_0;
        if session.kv_ram_bytes == Some(0) {
            return Err(KvFolderError::NoRam);
        }
        if is_rounded && (session.exact || session.kv_cache != KvCacheType::F16) {
            return Err(KvFolderError::NotF16);
        }
        let options = DiskOptions {
            bytes_per_day: Some(self.bytes_per_day),
            secret: self.key.as_deref().map(kv_secret).transpose()?,
            watch,
            ..DiskOptions::new(&self.path, self.bytes)
        };
        let store = match DiskStore::open(options) {
            Ok(store) => store,
            Err(error @ DiskError::WrongSecret { .. }) => {
                let text = format!("{error}, so they are not used and none are written");
                let note = KvFolderNote { is_warning: true, text };
                return Ok(OpenedKvFolder { disk: None, notes: vec![note] });
            }
            Err(error) => return Err(error.into()),
        };
        let mut notes = Vec::new();
        let folder = self.path.display();
        if store.access() == Access::ReadOnly {
            notes.push(KvFolderNote::note(format!(
                "another process uses {folder}: KV blocks that are there now are read, and none are written"
            )));
        }
        if is_rounded {
            notes.push(KvFolderNote::note(format!(
                "keys and values in {folder} are rounded to q8_0: answers differ a little if something is found there"
            )));
        }
        Ok(OpenedKvFolder { disk: Some(KvDisk { store: Arc::new(store), ty: self.ty }), notes })
    }
}

/// Reads the key file of a folder of KV blocks.
///
/// # Errors
/// Returns an error if the file cannot be read or is too short, or if other users may read it.
pub fn kv_secret(path: &Path) -> Result<Secret, KvFolderError> {
    let unreadable = |source| KvFolderError::KeyUnreadable { path: path.to_owned(), source };
    let mode = fs::metadata(path).map_err(unreadable)?.permissions().mode();
    if mode & 0o077 != 0 {
        return Err(KvFolderError::OthersMayReadKey { path: path.to_owned() });
    }
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(KEY_BYTES).read_to_end(&mut bytes))
        .map_err(unreadable)?;
    Secret::new(&bytes).ok_or_else(|| KvFolderError::KeyTooShort { path: path.to_owned() })
}
