//! Feed-forwards that the CPU computes in host memory, for few tokens at a time.
//!
//! Input and output are in pinned memory. The norm before writes the input over the bus, and the norm after reads the
//! output. Copies of a few KiB would cost little by themselves. But the copy engine to the device processes one copy
//! after the other, and the ring keeps it busy with matrices of 100 MB and more. These take milliseconds each.

use forebay_compute::{Activations, Cpu, MatmulJob};
use forebay_cuda::{CudaError, DevicePtr, Gpu, HostWords};
use forebay_ops::{Gating, RowKind};
use forebay_stream::{Lease, Residency};

use crate::ModelError;
use crate::backend::cpu::{matmul_beside_reads, matrix};
use crate::weights::PartMatrix;

/// A feed-forward's matrices, each with its part of the sub-layer's block.
#[derive(Clone, Copy)]
pub struct SubLayerMatrices {
    pub gate: PartMatrix,
    pub up: PartMatrix,
    pub down: PartMatrix,
    pub gating: Gating,
}

/// The CPU that computes sub-layers, with buffers for its exchange with the GPU.
pub struct CpuSubLayers {
    cpu: Cpu,
    /// Normed inputs `[tokens, hidden]`, followed by outputs of the same shape.
    words: HostWords,
    outputs_at: usize,
    x: Vec<f32>,
    input: Activations,
    gate: Vec<f32>,
    up: Vec<f32>,
    inner: Activations,
}

impl CpuSubLayers {
    /// Creates buffers for up to `tokens` tokens of `hidden` values and feed-forwards `width` wide.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn new(
        gpu: &Gpu,
        cpu: Cpu,
        tokens: usize,
        hidden: usize,
        width: usize,
    ) -> Result<CpuSubLayers, CudaError> {
        Ok(CpuSubLayers {
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

    /// Returns the address where kernels write normed inputs `[tokens, hidden]`.
    pub fn inputs(&self) -> DevicePtr<f32> {
        self.words.device(0).cast()
    }

    /// Returns the address where kernels read outputs `[tokens, hidden]`.
    pub fn outputs(&self) -> DevicePtr<f32> {
        self.words.device(self.outputs_at).cast()
    }

    /// Computes a leased sub-layer for the inputs, which must have arrived. No queued kernel may still read the
    /// previous outputs. Reads continue meanwhile.
    ///
    /// # Errors
    /// Returns an error if a read fails beside the products.
    pub fn compute(
        &mut self,
        host: &mut Residency,
        lease: &Lease,
        of: &SubLayerMatrices,
        tokens: usize,
    ) -> Result<(), ModelError> {
        let CpuSubLayers { cpu, words, outputs_at, x, input, gate, up, inner } = self;
        let (hidden, width) = (of.gate.cols, of.gate.rows);
        let x = &mut x[..tokens * hidden];
        words.read(0, x);
        input.prepare(cpu, x, tokens, hidden, &[of.gate.ty, of.up.ty]);
        let (gate, up) = (&mut gate[..tokens * width], &mut up[..tokens * width]);
        let kind = RowKind::Decode;
        let job =
            |part, x, out| MatmulJob { w: matrix(host, lease, part), x, tokens: None, kind, out };
        let mut jobs = [job(&of.gate, &*input, &mut *gate), job(&of.up, &*input, &mut *up)];
        let matrices = 1 + usize::from(of.gating.has_gate());
        matmul_beside_reads(cpu, host, &mut jobs[..matrices])?;
        match of.gating.has_gate() {
            true => cpu.gate_in_place(of.gating, gate, up),
            false => cpu.activate_in_place(of.gating, gate),
        }
        inner.prepare(cpu, gate, tokens, width, &[of.down.ty]);
        // The input is no longer needed, so its memory takes the output.
        let w = matrix(host, lease, &of.down);
        let mut jobs = [MatmulJob { w, x: inner, tokens: None, kind, out: &mut *x }];
        matmul_beside_reads(cpu, host, &mut jobs)?;
        words.write(*outputs_at, x);
        Ok(())
    }
}
