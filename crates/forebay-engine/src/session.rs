//! Sessions: opens a model (catalog, description, device, weights, decoder) and runs it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use forebay_compute::{Arithmetic, Cpu, Isa, default_threads};
use forebay_format::Catalog;
use forebay_model::{Decoder, ModelError, Routing, Weights};
use forebay_ops::{KV_BLOCK, KvType, RowKind};
use forebay_options::{BadOption, OptionName};
use forebay_store::FileSet;
use forebay_stream::{MemoryPlan, Phase, PolicyKind, Residency};
use forebay_text::{ChatTemplate, Tokenizer};
use tracing::field::Empty;

use crate::device;
use crate::gpu;
use crate::inspect::ModelInfo;
use crate::kv::SequenceId;
use crate::kv_tiers::KvDiskType;
use crate::mtp;
use crate::options::{CpuOffload, SessionOptions};
use crate::placed::{Described, GpuStart};
use crate::plan::{self, HitCurve, Placement, Prediction, Rates, Work};
use crate::routing_log::RoutingLog;
use crate::runner::{FetchRates, Logits, Outputs, Rows, Runner};
use crate::statistics::{Checks, ReadPath, SubLayerStatistics};
use crate::text::optional_tokenizer;
use crate::traced::TracedModel;
use crate::{EngineError, SessionStatistics, peak_resident_bytes};

/// Progress callback for prompts, called after each layer of each pass with (tokens done, tokens in the prompt). Tokens
/// that have passed some of the layers count in part. It must not allocate and should return quickly.
pub type PromptWatch = Box<dyn FnMut(usize, usize) + Send>;

/// An open model with its key/value cache.
pub struct Session {
    pub(crate) runner: Runner,
    /// The only sequence of this session.
    pub(crate) sequence: SequenceId,
    pub(crate) watch: Option<PromptWatch>,
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    chat_template: Option<ChatTemplate>,
    info: ModelInfo,
    device: String,
    kv_type: KvType,
    why_not_cuda: Option<String>,
    announce_device: bool,
    /// Plan of the blocks in host memory, on a GPU of experts alone. `None` if all blocks are on a GPU.
    plan: Option<MemoryPlan>,
    budget_bytes: u64,
    ram_budget_bytes: u64,
    budget_chosen_by_user: bool,
    threads: Option<usize>,
    cpu_offload: CpuOffload,
    root: PathBuf,
    model_path: PathBuf,
    policy: PolicyKind,
    checks: Checks,
    read_path: ReadPath,
    gpu_start: Option<GpuStart>,
    /// Token ids in the key/value cache.
    pub(crate) cached: Vec<u32>,
    /// True if states of recurrent layers are kept while prompts are read.
    pub(crate) keeps_states: bool,
    /// Proposals of the predicting layer, if it is loaded.
    pub(crate) mtp: Option<mtp::Proposals>,
    /// Recording of the routing, if one is in progress.
    pub(crate) routing: Option<RoutingLog>,
    load_seconds: f64,
    traced: Option<TracedModel>,
}

