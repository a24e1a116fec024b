//! Tests that callers have equal parts: of the requests that run, of the rows of a pass, and of the queue.

#[path = "support/requests.rs"]
mod requests;
mod support;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_engine::engine::{EngineOptions, Event, Request};
use forebay_engine::{Engine, GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;
use requests::collector;
use support::fixture;

fn open(path: &Path, sequences: usize) -> Session {
    let (context, threads) = (Some(160), Some(2));
    let options = SessionOptions { context, threads, sequences, ..SessionOptions::default() };
    Session::open(path, &options, &mut |_, _| {}).unwrap()
}

/// Submits requests of callers, each with a number of tokens to generate, and returns the order in which they begin and end.
fn order_of_callers(running: usize, requests: &[(u64, usize)]) -> Option<(Vec<usize>, Vec<usize>)> {
    let path = fixture("gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf")?;
    let options = EngineOptions { running: Some(running), ..EngineOptions::default() };
    let mut engine = Engine::new(open(&path, running), &options);
    let order = Arc::new(Mutex::new((Vec::new(), Vec::new())));
    for (index, &(share, tokens)) in requests.iter().enumerate() {
        let order = order.clone();
        let sink = Box::new(move |event: Event| {
            let (begun, ended) = &mut *order.lock().unwrap();
            match event {
                Event::Token(_) if !begun.contains(&index) => begun.push(index),
                Event::Token(_) => {}
                Event::Finished { .. } => ended.push(index),
            }
            ControlFlow::Continue(())
        });
        let options = GenerateOptions::exactly(tokens, Sampling::greedy());
        let request = Request { prompt: vec![7; 3], options, share, ..Request::default() };
        engine.submit(request, sink).unwrap();
    }
    engine.drain().unwrap();
    Some(std::mem::take(&mut *order.lock().unwrap()))
}

#[test]
fn callers_begin_in_turn_however_many_requests_they_have() {
    let requests = [(1, 4), (1, 4), (1, 4), (1, 4), (2, 4), (2, 4), (3, 4)];
    let Some((begun, _)) = order_of_callers(1, &requests) else { return };
    assert_eq!(begun, [0, 4, 6, 1, 5, 2, 3], "with one place, one after the other");
    let (begun, _) = order_of_callers(3, &requests).expect("it was there");
    let mut first = begun[..3].to_vec();
    first.sort_unstable();
    assert_eq!(first, [0, 4, 6], "one of each caller, before a second one of the first caller");
}

#[test]
fn a_caller_that_waits_takes_a_place_of_one_that_has_several() {
    let Some(path) = fixture("gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf") else { return };
    let alone = |prompt: &[u32]| {
        let mut engine = Engine::new(open(&path, 1), &EngineOptions::default());
        let (sink, tokens) = collector();
        let options = GenerateOptions::exactly(40, Sampling::greedy());
        let request = Request { prompt: prompt.to_vec(), options, ..Request::default() };
        engine.submit(request, sink).unwrap();
        engine.drain().unwrap();
        std::mem::take(&mut *tokens.lock().unwrap())
    };
    let mut engine = Engine::new(open(&path, 3), &EngineOptions::default());
    let submit = |engine: &mut Engine, first: u32, share: u64| {
        let (sink, tokens) = collector();
        let options = GenerateOptions::exactly(40, Sampling::greedy());
        let prompt = vec![first, 7, 8];
        let request = Request { prompt: prompt.clone(), options, share, ..Request::default() };
        let id = engine.submit(request, sink).unwrap();
        (id, prompt, tokens)
    };
    let mut all: Vec<_> = (1..=3).map(|first| submit(&mut engine, first, 1)).collect();
    (0..5).for_each(|_| assert!(engine.step().unwrap()));
    assert_eq!((engine.load(), engine.statistics().suspended), ((0, 3), 0));
    all.push(submit(&mut engine, 4, 2));
    engine.step().unwrap();
    assert_eq!((engine.load(), engine.statistics().suspended), ((1, 3), 1));
    // A second one of the same caller has to wait, because the places are shared as equally as they can be.
    all.push(submit(&mut engine, 5, 2));
    engine.step().unwrap();
    assert_eq!((engine.load(), engine.statistics().suspended), ((2, 3), 1));
    // A third caller takes the place of the one that has two.
    all.push(submit(&mut engine, 6, 3));
    engine.step().unwrap();
    assert_eq!((engine.load(), engine.statistics().suspended), ((3, 3), 2));
    engine.drain().unwrap();
    for (_, prompt, tokens) in &all {
        assert_eq!(*tokens.lock().unwrap(), alone(prompt), "suspended requests keep their bits");
    }
}

#[test]
fn a_place_is_left_free_for_a_caller_that_may_ask_again() {
    let Some(path) = fixture("gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf") else { return };
    let submit = |engine: &mut Engine, share: u64| {
        let options = GenerateOptions::exactly(20, Sampling::greedy());
        let request = Request { prompt: vec![7; 3], options, share, ..Request::default() };
        engine.submit(request, Box::new(|_| ControlFlow::Continue(()))).unwrap();
    };
    for (presence, running) in [(Duration::from_secs(3600), 2), (Duration::ZERO, 3)] {
        let options = EngineOptions { presence, ..EngineOptions::default() };
        let mut engine = Engine::new(open(&path, 3), &options);
        submit(&mut engine, 2);
        engine.drain().unwrap();
        (0..4).for_each(|_| submit(&mut engine, 1));
        (0..5).for_each(|_| assert!(engine.step().unwrap()));
        assert_eq!(engine.load(), (4 - running, running), "{presence:?}");
        submit(&mut engine, 2);
        engine.step().unwrap();
        assert_eq!(engine.load(), (2, 3));
        assert_eq!(engine.statistics().suspended, running as u64 - 2, "{presence:?}");
        engine.drain().unwrap();
        assert_eq!(engine.load(), (0, 0));
    }
}

#[test]
fn no_caller_fills_a_queue_that_callers_share() {
    let Some(path) = fixture("gguf/llama_k/llama_k-Q4_K_M.gguf") else { return };
    let options = EngineOptions { waiting: 12, callers_share: true, ..EngineOptions::default() };
    let mut engine = Engine::new(open(&path, 1), &options);
    let mut fill = |share: u64| {
        let request = || Request { prompt: vec![1], share, ..Request::default() };
        let submit = || engine.submit(request(), Box::new(|_| ControlFlow::Continue(())));
        std::iter::repeat_with(submit).take_while(Result::is_ok).count()
    };
    // Each takes half of what is left, so there is always a place for another caller.
    assert_eq!([1, 2, 3, 1].map(&mut fill), [6, 3, 2, 0]);
    let others: Vec<usize> = (4..20).map(fill).collect();
    assert_eq!(others.iter().sum::<usize>(), 1, "the last place is that of a caller without one");
}

/// The requests of a caller that has many take turns beside those of another one, and none is left behind.
#[test]
fn many_requests_of_a_caller_advance_alike_beside_another_caller() {
    let Some(path) = fixture("gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf") else { return };
    const TOKENS: usize = 20;
    let mut engine = Engine::new(open(&path, 7), &EngineOptions::default());
    // The tokens of each request, and how many it had when the last one began: prompts are read in several passes.
    let counts = Arc::new(Mutex::new(([0_usize; 7], None)));
    for number in 0..7 {
        let counts = counts.clone();
        let sink = Box::new(move |event: Event| {
            if let Event::Token(_) = event {
                let (counts, first) = &mut *counts.lock().unwrap();
                counts[number] += 1;
                if counts.contains(&0) {
                    return ControlFlow::Continue(());
                }
                let first = first.get_or_insert(*counts);
                let since = || (0..6).map(|at| counts[at] - first[at]);
                // Those that began early end early.
                let all_run = counts[..6].iter().all(|count| *count < TOKENS);
                let (least, most) = (since().min().unwrap(), since().max().unwrap());
                assert!(most - least <= 2 || !all_run, "{counts:?} since {first:?}");
            }
            ControlFlow::Continue(())
        });
        let options = GenerateOptions::exactly(TOKENS, Sampling::greedy());
        let share = u64::from(number == 6);
        let request = Request { prompt: vec![7; 3], options, share, ..Request::default() };
        engine.submit(request, sink).unwrap();
    }
    engine.drain().unwrap();
    assert_eq!(counts.lock().unwrap().0, [TOKENS; 7]);
}
