//! Locates the reference data.

use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Returns the folder `name` of the reference data. It is below `FOREBAY_FIXTURES`, else in the
/// full set beside the project, else in the small set inside it. If it is nowhere, prints a message
/// and returns `None`.
pub fn fixtures(name: &str) -> Option<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let roots = std::env::var_os("FOREBAY_FIXTURES")
        .map(PathBuf::from)
        .into_iter()
        .chain([workspace.join("../shared/fixtures"), workspace.join("fixtures")]);
    let found = roots.map(|root| root.join(name)).find(|folder| folder.is_dir());
    if found.is_none() {
        // Write to stderr directly, because the test harness captures what passing tests print.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: no reference data {name:?}; set FOREBAY_FIXTURES to its folder"
        );
    }
    found
}
