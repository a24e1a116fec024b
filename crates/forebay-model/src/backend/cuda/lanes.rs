//! Passes whose rows go through the layers in two lanes.
//!
//! A lane has some of the decode rows, a stream, and buffers of its own. The lanes share weights, KV cache and what is
//! exchanged with the host. Experts that are missing in VRAM are fetched on one more stream, for the first lane, then for the
//! second, layer by layer. So the bus has work while a lane computes. Bits do not change, because the bits of a row never
//! depend on the rows beside it.
//!
//! ```text
//! first lane    | layer 0 .... |            products | layer 1 .... |
//! second lane       | layer 0 .... |                            products | layer 1
//! side stream                  | fetch, first  | fetch, second  | fetch, first
//! ```

use std::ops::Range;

use forebay_cuda::{
    Added, AttentionInputs, CudaError, Gpu, LANES, NarrowActivations, RoundedActivations,
    decode_modules,
};
use forebay_format::TensorType;

use super::backend::CudaBackend;
use super::layout::ActivationLayout;
use super::memory::{DeviceArena, DevicePlan};
use super::products::Products;
use crate::ModelError;
use crate::arch::Architecture;
use crate::backend::Step;
use crate::weights::Weights;

/// State of a lane.
pub struct Lane {
    pub at: ActivationLayout,
    pub products: Products,
    /// Current projections, if attention finishes them.
    pub inputs: Option<AttentionInputs>,
    /// Output that the next norm adds, if it is not in its usual place.
    pub outputs: Option<Added>,
    /// Index of the lane's first row among the rows of the pass.
    pub first_row: usize,
}

/// The lanes, and that in which work is queued. Passes with one lane use the first.
pub struct PassLanes {
    lanes: [Lane; LANES],
    current: usize,
    /// Number of rows in the first lane, if the pass that is being queued has two.
    first_lane: Option<usize>,
    /// Types of all matrices.
    types: Vec<TensorType>,
    are_loaded: bool,
}

impl PassLanes {
    pub fn new(
        plan: &DevicePlan,
        arena: &DeviceArena,
        (architecture, weights): (&Architecture, &Weights),
        exact: bool,
    ) -> PassLanes {
        let types: Vec<TensorType> = weights.matrix_types().into_iter().collect();
        let lane = |at: ActivationLayout| {
            let rounded = RoundedActivations {
                codes: arena.activation(at.codes),
                scales: arena.activation(at.code_scales),
            };
            let narrow = NarrowActivations {
                high: arena.activation(at.high),
                low: arena.activation(at.low),
                scales: arena.activation(at.narrow_scales),
            };
            let products = Products::new(exact, &types, rounded, narrow);
            Lane { at, products, inputs: None, outputs: None, first_row: 0 }
        };
        let first = &plan.activations;
        PassLanes {
            lanes: [lane(first.clone()), lane(first.second_lane(architecture))],
            current: 0,
            first_lane: None,
            are_loaded: false,
            types,
        }
    }

    /// Returns the current lane.
    pub fn current(&self) -> &Lane {
        &self.lanes[self.current]
    }

    pub fn current_mut(&mut self) -> &mut Lane {
        &mut self.lanes[self.current]
    }

    /// Returns the number of the current lane.
    pub fn number(&self) -> usize {
        self.current
    }

    /// Returns the index of each lane's first row.
    pub fn first_rows(&self) -> [usize; LANES] {
        [0, 1].map(|lane: usize| self.lanes[lane].first_row)
    }

    /// Begins a pass with one lane. A failed pass may have left values for steps that it did not reach.
    pub fn begin(&mut self, gpu: &Gpu) {
        (self.current, self.first_lane) = (0, None);
        gpu.enter_lane(0);
        for lane in &mut self.lanes {
            (lane.inputs, lane.outputs, lane.first_row) = (None, None, 0);
            lane.products.begin();
        }
    }

    /// Loads the kernels of lanes, which have fewer rows than passes. Not allowed during a capture.
    ///
    /// # Errors
    /// Returns an error if the driver refuses a module.
    pub fn load(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        if !std::mem::replace(&mut self.are_loaded, true) {
            let modules: Vec<_> = self.types.iter().flat_map(|&ty| decode_modules(ty)).collect();
            gpu.load_modules(&modules)?;
        }
        Ok(())
    }

    /// Gives the rows of the pass from number `first` on to the second lane. `width` is that of the residual stream.
    pub fn split(&mut self, first: usize, width: usize) {
        let [of, second] = &mut self.lanes;
        second.first_row = first;
        let behind = |at: u64| at + 4 * (first * width) as u64;
        (second.at.x, second.at.normed) = (behind(of.at.x), behind(of.at.normed));
    }

    /// Begins to queue work in both lanes. The second lane's work waits for all that is queued.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn fork(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        self.first_lane = Some(self.lanes[1].first_row);
        gpu.fork_lanes()
    }

    /// Returns true if work is queued in both lanes.
    pub fn are_forked(&self) -> bool {
        self.first_lane.is_some()
    }

    /// Queues work in the first lane only. It waits for the second lane's.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn join(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        self.first_lane = None;
        gpu.join_lanes()
    }
}

impl CudaBackend {
    /// Queues work of the pass with `queue`, for each lane with a step that has only its rows.
    ///
    /// # Errors
    /// Returns an error of `queue`.
    pub(super) fn in_lanes(
        &mut self,
        step: &Step<'_>,
        queue: impl Fn(&mut CudaBackend, &Step<'_>) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let Some(first) = self.lanes.first_lane else { return queue(self, step) };
        for (lane, rows) in [0..first, first..step.count].into_iter().enumerate() {
            self.enter_lane(lane);
            let queued = queue(self, &of_rows(step, rows));
            self.enter_lane(0);
            queued?;
        }
        Ok(())
    }

    fn enter_lane(&mut self, lane: usize) {
        self.lanes.current = lane;
        self.gpu.enter_lane(lane);
    }
}

/// Returns the step for some of the rows of a pass whose runs have one row each.
fn of_rows<'a>(step: &Step<'a>, rows: Range<usize>) -> Step<'a> {
    let count = rows.len();
    Step { runs: &step.runs[rows], count, decode: count, outputs: &[], chosen: None, ..*step }
}
