//! Whether the server is ready: it loads its first models, it answers, or it ends.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tokio::sync::watch;

use crate::access;
use crate::app::App;
use crate::error::ApiError;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Loads,
    Answers,
    Ends,
}

/// What the server does now.
pub struct Lifetime(watch::Sender<Stage>);

impl Default for Lifetime {
    fn default() -> Lifetime {
        Lifetime(watch::Sender::new(Stage::Loads))
    }
}

impl Lifetime {
    /// Notes that the first models are loaded.
    pub fn begin(&self) {
        self.0.send_if_modified(|stage| {
            let loads = *stage == Stage::Loads;
            if loads {
                *stage = Stage::Answers;
            }
            loads
        });
    }

    /// Notes that the server ends.
    pub fn end(&self) {
        self.0.send_replace(Stage::Ends);
    }

    /// Waits until the first models are loaded. Returns false if the server ends.
    async fn answers(&self) -> bool {
        let mut stage = self.0.subscribe();
        // The sender lives as long as this.
        stage.wait_for(|stage| *stage != Stage::Loads).await.is_ok_and(|of| *of == Stage::Answers)
    }
}

/// `GET /health` and `GET /ready`: whether the server takes requests. Models that are not loaded are loaded on request.
pub async fn health(State(app): State<Arc<App>>) -> Response {
    let stage = *app.lifetime.0.borrow();
    let status = match stage {
        Stage::Loads => "loading",
        Stage::Answers => return Json(json!({ "status": "ok" })).into_response(),
        Stage::Ends => "stopping",
    };
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": status }))).into_response()
}

/// Lets requests wait until the first models are loaded, and refuses them when the server ends. The connection ends then, too.
pub async fn check(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let tells_state = path == "/metrics" || access::is_public(path);
    let mut response = if tells_state || app.lifetime.answers().await {
        next.run(request).await
    } else {
        let why = "the server ends and takes no more requests";
        access::refused(path, ApiError::new(StatusCode::SERVICE_UNAVAILABLE, why))
    };
    if *app.lifetime.0.borrow() == Stage::Ends {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}