impl Session {
    /// Opens a model and fills its memory. `progress` gets the bytes done and the total bytes.
    ///
    /// # Errors
    /// Returns an error if anything keeps the model from running: a damaged or unknown file, memory that cannot be
    /// reserved, a failed read. If a budget is too small, the error names the smallest one that works. Returns
    /// [`EngineError::Interrupted`] if the caller interrupts.
    pub fn open(
        model: &Path,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, EngineError> {
        let started = Instant::now();
        let (device, seconds) = (Empty, Empty);
        let open = tracing::debug_span!("open", path = %model.display(), device, seconds).entered();
        let catalog = Catalog::open(model)?;
        let architecture = mtp::describe(&catalog, options)?;
        let mut files =
            FileSet::of_catalog(&catalog, options.verify)?.interruptible(&options.interrupt);
        if let Some(recorder) = &options.recorder {
            files = files.recorded(recorder);
        }
        let checks = Checks::requested(&catalog, options.verify)?;
        let context = options.context_for(&architecture)?;
        let chat_template = ChatTemplate::from_catalog(&catalog)?;
        let info = ModelInfo::new(&catalog, &architecture);
        // These run in parallel: a GPU takes a third of a second to open, and a large vocabulary takes some time, too.
        let (tokenizer, chosen, weights, placed) = thread::scope(|scope| {
            let parent = open.id();
            let tokenizer = scope.spawn(|| {
                let span =
                    tracing::debug_span!(parent: parent, "tokenizer", tokens = Empty).entered();
                let tokenizer = match &options.tokenizer {
                    Some(tokenizer) => Some(tokenizer.clone()),
                    None => optional_tokenizer(&catalog)?,
                };
                let tokens = tokenizer.as_ref().map(|tokenizer| tokenizer.vocab_size());
                span.record("tokens", tokens);
                Ok::<_, EngineError>(tokenizer)
            });
            let opening = gpu::Opening::start(scope, options);
            let weights = Weights::new(&catalog, &architecture, &files)?;
            let mut open_time = Duration::ZERO;
            let plan = || {
                opening.plan(options, &architecture, &weights, context, &catalog, &mut open_time)
            };
            let dense = architecture.expert_layers().next().is_none();
            let span = tracing::debug_span!("plan", device = ?options.device, context);
            let mut chosen = span.in_scope(|| device::choose(options, dense, plan))?;
            drop(span);
            let model = Described {
                catalog: &catalog,
                architecture: &architecture,
                weights: &weights,
                files,
                context,
            };
            let placed = match chosen.cuda.take() {
                Some(plan) => model.on_gpu(plan, open_time, options, progress)?,
                None => model.on_host(host(options)?, options, progress)?,
            };
            Ok::<_, EngineError>((joined(tokenizer)?, chosen, weights, placed))
        })?;
        open.record("device", chosen.name.as_str());
        open.record("seconds", started.elapsed().as_secs_f64());
        let vram = placed.backend.info().vram;
        options.interrupt.check()?;
        let mut decoder = Decoder::new(architecture, weights, placed.backend);
        decoder.stop_on(&options.interrupt);
        let mut runner = Runner::new(decoder, options.kv_ram_bytes);
        if let Some(rows) = options.snapshot_every {
            runner.set_snapshot_interval(rows);
        }
        let sequence = runner.begin_empty();
        let mtp = mtp::Proposals::of(&runner.decoder, &chosen.name)?;
        Ok(Session {
            runner,
            sequence,
            watch: None,
            tokenizer,
            chat_template,
            info,
            device: chosen.name,
            kv_type: options.kv_type(),
            why_not_cuda: chosen.why_not_cuda,
            announce_device: chosen.announce,
            plan: placed.plan,
            budget_bytes: vram.map_or(placed.budget_bytes, |vram| vram.budget_bytes),
            ram_budget_bytes: placed.budget_bytes,
            budget_chosen_by_user: options.ram_bytes.or(options.vram_bytes).is_some(),
            threads: options.threads,
            cpu_offload: options.cpu_offload_possible(),
            root: catalog.root,
            model_path: model.to_owned(),
            policy: options.policy,
            checks,
            read_path: placed.read_path,
            gpu_start: placed.gpu_start,
            keeps_states: false,
            mtp,
            cached: Vec::with_capacity(context),
            routing: None,
            load_seconds: started.elapsed().as_secs_f64(),
            traced: placed.traced,
        })
    }

    /// Reports the progress of prompts of more than one token to `watch` from now on: tokens done and total tokens.
    pub fn watch_prompts(&mut self, watch: Option<PromptWatch>) {
        self.watch = watch;
    }

    /// Keeps states of recurrent layers in RAM while prompts are read, from now on, so that [`Session::truncate`] need not drop
    /// everything ([`SessionOptions::snapshot_every`]). They take as much RAM as the KV cache, at most 4 GiB, unless
    /// [`SessionOptions::kv_ram_bytes`] says otherwise.
    pub fn keep_states(&mut self) {
        self.keeps_states = true;
    }

    /// Returns a description of the model.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Returns the plan of the blocks in host memory, or `None` if all blocks are on a GPU.
    pub fn plan(&self) -> Option<&MemoryPlan> {
        self.plan.as_ref()
    }

    /// Returns the plan of the expert slots on a GPU that does not hold all experts.
    pub fn slots(&self) -> Option<&MemoryPlan> {
        self.runner.decoder.backend().slots()
    }

    /// Returns the speed predicted from the rates of a machine profile, for cache hits as in `hits`. Returns `None` if
    /// the GPU that computes is not in the profile.
    pub fn predicted(&self, rates: &Rates, hits: &HitCurve, work: Work) -> Option<Prediction> {
        let sub_layers = self.runner.decoder.backend().sub_layers();
        let placement = match (self.slots(), self.plan.clone()) {
            (None, Some(host)) if let Some(sub_layers) = sub_layers => {
                Placement::SubLayers { sub_layers: sub_layers.clone(), host }
            }
            (Some(slots), Some(host)) => {
                Placement::VramSlots { slots: slots.clone(), host, cpu_offload: self.cpu_offload }
            }
            (None, Some(plan)) => Placement::Ram(plan),
            (_, None) => Placement::Vram,
        };
        let (architecture, weights) =
            (self.runner.decoder.architecture(), self.runner.decoder.weights());
        let rates = rates.reading(&self.info.coding).with_threads(self.threads);
        let groups = self.runner.decoder.backend().kv_groups();
        let kept = groups.iter().find(|group| group.window.is_none());
        let kv = kept.map_or((1.0, 0), |group| {
            (group.on_device as f64 / group.blocks as f64, group.blocks * KV_BLOCK)
        });
        let placement = (&placement, kv);
        let tokens = (self.context(), self.runner.decoder.backend().batch_tokens());
        plan::predict(architecture, weights, tokens, (&rates, hits), placement, work)
    }

    /// Returns a function that predicts the tokens per second of several unrelated sequences that generate together. It uses
    /// usual rates where `doctor` has not measured this machine.
    pub(crate) fn predict_together(&self) -> impl Fn(usize) -> Option<f64> + '_ {
        let rates = Rates::of_folder(&self.root).unwrap_or_else(Rates::usual_here);
        move |sequences| {
            let work = Work { sequences, ..Work::alone(1, self.context() / 2) };
            let predicted = self.predicted(&rates, &HitCurve::default(), work)?;
            Some(predicted.generate.tokens_per_second)
        }
    }

