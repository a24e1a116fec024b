//! Files that nothing refers to: Rust files that no `mod` reaches, and other files that no text names.

use std::collections::BTreeSet;

use super::Finding;
use super::files::{Repository, file_name, folder};
use super::scan::{RustSource, matching_brace, words};

/// Files that tools find by their name.
const KNOWN_BY_NAME: [&str; 17] = [
    "Cargo.toml",
    "Cargo.lock",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "LICENSE-MIT",
    "LICENSE-APACHE",
    ".gitignore",
    ".gitattributes",
    "rustfmt.toml",
    "clippy.toml",
    "deny.toml",
    "typos.toml",
    "rust-toolchain.toml",
    "CHANGELOG.md",
    "Dockerfile",
    ".dockerignore",
];
const KNOWN_FOLDERS: [&str; 4] = [".cargo/", ".ci/", ".github/", "python/"];

pub fn check(repository: &Repository, findings: &mut Vec<Finding>) {
    check_rust(repository, findings);
    check_others(repository, findings);
}

fn check_rust(repository: &Repository, findings: &mut Vec<Finding>) {
    let sources = repository.rust_sources();
    let mut waiting: Vec<String> = sources
        .iter()
        .map(|source| source.path.clone())
        .filter(|path| is_root(repository, path))
        .collect();
    let mut reached = BTreeSet::new();
    while let Some(path) = waiting.pop() {
        if !reached.insert(path.clone()) {
            continue;
        }
        if let Some(source) = sources.iter().find(|source| source.path == path) {
            waiting.extend(modules(source, is_root(repository, &path)));
        }
    }
    for source in sources {
        if !reached.contains(&source.path) {
            let message = "no `mod` declaration reaches this file";
            findings.push(Finding::fail(&source.path, 0, message));
        }
    }
}

/// Returns true if cargo compiles this file without a `mod` that names it.
fn is_root(repository: &Repository, path: &str) -> bool {
    let (parent, name) = (folder(path), file_name(path));
    let package_of = |inner: &str| {
        let package = parent.strip_suffix(inner)?;
        Some(package.trim_end_matches('/').to_owned())
    };
    let is_package = |package: String| {
        let manifest = if package.is_empty() {
            "Cargo.toml".to_owned()
        } else {
            format!("{package}/Cargo.toml")
        };
        repository.text(&manifest).is_some()
    };
    if (name == "lib.rs" || name == "main.rs") && package_of("src").is_some_and(is_package) {
        return true;
    }
    if name == "build.rs" && is_package(parent.to_owned()) {
        return true;
    }
    // A target of several files: `tests/NAME/main.rs`.
    if name == "main.rs"
        && ["src/bin", "tests", "benches", "examples"].iter().any(|inner| {
            folder(parent)
                .strip_suffix(inner)
                .is_some_and(|package| is_package(package.trim_end_matches('/').to_owned()))
        })
    {
        return true;
    }
    if ["src/bin", "tests", "benches", "examples"]
        .iter()
        .any(|inner| package_of(inner).is_some_and(is_package))
    {
        return true;
    }
    // A target whose path the manifest names.
    repository.files().iter().filter(|file| file_name(&file.path) == "Cargo.toml").any(|file| {
        let inside = folder(&file.path);
        let relative = if inside.is_empty() {
            Some(path)
        } else {
            path.strip_prefix(inside).map(|p| p.trim_start_matches('/'))
        };
        let text = file.text.as_deref().unwrap_or_default();
        relative.is_some_and(|relative| text.contains(&format!("path = \"{relative}\"")))
    })
}

/// Returns the files that the `mod` declarations, `#[path]` and `include!` of one file may mean.
fn modules(source: &RustSource, is_root: bool) -> Vec<String> {
    let here = folder(&source.path);
    let name = file_name(&source.path).trim_end_matches(".rs");
    let own = if is_root || name == "mod" { here.to_owned() } else { join(here, name) };
    let inline = inline_modules(&source.code);
    let mut found = Vec::new();
    for start in words(&source.code, "mod") {
        let rest = source.code[start + 3..].trim_start();
        let module: String =
            rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if module.is_empty() || !rest[module.len()..].trim_start().starts_with(';') {
            continue;
        }
        let mut base = own.clone();
        for (name, range) in &inline {
            if range.contains(&start) {
                base = join(&base, name);
            }
        }
        found.push(join(&base, &format!("{module}.rs")));
        found.push(join(&base, &format!("{module}/mod.rs")));
    }
    for marker in ["#[path = \"", "include!(\""] {
        for (at, _) in source.text.match_indices(marker) {
            let quoted = &source.text[at + marker.len()..];
            let relative = quoted.split('"').next().unwrap_or_default();
            found.push(normalise(&join(here, relative)));
        }
    }
    found
}

