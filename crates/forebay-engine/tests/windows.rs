//! Tests layers with a sliding window. They keep little more than the window, but the output equals that with a full
//! cache. Truncating too far back empties the cache.

mod support;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use forebay_engine::{EngineError, GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;
use forebay_store::FaultPlan;
use forebay_stream::StreamError;
use support::{changed, generate_greedily};
use tempfile::TempDir;

/// Larger than a window, a batch and the rounding of rows together.
const CONTEXT: usize = 2000;
const WINDOW: usize = 16;
const LAYERS: usize = 2;

/// Returns the llama of the fixtures. If `window` is given, all of its layers have it.
fn windowed(window: Option<usize>) -> (TempDir, PathBuf) {
    let folder = changed("llama3_rope", |config| {
        assert_eq!(config["num_hidden_layers"], LAYERS);
        config["model_type"] = "mistral".into();
        config["sliding_window"] = window.into();
    });
    let folder = folder.expect("is part of the repository");
    let path = folder.path().to_owned();
    (folder, path)
}

fn open(path: &Path, context: usize) -> Session {
    let options =
        SessionOptions { exact: true, context: Some(context), ..SessionOptions::default() };
    Session::open(path, &options, &mut |_, _| {}).unwrap()
}

/// Returns tokens that do not repeat soon.
fn text(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| i.wrapping_mul(2_654_435_761) >> 23).collect()
}

fn last_row(logits: &[f32], vocabulary: usize) -> &[f32] {
    &logits[logits.len() - vocabulary..]
}

/// Returns the squared error of the last token's logits, relative to the squares of the expected ones.
fn error(session: &mut Session, ids: &[u32], expected: &[f32]) -> f64 {
    let vocabulary = session.vocab_size();
    let found = session.logits(ids, None).unwrap();
    let pairs = || last_row(&found, vocabulary).iter().zip(last_row(expected, vocabulary));
    let squares = |of: fn((&f32, &f32)) -> f64| pairs().map(of).sum::<f64>();
    squares(|(a, b)| f64::from(a - b).powi(2)) / squares(|(_, b)| f64::from(*b).powi(2))
}

/// A token of the second layer sees a window of tokens, each of which saw a window in the first layer. Tokens before
/// them cannot matter, wherever they are in the cache.
#[test]
fn what_lies_behind_all_windows_does_not_count() {
    let (_folder, path) = windowed(Some(WINDOW));
    let mut session = open(&path, CONTEXT);
    let (_all, path) = windowed(None);
    let mut sees_all = open(&path, CONTEXT);
    let seen = LAYERS * (WINDOW - 1) + 1;
    // The cache wraps at 768 positions.
    for count in [100, 767, 768, 769, 1025, 1537, CONTEXT] {
        let ids = text(count);
        let alone = session.logits(&ids[count - seen..], None).unwrap();
        let found = error(&mut session, &ids, &alone);
        assert!(found < 1e-9, "{count} tokens: {found:e}");
        let too_few = session.logits(&ids[count - seen + 1..], None).unwrap();
        let found = error(&mut session, &ids, &too_few);
        assert!(found > 1e-7, "{count} tokens: the oldest seen does not count: {found:e}");
        let found = error(&mut sees_all, &ids, &alone);
        assert!(found > 1e-3, "{count} tokens: what is before does not count: {found:e}");
    }
    // The tokens are fed one by one, across the end of the rows.
    let ids = text(900);
    let rows = session.logits_one_by_one(&ids).unwrap();
    let found = error(&mut session, &ids, &rows);
    assert!(found < 1e-9, "one by one: {found:e}");
}

#[test]
fn the_cache_keeps_windows_and_plans_say_so() {
    let bytes = |window, context| {
        let (_folder, path) = windowed(window);
        open(&path, context).statistics().kv_cache_bytes
    };
    let all = bytes(None, CONTEXT);
    // The cache holds a window and the rest of a batch of 512, in chunks of 256. Beyond that, it has a block for the other end
    // of the window, and the block that is never written.
    let blocks = |positions: usize| (positions / 16) as u64;
    let kept = blocks(768) + 2;
    assert_eq!(bytes(Some(WINDOW), CONTEXT) * (blocks(CONTEXT) + 1), all * kept);
    assert_eq!(bytes(Some(WINDOW), 1500), bytes(Some(WINDOW), CONTEXT));
    assert_eq!(bytes(Some(WINDOW), 300), bytes(None, 300));
}

