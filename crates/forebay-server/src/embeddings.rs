//! Embeddings, in the forms of OpenAI and of Ollama.
//!
//! An embedding is made of the states of the text's tokens behind the last layer, normalised as for the logits: their mean, or the
//! last one. It has the length 1.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use forebay_engine::engine::{Event, Pooling, Request, RequestEnd};
use forebay_requests::Ticket;
use forebay_text::Tokenizer;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use utoipa::ToSchema;

use crate::access_log;
use crate::app::{self, App};
use crate::body::{Received, read};
use crate::error::ApiError;
use crate::models::Lease;
use crate::run::submit as submit_to;
use crate::{ollama, openai};

/// Most texts of a request, as in OpenAI's interface.
const TEXTS_MOST: usize = 2048;
/// Most texts of a request in the engine's queue.
const QUEUED_MOST: usize = 32;

/// One or several texts, or their tokens.
#[derive(Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = EmbeddingTexts)]
pub enum Texts {
    One(String),
    Several(Vec<String>),
    Tokens(Vec<u32>),
    SeveralTokens(Vec<Vec<u32>>),
}

#[derive(Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = EmbeddingPooling)]
pub enum PoolingName {
    #[default]
    Mean,
    Last,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = EmbeddingEncoding)]
pub enum Encoding {
    #[default]
    Float,
    Base64,
}

/// What an embedding is made of.
struct Wanted {
    texts: Texts,
    pooling: PoolingName,
    dimensions: Option<usize>,
    /// True to cut texts that are longer than the context, instead of refusing them.
    truncates: bool,
    priority: i32,
}

/// Embeddings of all texts, and the number of tokens.
struct Embeddings {
    vectors: Vec<Vec<f32>>,
    tokens: usize,
}

#[derive(Deserialize, ToSchema)]
#[schema(as = EmbeddingsRequest)]
pub struct Body {
    model: Option<String>,
    input: Texts,
    #[serde(default)]
    encoding_format: Encoding,
    dimensions: Option<usize>,
    #[serde(default)]
    pooling: PoolingName,
}

/// `POST /v1/embeddings`.
pub async fn openai(
    State(app): State<Arc<App>>,
    Received(body): Received,
) -> Result<Json<Value>, openai::Failure> {
    let body = app::work(move || read(&body)).await?;
    Ok(Json(embeddings_of(&app, body, 0).await?))
}

/// Answers a request of a batch, which has this priority.
///
/// # Errors
/// Returns an error if the request is wrong or fails.
pub async fn answer(app: &Arc<App>, body: Value, priority: i32) -> Result<Value, ApiError> {
    let body = Body::deserialize(body)
        .map_err(|error| ApiError::bad(format!("the body is not a request: {error}")))?;
    embeddings_of(app, body, priority).await
}

async fn embeddings_of(app: &Arc<App>, body: Body, priority: i32) -> Result<Value, ApiError> {
    let own = app.clone();
    let find = move || Ok((own.models.entry(body.model.as_deref())?, body));
    let (entry, Body { input, encoding_format, dimensions, pooling, .. }) = app::work(find).await?;
    let lease = app.models.get(entry, None).await?;
    let wanted = Wanted { texts: input, pooling, dimensions, truncates: false, priority };
    let Embeddings { vectors, tokens } = embed(&lease, wanted).await?;
    let shown = |vector: &Vec<f32>| match encoding_format {
        Encoding::Float => json!(vector),
        Encoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            json!(BASE64_STANDARD.encode(bytes))
        }
    };
    let data = vectors.iter().enumerate().map(|(index, vector)| {
        json!({ "object": "embedding", "index": index, "embedding": shown(vector) })
    });
    Ok(json!({
        "object": "list",
        "data": data.collect::<Value>(),
        "model": lease.name,
        "usage": { "prompt_tokens": tokens, "total_tokens": tokens },
    }))
}

#[derive(Deserialize, ToSchema)]
#[schema(as = OllamaEmbedRequest)]
pub struct OllamaBody {
    model: Option<String>,
    input: Option<Texts>,
    /// The text of `/api/embeddings`, the older endpoint.
    prompt: Option<String>,
    truncate: Option<bool>,
    dimensions: Option<usize>,
    keep_alive: Option<Value>,
}

/// `POST /api/embed`.
pub async fn ollama(
    State(app): State<Arc<App>>,
    Received(body): Received,
) -> Result<Json<Value>, ollama::Failure> {
    let began = Instant::now();
    let (lease, Embeddings { vectors, tokens }) = of_ollama(app, body).await?;
    Ok(Json(json!({
        "model": lease.name,
        "embeddings": vectors,
        "total_duration": began.elapsed().as_nanos() as u64,
        "prompt_eval_count": tokens,
    })))
}

/// `POST /api/embeddings`, the older form for one text.
pub async fn ollama_older(
    State(app): State<Arc<App>>,
    Received(body): Received,
) -> Result<Json<Value>, ollama::Failure> {
    let (_, Embeddings { mut vectors, .. }) = of_ollama(app, body).await?;
    Ok(Json(json!({ "embedding": vectors.pop() })))
}

