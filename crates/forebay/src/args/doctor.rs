//! Arguments of `forebay doctor`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

#[derive(Args)]
pub struct DoctorArgs {
    /// Folder on the disk to measure; reads its largest model, or a temporary file of 1 GiB [default:
    /// the folder of the model library]
    #[arg(value_hint = ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// Read this file of at least 1 GiB instead; it should be on the disk of DIR
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: Option<PathBuf>,
    /// Measure each case of the disk twice instead of seven times: in about a third of the time, with less certain rates
    #[arg(long)]
    pub quick: bool,
    /// Do not save the machine profile
    #[arg(long)]
    pub no_save: bool,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}
