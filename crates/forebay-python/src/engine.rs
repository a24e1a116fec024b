//! An open model that answers requests.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use forebay_engine::{Engine as Inner, EngineError, OpenedKvFolder, Session, SessionOptions};
use forebay_requests::embed::{self, PoolingName, Texts};
use forebay_requests::{Endpoint, Place, Prepared, Refusal, Text, Wanted, Worker, wanted};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::Deserialize as _;
use serde::de::IntoDeserializer as _;
use serde_json::{Value, json};

use crate::errors::{of_engine, of_kv_folder, raise};
use crate::log::warn;
use crate::names::path_of;
use crate::options::Options;
use crate::run::{Failure, Run, Wake};
use crate::watch::Watch;

/// Number of requests that run together if the caller names none: so many, or fewer until they fit in memory.
const PARALLEL: usize = 8;

/// An open model whose engine runs on a thread of its own.
#[pyclass(frozen, module = "forebay._native")]
pub struct Engine {
    /// `None` once the engine is closed.
    worker: Mutex<Option<Arc<Worker>>>,
    text: Arc<Text>,
    context: usize,
    load_seconds: f64,
    running_max: usize,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (model, options, progress))]
    fn new(
        py: Python<'_>,
        model: PathBuf,
        options: &str,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Engine> {
        let given = Options::read(py, options)?;
        let (session, engine) = (given.session(py)?, given.engine(py)?);
        let model = path_of(py, model)?;
        let kv_disk = match given.kv_folder(py)? {
            None => None,
            Some(folder) => {
                let opened = py.detach(|| folder.open(&session, None));
                let OpenedKvFolder { disk, notes } =
                    opened.map_err(|error| of_kv_folder(py, &error))?;
                for note in notes {
                    warn(py, &note.text)?;
                }
                disk
            }
        };
        // Proposals are checked for one sequence.
        let parallel = given.parallel.or(given.mtp.then_some(1));
        let (session, stopped) = open(py, &model, session, parallel, progress.as_ref());
        let session = session.map_err(|error| of_engine(py, &error, stopped))?;
        py.detach(|| {
            let text = session.text()?;
            let name = if model.is_dir() { model.file_name() } else { model.file_stem() };
            let name = name.unwrap_or(model.as_os_str()).to_string_lossy();
            let (context, load_seconds) = (session.context(), session.statistics().load_seconds);
            let mut text = Text::new(&name, text, Place::OwnThread)
                .map_err(|error| Failed::Template(error.to_string()))?
                .with_exact_variables();
            if given.special_tokens_in_messages {
                text = text.with_special_tokens_in_messages();
            }
            let mut engine = Inner::new(session, &engine);
            if let Some(disk) = kv_disk {
                engine.set_kv_disk(disk, &name)?;
            }
            let running_max = engine.running_max();
            let worker =
                Worker::start(engine).map_err(|error| Failed::Thread(error.to_string()))?;
            Ok(Engine {
                worker: Mutex::new(Some(Arc::new(worker))),
                text: Arc::new(text),
                context,
                load_seconds,
                running_max,
            })
        })
        .map_err(|failed| match failed {
            Failed::Engine(error) => of_engine(py, &error, None),
            Failed::Template(words) => raise(py, "FormatError", words),
            Failed::Thread(words) => raise(py, "EngineError", words),
        })
    }

    /// Prepares a request in the form of the OpenAI API and queues it. `number` is what `wake` calls it.
    #[pyo3(signature = (is_chat, body, wake=None, number=0, priority=0))]
    fn submit(
        &self,
        py: Python<'_>,
        is_chat: bool,
        body: &str,
        wake: Option<&Bound<'_, Wake>>,
        number: u64,
        priority: i32,
    ) -> PyResult<Run> {
        self.with_worker(py, |worker| {
            let prepared = py.detach(|| self.prepare(is_chat, body));
            let mut prepared = prepared.map_err(|refusal| refused(py, refusal))?;
            prepared.request.priority = priority;
            let wake = wake.map(|wake| (wake.get(), number));
            Ok(Run::start(worker, &self.text, &prepared, wake, failure_of(worker)))
        })
    }

    /// Queues a text, or its tokens, for its embedding. `number` is what `wake` calls it.
    #[pyo3(signature = (text, pooling, truncate, wake=None, number=0, priority=0))]
    #[expect(clippy::too_many_arguments, reason = "Python's wrapper passes them by name")]
    fn embed(
        &self,
        py: Python<'_>,
        text: OneText,
        pooling: &str,
        truncate: bool,
        wake: Option<&Bound<'_, Wake>>,
        number: u64,
        priority: i32,
    ) -> PyResult<Run> {
        let pooling = PoolingName::deserialize(pooling.into_deserializer());
        let pooling = pooling.map_err(|error: serde::de::value::Error| {
            raise(py, "OptionError", format!("pooling: {error}"))
        })?;
        self.with_worker(py, |worker| {
            let (tokenizer, context) = (&self.text.tokenizer, self.context);
            let prompts = py.detach(|| embed::prompts(tokenizer, text.into(), context, truncate));
            let mut prompts = prompts.map_err(|refusal| refused(py, refusal))?;
            let request = embed::request(prompts.pop().unwrap_or_default(), pooling, priority);
            let wake = wake.map(|wake| (wake.get(), number));
            Ok(Run::embed(worker, request, wake, failure_of(worker)))
        })
    }

    /// Returns embeddings, with their dimensions, of states as bytes of f32.
    fn embedding(
        &self,
        py: Python<'_>,
        state: &[u8],
        dimensions: Option<usize>,
        normalise: bool,
    ) -> PyResult<Py<PyBytes>> {
        let dimensions = self.dimensions(py, dimensions)?;
        let numbers = state.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
        let mut numbers: Vec<f32> = numbers.take(dimensions).collect();
        if normalise {
            numbers = embed::normalised(&numbers);
        }
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_ne_bytes()).collect();
        Ok(PyBytes::new(py, &bytes).unbind())
    }

    /// Returns the length of embeddings.
    fn dimensions(&self, py: Python<'_>, wanted: Option<usize>) -> PyResult<usize> {
        embed::dimensions(wanted, self.text.info.hidden).map_err(|refusal| refused(py, refusal))
    }

    /// Returns the prompt of a request as text and tokens, without running it.
    fn prompt(&self, py: Python<'_>, is_chat: bool, body: &str) -> PyResult<(String, Vec<u32>)> {
        let prepared = py.detach(|| self.prepare(is_chat, body));
        let prepared = prepared.map_err(|refusal| refused(py, refusal))?;
        Ok((prepared.text, prepared.request.prompt))
    }

    fn tokenize(
        &self,
        py: Python<'_>,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> PyResult<Vec<u32>> {
        let ids = py.detach(|| self.text.tokenizer.encode(text, add_special, parse_special));
        ids.map_err(|error| raise(py, "OptionError", error.to_string()))
    }

    fn detokenize(&self, py: Python<'_>, ids: Vec<u32>, keep_special: bool) -> PyResult<String> {
        let vocabulary = self.text.tokenizer.vocab_size();
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
            let words = format!("there is no token {id}: the vocabulary has {vocabulary} tokens");
            return Err(raise(py, "OptionError", words));
        }
        Ok(py.detach(|| self.text.tokenizer.decode(&ids, keep_special)))
    }

    /// Returns the state of the engine as JSON.
    fn statistics(&self, py: Python<'_>) -> PyResult<String> {
        let worker = self.worker(py)?;
        // If the engine was closed meanwhile, this is the last handle, and dropping it waits for the thread.
        let report = py.detach(move || worker.report());
        let (engine, kv) = (&report.engine, &report.kv);
        let rates = report.live.rates(report.running == 0);
        let document = json!({
            "running": report.running,
            "waiting": report.waiting,
            "running_max": report.running_max,
            "rates": rates,
            "engine": {
                "prompt_passes": engine.prompt_passes,
                "prompt_tokens": engine.prompt_tokens,
                "prompt_seconds": engine.prompt_seconds,
                "generate_passes": engine.generate_passes,
                "generated_tokens": engine.generate_rows,
                "generate_seconds": engine.generate_seconds,
                "suspended": engine.suspended,
                "computed_again": engine.computed_again,
            },
            "session": report.session,
            "kv": {
                "total": kv.total,
                "free": kv.free,
                "cached": kv.cached,
                "referenced": kv.referenced,
                "evictions": kv.evictions,
            },
            "kv_tiers": report.kv_tiers,
            "weights": report.weights,
            "expert_uses": &*report.live.experts,
        });
        Ok(document.to_string())
    }

    /// Returns the description of the model as JSON.
    fn model(&self) -> String {
        json!(self.text.info).to_string()
    }

    #[getter]
    fn context(&self) -> usize {
        self.context
    }

    #[getter]
    fn load_seconds(&self) -> f64 {
        self.load_seconds
    }

    #[getter]
    fn running_max(&self) -> usize {
        self.running_max
    }

    #[getter]
    fn vocab_size(&self) -> usize {
        self.text.tokenizer.vocab_size()
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Ends all requests and frees the memory.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let taken = self.worker.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(taken);
        });
    }
}

