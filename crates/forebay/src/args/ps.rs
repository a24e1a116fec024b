//! Arguments of `forebay ps`.

use std::path::PathBuf;

use clap::{Args, ValueHint};

#[derive(Args)]
pub struct PsArgs {
    /// Server to ask, as in http://127.0.0.1:8080 [default: $FOREBAY_HOST, else 127.0.0.1:8080]
    #[arg(long, value_name = "URL")]
    pub server: Option<String>,
    /// Send the first key in FILE, for a server that wants one
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub api_key_file: Option<PathBuf>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}
