//! Runs a command with the emulated driver of `crates/forebay-gpu-check/emulator` instead of NVIDIA's.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

pub fn run(root: &Path, arguments: &[String]) -> Result<bool> {
    let (out, command) = match arguments {
        [flag, out, command @ ..] if flag == "--out" => (PathBuf::from(out), command),
        command => (default_folder(root), command),
    };
    let Some((program, rest)) = command.split_first() else {
        bail!("expected `emulate [--out DIR] COMMAND...`");
    };
    let emulator = root.join("crates/forebay-gpu-check/emulator");
    let built = Command::new("sh").arg(emulator.join("build.sh")).arg(&out).status();
    if !built.context("running sh")?.success() {
        bail!("the emulated driver does not compile");
    }
    // The loader resolves a relative path against the program's working folder.
    let out = out.canonicalize()?;
    let status = Command::new(program)
        .args(rest)
        .env("LD_LIBRARY_PATH", &out)
        .env("FOREBAY_EMULATOR", &emulator)
        .env("FOREBAY_EMULATOR_CACHE", out.join("modules"))
        .status();
    Ok(status.with_context(|| format!("running {program}"))?.success())
}

/// Returns the folder beside cargo's build output.
fn default_folder(root: &Path) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| root.join("target")).join("emulator")
}
