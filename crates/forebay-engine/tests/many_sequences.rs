//! Tests invariant 10: what a request generates depends on its own sequence alone. Tokens and logarithmic probabilities are
//! equal to the bit, alone or beside any others, whatever comes or ends when, resident and streamed.

#[path = "support/requests.rs"]
mod requests;
mod support;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_engine::engine::{EngineOptions, Event, Latency, Request, RequestEnd, Snapshot};
use forebay_engine::{Engine, EngineError, GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;
use requests::collector;
use support::{fixture, models, needed_bytes, recurrent_models, third_set};

const CONTEXT: usize = 160;

fn open(path: &Path, ram_bytes: Option<u64>, sequences: usize) -> Result<Session, EngineError> {
    open_with(path, SessionOptions { ram_bytes, sequences, ..SessionOptions::default() })
}

fn open_with(path: &Path, options: SessionOptions) -> Result<Session, EngineError> {
    let threads = options.threads.or(Some(2));
    let options = SessionOptions { context: Some(CONTEXT), threads, ..options };
    Session::open(path, &options, &mut |_, _| {})
}

/// Returns the smallest budget that works, from the error that a budget of one byte causes.
fn smallest(path: &Path) -> u64 {
    needed_bytes(open(path, Some(1), 1))
}

/// A request with the step before which it comes, and the number of tokens after which it is cancelled.
struct Planned {
    request: Request,
    comes: usize,
    stops: Option<usize>,
}

/// Report of a request: ids, and bits of their logarithmic probabilities.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Answer {
    tokens: Vec<(u32, u32)>,
    end: Option<RequestEnd>,
}

fn planned(random: &mut fastrand::Rng, vocabulary: usize, prefix: &[u32]) -> Planned {
    let count = random.usize(1..60);
    // Half of the prompts share a beginning.
    let shared = if random.bool() { prefix } else { &[] };
    let own: Vec<u32> = (0..count).map(|_| random.u32(..vocabulary as u32)).collect();
    let sampling = match random.bool() {
        true => Sampling::greedy(),
        false => Sampling { seed: random.u64(..), ..Sampling::default() },
    };
    let request = Request {
        prompt: shared.iter().copied().chain(own).collect(),
        options: GenerateOptions::exactly(random.usize(1..25), sampling),
        priority: random.i32(0..2),
        logprobs: Some(2),
        ..Request::default()
    };
    let stops = (random.usize(..4) == 0).then(|| random.usize(1..10));
    Planned { request, comes: random.usize(..40), stops }
}

/// Runs all requests, each submitted before its step, and returns their answers.
fn run(session: Session, options: &EngineOptions, all: &[Planned]) -> (Session, Vec<Answer>) {
    let mut engine = Engine::new(session, options);
    let answers = Arc::new(Mutex::new(vec![Answer::default(); all.len()]));
    let mut step = 0;
    let mut left = all.len();
    while left > 0 || engine.load() != (0, 0) {
        for (index, planned) in all.iter().enumerate().filter(|(_, of)| of.comes == step) {
            let (answers, stops) = (answers.clone(), planned.stops);
            let sink = Box::new(move |event: Event| {
                let answer = &mut answers.lock().unwrap()[index];
                match event {
                    Event::Token(token) => {
                        assert_eq!(token.likeliest.len(), 2);
                        let bits = token.logprob.expect("asked for").to_bits();
                        answer.tokens.push((token.id, bits ^ token.likeliest[1].1.to_bits()));
                        if stops == Some(answer.tokens.len()) {
                            return ControlFlow::Break(());
                        }
                    }
                    Event::Finished { end, .. } => answer.end = Some(end),
                }
                ControlFlow::Continue(())
            });
            engine.submit(planned.request.clone(), sink).unwrap();
            left -= 1;
        }
        engine.step().unwrap();
        step += 1;
    }
    let answers = answers.lock().unwrap().clone();
    (engine.into_session(), answers)
}

/// Models are tested two at a time. Most sessions compute with one thread: for models as small as these, two take longer.
#[test]
fn requests_are_answered_as_if_they_were_alone() {
    let all = models().into_iter().chain(recurrent_models()).chain(third_set());
    let all = Mutex::new(all.enumerate());
    let next = || all.lock().unwrap().next();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some((number, path)) = next() {
                    check_alone(number, &path);
                }
            });
        }
    });
}

