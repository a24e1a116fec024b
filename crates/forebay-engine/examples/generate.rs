//! Generates text with a model that need not fit in memory.
//!
//! ```sh
//! cargo run --release -p forebay-engine --example generate -- models/tales-moe-sticky-Q4_K_M.gguf "Once upon a time" 32MiB
//! ```

use std::error::Error;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::Path;

use forebay_engine::{DeviceChoice, GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, prompt, ram] = &arguments[..] else {
        return Err("usage: generate MODEL PROMPT RAM (such as 32MiB)".into());
    };
    let mebibytes = ram.strip_suffix("MiB").ok_or("give RAM in MiB, such as 32MiB")?;
    let budget: u64 = mebibytes.parse()?;

    // All memory for weights is reserved here. If the budget is too small, the error names the smallest one that works.
    let options = SessionOptions {
        device: DeviceChoice::Cpu,
        ram_bytes: Some(budget << 20),
        context: Some(512),
        ..SessionOptions::default()
    };
    let mut session = Session::open(Path::new(model), &options, &mut |_done, _total| {})?;

    let tokenizer = session.shared_tokenizer()?;
    let tokens = tokenizer.encode(prompt, true, false)?;

    // The closure gets each token as soon as it is chosen. `ControlFlow::Break(())` would stop here.
    let options = GenerateOptions {
        max_tokens: Some(60),
        sampling: Sampling::greedy(),
        ..GenerateOptions::default()
    };
    print!("{prompt}");
    let answer = session.generate(&tokens, &options, &mut |token| {
        // A character can consist of several tokens, so a real program collects bytes until they are whole.
        print!("{}", String::from_utf8_lossy(&tokenizer.token_bytes(token, false)));
        let _ = std::io::stdout().flush();
        ControlFlow::Continue(())
    })?;
    println!();

    eprintln!(
        "{} tokens, {:.0} tokens/s, stopped because: {:?}",
        answer.tokens.len(),
        answer.generate_tokens_per_second(),
        answer.stop_reason
    );
    Ok(())
}
