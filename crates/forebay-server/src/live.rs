//! What the machine does now: rates, what limits them, and the uses of experts.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use forebay_engine::plan::{Planned, PredictedRate};
use forebay_engine::{KvTierStatistics, SessionStatistics};
use serde_json::{Value, json};

use crate::app::App;
use crate::models::Status;
use crate::plan::PlanReport;

/// What the machine can do, as far as it was measured.
#[derive(Clone, Debug, Default)]
pub struct Outlook {
    /// Plan of the model on this machine, with the gain of more memory.
    pub planned: Option<Planned>,
    /// Rate at which the disk reads.
    pub disk_bytes_per_second: Option<f64>,
    /// Rate of copies from RAM to the GPU.
    pub pcie_bytes_per_second: Option<f64>,
    /// Rate that is predicted for one request alone with the memory that the model got.
    pub predicted: PredictedRate,
    /// The planner's report for the memory that the model got.
    pub report: PlanReport,
}

/// `GET /live`: the models, and what each of them does.
pub async fn live(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_seconds": app.started.elapsed().as_secs_f64(),
        "models": app.models.loaded().iter().map(of_model).collect::<Value>(),
    }))
}

fn of_model(model: &Status) -> Value {
    let report = &model.report;
    let (session, live) = (&report.session, &report.live);
    let rates = live.rates(report.running == 0);
    let limit = rates.time.iter().max_by(|one, other| one.1.total_cmp(&other.1));
    let generate = model.outlook.planned.as_ref().map(|planned| &planned.plan.prediction.generate);
    json!({
        "name": model.name,
        "device": session.device,
        "context": model.context,
        "queue": {
            "running": report.running,
            "waiting": report.waiting,
            "running_max": report.running_max,
            "suspended": report.engine.suspended,
        },
        "rates": rates,
        "limited_by": limit.map(|(name, _)| name),
        "limits": {
            "disk_bytes_per_second": model.outlook.disk_bytes_per_second,
            "pcie_bytes_per_second": model.outlook.pcie_bytes_per_second,
        },
        "memory": memory(session, &report.kv_tiers),
        "kv_tiers": report.kv_tiers,
        "totals": {
            "prompt_tokens": report.engine.prompt_tokens,
            "generated_tokens": report.engine.generate_rows,
            "stream": session.stream,
            "device_experts": session.device_experts,
        },
        "predicted": generate.map(|speed| json!({ "rate": speed.shown, "limit": speed.limit })),
        "one_more_gib": model.outlook.planned.as_ref().map(|planned| planned.one_more_gib),
        "policy": session.policy,
        "experts": &*live.experts,
    })
}

/// Returns where the bytes of a model are.
fn memory(session: &SessionStatistics, kv_tiers: &KvTierStatistics) -> Value {
    let kv_in_ram = if session.vram.is_some() { 0 } else { session.kv_cache_bytes };
    let occupied = session.stream.as_ref().map(|stream| stream.peak_bytes.host_occupied);
    let ram_budget = match (&session.vram, &session.device_sub_layers) {
        (None, _) => Some(session.budget_bytes),
        (_, Some(device)) => Some(device.ram_budget_bytes),
        (_, None) => None,
    };
    json!({
        "vram": session.vram,
        "ram": {
            "budget_bytes": ram_budget,
            "weights_bytes": session.arena_bytes,
            "weights_used_bytes": occupied,
            "kv_cache_bytes": kv_in_ram,
            "kv_tier_bytes": kv_tiers.ram_bytes,
        },
        "disk": { "file_bytes": session.model_bytes, "weights_bytes": session.weights_bytes },
    })
}
