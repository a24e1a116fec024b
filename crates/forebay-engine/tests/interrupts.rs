//! Tests interrupts: work ends soon, and the session then continues as if it had never been interrupted.

mod support;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_engine::doctor::{self, DoctorError, DoctorRequest};
use forebay_engine::load::{LoadError, LoadRequest, load};
use forebay_engine::{
    EngineError, GenerateOptions, Generation, Interrupt, Session, SessionOptions, StopReason,
};
use forebay_model::sampling::Sampling;
use forebay_store::{FaultKind, FaultPlan, FileIndex, IoKind};
use support::{fixture, needed_bytes, recurrent_models};

/// Reads complete within milliseconds here, so anything that takes longer waited for something else.
const SOON: Duration = Duration::from_secs(30);

fn model() -> Option<PathBuf> {
    fixture("gguf/qwen3_moe/qwen3_moe-Q8_0.gguf")
}

/// Returns the model, and those whose layers have a state that a pass changes.
fn all_models() -> impl Iterator<Item = PathBuf> {
    model().into_iter().chain(recurrent_models())
}

fn prompt(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|index| 1 + (seed + 7 * index) % 200).collect()
}

fn open(path: &Path, interrupt: &Interrupt, ram_bytes: Option<u64>) -> Session {
    let interrupt = interrupt.clone();
    let options =
        SessionOptions { ram_bytes, context: Some(128), interrupt, ..SessionOptions::default() };
    Session::open(path, &options, &mut |_, _| {}).expect("the model opens")
}

fn smallest(path: &Path) -> u64 {
    let options = SessionOptions { ram_bytes: Some(1), ..SessionOptions::default() };
    needed_bytes(Session::open(path, &options, &mut |_, _| {}))
}

fn answer(session: &mut Session, prompt: &[u32]) -> Generation {
    let options = GenerateOptions::exactly(8, Sampling::greedy());
    session.generate(prompt, &options, &mut |_| ControlFlow::Continue(())).expect("an answer")
}

#[test]
fn after_an_interrupted_prompt_a_session_goes_on_as_if_it_had_not_been_asked() {
    for (path, ram_bytes) in
        all_models().flat_map(|path| [(path.clone(), None), (path.clone(), Some(smallest(&path)))])
    {
        let undisturbed = &mut open(&path, &Interrupt::new(), ram_bytes);
        let expected = [prompt(3, 20), prompt(5, 9)].map(|ids| answer(undisturbed, &ids).tokens);

        // `stop_at` is the step of the prompt at which the test interrupts.
        for stop_at in 1.. {
            let interrupt = Interrupt::new();
            let session = &mut open(&path, &interrupt, ram_bytes);
            assert_eq!(answer(session, &prompt(3, 20)).tokens, expected[0]);
            let cached = session.cached_tokens().to_vec();
            let (seen, asked) = (Arc::new(AtomicUsize::new(0)), interrupt.clone());
            let count = Arc::clone(&seen);
            session.watch_prompts(Some(Box::new(move |done, total| {
                assert!(done <= total && total == 40);
                if count.fetch_add(1, Ordering::Relaxed) + 1 == stop_at {
                    asked.request();
                }
            })));
            let stopped = answer(session, &prompt(11, 40));
            session.watch_prompts(None);
            if stopped.stop_reason != StopReason::Interrupted || !stopped.tokens.is_empty() {
                // At the last step the prompt is done, so the first token was chosen, and no more.
                assert_eq!(seen.load(Ordering::Relaxed), stop_at);
                assert_eq!(
                    (stopped.stop_reason, stopped.tokens.len()),
                    (StopReason::Interrupted, 1)
                );
                assert!(stop_at > 1, "no step was stopped at");
                break;
            }
            assert_eq!(session.cached_tokens(), cached);
            // Until the interrupt is cleared, no work starts.
            assert_eq!(answer(session, &prompt(5, 9)).stop_reason, StopReason::Interrupted);
            assert_eq!(session.cached_tokens(), cached);
            interrupt.clear();
            assert_eq!(answer(session, &prompt(5, 9)).tokens, expected[1], "stopped at {stop_at}");
        }
    }
}

