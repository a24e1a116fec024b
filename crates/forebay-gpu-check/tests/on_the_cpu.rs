//! Tests that need no GPU.

mod soak;

use std::path::Path;
use std::process::Command;

#[test]
fn a_short_soak() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let mut command = Command::new(env!("CARGO_BIN_EXE_soak"));
    command.args(["--context", "600", "--rounds", "40"]);
    soak::passes(&mut command, &fixtures);
}
