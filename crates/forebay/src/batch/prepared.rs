//! Requests with their prompts as tokens, ready to run.

use forebay_chat::Format;
use forebay_engine::GenerateOptions;
use forebay_engine::engine::Request;
use forebay_text::{ChatTemplate, Tokenizer};
use twox_hash::XxHash3_64;

use super::openai::{Input, Line, Refusal, Wanted, wanted};
use crate::chat::encode;

/// Settings with which requests become prompts.
pub struct Preparation<'a> {
    pub tokenizer: &'a Tokenizer,
    pub template: Option<&'a ChatTemplate>,
    pub format: Format,
    /// Most tokens of an answer whose request names no limit.
    pub max_tokens: usize,
    /// Seed from which requests without a seed get theirs.
    pub seed: u64,
}

/// A request that is ready to run.
pub struct Prepared {
    /// Text of the prompt, which says how the answer begins.
    pub text: String,
    pub request: Request,
    pub format: Format,
    /// True if the answer continues the text of the prompt.
    pub continues: bool,
    pub stops: Vec<String>,
    pub choices: usize,
    /// Name of the model in the answer, if the request gives one.
    pub model: Option<String>,
}

impl Preparation<'_> {
    /// Prepares the request of line `number`.
    ///
    /// # Errors
    /// Returns why the request cannot be run.
    pub fn prepare(&self, number: usize, line: &Line) -> Result<Prepared, Refusal> {
        let Wanted { input, max_tokens, mut sampling, has_seed, stops, choices, model } =
            wanted(line)?;
        if !has_seed {
            // Choices count up from the seed, so seeds of neighbouring lines must be far apart.
            let line = (number as u64).to_le_bytes();
            sampling.seed = XxHash3_64::oneshot_with_seed(self.seed, &line);
        }
        let (text, ids, format, continues) = match input {
            Input::Text(text) => {
                let ids = self.encode("prompt", &text, false)?;
                (text, ids, Format::default(), true)
            }
            Input::Ids(ids) => {
                let text = self.tokenizer.decode(&ids, true);
                (text, ids, Format::default(), true)
            }
            Input::Chat { messages, tools, think, variables } => {
                let no_template = "this model has no chat template: use /v1/completions";
                let template = self.template.ok_or(Refusal::of("messages", no_template))?;
                let thinks = think.map(|think| self.format.think(think)).transpose();
                let mut all = thinks
                    .map_err(|error| Refusal::of("reasoning_effort", error.to_string()))?
                    .unwrap_or_default();
                for (name, value) in variables {
                    let known = self.format.check_variable(&name);
                    known.map_err(|e| Refusal::of("chat_template_kwargs", e.to_string()))?;
                    all.insert(name, value);
                }
                let text = self.format.render(template, &messages, tools.as_ref(), &all);
                let text = text.map_err(|error| Refusal::of("messages", error.to_string()))?;
                let ids = self.encode("messages", &text, true)?;
                (text, ids, self.format.clone(), false)
            }
        };
        if ids.is_empty() {
            return Err(Refusal::of("prompt", "the prompt is empty"));
        }
        let options = GenerateOptions {
            max_tokens: Some(max_tokens.unwrap_or(self.max_tokens)),
            sampling,
            ..GenerateOptions::default()
        };
        let request = Request { prompt: ids, options, ..Request::default() };
        Ok(Prepared { text, request, format, continues, stops, choices, model })
    }

    fn encode(
        &self,
        field: &'static str,
        text: &str,
        templated: bool,
    ) -> Result<Vec<u32>, Refusal> {
        encode(self.tokenizer, text, templated)
            .map_err(|error| Refusal::of(field, format!("{error:#}")))
    }
}

impl Prepared {
    /// Returns the positions that the prompt and the longest answer take.
    pub fn positions(&self) -> usize {
        self.request.prompt.len() + self.request.options.max_tokens.unwrap_or(0)
    }
}
