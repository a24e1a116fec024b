//! Requests with their prompts as tokens, ready to run.

use forebay_chat::{
    CallsWanted, Format, Gap, Message, PromptEnd, Think, continued_text, encode_chat, encode_text,
    infill_prompt,
};
use forebay_engine::GenerateOptions;
use forebay_engine::engine::Request;
use forebay_grammar::{Compiler, Grammar, GrammarError, Preamble, Rules};
use forebay_model::sampling::Ban;
use forebay_options::OptionName;
use forebay_text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};

use crate::request::{Ending, Ends, Input, MustCall, NOT_NOW, Refusal, TOO_LONG, Wanted};

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
    /// True to refuse an amount of thinking that the template does not know. Otherwise it gets the nearest one.
    pub exact_thinking: bool,
    /// True to refuse a variable that the template does not know. Otherwise it has no effect.
    pub exact_variables: bool,
}

/// What a request says about the form of its answer.
struct Form {
    rules: Option<Rules>,
    must_call: Option<MustCall>,
    /// Tools that the answer may call.
    calls: Option<Value>,
    parallel_calls: bool,
}

/// Leaves out a last message of the assistant that is empty: the answer begins there anyway.
fn without_empty_end(mut messages: Vec<Message>) -> Vec<Message> {
    let is_empty = |last: &Message| *last == Message::new("assistant", "");
    if messages.len() > 1 && messages.last().is_some_and(is_empty) {
        messages.pop();
    }
    messages
}

/// Calls that an answer may consist of.
struct Calls<'a> {
    tools: Option<Value>,
    /// The only tool that may be called.
    name: Option<&'a str>,
    several: bool,
}

impl Calls<'_> {
    /// Returns the names and the schemas of the tools that may be called.
    fn schemas(&mut self) -> impl Iterator<Item = (String, &mut Value)> {
        let only = self.name;
        let all = self.tools.as_mut().and_then(Value::as_array_mut).into_iter().flatten();
        all.filter_map(move |tool| {
            let function = tool.get_mut("function")?.as_object_mut()?;
            let name = function.get("name")?.as_str()?.to_owned();
            let is_wanted = only.is_none_or(|only| only == name);
            Some((name, function.get_mut("parameters").filter(|_| is_wanted)?))
        })
    }
}

