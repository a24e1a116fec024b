//! Requests with their prompts as tokens, ready to run.

use forebay_chat::{CallsWanted, Format, Gap, Think, encode_prompt, infill_prompt};
use forebay_engine::GenerateOptions;
use forebay_engine::engine::Request;
use forebay_grammar::{Compiler, Grammar, GrammarError, Rules};
use forebay_model::sampling::Ban;
use forebay_text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};

use crate::request::{Ends, Input, MustCall, NOT_NOW, Refusal, TOO_LONG, Wanted};

/// Settings with which requests become prompts.
pub struct Preparation<'a> {
    pub tokenizer: &'a Tokenizer,
    pub compiler: &'a Compiler,
    pub template: Option<&'a ChatTemplate>,
    pub format: Format,
    /// Most tokens of an answer whose request names no limit. `None` is the rest of the context.
    pub max_tokens: Option<usize>,
    /// Positions of a sequence, if they are known. A text that cannot fit is then refused before its tokens are made.
    pub context: Option<usize>,
    /// True to refuse an amount of thinking or a variable that the template does not know. Otherwise it gets the nearest amount,
    /// and the variable has no effect.
    pub exact_thinking: bool,
}

/// What a request says about the form of its answer.
struct Form {
    rules: Option<Rules>,
    must_call: Option<MustCall>,
    /// Tools that the answer may call.
    calls: Option<Value>,
    parallel_calls: bool,
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
    /// True if the stop text that ends an answer is a part of it.
    pub keeps_stop: bool,
    /// Number of answers to all prompts.
    pub choices: usize,
    /// Prompts after the first one.
    pub more: Vec<Prompt>,
    /// True to begin each answer with the text of its prompt.
    pub echo: bool,
    /// True to report the probabilities of the prompt's tokens by themselves.
    pub reports_prompt: bool,
    /// True if a tool call is reported as `function_call`.
    pub function_form: bool,
    /// Name of the model in the answer, if the request gives one.
    pub model: Option<String>,
}

/// A prompt as text and tokens.
pub struct Prompt {
    pub text: String,
    pub ids: Vec<u32>,
}

