//! What a user may choose about a session.

use std::sync::Arc;
use std::time::Duration;

use forebay_model::{Architecture, CpuOffloadRates, KvCapacity, KvInVram, SubLayerRates};
use forebay_ops::KvType;
use forebay_options::{BadOption, OptionName};
use forebay_store::{FaultPlan, Interrupt, IoKind, IoRecorder};
use forebay_stream::PolicyKind;
use forebay_text::Tokenizer;

use crate::device::DeviceChoice;

/// Number of positions reserved if the user does not choose one. It is enough for a long conversation and affordable on
/// a small machine.
const DEFAULT_CONTEXT: usize = 4096;

/// Options of a session that a user may choose.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    pub device: DeviceChoice,
    /// Bytes of device memory for everything, including the driver's context. `None` uses what is free.
    pub vram_bytes: Option<u64>,
    /// Bytes for weights in RAM. `None` uses what the model needs, at most three quarters of the free memory.
    pub ram_bytes: Option<u64>,
    /// Number of positions in the key/value cache. `None` uses the trained context, at most 4096.
    pub context: Option<usize>,
    /// Most sequences at a time.
    pub sequences: usize,
    /// Number of positions in the key/value cache for all sequences together, at least [`SessionOptions::context`]. `None`
    /// gives every sequence room for the whole context. With fewer positions, an [`Engine`](crate::Engine) suspends
    /// sequences when there is no room for all.
    pub kv_tokens: Option<usize>,
    /// How much of the keys and values is in VRAM. The rest is in pinned RAM, which is reserved at the start and is not part of
    /// [`SessionOptions::ram_bytes`]. Layers with a window stay in VRAM. A CPU does not use this.
    pub kv_in_vram: KvInVram,
    /// Most bytes of RAM for keys and values that the device has no room for: those of suspended sequences, and prefixes that
    /// later requests may share. They are reserved when they are needed, and are not part of [`SessionOptions::ram_bytes`]. A
    /// sequence for which there is no room is computed again, which gives the same bits. `None` is as much as the key/value
    /// cache has, at most 4 GiB.
    pub kv_ram_bytes: Option<u64>,
    /// An [`Engine`](crate::Engine) keeps the states of recurrent layers after every so many rows of a prompt, in the same RAM, beside
    /// the state near its end. A later prompt that shares a prefix begins at the last one in it. It is rounded up to whole KV
    /// blocks. 0 keeps only the state near the end. `None` chooses an interval at which states take about as much memory as keys and
    /// values.
    pub snapshot_every: Option<usize>,
    /// True if an [`Engine`](crate::Engine) will run the session. Bits of a request then do not depend on others, even if
    /// there is room for one sequence only.
    pub for_engine: bool,
    /// Number of worker threads. `None` uses one per physical core.
    pub threads: Option<usize>,
    /// True for f32 activations and an f32 key/value cache.
    pub exact: bool,
    /// Type of the keys and values in the cache.
    pub kv_cache: KvCacheType,
    /// True to capture the work of single tokens on a GPU once and then launch it as a CUDA graph. Results are the same
    /// without.
    pub cuda_graphs: bool,
    /// CPU offload of experts that a GPU has no room for.
    pub cpu_offload: CpuOffload,
    /// Rates that decide about CPU offload of experts, instead of the machine profile.
    pub cpu_offload_rates: Option<CpuOffloadRates>,
    /// Rates that decide which layers of a dense model the CPU computes, instead of the machine profile. Only layers
    /// that the GPU has no room for are affected.
    pub sub_layer_rates: Option<SubLayerRates>,
    pub policy: PolicyKind,
    pub io: IoKind,
    /// True to load the first layer that predicts further tokens (multi-token prediction). [`Session::generate`](crate::Session::generate)
    /// and an [`Engine`](crate::Engine) then check its proposals in the passes of the model. Tokens are the same without. Only for one
    /// sequence at a time.
    pub mtp: bool,
    /// True to prefetch experts of the next layer while a token is computed. That layer's router predicts them from the
    /// token's present state. Off by default: on random weights, three predictions of four are wrong, and their reads
    /// delay those that are needed.
    pub prefetch: bool,
    /// True if reads bypass the page cache where the file system allows it.
    pub direct: bool,
    /// True to verify the blocks of a pack against their checksums.
    pub verify: bool,
    /// Bytes per read request.
    pub request_bytes: Option<usize>,
    /// Number of read requests in flight.
    pub queue_depth: Option<usize>,
    /// Longest time that a GPU kernel waits for the host. After that the kernel gives up, and the host does its work in
    /// another way, with the same results. `None` is a quarter of a second on a GPU with a watchdog, such as one with a
    /// display. On other GPUs `None` waits as long as it takes.
    pub gpu_wait_bound: Option<Duration>,
    /// True to read back all weights from a GPU after loading and compare them with the files. For tests.
    pub check_weights: bool,
    /// Time without progress after which a read fails.
    pub stall_timeout: Duration,
    /// Faults to inject into reads. For tests.
    pub faults: Option<FaultPlan>,
    /// The model's tokenizer, from an earlier session or a [`ModelText`](crate::ModelText). `None` builds it, which takes a
    /// while for a large vocabulary.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Recorder of every read.
    pub recorder: Option<IoRecorder>,
    /// Interrupt that ends loading, prompts and generation early.
    pub interrupt: Interrupt,
}

