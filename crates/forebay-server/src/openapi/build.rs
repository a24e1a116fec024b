//! Builds the parts of the document.

use std::collections::BTreeMap;

use forebay_requests::fields::Form;
use utoipa::openapi::path::{HttpMethod, OperationBuilder, ParameterBuilder, ParameterIn};
use utoipa::openapi::request_body::RequestBodyBuilder;
use utoipa::openapi::schema::{ObjectBuilder, Schema, SchemaType, Type};
use utoipa::openapi::security::SecurityRequirement;
use utoipa::openapi::{Content, Paths, Ref, RefOr, Required, ResponseBuilder};

use super::schemas;

/// Name of the way to send a key.
pub const KEY: &str = "key";

/// Interface of a route, which is its tag and gives the form of its errors.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Interface {
    OpenAi,
    Anthropic,
    Ollama,
    LlamaCpp,
    Server,
}

impl Interface {
    pub const ALL: [(Interface, &str, &str); 5] = [
        (Interface::OpenAi, "OpenAI", "The interface of OpenAI"),
        (Interface::Anthropic, "Anthropic", "The interface of Anthropic"),
        (Interface::Ollama, "Ollama", "The interface of Ollama"),
        (Interface::LlamaCpp, "llama.cpp", "Endpoints of llama.cpp's server"),
        (Interface::Server, "server", "State of the server, and the web page"),
    ];

    fn name(self) -> &'static str {
        Interface::ALL.iter().find(|(of, ..)| *of == self).map_or("", |(_, name, _)| name)
    }

    fn error(self) -> &'static str {
        match self {
            Interface::Anthropic => schemas::ANTHROPIC_ERROR,
            Interface::Ollama => schemas::OLLAMA_ERROR,
            Interface::OpenAi | Interface::LlamaCpp | Interface::Server => schemas::OPENAI_ERROR,
        }
    }
}

/// Answer of a route: its media type, and what it is.
pub type Answer = (&'static str, &'static str);

pub const JSON: &str = "application/json";
pub const EVENTS: &str = "text/event-stream";
pub const LINES: &str = "application/x-ndjson";

/// Errors of routes that any request may get.
const ACCESS: &[u16] = &[401, 403];
/// Errors of routes that read a body.
const BODY: &[u16] = &[400, 413];
/// Errors of routes that need a loaded model.
const MODEL: &[u16] = &[404, 429, 500, 503];

/// Paths and schemas so far.
#[derive(Default)]
pub struct Parts {
    pub paths: Paths,
    pub schemas: BTreeMap<String, RefOr<Schema>>,
}

/// A route that is being described.
pub struct Route<'a> {
    parts: &'a mut Parts,
    method: HttpMethod,
    path: &'static str,
    interface: Interface,
    operation: OperationBuilder,
    errors: Vec<u16>,
    is_public: bool,
}

impl Parts {
    /// Begins a route.
    pub fn route(
        &mut self,
        method: HttpMethod,
        path: &'static str,
        interface: Interface,
        summary: &str,
    ) -> Route<'_> {
        let verb = match method {
            HttpMethod::Get => "get",
            HttpMethod::Delete => "delete",
            _ => "post",
        };
        let is_word = |part: &&str| !part.is_empty();
        let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(is_word);
        let id = words.fold(verb.to_owned(), |id, word| format!("{id}_{word}"));
        let operation = OperationBuilder::new()
            .tag(interface.name())
            .summary(Some(summary))
            .operation_id(Some(id));
        let errors = Vec::new();
        Route { parts: self, method, path, interface, operation, errors, is_public: false }
    }
}

