//! Opens the access log of `forebay serve`.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use forebay_server::{AccessLog, AccessLogTarget};
use signal_hook::consts::SIGHUP;

use crate::failure::{Outcome, usage};

/// Opens the access log, and has SIGHUP open its file again.
pub fn open(path: &Path) -> Outcome<Arc<AccessLog>> {
    let target = match path.to_str() {
        Some("-") => AccessLogTarget::StandardOutput,
        _ => AccessLogTarget::File(path.to_owned()),
    };
    let reopens = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGHUP, reopens.clone()).context("SIGHUP cannot be handled")?;
    let name = || format!("--access-log {}", path.display());
    match AccessLog::open(target, reopens) {
        Ok(log) => Ok(Arc::new(log)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            usage(format!("{}: {error}", name()))
        }
        Err(error) => Err(anyhow::Error::from(error).context(name()).into()),
    }
}
