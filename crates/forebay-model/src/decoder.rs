//! The one decoder: a batch of tokens in, logits out, over leased blocks.

use forebay_compute::{
    Activations, Attention, Cpu, KvCache, KvShape, KvType, MatmulJob, Matrix, RopeConfig,
    RopeTable, RouterRule,
};
use forebay_format::dequantize;
use forebay_store::FileSet;
use forebay_stream::{Lease, Residency};

use crate::ModelError;
use crate::arch::Architecture;
use crate::moe::{MoeScratch, MoeStep};
use crate::weights::{FeedForwardWeights, PartMatrix, Weights};

/// Most tokens that go through the layers together.
const BATCH_TOKENS_MAX: usize = 512;

/// Bytes that the activations of a batch may take. They are beside the user's budget, within the
/// allowance that the documentation states for the process itself.
const ACTIVATION_BYTES_MAX: u64 = 112 << 20;

/// Tokens that go through the layers together: as many as the activations' allowance has room
/// for. The same for every memory budget, because which kernel runs depends on the number of
/// tokens, and streamed output must equal resident output.
fn batch_tokens(architecture: &Architecture, context: usize) -> usize {
    let mut batch = BATCH_TOKENS_MAX;
    while batch > 32 && activation_bytes(architecture, batch) > ACTIVATION_BYTES_MAX {
        batch /= 2;
    }
    batch.min(context)
}

/// Bytes of activation buffers for batches of `batch` tokens.
fn activation_bytes(architecture: &Architecture, batch: usize) -> u64 {
    Scratch::floats_per_token(architecture) as u64 * batch as u64 * 4
        + MoeScratch::bytes(architecture, batch)
}

/// Which positions of a call get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsWanted {
    None,
    Last,
    All,
}

/// A model ready to compute: description, weights, cache, and where blocks are leased.
pub struct Decoder {
    architecture: Architecture,
    weights: Weights,
    cpu: Cpu,
    files: FileSet,
    residency: Residency,
    cache: KvCache,
    rope: RopeTable,
    scratch: Scratch,
    /// 0, 1, 2 ... for the whole context.
    positions: Vec<u32>,
    /// Most tokens that go through the layers together.
    batch: usize,
    /// Read experts of the next layer ahead by its router's guess.
    prefetch: bool,
    position: usize,
}

/// Activations of one batch, reserved at start.
struct Scratch {
    /// Residual stream `[tokens, hidden]`.
    x: Vec<f32>,
    /// Normed input of a block `[tokens, hidden]`.
    normed: Vec<f32>,
    /// Output of a block `[tokens, hidden]`.
    block_out: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    input: Activations,
    inner: Activations,
    embedding_row: Vec<u8>,
    chunk_logits: Vec<f32>,
    moe: MoeScratch,
}

impl Decoder {
    /// Puts a decoder together. `context` positions of key/value cache are reserved.
    ///
    /// # Errors
    /// A rotary embedding or a context that the description's numbers do not allow.
    pub fn new(
        architecture: Architecture,
        weights: Weights,
        cpu: Cpu,
        files: FileSet,
        residency: Residency,
        context: usize,
        kv_type: KvType,
    ) -> Result<Decoder, ModelError> {
        let attention = &architecture.attention;
        let shape = KvShape {
            layers: architecture.layers.len(),
            kv_heads: attention.kv_heads,
            head_dim_k: attention.head_dim,
            head_dim_v: attention.head_dim,
            context,
        };
        let cache = KvCache::new(shape, kv_type)?;
        let rope = &architecture.rope;
        let rope = RopeTable::new(&RopeConfig {
            rotary_dim: rope.rotary_dim,
            theta: rope.theta,
            layout: rope.layout,
            scaling: rope.scaling,
            frequency_factors: weights.rope_factors.as_deref(),
            context,
        })?;
        let batch = batch_tokens(&architecture, context);
        let scratch = Scratch::reserve(&architecture, &weights, batch);
        Ok(Decoder {
            architecture,
            weights,
            cpu,
            files,
            residency,
            cache,
            rope,
            scratch,
            positions: (0..context as u32).collect(),
            batch,
            prefetch: false,
            position: 0,
        })
    }

    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Whether experts of the next layer are read ahead by its router's guess while a single token
    /// is computed. Of no effect where everything is resident; never changes a result.
    pub fn set_prefetch(&mut self, prefetch: bool) {
        self.prefetch = prefetch && !self.residency.plan().fully_resident;
    }

    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    pub fn residency(&self) -> &Residency {
        &self.residency
    }