/// A request that is ready to run.
pub struct Prepared {
    /// Text of the prompt, which says how the answer begins.
    pub text: String,
    pub request: Request,
    pub format: Format,
    /// True if the answer continues the text of the prompt.
    pub continues: bool,
    /// Text of a message of the assistant that the answer continues.
    pub continued: Option<String>,
    /// What the answer may not follow of the request's schemas.
    pub remarks: Vec<String>,
    /// True to send each tool call when it is complete, and not its arguments as they are generated.
    pub whole_calls: bool,
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
    /// Text of a message of the assistant that the answer continues.
    continued: Option<String>,
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
            ending,
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
            biased_texts,
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
        self.add_biases(&biased_texts, &mut sampling.logit_bias)?;
        let source = self.source(input, ending)?;
        let Source { text, ids, more, format, continues, continued, calls } = source;
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
        let mut remarks = Vec::new();
        let grammar = self.grammar(form, &text, continued.as_deref(), &format, &mut remarks)?;
        let prompt = ids;
        let request =
            Request { prompt, options, logprobs, prompt_logprobs, grammar, ..Request::default() };
        Ok(Prepared {
            text,
            request,
            format,
            continues,
            continued,
            remarks,
            whole_calls: false,
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
    fn source(&self, input: Input, ending: Ending) -> Result<Source, Refusal> {
        let (mut calls, mut continued, mut more) = (None, None, Vec::new());
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
                        Err(error) if self.exact_variables => {
                            return Err(Refusal::of("chat_template_kwargs", error.to_string()));
                        }
                        // Clients send the variables of one family to all.
                        Err(_) => {}
                    }
                }
                calls = tools.clone();
                let format = self.format.offering(tools.as_ref());
                let messages = without_empty_end(messages);
                // Each message takes a token or more, and a template's time grows with their number.
                self.check_tokens("messages", messages.len())?;
                let end = ending.of(&messages);
                let prompt = format.render_to(end, template, &messages, tools.as_ref(), &all);
                let prompt = prompt.map_err(|error| Refusal::of("messages", error.to_string()))?;
                self.check_length("messages", prompt.text())?;
                let ids = encode_chat(self.tokenizer, &prompt);
                let ids = ids.map_err(|error| Refusal::of("messages", error.to_string()))?;
                if end == PromptEnd::Continued {
                    continued = continued_text(&messages).map(str::to_owned);
                }
                let continues = continued.is_some();
                (prompt.into_text(), ids, format, continues)
            }
        };
        Ok(Source { text, ids, more, format, continues, continued, calls })
    }

    /// Makes a prompt of a text or of tokens.
    fn prompt(&self, input: Input) -> Result<Prompt, Refusal> {
        match input {
            Input::Text(text) => {
                self.check_length("prompt", &text)?;
                let ids = encode_text(self.tokenizer, &text);
                let ids = ids.map_err(|error| Refusal::of("prompt", error.to_string()))?;
                Ok(Prompt { text, ids })
            }
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

    /// Adds the biases of texts: each of a text's tokens gets the bias of the text. Biases of the same token add up.
    fn add_biases(
        &self,
        texts: &[(String, f32)],
        biases: &mut Vec<(u32, f32)>,
    ) -> Result<(), Refusal> {
        for (text, bias) in texts {
            let ids = self.tokenizer.encode(text, false, false);
            let ids = ids.map_err(|error| Refusal::of("logit_bias", error.to_string()))?;
            biases.extend(ids.into_iter().map(|id| (id, *bias)));
        }
        // Sums must not depend on an order.
        biases.sort_by_key(|(id, _)| *id);
        Ok(())
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

    /// Compiles the grammar of the answer to `prompt`, which ends with the text `continued`. Adds what the grammar leaves out to
    /// `remarks`.
    fn grammar(
        &self,
        form: Form,
        prompt: &str,
        continued: Option<&str>,
        format: &Format,
        remarks: &mut Vec<String>,
    ) -> Result<Option<Grammar>, Refusal> {
        let Form { rules, must_call, calls, parallel_calls } = form;
        let name = match &must_call {
            Some(MustCall::Named(name)) => Some(name.as_str()),
            _ => None,
        };
        let calls_wanted = Calls { tools: calls, name, several: parallel_calls && name.is_none() };
        match (&rules, &must_call) {
            (None, None) => Ok(None),
            (Some(Rules::Regex(_) | Rules::Lark(_) | Rules::Gbnf(_)), Some(_)) => Err(Refusal::of(
                "tool_choice",
                "a call that is required leaves no room for a text by a grammar",
            )),
            (rules, Some(_)) => {
                // JSON is a form of the answer's text, and the clients that send both expect a call without any.
                if rules.is_some() {
                    let why = "response_format: a call is required, so no text has this form";
                    remarks.push(why.to_owned());
                }
                let preamble = match continued {
                    Some(text) => format.preamble_of_continued(prompt, text),
                    None => format.preamble_of_calls(prompt),
                };
                let preamble = preamble.as_ref();
                self.grammar_of_calls(calls_wanted, None, preamble, format, remarks).map(Some)
            }
            (Some(rules), None) => {
                let preamble = match continued {
                    Some(text) => format.preamble_of_continued(prompt, text),
                    None => format.preamble(prompt),
                };
                remarks.extend(rules.remarks());
                // An answer of a form may also be calls, if there are tools.
                let object = json!({ "type": "object" });
                let schema = match rules {
                    Rules::JsonObject => Some(&object),
                    Rules::JsonSchema(schema) => Some(schema),
                    _ => None,
                };
                let may_call = calls_wanted.tools.is_some() && format.calls_tools();
                let preamble = preamble.as_ref();
                let grammar = match schema.filter(|_| may_call) {
                    Some(_) => {
                        self.grammar_of_calls(calls_wanted, schema, preamble, format, remarks)?
                    }
                    None => self.compile("response_format", rules, preamble)?,
                };
                // The text of the last message is a part of the answer's form.
                let Some(text) = continued.filter(|_| preamble.is_none()) else {
                    return Ok(Some(grammar));
                };
                let grammar = grammar.after(text.trim_start());
                let wrong = |error: GrammarError| Refusal::of("response_format", error.to_string());
                grammar.map(Some).map_err(wrong)
            }
        }
    }

    fn compile(
        &self,
        field: &'static str,
        rules: &Rules,
        preamble: Option<&Preamble>,
    ) -> Result<Grammar, Refusal> {
        self.compiler.compile(rules, preamble).map_err(|error| {
            let code = matches!(error, GrammarError::Busy(_)).then_some(NOT_NOW);
            Refusal { code, ..Refusal::of(field, error.to_string()) }
        })
    }

    /// Compiles the grammar of calls, or of JSON by the schema `instead`. A tool whose schema cannot be used takes any object, so
    /// that one odd tool does not refuse the request.
    fn grammar_of_calls(
        &self,
        mut calls: Calls<'_>,
        instead: Option<&Value>,
        preamble: Option<&Preamble>,
        format: &Format,
        remarks: &mut Vec<String>,
    ) -> Result<Grammar, Refusal> {
        let field = if instead.is_some() { "response_format" } else { "tool_choice" };
        let compile = |calls: &Calls<'_>| {
            let none = Value::Null;
            let tools = calls.tools.as_ref().unwrap_or(&none);
            let wanted = CallsWanted { tools, name: calls.name, several: calls.several };
            let rules = format.call_rules(&wanted, instead, self.tokenizer);
            let rules = rules.map_err(|error| Refusal::of("tool_choice", error.to_string()))?;
            self.compile(field, &rules, preamble)
        };
        for (name, schema) in calls.schemas() {
            let of_tool = Rules::JsonSchema(schema.clone()).remarks();
            remarks.extend(of_tool.into_iter().map(|remark| format!("tool {name}, {remark}")));
        }
        let refused = match compile(&calls) {
            Err(refused) if refused.code != Some(NOT_NOW) => refused,
            result => return result,
        };
        let mut has_changed = false;
        for (name, schema) in calls.schemas() {
            let rules = Rules::JsonSchema(schema.clone());
            if let Err(GrammarError::Invalid(why)) = self.compiler.compile(&rules, None) {
                remarks.push(format!("tool {name}: the schema is not enforced: {why}"));
                *schema = json!({ "type": "object" });
                has_changed = true;
            }
        }
        if has_changed { compile(&calls) } else { Err(refused) }
    }

    /// Makes the prompt for a gap between two texts.
    fn infill(&self, gap: &Gap) -> Result<Vec<u32>, Refusal> {
        let none = "this model's vocabulary has no tokens for filling in the middle, so it cannot \
                    take a suffix: leave it out, or use a model that has them";
        let ids = infill_prompt(self.tokenizer, gap);
        let ids = ids.map_err(|error| Refusal::of("suffix", error.to_string()))?;
        ids.ok_or_else(|| Refusal::of("suffix", none))
    }

    /// Refuses a text that cannot fit, before its tokens are made.
    fn check_length(&self, field: &'static str, text: &str) -> Result<(), Refusal> {
        self.check_tokens(field, self.tokenizer.tokens_min(text.len()))
    }

    /// Refuses a prompt of at least so many tokens, if it cannot fit.
    fn check_tokens(&self, field: &'static str, least: usize) -> Result<(), Refusal> {
        if let Some(context) = self.context.filter(|context| least > *context) {
            let message = format!(
                "the context is too short: it has {context} positions, and this prompt has at least {least} tokens; \
                 give a larger {} or a shorter prompt",
                OptionName::Context
            );
            return Err(Refusal { code: Some(TOO_LONG), ..Refusal::of(field, message) });
        }
        Ok(())
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
