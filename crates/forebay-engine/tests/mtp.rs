//! Tests the layer that predicts further tokens: its logits against scripts with the formulas, and answers with its proposals against
//! answers without.

#[path = "support/logits.rs"]
#[allow(dead_code, reason = "every test file uses a part of it")]
mod logits;
#[path = "support/proposing.rs"]
mod proposing;
mod support;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use forebay_engine::engine::{EngineOptions, Event, Pooling, Request, RequestEnd, RequestId};
use forebay_engine::{
    Engine, EngineError, GenerateOptions, MtpStatistics, Session, SessionOptions, inspect,
};
use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{TensorType, Value};
use forebay_model::ModelError;
use forebay_model::sampling::Sampling;

use proposing::{GLM, QWEN, SOME, Tensor, alike, folder, formulas, tensors};

fn with_mtp() -> SessionOptions {
    SessionOptions { mtp: true, context: Some(96), ..SessionOptions::default() }
}

fn open(model: &Path, options: &SessionOptions) -> Session {
    Session::open(model, options, &mut |_, _| {}).unwrap()
}

fn reference(name: &str) -> serde_json::Value {
    logits::json(&formulas(name).join("reference.json"))
}

fn is_of_layer(name: &str, tensor: &str) -> bool {
    let prefix = if name == QWEN { "mtp." } else { "model.layers.2." };
    tensor.starts_with(prefix)
}

/// Returns the largest difference of the proposals' logits from the fixture's, and their largest magnitude.
fn compared(model: &Path, name: &str, options: &SessionOptions, prompt: usize) -> (f64, f64) {
    let reference = reference(name);
    let ids = logits::numbers(&reference["ids"]);
    let mut session = open(model, options);
    let floats = |key: &str| -> Vec<f64> {
        let rows: Vec<Vec<f64>> = serde_json::from_value(reference[key].clone()).unwrap();
        rows.into_iter().flatten().collect()
    };
    let distance = |tested: &[f32], expected: &[f64]| {
        assert_eq!(tested.len(), expected.len());
        let pairs = tested.iter().zip(expected);
        pairs.map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
    };
    let own = distance(&session.logits(&ids, None).unwrap(), &floats("logits"));
    let expected = floats("proposals");
    let expected = &expected[(prompt - 1) * session.vocab_size()..];
    let proposed = session.proposal_logits(&ids, prompt).unwrap();
    let largest = expected.iter().fold(0.0, |most, value| f64::max(most, value.abs()));
    (distance(&proposed, expected).max(own), largest)
}

#[test]
fn proposals_are_what_the_formulas_say() {
    for name in [QWEN, GLM] {
        for prompt in [1, 2, 11, 23] {
            let exact = SessionOptions { exact: true, ..with_mtp() };
            let (difference, largest) = compared(&formulas(name), name, &exact, prompt);
            assert!(largest > 2.0, "{name}: logits of up to {largest} say little");
            assert!(difference < 1e-4, "{name}, prompt of {prompt}: {difference}");
            println!("{name}, prompt of {prompt}: {difference:.2e} of {largest:.1}");
            let (difference, _) = compared(&formulas(name), name, &with_mtp(), prompt);
            assert!(difference < 4e-2, "{name}, with a cache of halves: {difference}");
        }
    }
}

#[test]
fn gguf_files_have_the_layer_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    as_gguf(&path);
    let exact = SessionOptions { exact: true, ..with_mtp() };
    let (difference, _) = compared(&path, GLM, &exact, 5);
    assert!(difference < 1e-4, "{difference}");
    let words = inspect(&path).unwrap().model.left_out.unwrap();
    assert!(words.contains("multi-token prediction on uses the first"), "{words}");
}

/// An answer, what is cached behind it, an answer to a second prompt, and the statistics of both.
type Answers = (Vec<u32>, Vec<u32>, Vec<u32>, Option<MtpStatistics>);