    pub fn residency_mut(&mut self) -> &mut Residency {
        &mut self.residency
    }

    /// Bytes reserved for keys and values.
    pub fn cache_bytes(&self) -> u64 {
        self.cache.bytes()
    }

    /// Positions that the cache can hold.
    pub fn context(&self) -> usize {
        self.cache.shape().context
    }

    /// Positions in the cache.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Forgets all positions from `position` on.
    pub fn truncate(&mut self, position: usize) {
        self.position = self.position.min(position);
        self.cache.truncate(self.position);
    }

    /// Runs `tokens` after what the cache holds and writes logits `[positions, vocabulary]`.
    ///
    /// `routing`, if given, gets the chosen experts `[tokens, layers, k]` appended, -1 in layers
    /// without experts.
    ///
    /// # Errors
    /// A full context, a token outside of the vocabulary, a failed read, or values that are not
    /// finite. After an error the cache holds what it held before the call.
    pub fn forward(
        &mut self,
        tokens: &[u32],
        wanted: LogitsWanted,
        logits: &mut Vec<f32>,
        mut routing: Option<&mut Vec<i32>>,
    ) -> Result<(), ModelError> {
        self.check(tokens)?;
        logits.clear();
        let start = self.position;
        let batch = self.batch;
        let last_batch = tokens.len().div_ceil(batch).saturating_sub(1);
        for (index, tokens) in tokens.chunks(batch).enumerate() {
            let wanted = match wanted {
                LogitsWanted::Last if index < last_batch => LogitsWanted::None,
                wanted => wanted,
            };
            let done = self.forward_batch(tokens, wanted, logits, routing.as_deref_mut());
            if let Err(error) = done {
                self.truncate(start);
                return Err(error);
            }
        }
        Ok(())
    }

