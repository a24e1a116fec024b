//! Runs batches: several at a time, and several requests of each.
//!
//! The state of a batch and its answers are on the disk before anything else happens, so that a batch goes on after the server
//! was killed. A request that was running then is answered again, with the same seed.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use serde_json::{Value, json};

use super::answer::Requests;
use super::journal::{Journal, JournalError};
use super::lines::{Place, Unusable, is_error, scan};
use super::outputs;
use super::record::{Batch, Problem, Status};
use crate::app::App;
use crate::error::ApiError;
use crate::files::{Disk, StoreError};
use crate::stream;

/// Most batches that run at a time. Others wait with the status `validating`.
const BATCHES_MAX: usize = 8;
/// Most requests of a batch, as in OpenAI's interface.
const REQUESTS_MAX: usize = 50_000;
/// Most models that the requests of a batch name.
const MODELS_MAX: usize = 64;
/// Time between two looks at files whose time is over.
const LOOK_EVERY: Duration = Duration::from_secs(30);

impl From<JournalError> for ApiError {
    fn from(error: JournalError) -> ApiError {
        tracing::error!("a batch: {error}");
        let why = "the journal of the batch cannot be used; the server's log says why";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why)
    }
}

type Running = Pin<Box<dyn Future<Output = String> + Send>>;

/// Runs all batches until the server ends.
pub async fn run(app: Arc<App>) {
    let mut changed = app.storage.watch();
    let (own, server) = (app.clone(), app.rules.server_itself());
    let opened = app.work(&server, move || {
        own.storage.open_existing();
        Ok(())
    });
    // The error of a panic is logged.
    let _ = opened.await;
    let mut running: FuturesUnordered<Running> = FuturesUnordered::new();
    // The owner of each batch that runs.
    let mut names: HashMap<String, String> = HashMap::new();
    let several = app.rules.keys.count() > 1;
    loop {
        changed.mark_unchanged();
        let own = app.clone();
        let look = move || {
            Ok(own.storage.opened().map(|disk| {
                disk.remove_expired();
                (disk.unfinished(), disk)
            }))
        };
        if let Ok(Some((batches, disk))) = app.work(&server, look).await {
            for batch in batches {
                let waits =
                    batch.status != Status::Cancelling && !may_run(&names, &batch.owner, several);
                if !waits && !names.contains_key(&batch.id) {
                    names.insert(batch.id.clone(), batch.owner.clone());
                    let (app, disk) = (app.clone(), disk.clone());
                    running.push(Box::pin(advance(app, disk, batch.id)));
                }
            }
        }
        tokio::select! {
            Some(id) = running.next() => { names.remove(&id); }
            _ = changed.changed() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}

/// Returns true if one more batch of this owner may run. Owners have as many as are left for others, if there are others.
fn may_run(running: &HashMap<String, String>, owner: &str, has_several_owners: bool) -> bool {
    let left = BATCHES_MAX.saturating_sub(running.len());
    let own = running.values().filter(|of| *of == owner).count();
    left > 0 && (!has_several_owners || own < left)
}

/// Does everything that is left to do for a batch, and returns its id.
async fn advance(app: Arc<App>, disk: Arc<Disk>, id: String) -> String {
    loop {
        let Some(batch) = state(&app, &disk, &id).await else { return id };
        let caller = app.rules.caller_of_batch(&batch.owner);
        let done = match batch.status {
            Status::Validating => validate(&app, &disk, batch).await,
            Status::InProgress => answer(&app, &disk, batch).await,
            Status::Finalizing | Status::Cancelling => {
                let disk = disk.clone();
                app.work(&caller, move || outputs::write(&disk, &batch)).await
            }
            _ => return id,
        };
        if let Err(error) = done {
            tracing::error!("{id}: {error}");
            let problem = Problem::new("server_error", error.message);
            let (own, name) = (disk.clone(), id.clone());
            let failed = app.work(&caller, move || {
                own.change(&name, |batch| {
                    batch.fail(problem);
                    Ok(())
                })
            });
            if failed.await.is_err() {
                // The disk takes nothing more. The next start goes on with the batch.
                std::future::pending::<()>().await;
            }
        }
    }
}

async fn state(app: &App, disk: &Arc<Disk>, id: &str) -> Option<Batch> {
    let (disk, id) = (disk.clone(), id.to_owned());
    let look = move || Ok(disk.state_of(&id));
    app.work(&app.rules.server_itself(), look).await.ok().flatten()
}

/// Checks the input of a batch.
async fn validate(app: &Arc<App>, disk: &Arc<Disk>, batch: Batch) -> Result<(), ApiError> {
    let (own, disk) = (app.clone(), disk.clone());
    let caller = app.rules.caller_of_batch(&batch.owner);
    app.work(&caller, move || {
        let file = disk.content(&batch.input_file_id)?;
        let mut models: HashSet<String> = HashSet::new();
        let mut count = 0;
        let scanned = scan(BufReader::new(file), &[batch.endpoint], |_, line| {
            count += 1;
            if count > REQUESTS_MAX {
                return Err(format!("a batch may have {REQUESTS_MAX} requests"));
            }
            let model = line.body.get("model").and_then(Value::as_str).unwrap_or_default();
            if models.insert(model.to_owned()) {
                if models.len() > MODELS_MAX {
                    return Err(format!("a batch may name {MODELS_MAX} models"));
                }
                let name = Some(model).filter(|model| !model.is_empty());
                own.models.entry(name).map_err(|error| error.message)?;
            }
            Ok(())
        });
        let problem = match scanned {
            Ok(()) if count == 0 => Some(Problem::new("empty_file", "the file has no request")),
            Ok(()) => None,
            Err(Unusable::Line { number, why }) => {
                let problem = Problem::new("invalid_line", format!("line {number}: {why}"));
                Some(Problem { line: Some(number), ..problem })
            }
            Err(Unusable::Io(error)) => return Err(unreadable(&error)),
        };
        disk.change(&batch.id, |batch| {
            match problem {
                _ if batch.status != Status::Validating => {}
                Some(problem) => batch.fail(problem),
                None => {
                    batch.status = Status::InProgress;
                    batch.times.in_progress_at = Some(stream::now());
                    batch.counts.total = count as u64;
                }
            }
            Ok(())
        })
    })
    .await
}

fn unreadable(error: &std::io::Error) -> ApiError {
    tracing::error!("the input of a batch cannot be read: {error}");
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the input file cannot be read")
}

/// The input of a batch, and the answers so far.
pub struct Open {
    pub input: File,
    pub places: Vec<Place>,
    pub journal: Journal,
}

fn open_journal(path: &Path, batch: &Batch, requests: usize) -> Result<Journal, JournalError> {
    let settings = json!({ "batch": batch.id, "input": batch.input_file_id });
    Journal::open(path, settings, requests, batch.times.created_at, false)
}

/// Counts the answers in the journal of a batch: completed and failed ones.
///
/// # Errors
/// Returns an error if the journal cannot be read.
pub fn answers_of(journal: &Path, batch: &Batch) -> Result<(u64, u64), JournalError> {
    let requests = usize::try_from(batch.counts.total).unwrap_or(usize::MAX);
    let mut counts = (0, 0);
    open_journal(journal, batch, requests)?.each(|line| {
        *if is_error(line) { &mut counts.1 } else { &mut counts.0 } += 1;
        Ok::<_, JournalError>(())
    })?;
    Ok(counts)
}

/// Opens the input and the journal of a batch.
pub fn open(disk: &Disk, batch: &Batch) -> Result<Open, ApiError> {
    let input = disk.content(&batch.input_file_id)?;
    let mut places = Vec::new();
    let file = input.try_clone().map_err(|error| unreadable(&error))?;
    let scanned = scan(BufReader::new(file), &[batch.endpoint], |place, _| {
        places.push(place);
        Ok(())
    });
    if let Err(error) = scanned {
        let why = format!("the input file has changed: {error}");
        return Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why));
    }
    let path = disk.journal(&batch.id);
    let before = path.metadata().map_or(0, |about| about.len());
    let journal = open_journal(&path, batch, places.len())?;
    // A new one has a head, and one whose last line was cut has become shorter.
    disk.folder.count(&batch.owner, journal.bytes());
    disk.folder.release(&batch.owner, before);
    Ok(Open { input, places, journal })
}

