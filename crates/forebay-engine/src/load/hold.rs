//! Weights in memory for use by a caller outside this crate. Every tensor has an address for as long as the caller
//! keeps the weights.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_codec::Compact;
use forebay_format::pack::Pack;
use forebay_format::{Catalog, TensorInfo, TensorType};
use forebay_options::{BadOption, OptionName};
use forebay_store::{EngineInfo, Extent, Interrupt, IoKind, LoadStatistics, SlotBuffer, Storage};

use super::host::Host;
use super::{Destination as _, DeviceRequest, Sources};
use crate::doctor::ReadChoice;
use crate::gpu;
use crate::load::error::LoadError;

/// Alignment of the addresses of tensors on a GPU. CUDA's own allocations have it, and DLPack requires it.
pub(super) const DEVICE_ALIGNMENT: u64 = 256;
/// Smallest amount of pinned memory that a load to a GPU can use, in bytes.
const PINNED_BYTES_MIN: usize = 1 << 20;
/// Number of pieces that fit in the smallest ring.
const PIECES_MIN: usize = 8;

/// Options of a load that a caller may choose.
#[derive(Debug, Clone, Copy)]
pub struct HoldRequest {
    /// Read engine for data that is not in the page cache.
    pub io: IoKind,
    /// True if blocks of a pack are verified against their checksums. It may be false only for packs.
    pub verify: bool,
    /// True if compact weights of a pack are decoded to BF16. Otherwise they stay as the pack has them.
    pub decode: bool,
    /// GPU to load to. `None` means host memory.
    pub device: Option<DeviceRequest>,
}

impl Default for HoldRequest {
    fn default() -> HoldRequest {
        HoldRequest { io: IoKind::Auto, verify: true, decode: true, device: None }
    }
}

/// Tensor and its address.
#[derive(Debug, Clone)]
pub struct HeldTensor {
    /// Name, type and shape, and the extent of the file that it was read from.
    pub info: TensorInfo,
    /// Type in memory. It differs from that in the file if the tensor was decoded.
    pub ty: TensorType,
    /// Address of the first byte, in the memory of the host or of the GPU. It is a multiple of 256 on a GPU, and of an
    /// element's size on the host.
    pub address: u64,
    /// Number of bytes from one entry of the outermost dimension to the next. The elements of an entry are contiguous.
    pub stride: u64,
}

/// Weights in memory. The memory is freed when this is dropped, which may happen on any thread.
pub struct HeldWeights {
    pub tensors: Vec<HeldTensor>,
    /// Files that the file indexes of [`TensorInfo::extent`] refer to.
    pub files: Vec<PathBuf>,
    /// The pack that they were loaded from, if it was one.
    pub pack: Option<Arc<Pack>>,
    /// Ordinal of the GPU. `None` means host memory.
    pub device: Option<usize>,
    pub statistics: LoadStatistics,
    /// `None` if everything was in the page cache.
    pub engine: Option<EngineInfo>,
    /// Seconds for opening the GPU, and for pinning and mapping memory. They are not part of the statistics.
    pub setup_seconds: f64,
    /// Bytes of memory that were pinned during the load. None is pinned afterwards.
    pub pinned_bytes: u64,
    /// Indexes into `tensors`, sorted by name.
    pub(super) by_name: Vec<usize>,
    pub(super) memory: Memory,
}

pub(super) enum Memory {
    Host(Vec<SlotBuffer>),
    Device(gpu::Pool),
}

impl HeldTensor {
    /// Returns the compact blocks that the file has and memory has not, because they were decoded.
    pub fn decoded_from(&self) -> Option<Compact> {
        self.info.ty.compact().filter(|_| self.ty != self.info.ty)
    }

    /// Returns the number of bytes of all elements in memory.
    pub fn bytes(&self) -> u64 {
        // The memory was reserved, so the tensor has a size.
        self.ty.tensor_bytes(&self.info.shape).unwrap_or_default()
    }
}