    fn check(&self, tokens: &[u32]) -> Result<(), ModelError> {
        let vocabulary = self.architecture.vocabulary;
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocabulary) {
            return Err(ModelError::TokenOutOfRange { id: *id, vocabulary });
        }
        let (used, context) = (self.position, self.context());
        if used + tokens.len() > context {
            return Err(ModelError::ContextFull { used, context, wanted: tokens.len() });
        }
        Ok(())
    }

    fn forward_batch(
        &mut self,
        tokens: &[u32],
        wanted: LogitsWanted,
        logits: &mut Vec<f32>,
        mut routing: Option<&mut Vec<i32>>,
    ) -> Result<(), ModelError> {
        self.embed(tokens)?;
        let count = tokens.len();
        let row_start = routing.as_deref().map_or(0, Vec::len);
        if let Some(routing) = routing.as_deref_mut() {
            let k = self.architecture.experts_per_token();
            routing.resize(row_start + count * self.architecture.layers.len() * k, -1);
        }
        // A batch without logits skips the head: its chunks must not be read ahead in vain.
        let head = if wanted == LogitsWanted::None { 0 } else { self.weights.head.len() };
        let layers = self.architecture.layers.len();
        self.residency.set_dense_cycle(layers + head);
        for layer in 0..layers {
            let lease = self.residency.dense(layer as u32)?;
            self.attention(layer, count, &lease)?;
            self.expect_finite(layer, count)?;
            let rows = routing.as_deref_mut().map(|routing| &mut routing[row_start..]);
            self.feed_forward(layer, count, lease, rows)?;
            self.expect_finite(layer, count)?;
        }
        self.position += count;
        let first = match wanted {
            LogitsWanted::None => return Ok(()),
            LogitsWanted::Last => count - 1,
            LogitsWanted::All => 0,
        };
        self.head(first, count, logits)
    }

    /// Reads the tokens' rows of the embedding table into the residual stream.
    fn embed(&mut self, tokens: &[u32]) -> Result<(), ModelError> {
        let embedding = &self.weights.embedding;
        let row_bytes = embedding.row_bytes as u64;
        let rows = self.scratch.x.chunks_exact_mut(self.architecture.hidden);
        for (token, row) in tokens.iter().zip(rows) {
            let mut extent = embedding.extent;
            extent.offset += u64::from(*token) * row_bytes;
            extent.length = row_bytes;
            self.files.read_exact(extent, &mut self.scratch.embedding_row)?;
            dequantize(embedding.ty, &self.scratch.embedding_row, row)?;
        }
        Ok(())
    }

    fn attention(&mut self, layer: usize, count: usize, lease: &Lease) -> Result<(), ModelError> {
        let Decoder {
            architecture, weights, cpu, residency, cache, rope, scratch, positions, ..
        } = self;
        let attention = &architecture.attention;
        let weights = &weights.layers[layer];
        let (hidden, head_dim) = (architecture.hidden, attention.head_dim);
        let (heads, kv_heads) = (attention.heads, attention.kv_heads);
        let x = &scratch.x[..count * hidden];
        let normed = &mut scratch.normed[..count * hidden];
        cpu.rms_norm(x, &weights.attention_norm, architecture.norm_epsilon, normed);
        let block = Block { residency, lease };
        let q = &mut scratch.q[..count * heads * head_dim];
        let k = &mut scratch.k[..count * kv_heads * head_dim];
        let v = &mut scratch.v[..count * kv_heads * head_dim];
        let types = [weights.q.ty, weights.k.ty, weights.v.ty];
        scratch.input.prepare(cpu, normed, count, hidden, &types);
        let input = &scratch.input;
        let mut jobs = [
            MatmulJob { w: block.matrix(&weights.q), x: input, tokens: None, out: q },
            MatmulJob { w: block.matrix(&weights.k), x: input, tokens: None, out: k },
            MatmulJob { w: block.matrix(&weights.v), x: input, tokens: None, out: v },
        ];
        matmul_beside_reads(cpu, residency, &mut jobs)?;
        add_bias(cpu, q, weights.q_bias.as_deref());
        add_bias(cpu, k, weights.k_bias.as_deref());
        add_bias(cpu, v, weights.v_bias.as_deref());
        let epsilon = architecture.norm_epsilon;
        norm_in_place(cpu, q, weights.q_norm.as_deref(), epsilon);
        norm_in_place(cpu, k, weights.k_norm.as_deref(), epsilon);
        let positions = &positions[self.position..self.position + count];
        cpu.rope(q, head_dim, positions, rope);
        cpu.rope(k, head_dim, positions, rope);
        cache.append(cpu, layer, self.position, k, v)?;
        let attended = &mut scratch.attended[..count * heads * head_dim];
        let scale = 1.0 / (head_dim as f32).sqrt();
        let window = architecture.layers[layer].window;
        let what = Attention { window, ..Attention::causal(layer, heads, self.position, scale) };
        cpu.attention(q, cache, &what, attended);
        scratch.input.prepare(cpu, attended, count, heads * head_dim, &[weights.o.ty]);
        let out = &mut scratch.block_out[..count * hidden];
        let w = matrix(residency, lease, &weights.o);
        let job = MatmulJob { w, x: &scratch.input, tokens: None, out };
        matmul_beside_reads(cpu, residency, &mut [job])?;
        let out = &mut scratch.block_out[..count * hidden];
        add_bias(cpu, out, weights.o_bias.as_deref());
        cpu.add_assign(&mut scratch.x[..count * hidden], out);
        Ok(())
    }

    fn feed_forward(
        &mut self,
        layer: usize,
        count: usize,
        lease: Lease,
        routing: Option<&mut [i32]>,
    ) -> Result<(), ModelError> {
        let hidden = self.architecture.hidden;
        let weights = &self.weights.layers[layer];
        let x = &self.scratch.x[..count * hidden];
        let normed = &mut self.scratch.normed[..count * hidden];
        self.cpu.rms_norm(x, &weights.feed_forward_norm, self.architecture.norm_epsilon, normed);
        match weights.feed_forward {
            FeedForwardWeights::Dense { gate, up, down } => {
                self.dense_feed_forward(count, &lease, [gate, up, down])?;
            }
            FeedForwardWeights::Experts { .. } => {
                self.experts(layer, count, lease, routing)?;
            }
        }
        let out = &self.scratch.block_out[..count * hidden];
        self.cpu.add_assign(&mut self.scratch.x[..count * hidden], out);
        Ok(())
    }

    fn dense_feed_forward(
        &mut self,
        count: usize,
        lease: &Lease,
        parts: [PartMatrix; 3],
    ) -> Result<(), ModelError> {
        let Decoder { architecture, cpu, residency, scratch, .. } = self;
        let [gate, up, down] = parts;
        let (hidden, width) = (architecture.hidden, gate.rows);
        let block = Block { residency, lease };
        let normed = &scratch.normed[..count * hidden];
        scratch.input.prepare(cpu, normed, count, hidden, &[gate.ty, up.ty]);
        let gate_out = &mut scratch.gate[..count * width];
        let up_out = &mut scratch.up[..count * width];
        let x = &scratch.input;
        let mut jobs = [
            MatmulJob { w: block.matrix(&gate), x, tokens: None, out: gate_out },
            MatmulJob { w: block.matrix(&up), x, tokens: None, out: up_out },
        ];
        matmul_beside_reads(cpu, residency, &mut jobs)?;
        let inner = &mut scratch.gate[..count * width];
        cpu.silu_mul_in_place(inner, &scratch.up[..count * width]);
        scratch.inner.prepare(cpu, inner, count, width, &[down.ty]);
        let out = &mut scratch.block_out[..count * hidden];
        let w = matrix(residency, lease, &down);
        let job = MatmulJob { w, x: &scratch.inner, tokens: None, out };
        matmul_beside_reads(cpu, residency, &mut [job])
    }

    fn experts(
        &mut self,
        layer: usize,
        count: usize,
        lease: Lease,
        routing: Option<&mut [i32]>,
    ) -> Result<(), ModelError> {
        let Decoder { architecture, weights, cpu, residency, scratch, .. } = self;
        let hidden = architecture.hidden;
        let crate::arch::FeedForward::Experts(experts) = &architecture.layers[layer].feed_forward
        else {
            unreachable!("weights with experts come from a description with experts");
        };
        let FeedForwardWeights::Experts { router, gate, up, down } =
            weights.layers[layer].feed_forward
        else {
            unreachable!("the caller looked at the weights");
        };
        let normed = &scratch.normed[..count * hidden];
        scratch.input.prepare(cpu, normed, count, hidden, &[router.ty, gate.ty, up.ty]);
        let block = Block { residency, lease: &lease };
        let moe = &mut scratch.moe;
        let scores = &mut moe.scores[..count * experts.count];
        let job =
            MatmulJob { w: block.matrix(&router), x: &scratch.input, tokens: None, out: scores };
        cpu.matmul(&mut [job]);
        // The dense block is done with; its slot may take the next layer while experts compute.
        drop(lease);
        let rule = RouterRule { scale: experts.scale, ..RouterRule::softmax(experts.renormalise) };
        moe.route(cpu, count, experts, &rule)?;
        if let Some(routing) = routing {
            moe.record(routing, layer, architecture.layers.len(), count);
        }
        moe.begin(layer, residency)?;
        if self.prefetch && count == 1 {
            self.prefetch_next(layer + 1)?;
        }
        let Decoder { architecture, cpu, residency, scratch, .. } = self;
        let crate::arch::FeedForward::Experts(experts) = &architecture.layers[layer].feed_forward
        else {
            unreachable!("weights with experts come from a description with experts");
        };
        let moe = &mut scratch.moe;
        let step = MoeStep { experts, gate, up, down, hidden, count };
        moe.compute(&step, cpu, residency, &scratch.input)?;
        moe.combine(&step, cpu, &mut scratch.block_out[..count * hidden]);
        Ok(())
    }

    /// While this layer's experts are on their way: what would the next layer's router choose for
    /// the token as it is now? Reads those experts ahead, on what the demand leaves of the disk.
    fn prefetch_next(&mut self, next: usize) -> Result<(), ModelError> {
        let Decoder { architecture, weights, cpu, residency, scratch, .. } = self;
        let Some(layer) = weights.layers.get(next) else { return Ok(()) };
        let FeedForwardWeights::Experts { router, .. } = layer.feed_forward else { return Ok(()) };
        let crate::arch::FeedForward::Experts(experts) = &architecture.layers[next].feed_forward
        else {
            return Ok(());
        };
        let Some(lease) = residency.dense_if_present(next as u32) else { return Ok(()) };
        let hidden = architecture.hidden;
        // `block_out` is free until this layer's experts are combined.
        let normed = &mut scratch.block_out[..hidden];
        let epsilon = architecture.norm_epsilon;
        cpu.rms_norm(&scratch.x[..hidden], &layer.feed_forward_norm, epsilon, normed);
        scratch.inner.prepare(cpu, normed, 1, hidden, &[router.ty]);
        let out = &mut scratch.moe.guess_scores[..experts.count];
        let w = matrix(residency, &lease, &router);
        cpu.matmul(&mut [MatmulJob { w, x: &scratch.inner, tokens: None, out }]);
        drop(lease);
        let rule = RouterRule { scale: experts.scale, ..RouterRule::softmax(experts.renormalise) };
        scratch.moe.prefetch(cpu, next, experts, &rule, residency)
    }

    /// Final norm and output projection of rows `first .. count` of the batch, in chunks of the
    /// vocabulary, appended to `logits`.
    fn head(
        &mut self,
        first: usize,
        count: usize,
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        let Decoder { architecture, weights, cpu, residency, scratch, .. } = self;
        let (hidden, vocabulary) = (architecture.hidden, architecture.vocabulary);
        let rows = count - first;
        let x = &scratch.x[first * hidden..count * hidden];
        let normed = &mut scratch.normed[..rows * hidden];
        cpu.rms_norm(x, &weights.final_norm, architecture.norm_epsilon, normed);
        let ty = weights.head[0].matrix.ty;
        scratch.input.prepare(cpu, normed, rows, hidden, &[ty]);
        let base = logits.len();
        logits.resize(base + rows * vocabulary, 0.0);
        let layers = architecture.layers.len();
        for (index, chunk) in weights.head.iter().enumerate() {
            let lease = residency.dense((layers + index) as u32)?;
            let w = matrix(residency, &lease, &chunk.matrix);
            let chunk_rows = chunk.matrix.rows;
            let x = &scratch.input;
            if rows == 1 {
                // A chunk of one row of logits is contiguous: write in place.
                let start = base + chunk.first_row;
                let out = &mut logits[start..start + chunk_rows];
                matmul_beside_reads(cpu, residency, &mut [MatmulJob { w, x, tokens: None, out }])?;
                continue;
            }
            scratch.chunk_logits.resize(rows * chunk_rows, 0.0);
            let out = &mut scratch.chunk_logits[..];
            matmul_beside_reads(cpu, residency, &mut [MatmulJob { w, x, tokens: None, out }])?;
            for (row, values) in scratch.chunk_logits.chunks_exact(chunk_rows).enumerate() {
                let start = base + row * vocabulary + chunk.first_row;
                logits[start..start + chunk_rows].copy_from_slice(values);
            }
        }
        match logits[base..].iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(index) => {
                let token = self.position - rows + index / vocabulary;
                Err(ModelError::NumericFailure { layer: layers, token })
            }
        }
    }

    /// A NaN would spread to every later token and look like a model that writes nonsense.
    fn expect_finite(&self, layer: usize, count: usize) -> Result<(), ModelError> {
        let hidden = self.architecture.hidden;
        let x = &self.scratch.x[..count * hidden];
        // A sum of magnitudes is finite only if all are, and vectorises; overflow of the sum
        // itself would need values that no later norm could use either.
        let finite = |row: &[f32]| row.iter().map(|value| value.abs()).sum::<f32>().is_finite();
        match x.chunks_exact(hidden).position(|row| !finite(row)) {
            None => Ok(()),
            Some(row) => Err(ModelError::NumericFailure { layer, token: self.position + row }),
        }
    }
}

