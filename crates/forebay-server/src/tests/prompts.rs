//! Prompts of one key are not shared with another key.

use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::{Value, json};

use crate::models::KeepAlive;
use crate::testing::{Running, Test};

/// Returns the cached tokens of a streamed completion.
fn cached(body: &str) -> u64 {
    let parts = body.lines().filter_map(|line| line.strip_prefix("data: {"));
    let parts = parts.map(|part| serde_json::from_str::<Value>(&format!("{{{part}")).unwrap());
    let usage: Vec<Value> = parts.filter_map(|part| part.get("usage").cloned()).collect();
    let of = |usage: &Value| usage.pointer("/prompt_tokens_details/cached_tokens")?.as_u64();
    usage.iter().find_map(of).unwrap_or_else(|| panic!("no usage: {body}"))
}

/// Streams that begin after their first comment are polled outside of their handlers.
#[test]
fn keys_do_not_share_prompts_of_streams_that_begin_late() {
    for shares in [false, true] {
        let test = Test::new(&[("a", 6, 6)]);
        test.is_held.store(true, Ordering::SeqCst);
        let models = test.models_one_by_one(KeepAlive::Forever);
        let server = Running::start(models, "A\nB", |options| {
            options.ping = Some(Duration::from_millis(1));
            options.shares_prefixes = shares;
        });
        let body = |first: u32| {
            let prompt: Vec<u32> = (first..first + 40).collect();
            json!({ "model": "a", "prompt": prompt, "max_tokens": 1, "stream": true,
                "stream_options": { "include_usage": true } })
        };
        let late = |key: &str| {
            let mut answer = server.begin(key, "POST", "/v1/completions", &body(1).to_string());
            answer.until(": keep-alive");
            answer
        };
        let both = [late("A"), late("B")];
        test.is_held.store(false, Ordering::SeqCst);
        let [first, second] = both.map(|answer| cached(&answer.rest().1));
        let again = |key: &str, first: u32| {
            cached(&server.ask(key, "POST", "/v1/completions", &body(first)).1)
        };
        // The requests run one after the other, so the later one would find what the other one computed.
        let found = [first, second].into_iter().filter(|cached| *cached > 0).count();
        assert_eq!(found, usize::from(shares));
        // The late requests were in the right place: later ones of the same key find them.
        assert!(again("A", 1) > 0 && again("B", 1) > 0);
        assert_eq!((again("A", 2), again("B", 2) > 0), (0, shares));
    }
}
