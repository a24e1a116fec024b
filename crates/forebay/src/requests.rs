//! Files of requests in OpenAI's batch format.

use std::path::Path;
use std::sync::Arc;

use anyhow::anyhow;
use forebay_chat::Format;
use forebay_engine::Inspection;
use forebay_grammar::Compiler;
use forebay_requests::{Endpoint, Preparation, Prepared, Refusal};
use forebay_server::batches::{Line, Url, scan};
use forebay_text::{ChatTemplate, Tokenizer};

use crate::failure::Outcome;
use crate::open;
use crate::text_input;

/// Reads a file of completions and chats. Returns its text and its requests, of which there is at least one.
pub fn read(path: &Path) -> Outcome<(String, Vec<Line>)> {
    let text = text_input::requests(path)?;
    let mut lines = Vec::new();
    let read = scan(text.as_bytes(), &[Url::Completions, Url::Chat], |_, line| {
        lines.push(line);
        Ok(())
    });
    read.map_err(|why| anyhow!("{}: {why}", path.display()))?;
    if lines.is_empty() {
        return Err(anyhow!("{}: there is no request", path.display()).into());
    }
    Ok((text, lines))
}

/// What requests do not say themselves.
pub struct Defaults {
    /// Most tokens of an answer.
    pub max_tokens: usize,
    pub context: Option<usize>,
    /// True if special tokens in messages are special tokens.
    pub special_tokens_in_messages: bool,
}

/// Turns requests into tokens. `seed` returns that of a request that names none.
pub fn prepare(
    inspection: &Inspection,
    model: &Path,
    lines: &[Line],
    defaults: &Defaults,
    seed: impl Fn(usize) -> u64,
) -> Outcome<Vec<Result<Prepared, Refusal>>> {
    let named = |error| open::named(error, model);
    let tokenizer = Arc::new(Tokenizer::from_catalog(&inspection.catalog).map_err(named)?);
    let compiler = Compiler::new(&tokenizer);
    let template = ChatTemplate::from_catalog(&inspection.catalog).map_err(named)?;
    let mut format = Format::recognise(template.as_ref(), Some(&tokenizer))?;
    if defaults.special_tokens_in_messages {
        format = format.with_special_tokens_in_messages();
    }
    let preparation = Preparation {
        tokenizer: &tokenizer,
        compiler: &compiler,
        template: template.as_ref(),
        format,
        max_tokens: Some(defaults.max_tokens),
        context: defaults.context,
        exact_thinking: true,
        exact_variables: true,
    };
    let prepare = |(number, line): (usize, &Line)| {
        preparation.prepare(line.wanted(endpoint(line))?, seed(number))
    };
    Ok(lines.iter().enumerate().map(prepare).collect())
}

/// Returns the kind of answer that a line asks for.
pub fn endpoint(line: &Line) -> Endpoint {
    line.url.endpoint().expect("embeddings were refused when the lines were read")
}