    /// Returns the predicted time for a row of a prompt, and the rate of the disk on which the model is.
    pub(crate) fn predicted_rates(&self) -> FetchRates {
        let rates = Rates::of_folder(&self.root).unwrap_or_else(Rates::usual_here);
        let tokens = self.runner.decoder.backend().batch_tokens();
        let work = Work::alone(tokens.min(self.context()), 0);
        let predicted = self.predicted(&rates, &HitCurve::default(), work);
        let per_second = predicted.map_or(100.0, |of| of.prompt.tokens_per_second);
        FetchRates {
            seconds_per_row: 1.0 / per_second.max(1e-3),
            disk_bytes_per_second: rates.disk_bytes_per_second(),
        }
    }

    /// Returns the device with the reason for it, if forebay chose it itself and there was a choice.
    pub fn device_choice(&self) -> Option<String> {
        let why = self.why_not_cuda.as_ref();
        let why = why.map_or(String::new(), |why| format!(", not cuda: {why}"));
        self.announce_device.then(|| format!("{}{why}", self.device))
    }

    /// Returns the model's tokenizer.
    ///
    /// # Errors
    /// Returns an error if the model has none. Only token ids can be used with such a model.
    pub fn tokenizer(&self) -> Result<&Tokenizer, EngineError> {
        self.tokenizer
            .as_deref()
            .ok_or_else(|| EngineError::NoTokenizer { path: self.root.clone() })
    }

    /// Returns a shared reference to the model's tokenizer, so that the caller can use it while the session generates.
    ///
    /// # Errors
    /// Returns an error if the model has no tokenizer.
    pub fn shared_tokenizer(&self) -> Result<Arc<Tokenizer>, EngineError> {
        let tokenizer = self.tokenizer.as_ref();
        tokenizer.cloned().ok_or_else(|| EngineError::NoTokenizer { path: self.root.clone() })
    }

    /// Returns the model's chat template, if it has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// Returns the path with which the model was opened.
    pub(crate) fn model_path(&self) -> &Path {
        &self.model_path
    }

    /// Returns the CPU offload that may happen.
    pub(crate) fn cpu_offload(&self) -> CpuOffload {
        self.cpu_offload
    }

    /// Returns true if the bits of a request's tokens do not depend on other requests.
    pub(crate) fn is_independent(&self) -> bool {
        let on_gpu = self.runner.decoder.backend().info().vram.is_some();
        // Which experts the CPU computes follows from what other requests have left in VRAM.
        let offloads = on_gpu && self.cpu_offload == CpuOffload::Always;
        let rounds = self.runner.tiers().disk().is_some_and(|disk| disk.ty == KvDiskType::Q8_0);
        !offloads && !rounds
    }

    /// Returns the folder of the KV cache's tier on disk, if there is one.
    pub fn kv_folder(&self) -> Option<&Path> {
        self.runner.tiers().disk().map(|disk| disk.store.folder())
    }

    /// Returns true if keys and values are f16.
    pub(crate) fn has_f16_kv(&self) -> bool {
        self.kv_type == KvType::F16
    }

    /// Returns what the bytes of KV blocks depend on beside model and tokens.
    pub(crate) fn kv_identity(&self) -> String {
        let on =
            if self.runner.decoder.backend().info().vram.is_some() { "a GPU" } else { "the CPU" };
        let layers = if self.mtp.is_some() { ", with the predicting layer" } else { "" };
        format!("{:?} keys and values on {on}{layers}", self.kv_type)
    }