/// Answers the requests that the journal lacks.
async fn answer(app: &Arc<App>, disk: &Arc<Disk>, batch: Batch) -> Result<(), ApiError> {
    let mut changed = app.storage.watch();
    // The batch may have changed since its state was read.
    changed.mark_changed();
    let (own, of) = (disk.clone(), batch.clone());
    let caller = app.rules.caller_of_batch(&batch.owner);
    let opened = app.work(&caller, move || open(&own, &of));
    let Open { input, places, mut journal } = opened.await?;
    let left: Vec<usize> = (0..places.len()).filter(|number| !journal.has(*number)).collect();
    let requests = Requests::new(app.clone(), &batch, input, places);
    let until = Duration::from_secs(batch.times.expires_at.saturating_sub(stream::now()));
    let over = tokio::time::sleep(until);
    tokio::pin!(over);
    let mut running = FuturesUnordered::new();
    let mut left = left.into_iter();
    let (end, problem) = loop {
        while running.len() < requests.at_a_time()
            && let Some(number) = left.next()
        {
            running.push(requests.answer(number));
        }
        tokio::select! {
            answered = running.next() => {
                let Some((number, line)) = answered else { break (Status::Completed, None) };
                match note(app, disk, &batch, journal, number, line).await? {
                    (own, None) => journal = own,
                    (_, Some(full)) => break (Status::Failed, Some(full)),
                }
            }
            _ = changed.changed() => {
                let now = state(app, disk, &batch.id).await;
                if now.is_none_or(|now| now.status != Status::InProgress) {
                    return Ok(());
                }
            }
            () = &mut over => break (Status::Expired, None),
        }
    };
    // Requests that still run end here.
    drop(running);
    let disk = disk.clone();
    app.work(&caller, move || {
        disk.change(&batch.id, |batch| {
            batch.errors.extend(problem);
            batch.finalize(end);
            Ok(())
        })
    })
    .await
}

/// Writes an answer into the journal. Returns the problem if there is no room for it.
async fn note(
    app: &App,
    disk: &Arc<Disk>,
    batch: &Batch,
    mut journal: Journal,
    number: usize,
    line: Value,
) -> Result<(Journal, Option<Problem>), ApiError> {
    let (disk, id, owner) = (disk.clone(), batch.id.clone(), batch.owner.clone());
    let caller = app.rules.caller_of_batch(&owner);
    app.work(&caller, move || {
        let before = journal.bytes();
        // The number of the request and two bytes around the answer.
        let bytes = line.to_string().len() as u64 + 22;
        match disk.folder.reserve(&owner, bytes) {
            Ok(()) => {}
            Err(full @ (StoreError::NoRoom { .. } | StoreError::NoRoomForKey { .. })) => {
                return Ok((journal, Some(Problem::new("files_full", full.to_string()))));
            }
            Err(error) => return Err(error.into()),
        }
        let added = journal.add(number, &line);
        disk.folder.release(&owner, bytes - (journal.bytes() - before));
        added?;
        let failed = line.pointer("/response/status_code").and_then(Value::as_u64) != Some(200);
        disk.note_answer(&id, failed);
        Ok((journal, None))
    })
    .await
}
