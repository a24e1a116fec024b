//! Measures how much recording the routing slows down generation. Stretches of tokens with and without a recording
//! alternate in one process, because machines drift by more between two processes than a recording costs.
//!
//! ```sh
//! cargo run --release -p forebay-engine --example recording_cost -- MODEL [PAIRS] [TOKENS] [plain|scores]
//! ```

use std::fs::File;
use std::io::BufWriter;
use std::ops::ControlFlow;
use std::time::Instant;

use forebay_engine::{GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;

/// Returns the seconds per generated token, averaged over `tokens` tokens. The time includes ending the recording. It
/// excludes starting it, which writes a header once per session.
fn seconds_per_token(session: &mut Session, tokens: usize, recording: Option<bool>) -> f64 {
    session.reset();
    if let Some(scores) = recording {
        let path = std::env::temp_dir().join(format!("recording-cost-{}", std::process::id()));
        let file = File::create(&path).expect("a temporary file");
        // The file system frees the file when it is closed.
        std::fs::remove_file(&path).expect("the file just made");
        let recorded = session.record_routing(Box::new(BufWriter::new(file)), scores);
        recorded.expect("a model with experts");
    }
    let options = GenerateOptions::exactly(tokens + 1, Sampling::greedy());
    // The first token comes from the prompt, so the clock starts at it.
    let mut started = None;
    let answer = session.generate(&[1], &options, &mut |_| {
        started.get_or_insert_with(Instant::now);
        ControlFlow::Continue(())
    });
    assert_eq!(answer.expect("tokens").tokens.len(), tokens + 1);
    session.end_routing().expect("a trace");
    started.expect("a first token").elapsed().as_secs_f64() / tokens as f64
}

/// Returns the median and its 95 % confidence interval (from the sign test).
fn median(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    let reach = (0.98 * (values.len() as f64).sqrt()).ceil() as usize;
    (values[half], values[half.saturating_sub(reach)], values[(half + reach).min(values.len() - 1)])
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let model = arguments.first().expect("recording_cost MODEL [PAIRS] [TOKENS] [plain|scores]");
    let number = |index: usize, default: usize| {
        arguments.get(index).map_or(default, |text| text.parse().expect("a number"))
    };
    let (pairs, tokens) = (number(1, 100).max(1), number(2, 16).max(1));
    let scores = match arguments.get(3).map_or("plain", String::as_str) {
        "plain" => false,
        "scores" => true,
        other => panic!("plain or scores, not {other}"),
    };
    let options = SessionOptions::default();
    let mut session =
        Session::open(model.as_ref(), &options, &mut |_, _| {}).expect("a model that can be run");
    seconds_per_token(&mut session, tokens, None);
    let mut ratios = Vec::with_capacity(pairs);
    let mut without_recording = Vec::with_capacity(pairs);
    for pair in 0..pairs {
        let recorded_first = pair % 2 == 0;
        let first = seconds_per_token(&mut session, tokens, recorded_first.then_some(scores));
        let second = seconds_per_token(&mut session, tokens, (!recorded_first).then_some(scores));
        let (with, without) = if recorded_first { (first, second) } else { (second, first) };
        ratios.push(with / without);
        without_recording.push(without);
    }
    let (ratio, low, high) = median(ratios);
    let (seconds, ..) = median(without_recording);
    println!(
        "{pairs} pairs of {tokens} tokens: {:.2} ms a token; a recording{} takes {:+.2} % ({:+.2} to {:+.2} with 95 %)",
        1e3 * seconds,
        if scores { " with scores" } else { "" },
        100.0 * (ratio - 1.0),
        100.0 * (low - 1.0),
        100.0 * (high - 1.0)
    );
}