impl HeldWeights {
    /// Returns the index of the tensor with this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        let found =
            self.by_name.binary_search_by(|&at| self.tensors[at].info.name.as_str().cmp(name));
        found.ok().map(|at| self.by_name[at])
    }

    /// Returns the extent of the file that stores a tensor, and true if it lies in a coded block.
    pub fn stored(&self, tensor: &HeldTensor) -> (Extent, bool) {
        match &self.pack {
            Some(pack) => (
                pack.stored(tensor.info.extent),
                pack.chunks.is_coded_at(tensor.info.extent.offset),
            ),
            None => (tensor.info.extent, false),
        }
    }

    /// Returns the bytes of memory that the weights take, including what alignment leaves unused.
    pub fn memory_bytes(&self) -> u64 {
        match &self.memory {
            Memory::Host(slots) => slots.iter().map(|slot| slot.len() as u64).sum(),
            Memory::Device(pool) => pool.bytes(),
        }
    }
}

impl DeviceRequest {
    /// Limits the pinned memory of the load to `bytes`.
    ///
    /// # Errors
    /// Returns [`LoadError::Option`] if `bytes` is less than 1 MiB.
    pub fn within_pinned(self, bytes: usize) -> Result<DeviceRequest, LoadError> {
        if bytes < PINNED_BYTES_MIN {
            return Err(pinned_bytes_is(bytes, PINNED_BYTES_MIN));
        }
        let piece_bytes = self.piece_bytes.min(bytes / PIECES_MIN / 4096 * 4096);
        Ok(DeviceRequest { ring_bytes: bytes, piece_bytes, ..self })
    }
}

pub(super) fn pinned_bytes_is(given: usize, least: usize) -> LoadError {
    LoadError::Option(BadOption {
        name: OptionName::PinnedBytes,
        value: given.to_string(),
        expected: format!("at least {least} are needed"),
    })
}

