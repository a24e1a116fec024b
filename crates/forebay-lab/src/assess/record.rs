//! Records which experts a model chooses on a set of prompts and on its own continuations.

use forebay_engine::{EngineError, Session};
use forebay_model::sampling::Sampling;
use forebay_stream::{ExpertIndex, LayerIndex, Lookups, Phase};
use forebay_text::{ContentMarks, RenderInput};
use serde::Serialize;
use serde_json::{Map, json};

use super::prompts::{Prompt, PromptKind};

/// Shape of a model's routing: number and size of the experts in each layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingShape {
    /// `(experts, bytes of the largest expert)` of each layer; 0 experts in a dense layer.
    pub layers: Vec<(u32, u64)>,
    /// Number of experts that a token uses in a layer.
    pub experts_per_token: usize,
}

impl RoutingShape {
    /// Returns the bytes of all experts.
    pub fn expert_bytes(&self) -> u64 {
        self.layers.iter().map(|&(experts, bytes)| u64::from(experts) * bytes).sum()
    }

    /// Returns the number of experts that one token uses in all layers.
    pub fn lookups_per_token(&self) -> u64 {
        let used = |layer: &(u32, u64)| u64::from(layer.0).min(self.experts_per_token as u64);
        self.layers.iter().map(used).sum()
    }

    /// Returns the bytes of the experts that one token uses in all layers. A global LRU cache smaller than this cycle
    /// never hits.
    pub fn cycle_bytes(&self) -> u64 {
        let used = |experts: u32| u64::from(experts).min(self.experts_per_token as u64);
        self.layers.iter().map(|&(experts, bytes)| used(experts) * bytes).sum()
    }
}

/// Form in which a prompt was tokenized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptForm {
    /// The text as it is.
    Text,
    /// The text inside the model's chat template.
    ChatTemplate,
    /// The text as it is, although it is a chat prompt, because the model has no template.
    NoChatTemplate,
}

/// Routing of one prompt and its continuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passage {
    pub domain: usize,
    pub prompt_tokens: usize,
    /// Chosen experts `[tokens, layers, k]`, -1 in layers without experts. The prompt's tokens come first.
    pub routing: Vec<i32>,
    pub form: PromptForm,
    /// Number of prompt tokens that did not fit the context.
    pub cut_tokens: usize,
    /// Number of tokens in a batch of the engine. A longer prompt is several batches.
    pub batch_tokens: usize,
}

/// Recording of one model.
#[derive(Clone, Debug)]
pub struct Recording {
    pub shape: RoutingShape,
    /// Names of the domains, in the order of the prompts.
    pub domains: Vec<String>,
    pub passages: Vec<Passage>,
    /// Generating time of each passage.
    pub times: Vec<GeneratingTime>,
}

/// Time to generate one passage, or all passages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GeneratingTime {
    pub tokens: usize,
    pub seconds: f64,
    /// Part of `seconds` in which nothing could be computed because a block was not there yet.
    pub wait_seconds: f64,
}

impl Passage {
    /// Returns the number of tokens of prompt and continuation that went through the model.
    pub fn tokens(&self, shape: &RoutingShape) -> usize {
        self.routing.len() / (shape.layers.len() * shape.experts_per_token).max(1)
    }
}

impl Recording {
    /// Returns the time to generate all passages; `None` if nothing was generated.
    pub fn generating_time(&self) -> Option<GeneratingTime> {
        let all = GeneratingTime {
            tokens: self.times.iter().map(|time| time.tokens).sum(),
            seconds: self.times.iter().map(|time| time.seconds).sum(),
            wait_seconds: self.times.iter().map(|time| time.wait_seconds).sum(),
        };
        (all.tokens > 0 && all.seconds > 0.0).then_some(all)
    }

    /// Returns the passages of one domain, or of all domains in turns: the first prompt of each, the second of each,
    /// and so on.
    pub fn passages_of(&self, domain: Option<usize>) -> Vec<&Passage> {
        match domain {
            Some(domain) => self.passages.iter().filter(|p| p.domain == domain).collect(),
            None => {
                let mut seen = vec![0_usize; self.domains.len()];
                let mut turns: Vec<(usize, usize, &Passage)> = Vec::new();
                for passage in &self.passages {
                    turns.push((seen[passage.domain], passage.domain, passage));
                    seen[passage.domain] += 1;
                }
                turns.sort_by_key(|&(turn, domain, _)| (turn, domain));
                turns.into_iter().map(|(_, _, passage)| passage).collect()
            }
        }
    }

    /// Returns the batches of passages, one after the other, as the engine looks experts up. A prompt's batch has its
    /// distinct experts in ascending order; each generated token is a batch of its own.
    pub fn lookups(&self, passages: &[&Passage]) -> Lookups {
        let mut lookups = Lookups::new(self.shape.layers.clone());
        let mut batch = Vec::new();
        let row = self.shape.layers.len() * self.shape.experts_per_token;
        for passage in passages {
            let (prompt, generated) = passage.routing.split_at(passage.prompt_tokens * row);
            let chunks = prompt.chunks(row * passage.batch_tokens.max(1));
            let batches = chunks.map(|rows| (Phase::Prompt, rows));
            let batches = batches.chain(generated.chunks(row).map(|rows| (Phase::Generate, rows)));
            for (phase, rows) in batches {
                self.push(&mut lookups, phase, rows, &mut batch);
            }
        }
        lookups
    }

