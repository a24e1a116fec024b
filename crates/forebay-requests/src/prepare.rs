//! Requests with their prompts as tokens, ready to run.

use forebay_chat::{
    CallsWanted, Format, Gap, Message, PromptEnd, Think, continued_text, encode_chat, encode_text,
    infill_prompt,
};
use forebay_engine::GenerateOptions;
use forebay_engine::engine::Request;
use forebay_grammar::{Compiler, Grammar, GrammarError, Preamble, Rules};
use forebay_text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};

use crate::request::{Input, MustCall, NOT_NOW, Refusal, TOO_LONG, Wanted};

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
            ending,
            max_tokens,
            mut sampling,
            has_seed,
            stops,
            choices,
            logprobs,
            rules,
            must_call,
            parallel_calls,
            model,
            ..
        } = wanted;
        if !has_seed {
            sampling.seed = seed;
        }
        let (mut calls, mut continued) = (None, None);
        let (text, ids, format, continues) = match input {
            Input::Text(text) => {
                self.check_length("prompt", &text)?;
                let ids = encode_text(self.tokenizer, &text);
                let ids = ids.map_err(|error| Refusal::of("prompt", error.to_string()))?;
                (text, ids, Format::default(), true)
            }
            Input::Ids(ids) => {
                let text = self.tokenizer.decode(&ids, true);
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
                    let known = self.format.check_variable(&name);
                    known.map_err(|e| Refusal::of("chat_template_kwargs", e.to_string()))?;
                    all.insert(name, value);
                }
                calls = tools.clone();
                let format = self.format.offering(tools.as_ref());
                let messages = without_empty_end(messages);
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
        if ids.is_empty() {
            return Err(Refusal::of("prompt", "the prompt is empty"));
        }
        let options = GenerateOptions {
            max_tokens: max_tokens.or(self.max_tokens),
            sampling,
            ..GenerateOptions::default()
        };
        let form = Form { rules, must_call, calls, parallel_calls };
        let mut remarks = Vec::new();
        let grammar = self.grammar(form, &text, continued.as_deref(), &format, &mut remarks)?;
        let request = Request { prompt: ids, options, logprobs, grammar, ..Request::default() };
        Ok(Prepared {
            text,
            request,
            format,
            continues,
            continued,
            remarks,
            whole_calls: false,
            stops,
            choices,
            model,
        })
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
            (Some(_), Some(_)) => Err(Refusal::of(
                "tool_choice",
                "a call that is required leaves no room for response_format",
            )),
            (None, Some(_)) => {
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
        let least = self.tokenizer.tokens_least(text.len());
        if let Some(context) = self.context.filter(|context| least > *context) {
            let message = format!(
                "the context is too short: it has {context} positions, and this prompt has at least {least} tokens; \
                 give a larger --ctx or a shorter prompt"
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
        let seed = &mut request.options.sampling.seed;
        *seed = seed.wrapping_add(choice as u64);
        request
    }

    /// Returns the positions that the prompt and the longest answer take.
    pub fn positions(&self) -> usize {
        self.request.prompt.len() + self.request.options.max_tokens.unwrap_or(0)
    }
}