#[test]
fn going_back_is_possible_within_a_batch_and_else_begins_anew() {
    let (_folder, path) = windowed(Some(WINDOW));
    let mut session = open(&path, CONTEXT);
    let ids = text(1400);
    generate_greedily(&mut session, &ids, 1);
    assert_eq!(session.truncate(1000), 1000);
    assert_eq!(session.cached_tokens(), &ids[..1000]);
    let again = generate_greedily(&mut session, &ids[1000..], 20);
    session.reset();
    assert_eq!(generate_greedily(&mut session, &ids, 20), again);

    // The 49 blocks of the window hold the last 784 positions, rounded to blocks. That is what was read last.
    assert_eq!(session.truncate(670), 670);
    assert_eq!(session.truncate(600), 0, "a window before 600 is gone");
    assert!(session.cached_tokens().is_empty());
    assert_eq!(generate_greedily(&mut session, &ids, 20), again);

    let (_all, path) = windowed(None);
    let mut session = open(&path, CONTEXT);
    generate_greedily(&mut session, &ids, 1);
    assert_eq!((session.truncate(3), session.cached_tokens().len()), (3, 3));
}

/// Reads fail during a prompt of several batches. The tokens before it stay in the cache, unless later batches have
/// overwritten their rows.
#[test]
fn a_prompt_that_fails_leaves_what_was_before_it_or_nothing() {
    let (_folder, path) = windowed(Some(WINDOW));
    let (before, prompt) = (text(300), text(1650).split_off(300));
    let mut resident = open(&path, CONTEXT);
    generate_greedily(&mut resident, &before, 1);
    let expected = generate_greedily(&mut resident, &prompt, 5);
    let mut ends = BTreeSet::new();
    for seed in 0..24 {
        let faults = FaultPlan { outage_one_in: 24, seed, ..FaultPlan::default() };
        let Ok(mut session) = streaming(&path, Some(faults)) else { continue };
        let turn = |session: &mut Session, ids: &[u32], tokens| {
            let options = GenerateOptions::exactly(tokens, Sampling::greedy());
            session.generate(ids, &options, &mut |_| ControlFlow::Continue(()))
        };
        while turn(&mut session, &before, 1).is_err() {
            assert!(session.cached_tokens().is_empty());
        }
        let mut failed = 0;
        let answer = loop {
            match turn(&mut session, &prompt, 5) {
                Ok(answer) => break answer,
                Err(EngineError::Stream(_) | EngineError::Model(_)) => failed += 1,
                Err(other) => panic!("{other}"),
            }
            assert!(failed < 100, "reads fail for ever");
            let mut left = session.cached_tokens().len();
            ends.insert(left.min(before.len() + 1));
            if left > before.len() {
                // The whole prompt had been processed.
                left = session.truncate(before.len());
            }
            while left == 0 && turn(&mut session, &before, 1).is_err() {}
            assert_eq!(session.cached_tokens(), before);
        };
        assert_eq!(answer.tokens, expected, "seed {seed}, after {failed} errors");
    }
    assert!(ends.contains(&0) && ends.contains(&before.len()), "ended with {ends:?}");
}

/// Opens a session with the smallest budget that works.
fn streaming(path: &Path, faults: Option<FaultPlan>) -> Result<Session, EngineError> {
    let options = |ram, faults| SessionOptions {
        exact: true,
        context: Some(CONTEXT),
        ram_bytes: Some(ram),
        faults,
        ..SessionOptions::default()
    };
    let open = |options: &SessionOptions| Session::open(path, options, &mut |_, _| {});
    match open(&options(1, None)) {
        Err(EngineError::Stream(StreamError::BudgetTooSmall { needed_bytes, .. })) => {
            open(&options(needed_bytes, faults))
        }
        Err(other) => panic!("a byte of budget is refused for another reason: {other}"),
        Ok(_) => panic!("a byte of budget must be refused"),
    }
}
