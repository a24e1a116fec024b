//! Snapshots: a request with its sequence, to go on later or in another process.

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use super::Engine;
use super::active::Active;
use super::request::{Request, RequestId, RequestStatistics, Sink};
use super::waiting::{State, Submitted, Waiting};
use crate::{EngineError, GenerateOptions, Session};

/// Errors of snapshots.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error(
        "a request with a grammar or for an embedding cannot be copied: its state has no form that could be written"
    )]
    None,
    #[error("this snapshot cannot be restored: {why}")]
    Bad { why: String },
}

/// A request at a moment between two passes: its tokens, the state of its sampler, and its KV blocks.
///
/// A restored request continues with the bits that it would have had. It needs an engine with the same model, KV cache
/// type, arithmetic and kind of device. A CPU or GPU with other kernels continues too, but rounds in its own way.
///
/// Restore only snapshots that you trust: wrong KV blocks would also be used for other requests with the same prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    header: Header,
    blocks: Vec<Block>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Header {
    /// Names the model, the KV cache type and the device, on which the KV blocks depend beside the tokens.
    model: String,
    options: GenerateOptions,
    priority: i32,
    logprobs: Option<usize>,
    text: bool,
    /// The prompt and the generated tokens.
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Number of tokens whose keys and values are in the blocks.
    done: usize,
    random_state: u64,
    statistics: RequestStatistics,
    /// Layer group, index in the sequence's table, and length of each block.
    blocks: Vec<(usize, usize, usize)>,
}

/// Content of a KV block.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    /// Index of the layer group.
    pub group: usize,
    /// Index in the sequence's table.
    pub index: usize,
    pub bytes: Vec<u8>,
}

/// First bytes of a snapshot, with the version of its format.
const MAGIC: [u8; 8] = *b"fbaysnp1";

impl Snapshot {
    /// Returns the snapshot as bytes: a magic number, the length of a header in JSON, the header, the blocks, and a checksum
    /// (XXH3, 64 bits) of everything before it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let header = serde_json::to_vec(&self.header).expect("the header has no maps");
        let mut bytes = MAGIC.to_vec();
        bytes.extend((header.len() as u64).to_le_bytes());
        bytes.extend(header);
        self.blocks.iter().for_each(|block| bytes.extend(&block.bytes));
        bytes.extend(XxHash3_64::oneshot(&bytes).to_le_bytes());
        bytes
    }

    /// Reads what [`Snapshot::to_bytes`] returned.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Bad`] for anything else.
    pub fn from_bytes(bytes: &[u8]) -> Result<Snapshot, EngineError> {
        let bad = |why: &str| EngineError::from(SnapshotError::Bad { why: why.into() });
        let (content, checksum) = bytes.split_last_chunk().ok_or_else(|| bad("it is too short"))?;
        let rest = content.strip_prefix(&MAGIC);
        let rest = rest.ok_or_else(|| bad("it has no snapshot's first bytes"))?;
        if XxHash3_64::oneshot(content) != u64::from_le_bytes(*checksum) {
            return Err(bad("its checksum does not match"));
        }
        let (len, rest) = rest.split_first_chunk().ok_or_else(|| bad("it is too short"))?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok();
        let split = len.and_then(|len| rest.split_at_checked(len));
        let (header, mut rest) = split.ok_or_else(|| bad("its header is cut off"))?;
        let header: Header =
            serde_json::from_slice(header).map_err(|error| bad(&format!("its header: {error}")))?;
        let mut blocks = Vec::with_capacity(header.blocks.len());
        for &(group, index, len) in &header.blocks {
            let split = rest.split_at_checked(len).ok_or_else(|| bad("a block is cut off"))?;
            blocks.push(Block { group, index, bytes: split.0.to_vec() });
            rest = split.1;
        }
        if !rest.is_empty() {
            return Err(bad("bytes follow the last block"));
        }
        if header.prompt_len == 0
            || header.prompt_len > header.tokens.len()
            || header.done >= header.tokens.len()
        {
            return Err(bad("its counts of tokens contradict each other"));
        }
        Ok(Snapshot { header, blocks })
    }
}