/// A leased block, to be read as matrices.
struct Block<'a, 'lease> {
    residency: &'a Residency,
    lease: &'lease Lease,
}

impl<'lease> Block<'_, 'lease> {
    fn matrix(&self, part: &PartMatrix) -> Matrix<'lease> {
        matrix(self.residency, self.lease, part)
    }
}

/// Part `part` of a leased block as a matrix.
pub(crate) fn matrix<'lease>(
    residency: &Residency,
    lease: &'lease Lease,
    part: &PartMatrix,
) -> Matrix<'lease> {
    let data = residency.bytes(lease, part.part);
    Matrix { ty: part.ty, rows: part.rows, cols: part.cols, data }
}

/// Computes `jobs`; while the other threads begin with them, this one hands waiting reads to the
/// disk and takes in what has arrived.
pub(crate) fn matmul_beside_reads(
    cpu: &Cpu,
    residency: &mut Residency,
    jobs: &mut [MatmulJob<'_>],
) -> Result<(), ModelError> {
    let mut progress = Ok(());
    cpu.matmul_after(&mut || progress = residency.progress(), jobs);
    Ok(progress?)
}

fn add_bias(cpu: &Cpu, rows: &mut [f32], bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        cpu.add_bias_rows(rows, bias);
    }
}

/// Norms every run of `weight.len()` values: a head, or a whole projection.
fn norm_in_place(cpu: &Cpu, values: &mut [f32], weight: Option<&[f32]>, epsilon: f32) {
    if let Some(weight) = weight {
        cpu.rms_norm_in_place(values, weight, epsilon);
    }
}

