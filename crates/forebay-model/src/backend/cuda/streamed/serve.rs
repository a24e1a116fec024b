//! Single tokens whose work is recorded: kernels ask for experts, and the host answers beside them.
//!
//! Tables on the GPU say where the experts are that stay there. A kernel that finds all that a layer's router chose goes
//! on at once. Else it waits for an answer, which names a slot for each and what to copy there, and copies by itself.
//! The host decides in the order of the layers by the ids that each sends, whether it is waited for or not, so that its
//! own view and the tables stay the same.
//!
//! A GPU with a watchdog ends kernels that run long, and a disk may take long. There a kernel gives up after a while, and the host
//! goes on from that layer with each answer given before its kernel is queued: see `resume.rs`.

use std::time::Instant;

use forebay_cuda::{
    CHOSEN_MAX, CudaError, DevicePtr, ExpertAnswer, ExpertFetch, ExpertMiss, ExpertQuestion, Gpu,
};
use forebay_stream::{ExpertIndex, LayerIndex, Lease, TierBatch};

use super::super::memory::{DeviceArena, DevicePlan};
use super::super::on_cpu::expert_matrices;
use super::service::Service;
use super::{LayerOfDevice, Streamed};
use crate::ModelError;
use crate::backend::ChosenExperts;
use crate::weights::Weights;

