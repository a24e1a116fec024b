//! A lower layer never imports a higher one, and only `store` reads weight bytes.

use super::Finding;
use super::files::Repository;

/// Crates, each with the crates that it may depend on.
const LAYERS: [(&str, &[&str]); 25] = [
    ("forebay-options", &[]),
    ("forebay-ops", &[]),
    ("forebay-device", &[]),
    ("forebay-format", &["forebay-options", "forebay-codec"]),
    ("forebay-codec", &[]),
    ("forebay-text", &["forebay-format"]),
    ("forebay-library", &["forebay-format"]),
    ("forebay-kv", &[]),
    ("forebay-grammar", &["forebay-text"]),
    ("forebay-chat", &["forebay-text", "forebay-grammar"]),
    ("forebay-store", &["forebay-options", "forebay-format", "forebay-codec"]),
    ("forebay-stream", &["forebay-format", "forebay-store"]),
    ("forebay-compute", &["forebay-ops", "forebay-format", "forebay-codec"]),
    ("forebay-cuda", &["forebay-device", "forebay-ops", "forebay-format"]),
    (
        "forebay-gpu-check",
        &[
            "forebay-ops",
            "forebay-format",
            "forebay-codec",
            "forebay-store",
            "forebay-stream",
            "forebay-compute",
            "forebay-cuda",
            "forebay-model",
            "forebay-engine",
            "forebay-lab",
            "forebay-modules",
        ],
    ),
    (
        "forebay-model",
        &[
            "forebay-options",
            "forebay-ops",
            "forebay-format",
            "forebay-store",
            "forebay-stream",
            "forebay-compute",
            "forebay-cuda",
        ],
    ),
    (
        "forebay-engine",
        &[
            "forebay-options",
            "forebay-ops",
            "forebay-codec",
            "forebay-format",
            "forebay-text",
            "forebay-grammar",
            "forebay-kv",
            "forebay-store",
            "forebay-stream",
            "forebay-compute",
            "forebay-cuda",
            "forebay-model",
        ],
    ),
    (
        "forebay-lab",
        &[
            "forebay-options",
            "forebay-format",
            "forebay-text",
            "forebay-kv",
            "forebay-store",
            "forebay-stream",
            "forebay-model",
            "forebay-engine",
        ],
    ),
    (
        "forebay-requests",
        &[
            "forebay-options",
            "forebay-text",
            "forebay-grammar",
            "forebay-chat",
            "forebay-model",
            "forebay-engine",
        ],
    ),
    (
        "forebay-server",
        &[
            "forebay-options",
            "forebay-format",
            "forebay-text",
            "forebay-grammar",
            "forebay-chat",
            "forebay-library",
            "forebay-model",
            "forebay-engine",
            "forebay-requests",
        ],
    ),
    ("forebay-dlpack", &["forebay-format"]),
    (
        "forebay-modules",
        &["forebay-codec", "forebay-format", "forebay-store", "forebay-compute", "forebay-cuda"],
    ),
    (
        "forebay-c",
        &[
            "forebay-options",
            "forebay-dlpack",
            "forebay-format",
            "forebay-store",
            "forebay-cuda",
            "forebay-engine",
            "forebay-lab",
        ],
    ),
    (
        "forebay-python",
        &[
            "forebay-options",
            "forebay-cuda",
            "forebay-dlpack",
            "forebay-format",
            "forebay-store",
            "forebay-stream",
            "forebay-library",
            "forebay-model",
            "forebay-engine",
            "forebay-lab",
            "forebay-modules",
            "forebay-requests",
        ],
    ),
    (
        "forebay",
        &[
            "forebay-options",
            "forebay-format",
            "forebay-text",
            "forebay-grammar",
            "forebay-chat",
            "forebay-store",
            "forebay-stream",
            "forebay-compute",
            "forebay-model",
            "forebay-engine",
            "forebay-lab",
            "forebay-library",
            "forebay-requests",
            "forebay-server",
        ],
    ),
];

