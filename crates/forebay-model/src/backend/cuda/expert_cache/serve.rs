//! Serving of decode rows that run as CUDA graphs: kernels ask for experts, and the host answers while they run.
//!
//! Tables on the GPU hold the addresses of the experts that stay there. If a kernel finds all experts that a layer's
//! router chose for all rows, it goes on at once. Otherwise it waits for an answer, which names a slot for each expert and what to
//! copy there. The kernel makes the copies. Each layer sends its ids, whether its kernel waits or not. The host
//! decides by these ids in the order of the layers, so that its own view and the tables stay the same.
//!
//! A GPU with a watchdog ends kernels that run long, and the disk may be slow. On such a GPU, a kernel gives up after
//! a while. The host then continues from that layer, and gives each answer before it queues the kernel: see
//! `resume.rs`.

use std::time::Instant;

use forebay_cuda::{
    CudaError, DevicePtr, ExpertAnswer, ExpertFetch, ExpertMiss, ExpertQuestion, Gpu, LANES,
};
use forebay_stream::{BatchPart, ExpertIndex, LayerIndex, Lease, Scope, TierBatch};

use super::super::memory::Device;
use super::super::on_cpu::expert_matrices;
use super::ExpertCache;
use super::held::HeldExpert;
use super::service::Service;
use crate::ModelError;
use crate::backend::ChosenExperts;
use crate::weights::Weights;

/// Least number of rows of a pass that fetches experts beside the products of those that are in VRAM. With fewer rows, these
/// products take less time than the second launch.
const BESIDE_ROWS_MIN: usize = 2;

/// Guard of a run that is served. When dropped, for whatever reason, it answers all places that have had no answer,
/// so that the GPU does not wait forever.
struct Serving<'a> {
    gpu: &'a Gpu,
    cache: &'a mut ExpertCache,
    /// Number of places before which all are answered.
    answered: usize,
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        let ExpertCache { service, pinned, .. } = &mut *self.cache;
        if let Some(service) = service
            && self.answered < service.end_place()
        {
            service.dismiss(self.answered, self.gpu, pinned);
            service.tables_are_right = false;
        }
    }
}

impl ExpertCache {
    /// Returns true if `rows` decode rows can run as a CUDA graph in the current batch: the experts that they choose in
    /// a layer always have slots at once, in VRAM and in RAM. The CPU computes experts for a single row only.
    pub(super) fn serves_rows(&self, rows: usize) -> bool {
        let Some(service) = &self.service else { return false };
        let has_slots = |layer: &LayerIndex| {
            let experts = self.on_device[layer.0 as usize].len();
            let at_once = self.tier.plan().slots_at_once(*layer, service.used);
            // Those that are missing are all leased in RAM until the kernel has copied them.
            let leased = self.host.plan().slots_at_once(*layer, 0);
            at_once.min(leased) >= experts.min(rows * service.used)
        };
        rows == 1
            || rows <= service.rows_max
                && self.split().is_none()
                && service.layers.iter().all(has_slots)
    }

    /// Returns the number of rows that the first of two lanes has if `rows` decode rows run as a CUDA graph, which they
    /// can, or `None` if they have one lane. One lane then computes while the experts of the other come.
    pub(super) fn first_lane(&self, rows: usize) -> Option<usize> {
        let service = self.service();
        let first = rows.div_ceil(LANES);
        let lacks_slots = |layer: &LayerIndex| {
            let (plan, used) = (self.tier.plan(), service.used);
            plan.slots_lacking_for_parts(*layer, first * used, used) > 0
        };
        // Every lane has a row. Experts of one layer must not take the room of another's. A pass that gives up goes on in
        // one lane, with another order of questions.
        let fits = rows >= LANES
            && self.tier.plan().policy.scope == Scope::PerLayer
            && service.bound.is_none()
            && !service.layers.iter().any(lacks_slots);
        fits.then_some(first)
    }

