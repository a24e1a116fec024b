//! Batches: files of requests, and files of their answers.
//!
//! `lines.rs` and `journal.rs` are also those of `forebay batch`. The other files are OpenAI's interface of batches.

mod answer;
mod journal;
mod lines;
mod outputs;
mod record;
mod run;

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use forebay_requests::fields::BATCH;
use serde::Deserialize;
use serde_json::{Map, Value};

pub use self::journal::{Journal, JournalError};
pub use self::lines::{Line, Place, Unusable, Url, answered, is_error, scan};
pub use self::record::Batch;
use self::record::{Counts, Status, Times};
pub use self::run::{answers_of, run};
use crate::app::App;
use crate::body::{Received, read};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::files::{self, Disk, ListQuery, on_disk};
use crate::openai::Failure;
use crate::stream;

/// How many batches a page usually has, and the most.
const PAGE_USUAL: usize = 20;
const PAGE_MAX: usize = 100;
/// Most seconds in which a batch has to be complete.
const WINDOW_MAX: u64 = 14 * 24 * 3600;
/// Most pairs of metadata, and most characters of a name and of a value, as in OpenAI's interface.
const METADATA_MAX: (usize, usize, usize) = (16, 64, 512);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExpiresAfter {
    /// `created_at`.
    anchor: String,
    seconds: u64,
}

/// A batch that is to be made.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    input_file_id: String,
    /// `/v1/chat/completions`, `/v1/completions` or `/v1/embeddings`.
    endpoint: String,
    /// Time from `1s` to `14d`.
    completion_window: String,
    metadata: Option<Map<String, Value>>,
    output_expires_after: Option<ExpiresAfter>,
}

fn wrong(param: &'static str, why: impl Into<String>) -> ApiError {
    ApiError { param: Some(param.into()), ..ApiError::bad(why) }
}

impl Body {
    /// Makes a batch.
    fn batch(self, owner: String, order: u64) -> Result<Batch, ApiError> {
        let endpoint = Url::of(&self.endpoint).ok_or_else(|| {
            let why = "endpoint must be /v1/chat/completions, /v1/completions or /v1/embeddings";
            wrong("endpoint", format!("{why}: batches do not support {:?}", self.endpoint))
        })?;
        let window = window(&self.completion_window).ok_or_else(|| {
            let why = "completion_window must be a time such as 24h, from 1s to 14d";
            wrong("completion_window", why)
        })?;
        let outputs_stay = match self.output_expires_after {
            None => None,
            Some(after) if after.anchor == "created_at" => Some(files::check_stay(after.seconds)?),
            Some(_) => {
                let why = "output_expires_after.anchor must be created_at";
                return Err(wrong("output_expires_after", why));
            }
        };
        if let Some(metadata) = &self.metadata {
            check_metadata(metadata)?;
        }
        let now = stream::now();
        Ok(Batch {
            id: format!("batch_{}", stream::unique()),
            owner,
            order,
            endpoint,
            input_file_id: self.input_file_id,
            completion_window: self.completion_window,
            metadata: self.metadata,
            status: Status::Validating,
            end: Status::Completed,
            errors: Vec::new(),
            outputs: [(); 2].map(|()| format!("file-{}", stream::unique())),
            output_file_id: None,
            error_file_id: None,
            times: Times { created_at: now, expires_at: now + window, ..Times::default() },
            counts: Counts::default(),
            outputs_stay,
        })
    }
}

/// Reads a time such as `24h`, in seconds.
fn window(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let unit = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => return None,
    };
    let seconds = number.parse::<u64>().ok()?.checked_mul(unit)?;
    (1..=WINDOW_MAX).contains(&seconds).then_some(seconds)
}

fn check_metadata(metadata: &Map<String, Value>) -> Result<(), ApiError> {
    let (pairs, name_max, value_max) = METADATA_MAX;
    let fits = |(name, value): (&String, &Value)| {
        let value = value.as_str().map(|value| value.chars().count());
        name.chars().count() <= name_max && value.is_some_and(|length| length <= value_max)
    };
    match metadata.len() <= pairs && metadata.iter().all(fits) {
        true => Ok(()),
        false => Err(wrong(
            "metadata",
            format!(
                "metadata may have {pairs} pairs of a name and a text, of {name_max} and {value_max} characters"
            ),
        )),
    }
}

/// `POST /v1/batches`.
pub async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, Failure> {
    let own = caller.clone();
    let create = move |disk: &Arc<Disk>| {
        let body: Body = read(&BATCH, &body)?;
        let batch = body.batch(own.owner().to_owned(), disk.next_order())?;
        Ok(disk.add_batch(batch)?.object())
    };
    Ok(Json(on_disk(&app, &caller, create).await?))
}

/// `GET /v1/batches`.
pub async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: ListQuery,
) -> Result<Json<Value>, Failure> {
    let own = caller.clone();
    let page = move |disk: &Arc<Disk>| {
        let batches = disk.batches(own.owner());
        let batches = batches.iter().map(|batch| (batch.id.clone(), batch.object())).collect();
        query.page(batches, PAGE_USUAL, PAGE_MAX)
    };
    Ok(Json(on_disk(&app, &caller, page).await?))
}

/// `GET /v1/batches/{id}`.
pub async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    let own = caller.clone();
    let find = move |disk: &Arc<Disk>| Ok(disk.batch(own.owner(), &id)?.object());
    Ok(Json(on_disk(&app, &caller, find).await?))
}

/// `POST /v1/batches/{id}/cancel`.
pub async fn cancel(
    State(app): State<Arc<App>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    let own = caller.clone();
    let cancel = move |disk: &Arc<Disk>| {
        disk.batch(own.owner(), &id)?;
        disk.change(&id, Batch::cancel)?;
        Ok(disk.batch(own.owner(), &id)?.object())
    };
    Ok(Json(on_disk(&app, &caller, cancel).await?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows() {
        for (text, seconds) in [("24h", Some(86400)), ("1s", Some(1)), ("14d", Some(1_209_600))] {
            assert_eq!(window(text), seconds, "{text}");
        }
        for text in ["", "h", "0h", "15d", "24", "-1h", "24H", "1é", "é"] {
            assert_eq!(window(text), None, "{text}");
        }
    }
}
