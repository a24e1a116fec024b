//! The folder for what the program keeps between its runs.

use std::path::PathBuf;

/// Returns `forebay` below `$XDG_STATE_HOME`, or below `~/.local/state`. Returns `None` if neither variable is set.
pub fn folder() -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let state = named("XDG_STATE_HOME").filter(|path| path.is_absolute());
    let home = || named("HOME").map(|home| home.join(".local/state"));
    Some(state.or_else(home)?.join("forebay"))
}