#[test]
fn an_answer_that_is_interrupted_can_be_continued() {
    all_models().for_each(|path| check_continued(&path));
}

fn check_continued(path: &Path) {
    let whole = answer(&mut open(path, &Interrupt::new(), None), &prompt(3, 20)).tokens;
    let interrupt = Interrupt::new();
    let session = &mut open(path, &interrupt, None);
    let options = GenerateOptions::exactly(8, Sampling::greedy());
    let mut count = 0;
    let begun = session.generate(&prompt(3, 20), &options, &mut |_| {
        count += 1;
        if count == 3 {
            interrupt.request();
        }
        ControlFlow::Continue(())
    });
    let begun = begun.expect("an answer");
    assert_eq!(
        (begun.stop_reason, begun.tokens.as_slice()),
        (StopReason::Interrupted, &whole[..3])
    );
    interrupt.clear();
    // The third token was chosen, but not fed.
    assert_eq!(session.cached_tokens(), [&prompt(3, 20), &whole[..2]].concat());
    let rest = answer(session, &whole[2..3]).tokens;
    assert_eq!(rest[..5], whole[3..]);
}

/// Requests an interrupt after 200 ms. Returns the start of that time.
fn soon(interrupt: &Interrupt) -> Instant {
    let interrupt = interrupt.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        interrupt.request();
    });
    Instant::now()
}

#[test]
fn a_wait_for_a_disk_that_hangs_ends() {
    let Some(path) = model() else { return };
    let ram_bytes = Some(smallest(&path));
    for io in [IoKind::Auto, IoKind::Pread] {
        let interrupt = Interrupt::new();
        let options = SessionOptions {
            ram_bytes,
            io,
            interrupt: interrupt.clone(),
            // This is far longer than the test may take.
            stall_timeout: Duration::from_secs(600),
            faults: Some(FaultPlan::always(FileIndex(0), 0..u64::MAX, FaultKind::Never)),
            ..SessionOptions::default()
        };
        let since = soon(&interrupt);
        let opened = Session::open(&path, &options, &mut |_, _| {});
        let logits = opened.and_then(|mut session| session.logits(&prompt(1, 8), None));
        assert!(matches!(logits, Err(EngineError::Interrupted)), "{io}: {logits:?}");
        assert!(since.elapsed() < SOON, "{io}: {:?}", since.elapsed());
    }
}

#[test]
fn loads_end() {
    let Some(path) = model() else { return };
    let interrupt = Interrupt::new();
    let request = LoadRequest {
        io: IoKind::Auto,
        cold: false,
        limit: false,
        repeat: 1_000_000,
        verify: true,
        decode: false,
        device: None,
        recorder: None,
        interrupt: interrupt.clone(),
    };
    let since = soon(&interrupt);
    let loaded = load(&path, &request, &mut |_, _| {});
    assert!(matches!(loaded, Err(LoadError::Interrupted)));
    assert!(since.elapsed() < SOON);
}

#[test]
fn measurements_end_and_leave_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::File::create(&file).unwrap().set_len(1 << 30).unwrap();
    for (step_to_stop, file) in [("a file to read", None), ("the disk", Some(file))] {
        let interrupt = Interrupt::new();
        let folder = directory.path().to_path_buf();
        let request = DoctorRequest { folder, file, quick: false, interrupt: interrupt.clone() };
        let mut asked = None;
        let examined = doctor::examine(&request, &mut |step| {
            if step == step_to_stop {
                interrupt.request();
                asked = Some(Instant::now());
            }
        });
        assert!(matches!(examined, Err(DoctorError::Interrupted)), "{step_to_stop}");
        assert!(asked.is_some_and(|asked| asked.elapsed() < SOON), "{step_to_stop}");
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
}
