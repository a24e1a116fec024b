//! Loads some tensors of files, or ranges of them, and reads only what they need.
//!
//! Everything here also accepts what no model uses: tensors without elements, and types without kernels.

#[cfg(feature = "cuda")]
mod device;
mod host;
mod plan;
mod staged;
mod stream;

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use forebay_format::{Catalog, StoredType, TensorInfo, WeightsTable};
use forebay_store::{Interrupt, IoKind, IoRecorder, SLOT_ALIGNMENT, SlotBuffer, Storage};

use super::hold::hold_some;
use super::{DeviceRequest, HeldTensor, HeldWeights, HoldRequest, Sources};
use crate::doctor::ReadChoice;
use crate::gpu;
use crate::load::error::LoadError;
#[cfg(feature = "cuda")]
pub(crate) use device::hold_chosen;
pub use plan::DimensionSlice;
use plan::Planned;
pub use stream::{Next, StreamOrder, TensorStream};

/// A tensor to load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Index into [`WeightsTable::tensors`].
    pub tensor: usize,
    /// Part of the tensor. `None` means all of it.
    pub slice: Option<DimensionSlice>,
}

/// Options of [`load_chosen`].
#[derive(Debug, Clone)]
pub struct ChosenRequest {
    /// Place of the files, in which the table was opened.
    pub storage: Storage,
    /// Read engine for data that is not in the page cache.
    pub io: IoKind,
    /// GPU to load to. `None` means host memory.
    pub device: Option<DeviceRequest>,
    /// True if weights of all types become f32. Integers and bools stay as they are.
    pub to_f32: bool,
    /// Bytes of memory beside the tensors for parts that are not adjacent in a file, and for conversions.
    pub staging_bytes: usize,
    /// Recorder of every read.
    pub recorder: Option<IoRecorder>,
    /// Interrupt that ends the load early.
    pub interrupt: Interrupt,
}

impl Default for ChosenRequest {
    fn default() -> ChosenRequest {
        ChosenRequest {
            storage: Storage::Disk,
            io: IoKind::Auto,
            device: None,
            to_f32: false,
            staging_bytes: 128 << 20,
            recorder: None,
            interrupt: Interrupt::new(),
        }
    }
}

/// A tensor in memory. Its elements are row-major.
#[derive(Clone)]
pub struct LoadedTensor {
    pub name: String,
    pub ty: StoredType,
    pub shape: Vec<u64>,
    /// Address of the first byte in the memory of the host or of the GPU. It is 0 if there are no elements.
    pub address: u64,
    pub bytes: u64,
    /// Bytes from one entry of the outermost dimension to the next, if they are not adjacent. Only stacks of packs are
    /// not.
    pub stride: Option<u64>,
    /// Ordinal of the GPU. `None` means host memory.
    pub device: Option<usize>,
    /// Memory that holds this tensor and perhaps others.
    pub memory: Arc<TensorMemory>,
}

/// Memory of one or several tensors. It is freed when this is dropped, which may happen on any thread.
pub struct TensorMemory(Memory);

#[allow(dead_code, reason = "the memory is only kept until it is dropped")]
enum Memory {
    Host(Vec<SlotBuffer>),
    Device(gpu::Pool),
    Held(Box<HeldWeights>),
    Other(Box<dyn Send + Sync>, u64),
}

// A consumer may drop a tensor on any thread.
const _: () = {
    const fn crosses_threads<T: Send + Sync>() {}
    crosses_threads::<LoadedTensor>();
};

impl TensorMemory {
    /// Returns memory of so many bytes that `owner` frees when it is dropped.
    pub fn of_owner(owner: impl Send + Sync + 'static, bytes: u64) -> TensorMemory {
        TensorMemory(Memory::Other(Box::new(owner), bytes))
    }

    /// Returns the bytes of memory, including what alignment leaves unused.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            Memory::Host(slots) => slots.iter().map(|slot| slot.len() as u64).sum(),
            Memory::Device(pool) => pool.bytes(),
            Memory::Held(held) => held.memory_bytes(),
            Memory::Other(_, bytes) => *bytes,
        }
    }
}

/// Everything that a load of chosen tensors needs.
pub(crate) struct ChosenPlan<'a> {
    pub sources: &'a Sources,
    pub choice: &'a ReadChoice,
    pub request: &'a ChosenRequest,
    pub planned: Vec<Planned>,
    /// Place for what loads of these files to a GPU share, if more than one follows.
    pub kept: Option<&'a Mutex<Option<gpu::KeptRing>>>,
}