/// A text, or its tokens.
#[derive(FromPyObject)]
enum OneText {
    Text(String),
    Tokens(Vec<u32>),
}

impl From<OneText> for Texts {
    fn from(text: OneText) -> Texts {
        match text {
            OneText::Text(text) => Texts::One(text),
            OneText::Tokens(tokens) => Texts::Tokens(tokens),
        }
    }
}

/// Returns what tells why the engine has failed.
fn failure_of(worker: &Arc<Worker>) -> Failure {
    let worker = Arc::downgrade(worker);
    Arc::new(move || worker.upgrade().and_then(|worker| worker.failure()))
}

enum Failed {
    Engine(EngineError),
    Template(String),
    Thread(String),
}

impl From<EngineError> for Failed {
    fn from(error: EngineError) -> Failed {
        Failed::Engine(error)
    }
}

impl Engine {
    fn worker(&self, py: Python<'_>) -> PyResult<Arc<Worker>> {
        let worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner).clone();
        worker.ok_or_else(|| raise(py, "EngineError", "the engine is closed".into()))
    }

    /// Does something with the worker. If the engine is closed meanwhile, this has the last handle to it, and dropping that waits
    /// for the thread: without the GIL.
    fn with_worker<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Arc<Worker>) -> PyResult<T>,
    ) -> PyResult<T> {
        let worker = self.worker(py)?;
        let done = work(&worker);
        py.detach(|| drop(worker));
        done
    }

    fn prepare(&self, is_chat: bool, body: &str) -> Result<Prepared, Refusal> {
        let without_field = |message: String| Refusal { message, param: None, code: None };
        let body: Value =
            serde_json::from_str(body).map_err(|error| without_field(error.to_string()))?;
        let endpoint = if is_chat { Endpoint::Chat } else { Endpoint::Completions };
        let mut wanted: Wanted = wanted(endpoint, &body)?;
        if wanted.max_tokens == Some(0) {
            return Err(Refusal::of("max_tokens", "max_tokens must be at least 1"));
        }
        // The API's own limit of 16 tokens for a completion is none of Python's.
        if body.get("max_tokens").is_none_or(Value::is_null) {
            wanted.max_tokens = None;
        }
        self.text.prepare(wanted, Some(self.context))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let taken = self.worker.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // The thread ends its pass first. It never takes the GIL, so others may run meanwhile.
        Python::try_attach(|py| py.detach(|| drop(taken)));
    }
}

