//! Experts that do not all fit the GPU: slots there, and the others' homes in pinned host memory.
//!
//! The router's choice comes to the host within the layer. What is in a slot is computed with where it is; the rest is
//! copied into slots beside the kernels, in waves if it is more than fits. Every pair of a token and an expert has a row
//! of its own, and rows are added up in the router's order: what comes out does not depend on what was where.

use std::collections::VecDeque;

use forebay_cuda::{CopyStream, CudaError, DevicePtr, Gpu, HostWords, InFlight, Marker, Pinned};
use forebay_stream::{ExpertIndex, ExpertTier, LayerIndex, Lease, Residency, TierStatistics};
use serde::Serialize;

use super::memory::{DeviceArena, DevicePlan};
use crate::ModelError;

/// Where experts live that are not on the GPU. Fields are dropped in order: nothing is unpinned that is still leased.
pub struct HostExperts {
    pub residency: Residency,
    /// All of its memory, that the GPU copies from.
    pub pinned: Pinned,
}

/// What went to the GPU while tokens were computed, for statistics.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceExperts {
    #[serde(flatten)]
    pub tier: TierStatistics,
    /// Host memory that the GPU copies from.
    pub pinned_bytes: u64,
    pub experts_copied: u64,
    pub bytes_copied: u64,
    /// Parts of layers' batches, because not all of their experts fit at once.
    pub waves: u64,
}

/// Experts on their way through a GPU.
pub struct Streamed {
    // Before what they copy from.
    in_flight: Vec<InFlight<Lease>>,
    waves: VecDeque<Wave>,
    ready: Vec<(ExpertIndex, Lease)>,
    host: HostExperts,
    tier: ExpertTier,
    copies: CopyStream,
    /// Chosen ids as the GPU sends them.
    ids: HostWords,
    /// Tables on their way, one for every wave of a layer.
    tables: HostWords,
    tables_used: usize,
    tables_max: usize,
    /// What every layer's table on the GPU says.
    on_device: Vec<Vec<u64>>,
    layer: LayerIndex,
    touched: Vec<ExpertIndex>,
    hits: Vec<ExpertIndex>,
    misses: Vec<ExpertIndex>,
    gone: Vec<(LayerIndex, ExpertIndex)>,
    seen: Vec<bool>,
    wave: Vec<ExpertIndex>,
    /// Most misses of one wave.
    wave_misses: usize,
    hits_are_done: bool,
    host_is_done: bool,
    experts_copied: u64,
    bytes_copied: u64,
    waves_done: u64,
}

/// A part of a batch that is queued, and whose slots are not yet free.
struct Wave {
    experts: Vec<ExpertIndex>,
    done: Marker,
}

/// A layer's part of the GPU.
pub struct LayerOfDevice<'a> {
    pub gpu: &'a Gpu,
    pub plan: &'a DevicePlan,
    pub arena: &'a DeviceArena,
    pub layer: usize,
}

impl Streamed {
    /// For the tier of `plan`, with `batch` tokens at most.
    pub fn new(
        gpu: &Gpu,
        plan: &DevicePlan,
        host: HostExperts,
        pairs: usize,
    ) -> Result<Option<Streamed>, CudaError> {
        let Some(device) = &plan.tier else { return Ok(None) };
        let counts = || plan.weights.experts_of.iter().map(|of| of.map_or(0, |of| of.count));
        let experts = counts().max().unwrap_or(0);
        let tables_max = experts + 2;
        Ok(Some(Streamed {
            in_flight: Vec::with_capacity(experts),
            waves: VecDeque::new(),
            ready: Vec::with_capacity(experts),
            host,
            tier: ExpertTier::new(device.plan.clone()),
            copies: gpu.copy_stream()?,
            ids: gpu.host_words(pairs)?,
            tables: gpu.host_words(tables_max * 2 * experts)?,
            tables_used: 0,
            tables_max,
            on_device: counts().map(|count| vec![0; count]).collect(),
            layer: LayerIndex(0),
            touched: Vec::with_capacity(experts),
            hits: Vec::with_capacity(experts),
            misses: Vec::with_capacity(experts),
            gone: Vec::with_capacity(experts),
            seen: vec![false; experts],
            wave: Vec::with_capacity(experts),
            wave_misses: 0,
            hits_are_done: true,
            host_is_done: true,
            experts_copied: 0,
            bytes_copied: 0,
            waves_done: 0,
        }))
    }

