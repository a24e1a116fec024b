//! Single tokens whose work is recorded: kernels ask for experts, and the host answers beside them.
//!
//! Tables on the GPU say where the experts are that stay there. A kernel that finds all that a layer's router chose goes
//! on at once. Else it waits for an answer, which names a slot for each and what to copy there, and copies by itself.
//! The host decides in the order of the layers by the ids that each sends, whether it is waited for or not, so that its
//! own view and the tables stay the same.

use std::hint::spin_loop;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use forebay_cuda::{
    CudaError, DevicePtr, ExpertAnswer, ExpertFetch, ExpertMailbox, ExpertMiss, ExpertReturn, Gpu,
    HostWords,
};
use forebay_stream::{ExpertIndex, LayerIndex, Lease, Returning, TierBatch};

use super::super::memory::{DeviceArena, DevicePlan};
use super::super::on_cpu::expert_matrices;
use super::{LayerOfDevice, Streamed};
use crate::ModelError;
use crate::decoder::ChosenExperts;
use crate::weights::Weights;

/// Looks at a question that has not come, before other threads get a turn between them, and before the driver is asked
/// whether anything is still running.
const LOOKS: u32 = 1 << 14;

/// What serving takes besides the experts themselves.
pub(super) struct Service {
    mailbox: ExpertMailbox,
    /// As on the device: the run's number, whether ids are forced, and those `[layers, k]`.
    words: HostWords,
    /// Layers with experts.
    layers: Vec<LayerIndex>,
    run: u32,
    pub used: usize,
    /// Places that have an answer in this run.
    answered: usize,
    /// The tables on the GPU are what the tier says.
    tables_are_right: bool,
    /// Experts in host memory that kernels may still be copying.
    pub leases: Vec<(ExpertIndex, Lease)>,
    /// Slots in host memory that kernels may still be copying to.
    pub returning: Vec<Returning>,
    /// Of the token at hand, by place `[layers, k]`.
    chosen: Vec<u32>,
    slots: Vec<DevicePtr<u8>>,
    misses: Vec<ExpertMiss>,
    gone: Vec<u32>,
    pub returns: Vec<ExpertReturn>,
    times: ServiceTimes,
    /// The last token's times are still to be read.
    times_are_due: bool,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ServiceTimes {
    pub answer_wait_seconds: f64,
    pub host_seconds: f64,
    pub copy_seconds: f64,
    pub layers: u64,
    pub resident: u64,
}

impl Service {
    /// For tokens that choose `used` experts each. The CPU may compute some of them from states of `hidden` values, unless
    /// that is 0.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn new(
        gpu: &Gpu,
        plan: &DevicePlan,
        used: usize,
        hidden: usize,
    ) -> Result<Service, CudaError> {
        // A recording cannot load it.
        gpu.load_modules(&["fetch"])?;
        let all = &plan.weights.experts_of;
        let layers: Vec<LayerIndex> =
            (0..all.len()).filter(|&l| all[l].is_some()).map(|l| LayerIndex(l as u32)).collect();
        Ok(Service {
            mailbox: ExpertMailbox::new(gpu, layers.len(), used, hidden)?,
            answered: 0,
            words: gpu.host_words(2 + layers.len() * used)?,
            run: 0,
            used,
            tables_are_right: false,
            leases: Vec::with_capacity(used),
            returning: Vec::with_capacity(used),
            chosen: vec![0; layers.len() * used],
            slots: Vec::with_capacity(used),
            misses: Vec::with_capacity(used),
            gone: Vec::with_capacity(2 * used),
            returns: Vec::with_capacity(used),
            times: ServiceTimes::default(),
            times_are_due: false,
            layers,
        })
    }

    pub fn times(&self) -> ServiceTimes {
        let mut times = self.times;
        if self.times_are_due {
            self.last_times().add_to(&mut times);
        }
        times
    }

    /// Somebody else has changed where experts are.
    pub fn forget_tables(&mut self) {
        self.tables_are_right = false;
    }

    /// Of the last token, once its work is done.
    fn last_times(&self) -> ServiceTimes {
        let mut sum = ServiceTimes::default();
        for place in 0..self.layers.len() {
            let [wait, copy] = self
                .mailbox
                .times(place)
                .map(|nanoseconds| Duration::from_nanos(nanoseconds.into()));
            sum.answer_wait_seconds += wait.as_secs_f64();
            sum.copy_seconds += copy.as_secs_f64();
        }
        sum
    }

