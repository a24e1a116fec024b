//! Builds the programs of this workspace and runs them.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Builds the workspace and returns the folder of its programs.
///
/// All targets of the workspace are built, because `cargo test --workspace` has built them already. For fewer packages
/// or targets, cargo would choose other features of dependencies and build everything again.
pub fn build(root: &Path) -> Result<PathBuf> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let mut command = Command::new(cargo);
    command
        .args(["build", "--profile", "ci", "--quiet", "--workspace", "--all-targets"])
        .current_dir(root);
    // Cargo started this program and told it about its own package. The build script of ring runs again where that
    // changes, and everything that needs ring would be compiled twice: here, and by the next command without it.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&*name);
        }
    }
    let status = command.status().context("cannot start cargo")?;
    if !status.success() {
        bail!("the program does not compile");
    }
    Ok(target(root).join("ci"))
}

/// Returns the folder of cargo's output.
pub fn target(root: &Path) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR");
    target.map_or_else(|| root.join("target"), PathBuf::from)
}

/// Runs a program and returns what it prints.
pub fn output(program: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .env("NO_COLOR", "1")
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    if !output.status.success() {
        let what = format!("{} {}", program.display(), arguments.join(" "));
        bail!("`{}` failed: {}", what.trim_end(), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