/// Layers that receive weight bytes from their callers and never open a file.
const WITHOUT_FILES: [&str; 4] = [
    "crates/forebay-stream/src/",
    "crates/forebay-compute/src/",
    "crates/forebay-cuda/src/",
    "crates/forebay-model/src/",
];

pub fn check(repository: &Repository, findings: &mut Vec<Finding>) {
    check_files_stay_in_store(repository, findings);
    for file in repository.files() {
        let Some(name) = crate_of(&file.path) else { continue };
        let Some((_, allowed)) = LAYERS.iter().find(|(layer, _)| *layer == name) else {
            let message =
                format!("{name} has no place among the layers in xtask/src/tidy/layers.rs");
            findings.push(Finding::fail(&file.path, 0, message));
            continue;
        };
        for (line, dependency) in dependencies(file.text.as_deref().unwrap_or_default()) {
            if !allowed.contains(&dependency) {
                let message = format!("{name} lies below {dependency} and must not depend on it");
                findings.push(Finding::fail(&file.path, line, message));
            }
        }
    }
}

fn check_files_stay_in_store(repository: &Repository, findings: &mut Vec<Finding>) {
    for source in repository.rust_sources() {
        let is_test = source.path.contains("test");
        if is_test || !WITHOUT_FILES.iter().any(|folder| source.path.starts_with(folder)) {
            continue;
        }
        // Tests at the end of a file may read fixtures.
        let code = source.code.split("#[cfg(test)]").next().unwrap_or_default();
        for (offset, path) in code.match_indices("std::fs") {
            // The system describes the machine in text files.
            if code[offset + path.len()..].starts_with("::read_to_string(") {
                continue;
            }
            let line = source.line_of(offset);
            let message = "only forebay-store reads weight bytes: this layer knows no files";
            findings.push(Finding::fail(&source.path, line, message));
        }
    }
}

fn crate_of(path: &str) -> Option<&str> {
    path.strip_prefix("crates/")?.strip_suffix("/Cargo.toml")
}

/// Returns this project's crates under `[dependencies]`, with their lines. Dev-dependencies may be higher crates.
fn dependencies(manifest: &str) -> Vec<(usize, &str)> {
    let mut in_dependencies = false;
    let mut found = Vec::new();
    for (index, line) in manifest.lines().enumerate() {
        if line.starts_with('[') {
            in_dependencies = line.contains("dependencies") && !line.contains("dev-");
        } else if in_dependencies && line.starts_with("forebay") {
            let end = line.find(['.', ' ', '=']).unwrap_or(line.len());
            found.push((index + 1, &line[..end]));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_stay_in_store() {
        let reads = "use std::fs;\n";
        let asks_the_system = "fn f() { std::fs::read_to_string(\"/proc/cpuinfo\"); }\n";
        let tests_read = "fn f() {}\n#[cfg(test)]\nmod tests { use std::fs; }\n";
        let repository = Repository::from_texts(&[
            ("crates/forebay-compute/src/a.rs", reads),
            ("crates/forebay-stream/src/b.rs", tests_read),
            ("crates/forebay-store/src/c.rs", reads),
            ("crates/forebay-compute/src/d.rs", asks_the_system),
        ]);
        let mut findings = Vec::new();
        check(&repository, &mut findings);
        assert_eq!(findings.len(), 1);
    }

    #[test]
    fn an_inverted_import_fails() {
        let repository = Repository::from_texts(&[
            (
                "crates/forebay-store/Cargo.toml",
                "[dependencies]\nforebay-stream.workspace = true\n[dev-dependencies]\nforebay-model.workspace = true\n",
            ),
            (
                "crates/forebay-stream/Cargo.toml",
                "[dependencies]\nforebay-store = { path = \"x\" }\n",
            ),
        ]);
        let mut findings = Vec::new();
        check(&repository, &mut findings);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].line, 2);
    }
}