fn refused(py: Python<'_>, refusal: Refusal) -> PyErr {
    let Refusal { message, param, .. } = refusal;
    let words = match param {
        Some(param) if !message.contains(&*param) => format!("{param}: {message}"),
        _ => message,
    };
    raise(py, "OptionError", words)
}

/// Opens a model. The second value is an exception that has ended the load.
fn open(
    py: Python<'_>,
    model: &Path,
    options: SessionOptions,
    parallel: Option<usize>,
    progress: Option<&Py<PyAny>>,
) -> (Result<Session, EngineError>, Option<PyErr>) {
    let mut watch = Watch::new(progress, options.interrupt.clone());
    let opened = py.detach(|| {
        let mut sequences = parallel.unwrap_or(PARALLEL);
        loop {
            let options = SessionOptions { sequences, ..options.clone() };
            match Session::open(model, &options, &mut |done, total| {
                watch.tell(done, total);
            }) {
                Err(error)
                    if parallel.is_none() && sequences > 1 && error.needed_bytes().is_some() =>
                {
                    sequences /= 2;
                }
                opened => return opened,
            }
        }
    });
    match (opened, watch.stopped) {
        // An exception at the very end had nothing left to stop.
        (Ok(_), Some(stopped)) => (Err(EngineError::Interrupted), Some(stopped)),
        opened => opened,
    }
}