impl Scratch {
    fn reserve(architecture: &Architecture, weights: &Weights, batch: usize) -> Scratch {
        let attention = &architecture.attention;
        let floats = |width: usize| vec![0.0; batch * width];
        let width = dense_width(architecture);
        Scratch {
            x: floats(architecture.hidden),
            normed: floats(architecture.hidden),
            block_out: floats(architecture.hidden),
            q: floats(attention.heads * attention.head_dim),
            k: floats(attention.kv_heads * attention.head_dim),
            v: floats(attention.kv_heads * attention.head_dim),
            attended: floats(attention.heads * attention.head_dim),
            gate: floats(width),
            up: floats(width),
            input: Activations::new(),
            inner: Activations::new(),
            embedding_row: vec![0; weights.embedding.row_bytes],
            chunk_logits: Vec::new(),
            moe: MoeScratch::reserve(architecture, batch),
        }
    }

    /// Floats that a token of a batch takes, its quantised copies included.
    fn floats_per_token(architecture: &Architecture) -> usize {
        let attention = &architecture.attention;
        let q_width = attention.heads * attention.head_dim;
        let kv_width = attention.kv_heads * attention.head_dim;
        let width = dense_width(architecture);
        3 * architecture.hidden + 2 * q_width + 2 * kv_width + 2 * width
            // Quantised activations: a byte per value for each of two forms, and scales.
            + (architecture.hidden.max(q_width) + width) * 5 / 8
    }
}

/// Width of the widest dense feed-forward; 0 where every layer has experts.
fn dense_width(architecture: &Architecture) -> usize {
    let widths = architecture.layers.iter().map(|layer| match layer.feed_forward {
        crate::arch::FeedForward::Dense { width } => width,
        crate::arch::FeedForward::Experts(_) => 0,
    });
    widths.max().unwrap_or(0)
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder")
            .field("family", &self.architecture.family)
            .field("position", &self.position)
            .finish_non_exhaustive()
    }
}
