//! Short convolutions of keys, values and the outputs of blocks.

use forebay_compute::{Cpu, ShortConvolution, StateRun};

use crate::arch::{Architecture, Convolved};
use crate::backend::Step;

/// Buffers of the convolutions. They are empty for models without them.
pub struct ConvolutionScratch {
    /// A copy of the rows `[tokens, channels]`.
    inputs: Vec<f32>,
    /// Always empty between calls; kept for its memory.
    runs: Vec<StateRun>,
}

impl ConvolutionScratch {
    pub fn reserve(architecture: &Architecture, batch: usize) -> ConvolutionScratch {
        let inputs = vec![0.0; batch * architecture.convolved_width()];
        ConvolutionScratch { inputs, runs: Vec::new() }
    }

    /// Adds a convolution of the layer to its rows `x`, if the layer has convolutions. `states` are those of the layer
    /// (`CpuBackend::convolution_states`).
    pub fn add(
        &mut self,
        cpu: &Cpu,
        step: &Step<'_>,
        states: &mut [f32],
        which: Convolved,
        x: &mut [f32],
    ) {
        let Some(all) = &step.layer_weights().convolutions else { return };
        let widths = step.architecture.convolved(step.layer);
        let number = which as usize;
        let of = ShortConvolution { weights: &all[number], channels: widths[number] };
        let floats = |number: usize| {
            ShortConvolution { weights: &all[number], channels: widths[number] }.state_floats()
        };
        let (before, whole) =
            ((0..number).map(floats).sum::<usize>(), (0..4).map(floats).sum::<usize>());
        let place = |place: usize| place * whole + before;
        let mut runs = std::mem::take(&mut self.runs);
        runs.extend(step.runs.iter().zip(step.states).map(|(run, places)| StateRun {
            tokens: run.count,
            from: places.from.map(place),
            to: place(places.to),
        }));
        cpu.add_short_convolution(&of, &runs, states, &mut self.inputs, x);
        runs.clear();
        self.runs = runs;
    }
}
