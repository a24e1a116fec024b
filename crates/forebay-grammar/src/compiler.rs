//! Compilation of grammars.

use std::fmt;
use std::sync::{Arc, OnceLock};

use forebay_text::Tokenizer;
use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use serde_json::{Value, json};

use crate::bounds;
use crate::environment::Environment;
use crate::gbnf::{self, Translated};
use crate::matcher::Opening;
use crate::{GrammarError, Matcher, Preamble, loosen};

/// White space between the parts of JSON. It has a limit, because a model could go on with spaces forever.
const JSON_SPACE: &str = r"[\x20\x09\x0A\x0D]{0,32}";

/// Largest size of a grammar in symbols. A schema of 100 KB has about 50,000.
const SYMBOLS_MAX: usize = 200_000;

/// Most states of the lexer, of 1 to 2 KB each.
const LEXER_STATES_MAX: usize = 50_000;

/// Rules that an answer must follow.
#[derive(Debug, Clone, PartialEq)]
pub enum Rules {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid by this schema. Source: JSON Schema, draft 2020-12.
    JsonSchema(Value),
    /// Text that the whole expression matches.
    Regex(String),
    /// Text of this grammar, in the syntax of Lark with the additions of `llguidance`.
    Lark(String),
    /// Text of this grammar, in the syntax of llama.cpp.
    Gbnf(String),
}

impl Rules {
    /// Returns the rules of a grammar in the syntax of llama.cpp or of Lark. Only the first one has `::=`.
    pub fn of_grammar(text: String) -> Rules {
        match text.contains("::=") {
            true => Rules::Gbnf(text),
            false => Rules::Lark(text),
        }
    }

    /// Returns rules by which the answer is one of these texts.
    pub fn one_of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Rules {
        let texts: Vec<String> = texts.into_iter().map(|text| json!(text).to_string()).collect();
        Rules::Lark(format!("start: {}", texts.join(" | ")))
    }

    /// Returns JSON by a schema as a part of a Lark rule.
    pub fn inline(schema: &Value) -> String {
        format!("%json {}", Rules::schema_with_options(schema))
    }

    /// Compiles the rules, and looks for the first token, which is where some limits show. What is found out then stays for the answers.
    fn matcher(&self, factory: &ParserFactory) -> Result<llguidance::Matcher, GrammarError> {
        let parsed = match self {
            Rules::JsonObject => {
                let schema = Rules::schema_with_options(&json!({ "type": "object" }));
                TopLevelGrammar::from_json_schema(schema)
            }
            Rules::JsonSchema(schema) => {
                TopLevelGrammar::from_json_schema(Rules::schema_with_options(schema))
            }
            Rules::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Rules::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
            Rules::Gbnf(text) => match gbnf::translate(text)? {
                Translated::Regex(regex) => TopLevelGrammar::from_regex(&regex),
                Translated::Lark(lark) => TopLevelGrammar::from_lark(lark),
            },
        };
        let mut matcher = llguidance::Matcher::new(factory.create_parser(parsed));
        if matcher.get_error().is_none() {
            matcher.compute_ff_tokens();
        }
        if matcher.get_error().is_none() && !matcher.is_stopped() {
            // The matcher keeps the error, too.
            let _ = matcher.compute_mask_or_eos();
        }
        match matcher.get_error() {
            Some(why) => Err(GrammarError::Invalid(why)),
            None => Ok(matcher),
        }
    }

    /// Returns a schema with the options for its compilation.
    fn schema_with_options(schema: &Value) -> Value {
        let mut schema = loosen(schema).schema;
        // The schema `true` allows everything, as the empty object does.
        if schema == Value::Bool(true) {
            schema = json!({});
        }
        if let Value::Object(fields) = &mut schema {
            fields.insert(
                "x-guidance".into(),
                json!({
                    "whitespace_flexible": true,
                    "whitespace_pattern": JSON_SPACE,
                    "coerce_one_of": true,
                    "lenient": false,
                }),
            );
        }
        schema
    }

    /// Returns what answers may not follow of a schema.
    pub fn remarks(&self) -> Vec<String> {
        match self {
            Rules::JsonSchema(schema) => loosen(schema).remarks,
            _ => Vec::new(),
        }
    }
}

/// Thread that compiles a grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A thread of its own, for which the caller waits a bounded time.
    OwnThread,
    /// The caller's thread, whose stack must have [`COMPILING_STACK_BYTES`](crate::COMPILING_STACK_BYTES). The caller bounds the
    /// time and the number of such threads.
    ThisThread,
}

