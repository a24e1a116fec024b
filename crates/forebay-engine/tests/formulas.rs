//! Families that no other implementation's results are at hand for, against logits that a script beside the fixture
//! computes by the formulas of the model's report.

use std::path::Path;

use forebay_engine::{Session, SessionOptions};

/// The largest difference from the reference, and the largest reference.
fn compared(name: &str, options: &SessionOptions) -> (f64, f64) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/formulas").join(name);
    let text = std::fs::read_to_string(folder.join("reference.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids: Vec<u32> = serde_json::from_value(reference["ids"].clone()).unwrap();
    let expected: Vec<Vec<f64>> = serde_json::from_value(reference["logits"].clone()).unwrap();
    let mut session = Session::open(&folder, options, &mut |_, _| {}).unwrap();
    let logits = session.logits(&ids, None).unwrap();
    let expected: Vec<f64> = expected.into_iter().flatten().collect();
    assert_eq!(logits.len(), expected.len());
    let differences = logits.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs());
    (
        differences.fold(0.0, f64::max),
        expected.iter().fold(0.0, |largest, value| f64::max(largest, value.abs())),
    )
}

#[test]
fn gemma_2_computes_what_its_report_says() {
    let exact = SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
    let (difference, largest) = compared("gemma2", &exact);
    assert!(largest > 2.0, "logits of up to {largest} say nothing about their cap of 3");
    assert!(difference < 1e-4, "exact: {difference}");
    let usual = SessionOptions { exact: false, ..exact };
    let (difference, _) = compared("gemma2", &usual);
    assert!(difference < 2e-2, "with a cache of halves: {difference}");
}