    /// Waits for the ids that a layer's token has chosen; whether the GPU waits, too.
    ///
    /// # Errors
    /// What went wrong in queued work.
    fn wait_for_question(
        &self,
        gpu: &Gpu,
        place: usize,
        ids: &mut [u32],
    ) -> Result<bool, CudaError> {
        let mut looks = 0_u32;
        loop {
            if let Some(is_waiting) = self.mailbox.question(place, self.run, ids) {
                return Ok(is_waiting);
            }
            looks = looks.wrapping_add(1);
            if looks < LOOKS {
                spin_loop();
                continue;
            }
            yield_now();
            if looks.is_multiple_of(LOOKS) && gpu.is_idle()? {
                // It may have come in between.
                let question = self.mailbox.question(place, self.run, ids);
                return Ok(question.expect("work that has ended has asked"));
            }
        }
    }

    /// Ends the wait of all layers from place `first` on, with nothing to compute with.
    fn dismiss(&mut self, first: usize) {
        self.slots.clear();
        self.slots.resize(self.used, DevicePtr::null());
        let answer = ExpertAnswer { slots: &self.slots, misses: &[], gone: &[], returns: &[] };
        for place in first..self.layers.len() {
            // What has an answer may be copying by it.
            if place >= self.answered {
                self.mailbox.answer(place, self.run, &answer);
            }
            self.mailbox.rows_are_there(place, self.run);
        }
    }
}

impl ServiceTimes {
    fn add_to(self, sum: &mut ServiceTimes) {
        sum.answer_wait_seconds += self.answer_wait_seconds;
        sum.copy_seconds += self.copy_seconds;
        sum.layers += self.layers;
        sum.resident += self.resident;
    }
}

/// Answers for the layers that have had none when it ends, whatever ended it: the GPU must not wait for ever.
struct Serving<'a> {
    streamed: &'a mut Streamed,
    answered: usize,
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        if let Some(service) = &mut self.streamed.service
            && self.answered < service.layers.len()
        {
            service.dismiss(self.answered);
            service.tables_are_right = false;
        }
    }
}

impl Streamed {
    /// Whether single tokens' work can be recorded.
    pub fn serves(&self) -> bool {
        self.service.is_some()
    }

    /// Begins a token whose work is recorded or becomes so: it has the experts that somebody else says, if anybody
    /// does. The token before is done.
    ///
    /// # Panics
    /// Where tokens' work cannot be recorded.
    pub fn begin_token(&mut self, chosen: Option<&dyn ChosenExperts>) {
        self.finish_before();
        let service = self.service.as_mut().expect("it serves");
        if std::mem::take(&mut service.times_are_due) {
            service.last_times().add_to(&mut service.times);
        }
        service.run = service.run.wrapping_add(1).max(1);
        service.answered = 0;
        service.words.write(0, &[service.run, u32::from(chosen.is_some())]);
        if let Some(chosen) = chosen {
            for (place, layer) in service.layers.iter().enumerate() {
                let at = 2 + place * service.used;
                service.words.write(at, chosen.experts(layer.0 as usize));
            }
        }
    }

