//! State for serving decode rows that run as CUDA graphs, besides the experts themselves.

use std::hint::spin_loop;
use std::ops::Range;
use std::thread::yield_now;
use std::time::Duration;

use forebay_cuda::{
    CudaError, DevicePtr, ExpertAnswer, ExpertMailbox, ExpertQuestion, ExpertReturn, FetchedLayer,
    Gpu, HostWords, LANES, Pinned, SideStream,
};
use forebay_stream::{ExpertIndex, LayerIndex, Lease, Returning};

use super::super::memory::{Device, DeviceArena};
use super::held::Held;

/// Number of polls for a question before the thread lets other threads run between polls. Once in as many polls, it
/// also asks the driver whether anything is still running.
const LOOKS: u32 = 1 << 14;

/// State for serving decode rows that run as CUDA graphs.
pub(super) struct Service {
    pub(super) mailbox: ExpertMailbox<Returning>,
    /// Words for the device: the run's number, whether ids are forced, and the forced ids `[layers, pairs]`.
    pub(super) words: HostWords,
    /// Layers with experts.
    pub(super) layers: Vec<LayerIndex>,
    /// Number of the run, which is that of the current pass.
    pub(super) run: u32,
    /// Number of experts that a row chooses.
    pub used: usize,
    /// Number of rows of the run, and its maximum.
    pub(super) rows: usize,
    pub(super) rows_max: usize,
    /// Number of rows of the run that are in the first lane. All are if the run has one lane.
    pub(super) first_lane: usize,
    /// Number of places before which all have an answer in this run. Every layer has a place for each lane; see
    /// [`Service::places`].
    pub(super) answered: usize,
    /// What the last answer but one and the last answer hold, in a run with two lanes.
    pub(super) held: [Held; 2],
    /// True if the tables on the GPU agree with the tier.
    pub(super) tables_are_right: bool,
    /// Experts in host memory that kernels may still be copying.
    pub leases: Vec<(ExpertIndex, Lease)>,
    /// Chosen ids of the run, by layer `[layers, pairs]`.
    pub(super) chosen: Vec<u32>,
    pub(super) slots: Vec<DevicePtr<u8>>,
    pub(super) gone: Vec<u32>,
    pub returns: Vec<ExpertReturn<Returning>>,
    /// Pools and slots of `returns`.
    pub returned_slots: Vec<(usize, u32)>,
    pub(super) times: ServiceTimes,
    /// True if the last run's times have not been read yet.
    pub(super) times_are_due: bool,
    /// Where experts are fetched beside the products of those that are in VRAM.
    pub(super) side: SideStream,
    /// How long a kernel waits for the host; `None` if it waits without a limit.
    pub(super) bound: Option<Duration>,
    /// Number of values of the residual stream.
    pub(super) width: usize,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ServiceTimes {
    pub answer_wait_seconds: f64,
    pub host_seconds: f64,
    pub copy_seconds: f64,
    pub layers: u64,
    pub rows: u64,
    pub resident: u64,
    pub in_lanes: u64,
    pub given_up: u64,
}

impl Service {
    /// Creates the state for the first `layers` layers, and for rows that choose `used` experts each and have a residual stream of `width` values. The
    /// CPU may compute some of the experts of a single row from states of `hidden` values, unless `hidden` is 0.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn new(
        Device { gpu, plan, arena }: Device<'_>,
        layers: usize,
        used: usize,
        width: usize,
        hidden: usize,
    ) -> Result<Service, CudaError> {
        // Modules cannot be loaded during a capture.
        gpu.load_modules(&["fetch"])?;
        let all = &plan.weights.experts_of;
        let layers: Vec<LayerIndex> =
            (0..layers).filter(|&l| all[l].is_some()).map(|l| LayerIndex(l as u32)).collect();
        let fetched = |place: usize| {
            let layer = layers[(place / LANES).min(layers.len() - 1)].0 as usize;
            let lane = place % LANES;
            let layout = all[layer].expect("the layer has experts");
            FetchedLayer {
                table: layer,
                slots: DeviceArena::chosen_table(plan, layer, lane),
                present: DeviceArena::present_table(plan, layer, lane),
                parts: [0, 1, 2].map(|part| (layout.parts[part], layout.part_bytes[part])),
            }
        };
        // One more place is for the end of the first lane.
        let fetched = (0..=layers.len() * LANES).map(fetched).collect();
        let rows_max = plan.activations.fetch_rows;
        let (tables, pairs) = (arena.expert_tables().clone(), rows_max * used);
        Ok(Service {
            mailbox: ExpertMailbox::new(gpu, tables, fetched, pairs, hidden)?,
            answered: 0,
            words: gpu.host_words(2 + layers.len() * pairs)?,
            run: 0,
            used,
            rows: 0,
            rows_max,
            first_lane: 0,
            held: [Held::new(pairs), Held::new(pairs)],
            tables_are_right: false,
            leases: Vec::with_capacity(pairs),
            chosen: vec![0; layers.len() * pairs],
            slots: Vec::with_capacity(pairs),
            gone: Vec::with_capacity(2 * pairs),
            returns: Vec::with_capacity(used),
            returned_slots: Vec::with_capacity(used),
            times: ServiceTimes::default(),
            times_are_due: false,
            side: gpu.side_stream()?,
            bound: gpu.host_wait_bound(),
            width,
            layers,
        })
    }

