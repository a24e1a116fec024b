//! The model library: a folder of models with names, and downloads from Hugging Face into it.
//!
//! ```text
//! name.rs       names of models: OWNER/REPO[:QUANT]
//! library.rs    the folder: list, find, copy, remove
//! loose.rs      models that lie in the folder without a pull
//! manifest.rs   the JSON file of a name: which files it has, and their checksums
//! choice.rs     which files of a repository belong to a name
//! hub.rs        the list of a repository's files
//! client.rs     HTTP requests: redirects, tokens, retries
//! partial.rs    an unfinished file and the journal of its finished ranges
//! transfer.rs   downloads ranges of files over several connections and checks the files
//! repository.rs the models of a repository
//! headers.rs    reads the headers of models on the hub
//! pull.rs       a whole pull: list, choose, download, check, name
//! others.rs     models that other programs have downloaded
//! named.rs      what a user writes for a model: a path or a name
//! path.rs       the rules for paths that come from another machine
//! ```
//!
//! ```text
//! DIR/manifests/OWNER%2FREPO%3AQUANT.json   a name
//! DIR/pulls/OWNER%2FREPO%3AQUANT.json       a name whose pull is not finished
//! DIR/files/DIGEST/REPO/...                 files; names with the same files share them
//! DIR/locks/                                locks of the library and of repositories
//! ```

mod choice;
mod client;
mod error;
mod headers;
mod hub;
mod library;
mod loose;
mod manifest;
mod name;
mod named;
mod others;
mod partial;
mod path;
mod pull;
mod repository;
mod transfer;

pub use choice::RemoteModel;
pub use client::Notice;
pub use error::Error;
pub use headers::{HEADER_BYTES_MAX, Headers, RemoteHeader, Unread};
pub use library::{Entry, Library, Listing};
pub use name::Name;
pub use named::find_named;
pub use others::Others;
pub use pull::{Options, Progress, pull};
pub use repository::Repository;
