//! Loads to a device through pinned memory.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Instant;

use tracing::field::Empty;

use super::filling::Filling;
use super::landing::Landing;
use super::remote::{Outlet, Ring, Upload};
use super::shared::Shared;
use super::upload_plan::UploadPlan;
use super::{CopyPath, LoadOptions, LoadStatistics, PROGRESS_PAUSE, Reader, process_seconds};
use crate::arena::SlotBuffer;
use crate::engine::ReadEngine;
use crate::error::{ReadError, StoreError};
use crate::files::FileSet;
use crate::page_cache::CacheProbe;

/// Most bytes of the slots that copy threads fill. More would not be faster: the slots would not stay in the processor's cache, and
/// pinning them takes time.
pub const COPIED_BYTES: usize = 32 << 20;

/// What a load to a device needs later than at its beginning.
pub trait ReadSide {
    /// Makes further slots for copies, and returns them.
    ///
    /// # Errors
    /// Returns an error if there is not enough memory.
    fn more_copied(&mut self) -> Result<Vec<SlotBuffer>, StoreError>;

    /// Makes the engine and the slots that it reads into, if they are not there yet.
    ///
    /// # Errors
    /// Returns an error if there is not enough memory or if the engine does not work here.
    fn open(&mut self) -> Result<(&mut dyn ReadEngine, &mut Vec<SlotBuffer>), StoreError>;
}

impl ReadSide for (&mut (dyn ReadEngine + '_), &mut Vec<SlotBuffer>) {
    fn more_copied(&mut self) -> Result<Vec<SlotBuffer>, StoreError> {
        Ok(Vec::new())
    }

    fn open(&mut self) -> Result<(&mut dyn ReadEngine, &mut Vec<SlotBuffer>), StoreError> {
        Ok((self.0, self.1))
    }
}

/// Loads blocks to a device. Copies from the page cache go through some slots, and reads of the engine through others, so that
/// neither waits for the other.
pub struct Uploader<'a> {
    /// The files that the plan refers to, with the checksums to verify against.
    pub files: &'a FileSet,
    pub options: LoadOptions,
    /// Slots that copy threads fill at first. It may be empty if there are none of these threads. All slots for copies are here
    /// after a load that did not fail.
    pub copied: &'a mut Vec<SlotBuffer>,
    /// Further slots, and what reads the rest. They are made while the copy threads already copy, because making memory and pinning
    /// it takes time. The engine is opened only if a piece is not cached, or if the copies take long. It must be as that of a
    /// [`Loader`](super::Loader).
    pub reads: &'a mut dyn ReadSide,
}

impl Uploader<'_> {
    /// Loads everything in `plan`, which must have been made for these files. Every slot must have room for
    /// [`UploadPlan::slot_bytes`]. `progress` is called as in [`Loader::load`], and may stop the load.
    ///
    /// # Errors
    /// Returns the first read that failed ([`StoreError::Block`]), an error of the device, a failure of the engine as a whole, or
    /// [`StoreError::Interrupted`] if `progress` stopped the load. No copy is running when it returns.
    ///
    /// # Panics
    /// Panics if there are copy threads, but no slot for them.
    pub fn upload(
        self,
        plan: &UploadPlan,
        upload: &dyn Upload,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<LoadStatistics, StoreError> {
        let (started, processor, bytes) = (Instant::now(), process_seconds(), plan.bytes());
        let (read_bytes, cached_bytes) = (Empty, Empty);
        let span = tracing::debug_span!("fill", bytes, read_bytes, cached_bytes).entered();
        let Uploader { files, options, copied, reads } = self;
        let copy_threads = options.copy_threads;
        assert!(copy_threads == 0 || !copied.is_empty(), "copies to a device go through slots");
        let slot_bytes =
            |slots: &[SlotBuffer]| slots.iter().map(|slot| slot.len() as u64).sum::<u64>();
        let mut staging_bytes = slot_bytes(copied);
        let (pieces, copies) = plan.cut();
        let shared = Shared::new(pieces, options, files);
        let probe = (copy_threads > 0).then(|| CacheProbe::new(files, None));
        let mut progress = || shared.tell(bytes, progress);
        progress();
        let copied_ring = Ring::new(std::mem::take(copied), upload);
        let filling = Filling::new(&shared, files, &copied_ring, &copies, copy_threads);
        let mut read_ring = None;
        std::thread::scope(|scope| {
            for _ in 0..options.probe_threads.max(1) {
                scope.spawn(|| shared.probe_thread(probe.as_ref()));
            }
            for _ in 0..copy_threads {
                scope.spawn(|| filling.run());
            }
            match reads.more_copied() {
                Ok(more) => {
                    staging_bytes += slot_bytes(&more);
                    more.into_iter().for_each(|slot| copied_ring.give_back(slot));
                }
                Err(error) => return shared.stop(error),
            }
            loop {
                match shared.needs_engine(PROGRESS_PAUSE) {
                    Some(true) => break,
                    Some(false) => return,
                    None => progress(),
                }
            }
            let (engine, slots) = match reads.open() {
                Ok(opened) => opened,
                Err(error) => return shared.stop(error),
            };
            staging_bytes += slot_bytes(slots);
            let ring = Ring::new(std::mem::take(slots), upload);
            let (ring, _) = read_ring.insert((ring, slots));
            let mut copy_path = CopyPath::Remote(Outlet::new(ring, &copies));
            let mut reader = Reader {
                shared: &shared,
                landing: Landing::new(files, engine.compares()),
                engine,
                files,
                engine_bytes: options.engine_bytes.max(1),
                in_place: HashMap::new(),
            };
            let read = reader.read(&mut copy_path, &mut progress);
            if let Err(error) = read {
                shared.stop(error);
            }
            copy_path.close();
        });
        // Drain both before returning any error, so that no copy is running then.
        let (read, back) = read_ring.map(|(ring, slots)| (ring.drain(), slots)).unzip();
        let drained = copied_ring.drain();
        // Copy threads may end after the last report.
        progress();
        let (answers, totals) = shared.finish()?;
        if let (Some(read), Some(back)) = (read, back) {
            back.extend(read?);
        }
        copied.extend(drained?);
        let failures = answers.into_iter().enumerate().filter_map(|(index, answer)| {
            let lost = ReadError::Cancelled { block: plan.label(index) };
            answer.map_or(Some(lost), |answer| answer.result.err())
        });
        // Prefer the failure to the cancellations that it caused.
        if let Some(error) = failures.min_by_key(|e| matches!(e, ReadError::Cancelled { .. })) {
            return Err(error.into());
        }
        span.record("read_bytes", totals.engine_bytes);
        span.record("cached_bytes", totals.cached_bytes);
        Ok(LoadStatistics {
            bytes,
            seconds: started.elapsed().as_secs_f64(),
            cpu_seconds: process_seconds() - processor,
            copy_threads,
            staging_bytes,
            ..totals
        })
    }
}
