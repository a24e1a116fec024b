//! Weights in VRAM for use by a caller outside this crate.

use std::ops::ControlFlow;
use std::time::Instant;

use forebay_cuda::{CallersContext, DevicePtr, Gpu, WeightsPool, compact_workspace_bytes};
use forebay_format::{Catalog, TensorInfo, TensorType};
use forebay_store::{BlockLabel, EngineInfo, Extent, IoKind, LoadStatistics, UploadPart};

use super::device::{MARGIN, fits, timed, whole_pool};
use super::hold::{
    DEVICE_ALIGNMENT, HeldTensor, HeldWeights, HoldRequest, Memory, by_name, dense_stride,
    pinned_bytes_is,
};
use super::{
    DeviceRequest, GpuRing, RingMemory, RingRequest, Sources, as_read, contents, name_of, named,
    poison, read_back,
};
use crate::doctor::ReadChoice;
use crate::load::error::LoadError;

/// Device memory of weights. `None` only while the memory is being freed.
pub(crate) struct Pool(Option<WeightsPool>);

impl Pool {
    pub(super) fn new(pool: WeightsPool) -> Pool {
        Pool(Some(pool))
    }

    pub fn bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |pool| pool.bytes() as u64)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // The memory may be dropped on a thread of another library that has a CUDA context of its own.
        let _context = CallersContext::remember();
        drop(self.0.take());
    }
}

/// A GPU and a ring that loads of the same files with the same options use one after the other.
pub(crate) struct KeptRing {
    pub(super) ring: RingMemory,
    // Dropped after the ring, which uses it.
    pub(super) gpu: Gpu,
}

/// A load to new device memory.
pub(super) struct DeviceFill<'a> {
    pub sources: &'a Sources,
    pub io: IoKind,
    pub choice: &'a ReadChoice,
    pub request: DeviceRequest,
    /// What is read, with addresses that count from 0.
    pub parts: Vec<UploadPart>,
    /// Bytes of memory for all parts.
    pub pool_bytes: usize,
    /// Bytes of memory that must be free beside it.
    pub workspace_bytes: usize,
    /// Names of what is read, for errors.
    pub contents: &'a [(String, Extent)],
    /// True if loads of these files follow each other, and share a ring.
    pub is_for_several: bool,
}

/// Device memory that holds what was read.
pub(super) struct Filled {
    pub pool: WeightsPool,
    /// What the next load of the same files can use.
    pub ring: Option<RingMemory>,
    pub statistics: LoadStatistics,
    /// `None` if everything was in the page cache.
    pub engine: Option<EngineInfo>,
    pub setup_seconds: f64,
    pub pinned_bytes: u64,
}

impl DeviceFill<'_> {
    /// Allocates memory and reads all parts into it, through the ring that the load before has left, if there is one. No copy is
    /// queued when this returns.
    ///
    /// # Errors
    /// Returns an error if the parts do not fit or the GPU cannot be used, or if a read fails or `progress` ended it.
    pub fn run(
        mut self,
        gpu: &Gpu,
        kept: Option<RingMemory>,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Filled, LoadError> {
        let (files, request, pool_bytes) = (&self.sources.checked, self.request, self.pool_bytes);
        let needed_bytes = pool_bytes.saturating_add(self.workspace_bytes) as u64;
        fits(gpu, request.vram_bytes, needed_bytes)?;
        // Decoding takes as much memory as the ring, whose slots may be a little larger than asked for.
        let with_stages = needed_bytes.saturating_add(2 * request.ring_bytes as u64);
        let gpu_decodes = fits(gpu, request.vram_bytes, with_stages).is_ok();
        let DeviceRequest { piece_bytes, ring_bytes, .. } = request;
        let through = RingRequest {
            piece_bytes,
            ring_bytes,
            gpu_decodes,
            is_for_several: self.is_for_several,
            ..RingRequest::new(files, self.io, self.choice)
        };
        let started = Instant::now();
        let pool = whole_pool(gpu, pool_bytes)?;
        let first = pool.ptr().address();
        self.parts.iter_mut().for_each(|part| part.to += first);
        let memory = &[pool.ptr()];
        let mut ring = GpuRing::open_with(kept, gpu, through, &self.parts, memory)?;
        let pinned_bytes_max = ring.pinned_bytes_max();
        if pinned_bytes_max > ring_bytes as u64 {
            // A chunk with a single checksum is read as a whole, and the ring has at least four slots of that size.
            return Err(pinned_bytes_is(ring_bytes, pinned_bytes_max as usize));
        }
        if request.check {
            poison(gpu, &self.parts, memory)?;
        }
        let setup_seconds = started.elapsed().as_secs_f64();
        let filled = ring.fill_while(progress);
        let statistics = filled.map_err(|error| named(error, self.contents, files))?;
        // Before anything is decoded: then memory no longer has the bytes of the files.
        if request.check {
            let name = |extent: &Extent| name_of(self.contents, extent);
            let parts = as_read(&self.parts);
            read_back(gpu, &self.sources.unrecorded, parts, memory, &name)?;
        }
        let (engine, pinned_bytes) = (ring.engine(), ring.pinned_bytes());
        let ring = ring.into_memory();
        Ok(Filled { pool, ring, statistics, engine, setup_seconds, pinned_bytes })
    }
}