    fn push(
        &self,
        lookups: &mut Lookups,
        phase: Phase,
        rows: &[i32],
        batch: &mut Vec<ExpertIndex>,
    ) {
        let (layers, k) = (self.shape.layers.len(), self.shape.experts_per_token);
        for layer in (0..layers).filter(|&layer| self.shape.layers[layer].0 > 0) {
            batch.clear();
            for row in rows.chunks(layers * k) {
                let chosen = &row[layer * k..(layer + 1) * k];
                let known = chosen.iter().filter_map(|&expert| u32::try_from(expert).ok());
                batch.extend(known.map(ExpertIndex));
            }
            batch.sort_unstable();
            batch.dedup();
            lookups.push(phase, LayerIndex(layer as u32), rows.len() / (layers * k), batch);
        }
    }
}

/// Options of a recording.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// Number of tokens to generate after each prompt. The model may end its text earlier.
    pub tokens: usize,
    /// Sampling of the next token. A fixed seed makes recordings repeatable.
    pub sampling: Sampling,
    /// True to continue chat prompts as they are, without the chat template.
    pub raw: bool,
}

/// Returns the sizes of the model's experts; `None` for a model without experts.
pub fn routing_shape(session: &Session) -> Option<RoutingShape> {
    let layers = session.routing_layers().ok()?;
    let shape = RoutingShape {
        layers: layers.iter().map(|layer| (layer.experts, layer.expert_bytes)).collect(),
        experts_per_token: session.info().experts_per_token,
    };
    (shape.expert_bytes() > 0 && shape.experts_per_token > 0).then_some(shape)
}

/// Runs every prompt and its continuation, and records the chosen experts. Calls `progress` with the number of tokens
/// done and the largest total possible.
///
/// Routing does not depend on the budget of the session. A trace begun with [`Session::record_routing`] gets a turn for
/// each prompt.
///
/// # Errors
/// Returns an error if the model has no experts ([`EngineError::DenseModel`]) or no tokenizer, a template refuses a
/// prompt, or a read fails.
pub fn record_prompts(
    session: &mut Session,
    prompts: &[Prompt],
    options: &RecordOptions,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Recording, EngineError> {
    let Some(shape) = routing_shape(session) else {
        return Err(EngineError::DenseModel { path: session.info().path.clone() });
    };
    let names = super::prompts::domains(prompts);
    // Leaves room for the answer, but at most half of the context.
    let prompt_max = session.context() - options.tokens.min(session.context() / 2);
    let mut read = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let (mut ids, form) = prompt_ids(session, prompt, options.raw)?;
        let cut_tokens = ids.len().saturating_sub(prompt_max);
        ids.truncate(prompt_max);
        if ids.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let domain = names.iter().position(|name| *name == prompt.domain).unwrap_or(0);
        read.push((domain, ids, form, cut_tokens));
    }
    let total = read.iter().map(|(_, ids, ..)| ids.len() + options.tokens).sum();
    let mut passages = Vec::with_capacity(read.len());
    let mut done = 0;
    let mut times = Vec::with_capacity(read.len());
    for (index, (domain, ids, form, cut_tokens)) in read.into_iter().enumerate() {
        let (domain_name, tokens) = (names[domain], ids.len());
        let _span =
            tracing::debug_span!("assess_prompt", prompt = index, domain = domain_name, tokens)
                .entered();
        let seed = options.sampling.seed.wrapping_add(index as u64);
        let sampling = Sampling { seed, ..options.sampling.clone() };
        let mut step = |tokens| progress(done + tokens, total);
        let recorded = session.record_passage(&ids, options.tokens, sampling, &mut step)?;
        times.push(GeneratingTime {
            tokens: recorded.generated_tokens,
            seconds: recorded.generate_seconds,
            wait_seconds: recorded.wait_seconds,
        });
        done += ids.len() + options.tokens;
        passages.push(Passage {
            domain,
            prompt_tokens: ids.len(),
            routing: recorded.routing,
            form,
            cut_tokens,
            batch_tokens: recorded.batch_tokens,
        });
    }
    session.reset();
    let domains = names.into_iter().map(String::from).collect();
    Ok(Recording { shape, domains, passages, times })
}

/// Returns the ids of a prompt and the form they were made from.
fn prompt_ids(
    session: &Session,
    prompt: &Prompt,
    raw: bool,
) -> Result<(Vec<u32>, PromptForm), EngineError> {
    let tokenizer = session.tokenizer()?;
    let wanted = prompt.kind == PromptKind::Chat && !raw;
    let Some(template) = session.chat_template().filter(|_| wanted) else {
        let form = if wanted { PromptForm::NoChatTemplate } else { PromptForm::Text };
        return Ok((tokenizer.encode(&prompt.text, true, false)?, form));
    };
    let marks = ContentMarks::of(tokenizer);
    let text = template.render(&RenderInput {
        messages: json!([{ "role": "user", "content": marks.text(&prompt.text) }]),
        tools: None,
        add_generation_prompt: true,
        variables: Map::new(),
        now: None,
    })?;
    let mut ids = tokenizer.encode_prompt(&marks.finish(text))?;
    // Some templates write the BOS token, others leave it to the tokenizer.
    if let Some(bos) = tokenizer.bos_id().filter(|_| tokenizer.adds_bos())
        && ids.first() != Some(&bos)
    {
        ids.insert(0, bos);
    }
    Ok((ids, PromptForm::ChatTemplate))
}
