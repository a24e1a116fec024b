//! Sessions that share a GPU, as the models of a server do: each takes the memory that was planned, and computes the same.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use forebay_engine::plan::{OpenGpu, PlannedModel};
use forebay_engine::{CpuOffload, DeviceChoice, SessionOptions};

use crate::harness::Outcome;
use crate::sessions::{CONTEXT, logits, open};

/// Opens a model twice beside itself, and once more after the first two are closed. Every session gets exactly the budget for
/// the whole model, so that nothing else may count against it.
///
/// # Errors
/// Returns an error if a session takes other memory than planned.
pub fn check(path: &Path, ids: &[u32], ordinal: usize) -> Result<Outcome> {
    let options = SessionOptions {
        device: DeviceChoice::Cuda(ordinal),
        context: Some(CONTEXT),
        cpu_offload: CpuOffload::Never,
        ..SessionOptions::default()
    };
    let gpu = OpenGpu::open(&options).context("there is a GPU")?;
    let whole = PlannedModel::open(path)?.whole(&options, Some(&gpu))?;
    let in_room = || {
        let vram_bytes = Some(gpu.budget_bytes(whole.vram_bytes)?);
        let session = open(path, SessionOptions { vram_bytes, ..options.clone() })?;
        ensure!(session.memory() == whole, "{:?} instead of {whole:?}", session.memory());
        Ok(session)
    };
    let expected = logits(&mut open(path, options.clone())?, ids)?;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    let mut sessions = [in_room()?, in_room()?];
    for index in [0, 1, 0] {
        let found = logits(&mut sessions[index], ids)?;
        worst = worst.worse(Outcome::same(&found, &expected).at(&format!("session {index}")));
    }
    drop(sessions);
    Ok(worst.worse(Outcome::same(&logits(&mut in_room()?, ids)?, &expected).at("session 2")))
}
