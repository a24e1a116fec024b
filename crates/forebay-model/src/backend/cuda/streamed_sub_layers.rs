//! Units of a dense model on their way: from host memory, or from the disk behind it, through a ring in VRAM or to the CPU.
//!
//! The order never changes, so units are taken ahead as far as there is room, each pass going on into the next: leased in
//! host memory one after the other, then copied part by part beside the kernels, or kept for the CPU. Whatever waits for
//! what does so on the GPU: the host waits for the disk, and for the inputs of what the CPU computes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use forebay_compute::{Cpu, Gating};
use forebay_cuda::{CopyStream, CudaError, DevicePtr, Gpu, InFlight, Marker, Pinned};
use forebay_stream::{Lease, Residency};

use super::cpu_sub_layers::{CpuSubLayers, SubLayerMatrices};
use super::pass_times::PassClock;
use super::ring::Ring;
use crate::ModelError;
use crate::sharing::{SubLayerPlan, SubLayerRates};
use crate::statistics::{DeviceSubLayers, PassTimes};
use crate::weights::PartMatrix;

/// Where units live that are not in VRAM. Fields are dropped in order: nothing is unpinned that is still leased.
pub struct HostSubLayers {
    pub residency: Residency,
    /// All of its memory, that the GPU copies from.
    pub pinned: Pinned,
    /// Of it in huge pages; `None` where the system does not tell.
    pub huge_page_bytes: Option<u64>,
    /// For the units that are the CPU's, if any are.
    pub cpu: Option<Cpu>,
    /// What decided which are.
    pub planned: Option<SubLayerRates>,
}

/// A lease that several copies share.
#[derive(Clone)]
struct SharedLease(Arc<Lease>);

impl AsRef<[u8]> for SharedLease {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

/// A unit that was taken ahead.
struct Taken {
    lease: SharedLease,
    /// Where its parts are in the ring, those whose copies have begun; `None`: it is the CPU's.
    parts: Option<Vec<u64>>,
    /// The number of the last copy.
    last_copy: u64,
}

/// A unit that does not stay in VRAM.
struct Outside {
    /// Number of the unit.
    sub_layer: usize,
    /// Of the layer's dense block.
    parts: Range<usize>,
    bytes: u64,
    on_cpu: bool,
}

/// Units of one model on their way.
pub struct StreamedSubLayers {
    // Before what they copy from.
    in_flight: VecDeque<InFlight<SharedLease>>,
    /// Copies that were waited for: the number of the first one in flight.
    copies_done: u64,
    /// In the order of execution, the unit at hand not among them.
    taken: VecDeque<Taken>,
    current: Option<Taken>,
    /// The last copy that kernels which are queued wait for, unless it was waited for.
    held: Option<u64>,
    host: Residency,
    _pinned: Pinned,
    cpu: Option<CpuSubLayers>,
    copies: CopyStream,
    ring: Ring<Marker>,
    ring_at: DevicePtr<u8>,
    outside: Vec<Outside>,
    /// Which of `outside` is at hand or next, and which is taken next, counted from the beginning of the pass.
    executed: usize,
    next: usize,
    /// Whether the CPU takes part in the pass, and probably in the one after.
    few: bool,
    few_next: bool,
    clock: PassClock,
    counts: DeviceSubLayers,
}

impl StreamedSubLayers {
    /// For what `plan` has no place for in VRAM, with its ring at `ring_at`. The CPU takes part in passes of up to `few`
    /// tokens of `hidden` values, with feed-forwards up to `width` wide.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn new(
        gpu: &Gpu,
        plan: &SubLayerPlan,
        ring_at: DevicePtr<u8>,
        host: HostSubLayers,
        (few, hidden, width): (usize, usize, usize),
    ) -> Result<StreamedSubLayers, CudaError> {
        let HostSubLayers { residency: host, pinned, huge_page_bytes, cpu, planned } = host;
        let outside = plan.outside().map(|(sub_layer, of)| Outside {
            sub_layer,
            parts: of.parts.clone(),
            bytes: of.bytes,
            on_cpu: of.on_cpu,
        });
        Ok(StreamedSubLayers {
            in_flight: VecDeque::new(),
            copies_done: 0,
            taken: VecDeque::new(),
            current: None,
            held: None,
            host,
            cpu: cpu.map(|cpu| CpuSubLayers::new(gpu, cpu, few, hidden, width)).transpose()?,
            copies: gpu.copy_stream()?,
            ring: Ring::new(plan.ring_bytes),
            ring_at,
            outside: outside.collect(),
            executed: 0,
            next: 0,
            few: false,
            few_next: false,
            clock: PassClock::default(),
            counts: DeviceSubLayers {
                placement: plan.placement(),
                pinned_bytes: pinned.bytes() as u64,
                huge_page_bytes,
                bytes_copied: 0,
                bytes_on_cpu: 0,
                planned,
                few_tokens: PassTimes::default(),
                many_tokens: PassTimes::default(),
            },
            _pinned: pinned,
        })
    }