/// Compiler of grammars for one tokenizer.
pub struct Compiler {
    place: Place,
    /// Made for the first grammar.
    factory: OnceLock<Result<Arc<ParserFactory>, GrammarError>>,
    tokenizer: Arc<Tokenizer>,
    ends: Arc<[u32]>,
    /// Tokens of one or two line ends. Looked for with the factory.
    line_ends: OnceLock<Arc<[u32]>>,
}

impl Compiler {
    /// Creates the compiler. The first grammar takes 0.2 s more than others, for a table of the vocabulary.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Compiler {
        let ends = tokenizer.eog_ids().into();
        let (factory, line_ends) = (OnceLock::new(), OnceLock::new());
        let place = Place::OwnThread;
        Compiler { place, factory, tokenizer: tokenizer.clone(), ends, line_ends }
    }

    /// Returns a compiler that compiles grammars on another thread.
    pub fn at(self, place: Place) -> Compiler {
        Compiler { place, ..self }
    }

    fn factory(&self) -> Result<&Arc<ParserFactory>, GrammarError> {
        let factory = self.factory.get_or_init(|| {
            let environment: TokEnv = Arc::new(Environment::new(&self.tokenizer)?);
            let abilities = InferenceCapabilities { ff_tokens: true, ..Default::default() };
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            let factory = ParserFactory::new(&environment, abilities, &slices);
            let mut factory = factory.map_err(|e| GrammarError::Tokenizer(e.to_string()))?;
            factory.quiet();
            let limits = factory.limits_mut();
            limits.max_grammar_size = SYMBOLS_MAX;
            limits.max_lexer_states = LEXER_STATES_MAX;
            limits.verbose_errors = false;
            Ok(Arc::new(factory))
        });
        factory.as_ref().map_err(Clone::clone)
    }

    /// Compiles rules. The answer may begin with the `preamble`, which the rules do not apply to.
    ///
    /// # Errors
    /// Returns an error if the rules are not valid, use something that is not supported, or are too large.
    pub fn compile(
        &self,
        rules: &Rules,
        preamble: Option<&Preamble>,
    ) -> Result<Grammar, GrammarError> {
        bounds::check(rules)?;
        let (factory, own) = (self.factory()?.clone(), rules.clone());
        let work = move || own.matcher(&factory);
        let matcher = match self.place {
            Place::OwnThread => bounds::run(work),
            Place::ThisThread => bounds::run_here(work),
        }??;
        let line_ends = self.line_ends.get_or_init(|| {
            let is_line_end = |id: &u32| {
                let bytes = self.tokenizer.token_bytes(*id, false);
                matches!(bytes.as_slice(), b"\n" | b"\n\n")
            };
            (0..self.tokenizer.vocab_size() as u32).filter(is_line_end).collect()
        });
        let opening = Opening::new(preamble, &self.tokenizer, line_ends);
        let (tokenizer, ends) = (self.tokenizer.clone(), self.ends.clone());
        Ok(Grammar { matcher: Arc::new(Sealed(matcher)), opening, tokenizer, ends })
    }
}

/// A compiled grammar. Copies share it.
#[derive(Clone)]
pub struct Grammar {
    matcher: Arc<Sealed>,
    opening: Opening,
    tokenizer: Arc<Tokenizer>,
    ends: Arc<[u32]>,
}

/// A parser before its first token, of which answers get copies.
struct Sealed(llguidance::Matcher);

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Grammar {
    /// Returns the grammar of answers that continue a text, which is a beginning by this grammar.
    ///
    /// # Errors
    /// Returns an error if the text is not.
    pub fn after(&self, text: &str) -> Result<Grammar, GrammarError> {
        let wrong = || {
            GrammarError::Invalid("the text that the answer continues does not follow it".into())
        };
        let mut matcher = self.matcher.0.deep_clone();
        let environment = matcher.tok_env().map_err(|_| wrong())?;
        let ids = environment.tokenize_bytes(text.as_bytes());
        matcher.consume_tokens(&ids).map_err(|_| wrong())?;
        Ok(Grammar { matcher: Arc::new(Sealed(matcher)), ..self.clone() })
    }

    /// Starts an answer.
    pub fn begin(&self) -> Matcher {
        let matcher = self.matcher.0.deep_clone();
        Matcher::new(matcher, self.opening.clone(), self.tokenizer.clone(), self.ends.clone())
    }
}