fn check_alone(number: usize, path: &Path) {
    let threads = Some(if number.is_multiple_of(4) { 2 } else { 1 });
    let open = |ram_bytes, sequences| {
        let options = SessionOptions { ram_bytes, sequences, threads, ..SessionOptions::default() };
        open_with(path, options).unwrap()
    };
    let mut random = fastrand::Rng::with_seed(number as u64);
    let mut alone = open(None, 1);
    let vocabulary = alone.vocab_size();
    let prefix: Vec<u32> = (0..40).map(|_| random.u32(..vocabulary as u32)).collect();
    let all: Vec<Planned> = (0..12).map(|_| planned(&mut random, vocabulary, &prefix)).collect();
    let mut expected = Vec::new();
    for planned in &all {
        let (request, stops) = (planned.request.clone(), planned.stops);
        let one = [Planned { request, comes: 0, stops }];
        let answers;
        (alone, answers) = run(alone, &EngineOptions::default(), &one);
        expected.extend(answers);
    }
    drop(alone);
    assert!(expected.iter().all(|answer| !answer.tokens.is_empty() && answer.end.is_some()));
    let usual = EngineOptions::default;
    let turns = Latency::AtMost(Duration::ZERO);
    let unbounded = Latency::Unbounded;
    let variants = [
        (None, 12, usual()),
        (None, 5, EngineOptions { prompt_rows: Some(1), latency: unbounded, ..usual() }),
        (Some(smallest(path)), 7, EngineOptions { prompt_rows: Some(17), ..usual() }),
        (None, 6, EngineOptions { generating: Some(2), ..usual() }),
        (None, 6, EngineOptions { generating: Some(2), latency: turns, ..usual() }),
    ];
    for (ram, running, options) in variants {
        let session = open(ram, running);
        let (_, answers) = run(session, &options, &all);
        for (index, (answer, expected)) in answers.iter().zip(&expected).enumerate() {
            assert_eq!(answer, expected, "{}, {options:?}, {index}", path.display());
        }
    }
    // The cache has room for one or two sequences, and the swap space for all copies, some, or none.
    for (kv_ram_bytes, kv_tokens) in
        [(None, CONTEXT), (Some(0), CONTEXT + 70), (Some(300_000), CONTEXT)]
    {
        let short = SessionOptions {
            sequences: 6,
            kv_tokens: Some(kv_tokens),
            kv_ram_bytes,
            threads,
            ..SessionOptions::default()
        };
        let session = open_with(path, short).unwrap();
        let (_, answers) = run(session, &usual(), &all);
        for (index, (answer, expected)) in answers.iter().zip(&expected).enumerate() {
            assert_eq!(answer, expected, "{}, {kv_ram_bytes:?}, {index}", path.display());
        }
    }
}

/// Runs four long requests of two priorities in a cache for little more than one of them. Returns the answers' tokens, and
/// how often requests were suspended and computed again.
fn run_short_of_room(
    path: &Path,
    kv_ram_bytes: u64,
    kv_tokens: Option<usize>,
) -> (Vec<Vec<u32>>, u64, u64) {
    let options = SessionOptions {
        sequences: 4,
        kv_tokens,
        kv_ram_bytes: Some(kv_ram_bytes),
        ..SessionOptions::default()
    };
    let mut engine = Engine::new(open_with(path, options).unwrap(), &EngineOptions::default());
    let answers = Arc::new(Mutex::new(vec![Vec::new(); 4]));
    let suspended = Arc::new(Mutex::new(0));
    for index in 0..4 {
        let (answers, suspended) = (answers.clone(), suspended.clone());
        let sink = Box::new(move |event: Event| {
            match event {
                Event::Token(token) => answers.lock().unwrap()[index].push(token.id),
                Event::Finished { statistics, end, .. } => {
                    assert_eq!(end, RequestEnd::MaxTokens);
                    *suspended.lock().unwrap() += statistics.suspended as u64;
                }
            }
            ControlFlow::Continue(())
        });
        let options = GenerateOptions::exactly(60, Sampling { seed: 3, ..Sampling::default() });
        let prompt = (0..50).map(|at| (at * 11 + index as u32) % 90).collect();
        let priority = (index % 2) as i32;
        engine.submit(Request { prompt, options, priority, ..Request::default() }, sink).unwrap();
        // The later ones find the first ones generating.
        (0..5).for_each(|_| assert!(engine.step().unwrap()));
    }
    engine.drain().unwrap();
    let statistics = engine.statistics();
    assert_eq!(*suspended.lock().unwrap(), statistics.suspended);
    let answers = std::mem::take(&mut *answers.lock().unwrap());
    (answers, statistics.suspended, statistics.computed_again)
}

