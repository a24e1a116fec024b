//! The states and buffers of a layer's short convolutions.

use std::ops::Range;

use super::backend::CpuBackend;
use crate::arch::Convolved;
use crate::backend::Step;

impl CpuBackend {
    /// Returns where the states of the layer's convolutions are; nowhere if it has none.
    pub(super) fn convolution_states(&self, step: &Step<'_>) -> Range<usize> {
        match step.architecture.convolutions {
            Some(_) => self.states_of(step.architecture.convolution_part(step.layer)),
            None => 0..0,
        }
    }

    /// Multiplies the output of the layer's feed-forward by its factor, and adds its convolution.
    pub(super) fn finish_feed_forward(&mut self, step: &Step<'_>) {
        let states_of = self.convolution_states(step);
        let CpuBackend { cpu, states, scratch, .. } = self;
        let out = &mut scratch.block_out[..step.count * step.architecture.hidden];
        let scale = step.layer_weights().feed_forward_scale;
        if scale != 1.0 {
            cpu.scale_in_place(out, scale);
        }
        let states = &mut states[states_of];
        scratch.convolutions.add(cpu, step, states, Convolved::FeedForward, out);
    }
}
