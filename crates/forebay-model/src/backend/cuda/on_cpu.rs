//! CPU offload of experts: the CPU computes some experts in host memory while the GPU computes others. It is used for
//! batches of few tokens.
//!
//! The normed input is copied to the host. Output rows are copied back to where the GPU's own rows would be. The
//! CPU's share of a batch's missing experts depends only on their number and on rates, never on timing: see
//! `sharing/cpu_offload.rs`.

use std::time::{Duration, Instant};

use forebay_compute::{Activations, Cpu, MatmulJob, Matrix};
use forebay_cuda::{CudaError, DevicePtr, Direction, ExpertMailbox, Gpu, HostWords};
use forebay_ops::{Gating, RowKind};
use forebay_stream::{ExpertIndex, Lease, Residency, Returning};

use crate::ModelError;
use crate::backend::cpu::{matmul_beside_reads, matrix, recycle};
use crate::sharing::{CpuOffloadControl, CpuOffloadMode, CpuOffloadRates, MissSplit};
use crate::weights::{FeedForwardWeights, LayerWeights, PartMatrix, distinct};

/// Number of experts in the larger measurement. The smaller one has a single expert.
const MEASURED_EXPERTS: usize = 8;
/// Number of times that both measurements are repeated.
const MEASURED_ROUNDS: usize = 16;
/// Pause before each measurement.
const MEASURED_PAUSE: Duration = Duration::from_micros(300);
/// Time for which copies to the GPU run beside the measurements.
const MEASURED_TIME: Duration = Duration::from_millis(30);

/// Time for which the CPU's threads spin while they wait for the next layer: longer than most layers take.
const AWAKE: Duration = Duration::from_micros(500);

/// Assumed seconds to copy inputs to the host and output rows back: a few KiB each way, plus words that the other
/// side polls.
const EXCHANGE_SECONDS: f64 = 8e-6;

/// Placeholder for rates that are not measured yet.
const UNMEASURED: CpuOffloadRates = CpuOffloadRates {
    split: MissSplit {
        copy_seconds: 0.0,
        cpu_seconds: 0.0,
        cpu_start_seconds: 0.0,
        both_seconds: 0.0,
    },
    copy_alone_seconds: 0.0,
};

/// A CPU for CPU offload.
pub struct OffloadCpu {
    pub cpu: Cpu,
    pub wanted: CpuOffloadMode,
    /// Rates from a machine profile; `None` if they have to be measured.
    pub rates: Option<CpuOffloadRates>,
}

/// The matrices of a layer's experts.
#[derive(Clone, Copy)]
pub struct ExpertMatrices<'a> {
    pub gate: PartMatrix,
    pub up: PartMatrix,
    pub down: PartMatrix,
    /// Biases of gate, up and down. The GPU adds those of down.
    pub biases: Option<&'a [Vec<f32>; 3]>,
    pub gating: Gating,
}

/// Returns the matrices of a layer's experts, or `None` if the layer is dense.
pub fn expert_matrices(layer: &LayerWeights) -> Option<ExpertMatrices<'_>> {
    match &layer.feed_forward {
        FeedForwardWeights::None | FeedForwardWeights::Dense { .. } => None,
        FeedForwardWeights::Experts { gate, up, down, vectors, .. } => Some(ExpertMatrices {
            gate: *gate,
            up: *up,
            down: *down,
            biases: vectors.biases.as_ref(),
            gating: layer.gatings.experts,
        }),
    }
}

/// Device addresses and shape of a batch's rows.
#[derive(Clone, Copy)]
pub struct BatchRows {
    /// Normed inputs `[tokens, hidden]`.
    pub normed: DevicePtr<f32>,
    /// Output rows `[tokens, used, hidden]`.
    pub outputs: DevicePtr<f32>,
    pub tokens: usize,
    pub used: usize,
    pub hidden: usize,
}

/// The CPU that computes experts, with buffers for its exchange with the GPU.
pub struct CpuExperts {
    cpu: Cpu,
    pub cpu_offload: CpuOffloadControl,
    /// Normed inputs, followed by an output row for each pair of a token and a chosen expert.
    words: HostWords,
    outputs_at: usize,
    x: Vec<f32>,
    input: Activations,
    is_prepared: bool,
    gate: Vec<f32>,
    up: Vec<f32>,
    inner: Activations,
    out: Vec<f32>,
    /// 0, 1, 2 ...: row indices of `inner`.
    rows: Vec<u32>,
    /// Pairs in the order in which they are computed.
    pairs: Vec<u32>,
    /// Token of each pair in `pairs`.
    pair_tokens: Vec<u32>,
    /// Number of pairs of each expert.
    groups: Vec<usize>,
    /// Always empty between calls; kept for its memory.
    jobs: Vec<MatmulJob<'static>>,
}

