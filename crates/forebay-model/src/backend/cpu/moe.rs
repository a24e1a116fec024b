//! The mixture-of-experts step: router scores -> chosen experts -> leases -> products -> combined outputs.
//!
//! Experts are computed as they become available: first those in memory, then each one as it arrives from the disk.
//! Every (token, slot) pair has its own output row. Rows are added up in slot order at the end, so the result does not
//! depend on the order of arrival.

use forebay_compute::RouterRule;
use forebay_compute::{Activations, Cpu, MatmulJob};
use forebay_ops::Gating;
use forebay_stream::{ExpertIndex, LayerIndex, Lease, Residency};

use super::products::{RowsByKind, both_kinds, matmul_beside_reads, matrix, recycle};
use crate::ModelError;
use crate::arch::{Architecture, Experts};
use crate::weights::{PartMatrix, TokenExperts};

/// Bytes that the gate and up outputs of one group of experts may take. Experts that are ready together are computed in
/// groups, so that a long prompt does not need all of these outputs at once.
const GROUP_BYTES: usize = 16 << 20;

/// One layer's step over a batch.
pub struct MoeStep<'a> {
    pub experts: &'a Experts,
    pub gate: PartMatrix,
    pub up: PartMatrix,
    pub down: PartMatrix,
    /// Biases of gate, up and down, `[experts, rows]` each.
    pub biases: Option<&'a [Vec<f32>; 3]>,
    /// Factors of the output of every expert, and the weight of the norm after them, with the norm's epsilon.
    pub output_norm: Option<&'a [Vec<f32>; 2]>,
    pub output_epsilon: f32,
    pub gating: Gating,
    /// Number of elements of an expert's input and output.
    pub outer: usize,
    /// Number of rows in the pass, and of decode rows, which are the first.
    pub count: usize,
    pub decode: usize,
}

/// Buffers of the step, reserved at start.
pub struct MoeScratch {
    /// Router logits `[tokens, experts]`.
    pub scores: Vec<f32>,
    /// Chosen experts and their weights `[tokens, k]`.
    ids: Vec<u32>,
    weights: Vec<f32>,
    /// Start of each expert's tokens in `pair_tokens`, which is sorted by expert; `starts[e] .. starts[e + 1]` are
    /// expert e's.
    starts: Vec<usize>,
    pair_tokens: Vec<u32>,
    /// The pair `token * k + slot` of each entry of `pair_tokens`.
    pairs: Vec<u32>,
    touched: Vec<ExpertIndex>,
    /// The next layer's router scores `[experts]` for one token, and the experts chosen from them.
    pub prediction_scores: Vec<f32>,
    predicted_ids: Vec<u32>,
    prediction_weights: Vec<f32>,
    predictions: Vec<ExpertIndex>,
    /// Outputs of pairs in the order computed `[pairs, outer width]`, and each pair's row.
    outputs: Vec<f32>,
    row_of_pair: Vec<u32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    inner: Activations,
    /// The numbers 0, 1, 2 ... as row selections of `inner`.
    rows: Vec<u32>,
    ready: Vec<(ExpertIndex, Lease)>,
    /// Always empty between calls; kept for its memory.
    jobs: Vec<MatmulJob<'static>>,
    group_pairs: usize,
}

impl MoeScratch {
    pub fn reserve(architecture: &Architecture, batch: usize) -> MoeScratch {
        let size = Sizes::of(architecture, batch);
        MoeScratch {
            scores: vec![0.0; batch * size.experts],
            ids: vec![0; size.pairs],
            weights: vec![0.0; size.pairs],
            starts: vec![0; size.experts + 1],
            pair_tokens: vec![0; size.pairs],
            pairs: vec![0; size.pairs],
            touched: Vec::with_capacity(size.experts),
            prediction_scores: vec![0.0; size.experts],
            predicted_ids: vec![0; architecture.experts_per_token()],
            prediction_weights: vec![0.0; architecture.experts_per_token()],
            predictions: Vec::with_capacity(architecture.experts_per_token()),
            outputs: vec![0.0; size.pairs * size.outer],
            row_of_pair: vec![0; size.pairs],
            gate: vec![0.0; size.group_pairs * size.width],
            up: vec![0.0; size.group_pairs * size.width],
            inner: Activations::new(),
            rows: (0..size.group_pairs as u32).collect(),
            ready: Vec::with_capacity(size.experts),
            jobs: Vec::with_capacity(4 * size.experts),
            group_pairs: size.group_pairs,
        }
    }

