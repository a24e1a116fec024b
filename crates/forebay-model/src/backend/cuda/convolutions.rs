//! Short convolutions beside attention, and the end of feed-forwards.

use forebay_cuda::{Added, DevicePtr, RowConvolution};

use super::backend::CudaBackend;
use crate::ModelError;
use crate::arch::Convolved;
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
        let of = RowConvolution {
            x,
            inputs: self.float(self.at().convolved),
            weights: self.vectors().offset(weights[number]),
            channels: widths[number],
            taps,
            states: self.device_states(architecture.convolution_part(step.layer)),
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
        let usual = Added::Rows(self.float(self.at().block_out));
        let added = self.lanes.current_mut().outputs.take().unwrap_or(usual);
        let Some(rows) = self.added_rows(step, added)? else { return Ok(()) };
        let count = step.count * step.architecture.hidden;
        self.products().changed(rows);
        if factor != 1.0 {
            self.gpu.scale(rows, count, factor)?;
        }
        self.convolve(step, Convolved::FeedForward, rows)?;
        self.lanes.current_mut().outputs = Some(Added::Rows(rows));
        Ok(())
    }

    /// Returns the address of what a block adds, as rows: outputs of experts are added up in the usual place. Returns nothing if it
    /// adds nothing.
    pub(super) fn added_rows(
        &self,
        step: &Step<'_>,
        added: Added,
    ) -> Result<Option<DevicePtr<f32>>, ModelError> {
        let outputs = match added {
            Added::Nothing => return Ok(None),
            Added::Rows(rows) => return Ok(Some(rows)),
            Added::Experts(outputs) => outputs,
        };
        let (out, width) = (self.float(self.at().block_out), step.architecture.hidden);
        self.gpu.fill(out.cast(), 0, 4 * step.count * width)?;
        self.gpu.add_rows(out, Added::Experts(outputs), width, step.count, None)?;
        self.products().changed(out);
        Ok(Some(out))
    }
}
