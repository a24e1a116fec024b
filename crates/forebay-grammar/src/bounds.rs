//! Bounds for the work on grammars that come from others.
//!
//! The parser recurses as deep as rules lead to each other, and some regular expressions take it minutes. Clients choose both. So each
//! grammar is compiled by a thread with a large stack, for which a request waits a bounded time. A server has such threads of its own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::{GrammarError, Rules};

/// Stack of threads that compile grammars. A reference that leads to the next one takes up to 20 KB. Only what is used takes memory.
pub const COMPILING_STACK_BYTES: usize = 512 << 20;

/// Stack of threads that compute masks or take tokens.
pub const STACK_BYTES: usize = 64 << 20;

/// Longest text of a grammar or a schema. Longer ones have more symbols than the parser can number.
const BYTES_MAX: usize = 256 << 10;

/// Most bytes of regular expressions and of rules. The parser's time grows with their square or cube.
const RULE_BYTES_MAX: usize = 64 << 10;

/// Longest time that a request waits for its grammar.
const WAIT: Duration = Duration::from_secs(20);

/// Most compilations that go on although nobody waits for them. No grammar is compiled until one of them ends.
const ABANDONED_MAX: usize = 2;

static ABANDONED: AtomicUsize = AtomicUsize::new(0);

/// Checks that a grammar is not so long that it could only fail, after a long time.
///
/// # Errors
/// Returns an error if it is.
pub fn check(rules: &Rules) -> Result<(), GrammarError> {
    let (bytes, rule_bytes) = match rules {
        Rules::JsonObject => (0, 0),
        Rules::JsonSchema(schema) => (schema.to_string().len(), expression_bytes(schema)),
        Rules::Regex(text) | Rules::Gbnf(text) => (text.len(), text.len()),
        Rules::Lark(text) => {
            // Schemas in a rule are data.
            let own = text.lines().filter(|line| !line.contains("%json"));
            (text.len(), own.map(str::len).sum())
        }
    };
    let too_long = |what: &str, found: usize, most: usize| {
        Err(GrammarError::Invalid(format!("it has {found} bytes{what}, and {most} are supported")))
    };
    match (bytes, rule_bytes) {
        (bytes, _) if bytes > BYTES_MAX => too_long("", bytes, BYTES_MAX),
        (_, bytes) if bytes > RULE_BYTES_MAX => {
            too_long(" of rules and regular expressions", bytes, RULE_BYTES_MAX)
        }
        _ => Ok(()),
    }
}

/// Returns the bytes of all regular expressions of a schema.
fn expression_bytes(schema: &Value) -> usize {
    match schema {
        Value::Array(all) => all.iter().map(expression_bytes).sum(),
        Value::Object(fields) => {
            let of = |(name, value): (&String, &Value)| {
                let own = match (name.as_str(), value) {
                    ("pattern", Value::String(text)) => text.len(),
                    ("patternProperties", Value::Object(fields)) => {
                        fields.keys().map(String::len).sum()
                    }
                    _ => 0,
                };
                own + expression_bytes(value)
            };
            fields.iter().map(of).sum()
        }
        _ => 0,
    }
}

/// Runs work on a thread of its own.
///
/// # Errors
/// Returns an error if the work takes too long or panics, if too much work of others does not come to an end, or if the system starts
/// no thread.
pub fn run<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, GrammarError> {
    run_within(WAIT, &ABANDONED, work)
}

/// Runs work on this thread.
///
/// # Errors
/// Returns an error if the work panics.
pub fn run_here<T>(work: impl FnOnce() -> T) -> Result<T, GrammarError> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|_| GrammarError::Invalid("the parser panics".into()))
}

fn run_within<T: Send + 'static>(
    wait: Duration,
    abandoned: &'static AtomicUsize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, GrammarError> {
    if abandoned.load(Ordering::Relaxed) >= ABANDONED_MAX {
        let why = "other grammars, which take too long, are still being compiled: try again later";
        return Err(GrammarError::Busy(why.into()));
    }
    let (sender, done) = sync_channel(0);
    let builder = thread::Builder::new().name("grammar".into()).stack_size(COMPILING_STACK_BYTES);
    let started = builder.spawn(move || {
        // Without room in the channel, this fails as soon as nobody waits any more.
        if sender.send(work()).is_err() {
            abandoned.fetch_sub(1, Ordering::Relaxed);
        }
    });
    started.map_err(|error| GrammarError::Busy(format!("the system starts no thread: {error}")))?;
    match done.recv_timeout(wait) {
        Ok(result) => Ok(result),
        Err(RecvTimeoutError::Disconnected) => {
            Err(GrammarError::Invalid("the parser panics".into()))
        }
        Err(RecvTimeoutError::Timeout) => {
            abandoned.fetch_add(1, Ordering::Relaxed);
            drop(done);
            let why = format!("compiling it takes longer than {} seconds", wait.as_secs_f64());
            Err(GrammarError::Invalid(why))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_too_long_is_refused() {
        let long = "a".repeat(RULE_BYTES_MAX);
        let pattern = |text: &str| json!({ "anyOf": [{ "type": "string", "pattern": text }] });
        for fine in [
            Rules::JsonObject,
            Rules::Regex(long.clone()),
            Rules::JsonSchema(pattern(&long)),
            Rules::JsonSchema(json!({ "const": long.repeat(2) })),
            Rules::Lark(format!("start: a\na: %json {{\"const\": \"{}\"}}", long.repeat(2))),
        ] {
            check(&fine).unwrap();
        }
        for wrong in [
            Rules::Regex(format!("{long}b")),
            Rules::JsonSchema(pattern(&format!("{long}b"))),
            Rules::JsonSchema(json!({ "patternProperties": { format!("{long}b"): true } })),
            Rules::JsonSchema(json!({ "const": "a".repeat(BYTES_MAX) })),
            Rules::Lark(format!("start: a\na: \"{long}\"")),
        ] {
            assert!(matches!(check(&wrong), Err(GrammarError::Invalid(_))));
        }
    }

    static OWN: AtomicUsize = AtomicUsize::new(0);

    #[test]
    fn work_that_takes_too_long_is_abandoned_and_counted() {
        assert_eq!(run_within(WAIT, &OWN, || 7).unwrap(), 7);
        let mut ends = Vec::new();
        for _ in 0..ABANDONED_MAX {
            let (end, ended) = channel::<()>();
            ends.push(end);
            let error = run_within(Duration::from_millis(20), &OWN, move || ended.recv().is_ok());
            assert!(matches!(error, Err(GrammarError::Invalid(_))), "{error:?}");
        }
        let error = run_within(WAIT, &OWN, || 7);
        assert!(matches!(error, Err(GrammarError::Busy(_))), "{error:?}");
        drop(ends);
        while OWN.load(Ordering::Relaxed) > 0 {
            thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(run_within(WAIT, &OWN, || 7).unwrap(), 7);
        let error = run_within(WAIT, &OWN, || -> u32 { panic!("on purpose") });
        assert!(matches!(error, Err(GrammarError::Invalid(_))), "{error:?}");
    }
}
