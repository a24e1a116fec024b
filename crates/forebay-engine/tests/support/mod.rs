//! Finding reference data.

use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The fixtures' root: `FOREBAY_FIXTURES`, else the full set beside the project, else the small
/// choice inside it.
pub fn fixtures() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let candidates = [
        std::env::var_os("FOREBAY_FIXTURES").map(PathBuf::from),
        Some(workspace.join("../shared/fixtures")),
        Some(workspace.join("fixtures")),
    ];
    let found = candidates.into_iter().flatten().find(|path| path.is_dir());
    found.expect("the project's own fixtures/ are always there")
}

/// A path below the fixtures; `None`, said aloud, where this set lacks it.
pub fn fixture(relative: &str) -> Option<PathBuf> {
    let path = fixtures().join(relative);
    if path.exists() {
        return Some(path);
    }
    // Past the capture of the test harness, which hides what passing tests print.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {relative} is not in {}", fixtures().display());
    None
}