impl Route<'_> {
    /// Says that the route needs no key.
    pub fn public(mut self) -> Self {
        self.is_public = true;
        self
    }

    /// Adds a part of the path.
    pub fn part(self, name: &str, description: &str) -> Self {
        self.parameter(ParameterIn::Path, Required::True, name, description)
    }

    /// Adds a parameter of the query that need not be given.
    pub fn query(self, name: &str, description: &str) -> Self {
        self.parameter(ParameterIn::Query, Required::False, name, description)
    }

    fn parameter(
        mut self,
        place: ParameterIn,
        required: Required,
        name: &str,
        description: &str,
    ) -> Self {
        let parameter = ParameterBuilder::new()
            .name(name)
            .parameter_in(place)
            .required(required)
            .description(Some(description))
            .schema(Some(text()));
        self.operation = self.operation.parameter(parameter);
        self
    }

    /// Adds a body of this form of the table of fields.
    pub fn body(self, form: &Form) -> Self {
        let schema = Ref::from_schema_name(form.name);
        self.with_body(RequestBodyBuilder::new().content(JSON, Content::new(Some(schema))))
    }

    /// Adds a body that is a form with this schema.
    pub fn form(self, schema: impl Into<RefOr<Schema>>) -> Self {
        let content = Content::new(Some(schema));
        self.with_body(RequestBodyBuilder::new().content("multipart/form-data", content))
    }

    fn with_body(mut self, body: RequestBodyBuilder) -> Self {
        let body = body.required(Some(Required::True)).build();
        self.operation = self.operation.request_body(Some(body));
        self.errors.extend(BODY);
        self
    }

    /// Says that the route needs a loaded model.
    pub fn model(mut self) -> Self {
        self.errors.extend(MODEL);
        self
    }

    /// Adds errors with these statuses.
    pub fn errors(mut self, statuses: &[u16]) -> Self {
        self.errors.extend(statuses);
        self
    }

    /// Adds the answers with status 200, and ends the route.
    pub fn answers(mut self, answers: &[Answer]) {
        let all: Vec<&str> = answers.iter().map(|(_, what)| *what).collect();
        let description = if all.is_empty() { "done".to_owned() } else { all.join("; ") };
        let mut response = ResponseBuilder::new().description(description);
        for (kind, what) in answers {
            let schema: RefOr<Schema> = match *kind {
                JSON => ObjectBuilder::new().description(Some(*what)).into(),
                _ => text(),
            };
            response = response.content(*kind, Content::new(Some(schema)));
        }
        self.operation = self.operation.response("200", response.build());
        self.end();
    }

    /// Ends a route whose only answer is that it is not there.
    pub fn refused(mut self) {
        self.errors.push(501);
        self.end();
    }

    fn end(mut self) {
        if !self.is_public {
            self.errors.extend(ACCESS);
        }
        self.errors.sort_unstable();
        self.errors.dedup();
        for status in &self.errors {
            let content = Content::new(Some(Ref::from_schema_name(self.interface.error())));
            let response = ResponseBuilder::new().description(meaning(*status));
            let response = response.content(JSON, content).build();
            self.operation = self.operation.response(status.to_string(), response);
        }
        if !self.is_public {
            let no_scopes: [&str; 0] = [];
            self.operation = self.operation.security(SecurityRequirement::new(KEY, no_scopes));
        }
        self.parts.paths.add_path_operation(self.path, vec![self.method], self.operation);
    }
}

/// Returns the schema of a text.
pub fn text() -> RefOr<Schema> {
    ObjectBuilder::new().schema_type(SchemaType::new(Type::String)).into()
}

fn meaning(status: u16) -> &'static str {
    match status {
        400 => "The request cannot be understood or followed; the message says why",
        401 => "A key is missing or wrong",
        403 => "The host or the web page may not use this server, or the model may not be changed",
        404 => "There is no such model, response, file or batch",
        408 => "The request did not arrive in time",
        409 => "It is there already, in use, or over",
        413 => "The request is too large",
        429 => "Too many requests wait",
        501 => "This server cannot do it",
        502 => "The source of models does not answer as expected",
        503 => "The model's engine has ended, or the server has no folder for files",
        507 => "The disk is full",
        _ => "The work failed; the message says why",
    }
}