    /// Returns the bytes that [`MoeScratch::reserve`] takes.
    pub fn bytes(architecture: &Architecture, batch: usize) -> u64 {
        let size = Sizes::of(architecture, batch);
        let floats = batch * size.experts
            + size.pairs * (size.outer + 5)
            + size.group_pairs * (size.width * 2 + size.width * 5 / 8 + 1);
        4 * floats as u64
    }

    /// Chooses experts for every token, or takes those that a table gives, and sorts the pairs by expert. If `chosen` is given,
    /// these experts replace the choice but keep its weights.
    ///
    /// # Errors
    /// Returns an error if a score is not finite.
    pub fn route(
        &mut self,
        cpu: &Cpu,
        count: usize,
        experts: &Experts,
        rule: &RouterRule<'_>,
        by_token: Option<TokenExperts<'_>>,
        chosen: Option<&[u32]>,
    ) -> Result<(), ModelError> {
        let k = experts.used;
        let scores = &mut self.scores[..count * experts.count];
        let (ids, weights) = (&mut self.ids[..count * k], &mut self.weights[..count * k]);
        match by_token {
            None => cpu.route(rule, scores, experts.count, k, ids, weights)?,
            Some(known) => {
                for (row, ids) in ids.chunks_exact_mut(k).enumerate() {
                    ids.copy_from_slice(known.of(row, k));
                }
                cpu.weigh_experts(rule, scores, experts.count, ids, weights)?;
            }
        }
        if let Some(chosen) = chosen {
            ids.copy_from_slice(chosen);
        }
        // Counting sort: pairs of one expert become adjacent, with tokens ascending.
        let starts = &mut self.starts[..experts.count + 1];
        starts.fill(0);
        for id in ids.iter() {
            starts[*id as usize + 1] += 1;
        }
        self.touched.clear();
        for expert in 0..experts.count {
            if starts[expert + 1] > 0 {
                self.touched.push(ExpertIndex(expert as u32));
            }
            starts[expert + 1] += starts[expert];
        }
        for (pair, id) in ids.iter().enumerate() {
            let place = &mut starts[*id as usize];
            self.pair_tokens[*place] = (pair / k) as u32;
            self.pairs[*place] = pair as u32;
            *place += 1;
        }
        // Filling moved every start to the end of its range, so shift the starts back.
        starts.copy_within(0..experts.count, 1);
        starts[0] = 0;
        Ok(())
    }

    /// Returns the chosen experts `[tokens, k]`.
    pub fn chosen(&self, count: usize, experts: &Experts) -> &[u32] {
        &self.ids[..count * experts.used]
    }

    /// Returns the weights of the chosen experts `[tokens, k]`.
    pub fn chosen_weights(&self, count: usize, experts: &Experts) -> &[f32] {
        &self.weights[..count * experts.used]
    }

    /// Multiplies the input of every token's only expert by the expert's weight.
    pub fn scale_inputs(&self, cpu: &Cpu, experts: &Experts, inputs: &mut [f32], count: usize) {
        assert_eq!(experts.used, 1, "experts share an input");
        cpu.multiply_rows(inputs, &self.weights[..count]);
    }

    /// Leases the touched experts that are in memory, and starts the reads of the others.
    pub fn begin(&self, layer: usize, residency: &mut Residency) -> Result<(), ModelError> {
        residency.begin_experts(LayerIndex(layer as u32), &self.touched)?;
        Ok(())
    }

    /// Starts reads of the experts that `layer` will use for one token.
    pub fn prefetch_known(
        &mut self,
        layer: usize,
        experts: &[u32],
        residency: &mut Residency,
    ) -> Result<(), ModelError> {
        self.predictions.clear();
        self.predictions.extend(experts.iter().map(|id| ExpertIndex(*id)));
        residency.prefetch_experts(LayerIndex(layer as u32), &self.predictions)?;
        Ok(())
    }

    /// Starts reads of the experts that `layer` will probably choose for one token. The prediction uses its router's
    /// scores on an earlier state of the token. If no prediction can be made, nothing is read and no error is returned.
    pub fn prefetch(
        &mut self,
        cpu: &Cpu,
        layer: usize,
        experts: &Experts,
        rule: &RouterRule<'_>,
        residency: &mut Residency,
    ) -> Result<(), ModelError> {
        let k = experts.used;
        let (ids, weights) = (&mut self.predicted_ids[..k], &mut self.prediction_weights[..k]);
        let scores = &self.prediction_scores[..experts.count];
        if cpu.route(rule, scores, experts.count, k, ids, weights).is_err() {
            return Ok(());
        }
        self.predictions.clear();
        // Best first, without the last quarter. Of the predicted experts that had to be read, one third of the last
        // quarter was used, but two thirds of the others.
        let head = &ids[..k - k / 4];
        self.predictions.extend(head.iter().map(|id| ExpertIndex(*id)));
        residency.prefetch_experts(LayerIndex(layer as u32), &self.predictions)?;
        Ok(())
    }