    pub fn host(&self) -> &Residency {
        &self.host
    }

    pub fn host_mut(&mut self) -> &mut Residency {
        &mut self.host
    }

    /// The CPU, if it takes part.
    pub fn cpu(&self) -> Option<&Cpu> {
        self.cpu.as_ref().map(CpuSubLayers::cpu)
    }

    pub fn statistics(&self) -> DeviceSubLayers {
        self.counts.clone()
    }

    /// Begins a pass over all units, of `few` tokens or of more; what is taken beyond its end is for a pass of few tokens if
    /// `few_next` says so.
    ///
    /// # Errors
    /// A failed device.
    pub fn begin(&mut self, gpu: &Gpu, few: bool, few_next: bool) -> Result<(), ModelError> {
        self.clock = PassClock::started();
        let all = self.outside.len();
        match self.executed == all && self.next >= all {
            true => self.next -= all,
            // The pass before failed.
            false if self.executed > 0 || self.current.is_some() => self.give_up(gpu)?,
            false => {}
        }
        self.executed = 0;
        (self.few, self.few_next) = (few, few_next);
        // What was taken ahead for another kind of pass is taken anew, and so is all behind it.
        let is_right =
            |(taken, outside): (&Taken, &Outside)| taken.parts.is_none() == (few && outside.on_cpu);
        let right = self.taken.iter().zip(&self.outside).take_while(|pair| is_right(*pair)).count();
        let wrong = self.taken.drain(right..);
        let parts: usize = wrong.filter_map(|taken| taken.parts).map(|parts| parts.len()).sum();
        self.ring.forget_last(parts);
        self.next = self.taken.len();
        Ok(())
    }

    /// Ends the pass: waits for all that is queued.
    ///
    /// # Errors
    /// What went wrong in queued work.
    pub fn end(&mut self, gpu: &Gpu) -> Result<(), ModelError> {
        self.wait_for_gpu(gpu)?;
        let times =
            if self.few { &mut self.counts.few_tokens } else { &mut self.counts.many_tokens };
        self.clock.finish(times);
        Ok(())
    }

    /// Waits for all that is queued, first for the copies that kernels wait for: the two are told apart.
    fn wait_for_gpu(&mut self, gpu: &Gpu) -> Result<(), ModelError> {
        if let Some(last) = self.held.take() {
            self.clock.waits_for_copies();
            self.finish_copies(last)?;
        }
        self.clock.waits_for_gpu();
        gpu.synchronize()?;
        self.clock.goes_on();
        Ok(())
    }

    /// Where the norm before `unit` writes its input and the norm behind it finds its output, if the CPU computes it in this
    /// pass.
    pub fn exchanged(&self, sub_layer: usize) -> Option<[DevicePtr<f32>; 2]> {
        let outside = self.outside.get(self.executed)?;
        let cpu = self.cpu.as_ref()?;
        let is_its = self.few && outside.on_cpu && outside.sub_layer == sub_layer;
        is_its.then(|| [cpu.inputs(), cpu.outputs()])
    }

    /// Makes the unit the one at hand: kernels queued from now on find it in VRAM at [`StreamedSubLayers::part`], or the CPU finds
    /// it in host memory.
    ///
    /// # Errors
    /// A failed read or device.
    ///
    /// # Panics
    /// When it is not the next that VRAM does not hold.
    pub fn enter(&mut self, gpu: &Gpu, sub_layer: usize) -> Result<(), ModelError> {
        assert_eq!(self.outside[self.executed].sub_layer, sub_layer, "sub-layers run in order");
        self.feed()?;
        if self.taken.is_empty() {
            // Whatever waits to be read may wait for a slot of host memory that is copied from.
            self.clock.waits_for_disk();
            self.finish_copies(u64::MAX)?;
            let lease = self.host.dense(self.executed as u32)?;
            self.clock.goes_on();
            self.take(lease);
            self.feed()?;
        }
        let entered = self.taken.pop_front().expect("it was taken");
        if let Some(parts) = &entered.parts {
            assert_eq!(
                parts.len(),
                self.outside[self.executed].parts.len(),
                "the ring holds a sub-layer"
            );
            self.held = Some(entered.last_copy);
            // Copies are done in their order, so the last one is enough; or it is done already.
            let ahead = entered.last_copy.checked_sub(self.copies_done);
            if let Some(last) = ahead.and_then(|ahead| self.in_flight.get(ahead as usize)) {
                self.copies.hold(gpu, last)?;
            }
        }
        self.current = Some(entered);
        Ok(())
    }