fn answers(
    model: &Path,
    session: &SessionOptions,
    options: &GenerateOptions,
) -> Result<Answers, EngineError> {
    let mut session = Session::open(model, session, &mut |_, _| {})?;
    let mut go = |prompt: &[u32]| {
        let answer = session.generate(prompt, options, &mut |_| ControlFlow::Continue(()))?;
        Ok::<_, EngineError>((answer.tokens, session.cached_tokens().to_vec()))
    };
    let (first, cached) = go(&[3, 17, 90, 41, 41, 5])?;
    let (second, _) = go(&[7, 8])?;
    Ok((first, cached, second, session.statistics().mtp))
}

fn samplings() -> Vec<Sampling> {
    let usual = Sampling { seed: 5, ..Sampling::default() };
    let penalties =
        Sampling { repeat_penalty: 1.2, presence_penalty: 0.4, temperature: 0.5, ..usual.clone() };
    vec![Sampling::greedy(), usual, penalties]
}

/// Compares answers with proposals to those without, and returns what became of the proposals.
fn same_answers(model: &Path, session: &SessionOptions, limit: usize) -> MtpStatistics {
    let mut all = MtpStatistics::default();
    for sampling in samplings() {
        let options = GenerateOptions::exactly(limit, sampling);
        let with = answers(model, session, &options).unwrap();
        let off = SessionOptions { mtp: false, ram_bytes: None, ..session.clone() };
        let without = answers(model, &off, &options).unwrap();
        assert_eq!(without.3, None);
        assert_eq!((&with.0, &with.1, &with.2), (&without.0, &without.1, &without.2));
        let of = with.3.unwrap();
        let refused = of.proposals - of.accepted;
        let fed = 2 * (limit as u64 - 1);
        assert!(of.accepted <= of.proposals && of.passes + of.accepted == fed, "{of:?}, {fed}");
        assert!(of.rows >= of.passes + of.proposals && of.rows <= of.passes * 3, "{of:?}");
        assert!(of.rows == of.passes + of.proposals || refused > 0, "{of:?}");
        all.proposals += of.proposals;
        all.accepted += of.accepted;
    }
    all
}

#[test]
fn answers_are_the_same_whatever_becomes_of_proposals() {
    for name in [QWEN, GLM] {
        // Random layers propose nothing that fits.
        let of = same_answers(&formulas(name), &with_mtp(), 24);
        assert!(of.accepted * 4 < of.proposals, "{name}: {of:?}");
        // Some proposals are right, and some are wrong.
        let some = alike(name, SOME);
        let of = same_answers(some.path(), &with_mtp(), 33);
        println!("{name}: {} of {} accepted", of.accepted, of.proposals);
        assert!(of.accepted * 10 > of.proposals && of.accepted < of.proposals, "{name}: {of:?}");
        for limit in 1..6 {
            same_answers(some.path(), &with_mtp(), limit);
        }
        // Greedy answers are proposed without a mistake.
        let all = alike(name, 0.0);
        let options = GenerateOptions::exactly(32, Sampling::greedy());
        let (.., of) = answers(all.path(), &with_mtp(), &options).unwrap();
        let of = of.unwrap();
        assert!(of.accepted == of.proposals && of.acceptance == 1.0, "{name}: {of:?}");
        assert!(of.passes < 2 * 18, "{name}: {of:?}");
    }
}

#[test]
fn answers_are_the_same_to_the_end_of_the_context() {
    for name in [QWEN, GLM] {
        let model = alike(name, SOME);
        for context in 28..32 {
            let session = SessionOptions { context: Some(context), ..with_mtp() };
            let limit = GenerateOptions { ignore_end: true, ..GenerateOptions::default() };
            let options = GenerateOptions { sampling: Sampling::greedy(), ..limit };
            let mut tokens = Vec::new();
            for mtp in [false, true] {
                let session = SessionOptions { mtp, ..session.clone() };
                let mut session = open(model.path(), &session);
                let prompt = [1, 2, 3, 4, 5, 6, 7];
                let answer =
                    session.generate(&prompt, &options, &mut |_| ControlFlow::Continue(()));
                tokens.push((answer.unwrap().tokens, session.cached_tokens().to_vec()));
            }
            assert_eq!(tokens[0], tokens[1], "{name}, {context}");
            assert_eq!(tokens[0].1.len(), context);
        }
    }
}

