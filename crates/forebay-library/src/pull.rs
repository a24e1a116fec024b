//! A whole pull: list, choose, download, check, name.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::client::Notice;
use crate::error::at;
use crate::manifest::{Manifest, RepositoryFile};
use crate::partial::Partial;
use crate::transfer::Transfer;
use crate::{Entry, Error, Library, Name, RemoteModel, Repository, partial, path};

/// Where and how files are downloaded.
#[derive(Clone, Debug)]
pub struct Options {
    /// Address of the hub.
    pub endpoint: String,
    /// Token of the user's account. Only the hub receives it.
    pub token: Option<String>,
    /// Branch, tag or commit.
    pub revision: String,
    /// Connections at a time.
    pub connections: usize,
    /// Size of the ranges that are requested.
    pub range_bytes: u64,
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Longest wait for the next bytes.
    pub timeout: Duration,
    /// Wait before the second attempt of a request; it doubles with each further one.
    pub backoff: Duration,
    /// Hears why a request is tried again.
    pub notice: Notice,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            endpoint: "https://huggingface.co".into(),
            token: None,
            revision: "main".into(),
            connections: 8,
            range_bytes: 32 << 20,
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(20),
            backoff: Duration::from_secs(1),
            notice: Notice::default(),
        }
    }
}

impl Options {
    /// Returns the defaults with `HF_ENDPOINT`, and the token of `HF_TOKEN` or of the file that Hugging Face's own tools
    /// keep.
    pub fn from_environment() -> Options {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.trim().is_empty());
        let mut options = Options::default();
        if let Some(endpoint) = variable("HF_ENDPOINT") {
            options.endpoint = endpoint.trim().to_owned();
        }
        let file = || {
            let home = variable("HF_HOME")
                .or_else(|| variable("HOME").map(|home| format!("{home}/.cache/huggingface")))?;
            fs::read_to_string(Path::new(&home).join("token")).ok()
        };
        options.token = variable("HF_TOKEN")
            .or_else(file)
            .map(|token| token.trim().to_owned())
            .filter(|token| !token.is_empty());
        options
    }
}

/// What a pull is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Asks for the list of files.
    Listing,
    Downloading {
        done_bytes: u64,
        total_bytes: u64,
    },
    /// Compares checksums.
    Verifying {
        done_bytes: u64,
        total_bytes: u64,
    },
}

/// Downloads a model into the library, or finishes an earlier download. A pull that fails or is cancelled keeps what has
/// arrived.
pub fn pull(
    library: &Library,
    name: &Name,
    options: &Options,
    progress: &dyn Fn(Progress),
    cancelled: &dyn Fn() -> bool,
) -> Result<Entry, Error> {
    progress(Progress::Listing);
    let repository = Repository::list(name, options, cancelled)?;
    repository.pull(library, &repository.chosen()?, progress, cancelled)
}

/// Downloads a model of a repository, see [`pull`].
pub(crate) fn download(
    library: &Library,
    from: &Repository,
    model: &RemoteModel,
    progress: &dyn Fn(Progress),
    cancelled: &dyn Fn() -> bool,
) -> Result<Entry, Error> {
    let Repository { client, options, .. } = from;
    let repository = from.name.repository();
    let name = from.name_of(model)?;
    let mut manifest = Manifest::new(&name, model.open.clone(), model.files.clone());
    manifest.endpoint = client.endpoint.clone();
    manifest.revision = options.revision.clone();
    manifest.pulled = seconds();

    let _lock = library.lock_repository(repository)?;
    let folder = library.begin(&name, &manifest)?;
    let wanted = wanted(library, &folder, &manifest)?;
    check_space(&folder, &wanted)?;
    let mut files = Vec::with_capacity(wanted.len());
    for file in wanted {
        let url = from.url(&file.path);
        let target = folder.join(&file.path);
        files.push((Partial::open(target, file.clone(), options.range_bytes.max(1))?, url));
    }
    let total_bytes = manifest.size_bytes();
    let missing_bytes = missing(&files);
    let before = total_bytes - missing_bytes;
    let transfer = Transfer::new(client, &files, options.connections);
    let downloaded = |bytes: u64| {
        let done_bytes = (before + bytes).min(total_bytes);
        progress(Progress::Downloading { done_bytes, total_bytes });
    };
    downloaded(0);
    transfer.download(&downloaded, cancelled)?;
    downloaded(missing_bytes);
    let total_bytes = files.iter().map(|(partial, _)| partial.remote.size).sum();
    let verified = |done_bytes: u64| progress(Progress::Verifying { done_bytes, total_bytes });
    transfer.verify(&verified, cancelled)?;
    library.finish(&name, &manifest)
}

/// Returns the files that the library does not have. A file that another name has, too, is linked.
fn wanted<'a>(
    library: &Library,
    folder: &Path,
    manifest: &'a Manifest,
) -> Result<Vec<&'a RepositoryFile>, Error> {
    let mut wanted = Vec::new();
    for file in &manifest.files {
        let target = folder.join(&file.path);
        if fs::metadata(&target).is_ok_and(|found| found.len() == file.size) {
            continue;
        }
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent).map_err(at(parent))?;
        }
        // Some file systems have no hard links. Then the file is downloaded.
        if library.same_file(file).is_none_or(|same| fs::hard_link(same, &target).is_err()) {
            wanted.push(file);
        }
    }
    Ok(wanted)
}

/// Returns the bytes that are not there yet.
fn missing(files: &[(Partial, String)]) -> u64 {
    let length = |partial: &Partial, range| {
        let span = partial.span(range);
        span.end - span.start - partial.kept_bytes(range)
    };
    let of_file = |(partial, _): &(Partial, String)| -> u64 {
        partial.missing().into_iter().map(|range| length(partial, range)).sum()
    };
    files.iter().map(of_file).sum()
}

/// Checks that the disk has room for these files, beside what it has of them.
fn check_space(folder: &Path, files: &[&RepositoryFile]) -> Result<(), Error> {
    let disk = rustix::fs::statvfs(folder).map_err(|error| at(folder)(error.into()))?;
    let available = disk.f_bavail.saturating_mul(disk.f_frsize);
    let missing = |file: &&RepositoryFile| {
        let found = fs::metadata(partial::path(&folder.join(&file.path)));
        file.size.saturating_sub(found.map_or(0, |found| found.blocks() * 512))
    };
    let needed = files.iter().map(missing).fold(0, u64::saturating_add);
    match needed > available {
        true => Err(Error::Space { folder: folder.to_owned(), needed, available }),
        false => Ok(()),
    }
}

pub(crate) fn check_revision(revision: &str) -> Result<(), Error> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    let is_sound = path::check(revision).is_ok() && revision.chars().all(allowed);
    match is_sound {
        true => Ok(()),
        false => Err(Error::BadPath { path: revision.to_owned(), why: "it is no revision" }),
    }
}

fn seconds() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |elapsed| elapsed.as_secs())
}
