//! Reads extents of files into buffers. This is the only layer that reads weights.
//!
//! An [`Arena`] is reserved once and carved into [`SlotBuffer`]s, each with one owner. A [`BlockLayout`] describes
//! where the extents of a block are put in a slot. A [`ReadEngine`] takes the slot together with the request and
//! returns it with the answer. Memory that the kernel may still write to therefore has no other owner.
//!
//! ```text
//! engine.rs       the caller's interface: ReadEngine, BlockRead, Completion, options, statistics
//! scheduler.rs    everything that all engines share: priorities, splitting, short reads, retries,
//!                 stalls, cancellation, draining
//! device.rs       the narrow interface below the scheduler; uring.rs, pread.rs and simulated.rs only
//!                 move bytes, and faults.rs wraps any of them to inject faults
//! mmap_device.rs  another device, which copies out of a memory map to show what page faults cost
//! objects/        another device, for object stores and HTTP servers
//! storage.rs      where files are: on a disk or in a store
//! pool.rs         the threads of pread.rs and mmap_device.rs
//! reader.rs       reads blocks of any offset and size into the caller's memory, with any engine
//! load.rs         fills memory at start from the disk and the page cache together
//! trace.rs        a record of every request, for `forebay trace-io`
//! chunks.rs       chunks of packs: checksums, verified before a block is returned, and decoding
//! checker.rs      threads beside the reader thread that verify checksums, decode and do relayouts
//! relayout.rs     relayout: converts the bytes of a block to the layout in which they are held
//! copy.rs         copies the bytes of many extents into a new order, with bounded memory
//! points.rs       named points at which tests send a signal to the process
//! interrupt.rs    the flag that stops waits, loads and copies early
//! output_file/    output files: no existing file is destroyed, and no unfinished file shows up
//! ```

mod arena;
mod checker;
mod chunks;
mod copy;
mod device;
mod engine;
mod error;
mod faults;
mod files;
mod free_memory;
mod huge_pages;
mod interrupt;
mod job;
mod layout;
mod load;
mod mmap_device;
#[cfg(feature = "objects")]
mod objects;
mod output_file;
mod page_cache;
mod pieces;
mod points;
mod pool;
mod pread;
mod probe;
mod reader;
mod relayout;
mod reports;
mod scheduler;
mod simulated;
mod storage;
mod text_input;
mod trace;
mod uring;

pub use arena::{Arena, SLOT_ALIGNMENT, SlotBuffer};
pub use checker::checking_threads;
pub use copy::{ChunkAt, CopyJob, CopyReport, OpenEngine, Sink, copy, copy_through};
pub use engine::{
    BlockLabel, BlockRead, Completion, EngineInfo, EngineOptions, IoKind, IoStatistics, Priority,
    ReadDone, ReadEngine, open_engine, open_faulty_engine,
};
pub use error::{Damage, ReadError, StoreError};
pub use faults::{Fault, FaultKind, FaultPlan};
pub use files::{FileSet, filesystem_type};
pub use forebay_format::{Block, Extent, FileIndex, Relayout, Step, TensorType};
pub use free_memory::{give_back_free_memory, keep_little_free_memory};
pub use interrupt::Interrupt;
pub use layout::{BlockLayout, Part};
pub use load::past_cache::copy as copy_past_cache;
pub use load::{
    COPIED_BYTES, DeviceReader, DeviceSpan, LoadItem, LoadOptions, LoadStatistics, Loaded, Loader,
    ReadSide, StraightOptions, Upload, UploadCopy, UploadError, UploadPart, UploadPlan, Uploader,
    Uploading, load_straight, process_seconds,
};
#[cfg(feature = "objects")]
pub use objects::{ObjectOptions, Objects};
pub use output_file::{
    OutputError, OutputFile, OutputStream, Outputs, SharedStream, TemporaryName, remove_unfinished,
};
pub use page_cache::CacheMethod;
pub use points::reached;
pub use probe::{DiskProbe, DiskRate, Latencies, ProbeLength, copy_rate, last_cache_bytes};
pub use reader::{
    BlockAnswer, BlockReader, RawReader, RawRequest, ReadAnswer, ReadRequest, ReaderEnd,
    ReaderError, ReaderOptions,
};
pub use simulated::{DiskModel, VirtualClock, open_simulated_engine};
pub use storage::Storage;
pub use text_input::{TEXT_BYTES_MAX, read_text, read_text_from};
pub use trace::{IoRecorder, PageFaults, ReadEnd, ReadRecord, Recording, WaitRecord, Why};
