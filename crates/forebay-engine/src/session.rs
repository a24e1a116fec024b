//! Opening a model: catalog, description, device, weights, decoder.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use forebay_compute::{Arithmetic, Cpu, Isa, KvType, default_threads};
use forebay_format::Catalog;
use forebay_model::{
    Architecture, CpuOffloadRates, Decoder, LogitsWanted, PromptWatch, SubLayerRates, Weights,
};
use forebay_store::{FaultPlan, FileSet, Interrupt, IoKind, IoRecorder};
use forebay_stream::{MemoryPlan, Phase, PolicyKind, Residency};
use forebay_text::{ChatTemplate, TextError, Tokenizer};
use tracing::field::Empty;

use crate::device::{self, DeviceChoice};
use crate::gpu;
use crate::inspect::ModelInfo;
use crate::placed::{Described, GpuStart};
use crate::plan::{self, HitCurve, Placement, Prediction, Rates, Work};
use crate::routing_log::RoutingLog;
use crate::statistics::{Checks, ReadPath, SubLayerStatistics};
use crate::traced::TracedModel;
use crate::{EngineError, SessionStatistics, peak_resident_bytes};

/// What a user may choose about a session.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    pub device: DeviceChoice,
    /// Bytes of device memory for everything, the driver's context included. `None`: what is free.
    pub vram_bytes: Option<u64>,
    /// Bytes for weights in RAM. `None`: what the model needs, at most three quarters of the free memory.
    pub ram_bytes: Option<u64>,
    /// Positions of key/value cache. `None`: the trained context, at most 4096.
    pub context: Option<usize>,
    /// Worker threads. `None`: one per physical core.
    pub threads: Option<usize>,
    /// f32 activations and an f32 key/value cache.
    pub exact: bool,
    /// How keys and values are kept.
    pub kv_cache: KvCacheType,
    /// On a GPU, single tokens' work is recorded once and then queued as a CUDA graph. Results are the same without.
    pub cuda_graphs: bool,
    /// Whether the CPU computes a share of the experts that a GPU has no room for.
    pub cpu_offload: CpuOffload,
    /// Decides about that share instead of the machine profile.
    pub cpu_offload_rates: Option<CpuOffloadRates>,
    /// Decides which of a dense model's layers the CPU computes that a GPU has no room for, instead of the machine profile.
    pub sub_layer_rates: Option<SubLayerRates>,
    pub policy: PolicyKind,
    pub io: IoKind,
    /// Read experts of the next layer ahead while a token is computed, by that layer's router on
    /// the token's present state. Off by default: on random weights three guesses of four are
    /// wrong, and the reads they cost delay those that are needed.
    pub prefetch: bool,
    /// Reads bypass the page cache where the file system allows it.
    pub direct: bool,
    /// What is read of a pack is compared with its checksums.
    pub verify: bool,
    /// Bytes per read request.
    pub request_bytes: Option<usize>,
    /// Read requests in flight.
    pub queue_depth: Option<usize>,
    /// How long a kernel of the GPU waits for the host before it gives up and the host does its work in another way, with the same
    /// results. `None`: a quarter of a second on a GPU with a watchdog, such as one with a display, else as long as it takes.
    pub gpu_wait_bound: Option<Duration>,
    /// On a GPU, everything is read back after loading and compared with the files: for tests.
    pub check_weights: bool,
    /// A read that makes no progress for this long is an error.
    pub stall_timeout: Duration,
    /// Breaks reads on purpose: for tests of what then happens.
    pub faults: Option<FaultPlan>,
    /// Records every read.
    pub recorder: Option<IoRecorder>,
    /// Ends loading, prompts and generation early.
    pub interrupt: Interrupt,
}

/// Whether the CPU computes a share of the experts that a GPU has no room for. It rounds in its own way, and never takes part in
/// exact arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CpuOffload {
    /// While so much is missing on the GPU that it is faster by the machine profile.
    #[default]
    Auto,
    Always,
    /// What comes out is what a GPU that holds all computes, bit for bit.
    Never,
}

/// The type of keys and values in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvCacheType {
    F16,
    /// Bytes with a scale for every 32 of them: half the memory.
    Q8_0,
    /// Halves of bytes with a scale for every 32: a quarter.
    Q4_0,
}

impl KvCacheType {
    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            KvCacheType::F16 => "f16",
            KvCacheType::Q8_0 => "q8_0",
            KvCacheType::Q4_0 => "q4_0",
        }
    }
}

