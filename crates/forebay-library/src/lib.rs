//! The model library: a folder of models with names, and downloads from Hugging Face into it.
//!
//! ```text
//! name.rs       names of models: OWNER/REPO[:QUANT]
//! library.rs    the folder: list, find, copy, remove
//! manifest.rs   the JSON file of a name: which files it has, and their checksums
//! choice.rs     which files of a repository belong to a name
//! hub.rs        the list of a repository's files
//! client.rs     HTTP requests: redirects, tokens, retries
//! partial.rs    an unfinished file and the journal of its finished ranges
//! transfer.rs   downloads ranges of files over several connections and checks the files
//! pull.rs       a whole pull: list, choose, download, check, name
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
mod hub;
mod library;
mod manifest;
mod name;
mod partial;
mod path;
mod pull;
mod transfer;

pub use error::Error;
pub use library::{Entry, Library, Listing};
pub use name::Name;
pub use pull::{Options, Progress, pull};
