//! Options and report of a load to a GPU.

use serde::{Deserialize, Serialize};

/// Default size of a piece. At 4 MiB, PCIe is within a few percent of its best rate.
pub(super) const PIECE_BYTES: usize = 4 << 20;

/// Default limit on the size of the ring, which is larger than 64 MiB only for engines with long queues.
pub(super) const RING_BYTES: usize = 128 << 20;

/// GPU to load to, and how to load.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRequest {
    /// Index of the GPU, counted from 0.
    pub ordinal: usize,
    /// Limit on the device memory in use after the load, in bytes. It includes what the driver needs. `None` means no
    /// limit.
    pub vram_bytes: Option<u64>,
    /// True if everything is read back after the last run and compared with the files.
    pub check: bool,
    /// Number of bytes that are read or copied at a time, a multiple of 4096.
    pub piece_bytes: usize,
    /// Bytes of pinned memory in the ring at most. It has room for at least four pieces.
    pub ring_bytes: usize,
    /// Choice of cuFile instead of the ring. The two fields above apply to the ring only.
    pub cufile: CuFileUse,
}

impl DeviceRequest {
    /// Returns a request for GPU `ordinal` that uses the ring, with no memory limit and no check.
    pub fn new(ordinal: usize) -> DeviceRequest {
        let (piece_bytes, ring_bytes) = (PIECE_BYTES, RING_BYTES);
        let cufile = CuFileUse::Never;
        DeviceRequest { ordinal, vram_bytes: None, check: false, piece_bytes, ring_bytes, cufile }
    }
}

/// Report about the GPU's part in a load.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    pub name: String,
    pub ordinal: usize,
    pub compute_capability: (i32, i32),
    pub memory_bytes: u64,
    /// Bytes in use on the GPU before memory for weights was allocated, as reported by the driver. They belong to the
    /// CUDA context and to other programs.
    pub used_before_bytes: u64,
    /// Bytes in use after all weights are loaded.
    pub used_bytes: u64,
    /// Bytes of device memory allocated for the weights.
    pub pool_bytes: u64,
    /// True if parts of this memory can be freed. False if the driver cannot map memory.
    pub pool_is_elastic: bool,
    /// Bytes of pinned host memory that the GPU copies from. It is 0 with cuFile, which has its own.
    pub pinned_bytes: u64,
    /// Bytes copied at a time.
    pub piece_bytes: usize,
    /// Seconds for opening the GPU. This and the next two times occur once per process and are not part of the runs.
    pub open_seconds: f64,
    /// Seconds for pinning the ring, or for starting cuFile and allocating its memory.
    pub pin_seconds: f64,
    /// Seconds for mapping device memory.
    pub map_seconds: f64,
    /// Rate of pinned copies as large as those of the load, with nothing else running.
    pub copy_bytes_per_second: f64,
    /// Processor that decoded the blocks of a pack, if they are coded.
    pub decoded_by: Option<DecodedBy>,
    /// Result of reading back. `None` if no check was requested.
    pub read_back: Option<ReadBack>,
}

/// Processor that decodes coded blocks during a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DecodedBy {
    Cpu,
    /// The blocks' bytes in the file are copied to the GPU, which decodes them to their place.
    Gpu,
}

/// Choice of cuFile for loading weights to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CuFileUse {
    /// Always use the ring.
    #[default]
    Never,
    /// Use cuFile if the machine profile found it faster than the ring and the weights allow it.
    WhereFaster,
    /// Use cuFile, or fail.
    Always,
}

/// Requests to cuFile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CuFileRequests {
    /// Number of bytes that a thread asks for at a time, a multiple of 4096.
    pub request_bytes: usize,
    pub threads: usize,
}

impl Default for CuFileRequests {
    /// Returns an estimate for machines that `doctor` has not measured. One read keeps the disk busy as long as one of
    /// forebay's own large requests. In compatibility mode each thread has one read at a time.
    fn default() -> CuFileRequests {
        CuFileRequests { request_bytes: 4 << 20, threads: 16 }
    }
}

/// Result of comparing device memory with the files. Differences are errors.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ReadBack {
    pub bytes: u64,
    pub seconds: f64,
}
