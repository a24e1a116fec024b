//! Where the reference data is.

use std::io::Write as _;
use std::path::{Path, PathBuf};

/// The path of `name` in the first set of reference data that has it: `$FOREBAY_FIXTURES`, the
/// full set beside the project, the small one inside. Says loudly if there is none.
pub fn fixture(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let sets = [
        std::env::var_os("FOREBAY_FIXTURES").map(PathBuf::from),
        Some(root.join("../shared/fixtures")),
        Some(root.join("fixtures")),
    ];
    let found = sets.into_iter().flatten().map(|set| set.join(name)).find(|path| path.exists());
    if found.is_none() {
        // Past the capture of the test harness, which hides what passing tests print.
        let _ = writeln!(std::io::stderr(), "SKIPPED: no reference data {name}");
    }
    found
}
