//! Fault profiles of the simulated disk.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use forebay_engine::EngineError;
use forebay_engine::load::LoadError;
use forebay_model::ModelError;
use forebay_store::{Fault, FaultKind, FaultPlan, FileIndex, ReadError};
use forebay_stream::StreamError;

use crate::random::Random;

/// Kind of disk that a session reads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultProfile {
    /// A healthy disk.
    Fair,
    /// Now and then: short reads, errors, late answers, and flipped bits where there are checksums.
    Intermittent,
    /// The same faults in every second request, or in every eighth if bits flip, because bytes that are wrong twice are
    /// refused.
    Storm,
    /// Intermittent faults. In addition, the disk is sometimes gone for longer than retries last.
    Outage,
    /// Reads of some ranges take tens of milliseconds.
    Slow,
    /// One request never ends.
    DeadRead,
}

/// Number of ranges that are slow.
const SLOW_PLACES: u32 = 12;
/// Number of bytes of a range that is slow or dead.
const PLACE_BYTES: u64 = 64 << 10;

impl FaultProfile {
    pub fn any(random: &mut Random) -> FaultProfile {
        match random.next() % 12 {
            0 => FaultProfile::Fair,
            1..4 => FaultProfile::Intermittent,
            4..6 => FaultProfile::Storm,
            6..9 => FaultProfile::Outage,
            9 | 10 => FaultProfile::Slow,
            _ => FaultProfile::DeadRead,
        }
    }

    /// Returns the faults of such a disk that holds the model at `path`.
    pub fn faults(self, path: &Path, random: &mut Random) -> Option<FaultPlan> {
        // Without checksums, a flipped bit could not be detected and would give wrong tokens.
        let random_flips = path.extension().is_some_and(|end| end == "fbay");
        let seed = u64::from(random.next());
        let plan = FaultPlan { random_flips, seed, ..FaultPlan::default() };
        match self {
            FaultProfile::Fair => None,
            FaultProfile::Intermittent => Some(FaultPlan { random_one_in: 20, ..plan }),
            FaultProfile::Storm => {
                Some(FaultPlan { random_one_in: if random_flips { 8 } else { 2 }, ..plan })
            }
            FaultProfile::Outage => {
                let outage_one_in = 4000 << (random.next() % 4);
                Some(FaultPlan { random_one_in: 50, outage_one_in, ..plan })
            }
            FaultProfile::Slow => {
                let faults = (0..SLOW_PLACES).map(|_| {
                    let delay = Duration::from_millis(u64::from(random.next() % 30));
                    fault(path, FaultKind::Delay(delay), 5, random)
                });
                Some(FaultPlan { faults: faults.collect(), ..plan })
            }
            FaultProfile::DeadRead => {
                let faults = vec![fault(path, FaultKind::Never, 1, random)];
                Some(FaultPlan { faults, ..plan })
            }
        }
    }
}

/// Creates a fault at a random place in the model's file, or in the first file of a folder.
fn fault(path: &Path, kind: FaultKind, times: u32, random: &mut Random) -> Fault {
    let bytes = std::fs::metadata(path).map_or(0, |data| data.len()).max(PLACE_BYTES);
    let start = (u64::from(random.next()) << 32 | u64::from(random.next())) % bytes;
    Fault { file: FileIndex(0), range: start..start + PLACE_BYTES, kind, spares: 0, times }
}

/// State of a session after a call that met a disk fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The session can be used again.
    Usable,
    /// Memory was lost to a read that did not end, so another session must be opened.
    Stopped,
}

/// Names a disk error and returns the state it leaves the session in. Returns an error if the disk did not cause
/// `error`, or if its message does not say where the fault happened.
pub fn name(error: EngineError, path: &Path) -> Result<(&'static str, After)> {
    let (cause, opening) = match &error {
        EngineError::Stream(error) | EngineError::Model(ModelError::Stream(error)) => match error {
            StreamError::Read { cause, .. } => (cause, false),
            StreamError::Stopped { .. } => return Ok(("stopped", After::Stopped)),
            _ => return Err(error_at(error.to_string(), path)),
        },
        EngineError::Load(error) => match &**error {
            LoadError::Read { cause, .. } => (cause, true),
            _ => return Err(error_at(error.to_string(), path)),
        },
        _ => return Err(error_at(error.to_string(), path)),
    };
    let (what, after) = match cause {
        ReadError::Io { .. } => ("failed reads", After::Usable),
        ReadError::Stalled { .. } => ("reads that did not end", After::Stopped),
        ReadError::Corrupt { .. } => ("wrong checksums", After::Usable),
        _ => return Err(error_at(error.to_string(), path)),
    };
    let text = error.to_string();
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // A folder has several files.
    if !(path.is_dir() || text.contains(&file)) || !text.contains("byte") {
        return Err(error_at(format!("an error that does not say where: {text}"), path));
    }
    Ok((if opening { "at the start" } else { what }, after))
}

fn error_at(text: String, path: &Path) -> anyhow::Error {
    anyhow::anyhow!("{}: {text}", path.display())
}
