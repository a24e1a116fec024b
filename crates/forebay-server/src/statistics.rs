//! What one answer needed: its share of the weights' traffic, what it waited for, and its rate beside the prediction.

use forebay_requests::Choice;
use serde_json::{Value, json};

use crate::models::Lease;

/// Returns the statistics of an answer.
pub fn of(lease: &Lease, choice: &Choice) -> Value {
    let statistics = &choice.statistics;
    let weights = &statistics.weights;
    let model_seconds = lease.waited().as_secs_f64();
    let predicted = &lease.outlook.predicted;
    let mut value = json!(statistics);
    value["hit_rate"] = json!(weights.hit_rate());
    value["bytes"] = json!({ "disk": weights.bytes_from_disk, "pcie": weights.bytes_from_ram });
    value["waiting_seconds"] = json!({
        "model": model_seconds,
        "queue": statistics.waited_seconds,
        "disk": weights.disk_wait_seconds,
        "pcie": weights.copy_wait_seconds,
    });
    value["tokens_per_second"] = json!(tokens_per_second(choice));
    value["predicted_tokens_per_second"] = json!(predicted.tokens_per_second);
    value["predicted"] = json!(predicted);
    value
}

/// Returns the rate of the tokens after the first one, if there are any.
fn tokens_per_second(choice: &Choice) -> Option<f64> {
    let statistics = &choice.statistics;
    let seconds = statistics.total_seconds - statistics.first_token_seconds?;
    let tokens = statistics.generated_tokens.checked_sub(1).filter(|tokens| *tokens > 0)?;
    (seconds > 0.0).then(|| tokens as f64 / seconds)
}
