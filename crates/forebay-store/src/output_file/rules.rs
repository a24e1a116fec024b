//! Checks of the paths that a command may write.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use super::OutputError;
use super::file::OutputFile;

/// The inputs and outputs of one command. The command creates every output with it, before the work starts.
#[derive(Debug)]
pub struct Outputs {
    replace: bool,
    inputs: Vec<(Inode, PathBuf)>,
    claimed: Vec<Place>,
}

/// Identity of a file, independent of the name that leads to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Inode {
    device: u64,
    number: u64,
}

impl Inode {
    fn of(metadata: &Metadata) -> Inode {
        Inode { device: metadata.dev(), number: metadata.ino() }
    }
}

/// Identity of an output: an existing file, or a new name in a folder.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Place {
    Existing(Inode),
    New { folder: Inode, name: OsString },
}

impl Outputs {
    /// Returns a set without inputs and outputs. With `replace` (`--force`), existing regular files may be replaced.
    pub fn new(replace: bool) -> Outputs {
        Outputs { replace, inputs: Vec::new(), claimed: Vec::new() }
    }

    /// Registers a file that the command reads, so that no output replaces it. A path that does not lead to a regular
    /// file is ignored.
    pub fn protect(&mut self, input: &Path) {
        if let Some(metadata) = fs::metadata(input).ok().filter(Metadata::is_file) {
            self.inputs.push((Inode::of(&metadata), input.to_path_buf()));
        }
    }

    /// Checks that `path` may be written, and creates the file, which does not have its name yet. `-` and `/dev/stdout`
    /// mean standard output. Devices and pipes are opened; opening a pipe waits for its reader.
    ///
    /// # Errors
    /// Returns an [`OutputError`] that [is a refusal](OutputError::is_refusal), or [`OutputError::Create`].
    pub fn create(&mut self, path: &Path) -> Result<OutputFile, OutputError> {
        let owned = || path.to_path_buf();
        if path == Path::new("-") || path == Path::new("/dev/stdout") {
            return self.standard_output(path);
        }
        let place = match fs::metadata(path) {
            Ok(metadata) => {
                self.check_existing(path, &metadata)?;
                Place::Existing(Inode::of(&metadata))
            }
            Err(_) if fs::symlink_metadata(path).is_ok() && !self.replace => {
                return Err(OutputError::Exists { path: owned() });
            }
            Err(_) => new_place(path)?,
        };
        let is_device =
            matches!(fs::metadata(path), Ok(found) if found.file_type().is_char_device());
        if !is_device {
            self.claim(path, place)?;
        }
        OutputFile::open(path, self.replace)
    }

    /// Checks that `path` is a folder for new files: it is empty or does not exist yet. With `replace` it may contain
    /// files. The caller still creates each file in it with [`create`](Self::create).
    ///
    /// # Errors
    /// Returns [`OutputError::NotEmpty`], [`OutputError::NotADirectory`], or [`OutputError::Create`] if the folder
    /// cannot be read.
    pub fn check_folder(&self, path: &Path) -> Result<(), OutputError> {
        let first = fs::read_dir(path).map(|mut entries| entries.next());
        match first {
            Ok(Some(_)) if !self.replace => Err(OutputError::NotEmpty { path: path.to_path_buf() }),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                Err(OutputError::NotADirectory { path: path.to_path_buf() })
            }
            Err(error) => Err(OutputError::create(path, &error)),
        }
    }

    fn check_existing(&self, path: &Path, metadata: &Metadata) -> Result<(), OutputError> {
        let owned = || path.to_path_buf();
        let kind = metadata.file_type();
        if metadata.is_dir() {
            return Err(OutputError::Directory { path: owned() });
        }
        if kind.is_block_device() || kind.is_socket() {
            let what = if kind.is_socket() { "socket" } else { "block device (a whole disk)" };
            return Err(OutputError::NotWritable { path: owned(), what });
        }
        if !metadata.is_file() {
            return Ok(());
        }
        self.check_input(path, Inode::of(metadata))?;
        if !self.replace {
            return Err(OutputError::Exists { path: owned() });
        }
        if metadata.permissions().readonly() {
            return Err(OutputError::ReadOnly { path: owned() });
        }
        Ok(())
    }

    fn check_input(&self, path: &Path, inode: Inode) -> Result<(), OutputError> {
        match self.inputs.iter().find(|(input, _)| *input == inode) {
            Some((_, input)) => {
                Err(OutputError::IsInput { path: path.to_path_buf(), input: input.clone() })
            }
            None => Ok(()),
        }
    }

    fn claim(&mut self, path: &Path, place: Place) -> Result<(), OutputError> {
        if self.claimed.contains(&place) {
            return Err(OutputError::Twice { path: path.to_path_buf() });
        }
        self.claimed.push(place);
        Ok(())
    }

    /// Opens the standard output that the shell connected. With `>`, the shell has already emptied the file. With `>>`,
    /// the refusal still saves an input from being appended to.
    fn standard_output(&mut self, path: &Path) -> Result<OutputFile, OutputError> {
        let failed = |error: io::Error| OutputError::create(path, &error);
        let file = File::from(io::stdout().as_fd().try_clone_to_owned().map_err(failed)?);
        let metadata = file.metadata().map_err(failed)?;
        let inode = Inode::of(&metadata);
        if metadata.is_file() {
            self.check_input(path, inode)?;
        }
        self.claim(path, Place::Existing(inode))?;
        Ok(OutputFile::direct(path, file))
    }
}