/// CPU offload of the experts that a GPU has no room for. The CPU rounds differently from the GPU, so it never takes
/// part in exact arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CpuOffload {
    /// The CPU computes experts as long as so many are missing on the GPU that this is faster, according to the machine
    /// profile.
    #[default]
    Auto,
    Always,
    /// The CPU computes no experts. Output is bit-identical to that of a GPU that holds all weights.
    Never,
}

impl CpuOffload {
    /// Returns the choice for a sequence that other sequences run beside or before. The automatic choice depends on the misses
    /// of the last tokens, so others would change the bits of a token; nothing is offloaded then.
    pub(crate) fn beside_others(self) -> CpuOffload {
        if self == CpuOffload::Auto { CpuOffload::Never } else { self }
    }
}

/// The type of keys and values in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvCacheType {
    F16,
    /// 8 bits per value, with a scale for every 32 values: half the memory.
    Q8_0,
    /// 4 bits per value, with a scale for every 32 values: a quarter of the memory.
    Q4_0,
}

impl KvCacheType {
    /// Returns the name that users write.
    pub fn name(self) -> &'static str {
        match self {
            KvCacheType::F16 => "f16",
            KvCacheType::Q8_0 => "q8_0",
            KvCacheType::Q4_0 => "q4_0",
        }
    }
}

impl SessionOptions {
    /// Returns the number of positions of context: those that are asked for, or as many as the model was trained for, up to a bound.
    ///
    /// # Errors
    /// Returns an error if the model was trained for fewer.
    pub(crate) fn context_for(&self, architecture: &Architecture) -> Result<usize, BadOption> {
        let trained = architecture.context_trained;
        let context = self.context.unwrap_or(trained.min(DEFAULT_CONTEXT));
        if context == 0 || context > trained {
            return Err(BadOption {
                name: OptionName::Context,
                value: context.to_string(),
                expected: format!("this model was trained for 1 to {trained} positions"),
            });
        }
        Ok(context)
    }

    /// Returns what the key/value cache has room for if a sequence has `context` positions.
    ///
    /// # Errors
    /// Returns an error if there are too few positions for one sequence.
    pub(crate) fn kv_capacity(&self, context: usize) -> Result<KvCapacity, BadOption> {
        let tokens = self.kv_tokens;
        if let Some(tokens) = tokens.filter(|tokens| *tokens < context) {
            return Err(BadOption {
                name: OptionName::KvTokens,
                value: tokens.to_string(),
                expected: format!(
                    "one sequence ({}) has up to {context} positions",
                    OptionName::Context
                ),
            });
        }
        let in_vram = self.kv_in_vram;
        Ok(KvCapacity { context, sequences: self.sequences, tokens, in_vram })
    }

    /// Returns the type of the keys and values in the cache.
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
            sequences: 1,
            kv_tokens: None,
            kv_in_vram: KvInVram::default(),
            kv_ram_bytes: None,
            snapshot_every: None,
            for_engine: false,
            threads: None,
            exact: false,
            kv_cache: KvCacheType::F16,
            cuda_graphs: true,
            cpu_offload: CpuOffload::Auto,
            cpu_offload_rates: None,
            sub_layer_rates: None,
            policy: PolicyKind::LAYER_LFU,
            io: IoKind::Auto,
            mtp: false,
            prefetch: false,
            direct: true,
            verify: true,
            request_bytes: None,
            queue_depth: None,
            gpu_wait_bound: None,
            check_weights: false,
            stall_timeout: Duration::from_secs(30),
            faults: None,
            tokenizer: None,
            recorder: None,
            interrupt: Interrupt::new(),
        }
    }
}

impl SessionOptions {
    /// Returns [`SessionOptions::cpu_offload`], or [`CpuOffload::Never`] in exact arithmetic.
    ///
    /// With several sequences, and for an [`Engine`](crate::Engine), the automatic choice is [`CpuOffload::Never`] too.
    pub(crate) fn cpu_offload_possible(&self) -> CpuOffload {
        match self.cpu_offload {
            _ if self.exact => CpuOffload::Never,
            // The experts of proposals are missing or not, as those of other sequences.
            chosen if self.sequences > 1 || self.for_engine || self.mtp => chosen.beside_others(),
            chosen => chosen,
        }
    }
}