#[test]
fn suspended_requests_go_on_where_they_were() {
    let names = [
        "gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf",
        "gguf/gpt_oss/gpt_oss-Q4_K_M.gguf",
        "models/gemma4_ple",
        "models/mimo_v2_flash",
        "models/deepseek_v4",
    ];
    let models = names.iter().filter_map(|name| fixture(name));
    for path in models.chain(recurrent_models()) {
        let (expected, suspended, _) = run_short_of_room(&path, 0, None);
        assert_eq!(suspended, 0, "all have room");
        let (answers, suspended, computed_again) =
            run_short_of_room(&path, u64::MAX, Some(CONTEXT));
        assert_eq!((answers, computed_again), (expected.clone(), 0));
        assert!(suspended > 0);
        let (answers, suspended, computed_again) = run_short_of_room(&path, 0, Some(CONTEXT));
        assert_eq!((answers, computed_again), (expected, suspended));
        assert!(suspended > 0);
    }
}

/// All prompts could be read at once, but there is room for one.
#[test]
fn prompts_wait_for_room() {
    let Some(path) = fixture("gguf/llama_k/llama_k-Q4_K_M.gguf") else { return };
    for kv_ram_bytes in [None, Some(0)] {
        let options = SessionOptions {
            sequences: 3,
            kv_tokens: Some(CONTEXT),
            kv_ram_bytes,
            ..SessionOptions::default()
        };
        let mut engine = Engine::new(open_with(&path, options).unwrap(), &EngineOptions::default());
        let finished = Arc::new(Mutex::new(0));
        for number in 0..3 {
            let finished = finished.clone();
            let sink = Box::new(move |event: Event| {
                if let Event::Finished { end, .. } = event {
                    assert_eq!(end, RequestEnd::MaxTokens);
                    *finished.lock().unwrap() += 1;
                }
                ControlFlow::Continue(())
            });
            let prompt = (0..100).map(|at| (at * 3 + number) % 90).collect();
            let options = GenerateOptions::exactly(50, Sampling::greedy());
            engine.submit(Request { prompt, options, ..Request::default() }, sink).unwrap();
        }
        let steps = (0..1000).take_while(|_| engine.step().unwrap()).count();
        assert!(steps < 1000, "requests hinder each other");
        assert_eq!(*finished.lock().unwrap(), 3);
        assert_eq!(engine.statistics().suspended, 0);
    }
}

#[test]
fn a_request_of_a_higher_priority_takes_the_place_of_others() {
    let Some(path) = fixture("gguf/llama_k/llama_k-Q4_K_M.gguf") else { return };
    let mut engine = Engine::new(open(&path, None, 1).unwrap(), &EngineOptions::default());
    let order = Arc::new(Mutex::new(Vec::new()));
    for (index, priority) in [0, 0, 1].into_iter().enumerate() {
        let order = order.clone();
        let sink = Box::new(move |event: Event| {
            if let Event::Finished { .. } = event {
                order.lock().unwrap().push(index);
            }
            ControlFlow::Continue(())
        });
        let options = GenerateOptions::exactly(10, Sampling::greedy());
        let request = Request { prompt: vec![7; 3], options, priority, ..Request::default() };
        engine.submit(request, sink).unwrap();
        assert!(engine.step().unwrap());
    }
    engine.drain().unwrap();
    assert_eq!(*order.lock().unwrap(), [2, 0, 1]);
    assert_eq!(engine.statistics().suspended, 1);
}

#[test]
fn restored_requests_go_on_in_another_engine() {
    let names = [
        "gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf",
        "gguf/qwen3_next/qwen3_next-Q8_0.gguf",
        "models/gemma4_ple",
        "models/deepseek_v4",
    ];
    names.iter().filter_map(|name| fixture(name)).for_each(|path| check_restored(&path));
}