/// Loads `wanted` tensors to a GPU, as [`super::hold()`] does.
pub(crate) fn hold(
    catalog: Catalog,
    wanted: &[TensorInfo],
    sources: &Sources,
    request: &HoldRequest,
    device: DeviceRequest,
    choice: &ReadChoice,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<HeldWeights, LoadError> {
    // Declared first, so that it is dropped after everything that uses the GPU.
    let _context = CallersContext::remember();
    let HoldPlan { mut tensors, parts, pool_bytes } = HoldPlan::new(wanted, request.decode);
    let workspace_bytes = workspace_bytes(&tensors);
    let (io, contents) = (request.io, contents(&catalog));
    let fill = DeviceFill {
        sources,
        io,
        choice,
        request: device,
        parts,
        pool_bytes,
        workspace_bytes,
        contents: &contents,
        is_for_several: false,
    };
    let (gpu, open_seconds) = timed(|| Ok(Gpu::open(device.ordinal)?))?;
    let Filled { pool, ring, mut statistics, engine, setup_seconds, pinned_bytes } =
        fill.run(&gpu, None, progress)?;
    drop(ring);
    let first = pool.ptr().address();
    tensors.iter_mut().for_each(|tensor| tensor.address += first);
    statistics.seconds += decode_all(&gpu, &tensors, pool.ptr())?;
    Ok(HeldWeights {
        by_name: by_name(&tensors),
        tensors,
        files: catalog.files,
        pack: catalog.pack,
        device: Some(device.ordinal),
        statistics,
        engine,
        setup_seconds: open_seconds + setup_seconds,
        pinned_bytes,
        memory: Memory::Device(Pool::new(pool)),
    })
}

/// Where tensors go on a device, counted from 0.
pub(super) struct HoldPlan {
    pub tensors: Vec<HeldTensor>,
    pub parts: Vec<UploadPart>,
    pub pool_bytes: usize,
}

impl HoldPlan {
    /// Assigns places to all tensors. Stacks whose entries lie apart in the file are contiguous here. If `decode` is true, compact weights
    /// are read to the end of the memory that they need as BF16; see [`decode_all`].
    pub fn new(tensors: &[TensorInfo], decode: bool) -> HoldPlan {
        let (mut held, mut parts, mut end) = (Vec::new(), Vec::new(), MARGIN as u64);
        for (number, info) in tensors.iter().enumerate() {
            // A saturated address does not fit into any device.
            let address = end.checked_next_multiple_of(DEVICE_ALIGNMENT).unwrap_or(u64::MAX);
            let ty = if decode { info.ty.plain() } else { info.ty };
            let stride = dense_stride(info, ty);
            let tensor = HeldTensor { info: info.clone(), ty, address, stride };
            end = address.saturating_add(tensor.bytes());
            let mut to = end - info.bytes().min(end);
            for extent in info.extents() {
                parts.push(UploadPart { label: BlockLabel::Other(number as u64), extent, to });
                to = to.saturating_add(extent.length);
            }
            held.push(tensor);
        }
        let pool_bytes = end.saturating_add(MARGIN as u64) as usize;
        HoldPlan { tensors: held, parts, pool_bytes }
    }
}

/// Returns the compact type of a tensor that is to be decoded, and its number of blocks.
fn coded(tensor: &HeldTensor) -> Option<(TensorType, usize)> {
    let of = tensor.decoded_from()?;
    Some((tensor.info.ty, tensor.info.bytes() as usize / of.bytes()))
}

/// Returns the bytes of device memory that [`decode_all`] takes while it runs.
pub(super) fn workspace_bytes(tensors: &[HeldTensor]) -> usize {
    let of_each = tensors.iter().filter_map(coded);
    of_each.map(|(ty, blocks)| compact_workspace_bytes(ty, blocks)).max().unwrap_or(0)
}

/// Decodes all compact tensors in `memory`, where their addresses are, and returns the seconds.
///
/// Budget for 8 billion weights: 12 GB are read and 16 GB written, most of the 12 GB twice: 15 to 20 ms.
pub(super) fn decode_all(
    gpu: &Gpu,
    tensors: &[HeldTensor],
    memory: DevicePtr<u8>,
) -> Result<f64, LoadError> {
    let workspace_bytes = workspace_bytes(tensors);
    if workspace_bytes == 0 {
        return Ok(0.0);
    }
    let started = Instant::now();
    let workspace = gpu.allocate(workspace_bytes)?;
    for tensor in tensors {
        let Some((ty, blocks)) = coded(tensor) else { continue };
        let place = memory.at(tensor.address).expect("tensors lie in the memory planned for them");
        gpu.expand_compact(ty, place, blocks, workspace.ptr())?;
    }
    gpu.synchronize()?;
    Ok(started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use forebay_format::{FileIndex, TensorType};

    use super::*;

    fn extent(offset: u64, length: u64) -> Extent {
        Extent { file: FileIndex(0), offset, length }
    }

    #[test]
    fn tensors_on_a_device_begin_at_multiples_of_256() {
        let tensor = |name: &str, ty, shape: &[u64], offset| {
            let bytes = TensorType::tensor_bytes(ty, shape).unwrap();
            TensorInfo::contiguous(name.into(), ty, shape.to_vec(), extent(offset, bytes))
        };
        let mut stack = tensor("stack", TensorType::Q8_0, &[3, 2, 32], 8192);
        (stack.stride, stack.extent.length) = (4096, 2 * 4096 + 68);
        let all = [
            tensor("a", TensorType::F32, &[3], 100),
            tensor("b", TensorType::Bool, &[], 112),
            stack,
        ];
        let HoldPlan { tensors: held, parts, pool_bytes: bytes } = HoldPlan::new(&all, true);
        assert!(held.iter().all(|tensor| tensor.address % 256 == 0));
        let ends: Vec<u64> =
            held.iter().map(|tensor| tensor.address + tensor.info.bytes()).collect();
        assert!(held.windows(2).zip(&ends).all(|(pair, &end)| end <= pair[1].address));
        assert!(bytes as u64 >= ends[2] + MARGIN as u64);
        // The stack is contiguous.
        assert_eq!(held[2].stride, 68);
        let apart: Vec<(u64, u64)> =
            parts[2..].iter().map(|part| (part.extent.offset, part.to - held[2].address)).collect();
        assert_eq!(apart, [(8192, 0), (12288, 68), (16384, 136)]);
    }

    #[test]
    fn compact_tensors_are_read_to_the_end_of_their_memory() {
        let ty = TensorType::BF16_C2048;
        let mut stack =
            TensorInfo::contiguous("a".into(), ty, vec![2, 4, 2048], extent(4096, 8 * 3088));
        (stack.stride, stack.extent.length) = (16384, 16384 + 4 * 3088);
        let all =
            [stack, TensorInfo::contiguous("b".into(), TensorType::U8, vec![5], extent(0, 5))];
        let planned = HoldPlan::new(&all, true);
        let tensor = &planned.tensors[0];
        assert_eq!((tensor.ty, tensor.bytes(), tensor.stride), (TensorType::BF16, 32768, 16384));
        let end = tensor.address + tensor.bytes();
        let to: Vec<u64> = planned.parts.iter().map(|part| part.to).collect();
        assert_eq!(to, [end - 8 * 3088, end - 4 * 3088, end]);
        assert_eq!(workspace_bytes(&planned.tensors), 8 * 3088);
        // As it is in the file.
        let planned = HoldPlan::new(&all, false);
        assert_eq!((planned.tensors[0].ty, planned.parts[0].to), (ty, planned.tensors[0].address));
        assert_eq!(workspace_bytes(&planned.tensors), 0);
    }
}
