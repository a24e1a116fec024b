//! What may be chosen about a load to a GPU, and what is said of it.

use serde::{Deserialize, Serialize};

/// At 2 MiB PCIe is within a few percent of its best.
pub(super) const PIECE_BYTES: usize = 2 << 20;

/// A small ring stays in the processor's last cache.
pub(super) const RING_BYTES: usize = 128 << 20;

/// Which GPU, and how.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRequest {
    /// Counted from 0.
    pub ordinal: usize,
    /// All device memory that may be in use when the weights are there, what the driver needs included.
    pub vram_bytes: Option<u64>,
    /// Read everything back after the last run and compare it with the files.
    pub check: bool,
    /// What is read or copied at a time, a multiple of 4096.
    pub piece_bytes: usize,
    /// Pinned memory that everything goes through: room for four pieces at least.
    pub ring_bytes: usize,
    /// Whether cuFile brings the weights and not the ring, which the fields above are about.
    pub cufile: CuFileUse,
}

impl DeviceRequest {
    /// For GPU `ordinal`, by the ring, without a bound and without a check.
    pub fn new(ordinal: usize) -> DeviceRequest {
        let (piece_bytes, ring_bytes) = (PIECE_BYTES, RING_BYTES);
        let cufile = CuFileUse::Never;
        DeviceRequest { ordinal, vram_bytes: None, check: false, piece_bytes, ring_bytes, cufile }
    }
}

/// The GPU's part in a load.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    pub name: String,
    pub ordinal: usize,
    pub compute_capability: (i32, i32),
    pub memory_bytes: u64,
    /// In use on the GPU before there was memory for weights, by the driver's count: the context, other programs.
    pub used_before_bytes: u64,
    /// In use with all weights there.
    pub used_bytes: u64,
    /// Device memory of the weights.
    pub pool_bytes: u64,
    /// Whether this memory can be given back in parts; else the driver cannot map memory.
    pub pool_is_elastic: bool,
    /// Host memory of ours that the GPU copies from; none with cuFile, which has its own.
    pub pinned_bytes: u64,
    /// Of this at a time.
    pub piece_bytes: usize,
    /// Opening the GPU; pinning the ring, or starting cuFile and taking its memory; mapping device memory: once per
    /// process, and not in the runs.
    pub open_seconds: f64,
    pub pin_seconds: f64,
    pub map_seconds: f64,
    /// Pinned copies as large as those of the load, alone.
    pub copy_bytes_per_second: f64,
    /// What was read back; `None` if nothing was to be.
    pub read_back: Option<ReadBack>,
}

/// Whether weights come to a GPU by cuFile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CuFileUse {
    /// By the ring.
    #[default]
    Never,
    /// Where the machine profile has found it faster than the ring, and what is to be loaded allows it.
    WhereFaster,
    /// Or not at all.
    Always,
}

/// How cuFile is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CuFileRequests {
    /// What a thread asks for at a time, a multiple of 4096.
    pub request_bytes: usize,
    pub threads: usize,
}

impl Default for CuFileRequests {
    /// An estimate for machines that `doctor` has not measured: one read keeps the disk busy as long as a large request of
    /// ours, and in compatibility mode each thread has one at a time.
    fn default() -> CuFileRequests {
        CuFileRequests { request_bytes: 4 << 20, threads: 16 }
    }
}

/// A comparison of device memory with the files; differences are errors.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ReadBack {
    pub bytes: u64,
    pub seconds: f64,
}