impl CpuExperts {
    /// Creates buffers for at most `tokens` tokens, each of which chooses `used` experts in each of `layers` layers.
    /// If no rates are given, measures them with matrices of the shapes in `of`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn new(
        gpu: &Gpu,
        OffloadCpu { cpu, wanted, rates }: OffloadCpu,
        host: &Residency,
        of: &ExpertMatrices<'_>,
        (tokens, layers, used): (usize, usize, usize),
    ) -> Result<CpuExperts, CudaError> {
        let (pairs, hidden, width) = (tokens * used, of.gate.cols, of.gate.rows);
        let room = pairs.max(MEASURED_EXPERTS);
        cpu.pool().set_spin(AWAKE);
        let mut experts = CpuExperts {
            cpu,
            cpu_offload: CpuOffloadControl::new(
                &wanted,
                (rates.unwrap_or(UNMEASURED), true),
                layers,
                used,
            ),
            words: gpu.host_words(tokens * hidden + pairs * hidden)?,
            outputs_at: tokens * hidden,
            x: vec![0.5; tokens * hidden],
            input: Activations::new(),
            is_prepared: false,
            gate: vec![0.0; room * width],
            up: vec![0.0; room * width],
            inner: Activations::new(),
            out: vec![0.0; room * hidden],
            rows: (0..room as u32).collect(),
            pairs: Vec::with_capacity(room),
            pair_tokens: Vec::with_capacity(room),
            groups: Vec::with_capacity(room),
            jobs: Vec::with_capacity(2 * room),
        };
        if rates.is_none() {
            let rates = experts.measure(gpu, host, of)?;
            experts.cpu_offload = CpuOffloadControl::new(&wanted, (rates, false), layers, used);
        }
        Ok(experts)
    }

    /// Measures the time of copies to the GPU and of the CPU's products while both run, because they share the memory
    /// bandwidth.
    fn measure(
        &mut self,
        gpu: &Gpu,
        host: &Residency,
        of: &ExpertMatrices<'_>,
    ) -> Result<CpuOffloadRates, CudaError> {
        let bytes = expert_bytes(of);
        let slots: Vec<&[u8]> = host.slot_memory().filter(|slot| slot.len() >= bytes).collect();
        // Uses each slot once, spread over the memory. During decoding, no CPU cache holds the experts either.
        let of_round = 1 + MEASURED_EXPERTS;
        let step = (slots.len() / (MEASURED_ROUNDS * of_round)).max(1);
        let mut spread = slots.iter().copied().step_by(step).cycle();
        let part = (bytes / 3).max(1);
        let (rate, one, many) = std::thread::scope(|scope| {
            let copying = scope
                .spawn(|| gpu.pinned_copy_rate(Direction::ToDevice, part, 8 * part, MEASURED_TIME));
            let (mut one, mut many) = (Vec::new(), Vec::new());
            for _ in 0..MEASURED_ROUNDS {
                // During decoding, the GPU computes between the CPU's layers.
                std::thread::sleep(MEASURED_PAUSE);
                one.push(self.time(of, spread.by_ref().take(1)));
                std::thread::sleep(MEASURED_PAUSE);
                many.push(self.time(of, spread.by_ref().take(MEASURED_EXPERTS)));
            }
            (copying.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), one, many)
        });
        let (one, many) = (median(one), median(many));
        let cpu_seconds = ((many - one) / (MEASURED_EXPERTS - 1) as f64).max(1e-9);
        let copy_seconds = bytes as f64 / rate?;
        let split = MissSplit {
            copy_seconds,
            cpu_seconds,
            cpu_start_seconds: (one - cpu_seconds).max(0.0) + EXCHANGE_SECONDS,
            both_seconds: 0.0,
        };
        Ok(CpuOffloadRates { split, copy_alone_seconds: copy_seconds })
    }

    /// Returns the seconds for the products of one token with experts. Any bytes serve as their weights.
    fn time<'a>(
        &mut self,
        of: &ExpertMatrices<'_>,
        experts: impl Iterator<Item = &'a [u8]>,
    ) -> f64 {
        let started = Instant::now();
        let hidden = of.gate.cols;
        self.input.prepare(&self.cpu, &self.x[..hidden], 1, hidden, &[of.gate.ty, of.up.ty]);
        let parts: Vec<[&[u8]; 3]> = experts
            .map(|memory| {
                let (mut parts, mut rest): ([&[u8]; 3], _) = ([&[]; 3], memory);
                for matrix in distinct(&[of.gate, of.up, of.down]) {
                    (parts[matrix.part], rest) = rest.split_at(matrix_bytes(matrix));
                }
                parts
            })
            .collect();
        self.pairs.clear();
        self.pair_tokens.clear();
        self.pairs.extend(0..parts.len() as u32);
        self.pair_tokens.extend(std::iter::repeat_n(0, parts.len()));
        self.groups.clear();
        self.groups.resize(parts.len(), 1);
        let computed = self.products(&mut Source::Measured(&parts), of);
        debug_assert!(computed.is_ok(), "nothing is read");
        started.elapsed().as_secs_f64()
    }

    /// Copies a batch's normed input to the host. Waits for all queued work.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub fn take_input(&mut self, gpu: &Gpu, rows: &BatchRows) -> Result<(), CudaError> {
        let count = rows.tokens * rows.hidden;
        gpu.queue_download(rows.normed.cast(), &self.words, 0..count)?;
        gpu.synchronize()?;
        self.words.read(0, &mut self.x[..count]);
        self.is_prepared = false;
        Ok(())
    }

    /// Computes leased experts for the tokens that chose them, `chosen [tokens, used]`, and queues the copies of
    /// their output rows to the GPU. Kernels that were queued before run meanwhile.
    ///
    /// # Errors
    /// Returns an error if a read beside the products or the device fails.
    pub fn compute(
        &mut self,
        gpu: &Gpu,
        host: &mut Residency,
        of: &ExpertMatrices<'_>,
        rows: &BatchRows,
        chosen: &[u32],
        leases: &[(ExpertIndex, Lease)],
    ) -> Result<(), ModelError> {
        let hidden = rows.hidden;
        self.rows_of(host, of, (rows.tokens, rows.used), chosen, leases)?;
        for (row, pair) in self.pairs.iter().enumerate() {
            let at = self.outputs_at + *pair as usize * hidden;
            self.words.write(at, &self.out[row * hidden..(row + 1) * hidden]);
            let to = rows.outputs.offset(*pair as usize * hidden);
            gpu.queue_upload(&self.words, at..at + hidden, to.cast())?;
        }
        Ok(())
    }

    /// Computes leased experts like [`CpuExperts::compute`], for a single token that runs as a CUDA graph. The graph
    /// has sent the state with a layer's question, and takes the output rows by itself.
    ///
    /// # Errors
    /// Returns an error if a read fails beside the products.
    pub fn compute_for(
        &mut self,
        mailbox: &mut ExpertMailbox<Returning>,
        host: &mut Residency,
        of: &ExpertMatrices<'_>,
        chosen: &[u32],
        leases: &[(ExpertIndex, Lease)],
    ) -> Result<(), ModelError> {
        let hidden = of.gate.cols;
        mailbox.read_state(&mut self.x[..hidden]);
        self.is_prepared = false;
        self.rows_of(host, of, (1, chosen.len()), chosen, leases)?;
        for (row, pair) in self.pairs.iter().enumerate() {
            mailbox.write_row(*pair as usize, &self.out[row * hidden..(row + 1) * hidden]);
        }
        Ok(())
    }

    /// Computes output rows for the current input, in the order of `pairs`.
    fn rows_of(
        &mut self,
        host: &mut Residency,
        of: &ExpertMatrices<'_>,
        (tokens, used): (usize, usize),
        chosen: &[u32],
        leases: &[(ExpertIndex, Lease)],
    ) -> Result<(), ModelError> {
        let hidden = of.gate.cols;
        if !self.is_prepared {
            let x = &self.x[..tokens * hidden];
            self.input.prepare(&self.cpu, x, tokens, hidden, &[of.gate.ty, of.up.ty]);
            self.is_prepared = true;
        }
        self.pairs.clear();
        self.pair_tokens.clear();
        self.groups.clear();
        for (expert, _) in leases {
            let before = self.pairs.len();
            let pairs = (0..chosen.len()).filter(|&pair| chosen[pair] == expert.0);
            for pair in pairs {
                self.pairs.push(pair as u32);
                self.pair_tokens.push((pair / used) as u32);
            }
            self.groups.push(self.pairs.len() - before);
        }
        self.products(&mut Source::Leased { host, leases }, of)
    }

    /// Computes gate and up of all experts in one parallel region, and down in another.
    fn products(
        &mut self,
        source: &mut Source<'_, '_>,
        of: &ExpertMatrices<'_>,
    ) -> Result<(), ModelError> {
        let (width, hidden, count) = (of.gate.rows, of.down.rows, self.pairs.len());
        let mut gate_left = &mut self.gate[..count * width];
        let mut up_left = &mut self.up[..count * width];
        let mut jobs = recycle(std::mem::take(&mut self.jobs));
        let mut row = 0;
        for (index, &group) in self.groups.iter().enumerate() {
            let tokens = Some(&self.pair_tokens[row..row + group]);
            row += group;
            let both = [(&of.gate, &mut gate_left), (&of.up, &mut up_left)];
            for (part, left) in both.into_iter().take(1 + usize::from(of.gating.has_gate())) {
                let (out, rest) = std::mem::take(left).split_at_mut(group * width);
                *left = rest;
                jobs.push(MatmulJob {
                    w: source.matrix(index, part),
                    x: &self.input,
                    tokens,
                    kind: RowKind::Decode,
                    out,
                });
            }
        }
        source.matmul(&self.cpu, &mut jobs)?;
        let jobs = recycle::<MatmulJob, MatmulJob>(jobs);
        if let (Some([gate, up, _]), Source::Leased { leases, .. }) = (of.biases, &*source) {
            let mut row = 0;
            for ((expert, _), group) in leases.iter().zip(&self.groups) {
                let own = expert.0 as usize * width..(expert.0 as usize + 1) * width;
                let rows = row * width..(row + group) * width;
                row += group;
                self.cpu.add_bias_rows(&mut self.gate[rows.clone()], &gate[own.clone()]);
                self.cpu.add_bias_rows(&mut self.up[rows], &up[own]);
            }
        }
        let inner = &mut self.gate[..count * width];
        match of.gating.has_gate() {
            true => self.cpu.gate_in_place(of.gating, inner, &self.up[..count * width]),
            false => self.cpu.activate_in_place(of.gating, inner),
        }
        self.inner.prepare(&self.cpu, inner, count, width, &[of.down.ty]);
        let mut left = &mut self.out[..count * hidden];
        let mut jobs = recycle(jobs);
        let mut row = 0;
        for (index, &group) in self.groups.iter().enumerate() {
            let (out, rest) = left.split_at_mut(group * hidden);
            left = rest;
            let tokens = Some(&self.rows[row..row + group]);
            row += group;
            let w = source.matrix(index, &of.down);
            jobs.push(MatmulJob { w, x: &self.inner, tokens, kind: RowKind::Decode, out });
        }
        source.matmul(&self.cpu, &mut jobs)?;
        self.jobs = recycle(jobs);
        Ok(())
    }
}

