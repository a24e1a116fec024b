//! `cargo xtask ptx` compiles the CUDA kernels to PTX and packs it into one archive. The archive is committed, so that
//! building needs no CUDA.
//!
//! The manifest beside the archive has a hash over the sources, the options and the compiler's version of each module.
//! A test compares these hashes without a compiler.

mod archive;
mod grids;
mod manifest;
mod nvrtc;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};

use archive::{Compiled, Manifest};
use manifest::Module;
use nvrtc::Nvrtc;

const KERNELS: &str = "crates/forebay-cuda/kernels";
const ARCHIVE: &str = "ptx.zst";
const MANIFEST: &str = "ptx.txt";

/// The option with which this program compiles one module and prints its PTX.
const MODULE: &str = "--module";

/// Brings the archive up to date. With `--check`, compiles everything, writes nothing, and returns true if the archive
/// equals the compiler's output.
pub fn run(root: &Path, arguments: &[String]) -> Result<bool> {
    let kernels = root.join(KERNELS);
    let modules = manifest::read(&kernels)?;
    let check = match arguments {
        [] => false,
        [flag] if flag == "--check" => true,
        [flag, name] if flag == MODULE => {
            let module = modules.iter().find(|module| module.name == *name);
            let module = module.with_context(|| format!("there is no module {name}"))?;
            let source = kernels.join(&module.source);
            print!("{}", Nvrtc::load()?.compile(&source, &module.options, &kernels)?);
            return Ok(true);
        }
        _ => bail!("usage: cargo xtask ptx [--check | {MODULE} NAME]"),
    };
    let nvrtc = Nvrtc::load()?;
    if check {
        return compare(&kernels, &modules, &nvrtc);
    }
    write(&kernels.join(grids::NAME), grids::text(&kernels)?.as_bytes())?;
    let known = cache_folder(root);
    std::fs::create_dir_all(&known).with_context(|| known.display().to_string())?;
    let compiled = for_all(&modules, |module| {
        let source_hash = manifest::hash(&kernels, module, &nvrtc.version)?;
        let path = known.join(format!("{}.{source_hash}", module.name));
        if let Ok(ptx) = std::fs::read_to_string(&path) {
            return Ok(Compiled { module, source_hash, ptx });
        }
        let compiled = compile(module, source_hash)?;
        write(&path, compiled.ptx.as_bytes())?;
        println!("compiled {}", module.name);
        Ok(compiled)
    })?;
    let files = archive::build(&nvrtc.version, &compiled)?;
    write(&kernels.join(ARCHIVE), &files.archive)?;
    write(&kernels.join(MANIFEST), files.manifest.as_bytes())?;
    println!("{} modules in {} bytes", compiled.len(), files.archive.len());
    Ok(true)
}

fn compare(kernels: &Path, modules: &[Module], nvrtc: &Nvrtc) -> Result<bool> {
    let committed = read_manifest(kernels)?;
    let compiled = for_all(modules, |module| {
        let source_hash = manifest::hash(kernels, module, &nvrtc.version)?;
        Ok(compile(module, source_hash)?.line())
    })?;
    let mut lines = committed.lines.iter();
    let mut fresh = true;
    for line in &compiled {
        if lines.next() != Some(line) {
            fresh = false;
            println!("STALE {}", line.name);
        }
    }
    if lines.next().is_some() || !archive_is_whole(kernels, &committed)? {
        fresh = false;
        println!("STALE {ARCHIVE}");
    }
    if fresh {
        println!("{} modules: the compiler gives what is committed", modules.len());
    }
    Ok(fresh)
}

/// Compiles a module in a process of its own. NVRTC's output is not always the same when a process compiles several modules: of a
/// hundred compilations beside those of other threads, about one gave the instructions another order.
fn compile(module: &Module, source_hash: String) -> Result<Compiled<'_>> {
    let what = || format!("module {}", module.name);
    let own = std::env::current_exe()?;
    let output = Command::new(own).args(["ptx", MODULE, &module.name]).output();
    let output = output.with_context(what)?;
    if !output.status.success() {
        bail!("{}: {}", what(), String::from_utf8_lossy(&output.stderr).trim());
    }
    let ptx = String::from_utf8(output.stdout).with_context(what)?;
    let ptx = archive::strip(module, &source_hash, &ptx);
    Ok(Compiled { module, source_hash, ptx })
}

/// Returns the results of `work` for each module, in the order of the modules, computed on all processors.
fn for_all<'a, T: Send>(
    modules: &'a [Module],
    work: impl Fn(&'a Module) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(module) = modules.get(i) else { break };
                    let result = work(module);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((i, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(i, _)| *i);
    done.into_iter().map(|(_, result)| result).collect()
}

fn read_manifest(kernels: &Path) -> Result<Manifest> {
    let path = kernels.join(MANIFEST);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Manifest::parse(&text).with_context(|| path.display().to_string())
}

/// Returns true if the archive is the one that the manifest was written with. The loader's tests compare its contents.
fn archive_is_whole(kernels: &Path, manifest: &Manifest) -> Result<bool> {
    Ok(archive::sha256(&std::fs::read(kernels.join(ARCHIVE))?) == manifest.archive_hash)
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).with_context(|| path.display().to_string())
}

/// Returns the folder that keeps compiled modules by the hash of their sources, so that only changed modules are
/// compiled.
fn cache_folder(root: &Path) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| root.join("target")).join("ptx")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A source that was edited without a run of `cargo xtask ptx` must fail.
    #[test]
    fn committed_ptx_is_fresh() {
        let kernels = crate::repository_root().join(KERNELS);
        let modules = manifest::read(&kernels).unwrap();
        let committed = read_manifest(&kernels).unwrap();
        let known = |line: &archive::Line| {
            (line.name.clone(), line.architecture.clone(), line.source_hash.clone())
        };
        let expected: Vec<_> = modules
            .iter()
            .map(|module| {
                let hash = manifest::hash(&kernels, module, &committed.compiler).unwrap();
                (module.name.clone(), module.architecture.clone(), hash)
            })
            .collect();
        let stale: Vec<_> = expected
            .iter()
            .filter(|module| !committed.lines.iter().any(|line| known(line) == **module))
            .map(|(name, _, _)| name)
            .collect();
        assert!(stale.is_empty(), "run `cargo xtask ptx`: stale are {stale:?}");
        assert_eq!(committed.lines.len(), modules.len(), "run `cargo xtask ptx`");
        assert!(archive_is_whole(&kernels, &committed).unwrap(), "run `cargo xtask ptx`");
    }
}
