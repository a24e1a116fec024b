//! Answers the requests of a batch.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use forebay_requests::{Identity, answer};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::lines::{Line, Place, Url};
use super::record::Batch;
use crate::app::App;
use crate::caller::Caller;
use crate::embeddings;
use crate::error::ApiError;
use crate::files::read_at;
use crate::models::Lease;
use crate::openai;
use crate::run::Answers;

/// Priority of requests of batches. Those of clients that wait have 0 and go first.
const PRIORITY: i32 = -1;
/// Requests of a batch in work before its model says how many it runs, and the most.
const AT_A_TIME: usize = 4;
const AT_A_TIME_MAX: usize = 64;
/// Time before a request that the engine had no place for is tried again.
const AGAIN: Duration = Duration::from_millis(500);
/// Time before a request whose model is not served any more is tried again.
const MODEL_AGAIN: Duration = Duration::from_secs(10);
/// How often a request is tried whose engine has ended.
const TRIES_MAX: u32 = 5;

/// The requests of a batch.
pub struct Requests {
    app: Arc<App>,
    /// Who made the batch.
    owner: String,
    input: Arc<File>,
    places: Vec<Place>,
    id: String,
    input_file_id: String,
    created: u64,
    url: Url,
    at_a_time: AtomicUsize,
}

impl Requests {
    pub fn new(app: Arc<App>, batch: &Batch, input: File, places: Vec<Place>) -> Requests {
        Requests {
            app,
            owner: batch.owner.clone(),
            input: Arc::new(input),
            places,
            id: batch.id.clone(),
            input_file_id: batch.input_file_id.clone(),
            created: batch.times.created_at,
            url: batch.endpoint,
            at_a_time: AtomicUsize::new(AT_A_TIME),
        }
    }

    /// Returns how many requests should be in work.
    pub fn at_a_time(&self) -> usize {
        self.at_a_time.load(Ordering::Relaxed)
    }

    /// Returns the number of a request and its line of the output.
    pub async fn answer(&self, number: usize) -> (usize, Value) {
        let unique = unique(&self.id, number);
        let caller = self.app.rules.caller_of_batch(&self.owner);
        let line =
            match read_line(&self.app, &caller, &self.input, self.places[number], self.url).await {
                Ok(line) => Arc::new(line),
                Err(error) => {
                    let lost = Line { custom_id: String::new(), url: self.url, body: Value::Null };
                    return (number, lost.answered(&unique, 500, openai::error_body(&error)));
                }
            };
        let mut tries = 0;
        loop {
            let error = match self.run(&caller, number, &line, &unique).await {
                Ok(body) => return (number, line.answered(&unique, 200, body)),
                Err(error) => error,
            };
            let pause = match (error.code, error.status) {
                (Some("queue_full"), _) => AGAIN,
                // The batch was checked, so an earlier server had the model.
                (Some("model_not_found"), _) => MODEL_AGAIN,
                (_, StatusCode::SERVICE_UNAVAILABLE) if tries < TRIES_MAX => {
                    tries += 1;
                    AGAIN * tries
                }
                (_, status) => {
                    let body = openai::error_body(&error);
                    return (number, line.answered(&unique, status.as_u16(), body));
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Runs a request, and returns the body of its answer.
    async fn run(
        &self,
        caller: &Caller,
        number: usize,
        line: &Arc<Line>,
        unique: &str,
    ) -> Result<Value, ApiError> {
        let Some(endpoint) = line.url.endpoint() else {
            return embeddings::answer(&self.app, caller, line.body.clone(), PRIORITY).await;
        };
        let (own, of) = (self.app.clone(), line.clone());
        let wanted = move || {
            let wanted = of.wanted(endpoint)?;
            Ok((own.models.entry(wanted.model.as_deref())?, wanted))
        };
        let (entry, wanted) = self.app.work(caller, wanted).await?;
        let lease = self.app.models.get(caller, entry, None).await?;
        self.note_places(&lease);
        let (own, seed) = (lease.clone(), self.seed(number));
        let prepare = move |wanted| own.text.prepare_with(wanted, Some(own.context), seed);
        let mut prepared = self.app.prepare_wanted(caller, wanted, prepare).await?;
        prepared.request.priority = PRIORITY;
        let choices = Answers::start(caller, &lease, &prepared).await?.all().await?;
        let identity = Identity { unique, created: self.created, model: &lease.name };
        Ok(answer::whole(endpoint, &identity, &choices))
    }

    /// Keeps the engine's places taken, and as many requests waiting.
    fn note_places(&self, lease: &Lease) {
        let places = 2 * lease.worker.report().running_max;
        self.at_a_time.store(places.clamp(1, AT_A_TIME_MAX), Ordering::Relaxed);
    }

    /// Returns the seed for a request that names none. It is the same whenever the request runs.
    fn seed(&self, number: usize) -> u64 {
        let hash = Sha256::digest(format!("{} {number}", self.input_file_id));
        let (first, _) = hash.split_first_chunk().expect("a hash has 32 bytes");
        u64::from_le_bytes(*first)
    }
}

/// Returns a text that no other answer has.
pub fn unique(batch: &str, number: usize) -> String {
    format!("{}_{}", batch.trim_start_matches("batch_"), number + 1)
}

/// Reads a line of the input.
async fn read_line(
    app: &App,
    caller: &Caller,
    input: &Arc<File>,
    place: Place,
    url: Url,
) -> Result<Line, ApiError> {
    let input = input.clone();
    app.work(caller, move || line_at(&input, place, url)).await
}

/// Reads a line of the input, which was read before.
///
/// # Errors
/// Returns an error if the file was changed.
pub fn line_at(input: &File, place: Place, url: Url) -> Result<Line, ApiError> {
    let bytes = read_at(input, place.offset, place.length)?;
    let text = String::from_utf8(bytes).map_err(|error| error.to_string());
    let line = text.and_then(|text| Line::read(&text, &[url]));
    line.map_err(|why| {
        let why = format!("the input file has changed: {why}");
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why)
    })
}