/// Location of the experts' weights.
enum Source<'a, 'host> {
    /// Gate, up and down of each expert, in any memory.
    Measured(&'a [[&'a [u8]; 3]]),
    Leased {
        host: &'host mut Residency,
        leases: &'a [(ExpertIndex, Lease)],
    },
}

impl<'a> Source<'a, '_> {
    fn matrix(&self, index: usize, part: &PartMatrix) -> Matrix<'a> {
        match self {
            Source::Measured(experts) => {
                let data = experts[index][part.part];
                Matrix { ty: part.ty, rows: part.rows, cols: part.cols, data }
            }
            Source::Leased { host, leases } => matrix(host, &leases[index].1, part),
        }
    }

    /// Computes `jobs`. Reads continue meanwhile.
    fn matmul(&mut self, cpu: &Cpu, jobs: &mut [MatmulJob<'_>]) -> Result<(), ModelError> {
        match self {
            Source::Measured(_) => {
                cpu.matmul(jobs);
                Ok(())
            }
            Source::Leased { host, .. } => matmul_beside_reads(cpu, host, jobs),
        }
    }
}

fn matrix_bytes(part: &PartMatrix) -> usize {
    part.ty.row_bytes(part.cols as u64).unwrap_or(0) as usize * part.rows
}

fn expert_bytes(of: &ExpertMatrices<'_>) -> usize {
    distinct(&[of.gate, of.up, of.down]).map(matrix_bytes).sum()
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(0.0)
}