    /// Returns the number of logits per position.
    pub fn vocab_size(&self) -> usize {
        self.runner.decoder.architecture().vocabulary
    }

    /// Returns the number of positions that the key/value cache can hold.
    pub fn context(&self) -> usize {
        self.runner.decoder.backend().context()
    }

    /// Returns the token ids in the key/value cache.
    pub fn cached_tokens(&self) -> &[u32] {
        &self.cached
    }

    /// Drops all cached tokens from `position` on, and returns how many are left. Layers with a window keep little more
    /// than the window. If `position` is too far back for them, this drops more tokens.
    pub fn truncate(&mut self, position: usize) -> usize {
        let kept = self.runner.truncate(self.sequence, position);
        self.cached.truncate(kept);
        if let Some(mtp) = &mut self.mtp {
            mtp.forget_from(kept);
        }
        kept
    }

    /// Returns true if some layers keep little more than their window, or a state, so that [`Session::truncate`] may have to
    /// drop all tokens.
    pub fn has_windows(&self) -> bool {
        let decoder = &self.runner.decoder;
        decoder.is_recurrent()
            || self.runner.decoder.architecture().layers.iter().any(|layer| layer.window.is_some())
    }

    /// Drops all cached tokens.
    pub fn reset(&mut self) {
        self.truncate(0);
    }

    /// Returns the logits `[tokens, vocabulary]` of a text from its beginning. `routing` gets the chosen experts
    /// `[tokens, layers, k]`.
    pub fn logits(
        &mut self,
        tokens: &[u32],
        routing: Option<&mut Vec<i32>>,
    ) -> Result<Vec<f32>, EngineError> {
        self.reset();
        self.begin_turn(tokens)?;
        let mut logits = Vec::new();
        if routing.is_some() {
            self.keep_routing();
        }
        let output = &mut Outputs::Logits(&mut logits);
        let ran = self.forward(Phase::Prompt, tokens, Logits::All, output);
        if let Some(routing) = routing {
            routing.append(&mut self.take_kept_routing());
        }
        ran?;
        self.runner.decoder.end_prompt(tokens.len());
        Ok(logits)
    }

    /// Ends the session's own sequence, so that an engine can use all of the cache.
    pub(crate) fn end_sequence(&mut self) {
        self.runner.end(self.sequence);
        self.cached.clear();
    }

    /// Begins the session's own sequence again.
    pub(crate) fn begin_sequence(&mut self) {
        let sequence = self.runner.begin_empty();
        self.follow(sequence, &[]);
    }

    /// Runs tokens behind the cached ones, in as many passes as they need, and adds them to the cached ones. Appends the
    /// logits that are wanted to `output`, and the chosen experts of every token to `routing`, if given.
    ///
    /// After an error, the cached tokens are those before the call, or fewer ([`Session::truncate`]).
    pub(crate) fn run_tokens(
        &mut self,
        kind: RowKind,
        tokens: &[u32],
        logits: Logits,
        output: &mut Outputs<'_>,
        mut routing: Option<&mut Routing>,
    ) -> Result<(), EngineError> {
        let (used, context) = (self.cached.len(), self.context());
        if used + tokens.len() > context {
            return Err(ModelError::ContextFull { used, context, wanted: tokens.len() }.into());
        }
        let batch = self.runner.decoder.backend().batch_tokens();
        let keeps = self.keeps_states && kind == RowKind::Prompt;
        let mut done = 0;
        while done < tokens.len() {
            let border =
                self.runner.state_border(used + tokens.len(), used, used + done).filter(|_| keeps);
            let left = border.map_or(tokens.len() - done, |border| border - used - done);
            let part = &tokens[done..done + left.min(batch)];
            let is_last = done + part.len() == tokens.len();
            let wanted = if logits == Logits::Last && !is_last { Logits::None } else { logits };
            let rows = Rows { sequence: self.sequence, kind, tokens: part, logits: wanted };
            let mut watch = self.watch.as_mut().filter(|_| tokens.len() > 1).map(|watch| {
                move |layers: usize, all: usize| {
                    watch(done + part.len() * layers / all, tokens.len())
                }
            });
            let watch = watch.as_mut().map(|watch| watch as &mut dyn FnMut(usize, usize));
            let ran = self.runner.pass(&[rows], output, routing.as_deref_mut(), watch);
            if let Err(error) = ran {
                self.truncate(used);
                return Err(error);
            }
            self.cached.extend_from_slice(part);
            done += part.len();
            if let Err(error) = self.predict_known(kind, part.len()) {
                self.truncate(used);
                return Err(error);
            }
            if border == Some(used + done)
                && let Err(error) = self.runner.keep_state(self.sequence)
            {
                tracing::warn!("a state is not kept for the next turn: {error}");
            }
        }
        Ok(())
    }