fn new_place(path: &Path) -> Result<Place, OutputError> {
    let name = path.file_name().ok_or_else(|| OutputError::NoName { path: path.to_path_buf() })?;
    let folder =
        fs::metadata(folder_of(path)).map_err(|error| OutputError::create(path, &error))?;
    if !folder.is_dir() {
        return Err(OutputError::create(path, &io::ErrorKind::NotADirectory.into()));
    }
    Ok(Place::New { folder: Inode::of(&folder), name: name.to_owned() })
}

/// Returns the folder that contains `path`.
pub(super) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_exists_needs_replace_and_an_input_is_refused_even_then() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["model", "other"] {
            fs::write(at(name), "bytes").unwrap();
        }
        fs::hard_link(at("model"), at("hard")).unwrap();
        symlink(at("model"), at("soft")).unwrap();
        symlink(at("nothing"), at("dangling")).unwrap();
        for replace in [false, true] {
            let mut outputs = Outputs::new(replace);
            outputs.protect(&at("model"));
            for name in ["model", "hard", "soft"] {
                let error = outputs.create(&at(name)).unwrap_err();
                assert!(matches!(error, OutputError::IsInput { .. }), "{name}: {error}");
            }
            assert!(matches!(outputs.create(folder.path()), Err(OutputError::Directory { .. })));
            for name in ["other", "dangling"] {
                assert_eq!(outputs.create(&at(name)).is_ok(), replace, "{name}");
            }
            assert!(outputs.create(Path::new("/dev/null")).is_ok());
            assert!(outputs.create(Path::new("/dev/null")).is_ok());
        }
        assert_eq!(fs::read(at("model")).unwrap(), b"bytes");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 5);
    }

    #[test]
    fn one_name_is_for_one_output() {
        let folder = tempfile::tempdir().unwrap();
        let mut outputs = Outputs::new(true);
        let first = outputs.create(&folder.path().join("out")).unwrap();
        let again = folder.path().join("../").join(folder.path().file_name().unwrap()).join("out");
        assert!(matches!(outputs.create(&again), Err(OutputError::Twice { .. })));
        first.commit().unwrap();
        fs::hard_link(folder.path().join("out"), folder.path().join("link")).unwrap();
        let mut outputs = Outputs::new(true);
        let _first = outputs.create(&folder.path().join("out")).unwrap();
        let second = outputs.create(&folder.path().join("link"));
        assert!(matches!(second, Err(OutputError::Twice { .. })));
    }

    #[test]
    fn places_that_take_no_file() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        for path in ["missing/out", "file/out", ".."] {
            assert!(Outputs::new(true).create(&folder.path().join(path)).is_err(), "{path}");
        }
        assert!(Outputs::new(true).create(Path::new("")).is_err());
        let outputs = Outputs::new(false);
        assert!(outputs.check_folder(&folder.path().join("new")).is_ok());
        assert!(matches!(outputs.check_folder(folder.path()), Err(OutputError::NotEmpty { .. })));
        let file = outputs.check_folder(&folder.path().join("file"));
        assert!(matches!(file, Err(OutputError::NotADirectory { .. })));
        assert!(Outputs::new(true).check_folder(folder.path()).is_ok());
    }
}
