//! Compilation of C programs against the header and the library.

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

pub fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the folder in which cargo puts the libraries that this test was built with.
pub fn libraries() -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let folder = test.parent().expect("in a folder").to_path_buf();
    assert!(folder.join("libforebay.so").exists(), "no libforebay.so in {}", folder.display());
    folder
}

pub fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Compiles `tests/NAME.c` into a folder. Returns `None` without a C compiler.
pub fn compile(name: &str, folder: &Path) -> Option<PathBuf> {
    compile_linked(&format!("tests/{name}.c"), folder.join(name))
}

/// Compiles a source file of this crate and links it with the library. Returns `None` without a C
/// compiler.
pub fn compile_linked(source: &str, out: PathBuf) -> Option<PathBuf> {
    let libraries = libraries();
    let rpath = format!("-Wl,-rpath,{}", libraries.display());
    let with = [
        "-L".as_ref(),
        libraries.as_os_str(),
        "-lforebay".as_ref(),
        "-ldl".as_ref(),
        rpath.as_ref(),
    ];
    compile_with(source, out, &with)
}

/// Compiles `tests/driver.c` into a folder, under the names by which the loader looks for the
/// driver.
#[allow(dead_code, reason = "only one of the tests has a GPU")]
pub fn compile_driver(folder: &Path) -> Option<PathBuf> {
    let library = compile_with(
        "tests/driver.c",
        folder.join("libcuda.so.1"),
        &["-shared".as_ref(), "-fPIC".as_ref()],
    )?;
    std::os::unix::fs::symlink(&library, folder.join("libcuda.so")).expect("a folder of its own");
    Some(library)
}

fn compile_with(source: &str, out: PathBuf, with: &[&OsStr]) -> Option<PathBuf> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        skip(&format!("the C interface, because {compiler} is not there"));
        return None;
    }
    let output = Command::new(&compiler)
        .args(["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
        .arg(here().join("include"))
        .arg(here().join(source))
        .arg("-o")
        .arg(&out)
        .args(with)
        .output()
        .expect("the compiler starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(out)
}