fn check_restored(path: &Path) {
    let open = |kv_ram_bytes| {
        let options = SessionOptions { sequences: 2, kv_ram_bytes, ..SessionOptions::default() };
        Engine::new(open_with(path, options).unwrap(), &EngineOptions::default())
    };
    let request = |priority| Request {
        prompt: (0..40).map(|at| at * 5 % 90).collect(),
        options: GenerateOptions::exactly(50, Sampling { seed: 9, ..Sampling::default() }),
        text: true,
        priority,
        ..Request::default()
    };
    let mut engine = open(None);
    let (sink, tokens) = collector();
    let id = engine.submit(request(0), sink).unwrap();
    let (mut snapshots, mut was_suspended) = (Vec::new(), false);
    loop {
        let snapshot = engine.snapshot(id).unwrap();
        let bytes = snapshot.map(|snapshot| snapshot.to_bytes());
        let Some(bytes) = bytes else { break };
        snapshots.push((bytes, tokens.lock().unwrap().len()));
        // Its rows may be computed again, without new tokens meanwhile.
        if tokens.lock().unwrap().len() == 20 && !std::mem::replace(&mut was_suspended, true) {
            // It is suspended while others of a higher priority run.
            let others = [1, 2].map(|priority| engine.submit(request(priority), collector().0));
            engine.step().unwrap();
            let suspended = engine.snapshot(id).unwrap().unwrap();
            assert_eq!(engine.load(), (1, 2));
            snapshots.push((suspended.to_bytes(), tokens.lock().unwrap().len()));
            others.into_iter().for_each(|other| engine.cancel(other.unwrap()));
        }
        engine.step().unwrap();
    }
    let expected = std::mem::take(&mut *tokens.lock().unwrap());
    assert_eq!(expected.len(), 51);
    for (bytes, done) in snapshots.into_iter().step_by(7) {
        for kv_ram_bytes in [None, Some(0)] {
            let mut other = open(kv_ram_bytes);
            let (sink, tokens) = collector();
            let snapshot = Snapshot::from_bytes(&bytes).unwrap();
            other.restore(snapshot, sink).unwrap();
            other.drain().unwrap();
            assert_eq!(*tokens.lock().unwrap(), expected[done..], "{done} {kv_ram_bytes:?}");
        }
    }
}

#[test]
fn damaged_and_foreign_snapshots_are_refused() {
    let Some(path) = fixture("gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf") else { return };
    let Some(other) = fixture("gguf/llama_k/llama_k-Q4_K_M.gguf") else { return };
    let mut engine = Engine::new(open(&path, None, 1).unwrap(), &EngineOptions::default());
    let options = GenerateOptions::exactly(9, Sampling::greedy());
    let request = Request { prompt: vec![7; 20], options, ..Request::default() };
    let id = engine.submit(request, collector().0).unwrap();
    (0..3).for_each(|_| assert!(engine.step().unwrap()));
    let snapshot = engine.snapshot(id).unwrap().unwrap();
    let bytes = snapshot.to_bytes();
    assert_eq!(Snapshot::from_bytes(&bytes).unwrap(), snapshot);
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..200 {
        let cut = random.usize(..bytes.len());
        assert!(Snapshot::from_bytes(&bytes[..cut]).is_err());
        let mut changed = bytes.clone();
        changed[cut] ^= 1 << random.u32(..8);
        assert!(Snapshot::from_bytes(&changed).is_err());
    }
    let restore = |path: &Path, options: SessionOptions| {
        let session = open_with(path, options).unwrap();
        let mut engine = Engine::new(session, &EngineOptions::default());
        engine.restore(snapshot.clone(), collector().0).map_err(|error| error.to_string())
    };
    assert!(restore(&path, SessionOptions::default()).is_ok());
    let error = restore(&other, SessionOptions::default()).unwrap_err();
    assert!(error.contains("it was made with qwen3moe"), "{error}");
    let exact = SessionOptions { exact: true, ..SessionOptions::default() };
    let error = restore(&path, exact).unwrap_err();
    assert!(error.contains("F16 keys and values"), "{error}");
}

