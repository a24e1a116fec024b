//! The state of a batch, as it is stored and as clients get it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::lines::Url;
use crate::error::ApiError;
use crate::stream;

/// Where a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The input is being read.
    Validating,
    Failed,
    InProgress,
    /// The outputs are being written.
    Finalizing,
    Completed,
    Expired,
    Cancelling,
    Cancelled,
}

/// Something that is wrong with a batch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Problem {
    pub code: String,
    pub message: String,
    pub param: Option<String>,
    pub line: Option<u64>,
}

impl Problem {
    pub fn new(code: &str, message: impl Into<String>) -> Problem {
        Problem { code: code.to_owned(), message: message.into(), param: None, line: None }
    }
}

/// How many requests are answered.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Counts {
    pub total: u64,
    pub completed: u64,
    pub failed: u64,
}

/// When things happened to a batch, in seconds since 1970.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Times {
    pub created_at: u64,
    pub expires_at: u64,
    pub in_progress_at: Option<u64>,
    pub finalizing_at: Option<u64>,
    pub completed_at: Option<u64>,
    pub failed_at: Option<u64>,
    pub expired_at: Option<u64>,
    pub cancelling_at: Option<u64>,
    pub cancelled_at: Option<u64>,
}

/// A batch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Batch {
    pub id: String,
    /// Hash of the key whose client made it.
    pub owner: String,
    /// Number that grows from batch to batch.
    pub order: u64,
    pub endpoint: Url,
    pub input_file_id: String,
    pub completion_window: String,
    pub metadata: Option<Map<String, Value>>,
    pub status: Status,
    /// Status when the outputs are written.
    pub end: Status,
    pub errors: Vec<Problem>,
    /// Ids that the files of answers and of errors get, so that writing them twice makes no more files.
    pub outputs: [String; 2],
    pub output_file_id: Option<String>,
    pub error_file_id: Option<String>,
    pub times: Times,
    pub counts: Counts,
    /// Seconds for which its outputs stay.
    pub outputs_stay: Option<u64>,
}

impl Batch {
    /// Returns true if nothing more happens to the batch.
    pub fn is_finished(&self) -> bool {
        matches!(
            self.status,
            Status::Failed | Status::Completed | Status::Expired | Status::Cancelled
        )
    }

    /// Returns true if the batch still reads this file.
    pub fn uses(&self, file: &str) -> bool {
        !self.is_finished() && self.input_file_id == file
    }

    /// Begins to write the outputs, after which the batch has the status `end`. A batch that is being cancelled stays that.
    pub fn finalize(&mut self, end: Status) {
        if matches!(self.status, Status::Validating | Status::InProgress) {
            (self.status, self.end) = (Status::Finalizing, end);
            self.times.finalizing_at = Some(stream::now());
        }
    }

    /// Ends the batch because of a problem.
    pub fn fail(&mut self, problem: Problem) {
        self.errors.push(problem);
        self.status = Status::Failed;
        self.times.failed_at = Some(stream::now());
    }

    /// Ends the batch after its outputs were written.
    pub fn finish(&mut self) {
        let now = Some(stream::now());
        let times = &mut self.times;
        *match self.end {
            Status::Cancelled => &mut times.cancelled_at,
            Status::Expired => &mut times.expired_at,
            Status::Failed => &mut times.failed_at,
            _ => &mut times.completed_at,
        } = now;
        self.status = self.end;
    }

    /// Begins to cancel the batch.
    ///
    /// # Errors
    /// Returns an error if it is too late.
    pub fn cancel(&mut self) -> Result<(), ApiError> {
        match self.status {
            Status::Validating | Status::InProgress => {
                (self.status, self.end) = (Status::Cancelling, Status::Cancelled);
                self.times.cancelling_at = Some(stream::now());
                Ok(())
            }
            Status::Cancelling | Status::Cancelled => Ok(()),
            status => {
                let why = format!("a batch with the status {} cannot be cancelled", json!(status));
                Err(ApiError::new(axum::http::StatusCode::CONFLICT, why))
            }
        }
    }

    /// Returns the batch in the form of the OpenAI API.
    pub fn object(&self) -> Value {
        let Batch { times, counts, .. } = self;
        let errors = match self.errors.is_empty() {
            true => Value::Null,
            false => json!({ "object": "list", "data": self.errors }),
        };
        json!({
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": times.created_at,
            "in_progress_at": times.in_progress_at,
            "expires_at": times.expires_at,
            "finalizing_at": times.finalizing_at,
            "completed_at": times.completed_at,
            "failed_at": times.failed_at,
            "expired_at": times.expired_at,
            "cancelling_at": times.cancelling_at,
            "cancelled_at": times.cancelled_at,
            "request_counts": counts,
            "metadata": self.metadata,
        })
    }
}