    /// Computes each expert requested by [`MoeScratch::begin`] as soon as it is in memory.
    pub fn compute(
        &mut self,
        step: &MoeStep<'_>,
        cpu: &Cpu,
        residency: &mut Residency,
        input: &Activations,
    ) -> Result<(), ModelError> {
        if step.experts.scaled_input {
            // The weights are in the inputs already.
            self.weights[..step.count].fill(1.0);
        }
        let mut ready = std::mem::take(&mut self.ready);
        let computed = self.compute_passes(step, cpu, residency, input, &mut ready);
        ready.clear();
        self.ready = ready;
        computed?;
        residency.end_experts();
        Ok(())
    }

    /// Computes the experts in passes, as they become ready. Leaves the leases of the last pass in `ready` if it fails.
    fn compute_passes(
        &mut self,
        step: &MoeStep<'_>,
        cpu: &Cpu,
        residency: &mut Residency,
        input: &Activations,
        ready: &mut Vec<(ExpertIndex, Lease)>,
    ) -> Result<(), ModelError> {
        let mut next_row = 0;
        while residency.next_experts(ready)? {
            let mut from = 0;
            while from < ready.len() {
                let (to, pairs) = self.group(ready, from);
                let group = Group { leases: &ready[from..to], pairs, first_row: next_row };
                self.compute_group(step, cpu, residency, input, &group)?;
                next_row += pairs;
                from = to;
            }
            ready.clear();
        }
        Ok(())
    }

    /// Returns the end of the longest run of ready experts whose pairs fit one group (at least one expert), and its
    /// number of pairs.
    fn group(&self, ready: &[(ExpertIndex, Lease)], from: usize) -> (usize, usize) {
        let mut pairs = 0;
        for (index, (expert, _)) in ready.iter().enumerate().skip(from) {
            let count = self.pairs_of(*expert).len();
            if index > from && pairs + count > self.group_pairs {
                return (index, pairs);
            }
            pairs += count;
        }
        (ready.len(), pairs)
    }

    fn pairs_of(&self, expert: ExpertIndex) -> std::ops::Range<usize> {
        let expert = expert.0 as usize;
        self.starts[expert]..self.starts[expert + 1]
    }

    /// Computes gate and up of all the group's experts in one parallel region, then down in another. While the other
    /// threads start, the calling thread advances the reads in flight.
    fn compute_group(
        &mut self,
        step: &MoeStep<'_>,
        cpu: &Cpu,
        residency: &mut Residency,
        input: &Activations,
        group: &Group<'_>,
    ) -> Result<(), ModelError> {
        let width = step.experts.width;
        let mut gate_left = &mut self.gate[..group.pairs * width];
        let mut up_left = &mut self.up[..group.pairs * width];
        let mut jobs = recycle(std::mem::take(&mut self.jobs));
        let mut row = group.first_row;
        for (expert, lease) in group.leases {
            let expert = expert.0 as usize;
            let range = self.starts[expert]..self.starts[expert + 1];
            for pair in &self.pairs[range.clone()] {
                self.row_of_pair[*pair as usize] = row as u32;
                row += 1;
            }
            let tokens = &self.pair_tokens[range.clone()];
            let (decode, prompt) = tokens.split_at(decode_pairs(tokens, step.decode));
            let rows = RowsByKind { decode, prompt };
            let (out, rest) = gate_left.split_at_mut(range.len() * width);
            gate_left = rest;
            jobs.extend(both_kinds(matrix(residency, lease, &step.gate), input, rows, out));
            if !step.gating.has_gate() {
                continue;
            }
            let (out, rest) = up_left.split_at_mut(range.len() * width);
            up_left = rest;
            jobs.extend(both_kinds(matrix(residency, lease, &step.up), input, rows, out));
        }
        matmul_beside_reads(cpu, residency, &mut jobs)?;
        let jobs = recycle::<MatmulJob, MatmulJob>(jobs);

        self.add_biases(step, cpu, group, [0, 1]);
        let inner = &mut self.gate[..group.pairs * width];
        match step.gating.has_gate() {
            true => cpu.gate_in_place(step.gating, inner, &self.up[..group.pairs * width]),
            false => cpu.activate_in_place(step.gating, inner),
        }
        self.inner.prepare(cpu, inner, group.pairs, width, &[step.down.ty]);
        let first = group.first_row * step.outer;
        let mut left = &mut self.outputs[first..first + group.pairs * step.outer];
        let mut jobs = recycle(jobs);
        let mut inner_row = 0;
        for (expert, lease) in group.leases {
            let expert = expert.0 as usize;
            let range = self.starts[expert]..self.starts[expert + 1];
            let count = range.len();
            let (out, rest) = left.split_at_mut(count * step.outer);
            left = rest;
            let rows = &self.rows[inner_row..inner_row + count];
            let of_decode = decode_pairs(&self.pair_tokens[range], step.decode);
            let (decode, prompt) = rows.split_at(of_decode);
            let rows = RowsByKind { decode, prompt };
            let w = matrix(residency, lease, &step.down);
            jobs.extend(both_kinds(w, &self.inner, rows, out));
            inner_row += count;
        }
        matmul_beside_reads(cpu, residency, &mut jobs)?;
        self.jobs = recycle(jobs);
        self.add_biases(step, cpu, group, [2]);
        if let Some([factors, norm]) = step.output_norm {
            let outputs = &mut self.outputs[first..first + group.pairs * step.outer];
            cpu.multiply_columns(outputs, factors);
            cpu.rms_norm_in_place(outputs, norm, step.output_epsilon);
        }
        Ok(())
    }

