//! Feed-forwards that the CPU computes where they are, in host memory, for few tokens at a time.
//!
//! Input and output lie in pinned memory: the norm before writes the one and the norm behind reads the other, over the bus.
//! Copies of some KiB would cost little by themselves, but the engine that copies to the device works off one copy after the
//! other, and the ring keeps it busy with matrices of 100 MB and more, which take milliseconds each.

use forebay_compute::{Activations, Cpu, Gating, MatmulJob};
use forebay_cuda::{CudaError, DevicePtr, Gpu, HostWords};
use forebay_stream::{Lease, Residency};

use crate::ModelError;
use crate::backend::cpu::{matmul_beside_reads, matrix};
use crate::weights::PartMatrix;

/// A feed-forward's matrices, each with its part of the unit's block.
#[derive(Clone, Copy)]
pub struct SubLayerMatrices {
    pub gate: PartMatrix,
    pub up: PartMatrix,
    pub down: PartMatrix,
    pub gating: Gating,
}

/// The CPU beside a GPU, with memory for what goes between them.
pub struct CpuSubLayers {
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

impl CpuSubLayers {
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

    /// Where kernels write normed inputs `[tokens, hidden]`.
    pub fn inputs(&self) -> DevicePtr<f32> {
        self.words.device(0).cast()
    }

    /// Where kernels find outputs `[tokens, hidden]`.
    pub fn outputs(&self) -> DevicePtr<f32> {
        self.words.device(self.outputs_at).cast()
    }

    /// Computes a leased unit for the inputs, which must have come. Nothing that is queued may still read the outputs before.
    /// Reads go on meanwhile.
    ///
    /// # Errors
    /// A failed read beside the products.
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
        let job = |part, x, out| MatmulJob { w: matrix(host, lease, part), x, tokens: None, out };
        let mut jobs = [job(&of.gate, &*input, &mut *gate), job(&of.up, &*input, &mut *up)];
        matmul_beside_reads(cpu, host, &mut jobs)?;
        cpu.gate_in_place(of.gating, gate, up);
        inner.prepare(cpu, gate, tokens, width, &[of.down.ty]);
        // The input was read: its memory is the output's.
        let w = matrix(host, lease, &of.down);
        let mut jobs = [MatmulJob { w, x: inner, tokens: None, out: &mut *x }];
        matmul_beside_reads(cpu, host, &mut jobs)?;
        words.write(*outputs_at, x);
        Ok(())
    }
}
