//! Weights in VRAM for use by a caller outside this crate.

use std::ops::ControlFlow;

use forebay_cuda::{CallersContext, Gpu, WeightsPool};
use forebay_format::{Catalog, TensorInfo};
use forebay_store::{BlockLabel, IoKind, UploadPart};

use super::device::{CHUNK_BYTES, MARGIN, fits, timed};
use super::hold::{DEVICE_ALIGNMENT, HeldTensor, HeldWeights, Memory, by_name, pinned_bytes_is};
use super::{
    DeviceRequest, GpuRing, RingRequest, Sources, contents, name_of, named, poison, read_back,
};
use crate::EngineError;
use crate::doctor::ReadChoice;

/// Device memory of weights. `None` only while the memory is being freed.
pub(crate) struct Pool(Option<WeightsPool>);

impl Pool {
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

/// Loads weights to a GPU, as [`super::hold()`] does.
pub(crate) fn hold(
    catalog: Catalog,
    sources: &Sources,
    io: IoKind,
    request: DeviceRequest,
    choice: &ReadChoice,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<HeldWeights, EngineError> {
    let files = &sources.checked;
    // Declared first, so that it is dropped after everything that uses the GPU.
    let _context = CallersContext::remember();
    let (mut tensors, mut parts, pool_bytes) = plan(catalog.tensors());
    let (gpu, open_seconds) = timed(|| Ok(Gpu::open(request.ordinal)?))?;
    fits(&gpu, request.vram_bytes, pool_bytes as u64)?;
    let (pool, map_seconds) = timed(|| {
        let mut pool = gpu.weights_pool(pool_bytes, CHUNK_BYTES)?;
        pool.grow(&gpu, pool_bytes)?;
        Ok(pool)
    })?;
    let first = pool.ptr().address();
    tensors.iter_mut().for_each(|tensor| tensor.address += first);
    parts.iter_mut().for_each(|part| part.to += first);
    let DeviceRequest { piece_bytes, ring_bytes, .. } = request;
    let through = RingRequest { piece_bytes, ring_bytes, ..RingRequest::new(files, io, choice) };
    let mut ring = GpuRing::open(&gpu, through, &parts, &[pool.ptr()])?;
    let pinned_bytes = ring.pinned_bytes();
    if pinned_bytes > ring_bytes as u64 {
        // A chunk with a single checksum is read as a whole, and the ring has at least four slots of that size.
        return Err(pinned_bytes_is(ring_bytes, pinned_bytes as usize));
    }
    let contents = contents(&catalog);
    if request.check {
        poison(&gpu, &parts, &[pool.ptr()])?;
    }
    let statistics = ring.fill_while(progress).map_err(|error| named(error, &contents, files))?;
    if request.check {
        let placed = (&parts[..], &[pool.ptr()][..]);
        read_back(&gpu, &sources.unrecorded, placed, &|extent| name_of(&contents, extent))?;
    }
    let setup_seconds = open_seconds + ring.pin_time().as_secs_f64() + map_seconds;
    Ok(HeldWeights {
        by_name: by_name(&tensors),
        tensors,
        files: catalog.files,
        device: Some(request.ordinal),
        statistics,
        engine: ring.engine(),
        setup_seconds,
        pinned_bytes,
        memory: Memory::Device(Pool(Some(pool))),
    })
}

/// Assigns device addresses, counted from 0, to all tensors, and returns the size of the memory. Stacks whose entries
/// lie apart in the file are contiguous here.
fn plan(tensors: &[TensorInfo]) -> (Vec<HeldTensor>, Vec<UploadPart>, usize) {
    let (mut held, mut parts, mut end) = (Vec::new(), Vec::new(), MARGIN as u64);
    for (number, info) in tensors.iter().enumerate() {
        // A saturated address does not fit into any device.
        let address = end.checked_next_multiple_of(DEVICE_ALIGNMENT).unwrap_or(u64::MAX);
        let mut to = address;
        for extent in info.extents() {
            parts.push(UploadPart { label: BlockLabel::Other(number as u64), extent, to });
            to = to.saturating_add(extent.length);
        }
        let stride = info.bytes() / info.shape.first().copied().unwrap_or(1).max(1);
        held.push(HeldTensor { info: info.clone(), address, stride });
        end = to;
    }
    (held, parts, end.saturating_add(MARGIN as u64) as usize)
}

#[cfg(test)]
mod tests {
    use forebay_format::{Extent, FileIndex, TensorType};

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
        let (held, parts, bytes) = plan(&all);
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
}
