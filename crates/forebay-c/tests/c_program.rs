//! Tests of the header and the symbols, with a C program that uses both.

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_store::{Arena, EngineOptions, FileSet, IoKind, open_engine};
use support::{compile, here, libraries, skip};

/// Writes two files of random bytes.
fn files(folder: &Path) -> [PathBuf; 2] {
    [3_000_017, 70_001].map(|bytes: usize| {
        let path = folder.join(format!("weights-{bytes}"));
        let mut state = bytes as u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .take(bytes)
        .collect();
        std::fs::write(&path, noise).unwrap();
        path
    })
}

#[test]
fn a_c_program_reads_what_pread_reads() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("reads", folder.path()) else { return };
    let paths = files(folder.path());
    let mut engines = vec!["0", "2"];
    let (none, arena) = (FileSet::in_memory(Vec::new()), Arena::reserve(4096).unwrap());
    match open_engine(IoKind::Uring, &none, &arena, &EngineOptions::default()) {
        Ok(_) => engines.push("1"),
        Err(error) => skip(&format!("the C interface over io_uring: {error}")),
    }
    for engine in engines {
        for cached in ["0", "1"] {
            let output =
                Command::new(&program).arg("check").args(&paths).args([engine, cached]).output();
            let output = output.expect("the program starts");
            let said = String::from_utf8_lossy(&output.stdout);
            let wrong = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "engine {engine}, cached {cached}: {said}{wrong}");
            assert!(said.starts_with("ok "), "{said}");
        }
    }
}

/// Returns the names before an opening parenthesis.
fn functions(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices("forebay_") {
        let name: String =
            text[at..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let before = text[..at].chars().next_back();
        let starts = before.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '_');
        if starts && text[at + name.len()..].starts_with('(') {
            found.insert(name);
        }
    }
    found
}

#[test]
fn header_and_library_have_the_same_functions() {
    let headers = ["forebay.h", "forebay_load.h"]
        .map(|name| std::fs::read_to_string(here().join("include").join(name)).unwrap());
    let code: String =
        headers.concat().split("/*").map(|part| part.split("*/").last().unwrap()).collect();
    let declared = functions(&code);
    assert!(declared.len() > 20, "{declared:?}");
    let library = libraries().join("libforebay.so");
    let Ok(output) = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output()
    else {
        return skip("the symbols of the C interface, because nm is not there");
    };
    assert!(output.status.success());
    let symbols = String::from_utf8(output.stdout).unwrap();
    let exported: BTreeSet<String> = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .filter(|name| name.starts_with("forebay_"))
        .map(String::from)
        .collect();
    assert_eq!(declared, exported);
}

#[test]
fn numbers_of_the_header_are_those_of_the_library() {
    let header = std::fs::read_to_string(here().join("include/forebay.h")).unwrap();
    let source = std::fs::read_to_string(here().join("src/status.rs")).unwrap();
    let mut compared = 0;
    for line in source.lines() {
        let Some(rest) = line.strip_prefix("pub const ") else { continue };
        let Some((name, value)) = rest.split_once(": Status = ") else { continue };
        let declared = format!("FOREBAY_{name} = {}", value.trim_end_matches(';'));
        assert!(header.contains(&declared), "{declared} is not in the header");
        compared += 1;
    }
    assert_eq!(compared, 20);
}