    /// Returns true if graphs have the layer, which has experts.
    pub fn has_layer(&self, layer: usize) -> bool {
        self.layers.binary_search(&LayerIndex(layer as u32)).is_ok()
    }

    /// Returns the place of a lane in a layer with experts.
    pub(super) fn place_of(&self, layer: usize, lane: usize) -> usize {
        let found = self.layers.binary_search(&LayerIndex(layer as u32));
        LANES * found.expect("the layer has experts") + lane
    }

    /// Returns the layer of a place.
    pub(super) fn layer_of(&self, place: usize) -> LayerIndex {
        self.layers[place / LANES]
    }

    /// Returns the place where the first lane tells that it has ended.
    pub(super) fn end_place(&self) -> usize {
        LANES * self.layers.len()
    }

    /// Returns the places of the run, in the order in which kernels ask.
    pub(super) fn places(&self) -> impl Iterator<Item = usize> + use<> {
        let step = if self.has_lanes() { 1 } else { LANES };
        (0..self.end_place()).step_by(step)
    }

    /// Returns true if the run has two lanes.
    pub(super) fn has_lanes(&self) -> bool {
        self.first_lane < self.rows
    }

    /// Returns true if the kernel of a place takes an answer even if all its experts are in VRAM: that of the second lane,
    /// whose answer says what stays there.
    pub(super) fn always_answers(&self, place: usize) -> bool {
        self.has_lanes() && !place.is_multiple_of(LANES)
    }

    /// Returns the number of pairs of a row and an expert that the run has in a layer.
    pub(super) fn pairs(&self) -> usize {
        self.rows * self.used
    }

    /// Returns the range of a place's pairs among those of all layers.
    pub(super) fn pairs_of(&self, place: usize) -> Range<usize> {
        let is_first = place.is_multiple_of(LANES);
        let rows = if is_first { 0..self.first_lane } else { self.first_lane..self.rows };
        let first = place / LANES * self.pairs();
        first + rows.start * self.used..first + rows.end * self.used
    }

    pub fn times(&self) -> ServiceTimes {
        let mut times = self.times;
        if self.times_are_due {
            self.last_times().add_to(&mut times);
        }
        times
    }

    /// Notes that a batch that is not served has moved experts, so the tables on the GPU are out of date.
    pub fn forget_tables(&mut self) {
        self.tables_are_right = false;
    }

    /// Returns the times of the last run, once its work is done.
    pub(super) fn last_times(&self) -> ServiceTimes {
        let mut sum = ServiceTimes::default();
        for place in self.places() {
            let [wait, copy] = self
                .mailbox
                .times(place)
                .map(|nanoseconds| Duration::from_nanos(nanoseconds.into()));
            sum.answer_wait_seconds += wait.as_secs_f64();
            sum.copy_seconds += copy.as_secs_f64();
        }
        sum
    }

    /// Waits for the ids that the run's rows have chosen in a layer, and for what its kernel needs.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub(super) fn wait_for_question(
        &mut self,
        gpu: &Gpu,
        place: usize,
        ids: &mut [u32],
    ) -> Result<ExpertQuestion, CudaError> {
        let mut looks = 0_u32;
        loop {
            if let Some(question) = self.mailbox.question(place, self.run, ids) {
                return Ok(question);
            }
            looks = looks.wrapping_add(1);
            if looks < LOOKS {
                spin_loop();
                continue;
            }
            yield_now();
            if looks.is_multiple_of(LOOKS) && gpu.is_idle()? {
                // The question may have come in between.
                let question = self.mailbox.question(place, self.run, ids);
                return Ok(question.expect("work that has ended has asked"));
            }
        }
    }

    /// Ends the wait of all layers from place `first` on, with answers that name no experts.
    pub(super) fn dismiss(&mut self, first: usize, gpu: &Gpu, pinned: &Pinned) {
        for place in self.places().filter(|&place| place >= first) {
            // The kernel of a place that has an answer may be copying by it.
            if place >= self.answered {
                self.slots.clear();
                self.slots.resize(self.pairs_of(place).len(), DevicePtr::null());
                let answer = ExpertAnswer { slots: &self.slots, gone: &[], room: self.pairs() };
                let (misses, returns) = ([].into_iter(), [].into_iter());
                self.mailbox.answer(gpu, place, self.run, &answer, misses, returns, pinned);
            }
            self.mailbox.rows_are_there(place, self.run);
        }
    }
}

impl ServiceTimes {
    pub(super) fn add_to(self, sum: &mut ServiceTimes) {
        sum.answer_wait_seconds += self.answer_wait_seconds;
        sum.copy_seconds += self.copy_seconds;
        sum.layers += self.layers;
        sum.rows += self.rows;
        sum.resident += self.resident;
        sum.in_lanes += self.in_lanes;
        sum.given_up += self.given_up;
    }
}