/// Every budget that runs gives the same proposals, and the same answers.
#[test]
fn streamed_layers_propose_the_same() {
    for name in [QWEN, GLM] {
        let model = alike(name, SOME);
        let ids = logits::numbers(&reference(name)["ids"]);
        let resident = open(model.path(), &with_mtp()).proposal_logits(&ids, 9).unwrap();
        let tight = SessionOptions { ram_bytes: Some(4096), ..with_mtp() };
        let least = support::needed_bytes(Session::open(model.path(), &tight, &mut |_, _| {}));
        for ram in [least, least + 40_000, least + 160_000] {
            let session = SessionOptions { ram_bytes: Some(ram), ..with_mtp() };
            let streamed = open(model.path(), &session).proposal_logits(&ids, 9).unwrap();
            assert!(streamed == resident, "{name}, {ram}");
            same_answers(model.path(), &session, 12);
        }
    }
}

#[test]
fn a_turn_that_is_dropped_leaves_nothing_wrong() {
    for name in [QWEN, GLM] {
        let model = alike(name, SOME);
        let options = GenerateOptions::exactly(9, Sampling::greedy());
        let mut found = Vec::new();
        for mtp in [false, true] {
            let mut session = open(model.path(), &SessionOptions { mtp, ..with_mtp() });
            let mut all = Vec::new();
            for (keep, prompt) in [(0, &[9, 8, 7, 6][..]), (2, &[5, 4]), (6, &[3]), (0, &[3, 2])] {
                let kept = session.truncate(keep);
                // The first tokens are read again if recurrent layers have no state there.
                let again: Vec<u32> = [9, 8, 7, 6, 5, 4][kept.min(keep)..keep].to_vec();
                let prompt = [&again, prompt].concat();
                let mut seen = 0;
                let stop = &mut |_| {
                    seen += 1;
                    if seen == 7 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                };
                all.push(session.generate(&prompt, &options, stop).unwrap().tokens);
            }
            found.push(all);
        }
        assert_eq!(found[0], found[1], "{name}");
    }
}

#[test]
fn without_the_option_nothing_of_the_layer_is_read() {
    for name in [QWEN, GLM] {
        let mut all = tensors(&formulas(name));
        let bytes: u64 = all
            .iter()
            .filter(|(tensor, ..)| is_of_layer(name, tensor))
            .map(|(.., values)| 4 * values.len() as u64)
            .sum();
        let count = all.iter().filter(|(tensor, ..)| is_of_layer(name, tensor)).count();
        let words = inspect(&formulas(name)).unwrap().model.left_out.unwrap();
        let (expected, megabytes) = (format!("{count} tensors"), bytes as f64 / 1e6);
        assert!(
            words.contains(&expected) && words.contains("multi-token prediction on"),
            "{name}: {words}"
        );
        assert!(words.contains(&format!("{megabytes:.1} MB")), "{name}: {words}");
        let off = SessionOptions { mtp: false, ..with_mtp() };
        let [with, without] = [&with_mtp(), &off].map(|options| open(&formulas(name), options));
        let loaded = |session: &Session| session.statistics().arena_bytes;
        let more = loaded(&with) - loaded(&without);
        // Embeddings and norms are not in the arena.
        assert!(more > bytes / 2 && more < bytes + 64 * 4096, "{name}: {more} of {bytes}");
        let kv = |session: &Session| session.statistics().kv_cache_bytes;
        assert!(kv(&with) > kv(&without), "{name}");
        assert_eq!(with.info().layers, without.info().layers);
        assert_eq!(with.info().left_out, None, "{name}");

        let options = GenerateOptions::exactly(12, Sampling::greedy());
        let expected = answers(&formulas(name), &off, &options).unwrap();
        let own = all.iter_mut().filter(|(tensor, ..)| is_of_layer(name, tensor));
        own.for_each(|(.., values)| values.fill(f32::NAN));
        let broken = folder(name, &all);
        assert_eq!(answers(broken.path(), &off, &options).unwrap(), expected);
        let error = answers(broken.path(), &with_mtp(), &options).expect_err("it is broken");
        assert!(matches!(error, EngineError::Model(ModelError::NotFinite { .. })), "{error}");
    }
}