async fn of_ollama(app: Arc<App>, body: Bytes) -> Result<(Lease, Embeddings), ApiError> {
    let body: OllamaBody = app::work(move || read(&body)).await?;
    let texts = body.input.or(body.prompt.map(Texts::One));
    let texts = texts.ok_or_else(|| ApiError::bad("input is missing"))?;
    let keep_alive = ollama::keep_alive(body.keep_alive.as_ref())?;
    let (own, name) = (app.clone(), body.model);
    let entry = app::work(move || own.models.entry(name.as_deref())).await?;
    let lease = app.models.get(entry, keep_alive).await?;
    let wanted = Wanted {
        texts,
        pooling: PoolingName::default(),
        dimensions: body.dimensions,
        truncates: body.truncate.unwrap_or(true),
        priority: 0,
    };
    let embeddings = embed(&lease, wanted).await?;
    Ok((lease, embeddings))
}

/// Computes the embeddings of texts. They run together, beside other requests.
async fn embed(lease: &Lease, wanted: Wanted) -> Result<Embeddings, ApiError> {
    let Wanted { texts, pooling, dimensions, truncates, priority } = wanted;
    let hidden = lease.text.info.hidden;
    let dimensions = dimensions.unwrap_or(hidden);
    if !(1..=hidden).contains(&dimensions) {
        let why = format!("dimensions must be from 1 to {hidden}, those of the model");
        return Err(ApiError { param: Some("dimensions"), ..ApiError::bad(why) });
    }
    let pooling = match pooling {
        PoolingName::Mean => Pooling::Mean,
        PoolingName::Last => Pooling::Last,
    };
    let tokenizer = lease.text.tokenizer.clone();
    let context = lease.context;
    let prompts = app::work(move || prompts(&tokenizer, texts, context, truncates)).await?;
    let (mut running, mut vectors, mut tokens) = (VecDeque::new(), Vec::new(), 0);
    let mut prompts = prompts.into_iter();
    loop {
        // Other requests need places in the queue.
        while running.len() < QUEUED_MOST
            && let Some(mut prompt) = prompts.next()
        {
            if truncates {
                prompt.truncate(lease.context);
            }
            tokens += prompt.len();
            running.push_back(submit(lease, prompt, pooling, priority).await?);
        }
        let Some((_ticket, result)) = running.pop_front() else { break };
        let state = result.await.map_err(|_| ApiError::stopped())??;
        vectors.push(normalised(&state[..dimensions]));
    }
    if let Some(note) = access_log::note() {
        note.prompt(tokens);
    }
    Ok(Embeddings { vectors, tokens })
}

/// Tokens behind the context of which a text that is cut keeps the bytes, because a cut may change the tokens before it.
const TOKENS_BEHIND: usize = 64;

/// Makes tokens of texts. Of a text that cannot fit the context, only what may fit becomes tokens, or nothing if texts are not
/// cut.
fn prompts(
    tokenizer: &Tokenizer,
    texts: Texts,
    context: usize,
    truncates: bool,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let texts = match texts {
        Texts::One(text) => vec![text],
        Texts::Several(texts) => texts,
        Texts::Tokens(tokens) => return checked(vec![tokens]),
        Texts::SeveralTokens(tokens) => return checked(tokens),
    };
    let encode = |text: &String| {
        let least = tokenizer.tokens_least(text.len());
        if !truncates && least > context {
            let why = format!(
                "input has a text of at least {least} tokens, and the context has {context}"
            );
            return Err(ApiError { param: Some("input"), ..ApiError::bad(why) });
        }
        let most = tokenizer.bytes_most(context + TOKENS_BEHIND).unwrap_or(text.len());
        let text = &text[..text.floor_char_boundary(most)];
        tokenizer.encode(text, true, false).map_err(|error| ApiError::bad(error.to_string()))
    };
    checked(texts.iter().map(encode).collect::<Result<_, _>>()?)
}

fn checked(prompts: Vec<Vec<u32>>) -> Result<Vec<Vec<u32>>, ApiError> {
    let refuse = |why: &str| Err(ApiError { param: Some("input"), ..ApiError::bad(why) });
    match prompts.len() {
        0 => refuse("input has no text"),
        count if count > TEXTS_MOST => refuse("input has more than 2048 texts"),
        _ if prompts.iter().any(Vec::is_empty) => refuse("input has an empty text"),
        _ => Ok(prompts),
    }
}

type Embedded = Result<Vec<f32>, ApiError>;

/// Queues a text. Dropping the ticket cancels it.
async fn submit(
    lease: &Lease,
    prompt: Vec<u32>,
    pooling: Pooling,
    priority: i32,
) -> Result<(Ticket, oneshot::Receiver<Embedded>), ApiError> {
    let (sender, result) = oneshot::channel();
    let mut sender = Some(sender);
    let sink = move |event| {
        if let (Event::Finished { end, embedding, .. }, Some(sender)) = (event, sender.take()) {
            let embedded = match (end, embedding) {
                (_, Some(state)) => Ok(state),
                (RequestEnd::Failed(why), None) => {
                    Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why))
                }
                _ => Err(ApiError::stopped()),
            };
            // If nobody waits, the client is gone.
            let _ = sender.send(embedded);
        }
        ControlFlow::Continue(())
    };
    let request = Request { prompt, priority, pooling: Some(pooling), ..Request::default() };
    Ok((submit_to(&lease.worker, request, Box::new(sink)).await?, result))
}

/// Returns a vector of the same direction and the length 1. One of zeros stays as it is.
fn normalised(state: &[f32]) -> Vec<f32> {
    let length = state.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let divisor = if length > 0.0 { length } else { 1.0 };
    state.iter().map(|x| (f64::from(*x) / divisor) as f32).collect()
}