#[test]
fn suspended_requests_can_be_cancelled() {
    let Some(path) = fixture("gguf/llama_k/llama_k-Q4_K_M.gguf") else { return };
    let mut engine = Engine::new(open(&path, None, 1).unwrap(), &EngineOptions::default());
    let ends = Arc::new(Mutex::new(Vec::new()));
    let submit = |engine: &mut Engine, priority| {
        let ends = ends.clone();
        let sink = Box::new(move |event: Event| {
            if let Event::Finished { end, statistics, .. } = event {
                ends.lock().unwrap().push((end, statistics.generated_tokens));
            }
            ControlFlow::Continue(())
        });
        let options = GenerateOptions::exactly(10, Sampling::greedy());
        let request = Request { prompt: vec![7; 3], options, priority, ..Request::default() };
        engine.submit(request, sink).unwrap()
    };
    let first = submit(&mut engine, 0);
    (0..4).for_each(|_| assert!(engine.step().unwrap()));
    submit(&mut engine, 1);
    assert!(engine.step().unwrap());
    assert_eq!(engine.load(), (1, 1));
    engine.cancel(first);
    engine.drain().unwrap();
    assert_eq!(*ends.lock().unwrap(), [(RequestEnd::Cancelled, 4), (RequestEnd::MaxTokens, 10)]);
}

/// Returns the requests in the order in which they got tokens.
fn order_of_tokens(options: &EngineOptions) -> Option<Vec<usize>> {
    let path = fixture("gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf")?;
    let mut engine = Engine::new(open(&path, None, 4).unwrap(), options);
    let order = Arc::new(Mutex::new(Vec::new()));
    for index in 0..4 {
        let order = order.clone();
        let sink = Box::new(move |event: Event| {
            if matches!(event, Event::Token(_)) {
                order.lock().unwrap().push(index);
            }
            ControlFlow::Continue(())
        });
        let options = GenerateOptions::exactly(6, Sampling::greedy());
        engine.submit(Request { prompt: vec![7; 3], options, ..Request::default() }, sink).unwrap();
    }
    engine.drain().unwrap();
    let statistics = engine.statistics();
    assert_eq!(statistics.generate_rows, 4 * 5, "the first token of each is of a prompt");
    assert!(statistics.prompt_tokens > 0 && statistics.generate_seconds > 0.0);
    Some(std::mem::take(&mut *order.lock().unwrap()))
}

#[test]
fn requests_generate_one_after_the_other_or_take_turns() {
    let latency = Latency::Unbounded;
    let one = EngineOptions { generating: Some(1), latency, ..EngineOptions::default() };
    let Some(order) = order_of_tokens(&one) else { return };
    assert!(order.is_sorted(), "one after the other: {order:?}");
    let turns = EngineOptions { latency: Latency::AtMost(Duration::ZERO), ..one };
    let order = order_of_tokens(&turns).expect("it was there");
    // Prompts are read together, and each gives its first token. Then every request in turn gets one.
    let (firsts, later) = order.split_at(4);
    assert_eq!(firsts, [0, 1, 2, 3]);
    for turn in later.chunks(4) {
        let mut turn = turn.to_vec();
        turn.sort_unstable();
        assert_eq!(turn, [0, 1, 2, 3], "{order:?}");
    }
}

#[test]
fn requests_share_the_count_of_missing_experts() {
    let Some(path) = fixture("gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf") else { return };
    let used = |ram_bytes| {
        let session = open(&path, ram_bytes, 3).unwrap();
        let before = session.statistics().stream.unwrap();
        let mut engine = Engine::new(session, &EngineOptions::default());
        let used = Arc::new(Mutex::new([0.0; 3]));
        for number in 0..3 {
            let used = used.clone();
            let sink = Box::new(move |event: Event| {
                if let Event::Finished { statistics, .. } = event {
                    let weights = statistics.weights;
                    let own = [weights.expert_hits, weights.expert_misses, weights.bytes_from_disk];
                    assert!(own[0] + own[1] > 0.0, "every request uses experts");
                    used.lock().unwrap().iter_mut().zip(own).for_each(|(all, own)| *all += own);
                }
                ControlFlow::Continue(())
            });
            let options = GenerateOptions::exactly(6, Sampling::greedy());
            let prompt = vec![number * 7; 3 + number as usize];
            engine.submit(Request { prompt, options, ..Request::default() }, sink).unwrap();
        }
        engine.drain().unwrap();
        let all = engine.session().statistics().stream.unwrap();
        let expected = [
            all.hits - before.hits,
            all.misses - before.misses,
            all.bytes_read - before.bytes_read,
        ];
        let used = *used.lock().unwrap();
        let pairs = used.iter().zip(expected);
        assert!(pairs.into_iter().all(|(a, b)| (a - b as f64).abs() < 1e-6 * a.max(1.0)));
        used
    };
    assert_eq!(used(None)[1..], [0.0, 0.0]);
    let streamed = used(Some(smallest(&path)));
    assert!(streamed[1] > 0.0 && streamed[2] > 0.0);
}