#[test]
fn hostile_layers_are_refused() {
    for name in [QWEN, GLM] {
        let all = tensors(&formulas(name));
        let opened = |tensors: &[Tensor]| {
            let folder = folder(name, tensors);
            let opened = Session::open(folder.path(), &with_mtp(), &mut |_, _| {});
            match opened {
                Ok(_) => panic!("{name} must be refused"),
                Err(EngineError::Model(error)) => error,
                Err(error) => panic!("{error}"),
            }
        };
        let own = (0..all.len()).filter(|index| is_of_layer(name, &all[*index].0));
        for index in own {
            let (tensor, shape, values) = &all[index];
            // Without its first norm, there is no layer. Own tables, projections and norms of the head may be missing.
            let mut without = all.clone();
            without.remove(index);
            let may_be_missing = ["mtp.norm", "embed_tokens", "shared_head", "enorm"];
            if !may_be_missing.iter().any(|part| tensor.contains(part)) {
                let error = opened(&without);
                assert!(matches!(error, ModelError::MissingTensor { .. }), "{tensor}: {error}");
            }
            let mut wider = all.clone();
            let more = [shape.as_slice(), &[1]].concat();
            wider[index] = (tensor.clone(), more, values.clone());
            let mut longer = all.clone();
            let rows = [&[shape[0] + 1], &shape[1..]].concat();
            let filled = [values.clone(), vec![0.5; values.len() / shape[0] as usize]].concat();
            longer[index] = (tensor.clone(), rows, filled);
            // A vector may be a matrix of one column.
            let wider = Some(wider).filter(|_| shape.len() > 1);
            for tensors in wider.into_iter().chain([longer]) {
                let error = opened(&tensors);
                // A router with more rows has more experts, whose tensors are missing.
                let is_named = matches!(error, ModelError::TensorShape { .. })
                    || tensor.contains("gate.weight")
                        && matches!(error, ModelError::MissingTensor { .. });
                assert!(is_named, "{tensor}: {error}");
            }
        }
        let without: Vec<Tensor> =
            all.into_iter().filter(|(tensor, ..)| !is_of_layer(name, tensor)).collect();
        let error = opened(&without);
        assert!(matches!(error, ModelError::NoMtp { .. }), "{error}");
    }
}

#[test]
fn the_option_is_refused_where_it_has_no_effect() {
    let refused = |model: &Path, options: &SessionOptions| {
        let opened = Session::open(model, options, &mut |_, _| {});
        opened.err().expect("it must be refused").to_string()
    };
    let lfm2 = refused(&formulas("lfm2"), &with_mtp());
    assert!(lfm2.contains("qwen35moe") && lfm2.contains("this is lfm2"), "{lfm2}");
    let several = SessionOptions { sequences: 2, for_engine: true, ..with_mtp() };
    let error = refused(&formulas(QWEN), &several);
    assert!(error.contains("multi-token prediction") && error.contains("one sequence"), "{error}");
    let mut session = open(&formulas(GLM), &with_mtp());
    let recorded = session.record_routing(Box::new(Vec::new()), false);
    assert!(recorded.is_err_and(|error| error.to_string().contains("multi-token prediction")));
    let mut off = open(&formulas(GLM), &SessionOptions { mtp: false, ..with_mtp() });
    assert!(off.proposal_logits(&[1, 2, 3], 1).is_err());
    // An engine takes sessions without the layer, as ever.
    assert!(Engine::new(off, &EngineOptions::default()).running_max() == 1);
}

/// What a request to an engine has brought.
#[derive(Default)]
struct Seen {
    tokens: Vec<u32>,
    logprobs: Vec<Option<f32>>,
    likeliest: Vec<Vec<(u32, f32)>>,
    embedding: Option<Vec<f32>>,
    end: Option<RequestEnd>,
    cached: usize,
    suspended: usize,
}