/// Answers for the layers that have had none when it ends, whatever ended it: the GPU must not wait for ever.
struct Serving<'a> {
    gpu: &'a Gpu,
    streamed: &'a mut Streamed,
    answered: usize,
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        let Streamed { service, pinned, .. } = &mut *self.streamed;
        if let Some(service) = service
            && self.answered < service.layers.len()
        {
            service.dismiss(self.answered, self.gpu, pinned);
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
    pub fn begin_token(&mut self, gpu: &Gpu, chosen: Option<&dyn ChosenExperts>) {
        self.finish_before(gpu);
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
        let now: DevicePtr<u32> = on.arena.activation(at.fetch);
        let fetch = ExpertFetch {
            now,
            ids,
            forced: now.offset(2 + place * used),
            tickets: on.arena.activation(at.fetch_tickets),
            desk: on.arena.activation(at.fetch_desk),
            x,
            blocks: ExpertFetch::BLOCKS,
            giving_up: self.giving_up(on.plan, on.arena),
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
        let Streamed { service, tier, on_device, is_known, .. } = self;
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
            // Kernels will change it.
            on_device[index].fill(0);
            is_known[index] = false;
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
        let mut serving = Serving { gpu, streamed: self, answered: 0 };
        for place in 0..layers {
            match serving.streamed.serve_layer(gpu, plan, arena, weights, place) {
                Ok(true) => serving.answered = place + 1,
                Ok(false) => break,
                Err(error) => {
                    drop(serving);
                    // Copies may still read what is leased.
                    let _ = gpu.synchronize();
                    self.give_up();
                    return Err(error);
                }
            }
        }
        // The GPU waits for none that is left: it has given up.
        serving.answered = layers;
        if let Some(service) = &mut serving.streamed.service {
            service.times_are_due = true;
        }
        Ok(())
    }

    /// Answers a layer's question. `false`: there is none, because the GPU has given up in an earlier layer.
    fn serve_layer(
        &mut self,
        gpu: &Gpu,
        plan: &DevicePlan,
        arena: &DeviceArena,
        weights: &Weights,
        place: usize,
    ) -> Result<bool, ModelError> {
        let service = self.service.as_mut().expect("it serves");
        let layer = service.layers[place];
        let mut all = std::mem::take(&mut service.chosen);
        let chosen = &mut all[place * service.used..][..service.used];
        let question = service.wait_for_question(gpu, place, chosen);
        let served = match question {
            Err(error) => Err(error.into()),
            // What the layers before have not copied, they will.
            Ok(ExpertQuestion::GivenUp) => Ok(false),
            Ok(question) => {
                // The layers before have copied what they had to.
                self.let_go(gpu);
                let is_waiting = Some(question == ExpertQuestion::Waiting);
                let on = LayerOfDevice { gpu, plan, arena, layer: layer.0 as usize };
                self.answer_and_compute(&on, weights, place, chosen, is_waiting).map(|()| true)
            }
        };
        self.service.as_mut().expect("it serves").chosen = all;
        served
    }

    /// Answers the question of a layer, whose kernel waits, does not, or is still to be queued, and computes what is the CPU's.
    pub(super) fn answer_and_compute(
        &mut self,
        on: &LayerOfDevice<'_>,
        weights: &Weights,
        place: usize,
        chosen: &[u32],
        is_waiting: Option<bool>,
    ) -> Result<(), ModelError> {
        let layer = self.service.as_ref().expect("it serves").layers[place];
        let began = Instant::now();
        let answered = self
            .touch(layer.0 as usize, chosen)
            .and_then(|()| self.answer(on, place, chosen, is_waiting));
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
        &LayerOfDevice { gpu, plan, arena, .. }: &LayerOfDevice<'_>,
        place: usize,
        chosen: &[u32],
        is_waiting: Option<bool>,
    ) -> Result<(), ModelError> {
        let split = self.split();
        let Streamed { tier, batch, host, touched, layer, ready, cpu, .. } = self;
        let (for_cpu, wanted) = (&mut self.for_cpu, &mut self.wanted);
        let layer = *layer;
        let admits = |misses: usize| split.map_or(misses, |split| split.brought(misses));
        tier.begin(layer, touched, admits, batch);
        let TierBatch { hits, misses: missing, elsewhere, .. } = &*batch;
        if let Some(cpu) = cpu {
            cpu.cpu_offload.note(missing.len() + elsewhere.len());
        }
        host.note_uses(layer, hits);
        wanted.clear();
        wanted.extend(missing.iter().chain(elsewhere));
        wanted.sort_unstable();
        // Else the GPU computes with something else than is thought.
        let waits = !wanted.is_empty();
        assert_eq!(is_waiting.unwrap_or(waits), waits, "the tables on the GPU are not the tier's");
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
        let Service { mailbox, leases, slots, gone, returns, run, times, answered, .. } =
            service.as_mut().expect("it serves");
        let layout = plan.weights.experts_of[layer.0 as usize].expect("the layer has experts");
        let tables = arena.expert_tables();
        let number = |layer: LayerIndex, expert: ExpertIndex| {
            tables.table(layer.0 as usize).number() as u32 + expert.0
        };
        let pool = tier.pool(layer);
        leases.append(ready);
        let mut misses = [const { None }; CHOSEN_MAX];
        for ((expert, lease), miss) in leases.iter().zip(&mut misses) {
            let slot = tier.take(layer, *expert).expect("a token's experts have slots at once");
            let from = [0, 1, 2].map(|part| host.bytes(lease, part));
            let stays_as = tier.stays(layer, *expert).then_some(expert.0);
            *miss = Some(ExpertMiss { stays_as, to: plan.slot(arena, pool, slot), from });
        }
        let copied = leases.len();
        let misses = misses[..copied].iter().flatten();
        let slot = |&id: &u32| {
            // The CPU's have none.
            let slot = tier.slot(layer, ExpertIndex(id));
            slot.map_or(DevicePtr::null(), |slot| plan.slot(arena, pool, slot))
        };
        slots.clear();
        slots.extend(chosen.iter().map(slot));
        gone.clear();
        gone.extend(batch.gone.iter().map(|gone| number(gone.layer, gone.expert)));
        assert!(waits || gone.is_empty(), "nothing goes where nothing comes");
        if waits {
            let answer = ExpertAnswer { slots, gone };
            mailbox.answer(gpu, place, *run, &answer, misses, returns.drain(..), pinned);
        }
        *answered = place + 1;
        times.layers += 1;
        times.resident += u64::from(!waits);
        *experts_copied += copied as u64;
        *bytes_copied += copied as u64 * layout.part_bytes.iter().sum::<u64>();
        // The next answer is given when these kernels have run.
        touched.iter().for_each(|&expert| tier.release(layer, expert));
        Ok(())
    }
}