    /// Adds the experts' biases of gate (0), up (1) or down (2) to the group's outputs.
    fn add_biases<const N: usize>(
        &mut self,
        step: &MoeStep<'_>,
        cpu: &Cpu,
        group: &Group<'_>,
        parts: [usize; N],
    ) {
        let Some(biases) = step.biases else { return };
        for part in parts {
            let (rows, first, width) = match part {
                0 => (&mut self.gate, 0, step.experts.width),
                1 => (&mut self.up, 0, step.experts.width),
                _ => (&mut self.outputs, group.first_row, step.outer),
            };
            let mut left = &mut rows[first * width..(first + group.pairs) * width];
            for (expert, _) in group.leases {
                let expert = expert.0 as usize;
                let count = self.starts[expert + 1] - self.starts[expert];
                let (own, rest) = left.split_at_mut(count * width);
                left = rest;
                cpu.add_bias_rows(own, &biases[part][expert * width..][..width]);
            }
        }
    }

    /// Adds up every token's weighted expert outputs in slot order, into `out` `[tokens, outer width]`.
    pub fn combine(&self, step: &MoeStep<'_>, cpu: &Cpu, out: &mut [f32]) {
        let pairs = step.count * step.experts.used;
        out.fill(0.0);
        let rows = &self.row_of_pair[..pairs];
        let weights = &self.weights[..pairs];
        cpu.combine_experts(out, step.outer, step.experts.used, weights, &self.outputs, rows);
    }
}

/// Returns how many of an expert's rows, which are ascending, are among the first `decode` rows.
fn decode_pairs(rows: &[u32], decode: usize) -> usize {
    rows.partition_point(|row| (*row as usize) < decode)
}

/// Experts that are computed together.
struct Group<'a> {
    leases: &'a [(ExpertIndex, Lease)],
    pairs: usize,
    /// Row of `outputs` for the group's first pair.
    first_row: usize,
}

/// Largest sizes over all layers.
struct Sizes {
    experts: usize,
    width: usize,
    /// Number of elements of an expert's input and output.
    outer: usize,
    pairs: usize,
    group_pairs: usize,
}

impl Sizes {
    fn of(architecture: &Architecture, batch: usize) -> Sizes {
        let layers = || architecture.expert_layers();
        let experts = layers().map(|experts| experts.count).max().unwrap_or(0);
        let width = layers().map(|experts| experts.width).max().unwrap_or(0);
        let outer = layers().map(|experts| experts.outer_width(architecture.hidden)).max();
        let outer = outer.unwrap_or(0);
        let pairs = batch * architecture.experts_per_token();
        let fitting = GROUP_BYTES / (8 * width.max(1));
        // One expert may be chosen by every token of the batch.
        let group_pairs = fitting.max(batch).min(pairs);
        Sizes { experts, width, outer, pairs, group_pairs }
    }
}
