//! Feed-forwards that the CPU computes where they are, in host memory, for few tokens at a time: the normed input comes to
//! the host, the output goes back to where the GPU's own would be.

use forebay_compute::{Activations, Cpu, MatmulJob};
use forebay_cuda::{CudaError, DevicePtr, Gpu, HostWords};
use forebay_stream::{Lease, Residency};

use super::super::cpu::{matmul_beside_reads, matrix};
use crate::ModelError;
use crate::weights::PartMatrix;

/// A feed-forward's matrices, each with its part of the unit's block.
#[derive(Clone, Copy)]
pub struct UnitMatrices {
    pub gate: PartMatrix,
    pub up: PartMatrix,
    pub down: PartMatrix,
}

/// The CPU beside a GPU, with memory for what goes between them.
pub struct CpuUnits {
    cpu: Cpu,
    /// Normed inputs `[tokens, hidden]`, then outputs likewise.
    words: HostWords,
    outputs_at: usize,
    x: Vec<f32>,
    input: Activations,
    gate: Vec<f32>,
    up: Vec<f32>,
    inner: Activations,
}

impl CpuUnits {
    /// For up to `tokens` tokens and feed-forwards `width` wide.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn new(
        gpu: &Gpu,
        cpu: Cpu,
        tokens: usize,
        hidden: usize,
        width: usize,
    ) -> Result<CpuUnits, CudaError> {
        Ok(CpuUnits {
            cpu,
            words: gpu.host_words(2 * tokens * hidden)?,
            outputs_at: tokens * hidden,
            x: vec![0.0; tokens * hidden],
            input: Activations::new(),
            gate: vec![0.0; tokens * width],
            up: vec![0.0; tokens * width],
            inner: Activations::new(),
        })
    }

    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// Queues the way of normed inputs `[tokens, hidden]` to the host.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn queue_input(
        &self,
        gpu: &Gpu,
        normed: DevicePtr<f32>,
        values: usize,
    ) -> Result<(), CudaError> {
        gpu.queue_download(normed.cast(), &self.words, 0..values)
    }

    /// Computes a leased unit for the inputs, which must have come, and queues the way of its output `[tokens, hidden]` to the
    /// GPU. Reads go on meanwhile.
    ///
    /// # Errors
    /// A failed read beside the products, or a failed device.
    pub fn compute(
        &mut self,
        gpu: &Gpu,
        host: &mut Residency,
        lease: &Lease,
        of: &UnitMatrices,
        tokens: usize,
        out: DevicePtr<f32>,
    ) -> Result<(), ModelError> {
        let CpuUnits { cpu, words, outputs_at, x, input, gate, up, inner } = self;
        let (hidden, width) = (of.gate.cols, of.gate.rows);
        let x = &mut x[..tokens * hidden];
        words.read(0, x);
        input.prepare(cpu, x, tokens, hidden, &[of.gate.ty, of.up.ty]);
        let (gate, up) = (&mut gate[..tokens * width], &mut up[..tokens * width]);
        let job = |part, x, out| MatmulJob { w: matrix(host, lease, part), x, tokens: None, out };
        let mut jobs = [job(&of.gate, &*input, &mut *gate), job(&of.up, &*input, &mut *up)];
        matmul_beside_reads(cpu, host, &mut jobs)?;
        cpu.silu_mul_in_place(gate, up);
        inner.prepare(cpu, gate, tokens, width, &[of.down.ty]);
        // The input was read: its place is the output's.
        let w = matrix(host, lease, &of.down);
        let mut jobs = [MatmulJob { w, x: inner, tokens: None, out: &mut *x }];
        matmul_beside_reads(cpu, host, &mut jobs)?;
        words.write(*outputs_at, x);
        gpu.queue_upload(words, *outputs_at..*outputs_at + x.len(), out.cast())?;
        Ok(())
    }
}
