//! The routes of the document.

use forebay_requests::fields::{
    ANTHROPIC, APPLY_TEMPLATE, BATCH, CHAT, COMPLETION, COMPLETIONS, DETOKENIZE, EMBEDDINGS,
    INFILL, OLLAMA_CHAT, OLLAMA_COPY, OLLAMA_EMBED, OLLAMA_GENERATE, OLLAMA_NAME, RESPONSES,
    TOKENIZE,
};
use utoipa::openapi::path::HttpMethod::{Delete, Get, Post};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::tag::TagBuilder;
use utoipa::openapi::{ComponentsBuilder, InfoBuilder, OpenApi, OpenApiBuilder};

use super::build::Interface::{Anthropic, LlamaCpp, Ollama, OpenAi, Server};
use super::build::{EVENTS, Interface, JSON, KEY, LINES, Parts, Route};
use super::schemas;

const OPENMETRICS: &str = "application/openmetrics-text";
const BYTES: &str = "application/octet-stream";

/// Returns the document.
pub fn document() -> OpenApi {
    let mut parts = Parts::default();
    schemas::add_errors(&mut parts.schemas);
    server(&mut parts);
    llama_cpp(&mut parts);
    openai(&mut parts);
    files_and_batches(&mut parts);
    anthropic(&mut parts);
    ollama(&mut parts);
    ollama_models(&mut parts);
    let mut key = Http::new(HttpAuthScheme::Bearer);
    key.description = Some(
        "One of the server's API keys, also as X-Api-Key. A server without keys needs none"
            .to_owned(),
    );
    let components = ComponentsBuilder::new()
        .schemas_from_iter(parts.schemas)
        .security_scheme(KEY, SecurityScheme::Http(key));
    let tag = |(_, name, what): (Interface, &str, &str)| {
        TagBuilder::new().name(name).description(Some(what)).build()
    };
    let info = InfoBuilder::new().title("forebay").version(env!("CARGO_PKG_VERSION"));
    OpenApiBuilder::new()
        .info(info.description(Some("Answers requests with the models on this machine.")))
        .paths(parts.paths)
        .components(Some(components.build()))
        .tags(Some(Interface::ALL.map(tag)))
        .build()
}

fn server(parts: &mut Parts) {
    parts
        .route(Get, "/", Server, "The web page for browsers, a line of text for others")
        .public()
        .answers(&[("text/html", "the page"), ("text/plain", "a line of text")]);
    parts
        .route(Get, "/page/{name}", Server, "A file of the web page")
        .public()
        .part("name", "Name of the file")
        .errors(&[404])
        .answers(&[
            ("text/css", "a style"),
            ("text/javascript", "a script"),
            ("image/svg+xml", "an image"),
            ("text/plain", "a licence"),
        ]);
    for path in ["/health", "/ready"] {
        parts
            .route(Get, path, Server, "Whether the server takes requests")
            .public()
            .answers(&[(JSON, "status ok")]);
    }
    parts
        .route(Get, "/metrics", Server, "Metrics for Prometheus")
        .errors(&[500])
        .answers(&[(OPENMETRICS, "all metrics")]);
    parts
        .route(Get, "/live", Server, "What each loaded model does now")
        .answers(&[(JSON, "rates, limits, memory and uses of experts")]);
    parts
        .route(Get, "/plan", Server, "The planner's report of each loaded model")
        .query("model", "Name of the only model to report")
        .errors(&[400, 404])
        .answers(&[(JSON, "models, each with the keys that `forebay plan` gives as JSON")]);
    parts.route(Get, "/openapi.json", Server, "This document").answers(&[(JSON, "the document")]);
}

