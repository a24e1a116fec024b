//! Machines whose NVIDIA driver does not work. The program must end with a message and an exit status, never with a
//! panic. The driver is a library that the test builds and that the loader finds first.

#![cfg(target_os = "linux")]

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output};

/// Builds a driver that reports the CUDA version `version` (12.4 as 12040) and returns `init` from `cuInit`.
fn build_driver(folder: &Path, version: u32, init: u32) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver.c");
    let status = Command::new(compiler)
        .args(["-shared", "-fPIC", "-o"])
        .arg(folder.join("libcuda.so.1"))
        .args([format!("-DVERSION={version}"), format!("-DINIT={init}")])
        .arg(source)
        .status();
    assert!(status.expect("a C compiler").success(), "the driver does not compile");
    std::fs::copy(folder.join("libcuda.so.1"), folder.join("libcuda.so")).unwrap();
}

fn gpu_check(folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-check"));
    command.env("LD_LIBRARY_PATH", folder).output().unwrap()
}

fn words(output: &Output) -> String {
    assert!(!output.status.success() && output.status.code().is_some(), "{:?}", output.status);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!words.contains("panicked"), "{words}");
    assert_eq!(words.trim().lines().count(), 1, "one line: {words}");
    words
}

#[test]
fn drivers_that_cannot_work_are_named() {
    for (version, init, expected) in [
        (12_020, 0, "the NVIDIA driver is too old: it supports CUDA 12.2, CUDA 12.4 is needed"),
        (11_080, 0, "it supports CUDA 11.8"),
        (12_040, 0, "finds no GPU"),
        // CUDA_ERROR_NO_DEVICE, which drivers return if there is no GPU.
        (13_000, 100, "finds no GPU"),
        // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        (13_000, 803, "starting the driver"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        build_driver(folder.path(), version, init);
        let words = words(&gpu_check(folder.path()));
        assert!(words.contains(expected), "CUDA {version}, {init}: {words}");
    }
}

/// A file that is not a library stands for a driver that cannot be loaded.
#[test]
fn a_driver_that_cannot_be_loaded_is_no_driver() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(folder.path().join(name), "not a library").unwrap();
    }
    let output = gpu_check(folder.path());
    if output.status.success() {
        let why = "SKIPPED: this machine has a driver elsewhere, which was found instead";
        let _ = writeln!(std::io::stderr(), "{why}");
        return;
    }
    assert!(words(&output).contains("no NVIDIA driver was found"));
}
