//! Recording which experts a model chooses on a set of prompts and on what it makes of them.

use forebay_engine::{EngineError, Session};
use forebay_model::sampling::Sampling;
use forebay_stream::{ExpertIndex, LayerIndex, Lookups, Phase};
use forebay_text::RenderInput;
use serde::Serialize;
use serde_json::{Map, json};

use super::prompts::{Prompt, PromptKind};

/// What the model is and what one expert of each layer weighs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutingShape {
    /// `(experts, bytes of the largest of them)` of each layer; no experts in a dense one.
    pub layers: Vec<(u32, u64)>,
    /// Experts that a token uses in a layer.
    pub experts_per_token: usize,
}

impl RoutingShape {
    /// Bytes of all experts.
    pub fn expert_bytes(&self) -> u64 {
        self.layers.iter().map(|&(experts, bytes)| u64::from(experts) * bytes).sum()
    }

    /// Experts that one token uses, all layers together.
    pub fn lookups_per_token(&self) -> u64 {
        let used = |layer: &(u32, u64)| u64::from(layer.0).min(self.experts_per_token as u64);
        self.layers.iter().map(used).sum()
    }

    /// Bytes of the experts that one token uses in all layers: the cycle below which a global list by recency
    /// never hits.
    pub fn cycle_bytes(&self) -> u64 {
        let used = |experts: u32| u64::from(experts).min(self.experts_per_token as u64);
        self.layers.iter().map(|&(experts, bytes)| used(experts) * bytes).sum()
    }
}

/// How a prompt became tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptForm {
    /// As it is.
    Text,
    /// Inside of the model's chat template.
    ChatTemplate,
    /// As it is, although it is a chat's: the model has no template.
    NoChatTemplate,
}

/// Routing of one prompt and of its continuation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passage {
    pub domain: usize,
    pub prompt_tokens: usize,
    /// `[tokens, layers, k]`, -1 in layers without experts; the prompt's tokens first.
    pub routing: Vec<i32>,
    pub form: PromptForm,
    /// Tokens of the prompt that did not fit the context.
    pub cut_tokens: usize,
    /// How many tokens the engine takes at once: a longer prompt is several batches.
    pub batch_tokens: usize,
}

/// What was recorded of one model.
#[derive(Clone, Debug)]
pub struct Recording {
    pub shape: RoutingShape,
    /// Names of the domains, in the order of the prompts.
    pub domains: Vec<String>,
    pub passages: Vec<Passage>,
    /// What generating took, passage by passage.
    pub times: Vec<GeneratingTime>,
}

/// What generating a passage took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GeneratingTime {
    pub tokens: usize,
    pub seconds: f64,
    /// Of these, without anything to compute, because a block was not there yet.
    pub wait_seconds: f64,
}

impl Passage {
    /// Tokens of prompt and continuation that went through the model.
    pub fn tokens(&self, shape: &RoutingShape) -> usize {
        self.routing.len() / (shape.layers.len() * shape.experts_per_token).max(1)
    }
}

impl Recording {
    /// What generating all passages took; `None` where nothing was generated.
    pub fn generating_time(&self) -> Option<GeneratingTime> {
        let all = GeneratingTime {
            tokens: self.times.iter().map(|time| time.tokens).sum(),
            seconds: self.times.iter().map(|time| time.seconds).sum(),
            wait_seconds: self.times.iter().map(|time| time.wait_seconds).sum(),
        };
        (all.tokens > 0 && all.seconds > 0.0).then_some(all)
    }

    /// The passages of one domain, or of all domains in turns: the first prompt of each, the second of each, ...
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

    /// The batches of passages, one after the other, as the engine looks experts up: distinct experts of a prompt's
    /// batch by their number, and each generated token by itself.
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

/// How a recording goes.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// Tokens to generate after each prompt; fewer where the model ends its text before.
    pub tokens: usize,
    /// How the next token is chosen. A fixed seed makes recordings repeatable.
    pub sampling: Sampling,
    /// Chat prompts are continued as they are, too.
    pub raw: bool,
}

/// Sizes of this model's experts; `None` for a model without experts.
pub fn routing_shape(session: &Session) -> Option<RoutingShape> {
    let layers = session.routing_layers().ok()?;
    let shape = RoutingShape {
        layers: layers.iter().map(|layer| (layer.experts, layer.expert_bytes)).collect(),
        experts_per_token: session.info().experts_per_token,
    };
    (shape.expert_bytes() > 0 && shape.experts_per_token > 0).then_some(shape)
}

/// Feeds every prompt, lets the model go on, and records the experts that it chooses. `progress` gets the tokens
/// done and the most that there may be.
///
/// Routing does not depend on the budget that the session runs with. A trace that
/// [`Session::record_routing`] began gets a turn for each prompt.
///
/// # Errors
/// A model without experts ([`EngineError::DenseModel`]) or tokenizer, a template that refuses a prompt, failed reads.
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
    // Room for the answer: half of the context where it is short.
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

/// Ids of a prompt, and how they were made.
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
    let text = template.render(&RenderInput {
        messages: json!([{ "role": "user", "content": prompt.text }]),
        tools: None,
        add_generation_prompt: true,
        variables: Map::new(),
        now: None,
    })?;
    let mut ids = tokenizer.encode(&text, false, true)?;
    // Some templates write the token that begins a text, others leave it to the tokenizer.
    if let Some(bos) = tokenizer.bos_id().filter(|_| tokenizer.adds_bos())
        && ids.first() != Some(&bos)
    {
        ids.insert(0, bos);
    }
    Ok((ids, PromptForm::ChatTemplate))
}
