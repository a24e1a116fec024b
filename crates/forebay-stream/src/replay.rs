//! Recorded routing, and its replay through the cache state machine that the engine runs.

use serde::Serialize;

use crate::blocks::{ExpertIndex, LayerIndex};
use crate::cache::{CacheCounters, CacheShape, CacheState};
use crate::policy::PolicyKind;

/// Whether a batch belongs to a prompt or to a generated token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Phase {
    Prompt,
    Generate,
}

/// What one layer's batch touched.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Batch {
    phase: Phase,
    layer: LayerIndex,
    /// Where its experts end in the trace's list.
    end: usize,
}

/// Which experts were used, batch by batch.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RoutingTrace {
    /// Experts, and bytes of one of them, for each layer.
    layers: Vec<(u32, u64)>,
    batches: Vec<Batch>,
    experts: Vec<ExpertIndex>,
}

/// Why a text is not a routing trace.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the routing trace: {why}")]
pub struct TraceError {
    /// Line number, 1 first.
    pub line: usize,
    pub why: String,
}

/// No model has more; a trace that says so is broken.
const LAYERS_MAX: u32 = 1 << 12;
const EXPERTS_MAX: u32 = 1 << 16;
const EXPERT_BYTES_MAX: u64 = 1 << 40;

impl RoutingTrace {
    /// A trace of layers with `(experts, bytes of one expert)` and no batches yet.
    pub fn new(layers: Vec<(u32, u64)>) -> RoutingTrace {
        RoutingTrace { layers, batches: Vec::new(), experts: Vec::new() }
    }

    /// `(experts, bytes of one expert)` of each layer.
    pub fn layers(&self) -> &[(u32, u64)] {
        &self.layers
    }

    /// Adds a batch: distinct experts, the one used last at the end.
    ///
    /// # Panics
    /// If the trace has no such layer or the layer no such expert.
    pub fn push(&mut self, phase: Phase, layer: LayerIndex, experts: &[ExpertIndex]) {
        let known = self.layers[layer.0 as usize].0;
        assert!(experts.iter().all(|expert| expert.0 < known), "no such expert");
        self.experts.extend_from_slice(experts);
        self.batches.push(Batch { phase, layer, end: self.experts.len() });
    }

    /// Every batch: phase, layer, experts.
    pub fn batches(&self) -> impl Iterator<Item = (Phase, LayerIndex, &[ExpertIndex])> {
        let starts = std::iter::once(0).chain(self.batches.iter().map(|batch| batch.end));
        let experts = &self.experts;
        self.batches
            .iter()
            .zip(starts)
            .map(move |(batch, start)| (batch.phase, batch.layer, &experts[start..batch.end]))
    }

    /// Reads the CSV form: `# layer=N expert_bytes=N` lines and `n_expert=N`, then one row per routed expert with
    /// turn, phase (0 prompt, 1 generate), step, layer, slot and expert as its first columns.
    ///
    /// All rows of a layer in a prompt are one batch; of a generated token, those of one step.
    ///
    /// # Errors
    /// [`TraceError`] with the line.
    pub fn from_csv(text: &str) -> Result<RoutingTrace, TraceError> {
        let mut reader = Reader::default();
        for (index, line) in text.lines().enumerate() {
            reader.line(line.trim()).map_err(|why| TraceError { line: index + 1, why })?;
        }
        reader.close_batch();
        Ok(reader.trace)
    }
}

/// Reads the CSV form line by line.
#[derive(Default)]
struct Reader {
    trace: RoutingTrace,
    experts_per_layer: u32,
    /// Turn, phase, step (0 in a prompt) and layer of the open batch.
    key: Option<(u64, Phase, u64, u32)>,
    /// Experts of the open batch in the order of their last use.
    open: Vec<ExpertIndex>,
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<(), String> {
        if let Some(comment) = line.strip_prefix('#') {
            return self.comment(comment);
        }
        if line.is_empty() || line.starts_with("turn,") {
            return Ok(());
        }
        self.row(line)
    }