fn llama_cpp(parts: &mut Parts) {
    parts
        .route(Get, "/slots", LlamaCpp, "Requests that run and wait, with statistics of each model")
        .answers(&[(JSON, "counts and statistics")]);
    parts
        .route(Post, "/tokenize", LlamaCpp, "Token ids of a text")
        .body(&TOKENIZE)
        .errors(&[404, 500])
        .answers(&[(JSON, "tokens and their count")]);
    parts
        .route(Post, "/detokenize", LlamaCpp, "Text of token ids")
        .body(&DETOKENIZE)
        .errors(&[404, 500])
        .answers(&[(JSON, "content, and prompt, which is the same")]);
    parts
        .route(Get, "/tokenizer_info", LlamaCpp, "Special tokens for requests that name no model")
        .errors(&[400, 404, 500])
        .answers(&[(JSON, "bos_token, eos_token and chat_template")]);
    parts
        .route(Post, "/apply-template", LlamaCpp, "Prompt of a conversation")
        .body(&APPLY_TEMPLATE)
        .errors(&[404, 500])
        .answers(&[(JSON, "prompt, and its number of tokens")]);
    parts
        .route(Post, "/completion", LlamaCpp, "Continue a text")
        .body(&COMPLETION)
        .model()
        .answers(&[(JSON, "the answer"), (EVENTS, "parts of the answer, if stream is true")]);
    parts
        .route(Get, "/props", LlamaCpp, "Settings for requests that name no model")
        .errors(&[400, 404, 500])
        .answers(&[(JSON, "settings")]);
    parts
        .route(Post, "/infill", LlamaCpp, "Fill the gap between two texts")
        .body(&INFILL)
        .model()
        .answers(&[(JSON, "the answer"), (EVENTS, "parts of the answer, if stream is true")]);
}

fn openai(parts: &mut Parts) {
    parts.route(Get, "/v1/models", OpenAi, "All models").answers(&[(JSON, "a list of models")]);
    parts
        .route(Get, "/v1/models/{model}", OpenAi, "A model")
        .part("model", "Name of the model, which may have slashes")
        .errors(&[404])
        .answers(&[(JSON, "the model")]);
    let completion = [(JSON, "the answer"), (EVENTS, "parts of the answer, if stream is true")];
    parts
        .route(Post, "/v1/chat/completions", OpenAi, "Answer a conversation")
        .body(&CHAT)
        .model()
        .answers(&completion);
    parts
        .route(Post, "/v1/chat/completions/input_tokens", OpenAi, "Count the tokens of a chat")
        .body(&CHAT)
        .errors(&[404, 500])
        .answers(&[(JSON, "input_tokens")]);
    parts
        .route(Post, "/v1/completions", OpenAi, "Continue a text, or fill the gap before suffix")
        .body(&COMPLETIONS)
        .model()
        .answers(&completion);
    parts
        .route(Post, "/v1/embeddings", OpenAi, "Embeddings of texts")
        .body(&EMBEDDINGS)
        .model()
        .answers(&[(JSON, "a list of embeddings")]);
    parts
        .route(
            Post,
            "/v1/responses",
            OpenAi,
            "Answer a conversation that later requests can continue",
        )
        .body(&RESPONSES)
        .model()
        .answers(&[(JSON, "the response"), (EVENTS, "events of the response, if stream is true")]);
    parts
        .route(Get, "/v1/responses/{id}", OpenAi, "A response that was stored")
        .part("id", "Id of the response")
        .errors(&[404])
        .answers(&[(JSON, "the response")]);
    parts
        .route(Delete, "/v1/responses/{id}", OpenAi, "Forget a response")
        .part("id", "Id of the response")
        .errors(&[404])
        .answers(&[(JSON, "id and deleted")]);
    parts
        .route(
            Post,
            "/v1/responses/input_tokens",
            OpenAi,
            "Number of tokens of a response's prompt",
        )
        .body(&RESPONSES)
        .errors(&[404, 500])
        .answers(&[(JSON, "input_tokens")]);
    parts
        .route(
            Get,
            "/v1/responses/{id}/input_items",
            OpenAi,
            "Items of a stored response's request",
        )
        .part("id", "Id of the response")
        .query("after", "Id after which the page begins")
        .query("limit", "Most items of the page")
        .query("order", "asc or desc")
        .errors(&[404])
        .answers(&[(JSON, "a page of items")]);
    for path in ["/rerank", "/v1/rerank"] {
        parts.route(Post, path, OpenAi, "Says that there is no model that ranks").refused();
    }
}

