//! The planner's report of the loaded models.

use std::fmt;
use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::app::App;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::models::Status;
use crate::openai::Failure;

type Report = dyn Fn() -> Result<Value, String> + Send + Sync;

/// Makes the planner's report for a model when it is asked for.
#[derive(Clone)]
pub struct PlanReport(Arc<Report>);

impl PlanReport {
    /// Creates a report that `make` makes. If there is no plan, it returns why.
    pub fn new(make: impl Fn() -> Result<Value, String> + Send + Sync + 'static) -> PlanReport {
        PlanReport(Arc::new(make))
    }
}

impl Default for PlanReport {
    fn default() -> PlanReport {
        PlanReport::new(|| Err("nothing is known about this machine".to_owned()))
    }
}

impl fmt::Debug for PlanReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("PlanReport")
    }
}

#[derive(Deserialize)]
pub struct Asked {
    model: Option<String>,
}

/// `GET /plan`: where the planner puts the weights of each loaded model with the memory that it got, and how fast it should be.
pub async fn plan(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: Result<Query<Asked>, QueryRejection>,
) -> Result<Json<Value>, Failure> {
    let Query(Asked { model }) = query.map_err(|error| ApiError::bad(error.body_text()))?;
    let own = app.clone();
    let report = move || {
        let mut loaded = own.models.loaded();
        if let Some(name) = model {
            let name = own.models.entry(Some(&name))?.name;
            loaded.retain(|status| status.name == name);
            if loaded.is_empty() {
                let why = format!("model {name:?} is not loaded: GET /api/ps lists those that are");
                let error = ApiError::new(StatusCode::NOT_FOUND, why);
                return Err(ApiError {
                    param: Some("model".into()),
                    code: Some("model_not_loaded"),
                    ..error
                });
            }
        }
        Ok(loaded.iter().map(of_model).collect::<Value>())
    };
    Ok(Json(json!({ "models": app.work(&caller, report).await? })))
}

fn of_model(status: &Status) -> Value {
    let mut report = json!({
        "name": status.name,
        "memory": {
            "vram_bytes": status.memory.vram_bytes,
            "ram_bytes": status.memory.ram_bytes,
        },
    });
    match (status.outlook.report.0)() {
        Ok(Value::Object(planned)) => {
            if let Value::Object(report) = &mut report {
                report.extend(planned);
            }
        }
        Ok(_) => report["plan"] = Value::Null,
        Err(why) => (report["plan"], report["why_not"]) = (Value::Null, why.into()),
    }
    report
}
