//! Arguments of the commands about the program itself.

use std::path::PathBuf;

use clap::{Args, ValueHint};

#[derive(Args)]
pub struct CompletionsArgs {
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

#[derive(Args)]
pub struct ConfigArgs {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct ManArgs {
    /// Folder for the pages
    #[arg(value_hint = ValueHint::DirPath)]
    pub folder: PathBuf,
    /// Replace pages that exist
    #[arg(long)]
    pub force: bool,
}