/// Loads all weights of a file or folder and keeps them in memory. It accepts safetensors with or without a
/// configuration, GGUF files, and packs.
///
/// All bytes are in memory when this returns. On a GPU, no copy is still queued. `progress` is called on this thread
/// with the bytes that are done and the bytes in total, and may end the load.
///
/// # Errors
/// Returns an error if files are damaged or do not fit into memory, if the GPU cannot be used, or if a read fails.
/// Returns [`LoadError::Interrupted`] if `progress` ended the load. All memory is freed in these cases.
pub fn hold(
    path: &Path,
    request: &HoldRequest,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<HeldWeights, LoadError> {
    let catalog = Catalog::open_weights(path)?;
    if catalog.pack.is_none() && !request.verify {
        return Err(LoadError::Option(BadOption {
            name: OptionName::Verify,
            value: "off".into(),
            expected: "only packs (.fbay) have checksums, and this is none".into(),
        }));
    }
    hold_some(&Storage::Disk, catalog, None, request, None, progress)
}

/// Loads some tensors of a catalog, or all of them, as [`hold`] does. `wanted` is a list of tensors of the catalog.
pub(super) fn hold_some(
    storage: &Storage,
    catalog: Catalog,
    wanted: Option<Vec<TensorInfo>>,
    request: &HoldRequest,
    interrupt: Option<&Interrupt>,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<HeldWeights, LoadError> {
    let sources = Sources::open(storage, &catalog, request.verify, interrupt, None)?;
    let choice = ReadChoice::for_files(storage, &catalog.root);
    let is_all = wanted.is_none();
    let wanted = wanted.unwrap_or_else(|| catalog.tensors().to_vec());
    match request.device {
        None => {
            let only = (!is_all).then_some(&wanted[..]);
            let (io, decode) = (request.io, request.decode);
            let host = Host::new(&catalog, only, &sources, io, &choice, decode)?;
            to_host(&catalog, host, wanted, request, progress)
        }
        Some(device) => gpu::hold(catalog, &wanted, &sources, request, device, &choice, progress),
    }
}

fn to_host(
    catalog: &Catalog,
    mut host: Host<'_>,
    wanted: Vec<TensorInfo>,
    request: &HoldRequest,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<HeldWeights, LoadError> {
    let statistics = host.fill_while(progress)?;
    let engine = Some(host.engine());
    if catalog.pack.is_none() {
        host.align();
    }
    let (slots, places) = host.into_memory();
    let places = Places::new(places);
    let mut tensors = Vec::with_capacity(wanted.len());
    for info in wanted {
        let ty = if request.decode { info.ty.plain() } else { info.ty };
        let found = places.of(&info, ty);
        let (address, stride) = found.ok_or_else(|| LoadError::InPieces {
            path: catalog.files[info.extent.file.0 as usize].clone(),
            tensor: info.name.clone(),
        })?;
        tensors.push(HeldTensor { info, ty, address, stride });
    }
    Ok(HeldWeights {
        by_name: by_name(&tensors),
        tensors,
        files: catalog.files.clone(),
        pack: catalog.pack.clone(),
        device: None,
        statistics,
        engine,
        setup_seconds: 0.0,
        pinned_bytes: 0,
        memory: Memory::Host(slots),
    })
}

/// Returns the distance of entries of the outermost dimension that lie without gaps.
pub(super) fn dense_stride(info: &TensorInfo, ty: TensorType) -> u64 {
    let entries = info.shape.first().copied().unwrap_or(1).max(1);
    ty.tensor_bytes(&info.shape).unwrap_or_default() / entries
}

/// Addresses of file bytes in memory: extents in the order of the files, each with its address.
struct Places(Vec<(Extent, u64)>);

impl Places {
    fn new(mut places: Vec<(Extent, u64)>) -> Places {
        places.sort_by_key(|(extent, _)| (extent.file, extent.offset));
        Places(places)
    }

    /// Returns the address of a tensor and the distance of its entries, or `None` if pieces are missing or lie at different distances. In
    /// memory it is of type `ty`.
    fn of(&self, tensor: &TensorInfo, ty: TensorType) -> Option<(u64, u64)> {
        let addresses = tensor.extents().map(|extent| self.address(&extent));
        let addresses = addresses.collect::<Option<Vec<u64>>>()?;
        let first = *addresses.first()?;
        let mut strides = addresses.windows(2).map(|pair| pair[1].checked_sub(pair[0]));
        let Some(stride) = strides.next() else { return Some((first, dense_stride(tensor, ty))) };
        strides.all(|other| other == stride).then_some((first, stride?))
    }

    /// Returns the address of an extent, or `None` unless its bytes are contiguous in memory too.
    fn address(&self, extent: &Extent) -> Option<u64> {
        let behind =
            self.0.partition_point(|(it, _)| (it.file, it.offset) <= (extent.file, extent.offset));
        let (first, address) = *self.0.get(behind.checked_sub(1)?)?;
        let mut end = first.end();
        for (next, next_address) in &self.0[behind..] {
            if first.file != extent.file || extent.end() <= end {
                break;
            }
            if next.file != first.file
                || next.offset != end
                || next_address - address != end - first.offset
            {
                return None;
            }
            end = next.end();
        }
        let inside = first.file == extent.file && extent.end() <= end;
        inside.then(|| address + (extent.offset - first.offset))
    }
}

pub(super) fn by_name(tensors: &[HeldTensor]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by(|&a, &b| tensors[a].info.name.cmp(&tensors[b].info.name));
    order
}

#[cfg(test)]
mod tests {
    use forebay_format::FileIndex;

    use super::*;

    fn extent(offset: u64, length: u64) -> Extent {
        Extent { file: FileIndex(0), offset, length }
    }

    #[test]
    fn bytes_have_an_address_only_if_they_lie_as_in_the_file() {
        let places = Places::new(vec![
            (extent(4096, 4096), 14096),
            (extent(0, 4096), 10000),
            (extent(8192, 4096), 50000),
            (extent(20480, 100), 62288),
        ]);
        assert_eq!(places.address(&extent(10, 4000)), Some(10010));
        assert_eq!(places.address(&extent(4000, 4192)), Some(14000));
        assert_eq!(places.address(&extent(4000, 4193)), None);
        assert_eq!(places.address(&extent(8192, 4097)), None);
        assert_eq!(places.address(&extent(20480, 100)), Some(62288));
        assert_eq!(places.address(&Extent { file: FileIndex(1), ..extent(0, 1) }), None);
    }

    #[test]
    fn pinned_memory_is_bounded() {
        let request = DeviceRequest::new(0);
        assert!(matches!(request.within_pinned(1000), Err(LoadError::Option(_))));
        let small = request.within_pinned(1 << 20).unwrap();
        assert_eq!((small.ring_bytes, small.piece_bytes), (1 << 20, 128 << 10));
        assert_eq!(request.within_pinned(1 << 30).unwrap().piece_bytes, request.piece_bytes);
    }
}