/// Queues a request. It stops by itself after `most` tokens.
fn submit(engine: &mut Engine, request: Request, most: usize) -> (RequestId, Arc<Mutex<Seen>>) {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let own = seen.clone();
    let sink = move |event| {
        let mut seen = own.lock().unwrap();
        match event {
            Event::Token(token) => {
                seen.tokens.push(token.id);
                seen.logprobs.push(token.logprob);
                seen.likeliest.push(token.likeliest);
            }
            Event::Finished { end, embedding, statistics, .. } => {
                seen.embedding = embedding;
                seen.end = Some(end);
                seen.cached = statistics.cached_tokens;
                seen.suspended = statistics.suspended;
            }
        }
        match seen.tokens.len() == most {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    (engine.submit(request, Box::new(sink)).unwrap(), seen)
}

fn engine(model: &Path, mtp: bool) -> Engine<'static> {
    let context = Some(256);
    let options = SessionOptions { mtp, context, for_engine: true, ..with_mtp() };
    Engine::new(open(model, &options), &EngineOptions::default())
}

fn request(prompt: &[u32], options: GenerateOptions) -> Request {
    Request { prompt: prompt.to_vec(), options, ..Request::default() }
}

/// An engine answers as without the layer, request after request, with prompts that begin alike, probabilities, embeddings, stops,
/// and a request that is suspended for another one.
#[test]
fn an_engine_answers_the_same() {
    let long: Vec<u32> = (0..170).map(|at| at * at % 97).collect();
    for name in [QWEN, GLM] {
        let model = alike(name, SOME);
        let mut found = Vec::new();
        for mtp in [false, true] {
            let mut engine = engine(model.path(), mtp);
            let mut all = Vec::new();
            let mut go = |engine: &mut Engine, request: Request, most: usize| {
                let (_, seen) = submit(engine, request, most);
                engine.drain().unwrap();
                let seen = std::mem::take(&mut *seen.lock().unwrap());
                all.push((seen.tokens, seen.logprobs, seen.likeliest, seen.embedding, seen.end));
                seen.cached
            };
            for sampling in samplings() {
                let options = GenerateOptions::exactly(30, sampling);
                let again = Request { logprobs: Some(3), ..request(&long, options.clone()) };
                go(&mut engine, request(&[3, 17, 90, 41, 41, 5], options.clone()), usize::MAX);
                go(&mut engine, request(&long, options.clone()), usize::MAX);
                let cached = go(&mut engine, again, usize::MAX);
                assert!(cached > 0, "{name}: the prompt was computed before");
                go(&mut engine, request(&long[..120], options), 5);
            }
            let pooled = Request {
                pooling: Some(Pooling::Mean),
                ..request(&long, GenerateOptions::default())
            };
            go(&mut engine, pooled, usize::MAX);

            let options = GenerateOptions::exactly(24, Sampling::greedy());
            let (_, first) = submit(&mut engine, request(&long[..20], options.clone()), usize::MAX);
            for _ in 0..7 {
                engine.step().unwrap();
            }
            let urgent = Request { priority: 1, ..request(&[8, 9, 10], options) };
            let (_, urgent) = submit(&mut engine, urgent, usize::MAX);
            engine.drain().unwrap();
            for seen in [first, urgent] {
                let seen = std::mem::take(&mut *seen.lock().unwrap());
                all.push((seen.tokens, seen.logprobs, seen.likeliest, None, seen.end));
            }
            assert_eq!(engine.statistics().suspended, 1, "{name}");
            found.push(all);

            let mut session = engine.into_session();
            let of = session.statistics().mtp;
            assert_eq!(of.is_some(), mtp);
            if let Some(of) = of {
                assert!(
                    of.accepted * 10 > of.proposals && of.accepted < of.proposals,
                    "{name}: {of:?}"
                );
            }
            // The session goes on as one that was just opened.
            let options = GenerateOptions::exactly(9, Sampling::greedy());
            let answer = session.generate(&[1, 2, 3], &options, &mut |_| ControlFlow::Continue(()));
            let mut fresh = open(model.path(), &SessionOptions { mtp, ..with_mtp() });
            let expected = fresh.generate(&[1, 2, 3], &options, &mut |_| ControlFlow::Continue(()));
            assert_eq!(answer.unwrap().tokens, expected.unwrap().tokens, "{name}");
        }
        let with = found.pop().unwrap();
        for (at, (with, without)) in with.into_iter().zip(found.pop().unwrap()).enumerate() {
            assert_eq!(with, without, "{name}, request {at}");
        }
    }
}

/// A request may be copied while a proposal for it, or for one that was cancelled, is not decided yet.
#[test]
fn snapshots_have_no_proposals() {
    for name in [QWEN, GLM] {
        // Nothing that is proposed is right, so there is a proposal behind every pass.
        let model = formulas(name);
        let options = GenerateOptions::exactly(20, Sampling::greedy());
        let prompt = [3, 17, 90, 41, 41, 5];
        let mut alone = engine(&model, false);
        let (_, expected) = submit(&mut alone, request(&prompt, options.clone()), usize::MAX);
        alone.drain().unwrap();
        let expected = expected.lock().unwrap().tokens.clone();
        for steps in 1..6 {
            let mut engine = engine(&model, true);
            let (id, seen) = submit(&mut engine, request(&prompt, options.clone()), usize::MAX);
            for _ in 0..steps {
                engine.step().unwrap();
            }
            let snapshot = engine.snapshot(id).unwrap().unwrap();
            let before = seen.lock().unwrap().tokens.len();
            engine.step().unwrap();
            let (waiting, rest) =
                submit(&mut engine, request(&prompt, options.clone()), usize::MAX);
            engine.cancel(id);
            assert!(engine.snapshot(waiting).unwrap().is_some());
            engine.drain().unwrap();
            assert_eq!(rest.lock().unwrap().tokens, expected, "{name}, {steps}");
            let resumed = Arc::new(Mutex::new(Vec::new()));
            let own = resumed.clone();
            let sink = move |event| {
                if let Event::Token(token) = event {
                    own.lock().unwrap().push(token.id);
                }
                ControlFlow::Continue(())
            };
            engine.restore(snapshot, Box::new(sink)).unwrap();
            engine.drain().unwrap();
            assert_eq!(*resumed.lock().unwrap(), expected[before..], "{name}, {steps}");
        }
    }
}

/// An engine checks as many proposals as a session that runs the request itself, in as many passes.
#[test]
fn an_engine_proposes_what_a_session_does() {
    for name in [QWEN, GLM] {
        for model in [alike(name, SOME), alike(name, 0.0)] {
            let options = GenerateOptions::exactly(32, Sampling::greedy());
            let prompt = [3, 17, 90, 41, 41, 5];
            let mut session = open(model.path(), &with_mtp());
            let expected =
                session.generate(&prompt, &options, &mut |_| ControlFlow::Continue(())).unwrap();
            let mut engine = engine(model.path(), true);
            let (_, seen) = submit(&mut engine, request(&prompt, options), usize::MAX);
            engine.drain().unwrap();
            assert_eq!(seen.lock().unwrap().tokens, expected.tokens);
            let of = engine.session().statistics().mtp.unwrap();
            assert_eq!(Some(of), session.statistics().mtp, "{name}");
            let counted = engine.statistics();
            assert_eq!((counted.generate_passes, counted.generate_rows), (of.passes, 31), "{name}");
        }
    }
}

#[test]
fn measurements_count_proposals() {
    for name in [QWEN, GLM] {
        let model = alike(name, SOME);
        let mut session = open(model.path(), &with_mtp());
        for (prompt, depth) in [(8, 0), (0, 0), (0, 5), (4, 3)] {
            let run = session.bench(prompt, 20, depth, 1).unwrap();
            let of = run.mtp.expect("the layer is loaded");
            assert_eq!(of.passes + of.accepted, 20, "{name}: {of:?}");
            // An answer begins behind a token.
            assert_eq!(session.cached_tokens().len(), (prompt + depth).max(1) + 20);
            assert!(of.proposals > 0 && of.accepted > 0, "{name}: {of:?}");
        }
        let off = SessionOptions { mtp: false, ..with_mtp() };
        assert_eq!(open(model.path(), &off).bench(8, 4, 0, 1).unwrap().mtp, None);
    }
}

/// Writes GLM's fixture as a GGUF file in the form of converters that keep both matrices of a head in one tensor.
fn as_gguf(out: &Path) {
    let mut writer = GgufWriter::new(out);
    writer.set("general.architecture", "deepseek2").unwrap();
    let mut key =
        |name: &str, value: Value| writer.set(&format!("deepseek2.{name}"), value).unwrap();
    for (name, value) in [
        ("block_count", 3),
        ("nextn_predict_layers", 1),
        ("context_length", 512),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("leading_dense_block_count", 1),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 4),
        ("attention.q_lora_rank", 32),
        ("attention.kv_lora_rank", 32),
        ("attention.key_length", 24),
        ("attention.value_length", 16),
        ("rope.dimension_count", 8),
        ("expert_count", 8),
        ("expert_used_count", 3),
        ("expert_shared_count", 1),
        ("expert_feed_forward_length", 32),
        ("expert_gating_func", 2),
    ] {
        key(name, Value::from(value as u32));
    }
    key("expert_weights_norm", Value::from(true));
    key("expert_weights_scale", Value::from(1.8_f32));
    key("attention.layer_norm_rms_epsilon", Value::from(1e-5_f32));
    key("rope.freq_base", Value::from(1e4_f32));
    let mut all: Vec<Tensor> = Vec::new();
    for (name, shape, values) in tensors(&formulas(GLM)) {
        let mut name = name.replace("model.layers.", "blk.");
        for (from, to) in [
            ("model.embed_tokens", "token_embd"),
            ("lm_head", "output"),
            ("model.norm", "output_norm"),
            ("shared_head.norm", "nextn.shared_head_norm"),
            ("shared_head.head", "nextn.shared_head_head"),
            ("2.embed_tokens", "2.nextn.embed_tokens"),
            ("eh_proj", "nextn.eh_proj"),
            ("enorm", "nextn.enorm"),
            ("hnorm", "nextn.hnorm"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.", "attn_"),
            ("q_a_layernorm", "q_a_norm"),
            ("kv_a_layernorm", "kv_a_norm"),
            ("kv_a_proj_with_mqa", "kv_a_mqa"),
            ("post_attention_layernorm", "ffn_norm"),
            ("input_layernorm", "attn_norm"),
            ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
            ("mlp.gate.weight", "ffn_gate_inp.weight"),
            ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
            ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
            ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
            ("mlp.experts.", "experts."),
            ("mlp.", "ffn_"),
            ("_proj", ""),
        ] {
            name = name.replace(from, to);
        }
        // The projection is the only one whose name keeps its end.
        let name = name.replace("nextn.eh.", "nextn.eh_proj.");
        let Some((layer, rest)) = name.split_once("experts.") else {
            all.push((name, shape, values));
            continue;
        };
        // Experts come in the order of their numbers, which have one digit.
        let stack = format!("{layer}ffn_{}_exps.weight", rest.split('.').nth(1).unwrap());
        match all.iter_mut().find(|(name, ..)| *name == stack) {
            Some((_, shape, stacked)) => {
                shape[0] += 1;
                stacked.extend(values);
            }
            None => all.push((stack, [&[1], &shape[..]].concat(), values)),
        }
    }
    for (name, shape, _) in &all {
        writer.add_tensor(name, TensorType::F32, shape).unwrap();
    }
    let mut data = writer.start(Vec::new()).unwrap();
    for (_, _, values) in &all {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        data.write(&bytes).unwrap();
    }
    std::fs::write(out, data.finish().unwrap()).unwrap();
}