fn inline_modules(code: &str) -> Vec<(String, std::ops::Range<usize>)> {
    let mut found = Vec::new();
    for start in words(code, "mod") {
        let rest = code[start + 3..].trim_start();
        let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if rest[name.len()..].trim_start().starts_with('{')
            && let Some(open) = code[start..].find('{')
        {
            let open = start + open;
            found.push((name, open..matching_brace(code, open)));
        }
    }
    found
}

fn join(base: &str, name: &str) -> String {
    if base.is_empty() { name.to_owned() } else { format!("{base}/{name}") }
}

/// Removes `.` and `..` from a path.
pub fn normalise(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

fn check_others(repository: &Repository, findings: &mut Vec<Finding>) {
    let texts: Vec<(&str, &str)> = repository
        .files()
        .iter()
        .filter(|file| !is_data(&file.path))
        .filter_map(|file| Some((file.path.as_str(), file.text.as_deref()?)))
        .collect();
    for file in repository.files() {
        let name = file_name(&file.path);
        let known = KNOWN_BY_NAME.contains(&name)
            || KNOWN_FOLDERS.iter().any(|folder| file.path.starts_with(folder))
            || file.path.ends_with(".rs")
            || file.path.contains("proptest-regressions/")
            || name == "LICENSE.llama.cpp";
        if known {
            continue;
        }
        let mut clues = vec![name.to_owned()];
        if file.path.starts_with("fixtures/") || file.path.starts_with("fuzz/seeds/") {
            // Tests and fuzz targets read whole folders, so it is enough if a text names the innermost folder.
            let inside: Vec<&str> = folder(&file.path).split('/').skip(1).collect();
            clues.extend(inside.last().map(|last| (*last).to_owned()));
        }
        if let Some(module) = name.strip_suffix(".py") {
            clues.push(format!("from {module} import "));
        }
        if file.path.starts_with("bench/results/") {
            clues.push("bench/results".to_owned());
        }
        let named = |clue: &String| {
            texts.iter().any(|(path, text)| *path != file.path && text.contains(clue.as_str()))
        };
        if !clues.iter().any(named) {
            findings.push(Finding::fail(
                &file.path,
                0,
                "nothing names this file: is it still used?",
            ));
        }
    }
}

/// Returns true for files whose text does not show which other files are used.
fn is_data(path: &str) -> bool {
    path == "Cargo.lock"
        || path.starts_with("fixtures/")
        || path.starts_with("bench/results/")
        || path.starts_with("fuzz/seeds/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unused(files: &[(&str, &str)]) -> Vec<String> {
        let mut findings = Vec::new();
        check(&Repository::from_texts(files), &mut findings);
        findings.into_iter().map(|finding| finding.path).collect()
    }

    #[test]
    fn modules_are_followed() {
        let files = [
            ("crates/a/Cargo.toml", ""),
            ("crates/a/src/lib.rs", "mod b;\npub mod c;\n// mod lost;\nmod inline { mod d; }\n"),
            ("crates/a/src/b.rs", "mod e;"),
            ("crates/a/src/b/e.rs", ""),
            ("crates/a/src/c/mod.rs", "#[cfg(test)]\n#[path = \"f_tests.rs\"]\nmod f;"),
            ("crates/a/src/c/f_tests.rs", ""),
            ("crates/a/src/inline/d.rs", ""),
            ("crates/a/src/lost.rs", ""),
            ("crates/a/tests/end.rs", "mod common;"),
            ("crates/a/tests/common/mod.rs", ""),
            ("crates/a/tests/cli/main.rs", "mod help;"),
            ("crates/a/tests/cli/help.rs", ""),
        ];
        assert_eq!(unused(&files), vec!["crates/a/src/lost.rs"]);
    }

    #[test]
    fn targets_of_the_manifest_are_roots() {
        let files = [
            ("fuzz/Cargo.toml", "[[bin]]\nname = \"x\"\npath = \"targets/x.rs\"\n"),
            ("fuzz/targets/x.rs", ""),
            ("fuzz/targets/y.rs", ""),
        ];
        assert_eq!(unused(&files), vec!["fuzz/targets/y.rs"]);
    }

    #[test]
    fn data_must_be_named() {
        let files = [
            ("README.md", "see `bench/compare.sh`"),
            ("bench/compare.sh", ""),
            ("bench/forgotten.sh", ""),
            ("xtask/Cargo.toml", ""),
            ("xtask/src/main.rs", "const MODELS: &str = \"tiny_model\";"),
            ("fixtures/models/tiny_model/config.json", ""),
            ("fixtures/models/other_model/config.json", ""),
        ];
        assert_eq!(
            unused(&files),
            vec!["bench/forgotten.sh", "fixtures/models/other_model/config.json"]
        );
    }
}