fn files_and_batches(parts: &mut Parts) {
    let list = |route: Route<'_>, what: &'static str| {
        route
            .query("after", "Id after which the page begins")
            .query("limit", "Most items of the page")
            .query("order", "asc or desc")
            .errors(&[400, 503])
            .answers(&[(JSON, what)]);
    };
    let files = parts.route(Get, "/v1/files", OpenAi, "Files of this key");
    list(files.query("purpose", "Purpose of all files to list"), "a page of files");
    parts
        .route(Post, "/v1/files", OpenAi, "Upload a file")
        .form(schemas::upload())
        .errors(&[408, 500, 503])
        .answers(&[(JSON, "the file")]);
    parts
        .route(Get, "/v1/files/{id}", OpenAi, "A file")
        .part("id", "Id of the file")
        .errors(&[404, 503])
        .answers(&[(JSON, "the file")]);
    parts
        .route(Delete, "/v1/files/{id}", OpenAi, "Delete a file")
        .part("id", "Id of the file")
        .errors(&[404, 409, 503])
        .answers(&[(JSON, "id and deleted")]);
    parts
        .route(Get, "/v1/files/{id}/content", OpenAi, "Content of a file")
        .part("id", "Id of the file")
        .errors(&[404, 503])
        .answers(&[(BYTES, "the content")]);
    list(parts.route(Get, "/v1/batches", OpenAi, "Batches of this key"), "a page of batches");
    parts
        .route(Post, "/v1/batches", OpenAi, "Answer a file of requests")
        .body(&BATCH)
        .errors(&[404, 429, 503])
        .answers(&[(JSON, "the batch")]);
    parts
        .route(Get, "/v1/batches/{id}", OpenAi, "A batch")
        .part("id", "Id of the batch")
        .errors(&[404, 503])
        .answers(&[(JSON, "the batch")]);
    parts
        .route(Post, "/v1/batches/{id}/cancel", OpenAi, "Cancel a batch")
        .part("id", "Id of the batch")
        .errors(&[404, 409, 503])
        .answers(&[(JSON, "the batch")]);
}

fn anthropic(parts: &mut Parts) {
    parts
        .route(Post, "/v1/messages", Anthropic, "Answer a conversation")
        .body(&ANTHROPIC)
        .model()
        .answers(&[(JSON, "the message"), (EVENTS, "events of the message, if stream is true")]);
    parts
        .route(Post, "/v1/messages/count_tokens", Anthropic, "Number of tokens of a conversation")
        .body(&ANTHROPIC)
        .errors(&[404, 500])
        .answers(&[(JSON, "input_tokens")]);
}

fn ollama(parts: &mut Parts) {
    parts
        .route(Get, "/api/version", Ollama, "Version of Ollama's interface")
        .answers(&[(JSON, "version")]);
    let answer = [(LINES, "lines of the answer, unless stream is false"), (JSON, "the answer")];
    parts
        .route(Post, "/api/chat", Ollama, "Answer a conversation, or load or unload a model")
        .body(&OLLAMA_CHAT)
        .model()
        .answers(&answer);
    parts
        .route(
            Post,
            "/api/generate",
            Ollama,
            "Answer or continue a prompt, or fill the gap before suffix",
        )
        .body(&OLLAMA_GENERATE)
        .model()
        .answers(&answer);
    for (path, what) in [("/api/embed", "embeddings"), ("/api/embeddings", "the embedding")] {
        parts
            .route(Post, path, Ollama, "Embeddings of texts")
            .body(&OLLAMA_EMBED)
            .model()
            .answers(&[(JSON, what)]);
    }
}

/// Adds the routes that list and change models.
fn ollama_models(parts: &mut Parts) {
    parts.route(Get, "/api/tags", Ollama, "All models, loaded or not").answers(&[(JSON, "models")]);
    parts.route(Get, "/api/ps", Ollama, "The loaded models").answers(&[(JSON, "models")]);
    parts
        .route(Post, "/api/show", Ollama, "Description of a model")
        .body(&OLLAMA_NAME)
        .errors(&[404, 500])
        .answers(&[(JSON, "template, details and capabilities")]);
    parts
        .route(Post, "/api/pull", Ollama, "Download a model")
        .body(&OLLAMA_NAME)
        .errors(&[403, 404, 409, 500, 501, 502, 507])
        .answers(&[(LINES, "progress, unless stream is false"), (JSON, "status")]);
    parts
        .route(Post, "/api/copy", Ollama, "Give a model a second name")
        .body(&OLLAMA_COPY)
        .errors(&[404, 409, 500, 501])
        .answers(&[]);
    parts
        .route(Delete, "/api/delete", Ollama, "Remove a model")
        .body(&OLLAMA_NAME)
        .errors(&[403, 404, 409, 500, 501])
        .answers(&[]);
    for path in ["/api/create", "/api/push"] {
        parts.route(Post, path, Ollama, "Says that models are not made or uploaded").refused();
    }
}
