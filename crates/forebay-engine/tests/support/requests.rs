//! Runs requests of an engine to their end.
#![allow(dead_code, reason = "every test file uses a part of it")]

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use forebay_engine::engine::{Event, Request, RequestEnd, RequestStatistics, Sink};
use forebay_engine::{Engine, GenerateOptions};
use forebay_model::sampling::Sampling;

/// What a request generated, with the bits of logarithmic probabilities, and its statistics.
pub type Answer = (Vec<(u32, u32)>, RequestStatistics);

/// Runs requests together. Each generates `tokens` tokens.
pub fn ask(
    engine: &mut Engine,
    prompts: &[Vec<u32>],
    tokens: usize,
    namespace: &[u8],
) -> Vec<Answer> {
    let answers = Arc::new(Mutex::new(vec![Answer::default(); prompts.len()]));
    for (index, prompt) in prompts.iter().enumerate() {
        let answers = answers.clone();
        let sink = Box::new(move |event: Event| {
            let answer = &mut answers.lock().unwrap()[index];
            match event {
                Event::Token(token) => {
                    answer.0.push((token.id, token.logprob.expect("asked for").to_bits()));
                }
                Event::Finished { end, statistics, .. } => {
                    assert_eq!(end, RequestEnd::MaxTokens);
                    answer.1 = statistics;
                }
            }
            ControlFlow::Continue(())
        });
        let request = Request {
            prompt: prompt.clone(),
            options: GenerateOptions::exactly(tokens, Sampling::greedy()),
            logprobs: Some(1),
            namespace: namespace.to_vec(),
            ..Request::default()
        };
        engine.submit(request, sink).unwrap();
    }
    engine.drain().unwrap();
    let mut answers = answers.lock().unwrap();
    std::mem::take(&mut *answers)
}

/// Runs one request. Returns the number of its cached tokens, and what it generated.
pub fn ask_one(
    engine: &mut Engine,
    prompt: &[u32],
    tokens: usize,
    namespace: &[u8],
) -> (usize, Vec<(u32, u32)>) {
    let (generated, statistics) = ask(engine, &[prompt.to_vec()], tokens, namespace).remove(0);
    (statistics.cached_tokens, generated)
}

/// Tokens of a request with their texts. Behind them is the rest of the text.
pub type Collected = Arc<Mutex<Vec<(u32, String)>>>;

/// Returns a sink that collects tokens with their texts, and the list.
pub fn collector() -> (Sink, Collected) {
    let tokens = Arc::new(Mutex::new(Vec::new()));
    let to = tokens.clone();
    let sink = Box::new(move |event: Event| {
        match event {
            Event::Token(token) => to.lock().unwrap().push((token.id, token.text)),
            Event::Finished { text, .. } => to.lock().unwrap().push((0, text)),
        }
        ControlFlow::Continue(())
    });
    (sink, tokens)
}
