//! Factors that the fixtures have as 1: another value must have the effect that its formula says.

mod support;

use std::path::Path;

use forebay_engine::{Session, SessionOptions};
use serde_json::json;
use support::{changed, fixture};

const PROMPT: [u32; 9] = [3, 50, 7, 300, 12, 12, 90, 411, 5];

fn logits(path: &Path) -> Vec<f32> {
    let options = SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
    let mut session = Session::open(path, &options, &mut |_, _| {}).unwrap();
    session.logits(&PROMPT, None).unwrap()
}

/// Compares the logits of a fixture with those after a change of its configuration. `expected` computes a changed logit.
fn check(name: &str, key: &str, value: f64, expected: impl Fn(f64) -> f64) {
    let Some(folder) = fixture(&format!("models/{name}")) else { return };
    let other = changed(name, |config| config["text_config"][key] = json!(value)).unwrap();
    let (usual, other) = (logits(&folder), logits(other.path()));
    let mut differ = 0;
    for (usual, other) in usual.iter().zip(&other) {
        let expected = expected(f64::from(*usual));
        assert!((f64::from(*other) - expected).abs() < 1e-4, "{name} with {key} {value}: {other}");
        differ += usize::from((usual - other).abs() > 1e-2);
    }
    assert!(differ > usual.len() / 2, "{name}: {key} changes {differ} logits");
}

#[test]
fn the_output_multiplier_is_applied_before_the_cap() {
    check("muse_glimmer", "output_multiplier", 0.5, |logit| {
        20.0 * (0.5 * (logit / 20.0).atanh()).tanh()
    });
}

#[test]
fn the_width_multiplier_divides_logits() {
    check("inkling", "logits_mup_width_multiplier", 4.0, |logit| logit / 4.0);
}
