//! Writes the outputs of a batch: a file of answers and a file of errors.

use std::sync::Arc;

use forebay_engine::reached;

use super::answer::{line_at, unique};
use super::lines::is_error;
use super::record::{Batch, Status};
use super::run::{Open, open};
use crate::error::ApiError;
use crate::files::{Disk, Incoming, Naming, PURPOSE_OF_OUTPUT};

/// Writes the outputs, gives the batch its last status, and removes the journal. If the server is killed meanwhile, the next
/// one does the same again, and the files get the same ids.
///
/// # Errors
/// Returns an error if a file cannot be read or written.
pub fn write(disk: &Arc<Disk>, batch: &Batch) -> Result<(), ApiError> {
    if batch.end == Status::Cancelled && !disk.journal(&batch.id).exists() {
        return disk.change(&batch.id, |batch| {
            batch.finish();
            Ok(())
        });
    }
    let Open { input, places, mut journal } = open(disk, batch)?;
    let (mut answers, mut errors) = (None, None);
    let add = |to: &mut Option<Incoming>, line: &[u8]| -> Result<(), ApiError> {
        let file = match to {
            Some(file) => file,
            None => to.insert(disk.folder.begin_output(&batch.owner)?),
        };
        Ok(file.write(line)?)
    };
    let mut counts = (0, 0);
    journal.each(|line| match is_error(line) {
        true => {
            counts.1 += 1;
            add(&mut errors, line)
        }
        false => {
            counts.0 += 1;
            add(&mut answers, line)
        }
    })?;
    if batch.end == Status::Expired {
        let why = "the request was not run before the completion window ended";
        for (number, place) in places.iter().enumerate().filter(|(at, _)| !journal.has(*at)) {
            let line = line_at(&input, *place, batch.endpoint)?;
            let line = line.not_run(&unique(&batch.id, number), "batch_expired", why);
            counts.1 += 1;
            add(&mut errors, format!("{line}\n").as_bytes())?;
        }
    }
    let keep = |file: Option<Incoming>, id: &str, what: &str| -> Result<_, ApiError> {
        let Some(file) = file else { return Ok(None) };
        let naming = Naming {
            id: id.to_owned(),
            owner: batch.owner.clone(),
            filename: format!("{}_{what}.jsonl", batch.id),
            purpose: PURPOSE_OF_OUTPUT,
            stays: batch.outputs_stay,
        };
        Ok(Some(disk.keep(file, naming)?.id))
    };
    let output = keep(answers, &batch.outputs[0], "output")?;
    reached("batch output kept");
    let error = keep(errors, &batch.outputs[1], "error")?;
    reached("batch outputs kept");
    disk.change(&batch.id, |batch| {
        (batch.output_file_id, batch.error_file_id) = (output, error);
        (batch.counts.completed, batch.counts.failed) = counts;
        batch.finish();
        Ok(())
    })?;
    reached("batch finished");
    let bytes = journal.bytes();
    journal.remove()?;
    disk.folder.release(&batch.owner, bytes);
    Ok(())
}
