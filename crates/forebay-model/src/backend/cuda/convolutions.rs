//! Short convolutions beside attention, and the end of feed-forwards.

use forebay_cuda::{Added, DeltaStates, DevicePtr, ExpertOutputs, Norm, Normed, RowConvolution};

use super::backend::CudaBackend;
use crate::ModelError;
use crate::arch::{Convolved, STATES_PER_SEQUENCE};
use crate::backend::Step;

impl CudaBackend {
    /// Queues the addition of one of the layer's convolutions to its rows `x`, if the layer has convolutions.
    pub(super) fn convolve(
        &self,
        step: &Step<'_>,
        which: Convolved,
        x: DevicePtr<f32>,
    ) -> Result<(), ModelError> {
        let architecture = step.architecture;
        let (Some(weights), Some(taps)) =
            (self.layer_vectors(step).convolutions, architecture.convolutions)
        else {
            return Ok(());
        };
        let (widths, number) = (architecture.convolved(step.layer), which as usize);
        let before: usize = widths[..number].iter().sum();
        let states = self.plan.kv.states(architecture.convolution_part(step.layer));
        let of = RowConvolution {
            x,
            inputs: self.float(self.at().convolved),
            weights: self.vectors().offset(weights[number]),
            channels: widths[number],
            taps,
            states: DeltaStates {
                floats: self.arena.kv(states).cast(),
                count: STATES_PER_SEQUENCE * self.plan.kv.sequences(),
            },
            state_floats: (taps - 1) * widths.iter().sum::<usize>(),
            first_float: (taps - 1) * before,
        };
        self.products().changed(x);
        Ok(self.gpu.add_convolution(&of, &self.state_runs(step))?)
    }

    /// Multiplies the output of the layer's feed-forward by its factor, and adds its convolution, if the model has such. The output is
    /// what the lane has, or the usual one.
    pub(super) fn finish_feed_forward(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let factor = step.layer_weights().feed_forward_scale;
        if factor == 1.0 && step.architecture.convolutions.is_none() {
            return Ok(());
        }
        let usual = self.float(self.at().block_out);
        let rows = match self.lanes.current_mut().outputs.take() {
            None | Some(Added::Nothing) => usual,
            Some(Added::Rows(rows)) => rows,
            Some(Added::Experts(outputs)) => self.add_up(step, outputs, usual)?,
        };
        let count = step.count * step.architecture.hidden;
        self.products().changed(rows);
        if factor != 1.0 {
            self.gpu.scale(rows, count, factor)?;
        }
        self.convolve(step, Convolved::FeedForward, rows)?;
        self.lanes.current_mut().outputs = Some(Added::Rows(rows));
        Ok(())
    }

    /// Adds up the outputs of experts in `out`. Returns its address.
    fn add_up(
        &self,
        step: &Step<'_>,
        outputs: ExpertOutputs,
        out: DevicePtr<f32>,
    ) -> Result<DevicePtr<f32>, ModelError> {
        let width = step.architecture.hidden;
        self.gpu.fill(out.cast(), 0, 4 * step.count * width)?;
        let plain = Norm { weight: DevicePtr::null(), width, epsilon: 0.0 };
        let nowhere = Normed::plain(DevicePtr::null());
        self.gpu.rms_norm(out, Added::Experts(outputs), &plain, nowhere, step.count, None)?;
        Ok(out)
    }
}
