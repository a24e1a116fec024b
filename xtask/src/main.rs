//! `cargo xtask` runs tasks of this repository that need more than a shell line.

mod coverage;
mod dist;
mod emulate;
mod ptx;
mod tidy;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

/// Every subcommand that the documentation may name.
pub const COMMANDS: [&str; 5] = ["coverage", "dist", "emulate", "ptx", "tidy"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("", &[] as &[String]),
    };
    let outcome = match command {
        "coverage" => coverage::run(&repository_root(), rest),
        "dist" => dist::run(&repository_root(), rest),
        "emulate" => emulate::run(&repository_root(), rest),
        "ptx" => ptx::run(&repository_root(), rest),
        "tidy" => tidy::run(&repository_root()),
        _ => {
            eprintln!("usage: cargo xtask <{}>", COMMANDS.join("|"));
            eprintln!(
                "  coverage  compare the architectures that run here with those that other programs know"
            );
            eprintln!(
                "  dist      make the files of a release for this machine (--help lists the options)"
            );
            eprintln!("  emulate   run a command on an emulated GPU ([--out DIR] COMMAND...)");
            eprintln!("  ptx       compile the CUDA kernels (--check: compare only)");
            eprintln!(
                "  tidy      check the rules of the house: lengths, unsafe, unused files, docs"
            );
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{command}: {error:#}");
            ExitCode::from(1)
        }
    }
}

/// Returns the root of this checkout. It is asked at run time: if several checkouts share a target folder, the compiled
/// path may be another checkout's.
fn repository_root() -> PathBuf {
    let own = std::env::var_os("CARGO_MANIFEST_DIR");
    let own = own.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    own.parent().expect("xtask lies in the root").to_path_buf()
}