/// Loads tensors of `table` and returns them in the order of `choices`. Only the parts of files that hold them are read,
/// and what is less than 64 KiB between two parts. Of a pack, whole chunks are read. Its compact weights become BF16.
///
/// All bytes are in memory when this returns. `progress` is called on this thread with the bytes that are done and the
/// bytes in total, and may end the load. The last call before this returns says that all bytes are done.
///
/// # Errors
/// Returns an error if a slice is not inside its tensor, if the tensors do not fit into memory, if the GPU cannot be
/// used, or if a read fails. Returns [`LoadError::Interrupted`] if
/// `progress` or the interrupt ended the load. All memory is freed in these cases.
///
/// # Panics
/// Panics if a choice is no index of the table.
pub fn load_chosen(
    table: &WeightsTable,
    choices: &[Choice],
    request: &ChosenRequest,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<LoadedTensor>, LoadError> {
    Opened::new(table, request)?.load(table, choices, request, None, progress)
}

/// Files that are open for loads.
struct Opened {
    sources: Sources,
    choice: ReadChoice,
    /// The catalog, if the file is a pack.
    pack: Option<Arc<Catalog>>,
}

impl Opened {
    fn new(table: &WeightsTable, request: &ChosenRequest) -> Result<Opened, LoadError> {
        let _span = tracing::debug_span!("open_files", files = table.files.len()).entered();
        let (interrupt, recorder) = (Some(&request.interrupt), request.recorder.as_ref());
        let (storage, pack) = (&request.storage, table.pack.clone());
        let sources = match &pack {
            Some(pack) => Sources::open(storage, pack, true, interrupt, recorder)?,
            None => Sources::of_files(storage, &table.files, interrupt, recorder)?,
        };
        let choice = ReadChoice::for_files(storage, &table.root);
        Ok(Opened { sources, choice, pack })
    }

    /// Returns the most bytes before and behind what is wanted, together, that a read also covers: aligned ends, and chunks of a pack,
    /// which are read whole.
    fn margin(&self) -> u64 {
        let chunk =
            self.pack.as_ref().and_then(|catalog| catalog.pack.as_ref()).map_or(0, |pack| {
                let plain = pack.chunks.blocks().iter().map(|block| u64::from(block.chunk_bytes));
                plain.max().unwrap_or(0).max(2 * pack.chunks.coded_bytes_max())
            });
        2 * (SLOT_ALIGNMENT as u64 + chunk)
    }

    /// Returns the most bytes of memory that a tensor takes, with those that are read around it.
    fn slot_bytes(&self, planned: &Planned, request: &ChosenRequest) -> u64 {
        // On a GPU, and in memory of its own on the host, a tensor has aligned ends.
        let mut bytes = planned.bytes().saturating_add(2 * SLOT_ALIGNMENT as u64);
        if request.device.is_some() && planned.is_converted() {
            // It is in memory of the host first.
            bytes = bytes.saturating_mul(2);
        }
        let read = planned.direct().map_or(0, |extent| {
            self.sources.checked.plan(&[extent], SLOT_ALIGNMENT).slot_bytes as u64
        });
        bytes.max(read)
    }

    fn load(
        &self,
        table: &WeightsTable,
        choices: &[Choice],
        request: &ChosenRequest,
        kept: Option<&Mutex<Option<gpu::KeptRing>>>,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Vec<LoadedTensor>, LoadError> {
        request.interrupt.check()?;
        if let Some(catalog) = &self.pack {
            let is_as_stored = !request.to_f32 && choices.iter().all(|it| it.slice.is_none());
            let is_all = choices.len() == table.tensors().len();
            if is_as_stored && (is_all || request.device.is_some()) {
                return from_pack(table, catalog, choices, request, progress);
            }
        }
        let Opened { sources, choice, .. } = self;
        let plan = |choice: &Choice| Planned::new(table, choice, request.to_f32);
        let planned = choices.iter().map(plan).collect::<Result<_, _>>()?;
        let plan = ChosenPlan { sources, choice, request, planned, kept };
        match request.device {
            None => host::load(&plan, progress),
            Some(_) => gpu::hold_chosen(&plan, progress),
        }
    }
}

/// Loads tensors of a pack whole and as they are. Blocks with several tensors are read at once. A GPU decodes compact weights.
fn from_pack(
    table: &WeightsTable,
    catalog: &Catalog,
    choices: &[Choice],
    request: &ChosenRequest,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<LoadedTensor>, LoadError> {
    let name = |choice: &Choice| &table.tensors()[choice.tensor].name;
    let mut wanted: Vec<&TensorInfo> =
        choices.iter().filter_map(|choice| catalog.tensor(name(choice))).collect();
    wanted.sort_by_key(|info| info.extent);
    wanted.dedup_by_key(|info| info.extent);
    let HoldRequest { verify, decode, .. } = HoldRequest::default();
    let hold = HoldRequest { io: request.io, verify, decode, device: request.device };
    let wanted = wanted.into_iter().cloned().collect();
    let interrupt = Some(&request.interrupt);
    let held =
        hold_some(&request.storage, catalog.clone(), Some(wanted), &hold, interrupt, progress)?;
    let found = choices.iter().filter_map(|choice| held.find(name(choice))).collect::<Vec<_>>();
    let of = |tensor: &HeldTensor| {
        let HeldTensor { info, ty, address, stride } = tensor;
        let entries = info.shape.first().copied().unwrap_or(1);
        let is_apart = entries > 1 && stride.saturating_mul(entries) > tensor.bytes();
        (info.name.clone(), *ty, info.shape.clone(), *address, is_apart.then_some(*stride))
    };
    let described: Vec<_> = found
        .into_iter()
        .map(|at| (of(&held.tensors[at]), held.tensors[at].bytes(), held.device))
        .collect();
    let memory = Arc::new(TensorMemory(Memory::Held(Box::new(held))));
    let loaded =
        described.into_iter().map(|((name, ty, shape, address, stride), bytes, device)| {
            let (ty, memory) = (StoredType::Tensor(ty), Arc::clone(&memory));
            LoadedTensor { name, ty, shape, address, bytes, stride, device, memory }
        });
    Ok(loaded.collect())
}
