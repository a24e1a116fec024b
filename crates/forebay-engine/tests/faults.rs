//! Tests a disk with faults. A failed read is repeated, or the error says where it failed. It never causes a wrong
//! token.

mod support;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_engine::{EngineError, Session, SessionOptions};
use forebay_store::{FaultKind, FaultPlan, FileIndex, IoKind};
use support::{fixture, needed_bytes};

const EIO: i32 = 5;

fn model() -> Option<PathBuf> {
    fixture("gguf/qwen3_moe/qwen3_moe-Q8_0.gguf")
}

fn options(ram_bytes: Option<u64>, faults: Option<FaultPlan>) -> SessionOptions {
    SessionOptions { ram_bytes, context: Some(64), faults, ..SessionOptions::default() }
}

/// Returns the logits of a few tokens with a budget that makes the model stream. Opening already reads, so it may fail,
/// too.
fn run(path: &Path, options: &SessionOptions) -> Result<Vec<u32>, EngineError> {
    let mut session = Session::open(path, options, &mut |_, _| {})?;
    let logits = session.logits(&[1, 2, 3, 4, 5, 6, 7, 8], None)?;
    Ok(logits.iter().map(|value| value.to_bits()).collect())
}

fn smallest(path: &Path) -> u64 {
    needed_bytes(run(path, &options(Some(1), None)))
}

/// Returns the middle of an expert tensor. Reads of experts touch it. Aligned reads of dense blocks reach into
/// neighbouring tensors, but not that far.
fn expert_range(path: &Path) -> std::ops::Range<u64> {
    let catalog = forebay_format::Catalog::open(path).unwrap();
    let extent = catalog.tensor("blk.1.ffn_up_exps.weight").unwrap().extent;
    extent.offset + extent.length / 4..extent.end() - extent.length / 4
}

#[test]
fn passing_faults_leave_no_trace_in_the_logits() {
    let Some(path) = model() else { return };
    let expected = run(&path, &options(None, None)).unwrap();
    let (ram, range) = (Some(smallest(&path)), expert_range(&path));
    let file = FileIndex(0);
    let plans = [
        ("EIO once", FaultPlan::once(file, 0..u64::MAX, FaultKind::Error(EIO))),
        ("EIO once at an expert", FaultPlan::once(file, range.clone(), FaultKind::Error(EIO))),
        ("short reads", FaultPlan::always(file, 0..u64::MAX, FaultKind::Short(4096))),
        ("all kinds at random", FaultPlan { random_one_in: 7, seed: 3, ..FaultPlan::default() }),
    ];
    for (what, plan) in plans {
        for io in [IoKind::Auto, IoKind::Pread] {
            let options = SessionOptions { io, ..options(ram, Some(plan.clone())) };
            let bits = run(&path, &options).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(bits == expected, "{what}: logits differ");
        }
    }
}

#[test]
fn a_lasting_fault_names_file_offset_and_block() {
    let Some(path) = model() else { return };
    let ram = Some(smallest(&path));
    let plan = FaultPlan::always(FileIndex(0), expert_range(&path), FaultKind::Error(EIO));
    let error = run(&path, &options(ram, Some(plan))).unwrap_err().to_string();
    for part in ["qwen3_moe-Q8_0.gguf", "byte", "layer 1", "expert"] {
        assert!(error.contains(part), "'{part}' is missing: {error}");
    }
}

#[test]
fn a_read_that_never_ends_is_an_error_within_the_timeout() {
    let Some(path) = model() else { return };
    let ram = Some(smallest(&path));
    for io in [IoKind::Auto, IoKind::Pread] {
        let plan = FaultPlan::always(FileIndex(0), expert_range(&path), FaultKind::Never);
        let started = Instant::now();
        // A second is short for a test, yet longer than the opening reads of the healthy part take on a busy disk.
        let stall_timeout = Duration::from_secs(1);
        let options = SessionOptions { io, stall_timeout, ..options(ram, Some(plan)) };
        let error = run(&path, &options).unwrap_err().to_string();
        assert!(error.contains("has not finished") && error.contains("expert"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(60), "{:?}", started.elapsed());
    }
}

#[test]
fn a_session_goes_on_after_a_failed_read() {
    let Some(path) = model() else { return };
    let expected = run(&path, &options(None, None)).unwrap();
    // The failures exhaust the retries of every request in the range. Then the disk is healthy.
    let mut plan = FaultPlan::once(FileIndex(0), expert_range(&path), FaultKind::Error(EIO));
    plan.faults[0].times = 60;
    let options = options(Some(smallest(&path)), Some(plan));
    let mut session = Session::open(&path, &options, &mut |_, _| {}).unwrap();
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    let mut failed = 0;
    let logits = loop {
        match session.logits(&tokens, None) {
            Ok(logits) => break logits,
            Err(_) => failed += 1,
        }
        assert!(failed < 60, "the disk is healthy again, but reads still fail");
    };
    assert!(failed > 0, "the fault must have struck");
    let bits: Vec<u32> = logits.iter().map(|value| value.to_bits()).collect();
    assert!(bits == expected, "logits after a failure differ");
}
