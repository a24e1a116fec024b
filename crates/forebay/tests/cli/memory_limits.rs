//! Tests limits of the system: memory of control groups, as containers have them, and sizes of files.
//!
//! Tests of groups need the right to make some. Without it they print `SKIPPED:` on standard error.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{Ran, command, forebay};

const MIB: u64 = 1 << 20;

/// A group for a test, with a group inside of it. The outer one has the limit.
struct Groups {
    outer: PathBuf,
    inner: PathBuf,
}

impl Groups {
    /// Makes the groups, or says why that is impossible.
    fn new(name: &str, limit_bytes: u64) -> Option<Groups> {
        match Groups::make(name, limit_bytes) {
            Ok(groups) => Some(groups),
            Err(why) => {
                // Written directly to stderr, because the test harness captures what passing tests print.
                let _ = writeln!(
                    std::io::stderr(),
                    "SKIPPED: no control group with a memory limit: {why}"
                );
                None
            }
        }
    }

    fn make(name: &str, limit_bytes: u64) -> Result<Groups, String> {
        let (parent, limit) =
            hierarchy().ok_or("no hierarchy with a memory controller is mounted")?;
        let outer = parent.join(format!("forebay-test-{name}-{}", std::process::id()));
        let groups = Groups { inner: outer.join("inner"), outer };
        let failed = |path: &Path| {
            let path = path.display().to_string();
            move |error: std::io::Error| format!("{path}: {error}")
        };
        fs::create_dir(&groups.outer).map_err(failed(&groups.outer))?;
        if limit == "memory.max" {
            let control = groups.outer.join("cgroup.subtree_control");
            fs::write(&control, "+memory").map_err(failed(&control))?;
        }
        let file = groups.outer.join(limit);
        fs::write(&file, limit_bytes.to_string()).map_err(failed(&file))?;
        fs::create_dir(&groups.inner).map_err(failed(&groups.inner))?;
        Ok(groups)
    }

    /// Runs a command line of the shell in the inner group.
    fn run(&self, line: &str) -> Ran {
        let line = format!("echo $$ > '{}/cgroup.procs' && {line}", self.inner.display());
        command("sh", &["-c", &line], "")
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for folder in [&self.inner, &self.outer] {
            // A group can be removed when its last process has left.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Returns the folder of this process's group, or of the hierarchy, and the name of the file with the limit.
fn hierarchy() -> Option<(PathBuf, &'static str)> {
    let own = |controller: &str| {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        groups.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let found = controllers.split(',').any(|name| name == controller);
            found.then(|| path.trim_start_matches('/').to_owned())
        })
    };
    if let Some(path) = own("memory") {
        return Some((Path::new("/sys/fs/cgroup/memory").join(path), "memory.limit_in_bytes"));
    }
    let root = Path::new("/sys/fs/cgroup");
    let controllers = fs::read_to_string(root.join("cgroup.subtree_control")).ok()?;
    // Only the groups at the top may have processes beside groups with controllers.
    controllers
        .split_whitespace()
        .any(|name| name == "memory")
        .then(|| (root.to_owned(), "memory.max"))
}

/// Writes a model of about 400 MiB to `folder`.
fn model(folder: &Path) -> String {
    let path = folder.join("model.gguf").to_str().unwrap().to_owned();
    forebay(&["synth", "qwen3moe-30b", &path, "--layers", "1", "--json"]).ok();
    path
}

#[test]
fn a_model_runs_in_a_group_that_is_full_of_page_cache() {
    let Some(groups) = Groups::new("cache", 640 * MIB) else { return };
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = model(folder.path());
    let copy = folder.path().join("copy.gguf");
    let binary = env!("CARGO_BIN_EXE_forebay");
    // As a download does, the copy fills the group with page cache.
    let line = format!(
        "cp '{model}' '{0}' && sync '{0}' && cat '{0}' '{model}' > /dev/null && \
         exec '{binary}' run '{0}' -p x --raw -n 2 --device cpu --ctx 64 --json",
        copy.display()
    );
    let answer = groups.run(&line).json();
    let statistics = &answer["statistics"];
    let budget = statistics["budget_bytes"].as_u64().unwrap();
    assert!(budget > 200 * MIB, "the page cache counts as free: {budget}");
    assert!(budget < 640 * MIB, "the limit of the outer group counts: {budget}");
}

#[test]
fn a_budget_beyond_the_limit_of_an_outer_group_is_an_error() {
    let Some(groups) = Groups::new("budget", 256 * MIB) else { return };
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = model(folder.path());
    let binary = env!("CARGO_BIN_EXE_forebay");
    let line =
        format!("exec '{binary}' run '{model}' -p x --raw -n 2 --device cpu --ctx 64 --ram 600MiB");
    let why = groups.run(&line).failed(1);
    assert!(why.contains("are free") && why.contains("MiB"), "{why}");
    // Without a budget, what fits is chosen, or the error says how much is needed.
    let line = format!("exec '{binary}' run '{model}' -p x --raw -n 2 --device cpu --ctx 64");
    let ran = groups.run(&line);
    assert!(matches!(ran.status, Some(0 | 1)), "{:?}: {}", ran.status, ran.stderr);
    if ran.status == Some(1) {
        assert!(ran.failed(1).contains("smallest that works"));
    }
}

#[test]
fn a_file_that_becomes_too_large_is_an_error_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("big.gguf");
    let binary = env!("CARGO_BIN_EXE_forebay");
    // The limit of the shell counts in blocks of 512 or 1,024 bytes.
    let line =
        format!("ulimit -f 100; exec '{binary}' synth llama-8b '{}' --layers 1", out.display());
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("error: ") && said.contains("larger than"), "{said}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