    /// Queues the way of what [`Streamed::begin_token`] wrote to the GPU; to be recorded.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn queue_token(
        &self,
        gpu: &Gpu,
        plan: &DevicePlan,
        arena: &DeviceArena,
    ) -> Result<(), CudaError> {
        let service = self.service.as_ref().expect("it serves");
        let words = 2 + service.layers.len() * service.used;
        gpu.queue_upload(&service.words, 0..words, arena.activation(plan.activations.fetch))
    }

    /// Queues the kernel that fetches a layer's experts, whose ids are at `ids`, for the normed state `x`; to be recorded.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn queue_fetch(
        &self,
        on: &LayerOfDevice<'_>,
        ids: DevicePtr<u32>,
        x: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        // The state comes along for the CPU only.
        let x = if self.split().is_some() { x } else { DevicePtr::null() };
        let (fetch, place) = self.fetch(on, ids, x);
        on.gpu.fetch_experts(&fetch, &self.service.as_ref().expect("it serves").mailbox, place)
    }

    /// Queues the way of the rows that the CPU computes of a layer, if it does, to `outputs`; to be recorded.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn queue_rows(
        &self,
        on: &LayerOfDevice<'_>,
        outputs: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        let service = self.service.as_ref().expect("it serves");
        if self.split().is_none() {
            return Ok(());
        }
        let (fetch, place) = self.fetch(on, DevicePtr::null(), DevicePtr::null());
        on.gpu.take_rows(&fetch, &service.mailbox, place, outputs)
    }

    /// What a layer's fetch works with, and its place in the mailbox.
    fn fetch(
        &self,
        on: &LayerOfDevice<'_>,
        ids: DevicePtr<u32>,
        x: DevicePtr<f32>,
    ) -> (ExpertFetch, usize) {
        let service = self.service.as_ref().expect("it serves");
        let layer = LayerIndex(on.layer as u32);
        let place = service.layers.binary_search(&layer).expect("the layer has experts");
        let (at, used) = (&on.plan.activations, service.used);
        let places = on.plan.weights.experts_of[on.layer].expect("the layer has experts");
        let now: DevicePtr<u32> = on.arena.activation(at.fetch);
        let fetch = ExpertFetch {
            now,
            ids,
            forced: now.offset(2 + place * used),
            k: used,
            tables: on.arena.activation(at.tables[0]),
            first: first_in_tables(on.plan, on.layer),
            slots: on.arena.activation(at.fetch_slots),
            tickets: on.arena.activation(at.fetch_tickets),
            desk: on.arena.activation(at.fetch_desk),
            x,
            parts: [0, 1, 2].map(|part| (places.parts[part], places.part_bytes[part])),
            blocks: ExpertFetch::BLOCKS,
        };
        (fetch, place)
    }

    /// Brings the tables on the GPU up to date, before a token's recorded work is queued.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn upload_tables(
        &mut self,
        gpu: &Gpu,
        plan: &DevicePlan,
        arena: &DeviceArena,
    ) -> Result<(), CudaError> {
        let Streamed { service, tier, on_device, .. } = self;
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
            gpu.upload(&table, arena.activation(plan.activations.tables[index]))?;
            // Kernels will change it.
            on_device[index].fill(u64::MAX);
        }
        service.tables_are_right = true;
        Ok(())
    }

    /// Answers what the queued work of the token asks. The work goes on when this returns.
    ///
    /// # Errors
    /// A failed read or device. The work ends all the same, and what it computes means nothing.
    pub fn serve(
        &mut self,
        gpu: &Gpu,
        plan: &DevicePlan,
        arena: &DeviceArena,
        weights: &Weights,
    ) -> Result<(), ModelError> {
        let layers = self.service.as_ref().map_or(0, |service| service.layers.len());
        let mut serving = Serving { streamed: self, answered: 0 };
        for place in 0..layers {
            if let Err(error) = serving.streamed.serve_layer(gpu, plan, arena, weights, place) {
                drop(serving);
                // Copies may still read what is leased.
                let _ = gpu.synchronize();
                self.give_up();
                return Err(error);
            }
            serving.answered = place + 1;
        }
        if let Some(service) = &mut serving.streamed.service {
            service.times_are_due = true;
        }
        Ok(())
    }

    fn serve_layer(
        &mut self,
        gpu: &Gpu,
        plan: &DevicePlan,
        arena: &DeviceArena,
        weights: &Weights,
        place: usize,
    ) -> Result<(), ModelError> {
        let service = self.service.as_mut().expect("it serves");
        let layer = service.layers[place];
        let mut all = std::mem::take(&mut service.chosen);
        let chosen = &mut all[place * service.used..][..service.used];
        let is_waiting = service.wait_for_question(gpu, place, chosen);
        // The layers before have copied what they had to.
        self.let_go();
        let began = Instant::now();
        let answered = is_waiting.map_err(ModelError::from).and_then(|is_waiting| {
            self.touch(layer.0 as usize, chosen)?;
            self.answer(plan, arena, place, chosen, is_waiting)
        });
        let service = self.service.as_mut().expect("it serves");
        service.times.host_seconds += began.elapsed().as_secs_f64();
        let computed = answered.and_then(|()| match (&mut self.cpu, self.for_cpu.is_empty()) {
            (Some(cpu), false) => {
                let of = expert_matrices(&weights.layers[layer.0 as usize], cpu.gating);
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
        service.chosen = all;
        computed
    }

    /// The experts that the last token was given, by layer.
    pub fn served_experts(&self, mut take: impl FnMut(usize, &[u32])) {
        let service = self.service.as_ref().expect("it serves");
        let all = service.layers.iter().zip(service.chosen.chunks_exact(service.used));
        all.for_each(|(layer, ids)| take(layer.0 as usize, ids));
    }

    fn answer(
        &mut self,
        plan: &DevicePlan,
        arena: &DeviceArena,
        place: usize,
        chosen: &[u32],
        is_waiting: bool,
    ) -> Result<(), ModelError> {
        let split = self.split();
        let Streamed { tier, batch, host, touched, layer, ready, cpu, .. } = self;
        let (for_cpu, wanted) = (&mut self.for_cpu, &mut self.wanted);
        let layer = *layer;
        let admits = |misses: usize| split.map_or(misses, |split| split.brought(misses));
        tier.begin(layer, touched, admits, batch);
        let TierBatch { hits, misses: missing, elsewhere, .. } = &*batch;
        if let Some(cpu) = cpu {
            cpu.help.note(missing.len() + elsewhere.len());
        }
        host.note_uses(layer, hits);
        wanted.clear();
        wanted.extend(missing.iter().chain(elsewhere));
        wanted.sort_unstable();
        // Else the GPU computes with something else than is thought.
        assert_eq!(is_waiting, !wanted.is_empty(), "the tables on the GPU are not the tier's");
        if !wanted.is_empty() {
            host.begin_experts(layer, wanted)?;
            while host.next_experts(ready)? {}
            host.end_experts();
            let of_cpu = |(expert, _): &mut (ExpertIndex, Lease)| elsewhere.contains(expert);
            for_cpu.extend(ready.extract_if(.., of_cpu));
        }
        self.hand_over();
        self.queue_returns(plan, arena);
        let Streamed { tier, batch, host, touched, pinned, ready, service, .. } = self;
        let (experts_copied, bytes_copied) = (&mut self.experts_copied, &mut self.bytes_copied);
        let Service { mailbox, leases, misses, slots, gone, returns, run, times, answered, .. } =
            service.as_mut().expect("it serves");
        let places = plan.weights.experts_of[layer.0 as usize].expect("the layer has experts");
        let index = |layer: LayerIndex, expert: ExpertIndex| {
            (first_in_tables(plan, layer.0 as usize) + expert.0 as usize) as u32
        };
        let pool = tier.pool(layer);
        misses.clear();
        leases.append(ready);
        for (expert, lease) in &*leases {
            let slot = tier.take(layer, *expert).expect("a token's experts have slots at once");
            let from =
                [0, 1, 2].map(|part| pinned.device_address(host.bytes(lease, part).as_ptr()));
            let stays_as = tier.stays(layer, *expert).then(|| index(layer, *expert));
            misses.push(ExpertMiss { stays_as, to: plan.slot(arena, pool, slot), from });
        }
        let slot = |&id: &u32| {
            // The CPU's have none.
            let slot = tier.slot(layer, ExpertIndex(id));
            slot.map_or(DevicePtr::null(), |slot| plan.slot(arena, pool, slot))
        };
        slots.clear();
        slots.extend(chosen.iter().map(slot));
        gone.clear();
        gone.extend(batch.gone.iter().map(|gone| index(gone.layer, gone.expert)));
        assert!(is_waiting || gone.is_empty(), "nothing goes where nothing comes");
        if is_waiting {
            mailbox.answer(place, *run, &ExpertAnswer { slots, misses, gone, returns });
        }
        *answered = place + 1;
        times.layers += 1;
        times.resident += u64::from(!is_waiting);
        *experts_copied += misses.len() as u64;
        *bytes_copied += misses.len() as u64 * places.part_bytes.iter().sum::<u64>();
        // The next answer is given when these kernels have run.
        touched.iter().for_each(|&expert| tier.release(layer, expert));
        Ok(())
    }
}

/// The number of a layer's first expert in the tables of all layers, which lie one after the other.
fn first_in_tables(plan: &DevicePlan, layer: usize) -> usize {
    let tables = &plan.activations.tables;
    ((tables[layer] - tables[0]) / size_of::<u64>() as u64) as usize
}
