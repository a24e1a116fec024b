//! The JSON file that belongs to a name: which files it has, and their checksums.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::at;
use crate::{Error, Name, path};

/// Version of the format.
const VERSION: u32 = 1;
/// Largest manifest that is read.
const LARGEST_BYTES: u64 = 16 << 20;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepositoryFile {
    /// Path inside the repository.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    pub checksum: Checksum,
}

/// Checksum of a file, as the repository lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Checksum {
    /// SHA-256 of the bytes, in hexadecimal digits: of files that the repository keeps outside of Git.
    Sha256(String),
    /// SHA-1 of Git's blob, a header and the bytes, in hexadecimal digits: of all other files.
    GitSha1(String),
}

impl Checksum {
    /// Returns the hexadecimal digits.
    pub fn text(&self) -> &str {
        match self {
            Checksum::Sha256(text) | Checksum::GitSha1(text) => text,
        }
    }

    /// Returns true if the checksum has the right number of lower-case hexadecimal digits.
    pub fn is_sound(&self) -> bool {
        let length = match self {
            Checksum::Sha256(_) => 64,
            Checksum::GitSha1(_) => 40,
        };
        self.text().len() == length
            && self.text().bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
    }
}

/// What the library knows about a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub version: u32,
    pub name: String,
    /// Where the files came from.
    pub endpoint: String,
    pub repository: String,
    pub revision: String,
    /// Time of the pull in seconds since 1970.
    pub pulled: u64,
    /// SHA-256 of the list of files, and the folder of the files.
    pub digest: String,
    /// Path of the file to open; empty for the folder itself.
    pub open: String,
    pub files: Vec<RepositoryFile>,
}

impl Manifest {
    /// Creates a manifest for files of a repository.
    pub fn new(name: &Name, open: String, files: Vec<RepositoryFile>) -> Manifest {
        Manifest {
            version: VERSION,
            name: name.to_string(),
            endpoint: String::new(),
            repository: name.repository().to_owned(),
            revision: String::new(),
            pulled: 0,
            digest: digest(name.repository(), &files),
            open,
            files,
        }
    }

    /// Reads and checks the manifest of `name`.
    pub fn read(file: &Path, name: &Name) -> Result<Manifest, Error> {
        let damaged = |why: String| Error::Damaged { path: file.to_owned(), why };
        let length = fs::metadata(file).map_err(at(file))?.len();
        if length > LARGEST_BYTES {
            return Err(damaged(format!("it has {length} bytes")));
        }
        let text = fs::read(file).map_err(at(file))?;
        let manifest: Manifest =
            serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        manifest.check(name).map_err(damaged)?;
        Ok(manifest)
    }

    fn check(&self, name: &Name) -> Result<(), String> {
        if self.version != VERSION {
            return Err(format!("it has version {}, and {VERSION} is known", self.version));
        }
        if self.name != name.to_string() {
            return Err(format!("it belongs to {:?}", self.name));
        }
        self.repository
            .parse::<Name>()
            .ok()
            .filter(|repository| repository.quant().is_none())
            .ok_or("its repository has no sound name")?;
        for file in &self.files {
            path::check(&file.path).map_err(|why| format!("the path {:?}: {why}", file.path))?;
            if !file.checksum.is_sound() {
                return Err(format!("the checksum of {:?} is not one", file.path));
            }
        }
        if self.digest != digest(&self.repository, &self.files) {
            return Err("its digest does not match its list of files".into());
        }
        let is_listed = self.files.iter().any(|file| file.path == self.open);
        if self.files.is_empty() || !(self.open.is_empty() || is_listed) {
            return Err("the file to open is not in its list".into());
        }
        Ok(())
    }

    /// Returns the size of all files.
    pub fn size_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).fold(0, u64::saturating_add)
    }

    /// Writes the manifest. A reader finds the old file or the whole new one, even after a power cut.
    pub fn write(&self, file: &Path) -> Result<(), Error> {
        let temporary = file.with_extension("json.new");
        let write = || {
            let mut out = File::create(&temporary)?;
            serde_json::to_writer_pretty(&mut out, self)?;
            out.write_all(b"\n")?;
            out.sync_all()?;
            fs::rename(&temporary, file)?;
            sync_folder(file)
        };
        write().map_err(at(file))
    }
}

/// Makes the names of a file's folder durable.
pub fn sync_folder(file: &Path) -> std::io::Result<()> {
    match file.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// Returns the SHA-256 of a list of files.
fn digest(repository: &str, files: &[RepositoryFile]) -> String {
    let mut hash = Sha256::new();
    hash.update(format!("{repository}\n"));
    for file in files {
        hash.update(format!("{} {} {}\n", file.checksum.text(), file.size, file.path));
    }
    hex(&hash.finalize())
}

/// Writes bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