    /// Returns the logits like [`Session::logits`], but feeds every token to the model by itself, as in generation.
    pub fn logits_one_by_one(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        self.reset();
        self.begin_turn(&[])?;
        let mut logits = Vec::new();
        self.add_one_by_one(tokens, &mut logits)?;
        Ok(logits)
    }

    /// Returns the logits of the last token of `prompt`, and of every token of `answer`, which are fed one by one: those
    /// from which generation chose the answer.
    pub fn logits_of_answer(
        &mut self,
        prompt: &[u32],
        answer: &[u32],
    ) -> Result<Vec<f32>, EngineError> {
        self.reset();
        self.begin_turn(prompt)?;
        let mut logits = Vec::new();
        let output = &mut Outputs::Logits(&mut logits);
        self.forward(Phase::Prompt, prompt, Logits::Last, output)?;
        self.runner.decoder.end_prompt(prompt.len());
        self.add_one_by_one(answer, &mut logits)?;
        Ok(logits)
    }

    fn add_one_by_one(&mut self, tokens: &[u32], logits: &mut Vec<f32>) -> Result<(), EngineError> {
        for token in tokens {
            let output = &mut Outputs::Logits(logits);
            self.forward(Phase::Generate, &[*token], Logits::Last, output)?;
            self.runner.decoder.end_token();
        }
        Ok(())
    }

    /// Returns the model that a trace of this session's reads belongs to, or `None` without a recorder.
    pub fn traced_model(&self) -> Option<&TracedModel> {
        self.traced.as_ref()
    }

    /// Returns the statistics so far.
    pub fn statistics(&self) -> SessionStatistics {
        let compute = self.runner.decoder.backend().info();
        SessionStatistics {
            device: self.device.clone(),
            why_not_cuda: self.why_not_cuda.clone(),
            vram: compute.vram,
            budget_bytes: self.budget_bytes,
            budget_chosen_by_user: self.budget_chosen_by_user,
            model_bytes: self.info.file_bytes,
            weights_bytes: self.info.weights_bytes,
            expert_bytes: self.info.expert_bytes,
            arena_bytes: self.plan.as_ref().map_or(0, |plan| plan.arena_bytes),
            kv_cache_bytes: self.runner.decoder.backend().cache_bytes(),
            peak_resident_bytes: peak_resident_bytes(),
            load_seconds: self.load_seconds,
            gpu_start: self.gpu_start.clone(),
            threads: compute.threads,
            isa: compute.isa,
            compute: compute.description,
            policy: self.policy.to_string(),
            io_engine: self.read_path.clone(),
            checksums: self.checks,
            device_experts: self.runner.decoder.backend().device_experts(),
            device_sub_layers: self.runner.decoder.backend().device_sub_layers().map(
                |sub_layers| SubLayerStatistics {
                    sub_layers,
                    ram_budget_bytes: self.ram_budget_bytes,
                },
            ),
            mtp: self.mtp.as_ref().map(mtp::Proposals::statistics),
            stream: self.runner.decoder.residency().map(Residency::statistics),
        }
    }
}

/// Joins `thread` and returns its result. Resumes its panic if it panicked.
pub(crate) fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

pub(crate) fn host(options: &SessionOptions) -> Result<Cpu, EngineError> {
    let arithmetic = if options.exact { Arithmetic::Exact } else { Arithmetic::Fast };
    Ok(Cpu::new(threads(options)?, Isa::selected()?, arithmetic))
}

/// Returns the CPU workers for CPU offload of experts. The default is half of the threads that would compute alone,
/// because one thread drives the GPU. On a virtual machine with 16 processors, two to a core, 8 threads were half again
/// as fast as 16.
pub(crate) fn offload_host(options: &SessionOptions) -> Result<Cpu, EngineError> {
    let threads = options.threads.unwrap_or_else(|| default_threads().div_ceil(2));
    host(&SessionOptions { threads: Some(threads), ..options.clone() })
}

fn threads(options: &SessionOptions) -> Result<usize, BadOption> {
    match options.threads {
        None => Ok(0),
        Some(count) if (1..=256).contains(&count) => Ok(count),
        Some(count) => Err(BadOption {
            name: OptionName::Threads,
            value: count.to_string(),
            expected: "it must be from 1 to 256".into(),
        }),
    }
}
