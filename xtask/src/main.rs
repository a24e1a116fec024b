//! `cargo xtask`: chores of this repository that need more than a shell line.

mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Every subcommand, as the documentation may name it.
pub const COMMANDS: [&str; 1] = ["tidy"];

fn main() -> ExitCode {
    let command = std::env::args().nth(1);
    match command.as_deref() {
        Some("tidy") => match tidy::run(&repository_root()) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::from(1),
            Err(error) => {
                eprintln!("tidy: {error:#}");
                ExitCode::from(1)
            }
        },
        _ => {
            eprintln!("usage: cargo xtask <{}>", COMMANDS.join("|"));
            eprintln!("  tidy  check the rules of the house: lengths, unsafe, unused files, docs");
            ExitCode::from(2)
        }
    }
}

fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root").to_path_buf()
}