#[test]
fn prompts_that_begin_alike_are_read_once() {
    let Some(path) = fixture("gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf") else { return };
    let mut engine = Engine::new(open(&path, None, 3).unwrap(), &EngineOptions::default());
    let prefix: Vec<u32> = (0..100).map(|index| index * 7 % 90).collect();
    let cached = Arc::new(Mutex::new(Vec::new()));
    for own in 0..5 {
        let prompt = prefix.iter().copied().chain([own, own + 1]).collect();
        let options = GenerateOptions::exactly(2, Sampling::greedy());
        let to = cached.clone();
        let sink = Box::new(move |event: Event| {
            if let Event::Finished { statistics, .. } = event {
                to.lock().unwrap().push(statistics.cached_tokens);
            }
            ControlFlow::Continue(())
        });
        engine.submit(Request { prompt, options, ..Request::default() }, sink).unwrap();
        engine.drain().unwrap();
    }
    // Six whole blocks of 16 are shared.
    assert_eq!(*cached.lock().unwrap(), [0, 96, 96, 96, 96]);
}

#[test]
fn a_prompt_cut_anywhere_gives_the_same_bits() {
    for path in models().into_iter().chain(recurrent_models()) {
        let mut session = open(&path, None, 1).unwrap();
        let vocabulary = session.vocab_size();
        let tokens: Vec<u32> =
            (0..130).map(|index| ((index * 7919 + 13) % vocabulary) as u32).collect();
        let request = |_| Request {
            prompt: tokens.clone(),
            options: GenerateOptions::exactly(3, Sampling::greedy()),
            logprobs: Some(2),
            ..Request::default()
        };
        let mut expected = None;
        // Beside a request that generates, a prompt is read in parts of so many rows.
        for rows in [1, 2, 3, 9, 16, 33, 64, 100, 130] {
            let other = Planned {
                request: Request {
                    prompt: vec![1, 2, 3],
                    options: GenerateOptions::exactly(150, Sampling::greedy()),
                    logprobs: Some(2),
                    ..Request::default()
                },
                comes: 0,
                stops: None,
            };
            drop(session);
            session = open(&path, None, 2).unwrap();
            let cut = Planned { request: request(()), comes: 3, stops: None };
            let latency = Latency::Unbounded;
            let options =
                EngineOptions { prompt_rows: Some(rows), latency, ..EngineOptions::default() };
            let answers;
            (session, answers) = run(session, &options, &[other, cut]);
            let expected = expected.get_or_insert_with(|| answers.clone());
            assert_eq!(&answers, expected, "{}, {rows} rows", path.display());
        }
    }
}

/// A server runs the engine on a thread of its own.
#[test]
fn an_engine_can_move_to_another_thread() {
    fn moves<T: Send>() {}
    moves::<Engine>();
}

#[test]
fn requests_that_cannot_run_are_refused() {
    let Some(path) = fixture("gguf/llama_k/llama_k-Q4_K_M.gguf") else { return };
    let options = EngineOptions { waiting: 1, ..EngineOptions::default() };
    let mut engine = Engine::new(open(&path, None, 1).unwrap(), &options);
    let mut submit = |prompt: Vec<u32>| {
        let request = Request { prompt, ..Request::default() };
        engine.submit(request, Box::new(|_| ControlFlow::Continue(()))).map_err(|e| e.to_string())
    };
    assert!(submit(vec![]).unwrap_err().contains("prompt"));
    assert!(submit(vec![1; CONTEXT + 1]).unwrap_err().contains("context"));
    assert!(submit(vec![u32::MAX]).unwrap_err().contains("vocabulary"));
    assert!(submit(vec![1]).is_ok());
    assert!(submit(vec![1]).unwrap_err().contains("the queue is full"));
}
