//! Extents on disk become bytes in a buffer: the only layer that reads weights.
//!
//! An [`Arena`] is reserved once; it is carved into [`SlotBuffer`]s, each with one owner. A
//! [`BlockLayout`] says where the extents of a block land inside a slot. A [`ReadEngine`] takes the
//! slot together with the request and hands it back with the answer, so memory that the kernel may
//! still write has no other owner.
//!
//! ```text
//! engine.rs     what callers see: ReadEngine, BlockRead, Completion, options, statistics
//! scheduler.rs  one implementation of everything that all engines share: priorities, splitting, short
//!               reads, retries, stalls, cancellation, draining
//! device.rs     the narrow floor below it; uring.rs, pread.rs and simulated.rs only move bytes,
//!               faults.rs wraps any of them and breaks them on purpose
//! mmap_device.rs  another device: copies out of a memory map, to show what page faults cost
//! pool.rs       the threads of pread.rs and mmap_device.rs
//! reader.rs    blocks of any place and size into anybody's memory, over any engine
//! trace.rs     a record of every request, for `forebay trace-io`
//! checks.rs     checksums of packs, compared before a block is handed out
//! checker.rs    who compares and recasts, and when: threads beside the one that reads
//! recasting.rs  bytes of a block in the form in which they are held, where files have another
//! copy.rs       bytes of many extents into a new order, through bounded memory
//! interrupt.rs the flag that ends waits, loads and copies early
//! output_file/  files that are written: nothing is destroyed, nothing unfinished shows
//! ```

mod arena;
mod checker;
mod checks;
mod copy;
mod device;
mod engine;
mod error;
mod faults;
mod files;
mod huge_pages;
mod interrupt;
mod job;
mod layout;
mod load;
mod mmap_device;
mod output_file;
mod page_cache;
mod pieces;
mod pool;
mod pread;
mod probe;
mod reader;
mod relayout;
mod scheduler;
mod simulated;
mod trace;
mod uring;

pub use arena::{Arena, SLOT_ALIGNMENT, SlotBuffer};
pub use copy::{CopyJob, CopyReport, OpenEngine, Sink, Span, copy, copy_through};
pub use engine::{
    BlockLabel, BlockRead, Completion, EngineInfo, EngineOptions, IoKind, IoStatistics, Priority,
    ReadDone, ReadEngine, open_engine, open_faulty_engine,
};
pub use error::{ReadError, StoreError};
pub use faults::{Fault, FaultKind, FaultPlan};
pub use files::{FileSet, filesystem_type};
pub use forebay_format::{Block, Extent, FileIndex, Relayout, Step, TensorType};
pub use interrupt::Interrupt;
pub use layout::{BlockLayout, Part};
pub use load::{
    DeviceReader, DeviceSpan, LoadItem, LoadOptions, LoadStatistics, Loaded, Loader,
    StraightOptions, Upload, UploadCopy, UploadError, UploadPart, UploadPlan, Uploading,
    load_straight, process_seconds,
};
pub use output_file::{
    OutputError, OutputFile, OutputStream, Outputs, TemporaryName, remove_unfinished,
};
pub use page_cache::CacheMethod;
pub use probe::{DiskProbe, DiskRate, Latencies, ProbeLength, copy_rate, last_cache_bytes};
pub use reader::{
    BlockAnswer, BlockReader, RawReader, RawRequest, ReadAnswer, ReadRequest, ReaderEnd,
    ReaderError, ReaderOptions,
};
pub use simulated::{DiskModel, VirtualClock, open_simulated_engine};
pub use trace::{IoRecorder, PageFaults, ReadEnd, ReadRecord, Recording, WaitRecord, Why};