impl SessionOptions {
    /// How keys and values are kept.
    pub(crate) fn kv_type(&self) -> KvType {
        match (self.exact, self.kv_cache) {
            (true, _) => KvType::F32,
            (false, KvCacheType::F16) => KvType::F16,
            (false, KvCacheType::Q8_0) => KvType::Q8_0,
            (false, KvCacheType::Q4_0) => KvType::Q4_0,
        }
    }
}

impl Default for SessionOptions {
    fn default() -> Self {
        SessionOptions {
            device: DeviceChoice::Cpu,
            vram_bytes: None,
            ram_bytes: None,
            context: None,
            threads: None,
            exact: false,
            kv_cache: KvCacheType::F16,
            cuda_graphs: true,
            cpu_offload: CpuOffload::Auto,
            cpu_offload_rates: None,
            sub_layer_rates: None,
            policy: PolicyKind::LAYER_LFU,
            io: IoKind::Auto,
            prefetch: false,
            direct: true,
            verify: true,
            request_bytes: None,
            queue_depth: None,
            gpu_wait_bound: None,
            check_weights: false,
            stall_timeout: Duration::from_secs(30),
            faults: None,
            recorder: None,
            interrupt: Interrupt::new(),
        }
    }
}

impl SessionOptions {
    /// What [`SessionOptions::cpu_offload`] comes to in the arithmetic that is asked for.
    pub(crate) fn cpu_offload_possible(&self) -> CpuOffload {
        if self.exact { CpuOffload::Never } else { self.cpu_offload }
    }
}

/// Positions reserved when the user does not say: enough for a long conversation, and within
/// reach of a small machine.
const DEFAULT_CONTEXT: usize = 4096;

/// A model in use.
pub struct Session {
    pub(crate) decoder: Decoder,
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    chat_template: Option<ChatTemplate>,
    info: ModelInfo,
    device: String,
    why_not_cuda: Option<String>,
    announce_device: bool,
    /// Where blocks are in host memory, on a GPU experts alone; `None` where all are on a GPU.
    plan: Option<MemoryPlan>,
    budget_bytes: u64,
    ram_budget_bytes: u64,
    budget_chosen_by_user: bool,
    threads: Option<usize>,
    cpu_offload: CpuOffload,
    root: PathBuf,
    policy: PolicyKind,
    checks: Checks,
    read_path: ReadPath,
    gpu_start: Option<GpuStart>,
    /// Ids in the key/value cache.
    pub(crate) cached: Vec<u32>,
    pub(crate) logits: Vec<f32>,
    /// The largest of them with their ids, where the device chose.
    pub(crate) largest: Vec<(f32, u32)>,
    /// What is recorded of routing, if it is.
    pub(crate) routing: Option<RoutingLog>,
    load_seconds: f64,
    traced: Option<TracedModel>,
}