/// The prompts of a request, and what follows from them.
struct Source {
    text: String,
    ids: Vec<u32>,
    /// Prompts after the first one.
    more: Vec<Prompt>,
    format: Format,
    /// True if the answer continues the text of the prompt.
    continues: bool,
    /// Tools that the answer may call.
    calls: Option<Value>,
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
            ends,
            choices,
            logprobs,
            prompt_logprobs,
            echo,
            rules,
            must_call,
            parallel_calls,
            function_form,
            model,
            ..
        } = wanted;
        if !has_seed {
            sampling.seed = seed;
        }
        sampling.banned = self.bans(&ends)?;
        let Source { text, ids, more, format, continues, calls } = self.source(input)?;
        if ids.is_empty() || more.iter().any(|prompt| prompt.ids.is_empty()) {
            return Err(Refusal::of("prompt", "the prompt is empty"));
        }
        let options = GenerateOptions {
            max_tokens: max_tokens.or(self.max_tokens),
            sampling,
            stop_ids: ends.stop_ids,
            ..GenerateOptions::default()
        };
        let form = Form { rules, must_call, calls, parallel_calls };
        let grammar = self.grammar(form, &text, &format)?;
        let prompt = ids;
        let request =
            Request { prompt, options, logprobs, prompt_logprobs, grammar, ..Request::default() };
        Ok(Prepared {
            text,
            request,
            format,
            continues,
            stops,
            keeps_stop: ends.keeps_stop,
            choices: choices * (1 + more.len()),
            more,
            echo,
            reports_prompt: prompt_logprobs.is_some() && !(echo && logprobs.is_some()),
            function_form,
            model,
        })
    }

    /// Makes the prompts of a request.
    fn source(&self, input: Input) -> Result<Source, Refusal> {
        let (mut calls, mut more) = (None, Vec::new());
        let (text, ids, format, continues) = match input {
            Input::Text(_) | Input::Ids(_) => {
                let Prompt { text, ids } = self.prompt(input)?;
                (text, ids, Format::default(), true)
            }
            Input::Several(inputs) => {
                let prompts = inputs.into_iter().map(|input| self.prompt(input));
                let mut prompts = prompts.collect::<Result<Vec<_>, _>>()?.into_iter();
                let none = || Refusal::of("prompt", "prompt is empty");
                let Prompt { text, ids } = prompts.next().ok_or_else(none)?;
                more = prompts.collect();
                (text, ids, Format::default(), true)
            }
            Input::Infill(gap) => {
                let ids = self.infill(&gap)?;
                (self.tokenizer.decode(&ids, true), ids, Format::default(), true)
            }
            Input::Chat { messages, tools, think, variables } => {
                let no_template = "this model has no chat template: use /v1/completions";
                let template = self.template.ok_or(Refusal::of("messages", no_template))?;
                let mut all = self.thinking(think)?;
                for (name, value) in variables {
                    match self.format.check_variable(&name) {
                        Ok(()) => drop(all.insert(name, value)),
                        Err(error) if self.exact_thinking => {
                            return Err(Refusal::of("chat_template_kwargs", error.to_string()));
                        }
                        // Clients send the variables of one family to all.
                        Err(_) => {}
                    }
                }
                calls = tools.clone();
                let format = self.format.offering(tools.as_ref());
                let text = format.render(template, &messages, tools.as_ref(), &all);
                let text = text.map_err(|error| Refusal::of("messages", error.to_string()))?;
                let ids = self.encode("messages", &text, true)?;
                (text, ids, format, false)
            }
        };
        Ok(Source { text, ids, more, format, continues, calls })
    }

    /// Makes a prompt of a text or of tokens.
    fn prompt(&self, input: Input) -> Result<Prompt, Refusal> {
        match input {
            Input::Text(text) => Ok(Prompt { ids: self.encode("prompt", &text, false)?, text }),
            Input::Ids(ids) => {
                let size = self.tokenizer.vocab_size();
                match ids.iter().find(|id| **id as usize >= size) {
                    Some(id) => {
                        let why = format!("token {id} is not in the vocabulary of {size}");
                        Err(Refusal::of("prompt", why))
                    }
                    None => Ok(Prompt { text: self.tokenizer.decode(&ids, true), ids }),
                }
            }
            _ => Err(Refusal::of("prompt", "prompt must be texts or token ids")),
        }
    }

    /// Returns the tokens that may not be chosen.
    fn bans(&self, ends: &Ends) -> Result<Vec<Ban>, Refusal> {
        let of_model = self.tokenizer.eog_ids();
        let ban = |id: &u32, until| Ban { ids: vec![*id], until };
        let mut bans = Vec::new();
        if ends.ignores_end {
            bans.extend(of_model.iter().map(|id| ban(id, None)));
        }
        if ends.least > 0 {
            let all = of_model.iter().chain(&ends.stop_ids);
            bans.extend(all.map(|id| ban(id, Some(ends.least))));
        }
        for word in &ends.bad_words {
            // In the middle of a text, most vocabularies have the space in the word's first token.
            for text in [word.trim_start().to_owned(), format!(" {}", word.trim_start())] {
                let ids = self.tokenizer.encode(&text, false, false);
                let ids = ids.map_err(|error| Refusal::of("bad_words", error.to_string()))?;
                if !word.trim().is_empty() && !ids.is_empty() {
                    bans.push(Ban { ids, until: None });
                }
            }
        }
        Ok(bans)
    }

    /// Compiles the grammar of the answer to `prompt`.
    fn grammar(
        &self,
        form: Form,
        prompt: &str,
        format: &Format,
    ) -> Result<Option<Grammar>, Refusal> {
        let Form { rules, must_call, calls, parallel_calls } = form;
        let compile = |field, rules: &Rules, preamble: Option<&_>| {
            let grammar = self.compiler.compile(rules, preamble);
            grammar.map(Some).map_err(|error| {
                let code = matches!(error, GrammarError::Busy(_)).then_some(NOT_NOW);
                Refusal { code, ..Refusal::of(field, error.to_string()) }
            })
        };
        let name = match &must_call {
            Some(MustCall::Named(name)) => Some(name.as_str()),
            _ => None,
        };
        let several = parallel_calls && name.is_none();
        let rules_of_calls = |instead: Option<&_>| {
            let none = Value::Null;
            let wanted = CallsWanted { tools: calls.as_ref().unwrap_or(&none), name, several };
            let rules = format.call_rules(&wanted, instead, self.tokenizer);
            rules.map_err(|error| Refusal::of("tool_choice", error.to_string()))
        };
        match (&rules, &must_call) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) => Err(Refusal::of(
                "tool_choice",
                "a call that is required leaves no room for response_format",
            )),
            (None, Some(_)) => {
                let rules = rules_of_calls(None)?;
                compile("tool_choice", &rules, format.preamble_of_calls(prompt).as_ref())
            }
            (Some(rules), None) => {
                let preamble = format.preamble(prompt);
                // An answer of a form may also be calls, if there are tools.
                let object = json!({ "type": "object" });
                let schema = match rules {
                    Rules::JsonObject => Some(&object),
                    Rules::JsonSchema(schema) => Some(schema),
                    _ => None,
                };
                match schema.filter(|_| calls.is_some() && format.calls_tools()) {
                    Some(schema) => {
                        let rules = rules_of_calls(Some(schema))?;
                        compile("response_format", &rules, preamble.as_ref())
                    }
                    None => compile("response_format", rules, preamble.as_ref()),
                }
            }
        }
    }

    /// Makes the prompt for a gap between two texts.
    fn infill(&self, gap: &Gap) -> Result<Vec<u32>, Refusal> {
        let none = "this model's vocabulary has no tokens for filling in the middle, so it cannot \
                    take a suffix: leave it out, or use a model that has them";
        let ids = infill_prompt(self.tokenizer, gap);
        let ids = ids.map_err(|error| Refusal::of("suffix", error.to_string()))?;
        ids.ok_or_else(|| Refusal::of("suffix", none))
    }

    fn encode(
        &self,
        field: &'static str,
        text: &str,
        templated: bool,
    ) -> Result<Vec<u32>, Refusal> {
        let least = self.tokenizer.tokens_least(text.len());
        if let Some(context) = self.context.filter(|context| least > *context) {
            let message = format!(
                "the context is too short: it has {context} positions, and this prompt has at least {least} tokens; \
                 give a larger --ctx or a shorter prompt"
            );
            return Err(Refusal { code: Some(TOO_LONG), ..Refusal::of(field, message) });
        }
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
        if let Some(prompt) = self.other(choice) {
            request.prompt.clone_from(&prompt.ids);
        }
        let seed = &mut request.options.sampling.seed;
        *seed = seed.wrapping_add((choice % self.choices_of_prompt()) as u64);
        request
    }

    /// Returns the number of answers to each prompt.
    fn choices_of_prompt(&self) -> usize {
        (self.choices / (1 + self.more.len())).max(1)
    }

    /// Returns the number of the prompt of an answer.
    pub fn prompt_of(&self, choice: usize) -> usize {
        choice / self.choices_of_prompt()
    }

    /// Returns the prompt of an answer, unless it is the first one.
    fn other(&self, choice: usize) -> Option<&Prompt> {
        self.more.get(self.prompt_of(choice).checked_sub(1)?)
    }

    /// Returns the text of the prompt of an answer.
    pub fn text_of(&self, choice: usize) -> &str {
        self.other(choice).map_or(&self.text, |prompt| &prompt.text)
    }

    /// Returns the tokens of the prompt of an answer.
    pub fn ids_of(&self, choice: usize) -> &[u32] {
        self.other(choice).map_or(&self.request.prompt, |prompt| &prompt.ids)
    }

    /// Returns the number of tokens of all prompts.
    pub fn prompt_tokens(&self) -> usize {
        let others: usize = self.more.iter().map(|prompt| prompt.ids.len()).sum();
        self.request.prompt.len() + others
    }

    /// Returns the positions that the longest prompt and the longest answer take.
    pub fn positions(&self) -> usize {
        let others = self.more.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
        self.request.prompt.len().max(others) + self.request.options.max_tokens.unwrap_or(0)
    }
}