    pub fn host(&self) -> &Residency {
        &self.host.residency
    }

    pub fn host_mut(&mut self) -> &mut Residency {
        &mut self.host.residency
    }

    pub fn statistics(&self) -> DeviceExperts {
        DeviceExperts {
            tier: self.tier.statistics(),
            pinned_bytes: self.host.pinned.bytes() as u64,
            experts_copied: self.experts_copied,
            bytes_copied: self.bytes_copied,
            waves: self.waves_done,
        }
    }

    /// Waits for the ids that the router chose `[tokens, k]`, and all that was queued before.
    ///
    /// # Errors
    /// What went wrong in queued work.
    pub fn take_ids(
        &mut self,
        gpu: &Gpu,
        ids: DevicePtr<u32>,
        chosen: &mut [u32],
    ) -> Result<(), CudaError> {
        gpu.queue_download(ids, &self.ids, 0..chosen.len())?;
        gpu.synchronize()?;
        self.ids.read(0, chosen);
        // Whatever a batch before left is done with.
        self.waves.clear();
        self.in_flight.clear();
        self.tables_used = 0;
        Ok(())
    }

    /// Looks the experts of a layer's batch up and has those that are not on the GPU brought to host memory.
    ///
    /// # Errors
    /// Ids that are no experts: the router's scores were not finite. A failed read.
    pub fn begin(&mut self, layer: usize, chosen: &[u32]) -> Result<(), ModelError> {
        let count = self.on_device[layer].len();
        self.seen[..count].fill(false);
        for id in chosen {
            let seen = self.seen.get_mut(*id as usize).filter(|_| (*id as usize) < count);
            *seen.ok_or(ModelError::NumericFailure { layer, token: 0 })? = true;
        }
        self.layer = LayerIndex(layer as u32);
        for list in [&mut self.touched, &mut self.hits, &mut self.misses] {
            list.clear();
        }
        let touched = (0..count).filter(|&expert| self.seen[expert]);
        self.touched.extend(touched.map(|expert| ExpertIndex(expert as u32)));
        self.gone.clear();
        let Streamed { tier, touched, hits, misses, gone, .. } = self;
        tier.begin(self.layer, touched, hits, misses, gone);
        self.hits_are_done = self.hits.is_empty();
        self.host_is_done = self.misses.is_empty();
        let free = self.tier.free_slots(self.layer);
        self.wave_misses = if self.misses.len() <= free { free } else { (free / 2).max(1) };
        if !self.host_is_done {
            let begun = self.host.residency.begin_experts(self.layer, &self.misses);
            if let Err(error) = begun {
                self.give_up();
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Queues the way of the next experts to the GPU and makes the layer's table name them, and nothing else of the batch.
    /// `false`: the batch is computed whole.
    ///
    /// # Errors
    /// A failed read or device; the batch is over then.
    pub fn next_wave(&mut self, on: &LayerOfDevice<'_>) -> Result<bool, ModelError> {
        match self.try_next_wave(on) {
            Ok(more) => Ok(more),
            Err(error) => {
                // Copies may still write slots that others are given next.
                let _ = on.gpu.synchronize();
                self.give_up();
                Err(error)
            }
        }
    }

    fn try_next_wave(&mut self, on: &LayerOfDevice<'_>) -> Result<bool, ModelError> {
        self.wave.clear();
        self.take_ready()?;
        self.copy_ready(on)?;
        if !self.hits_are_done {
            self.hits_are_done = true;
            self.wave.append(&mut self.hits);
        }
        if self.wave.is_empty() {
            return Ok(false);
        }
        if let Some(last) = self.in_flight.last() {
            self.copies.hold(on.gpu, last)?;
        }
        self.name_wave(on)?;
        self.waves_done += 1;
        Ok(true)
    }

    /// What has come to host memory, waiting for it if there is nothing else to do.
    fn take_ready(&mut self) -> Result<(), ModelError> {
        if self.host_is_done || !self.ready.is_empty() {
            return Ok(());
        }
        let host = &mut self.host.residency;
        if !host.experts_are_ready()? {
            if !self.hits_are_done {
                return Ok(());
            }
            // Leases may be what the next reads wait for.
            self.in_flight.clear();
        }
        self.host_is_done = !host.next_experts(&mut self.ready)?;
        if self.host_is_done {
            host.end_experts();
        }
        Ok(())
    }

    /// Begins copies of what is ready, as far as there are slots.
    fn copy_ready(&mut self, on: &LayerOfDevice<'_>) -> Result<(), ModelError> {
        while self.wave.len() < self.wave_misses {
            let Some((expert, _)) = self.ready.last() else { break };
            let slot = match self.tier.take(self.layer, *expert) {
                Some(slot) => slot,
                None if !self.wave.is_empty() => break,
                None => {
                    let wave = self.waves.pop_front().expect("released slots are enough for one");
                    self.copies.wait_for(&wave.done)?;
                    self.release(wave.experts);
                    continue;
                }
            };
            let (expert, lease) = self.ready.pop().expect("it was looked at");
            let to = on.plan.slot(on.arena, self.tier.pool(self.layer), slot);
            let parts = on.plan.weights.experts_of[on.layer].expect("the layer has experts").parts;
            let host = &self.host.residency;
            let copies =
                [0, 1, 2].map(|part| (host.range(&lease, part), to.offset(parts[part] as usize)));
            self.bytes_copied += copies.iter().map(|(range, _)| range.len() as u64).sum::<u64>();
            self.in_flight.push(self.copies.upload(lease, copies)?);
            self.experts_copied += 1;
            self.wave.push(expert);
        }
        Ok(())
    }

    /// Makes the layer's table on the GPU name the experts of the wave, and none of the batch's others.
    fn name_wave(&mut self, on: &LayerOfDevice<'_>) -> Result<(), ModelError> {
        let Streamed { tier, on_device, touched, wave, layer, seen, .. } = self;
        touched.iter().for_each(|expert| seen[expert.0 as usize] = false);
        wave.iter().for_each(|expert| seen[expert.0 as usize] = true);
        let (table, pool) = (&mut on_device[on.layer], tier.pool(*layer));
        let mut changed = false;
        for &expert in &*touched {
            let index = expert.0 as usize;
            let address = match tier.slot(*layer, expert).filter(|_| seen[index]) {
                Some(slot) => on.plan.slot(on.arena, pool, slot).address(),
                None => 0,
            };
            changed |= table[index] != address;
            table[index] = address;
        }
        if !changed {
            return Ok(());
        }
        assert!(self.tables_used < self.tables_max, "every wave computes something new");
        let words = 2 * table.len();
        let at = self.tables_used * words;
        self.tables_used += 1;
        self.tables.write(at, table);
        let to = on.arena.activation(on.plan.activations.tables[on.layer]);
        Ok(on.gpu.queue_upload(&self.tables, at..at + words, to)?)
    }

    /// Ends a wave whose kernels are queued.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn end_wave(&mut self, gpu: &Gpu) -> Result<(), ModelError> {
        let is_last = self.host_is_done && self.ready.is_empty() && self.hits_are_done;
        if is_last {
            // The next layer's copies begin after its ids have come, and those come after these kernels.
            let wave = std::mem::take(&mut self.wave);
            for &expert in &wave {
                self.tier.release(self.layer, expert);
            }
            self.wave = wave;
            return Ok(());
        }
        let wave = Wave { experts: self.wave.clone(), done: self.copies.mark(gpu)? };
        self.waves.push_back(wave);
        Ok(())
    }

    /// Ends a batch all of whose kernels are queued.
    pub fn end(&mut self) {
        while let Some(wave) = self.waves.pop_front() {
            self.release(wave.experts);
        }
    }

    fn release(&mut self, experts: Vec<ExpertIndex>) {
        for expert in experts {
            self.tier.release(self.layer, expert);
        }
    }

    /// Ends a batch that failed: what did not come is not here.
    fn give_up(&mut self) {
        self.host.residency.end_experts();
        self.ready.clear();
        self.end();
        for &expert in &self.touched {
            match self.tier.slot(self.layer, expert) {
                Some(_) => {
                    self.tier.release(self.layer, expert);
                }
                None => self.tier.forget(self.layer, expert),
            }
        }
        (self.hits_are_done, self.host_is_done) = (true, true);
    }
}
