//! Location of the reference data.

use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Returns the path of `name` in the first set of reference data that has it: `$FOREBAY_FIXTURES`,
/// the full set beside the project, then the small one inside. Prints a message if there is none.
pub fn fixture(name: &str) -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let sets = [
        std::env::var_os("FOREBAY_FIXTURES").map(PathBuf::from),
        Some(root.join("../shared/fixtures")),
        Some(root.join("fixtures")),
    ];
    let found = sets.into_iter().flatten().map(|set| set.join(name)).find(|path| path.exists());
    if found.is_none() {
        // Writes past the test harness, which hides the output of passing tests.
        let _ = writeln!(std::io::stderr(), "SKIPPED: no reference data {name}");
    }
    found
}
