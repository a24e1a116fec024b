//! Errors of packs.

use std::path::PathBuf;

use forebay_format::FormatError;
use forebay_model::ModelError;
use forebay_store::{OutputError, StoreError};

/// Errors of making packs, verifying them and turning them back.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    #[error(transparent)]
    Store(StoreError),
    /// The model cannot be used.
    #[error(transparent)]
    Model(ModelError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("{}: is a pack already", path.display())]
    IsPack { path: PathBuf },
    #[error("{}: is no pack; only packs (.fbay) can be verified or turned back", path.display())]
    NoPack { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Folder { path: PathBuf, source: std::io::Error },
}

forebay_store::keep_interrupts!(PackError { Store(StoreError), Model(ModelError) });