    fn comment(&mut self, comment: &str) -> Result<(), String> {
        let fields = || comment.split_whitespace().filter_map(|field| field.split_once('='));
        let number =
            |text: &str| text.parse::<u64>().map_err(|_| format!("{text:?} is not a number"));
        if let Some((_, experts)) = fields().find(|field| field.0 == "n_expert") {
            let experts = number(experts)?;
            if experts > u64::from(EXPERTS_MAX) {
                return Err(format!("{experts} experts in a layer, {EXPERTS_MAX} are possible"));
            }
            self.experts_per_layer = experts as u32;
        }
        let Some((_, layer)) = fields().find(|field| field.0 == "layer") else { return Ok(()) };
        let bytes = fields().find(|field| field.0 == "expert_bytes");
        let bytes = bytes.map_or(Ok(0), |field| number(field.1))?;
        if bytes > EXPERT_BYTES_MAX {
            return Err(format!("experts of {bytes} bytes, {EXPERT_BYTES_MAX} are possible"));
        }
        let layer = number(layer)?;
        if layer >= u64::from(LAYERS_MAX) {
            return Err(format!("layer {layer}, {LAYERS_MAX} are possible"));
        }
        let layers = &mut self.trace.layers;
        if layers.len() <= layer as usize {
            layers.resize(layer as usize + 1, (0, 0));
        }
        layers[layer as usize] = (self.experts_per_layer, bytes);
        Ok(())
    }

    fn row(&mut self, line: &str) -> Result<(), String> {
        let mut columns = line.split(',');
        let mut column = |name: &str| {
            let text = columns.next().ok_or_else(|| format!("the column {name} is missing"))?;
            text.trim().parse::<u64>().map_err(|_| format!("{name} is {text:?}, not a number"))
        };
        let turn = column("turn")?;
        let phase = match column("phase")? {
            0 => Phase::Prompt,
            1 => Phase::Generate,
            other => return Err(format!("phase {other}: there are 0 (prompt) and 1 (generate)")),
        };
        let step = column("step")?;
        let step = if phase == Phase::Prompt { 0 } else { step };
        let layer = column("layer")?;
        column("slot")?;
        let expert = column("expert")?;
        let experts = self.trace.layers.get(layer as usize).map_or(0, |known| u64::from(known.0));
        if expert >= experts {
            return Err(format!("expert {expert} of layer {layer}, which has {experts} experts"));
        }
        let key = (turn, phase, step, layer as u32);
        if self.key != Some(key) {
            self.close_batch();
            self.key = Some(key);
        }
        let expert = ExpertIndex(expert as u32);
        self.open.retain(|&other| other != expert);
        self.open.push(expert);
        Ok(())
    }

    fn close_batch(&mut self) {
        if let Some((_, phase, _, layer)) = self.key.take() {
            self.trace.push(phase, LayerIndex(layer), &self.open);
            self.open.clear();
        }
    }
}

/// What a replay counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ReplayCounters {
    pub all: CacheCounters,
    pub prompt: CacheCounters,
    pub generate: CacheCounters,
}

/// Runs a trace through the cache, which is empty at first and stays warm from the prompt to the generated tokens.
///
/// # Panics
/// If the shape has fewer layers or experts than the trace.
pub fn replay(trace: &RoutingTrace, policy: PolicyKind, shape: &CacheShape) -> ReplayCounters {
    let mut cache = CacheState::new(policy, shape);
    let mut counters = ReplayCounters::default();
    let mut evicted = Vec::new();
    for (phase, layer, experts) in trace.batches() {
        let before = cache.counters();
        for &expert in experts {
            cache.lookup(layer, expert);
        }
        evicted.clear();
        cache.retain(layer, experts, &mut evicted);
        let of_phase = match phase {
            Phase::Prompt => &mut counters.prompt,
            Phase::Generate => &mut counters.generate,
        };
        of_phase.add_between(&before, &cache.counters());
    }
    counters.all = cache.counters();
    counters
}
