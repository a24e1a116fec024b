//! Runs several requests on one model together, and prints each answer when it is complete.
//!
//! ```sh
//! cargo run --release -p forebay-engine --example requests -- models/tales-moe-sticky-Q4_K_M.gguf "Once upon a time" "The old king" "A small dog"
//! ```

use std::error::Error;
use std::ops::ControlFlow;
use std::path::Path;

use forebay_engine::engine::{EngineOptions, Event, Request};
use forebay_engine::{DeviceChoice, Engine, GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, prompts @ ..] = &arguments[..] else {
        return Err("usage: requests MODEL PROMPT...".into());
    };

    // The cache has room for two whole contexts, so two requests run at a time and the others wait.
    let options = SessionOptions {
        device: DeviceChoice::Cpu,
        context: Some(256),
        sequences: 2,
        for_engine: true,
        ..SessionOptions::default()
    };
    let session = Session::open(Path::new(model), &options, &mut |_done, _total| {})?;
    let tokenizer = session.shared_tokenizer()?;
    let mut engine = Engine::new(session, &EngineOptions::default());

    for prompt in prompts {
        let request = Request {
            prompt: tokenizer.encode(prompt, true, false)?,
            options: GenerateOptions {
                max_tokens: Some(40),
                sampling: Sampling::greedy(),
                ..GenerateOptions::default()
            },
            text: true,
            ..Request::default()
        };
        let mut answer = prompt.clone();
        // The sink gets the events of this request. `ControlFlow::Break(())` would end it.
        let sink = Box::new(move |event: Event| {
            match event {
                Event::Token(token) => answer.push_str(&token.text),
                Event::Finished { end, text, statistics, .. } => {
                    println!(
                        "{answer}{text}\n  ({end:?}: {} tokens in {} passes, first token after {:.0} ms)",
                        statistics.generated_tokens,
                        statistics.passes,
                        1e3 * statistics.first_token_seconds.unwrap_or_default()
                    );
                }
            }
            ControlFlow::Continue(())
        });
        engine.submit(request, sink)?;
    }
    // Runs passes until no request is left.
    engine.drain()?;
    Ok(())
}
