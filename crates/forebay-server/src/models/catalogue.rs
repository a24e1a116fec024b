//! What the program gives the server: the models that requests may name, and the way to load them.

use std::path::PathBuf;
use std::sync::Arc;

use forebay_engine::Session;
use forebay_library::{Error, Library, Name, RemoteModel, Repository};
use forebay_text::Tokenizer;

use super::keep_alive::KeepAlive;
use super::room::Memory;
use crate::live::Outlook;

/// A model that requests may name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    /// File or folder. Requests never name it.
    pub path: PathBuf,
    /// How long the model stays if requests do not say it. `None` is the server's own time.
    pub keep_alive: Option<KeepAlive>,
}

/// The models that requests may name. It is asked anew for each request, so models may come and go.
pub trait Catalogue: Send + Sync + 'static {
    /// Returns all models in the order in which they are listed.
    fn list(&self) -> Vec<Entry>;

    /// Returns the model of this name.
    fn find(&self, name: &str) -> Option<Entry>;

    /// Returns the library into which requests may pull models, if there is one.
    fn library(&self) -> Option<Library> {
        None
    }

    /// Finds a model on the hub, and checks that this machine can run it before any of its weights are read.
    ///
    /// # Errors
    /// Returns why it cannot run, or why it cannot be found or its headers cannot be read.
    fn offer(&self, name: &Name) -> Result<(Repository, RemoteModel), PullError>;

    /// Returns the model for requests that name none. `None` is the only model, or the one that was used last.
    fn preferred(&self) -> Option<Entry>;
}

/// Reason why a model was not pulled.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    #[error(transparent)]
    Library(#[from] Error),
    /// This machine cannot run the model.
    #[error("{0}")]
    CannotRun(String),
}

/// Reason why a model was not loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The memory that it may take is too small. With more, it may load.
    #[error("{0}")]
    TooSmall(String),
    #[error("{0}")]
    Failed(String),
}

/// An open model and the memory that it holds.
pub struct Loaded {
    pub session: Session,
    pub memory: Memory,
    pub outlook: Arc<Outlook>,
}

/// Opens models within the memory that there is for all of them.
pub trait Loader: Send + Sync + 'static {
    /// Returns the memory for all models.
    fn memory(&self) -> Memory;

    /// Returns the memory that a model takes if none of it is left on the disk, however much there is.
    ///
    /// # Errors
    /// Returns an error if the model cannot be read.
    fn needs(&self, entry: &Entry) -> Result<Memory, LoadError>;

    /// Opens a model in at most `room`. `None` means that no other model is loaded, so there is as much as the user allows.
    /// `tokenizer` is the model's own from an earlier load.
    ///
    /// # Errors
    /// Returns why the model was not opened.
    fn load(
        &self,
        entry: &Entry,
        room: Option<Memory>,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Loaded, LoadError>;

    /// Called after a model whose engine failed is unloaded and no other model is loaded. What is kept between loads, such as
    /// an open GPU, may be the cause.
    fn forget(&self) {}
}

impl<T: Loader> Loader for Arc<T> {
    fn memory(&self) -> Memory {
        (**self).memory()
    }

    fn needs(&self, entry: &Entry) -> Result<Memory, LoadError> {
        (**self).needs(entry)
    }

    fn load(
        &self,
        entry: &Entry,
        room: Option<Memory>,
        tokenizer: Option<Arc<Tokenizer>>,
    ) -> Result<Loaded, LoadError> {
        (**self).load(entry, room, tokenizer)
    }

    fn forget(&self) {
        (**self).forget();
    }
}
