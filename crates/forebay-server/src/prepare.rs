//! Requests with their prompts as tokens, ready to run.

use forebay_chat::{Format, Think, encode_prompt};
use forebay_engine::GenerateOptions;
use forebay_engine::engine::Request;
use forebay_text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value};

use crate::openai::{Input, Refusal, Wanted};

/// Settings with which requests become prompts.
pub struct Preparation<'a> {
    pub tokenizer: &'a Tokenizer,
    pub template: Option<&'a ChatTemplate>,
    pub format: Format,
    /// Most tokens of an answer whose request names no limit. `None` is the rest of the context.
    pub max_tokens: Option<usize>,
    /// True to refuse an amount of thinking that the template does not know. Otherwise it gets the nearest one.
    pub exact_thinking: bool,
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
    /// Prepares a request. `seed` is for a request that names none.
    ///
    /// # Errors
    /// Returns why the request cannot be run.
    pub fn prepare(&self, wanted: Wanted, seed: u64) -> Result<Prepared, Refusal> {
        let Wanted {
            input,
            max_tokens,
            mut sampling,
            has_seed,
            stops,
            choices,
            logprobs,
            model,
            ..
        } = wanted;
        if !has_seed {
            sampling.seed = seed;
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
                let mut all = self.thinking(think)?;
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
            max_tokens: max_tokens.or(self.max_tokens),
            sampling,
            ..GenerateOptions::default()
        };
        let request = Request { prompt: ids, options, logprobs, ..Request::default() };
        Ok(Prepared { text, request, format, continues, stops, choices, model })
    }

    fn encode(
        &self,
        field: &'static str,
        text: &str,
        templated: bool,
    ) -> Result<Vec<u32>, Refusal> {
        encode_prompt(self.tokenizer, text, templated)
            .map_err(|error| Refusal::of(field, error.to_string()))
    }

    /// Returns the template's variables for an amount of thinking.
    fn thinking(&self, think: Option<Think>) -> Result<Map<String, Value>, Refusal> {
        let Some(think) = think else { return Ok(Map::new()) };
        match self.format.think(think) {
            Ok(variables) => Ok(variables),
            Err(error) if self.exact_thinking => {
                Err(Refusal::of("reasoning_effort", error.to_string()))
            }
            Err(_) => {
                let nearest = match think {
                    Think::Off => Think::Low,
                    Think::On => Think::Medium,
                    Think::Low | Think::Medium | Think::High => Think::On,
                };
                Ok(self.format.think(nearest).unwrap_or_default())
            }
        }
    }
}

impl Prepared {
    /// Returns the request for one of its answers. Their seeds count up.
    pub fn request_of(&self, choice: usize) -> Request {
        let mut request = self.request.clone();
        let seed = &mut request.options.sampling.seed;
        *seed = seed.wrapping_add(choice as u64);
        request
    }

    /// Returns the positions that the prompt and the longest answer take.
    pub fn positions(&self) -> usize {
        self.request.prompt.len() + self.request.options.max_tokens.unwrap_or(0)
    }
}
