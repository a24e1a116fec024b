//! Embeddings, in the forms of OpenAI and of Ollama. They have the length 1.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use forebay_engine::engine::Request;
use forebay_requests::embed::{PoolingName, Texts};
use forebay_requests::fields::{EMBEDDINGS, OLLAMA_EMBED};
use forebay_requests::{Ticket, embed};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::app::App;
use crate::body::{Received, read};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::models::Lease;
use crate::run::submit as submit_to;
use crate::{ollama, openai};

/// Most texts of a request, as in OpenAI's interface.
const TEXTS_MAX: usize = 2048;

#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoding {
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
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
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, openai::Failure> {
    let body = app.work(&caller, move || read(&EMBEDDINGS, &body)).await?;
    Ok(Json(embeddings_of(&app, &caller, body, 0).await?))
}

/// Answers a request of a batch, which has this priority.
///
/// # Errors
/// Returns an error if the request is wrong or fails.
pub async fn answer(
    app: &Arc<App>,
    caller: &Caller,
    body: Value,
    priority: i32,
) -> Result<Value, ApiError> {
    embeddings_of(app, caller, EMBEDDINGS.read(body)?, priority).await
}

async fn embeddings_of(
    app: &Arc<App>,
    caller: &Caller,
    body: Body,
    priority: i32,
) -> Result<Value, ApiError> {
    let own = app.clone();
    let find = move || Ok((own.models.entry(body.model.as_deref())?, body));
    let (entry, body) = app.work(caller, find).await?;
    let Body { input, encoding_format, dimensions, pooling, .. } = body;
    let lease = app.models.get(caller, entry, None).await?;
    let wanted = Wanted { texts: input, pooling, dimensions, truncates: false, priority };
    let Embeddings { vectors, tokens } = compute(app, caller, &lease, wanted).await?;
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OllamaBody {
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
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, ollama::Failure> {
    let began = Instant::now();
    let (lease, Embeddings { vectors, tokens }) = of_ollama(app, caller, body).await?;
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
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, ollama::Failure> {
    let (_, Embeddings { mut vectors, .. }) = of_ollama(app, caller, body).await?;
    Ok(Json(json!({ "embedding": vectors.pop() })))
}

async fn of_ollama(
    app: Arc<App>,
    caller: Caller,
    body: Bytes,
) -> Result<(Lease, Embeddings), ApiError> {
    let body: OllamaBody = app.work(&caller, move || read(&OLLAMA_EMBED, &body)).await?;
    let texts = body.input.or(body.prompt.map(Texts::One));
    let texts = texts.ok_or_else(|| ApiError::bad("input is missing"))?;
    let keep_alive = ollama::keep_alive(body.keep_alive.as_ref())?;
    let (own, name) = (app.clone(), body.model);
    let entry = app.work(&caller, move || own.models.entry(name.as_deref())).await?;
    let lease = app.models.get(&caller, entry, keep_alive).await?;
    let wanted = Wanted {
        texts,
        pooling: PoolingName::default(),
        dimensions: body.dimensions,
        truncates: body.truncate.unwrap_or(true),
        priority: 0,
    };
    let embeddings = compute(&app, &caller, &lease, wanted).await?;
    Ok((lease, embeddings))
}

/// Computes the embeddings of texts. They run together, beside other requests.
async fn compute(
    app: &App,
    caller: &Caller,
    lease: &Lease,
    wanted: Wanted,
) -> Result<Embeddings, ApiError> {
    let Wanted { texts, pooling, dimensions, truncates, priority } = wanted;
    let dimensions = embed::dimensions(dimensions, lease.text.info.hidden)?;
    let tokenizer = lease.text.tokenizer.clone();
    let context = lease.context;
    let prepare = move || Ok(embed::prompts(&tokenizer, texts, context, truncates)?);
    let prompts = app.prepare(caller, prepare).await?;
    check_count(prompts.len())?;
    let (mut running, mut vectors, mut tokens) = (VecDeque::new(), Vec::new(), 0);
    let mut prompts = prompts.into_iter();
    loop {
        while running.len() < embed::QUEUED_MAX
            && let Some(prompt) = prompts.next()
        {
            tokens += prompt.len();
            let request = embed::request(prompt, pooling, priority);
            running.push_back(submit(caller, lease, request).await?);
        }
        let Some((_ticket, result)) = running.pop_front() else { break };
        let state = result.await.map_err(|_| ApiError::stopped())??;
        vectors.push(embed::normalised(&state[..dimensions]));
    }
    caller.note().prompt(tokens);
    lease.counts.note_embeddings(tokens);
    Ok(Embeddings { vectors, tokens })
}

fn check_count(texts: usize) -> Result<(), ApiError> {
    let refuse = |why: &str| Err(ApiError { param: Some("input".into()), ..ApiError::bad(why) });
    match texts {
        0 => refuse("input has no text"),
        count if count > TEXTS_MAX => refuse("input has more than 2048 texts"),
        _ => Ok(()),
    }
}

type Embedded = Result<Vec<f32>, ApiError>;

/// Queues a text. Dropping the ticket cancels it.
async fn submit(
    caller: &Caller,
    lease: &Lease,
    request: Request,
) -> Result<(Ticket, oneshot::Receiver<Embedded>), ApiError> {
    let (sender, result) = oneshot::channel();
    let sink = embed::sink(move |embedded| {
        let embedded =
            embedded.map_err(|failure| failure.map_or_else(ApiError::stopped, Into::into));
        // If nobody waits, the client is gone.
        let _ = sender.send(embedded);
    });
    Ok((submit_to(caller, &lease.worker, request, sink).await?, result))
}
