//! `forebay tokenize` converts text to token ids.

use forebay_text::Tokenizer;
use serde::Serialize;

use crate::args::TokenizeArgs;
use crate::failure::Outcome;
use crate::open;
use crate::output;
use crate::text_input;

#[derive(Serialize)]
struct Document<'a> {
    tokenizer: &'a str,
    token_count: usize,
    ids: &'a [u32],
    tokens: Vec<Token>,
}

#[derive(Serialize)]
struct Token {
    id: u32,
    /// Bytes of this token alone, as text where they are whole characters.
    text: String,
}

pub fn run(args: TokenizeArgs) -> Outcome {
    let catalog = open::catalog(&args.model)?;
    let tokenizer =
        Tokenizer::from_catalog(&catalog).map_err(|error| open::named(error, &args.model))?;
    let text = match args.text {
        Some(text) => text,
        None => text_input::standard()?,
    };
    let ids = tokenizer.encode(&text, !args.no_special, args.parse_special)?;
    if args.json {
        let tokens = ids
            .iter()
            .map(|&id| Token {
                id,
                text: String::from_utf8_lossy(&tokenizer.token_bytes(id, true)).into_owned(),
            })
            .collect();
        let tokenizer = tokenizer.kind();
        return output::json(&Document { tokenizer, token_count: ids.len(), ids: &ids, tokens });
    }
    let words: Vec<String> = ids.iter().map(u32::to_string).collect();
    output::print(&(words.join(" ") + "\n"))
}