    /// Where a part of the layer's dense block is in VRAM, of the unit at hand.
    ///
    /// # Panics
    /// When it is the CPU's, or none is at hand.
    pub fn part(&self, part: usize) -> DevicePtr<u8> {
        let first = self.outside[self.executed].parts.start;
        let parts = self.current.as_ref().and_then(|sub_layer| sub_layer.parts.as_ref());
        let parts = parts.expect("the current sub-layer is in the ring");
        self.ring_at.offset(parts[part - first] as usize)
    }

    /// Ends the unit at hand, whose kernels are queued.
    ///
    /// # Errors
    /// A failed read or device.
    pub fn leave(&mut self, gpu: &Gpu) -> Result<(), ModelError> {
        if let Some(parts) = self.current.take().and_then(|sub_layer| sub_layer.parts) {
            self.ring.release(parts.len(), self.copies.mark(gpu)?);
        }
        self.executed += 1;
        self.feed()
    }

    /// The CPU computes the unit at hand for `tokens` rows; see [`StreamedSubLayers::exchanged`].
    ///
    /// # Errors
    /// A failed read or device.
    ///
    /// # Panics
    /// When the unit is not the CPU's.
    pub fn compute_on_cpu(
        &mut self,
        gpu: &Gpu,
        matrices: [PartMatrix; 3],
        gating: Gating,
        tokens: usize,
    ) -> Result<(), ModelError> {
        self.wait_for_gpu(gpu)?;
        let Outside { parts, bytes, .. } = &self.outside[self.executed];
        self.counts.bytes_on_cpu += bytes;
        let of_block =
            |matrix: PartMatrix| PartMatrix { part: matrix.part - parts.start, ..matrix };
        let [gate, up, down] = matrices.map(of_block);
        let StreamedSubLayers { cpu, host, current, clock, .. } = self;
        let (Some(cpu), Some(sub_layer)) = (cpu, current) else {
            panic!("a sub-layer was entered")
        };
        assert!(sub_layer.parts.is_none(), "the CPU computes the current sub-layer");
        clock.computes();
        cpu.compute(
            host,
            &sub_layer.lease.0,
            &SubLayerMatrices { gate, up, down, gating },
            tokens,
        )?;
        clock.goes_on();
        Ok(())
    }

    /// Takes as many of the next units as there is room for. Never waits.
    fn feed(&mut self) -> Result<(), ModelError> {
        while let Some(oldest) = self.in_flight.front() {
            if !oldest.is_done()? {
                break;
            }
            self.in_flight.pop_front();
            self.copies_done += 1;
        }
        while self.copy_newest()? && self.next < self.executed + self.outside.len() {
            let index = self.next % self.outside.len();
            match self.host.dense_if_here(index as u32)? {
                Some(lease) => self.take(lease),
                None => return Ok(()),
            }
        }
        Ok(())
    }

    /// Takes the next unit, which is leased.
    fn take(&mut self, lease: Lease) {
        let all = self.outside.len();
        let few = if self.next < all { self.few } else { self.few_next };
        let on_cpu = few && self.outside[self.next % all].on_cpu;
        let lease = SharedLease(Arc::new(lease));
        self.taken.push_back(Taken { lease, parts: (!on_cpu).then(Vec::new), last_copy: 0 });
        self.next += 1;
    }

    /// Begins copies of the unit that was taken last; whether all of them have begun: the ring had room.
    fn copy_newest(&mut self) -> Result<bool, ModelError> {
        let Some(newest) = self.taken.back_mut() else { return Ok(true) };
        let Some(parts) = &mut newest.parts else { return Ok(true) };
        let outside = &self.outside[(self.next - 1) % self.outside.len()];
        while parts.len() < outside.parts.len() {
            let range = self.host.range(&newest.lease.0, parts.len());
            let Some(place) = self.ring.take(range.len() as u64) else { return Ok(false) };
            if let Some(readers) = place.after {
                self.copies.wait_for(&readers)?;
            }
            self.counts.bytes_copied += range.len() as u64;
            newest.last_copy = self.copies_done + self.in_flight.len() as u64;
            let copy = [(range, self.ring_at.offset(place.at as usize))];
            self.in_flight.push_back(self.copies.upload(newest.lease.clone(), copy)?);
            parts.push(place.at);
        }
        Ok(true)
    }

    /// Waits for copies up to number `last`.
    fn finish_copies(&mut self, last: u64) -> Result<(), ModelError> {
        while self.copies_done <= last
            && let Some(oldest) = self.in_flight.pop_front()
        {
            self.copies_done += 1;
            oldest.finish()?;
        }
        Ok(())
    }

    /// Forgets all units on their way, when nothing uses them any more.
    fn give_up(&mut self, gpu: &Gpu) -> Result<(), ModelError> {
        gpu.synchronize()?;
        self.finish_copies(u64::MAX)?;
        (self.current, self.held) = (None, None);
        self.taken.clear();
        self.ring.clear();
        (self.executed, self.next) = (0, 0);
        Ok(())
    }
}
