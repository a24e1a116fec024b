//! The source of a dense model's sub-layers that are not in VRAM. They come from host memory, or from the disk behind it,
//! and go through a ring in VRAM or to the CPU.
//!
//! The order of sub-layers never changes. They are therefore taken ahead as far as there is room, and each pass
//! continues into the next. A taken sub-layer is leased in host memory. Its parts are then copied beside the kernels,
//! or it is kept for the CPU. Kernels and copies wait for each other on the GPU. Within a pass, the host waits only
//! for the disk and for the inputs of sub-layers that the CPU computes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use forebay_compute::Cpu;
use forebay_cuda::{CopyStream, CudaError, DevicePtr, Gpu, InFlight, Marker, Pinned};
use forebay_stream::{Lease, Residency};

use super::cpu_sub_layers::{CpuSubLayers, SubLayerMatrices};
use super::pass_times::PassClock;
use super::ring::Ring;
use crate::ModelError;
use crate::backend::Step;
use crate::sharing::{SubLayerPlan, SubLayerRates, feed_forward_of};
use crate::statistics::{DeviceSubLayers, PassTimes};
use crate::weights::PartMatrix;

/// Host memory of the sub-layers that are not in VRAM. Fields are dropped in order, so memory is unpinned only after
/// its leases have ended.
pub struct HostSubLayers {
    pub residency: Residency,
    /// Pins all memory of `residency`, because the GPU copies from it.
    pub pinned: Pinned,
    /// Bytes of that memory in huge pages; `None` if the system does not report them.
    pub huge_page_bytes: Option<u64>,
    /// The CPU that computes some sub-layers, if the plan assigns it any.
    pub cpu: Option<Cpu>,
    /// Rates that decided which sub-layers the CPU computes.
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

/// A sub-layer that was taken ahead.
struct Taken {
    lease: SharedLease,
    /// Ring offsets of the parts whose copies have started; `None` if the CPU computes the sub-layer.
    parts: Option<Vec<u64>>,
    /// Number of the sub-layer's last copy.
    last_copy: u64,
}

/// A sub-layer that is not in VRAM.
struct Outside {
    /// Number of the sub-layer in the model.
    sub_layer: usize,
    /// Parts of the layer's dense block that belong to the sub-layer.
    parts: Range<usize>,
    bytes: u64,
    on_cpu: bool,
}

/// A ring in VRAM for the sub-layers that are in host memory.
pub struct LayerRing {
    // Dropped before the memory that the copies read.
    in_flight: VecDeque<InFlight<SharedLease>>,
    /// Number of copies that have finished. This is also the number of the first copy in flight.
    copies_done: u64,
    /// Sub-layers taken ahead, in the order of execution, without the current one.
    taken: VecDeque<Taken>,
    current: Option<Taken>,
    /// Number of the last copy that queued kernels wait for; `None` if the host has waited for it.
    held: Option<u64>,
    host: Residency,
    _pinned: Pinned,
    cpu: Option<CpuSubLayers>,
    copies: CopyStream,
    ring: Ring<Marker>,
    ring_at: DevicePtr<u8>,
    outside: Vec<Outside>,
    /// Index in `outside` of the current or next sub-layer, counted from the start of the pass.
    executed: usize,
    /// Index of the next sub-layer to take, counted from the start of the pass. It continues into the next pass.
    next: usize,
    /// True if the CPU takes part in this pass.
    few: bool,
    /// True if the CPU probably takes part in the next pass.
    few_next: bool,
    clock: PassClock,
    counts: DeviceSubLayers,
}

impl LayerRing {
    /// Creates the state for the sub-layers that `plan` does not place in VRAM, with the ring at `ring_at`. The CPU
    /// takes part in passes of up to `few` tokens of `hidden` values, with feed-forwards up to `width` wide.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn new(
        gpu: &Gpu,
        plan: &SubLayerPlan,
        ring_at: DevicePtr<u8>,
        host: HostSubLayers,
        (few, hidden, width): (usize, usize, usize),
    ) -> Result<LayerRing, CudaError> {
        let HostSubLayers { residency: host, pinned, huge_page_bytes, cpu, planned } = host;
        let outside = plan.outside().map(|(sub_layer, of)| Outside {
            sub_layer,
            parts: of.parts.clone(),
            bytes: of.bytes,
            on_cpu: of.on_cpu,
        });
        Ok(LayerRing {
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

    /// Returns the CPU, if it computes sub-layers.
    pub fn cpu(&self) -> Option<&Cpu> {
        self.cpu.as_ref().map(CpuSubLayers::cpu)
    }

    pub fn statistics(&self) -> DeviceSubLayers {
        self.counts.clone()
    }

    /// Starts a pass over all sub-layers. `few` says that the pass has few tokens, so the CPU takes part. `few_next`
    /// predicts the same of the next pass, whose first sub-layers are taken during this one.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn begin(&mut self, gpu: &Gpu, few: bool, few_next: bool) -> Result<(), ModelError> {
        self.clock = PassClock::started();
        let all = self.outside.len();
        match self.executed == all && self.next >= all {
            true => self.next -= all,
            // The previous pass failed.
            false if self.executed > 0 || self.current.is_some() => self.give_up(gpu)?,
            false => {}
        }
        self.executed = 0;
        (self.few, self.few_next) = (few, few_next);
        // Sub-layers that were taken for the other kind of pass are taken again, and so are all after them.
        let is_right =
            |(taken, outside): (&Taken, &Outside)| taken.parts.is_none() == (few && outside.on_cpu);
        let right = self.taken.iter().zip(&self.outside).take_while(|pair| is_right(*pair)).count();
        let wrong = self.taken.drain(right..);
        let parts: usize = wrong.filter_map(|taken| taken.parts).map(|parts| parts.len()).sum();
        self.ring.forget_last(parts);
        self.next = self.taken.len();
        Ok(())
    }

    /// Ends the pass: waits for all queued work.
    ///
    /// # Errors
    /// Returns an error if a driver call or queued work failed.
    pub fn end(&mut self, gpu: &Gpu) -> Result<(), ModelError> {
        self.wait_for_gpu(gpu)?;
        let times =
            if self.few { &mut self.counts.few_tokens } else { &mut self.counts.many_tokens };
        self.clock.finish(times);
        Ok(())
    }

    /// Waits for all queued work. Waits first for the copies that kernels depend on, so that the two waits are
    /// counted separately.
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

    /// Returns where the norm before `sub_layer` writes its input and where the norm after it reads its output.
    /// Returns `None` unless the CPU computes the sub-layer in this pass.
    pub fn exchanged(&self, sub_layer: usize) -> Option<[DevicePtr<f32>; 2]> {
        let outside = self.outside.get(self.executed)?;
        let cpu = self.cpu.as_ref()?;
        let is_its = self.few && outside.on_cpu && outside.sub_layer == sub_layer;
        is_its.then(|| [cpu.inputs(), cpu.outputs()])
    }

    /// Returns true if `sub_layer` is not in VRAM, so it is the current or next one of those in host memory.
    ///
    /// # Panics
    /// Panics if sub-layers are not used in the order of execution.
    fn is_outside(&self, sub_layer: usize) -> bool {
        let next = self.outside.get(self.executed).map_or(usize::MAX, |next| next.sub_layer);
        assert!(sub_layer <= next, "sub-layers run in order");
        sub_layer == next
    }

    /// Makes `sub_layer` the current one, unless it is in VRAM. Kernels queued from now on read it in the ring at
    /// [`LayerRing::part`], or the CPU reads it in host memory.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    ///
    /// # Panics
    /// Panics if sub-layers are not fetched in the order of execution.
    pub fn fetch(&mut self, gpu: &Gpu, sub_layer: usize) -> Result<(), ModelError> {
        if !self.is_outside(sub_layer) {
            return Ok(());
        }
        self.prefetch()?;
        if self.taken.is_empty() {
            // The read may need a slot of host memory that a copy still reads.
            self.clock.waits_for_disk();
            self.finish_copies(u64::MAX)?;
            let lease = self.host.dense(self.executed as u32)?;
            self.clock.goes_on();
            self.take(lease);
            self.prefetch()?;
        }
        let fetched = self.taken.pop_front().expect("it was taken");
        if let Some(parts) = &fetched.parts {
            assert_eq!(
                parts.len(),
                self.outside[self.executed].parts.len(),
                "the ring holds a sub-layer"
            );
            self.held = Some(fetched.last_copy);
            // Copies finish in order, so the last one is enough. It may have finished already.
            let ahead = fetched.last_copy.checked_sub(self.copies_done);
            if let Some(last) = ahead.and_then(|ahead| self.in_flight.get(ahead as usize)) {
                self.copies.hold(gpu, last)?;
            }
        }
        self.current = Some(fetched);
        Ok(())
    }

    /// Returns the VRAM address of a part of the layer's dense block, which belongs to the current sub-layer.
    ///
    /// # Panics
    /// Panics if the CPU computes the current sub-layer, or there is none.
    pub fn part(&self, part: usize) -> DevicePtr<u8> {
        let first = self.outside[self.executed].parts.start;
        let parts = self.current.as_ref().and_then(|sub_layer| sub_layer.parts.as_ref());
        let parts = parts.expect("the current sub-layer is in the ring");
        self.ring_at.offset(parts[part - first] as usize)
    }

    /// Releases `sub_layer`, whose kernels are queued, unless it is in VRAM. Its place in the ring is free once they have
    /// run.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub fn release(&mut self, gpu: &Gpu, sub_layer: usize) -> Result<(), ModelError> {
        if !self.is_outside(sub_layer) {
            return Ok(());
        }
        if let Some(parts) = self.current.take().and_then(|sub_layer| sub_layer.parts) {
            self.ring.release(parts.len(), self.copies.mark(gpu)?);
        }
        self.executed += 1;
        self.prefetch()
    }

    /// Computes a layer's fetched feed-forward (gate, up and down) on the CPU, if it is the CPU's in this pass. Returns
    /// the address of its output, or `None` if kernels compute it.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    ///
    /// # Panics
    /// Panics if the feed-forward is the CPU's and was not fetched.
    pub fn compute_on_cpu(
        &mut self,
        gpu: &Gpu,
        step: &Step<'_>,
        matrices: [PartMatrix; 3],
    ) -> Result<Option<DevicePtr<f32>>, ModelError> {
        let Some([_, out]) = self.exchanged(feed_forward_of(step.layer)) else { return Ok(None) };
        self.wait_for_gpu(gpu)?;
        let Outside { parts, bytes, .. } = &self.outside[self.executed];
        self.counts.bytes_on_cpu += bytes;
        let of_block =
            |matrix: PartMatrix| PartMatrix { part: matrix.part - parts.start, ..matrix };
        let [gate, up, down] = matrices.map(of_block);
        let LayerRing { cpu, host, current, clock, .. } = self;
        let (Some(cpu), Some(sub_layer)) = (cpu, current) else {
            panic!("the sub-layer was fetched")
        };
        assert!(sub_layer.parts.is_none(), "the CPU computes the current sub-layer");
        clock.computes();
        cpu.compute(
            host,
            &sub_layer.lease.0,
            &SubLayerMatrices { gate, up, down, gating: step.layer_weights().gatings.others },
            step.count,
        )?;
        clock.goes_on();
        Ok(Some(out))
    }

    /// Takes as many of the next sub-layers as there is room for. Never waits.
    fn prefetch(&mut self) -> Result<(), ModelError> {
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

    /// Takes the next sub-layer, which the caller has leased.
    fn take(&mut self, lease: Lease) {
        let all = self.outside.len();
        let few = if self.next < all { self.few } else { self.few_next };
        let on_cpu = few && self.outside[self.next % all].on_cpu;
        let lease = SharedLease(Arc::new(lease));
        self.taken.push_back(Taken { lease, parts: (!on_cpu).then(Vec::new), last_copy: 0 });
        self.next += 1;
    }

    /// Starts copies of the sub-layer that was taken last. Returns true if all of them have started, false if the
    /// ring is full.
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

    /// Waits for the GPU and drops all sub-layers that were taken.
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
