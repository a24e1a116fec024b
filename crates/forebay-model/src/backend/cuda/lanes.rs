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

use forebay_cuda::{
    Added, AttentionInputs, CudaError, Gpu, LANES, NarrowActivations, RoundedActivations,
    decode_modules,
};
use forebay_format::TensorType;

use super::layout::ActivationLayout;
use super::memory::{DeviceArena, DevicePlan};
use super::products::Products;
use crate::arch::Architecture;
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
    /// True if work is queued in both lanes.
    are_forked: bool,
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
            are_forked: false,
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
        self.lanes.each_ref().map(|lane| lane.first_row)
    }

    /// Begins a pass with one lane. A failed pass may have left values for steps that it did not reach.
    pub fn begin(&mut self, gpu: &Gpu) {
        self.enter(gpu, 0);
        self.are_forked = false;
        for lane in &mut self.lanes {
            (lane.inputs, lane.outputs, lane.first_row) = (None, None, 0);
            lane.products.begin();
        }
    }

    /// Loads the kernels of lanes, which have fewer rows than passes. Not allowed during a capture.
    ///
    /// # Errors
    /// Returns an error if the driver refuses a module.
    pub fn load(gpu: &Gpu, weights: &Weights) -> Result<(), CudaError> {
        let types = weights.matrix_types().into_iter();
        let modules: Vec<_> = types.flat_map(decode_modules).collect();
        gpu.load_modules(&modules)
    }

    /// Gives the rows of the pass from number `first` on to the second lane.
    pub fn split(&mut self, first: usize, architecture: &Architecture) {
        let [of, second] = &mut self.lanes;
        second.first_row = first;
        second.at.ngrams = of.at.ngrams.behind(architecture, first);
        let behind = |at: u64, width: usize| at + 4 * (first * width) as u64;
        second.at.x = behind(of.at.x, of.at.stream_width);
        second.at.normed = behind(of.at.normed, architecture.hidden);
    }

    /// Begins to queue work in both lanes. The second lane's work waits for all that is queued.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn fork(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        self.are_forked = true;
        gpu.fork_lanes()
    }

    /// Returns the number of rows in the first lane, if work is queued in both.
    pub fn forked(&self) -> Option<usize> {
        self.are_forked.then_some(self.lanes[1].first_row)
    }

    /// Queues work in lane number `lane` from now on.
    pub fn enter(&mut self, gpu: &Gpu, lane: usize) {
        self.current = lane;
        gpu.enter_lane(lane);
    }

    /// Queues work in the first lane only. It waits for the second lane's.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn join(&mut self, gpu: &Gpu) -> Result<(), CudaError> {
        self.are_forked = false;
        gpu.join_lanes()
    }
}