impl Session {
    /// Opens a model and fills its memory: `progress` gets bytes done and bytes in all.
    ///
    /// # Errors
    /// Whatever keeps the model from running: a damaged or unknown file, a budget too small
    /// (with the smallest that works), memory that cannot be reserved, a failed read;
    /// [`EngineError::Interrupted`].
    pub fn open(
        model: &Path,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Session, EngineError> {
        let started = Instant::now();
        let (device, seconds) = (Empty, Empty);
        let open = tracing::debug_span!("open", path = %model.display(), device, seconds).entered();
        let catalog = Catalog::open(model)?;
        let architecture = Architecture::from_catalog(&catalog)?;
        let mut files =
            FileSet::of_catalog(&catalog, options.verify)?.interruptible(&options.interrupt);
        if let Some(recorder) = &options.recorder {
            files = files.recorded(recorder);
        }
        let checks = Checks::requested(&catalog, options.verify)?;
        let context = context(options, &architecture)?;
        let chat_template = ChatTemplate::from_catalog(&catalog)?;
        let info = ModelInfo::new(&catalog, &architecture);
        let vocabulary = architecture.vocabulary;
        // Side by side: a GPU takes a third of a second to open, and a large vocabulary takes some time, too.
        let (tokenizer, chosen, weights, placed) = thread::scope(|scope| {
            let parent = open.id();
            let tokenizer = scope.spawn(|| {
                let span =
                    tracing::debug_span!(parent: parent, "tokenizer", tokens = Empty).entered();
                let tokenizer = optional_tokenizer(&catalog)?;
                let tokens = tokenizer.as_ref().map(|tokenizer| tokenizer.vocab_size());
                span.record("tokens", tokens);
                Ok::<_, EngineError>(tokenizer)
            });
            let opening = gpu::Opening::start(scope, options);
            let weights = Weights::new(&catalog, &architecture, &files)?;
            let mut open_time = Duration::ZERO;
            let folder = &catalog.root;
            let plan =
                || opening.plan(options, &architecture, &weights, context, folder, &mut open_time);
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
        Ok(Session {
            decoder,
            tokenizer,
            chat_template,
            info,
            device: chosen.name,
            why_not_cuda: chosen.why_not_cuda,
            announce_device: chosen.announce,
            plan: placed.plan,
            budget_bytes: vram.map_or(placed.budget_bytes, |vram| vram.budget_bytes),
            ram_budget_bytes: placed.budget_bytes,
            budget_chosen_by_user: options.ram_bytes.or(options.vram_bytes).is_some(),
            threads: options.threads,
            cpu_offload: options.cpu_offload_possible(),
            root: catalog.root,
            policy: options.policy,
            checks,
            read_path: placed.read_path,
            gpu_start: placed.gpu_start,
            cached: Vec::with_capacity(context),
            logits: Vec::with_capacity(vocabulary),
            largest: Vec::new(),
            routing: None,
            load_seconds: started.elapsed().as_secs_f64(),
            traced: placed.traced,
        })
    }

    /// From now on, prompts of more than one token tell `watch` how far they are: tokens done and tokens in all.
    pub fn watch_prompts(&mut self, watch: Option<PromptWatch>) {
        self.decoder.watch_prompts(watch);
    }

    /// What the model is.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// Where its blocks go in host memory; `None` where all are on a GPU.
    pub fn plan(&self) -> Option<&MemoryPlan> {
        self.plan.as_ref()
    }

    /// The slots for experts on a GPU that does not hold all of them.
    pub fn slots(&self) -> Option<&MemoryPlan> {
        self.decoder.backend().slots()
    }

    /// How fast it should be by the rates of a machine profile, if experts are found as `hits` says.
    /// `None` where a GPU computes that is not in the profile.
    pub fn predicted(&self, rates: &Rates, hits: &HitCurve, work: Work) -> Option<Prediction> {
        let sub_layers = self.decoder.backend().sub_layers();
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
        let (architecture, weights) = (self.decoder.architecture(), self.decoder.weights());
        let rates = rates.with_threads(self.threads);
        plan::predict(architecture, weights, self.context(), (&rates, hits), &placement, work)
    }

    /// Which device was chosen and why, where the choice was ours and there was one.
    pub fn device_choice(&self) -> Option<String> {
        let why = self.why_not_cuda.as_ref();
        let why = why.map_or(String::new(), |why| format!(", not cuda: {why}"));
        self.announce_device.then(|| format!("{}{why}", self.device))
    }

    /// The model's tokenizer.
    ///
    /// # Errors
    /// A model without one: only token ids can be used with it.
    pub fn tokenizer(&self) -> Result<&Tokenizer, EngineError> {
        self.tokenizer
            .as_deref()
            .ok_or_else(|| EngineError::NoTokenizer { path: self.root.clone() })
    }

    /// The model's tokenizer, to be used while the session generates.
    ///
    /// # Errors
    /// As [`Session::tokenizer`].
    pub fn shared_tokenizer(&self) -> Result<Arc<Tokenizer>, EngineError> {
        let tokenizer = self.tokenizer.as_ref();
        tokenizer.cloned().ok_or_else(|| EngineError::NoTokenizer { path: self.root.clone() })
    }

    /// The model's chat template, where it has one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// Logits per position.
    pub fn vocab_size(&self) -> usize {
        self.decoder.architecture().vocabulary
    }

    /// Positions that the key/value cache can hold.
    pub fn context(&self) -> usize {
        self.decoder.context()
    }

    /// The token ids in the key/value cache.
    pub fn cached_tokens(&self) -> &[u32] {
        &self.cached
    }

    /// Forgets all cached tokens from `position` on, or all of them where that is too far back for layers that keep little
    /// more than their window. How many are left.
    pub fn truncate(&mut self, position: usize) -> usize {
        self.decoder.truncate(position);
        self.forget_as_decoder();
        self.cached.len()
    }

    /// The tokens in the cache are those that the decoder still has.
    pub(crate) fn forget_as_decoder(&mut self) {
        self.cached.truncate(self.decoder.position());
    }

    /// Whether some layers keep little more than their window, so that [`Session::truncate`] may have to forget all.
    pub fn has_windows(&self) -> bool {
        self.decoder.architecture().layers.iter().any(|layer| layer.window.is_some())
    }

    /// Forgets all cached tokens.
    pub fn reset(&mut self) {
        self.truncate(0);
    }

    /// Logits `[tokens, vocabulary]` of a text from its beginning; `routing` gets the chosen
    /// experts `[tokens, layers, k]`.
    pub fn logits(
        &mut self,
        tokens: &[u32],
        routing: Option<&mut Vec<i32>>,
    ) -> Result<Vec<f32>, EngineError> {
        self.reset();
        self.begin_turn(tokens)?;
        let mut logits = Vec::new();
        match routing {
            Some(experts) => {
                let mut rows = self.routing_rows();
                let all = LogitsWanted::All;
                self.decoder.forward(tokens, all, &mut logits, Some(&mut rows))?;
                self.record(Phase::Prompt, &rows)?;
                experts.append(&mut rows.experts);
            }
            None => {
                self.forward(Phase::Prompt, |decoder, rows| {
                    decoder.forward(tokens, LogitsWanted::All, &mut logits, rows)
                })?;
            }
        }
        self.cached.extend_from_slice(tokens);
        self.decoder.end_prompt(tokens.len());
        Ok(logits)
    }

    /// As [`Session::logits`], but every token goes through the model by itself, as when text is generated.
    pub fn logits_one_by_one(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        self.reset();
        self.begin_turn(&[])?;
        let (mut logits, mut row) = (Vec::new(), Vec::new());
        for token in tokens {
            self.forward(Phase::Generate, |decoder, rows| {
                decoder.forward(&[*token], LogitsWanted::Last, &mut row, rows)
            })?;
            self.cached.push(*token);
            self.decoder.end_token();
            logits.extend_from_slice(&row);
        }
        Ok(logits)
    }

    /// What a trace of this session's reads is about; `None` without a recorder.
    pub fn traced_model(&self) -> Option<&TracedModel> {
        self.traced.as_ref()
    }

    /// Figures so far.
    pub fn statistics(&self) -> SessionStatistics {
        let compute = self.decoder.backend().info();
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
            kv_cache_bytes: self.decoder.cache_bytes(),
            peak_resident_bytes: peak_resident_bytes(),
            load_seconds: self.load_seconds,
            gpu_start: self.gpu_start.clone(),
            threads: compute.threads,
            isa: compute.isa,
            compute: compute.description,
            policy: self.policy.to_string(),
            io_engine: self.read_path.clone(),
            checksums: self.checks,
            device_experts: self.decoder.backend().device_experts(),
            device_sub_layers: self.decoder.backend().device_sub_layers().map(|sub_layers| {
                SubLayerStatistics { sub_layers, ram_budget_bytes: self.ram_budget_bytes }
            }),
            stream: self.decoder.residency().map(Residency::statistics),
        }
    }
}

/// What a thread has found.
pub(crate) fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

pub(crate) fn host(options: &SessionOptions) -> Result<Cpu, EngineError> {
    let arithmetic = if options.exact { Arithmetic::Exact } else { Arithmetic::Fast };
    Ok(Cpu::new(threads(options)?, Isa::selected()?, arithmetic))
}

/// As [`host`], to help a GPU with experts: unless the user says how many, half of the threads that would compute alone. One
/// thread drives the GPU, and on 16 processors of a virtual machine, two to a core, 8 threads were half again as fast as 16.
pub(crate) fn offload_host(options: &SessionOptions) -> Result<Cpu, EngineError> {
    let threads = options.threads.unwrap_or_else(|| default_threads().div_ceil(2));
    host(&SessionOptions { threads: Some(threads), ..options.clone() })
}

fn optional_tokenizer(catalog: &Catalog) -> Result<Option<Arc<Tokenizer>>, EngineError> {
    match Tokenizer::from_catalog(catalog) {
        Ok(tokenizer) => Ok(Some(Arc::new(tokenizer))),
        Err(TextError::NoTokenizerFile | TextError::MissingKey { key: "tokenizer.ggml.model" }) => {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

pub(crate) fn context(
    options: &SessionOptions,
    architecture: &Architecture,
) -> Result<usize, EngineError> {
    let trained = architecture.context_trained;
    let context = options.context.unwrap_or(trained.min(DEFAULT_CONTEXT));
    if context == 0 || context > trained {
        return Err(EngineError::BadOption {
            name: "--ctx",
            value: context.to_string(),
            expected: format!("this model was trained for 1 to {trained} positions"),
        });
    }
    Ok(context)
}

fn threads(options: &SessionOptions) -> Result<usize, EngineError> {
    match options.threads {
        None => Ok(0),
        Some(count) if (1..=256).contains(&count) => Ok(count),
        Some(count) => Err(EngineError::BadOption {
            name: "--threads",
            value: count.to_string(),
            expected: "it must be from 1 to 256".into(),
        }),
    }
}
