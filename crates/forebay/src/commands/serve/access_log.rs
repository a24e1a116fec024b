//! Opens the access log of `forebay serve`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use forebay_server::{AccessLog, AccessLogTarget};
use signal_hook::consts::SIGHUP;

/// Opens the access log, and has SIGHUP open its file again.
pub fn open(path: &Path) -> anyhow::Result<Arc<AccessLog>> {
    let target = match path.to_str() {
        Some("-") => AccessLogTarget::StandardOutput,
        _ => AccessLogTarget::File(path.to_owned()),
    };
    let reopens = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGHUP, reopens.clone()).context("SIGHUP cannot be handled")?;
    let log = AccessLog::open(target, reopens);
    Ok(Arc::new(log.with_context(|| format!("--access-log {}", path.display()))?))
}
