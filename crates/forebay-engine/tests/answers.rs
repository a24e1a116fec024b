//! Answers of a session: they are those of an engine, they continue the session's sequence, and none ends before its least length.

#[path = "support/requests.rs"]
mod requests;
mod support;

use std::ops::ControlFlow;
use std::path::Path;

use forebay_engine::engine::{EngineOptions, Request};
use forebay_engine::{Engine, GenerateOptions, Generation, Session, SessionOptions, StopReason};
use forebay_model::sampling::{Sampling, argmax};
use requests::collector;
use support::{models, recurrent_models};

fn open(path: &Path, mtp: bool) -> Option<Session> {
    let options = SessionOptions { context: Some(96), threads: Some(2), mtp, ..Default::default() };
    // Most models have no layer that predicts.
    Session::open(path, &options, &mut |_, _| {}).ok()
}

fn generate(session: &mut Session, prompt: &[u32], options: &GenerateOptions) -> Generation {
    session.generate(prompt, options, &mut |_| ControlFlow::Continue(())).unwrap()
}

fn prompt(session: &Session, length: usize) -> Vec<u32> {
    let vocabulary = session.vocab_size();
    (0..length).map(|index| ((index * 7919 + 13) % vocabulary) as u32).collect()
}

#[test]
fn answers_of_sessions_and_engines_are_equal() {
    let mut compared = 0;
    for path in models().into_iter().chain(recurrent_models()) {
        let what = path.display();
        for mtp in [false, true] {
            let Some(mut session) = open(&path, mtp) else { continue };
            let first = prompt(&session, 21);
            for sampling in [Sampling::greedy(), Sampling { seed: 7, ..Sampling::default() }] {
                session.reset();
                let options = GenerateOptions::exactly(9, sampling);
                let answer = generate(&mut session, &first, &options);
                // The last token is not computed yet.
                let all = [&first[..], &answer.tokens].concat();
                assert_eq!(session.cached_tokens(), &all[..all.len() - 1], "{what} {mtp}");
                let again = [all[all.len() - 1], first[0], first[1]];
                let more = generate(&mut session, &again, &options);
                let whole = [&all[..all.len() - 1], &again].concat();
                assert_eq!(session.cached_tokens().len(), whole.len() + 8, "{what} {mtp}");

                let mut engine = Engine::new(session, &EngineOptions::default());
                let (sink, seen) = collector();
                let prompt = first.clone();
                let request = Request { prompt, options: options.clone(), ..Request::default() };
                engine.submit(request, sink).unwrap();
                engine.drain().unwrap();
                let seen: Vec<u32> = seen.lock().unwrap().iter().map(|(id, _)| *id).collect();
                // Behind the tokens is the rest of the text.
                assert_eq!(seen[..9], answer.tokens, "{what} {mtp}");
                session = engine.into_session();
                assert_eq!(more.tokens.len(), 9, "{what} {mtp}");
                compared += 1;
            }
        }
    }
    assert!(compared > 20, "{compared} answers");
}

#[test]
fn answers_have_their_least_length() {
    for path in models() {
        let what = path.display();
        for mtp in [false, true] {
            let Some(mut session) = open(&path, mtp) else { continue };
            let prompt = prompt(&session, 5);
            let usual = GenerateOptions::exactly(6, Sampling::greedy());
            let answer = generate(&mut session, &prompt, &usual).tokens;
            // What the model would say is what may not come at first.
            let stop_ids = answer[..2].to_vec();
            for min_tokens in [0, 1, 3] {
                let (stop_ids, max_tokens) = (stop_ids.clone(), Some(6));
                let sampling = Sampling::greedy();
                let options = GenerateOptions {
                    max_tokens,
                    sampling,
                    stop_ids,
                    min_tokens,
                    ..GenerateOptions::default()
                };
                session.reset();
                let found = generate(&mut session, &prompt, &options);
                let mut expected = Vec::new();
                let ends = |session: &Session, id: u32| {
                    let by_model = session.tokenizer().is_ok_and(|of| of.is_end_of_generation(id));
                    by_model || options.stop_ids.contains(&id)
                };
                while expected.len() < 6 {
                    let logits = session.logits_of_answer(&prompt, &expected).unwrap();
                    let last = logits.len() - session.vocab_size();
                    let mut last = logits[last..].to_vec();
                    if expected.len() < min_tokens {
                        (0..last.len())
                            .filter(|id| ends(&session, *id as u32))
                            .for_each(|id| last[id] = f32::NEG_INFINITY);
                    }
                    let id = argmax(&last);
                    if ends(&session, id) {
                        break;
                    }
                    expected.push(id);
                }
                assert_eq!(found.tokens, expected, "{what} {mtp} {min_tokens}");
                let is_whole = expected.len() == 6;
                let reason = if is_whole { StopReason::MaxTokens } else { StopReason::End };
                assert_eq!(found.stop_reason, reason, "{what} {mtp} {min_tokens}");
                assert!(found.tokens.len() >= min_tokens, "{what} {mtp} {min_tokens}");
            }
        }
    }
}

#[test]
fn measurements_take_the_tokens_that_they_are_for() {
    for path in models().into_iter().chain(recurrent_models()).step_by(3) {
        let what = path.display();
        let Some(mut session) = open(&path, false) else { continue };
        for (prompt, generate, depth) in
            [(8, 4, 3), (8, 0, 0), (0, 5, 0), (0, 1, 4), (40, 2, 0), (0, 96, 0), (0, 91, 5)]
        {
            let run = session.bench(prompt, generate, depth, 3).unwrap();
            let mut random = fastrand::Rng::with_seed(3);
            let mut id = || random.u32(..session.vocab_size() as u32);
            let ids: Vec<u32> = (0..depth + prompt + generate).map(|_| id()).collect();
            let (before, generated) = (&ids[..depth], &ids[depth + prompt..]);
            let case = format!("{what} {prompt} {generate} {depth}");
            assert_eq!(run.prompt_tokens_per_second > 0.0, prompt > 0, "{case}");
            assert_eq!(run.generate_tokens_per_second > 0.0, generate > 0, "{case}");
            if generate > 0 {
                let cached = session.cached_tokens();
                let known = [before, generated].concat();
                assert!(cached.starts_with(&known[..known.len().min(cached.len())]), "{case}");
                assert_eq!(cached.len(), (depth.max(1) + generate).min(96), "{case}");
            }
        }
        assert!(session.bench(90, 4, 10, 1).is_err(), "{what}: the context has 96 positions");
        assert!(session.bench(1, 90, 10, 1).is_err(), "{what}: the context has 96 positions");
    }
}