impl Engine<'_> {
    /// Copies a request that waits or runs. The request itself goes on. Returns `None` if it has ended.
    ///
    /// # Errors
    /// Returns an error if the device fails, or if the request has a grammar or is for an embedding.
    pub fn snapshot(&mut self, id: RequestId) -> Result<Option<Snapshot>, EngineError> {
        self.settle_proposals()?;
        let Engine { session, waiting, running, .. } = self;
        let model = identity(session);
        let running = running.iter().find(|active| active.id == id);
        if let Some(active) = running {
            check_state(active.has_own_state())?;
            return Ok(Some(match session.runner.export(active.sequence)? {
                Some(blocks) => of_active(model, active, active.done(), blocks),
                // The restored request computes its rows again.
                None => of_active(model, active, 0, Vec::new()),
            }));
        }
        let Some(waiting) = waiting.iter().find(|waiting| waiting.id == id) else {
            return Ok(None);
        };
        check_state(match &waiting.state {
            State::New(new) => new.request.grammar.is_some() || new.request.reads_all(),
            State::Suspended { active, .. } => active.has_own_state(),
        })?;
        Ok(Some(match &waiting.state {
            State::New(new) => of_new(model, &new.request),
            State::Suspended { active, saved: None } => of_active(model, active, 0, Vec::new()),
            State::Suspended { active, saved: Some(saved) } => {
                let blocks = session.runner.export_saved(saved);
                of_active(model, active, saved.len(), blocks)
            }
        }))
    }

    /// Queues a request that continues from a snapshot. `sink` gets the events from there on. If the swap space has no room
    /// for the snapshot's blocks, their rows are computed again, which gives the same bits.
    ///
    /// # Errors
    /// Returns an error if the snapshot is of another model, has other blocks than this engine's KV cache, or does not fit the
    /// context, or if too many requests wait.
    pub fn restore(&mut self, snapshot: Snapshot, sink: Sink) -> Result<RequestId, EngineError> {
        let Snapshot { header, blocks } = snapshot;
        let bad = |why: String| EngineError::from(SnapshotError::Bad { why });
        let own = identity(&self.session);
        if header.model != own {
            return Err(bad(format!("it was made with {}, and this is {own}", header.model)));
        }
        let Header { options, priority, logprobs, text, tokens, prompt_len, done, .. } = header;
        let prompt = tokens[..prompt_len].to_vec();
        let request = Request { prompt, options, priority, logprobs, text, ..Request::default() };
        self.check(&request)?;
        let context = self.session.context();
        let vocabulary = self.session.vocab_size();
        if tokens.len() > context || tokens.iter().any(|id| *id as usize >= vocabulary) {
            return Err(bad("its tokens do not fit the context or the vocabulary".into()));
        }
        let id = self.new_id();
        let new = Submitted::new(request, sink);
        if tokens.len() == prompt_len && done == 0 {
            self.queue(Waiting::new(id, priority, State::New(new)));
            return Ok(id);
        }
        let (statistics, random_state) = (header.statistics, header.random_state);
        let active = Active::restored(id, new, &tokens, statistics, random_state, &self.session);
        let saved = match done {
            0 => None,
            _ => self.session.runner.import(active.root, &active.rows()[..done], blocks)?,
        };
        let state = State::Suspended { active: Box::new(active), saved };
        self.queue(Waiting::new(id, priority, state));
        Ok(id)
    }
}

/// Refuses a request with a grammar or for an embedding, whose state cannot be written.
fn check_state(has_own_state: bool) -> Result<(), SnapshotError> {
    match has_own_state {
        true => Err(SnapshotError::None),
        false => Ok(()),
    }
}

/// Returns everything that the content of KV blocks depends on beside the tokens.
fn identity(session: &Session) -> String {
    let info = session.info();
    let hashed = serde_json::to_vec(&(&info.types, &info.kinds, info.layers, info.hidden));
    let hash = XxHash3_64::oneshot(&hashed.expect("these are plain values"));
    format!(
        "{} {} ({} bytes, {hash:016x}), {}",
        info.architecture,
        info.name.as_deref().unwrap_or("without a name"),
        info.weights_bytes,
        session.kv_identity()
    )
}

fn of_new(model: String, request: &Request) -> Snapshot {
    let header = Header {
        model,
        options: request.options.clone(),
        priority: request.priority,
        logprobs: request.logprobs,
        text: request.text,
        tokens: request.prompt.clone(),
        prompt_len: request.prompt.len(),
        done: 0,
        random_state: request.options.sampling.seed,
        statistics: RequestStatistics::default(),
        blocks: Vec::new(),
    };
    Snapshot { header, blocks: Vec::new() }
}

fn of_active(model: String, active: &Active, done: usize, blocks: Vec<Block>) -> Snapshot {
    let lens = blocks.iter().map(|block| (block.group, block.index, block.bytes.len()));
    let header = Header {
        model,
        options: active.options.clone(),
        priority: active.priority,
        logprobs: active.logprobs(),
        text: active.reports_text(),
        tokens: active.tokens().to_vec(),
        prompt_len: active.prompt_len(),
        done,
        random_state: active.random_state(),
        statistics: active.statistics(),
        blocks: lens.collect(),
    };
    Snapshot { header, blocks }
}
