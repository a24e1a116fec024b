//! Messages for people, which go to Python's logger `forebay`.

use pyo3::prelude::*;

/// Logs a warning. The caller holds the GIL, so this is for calls of Python only.
pub fn warn(py: Python<'_>, text: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("forebay",))?;
    logger.call_method1("warning", ("%s", text)).map(drop)
}
