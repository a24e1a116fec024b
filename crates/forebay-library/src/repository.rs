//! The models of a repository on the hub.

use crate::choice::{self, RemoteModel};
use crate::client::Client;
use crate::headers::Headers;
use crate::manifest::RepositoryFile;
use crate::pull::{check_revision, download};
use crate::{Entry, Error, Library, Name, Options, Progress, hub, path};

/// A repository whose list of files was read.
pub struct Repository {
    pub(crate) client: Client,
    pub(crate) options: Options,
    /// The name that the user asked for.
    pub(crate) name: Name,
    pub(crate) files: Vec<RepositoryFile>,
}

impl Repository {
    /// Reads the list of a repository's files. `name` may have a quant.
    ///
    /// # Errors
    /// Returns an error if the name has no owner, or if the hub does not give the list.
    pub fn list(
        name: &Name,
        options: &Options,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Repository, Error> {
        if !name.has_owner() {
            return Err(Error::NoOwner { name: name.to_string() });
        }
        check_revision(&options.revision)?;
        let client = Client::new(name.repository(), options)?;
        let files = hub::list(&client, name.repository(), &options.revision, cancelled)?;
        Ok(Repository { client, options: options.clone(), name: name.clone(), files })
    }

    /// Returns the name that was asked for.
    pub fn asked(&self) -> &Name {
        &self.name
    }

    /// Sets the number of connections of a download.
    pub fn set_connections(&mut self, connections: usize) {
        self.options.connections = connections;
    }

    /// Returns all models, smallest first.
    ///
    /// # Errors
    /// Returns an error if the repository has none.
    pub fn models(&self) -> Result<Vec<RemoteModel>, Error> {
        choice::models(self.name.repository(), &self.files)
    }

    /// Returns the model that the name stands for.
    ///
    /// # Errors
    /// Returns an error that lists the models if the name stands for none or for several.
    pub fn chosen(&self) -> Result<RemoteModel, Error> {
        choice::choose(self.name.repository(), self.name.quant(), &self.files)
    }

    /// Returns the name of a model of this repository.
    ///
    /// # Errors
    /// Returns an error if the name of the file does not fit into a name.
    pub fn name_of(&self, model: &RemoteModel) -> Result<Name, Error> {
        self.name.with_quant(model.tag.as_deref())
    }

    /// Returns a reader of the models' headers.
    pub fn headers<'a>(&'a self, cancelled: &'a (dyn Fn() -> bool + Sync)) -> Headers<'a> {
        Headers::new(self, cancelled)
    }

    /// Downloads a model into the library, or finishes an earlier download. A pull that fails or is cancelled keeps what has
    /// arrived.
    ///
    /// # Errors
    /// Returns an error if the disk lacks room, or if the download fails.
    pub fn pull(
        &self,
        library: &Library,
        model: &RemoteModel,
        progress: &dyn Fn(Progress),
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Entry, Error> {
        download(library, self, model, progress, cancelled)
    }

    /// Returns the address of a file.
    pub(crate) fn url(&self, file: &str) -> String {
        format!(
            "{}/{}/resolve/{}/{}",
            self.client.endpoint,
            path::encode(self.name.repository(), true),
            path::encode(&self.options.revision, false),
            path::encode(file, true)
        )
    }
}
