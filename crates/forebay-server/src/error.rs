//! Errors of requests, independent of the interface that reports them.

use std::borrow::Cow;
use std::marker::PhantomData;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use forebay_engine::EngineError;
use forebay_format::in_words;
use forebay_model::ModelError;
use forebay_requests::{AnswerFailure, NOT_NOW, Refusal, TOO_LONG};
use serde_json::Value;

/// Reason why a request has no answer.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// Field of the request that is wrong, as in `messages[1].content`.
    pub param: Option<Cow<'static, str>>,
    pub code: Option<&'static str>,
}

impl ApiError {
    /// Creates an error. Errors of the system in the message are replaced by plain words.
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        let message: String = message.into();
        ApiError { status, message: in_words(&message), param: None, code: None }
    }

    /// Creates the error of a request that cannot be understood or followed.
    pub fn bad(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// Creates the error of a request whose engine has ended: the server stops, or the model failed.
    pub fn stopped() -> ApiError {
        let why = "the model's engine has ended: the server stops, or the model failed and is loaded again at the next request";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why)
    }

    /// Creates the error of a request that the engine refuses.
    pub fn of_engine(error: EngineError) -> ApiError {
        let (status, code) = match &error {
            EngineError::Queue(_) => (StatusCode::TOO_MANY_REQUESTS, Some("queue_full")),
            EngineError::Model(ModelError::ContextFull { .. }) => {
                (StatusCode::BAD_REQUEST, Some(TOO_LONG))
            }
            EngineError::EmptyPrompt | EngineError::Model(ModelError::TokenOutOfRange { .. }) => {
                (StatusCode::BAD_REQUEST, None)
            }
            _ => (StatusCode::INTERNAL_SERVER_ERROR, None),
        };
        ApiError { code, ..ApiError::new(status, error.to_string()) }
    }

    /// Returns the kind of the error by Anthropic's names.
    pub fn anthropic_kind(&self) -> &'static str {
        match self.status {
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            _ => self.kind(),
        }
    }

    /// Returns the kind of the error by OpenAI's names.
    pub fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        }
    }
}

/// The form in which an interface reports errors.
pub trait ErrorForm {
    fn body(error: &ApiError) -> Value;
}

/// An error that becomes a response in the form of an interface.
pub struct Failure<F> {
    error: ApiError,
    form: PhantomData<F>,
}

impl<E: Into<ApiError>, F> From<E> for Failure<F> {
    fn from(error: E) -> Failure<F> {
        Failure { error: error.into(), form: PhantomData }
    }
}

impl<F: ErrorForm> IntoResponse for Failure<F> {
    fn into_response(self) -> Response {
        (self.error.status, Json(F::body(&self.error))).into_response()
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        let Refusal { message, param, code } = refusal;
        let status = match code {
            Some(NOT_NOW) => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::BAD_REQUEST,
        };
        ApiError { param, code, ..ApiError::new(status, message) }
    }
}

impl From<AnswerFailure> for ApiError {
    fn from(failure: AnswerFailure) -> ApiError {
        match failure.is_of_request {
            true => ApiError::bad(failure.message),
            false => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, failure.message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_names_of_each_interface() {
        let kinds = |status| {
            let error = ApiError::new(status, "");
            (error.kind(), error.anthropic_kind())
        };
        let bad = "invalid_request_error";
        assert_eq!(kinds(StatusCode::BAD_REQUEST), (bad, bad));
        assert_eq!(kinds(StatusCode::FORBIDDEN), (bad, "permission_error"));
        assert_eq!(kinds(StatusCode::NOT_FOUND), ("not_found_error", "not_found_error"));
        assert_eq!(kinds(StatusCode::PAYLOAD_TOO_LARGE), (bad, "request_too_large"));
        assert_eq!(kinds(StatusCode::SERVICE_UNAVAILABLE), ("api_error", "overloaded_error"));
    }

    #[test]
    fn errors_of_the_system_are_in_plain_words() {
        let message = format!("a.gguf: {}", std::io::Error::from_raw_os_error(2));
        assert!(message.contains("os error 2"), "{message}");
        let said = "a.gguf: no such file or folder: check the path";
        let failure = AnswerFailure { message: message.clone(), is_of_request: false };
        assert_eq!(ApiError::from(failure).message, said);
        let refusal = Refusal { message: message.clone(), param: None, code: None };
        assert_eq!(ApiError::from(refusal).message, said);
        assert_eq!(ApiError::bad(message).message, said);
    }

    #[test]
    fn a_refusal_for_now_can_be_tried_again() {
        let refusal = |code| Refusal { message: String::new(), param: None, code };
        assert_eq!(ApiError::from(refusal(None)).status, StatusCode::BAD_REQUEST);
        assert_eq!(ApiError::from(refusal(Some(NOT_NOW))).status, StatusCode::SERVICE_UNAVAILABLE);
    }
}
