//! `cargo xtask ptx`: compiles the CUDA kernels to PTX, which is committed, so that building needs no CUDA.
//!
//! The first line of each PTX file has a hash over its sources, its options and the compiler's version; a test compares
//! it without a compiler.

mod manifest;
mod nvrtc;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use manifest::Module;
use nvrtc::Nvrtc;

const KERNELS: &str = "crates/forebay-cuda/kernels";
/// The list of what is compiled, and the table of PTX that the crate embeds, written from it.
const TABLE: &str = "crates/forebay-cuda/src/ptx.rs";

/// Brings the PTX files up to date, those that are stale only; with `--check` compiles everything, writes nothing and
/// answers whether all files are what the compiler gives.
pub fn run(root: &Path, arguments: &[String]) -> Result<bool> {
    let check = match arguments {
        [] => false,
        [flag] if flag == "--check" => true,
        _ => bail!("usage: cargo xtask ptx [--check]"),
    };
    let kernels = root.join(KERNELS);
    let modules = manifest::read(&kernels)?;
    let nvrtc = Nvrtc::load()?;
    let mut fresh = true;
    for module in &modules {
        let path = ptx_path(&kernels, module);
        let hash = manifest::hash(&kernels, module, &nvrtc.version)?;
        let header = header(&hash, &nvrtc.version);
        let old = std::fs::read_to_string(&path).unwrap_or_default();
        if !check && old.starts_with(&header) {
            continue;
        }
        let source = kernels.join(&module.source);
        let ptx = nvrtc
            .compile(&source, &module.options, &kernels)
            .with_context(|| format!("module {}", module.name))?;
        let text = format!("{header}{ptx}");
        if check {
            let same = text == old;
            fresh &= same;
            println!("{} {}", if same { "same" } else { "STALE" }, module.file());
        } else {
            std::fs::write(&path, text).with_context(|| path.display().to_string())?;
            println!("wrote {}", module.file());
        }
    }
    fresh &= tidy_up(root, &kernels, &modules, check)?;
    Ok(fresh)
}

/// The table of modules, and PTX files that no module has any more.
fn tidy_up(root: &Path, kernels: &Path, modules: &[Module], check: bool) -> Result<bool> {
    let mut fresh = true;
    let table = table(modules);
    let old = std::fs::read_to_string(root.join(TABLE)).unwrap_or_default();
    if old != table {
        fresh = false;
        if !check {
            std::fs::write(root.join(TABLE), table).context(TABLE)?;
            println!("wrote {TABLE}");
        }
    }
    for entry in std::fs::read_dir(kernels.join("ptx"))? {
        let path = entry?.path();
        if !modules.iter().any(|module| ptx_path(kernels, module) == path) {
            fresh = false;
            if !check {
                std::fs::remove_file(&path)?;
            }
            println!("{} {}", if check { "STRAY" } else { "removed" }, path.display());
        }
    }
    Ok(fresh || !check)
}

fn ptx_path(kernels: &Path, module: &Module) -> PathBuf {
    kernels.join("ptx").join(module.file())
}

fn header(hash: &str, version: &str) -> String {
    format!("// sha256 {hash} nvrtc {version}\n")
}

/// The Rust file that embeds all PTX.
fn table(modules: &[Module]) -> String {
    let mut text = String::from(
        "//! Every module with its PTX. Written by `cargo xtask ptx` from `kernels/modules.txt`.\n\n\
         /// Names and PTX texts.\n\
         #[rustfmt::skip]\n",
    );
    text.push_str(&format!("pub(crate) static MODULES: [(&str, &str); {}] = [\n", modules.len()));
    for module in modules {
        let (name, file) = (&module.name, module.file());
        text.push_str(&format!("    (\"{name}\", include_str!(\"../kernels/ptx/{file}\")),\n"));
    }
    text.push_str("];\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sources that were edited without `cargo xtask ptx` must not pass.
    #[test]
    fn committed_ptx_is_fresh() {
        let root = crate::repository_root();
        let kernels = root.join(KERNELS);
        let modules = manifest::read(&kernels).unwrap();
        let mut stale = Vec::new();
        for module in &modules {
            let path = ptx_path(&kernels, module);
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let first = text.lines().next().unwrap_or_default();
            let version = first.rsplit(' ').next().unwrap_or_default();
            let hash = manifest::hash(&kernels, module, version).unwrap();
            if !text.starts_with(&header(&hash, version)) {
                stale.push(module.file());
            }
        }
        assert!(stale.is_empty(), "run `cargo xtask ptx`: stale are {stale:?}");
        let written = std::fs::read_to_string(root.join(TABLE)).unwrap();
        assert_eq!(written, table(&modules), "run `cargo xtask ptx`");
    }
}