    /// Starts `rows` rows whose CUDA graph is captured or replayed, of which `first_lane` are in the first lane. If
    /// `chosen` is given, the rows use the caller's experts instead of the router's. The previous run must have finished.
    ///
    /// # Panics
    /// Panics if so many rows cannot run as CUDA graphs.
    pub(super) fn begin_run(
        &mut self,
        gpu: &Gpu,
        (rows, first_lane): (usize, usize),
        chosen: Option<&dyn ChosenExperts>,
    ) {
        gpu.check_may_wait();
        self.finish_before(gpu);
        let service = self.service_mut();
        if std::mem::take(&mut service.times_are_due) {
            service.last_times().add_to(&mut service.times);
        }
        service.run = service.run.wrapping_add(1).max(1);
        assert!(rows <= service.rows_max, "{rows} rows");
        (service.rows, service.first_lane, service.answered) = (rows, first_lane, 0);
        service.words.write(0, &[service.run, u32::from(chosen.is_some())]);
        if let Some(chosen) = chosen {
            for (index, layer) in service.layers.iter().enumerate() {
                let at = 2 + index * service.pairs();
                service.words.write(at, chosen.experts(layer.0 as usize));
            }
        }
    }

    /// Queues the copy to the GPU of what [`ExpertCache::begin_run`] wrote. The copy becomes part of the graph.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn queue_run(&self, on: Device<'_>) -> Result<(), CudaError> {
        let service = self.service();
        let words = 2 + service.layers.len() * service.pairs();
        let to = on.arena.activation(on.plan.activations.fetch);
        on.gpu.queue_upload(&service.words, 0..words, to)
    }

    /// Queues the kernel that fetches a layer's experts, whose ids are at `ids`, for the normed state `x`. The kernel
    /// becomes part of the graph, unless the run is being finished layer by layer.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub(super) fn queue_fetch(
        &self,
        on: Device<'_>,
        (layer, lane): (usize, usize),
        ids: DevicePtr<u32>,
        x: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        // Only CPU offload needs the state.
        let x = if self.split().is_some() { x } else { DevicePtr::null() };
        let (fetch, place) = self.fetch_arguments(on, (layer, lane), ids, x);
        let service = self.service();
        let Service { mailbox, side, .. } = service;
        if !self.fetches_beside() {
            return on.gpu.fetch_experts(&fetch, mailbox, place, None);
        }
        // With two lanes, the host can answer while the other lane's experts are fetched. That fetch does not change what is
        // known of this layer: a first lane's does not, and a second lane's only for its own layer.
        on.gpu.find_experts(&fetch, mailbox, place, service.has_lanes())?;
        side.fork(on.gpu)?;
        on.gpu.fetch_experts(&fetch, mailbox, place, Some(side))?;
        side.set_mark(lane)
    }

    /// Queues the kernel that tells the host that the first of two lanes has ended.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn end_lane(&self, on: Device<'_>) -> Result<(), CudaError> {
        let service = self.service();
        let ids = on.arena.activation(on.plan.activations.expert_ids);
        let last = service.layers.last().expect("some layers have experts").0 as usize;
        let (fetch, _) = self.fetch_arguments(on, (last, 0), ids, DevicePtr::null());
        let nothing = ExpertFetch { k: 0, ..fetch };
        on.gpu.find_experts(&nothing, &service.mailbox, service.end_place(), true)
    }

    /// Returns true if experts are fetched beside the products of those that are in VRAM. These products then take two
    /// launches: one for the experts that are in VRAM, and one for those that were fetched.
    pub(super) fn fetches_beside(&self) -> bool {
        self.split().is_none() && self.service().rows >= BESIDE_ROWS_MIN
    }

    /// Queues the copy to `outputs` of the rows that the CPU computes in a layer, if CPU offload is on. The copy
    /// becomes part of the graph, unless the run is being finished layer by layer.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub(super) fn queue_rows(
        &self,
        on: Device<'_>,
        layer: usize,
        outputs: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        if self.split().is_none() {
            return Ok(());
        }
        let ids = on.arena.activation(on.plan.activations.expert_ids);
        let (fetch, place) = self.fetch_arguments(on, (layer, 0), ids, DevicePtr::null());
        on.gpu.take_rows(&fetch, &self.service().mailbox, place, outputs)
    }

    /// Returns the arguments of a layer's fetch, and the layer's place in the mailbox.
    fn fetch_arguments(
        &self,
        on: Device<'_>,
        (layer, lane): (usize, usize),
        ids: DevicePtr<u32>,
        x: DevicePtr<f32>,
    ) -> (ExpertFetch, usize) {
        let service = self.service();
        let place = service.place_of(layer, lane);
        let pairs = service.pairs_of(place);
        let at = &on.plan.activations;
        let now: DevicePtr<u32> = on.arena.activation(at.fetch);
        let fetch = ExpertFetch {
            now,
            k: pairs.len(),
            room: service.pairs(),
            always: service.always_answers(place),
            ids,
            forced: now.offset(2 + pairs.start),
            tickets: on.arena.activation(at.fetch_tickets),
            desk: on.arena.activation(at.fetch_desk),
            x,
            blocks: ExpertFetch::BLOCKS,
            giving_up: self.giving_up(on),
        };
        (fetch, place)
    }

    /// Brings the tables on the GPU up to date before a graph is queued.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub(super) fn upload_tables(
        &mut self,
        Device { gpu, plan, arena }: Device<'_>,
    ) -> Result<(), CudaError> {
        let ExpertCache { service, tier, on_device, is_known, .. } = self;
        let service = service.as_mut().expect("it serves");
        if service.tables_are_right {
            return Ok(());
        }
        for &layer in &service.layers {
            let index = layer.0 as usize;
            let address = |expert: usize| {
                let expert = ExpertIndex(expert as u32);
                let slot = tier.slot(layer, expert).filter(|_| tier.stays(layer, expert));
                slot.map_or(0, |slot| plan.slot(arena, tier.pool(layer), slot).address())
            };
            let table: Vec<u64> = (0..on_device[index].len()).map(address).collect();
            arena.expert_tables().upload(gpu, index, &table)?;
            // Kernels will change the table.
            on_device[index].fill(0);
            is_known[index] = false;
        }
        service.tables_are_right = true;
        Ok(())
    }

    /// Answers the questions of the queued graph. The graph may still be running when this returns.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails. The graph ends nevertheless, but its results are invalid.
    pub(super) fn serve(&mut self, on: Device<'_>, weights: &Weights) -> Result<(), ModelError> {
        let gpu = on.gpu;
        let (places, end) = (self.service().places(), self.service().end_place());
        let mut serving = Serving { gpu, cache: self, answered: 0 };
        for place in places {
            match serving.cache.serve_layer(on, weights, place) {
                Ok(true) => serving.answered = place + 1,
                Ok(false) => break,
                Err(error) => {
                    drop(serving);
                    // Kernels may still copy leased experts.
                    let _ = gpu.synchronize();
                    self.give_up();
                    self.release_held(gpu);
                    return Err(error);
                }
            }
        }
        // All layers are answered, or the GPU has given up. Either way it waits for no further answer.
        serving.answered = end;
        serving.cache.service_mut().times_are_due = true;
        if serving.cache.service().has_lanes() {
            serving.cache.release_held(gpu);
        }
        Ok(())
    }

    /// Answers a layer's question. Returns false if there is none, because the GPU gave up in an earlier layer.
    fn serve_layer(
        &mut self,
        on: Device<'_>,
        weights: &Weights,
        place: usize,
    ) -> Result<bool, ModelError> {
        let service = self.service_mut();
        let mut all = std::mem::take(&mut service.chosen);
        let chosen = &mut all[service.pairs_of(place)];
        let question = service.wait_for_question(on.gpu, place, chosen);
        let served = match question {
            Err(error) => Err(error.into()),
            // Kernels of earlier layers may still be copying, so their leases are kept.
            Ok(ExpertQuestion::GivenUp) => Ok(false),
            Ok(question) => {
                let has_lanes = self.service().has_lanes();
                if !has_lanes {
                    // Kernels of earlier layers have finished their copies.
                    self.let_go(on.gpu);
                }
                let is_waiting = (!has_lanes).then_some(question == ExpertQuestion::Waiting);
                self.answer_and_compute(on, weights, place, chosen, is_waiting).map(|()| true)
            }
        };
        self.service_mut().chosen = all;
        served
    }

    /// Answers the question of a layer and computes the CPU's experts. `is_waiting` tells whether the layer's kernel
    /// waits for the answer. It is `None` if the kernel is not queued yet.
    pub(super) fn answer_and_compute(
        &mut self,
        on: Device<'_>,
        weights: &Weights,
        place: usize,
        chosen: &[u32],
        is_waiting: Option<bool>,
    ) -> Result<(), ModelError> {
        let layer = self.service().layer_of(place);
        let began = Instant::now();
        let answered = self
            .touch(layer.0 as usize, chosen)
            .and_then(|()| self.answer(on, place, chosen, is_waiting));
        let service = self.service.as_mut().expect("it serves");
        service.times.host_seconds += began.elapsed().as_secs_f64();
        let computed = answered.and_then(|()| match (&mut self.cpu, self.for_cpu.is_empty()) {
            (Some(cpu), false) => {
                let of = expert_matrices(&weights.layers[layer.0 as usize]);
                let of = of.expect("the layer has experts");
                let (mailbox, leases) = (&mut service.mailbox, &self.for_cpu);
                cpu.compute_for(mailbox, &mut self.host, &of, chosen, leases)?;
                mailbox.rows_are_there(place, service.run);
                self.experts_on_cpu += self.for_cpu.len() as u64;
                Ok(())
            }
            _ => Ok(()),
        });
        self.for_cpu.clear();
        computed
    }

    /// Passes the experts of the last run, `[rows, used]`, to `take`, layer by layer.
    pub(super) fn served_experts(&self, mut take: impl FnMut(usize, &[u32])) {
        let service = self.service();
        let all = service.layers.iter().zip(service.chosen.chunks_exact(service.pairs()));
        all.for_each(|(layer, ids)| take(layer.0 as usize, ids));
    }

    /// Begins the tier's batch of an answer.
    fn begin_batch(&mut self) {
        let split = self.split();
        let ExpertCache { tier, batch, touched, layer, there, .. } = self;
        there.clear();
        let admits = |misses: usize| split.map_or(misses, |split| split.brought(misses));
        tier.begin(*layer, touched, BatchPart::Whole, admits, batch);
    }

    fn answer(
        &mut self,
        on: Device<'_>,
        place: usize,
        chosen: &[u32],
        is_waiting: Option<bool>,
    ) -> Result<(), ModelError> {
        let Device { gpu, plan, arena } = on;
        let has_lanes = self.service().has_lanes();
        let always = self.service().always_answers(place);
        match has_lanes {
            true => self.begin_part(gpu, place),
            false => self.begin_batch(),
        }
        let ExpertCache { tier, batch, host, layer, ready, cpu, .. } = self;
        let (for_cpu, wanted, there) = (&mut self.for_cpu, &mut self.wanted, &mut self.there);
        let layer = *layer;
        let TierBatch { hits, misses: missing, elsewhere, .. } = &*batch;
        if let Some(cpu) = cpu {
            cpu.cpu_offload.note(missing.len() + elsewhere.len());
        }
        host.note_uses(layer, hits);
        wanted.clear();
        wanted.extend(missing.iter().chain(elsewhere));
        wanted.sort_unstable();
        // Otherwise the GPU would compute with other experts than the host assumes.
        let waits = !wanted.is_empty() || always;
        assert_eq!(is_waiting.unwrap_or(waits), waits, "the tables on the GPU are not the tier's");
        // The other lane has brought these.
        let is_there = |expert: &mut ExpertIndex| tier.slot(layer, *expert).is_some();
        there.extend(wanted.extract_if(.., is_there));
        if !wanted.is_empty() {
            host.begin_experts(layer, wanted)?;
            while host.next_experts(ready)? {}
            host.end_experts();
            let of_cpu = |(expert, _): &mut (ExpertIndex, Lease)| elsewhere.contains(expert);
            for_cpu.extend(ready.extract_if(.., of_cpu));
        }
        self.hand_over();
        self.queue_returns(on);
        if has_lanes {
            self.make_room(gpu, place)?;
        }
        let ExpertCache { tier, batch, host, touched, pinned, ready, there, service, .. } = self;
        let (experts_copied, bytes_copied) = (&mut self.experts_copied, &mut self.bytes_copied);
        let service = service.as_mut().expect("it serves");
        let room = service.pairs();
        let Service {
            mailbox, leases, slots, gone, returns, run, used, times, answered, held, ..
        } = service;
        let layout = plan.weights.experts_of[layer.0 as usize].expect("the layer has experts");
        let tables = arena.expert_tables();
        let number = |layer: LayerIndex, expert: ExpertIndex| {
            tables.table(layer.0 as usize).number() as u32 + expert.0
        };
        let pool = tier.pool(layer);
        leases.append(ready);
        for (expert, _) in &*leases {
            tier.take(layer, *expert).expect("the experts of a pass have slots at once");
        }
        let miss = |expert: ExpertIndex, from| {
            let slot = tier.slot(layer, expert).expect("it was taken");
            let stays_as = tier.stays(layer, expert).then_some(expert.0);
            ExpertMiss { stays_as, to: plan.slot(arena, pool, slot), from }
        };
        let copied =
            leases.iter().map(|(expert, lease)| miss(*expert, Some(host.expert_bytes(lease))));
        let misses = copied.chain(there.drain(..).map(|expert| miss(expert, None)));
        let copied = leases.len();
        let slot = |&id: &u32| {
            // Experts that the CPU computes have no slot.
            let slot = tier.slot(layer, ExpertIndex(id));
            slot.map_or(DevicePtr::null(), |slot| plan.slot(arena, pool, slot))
        };
        slots.clear();
        slots.extend(chosen.iter().map(slot));
        gone.clear();
        gone.extend(batch.gone.iter().map(|gone| number(gone.layer, gone.expert)));
        assert!(waits || gone.is_empty(), "nothing goes where nothing comes");
        if waits {
            let answer = ExpertAnswer { slots, gone, room };
            mailbox.answer(gpu, place, *run, &answer, misses, returns.drain(..), pinned);
        }
        *answered = place + 1;
        times.layers += 1;
        times.rows += (chosen.len() / *used) as u64;
        times.resident += u64::from(!waits);
        times.in_lanes += u64::from(has_lanes);
        *experts_copied += copied as u64;
        *bytes_copied += copied as u64 * layout.part_bytes.iter().sum::<u64>();
        if !has_lanes {
            // The next answer is given only after these kernels have run.
            touched.iter().for_each(|&expert| tier.release(layer, expert));
            return Ok(());
        }
        // The next answer is for the other lane, and only the one after it for this lane.
        held[1].experts.extend(touched.iter().map(|&expert| {
            let slot = tier.slot(layer, expert).expect("the experts of a lane are on the GPU");
            let is_new = batch.misses.contains(&expert);
            HeldExpert { layer, expert, pool, slot, is_new }
        }));
        held[1].leases.append(leases);
        Ok(())
    }
}
