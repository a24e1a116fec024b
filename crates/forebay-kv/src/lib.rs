//! KV blocks outside a device's pools: the index of a tier in host memory, and a folder on disk.
//!
//! A KV block holds keys and values of a few positions, for the layers of one group. This crate knows blocks by their
//! [`BlockKey`] only. It knows no model and no device.
//!
//! ```text
//! block.rs        identity of a block: a hash of its rows and of all rows before them
//! ram.rs          which blocks a tier in host memory holds, and which of them is evicted next; no memory of its own
//! buffers.rs      aligned buffers, fixed in number
//! disk/mod.rs     the store on disk: look up, write, fetch
//! disk/format.rs  bytes of segments and records
//! disk/folder.rs  the files of the folder: opening, scanning, removing
//! disk/index.rs   which block is where
//! disk/seal.rs    encryption
//! disk/writer.rs  the thread that writes
//! disk/reader.rs  the threads that read
//! ```

#![forbid(unsafe_code)]

mod block;
mod buffers;
mod disk;
mod ram;

pub use block::{BlockHash, BlockKey, Link};
pub use buffers::{Aligned, PAGE};
pub use disk::{
    Access, Block, Damage, DiskError, DiskFaults, DiskOptions, DiskStatistics, DiskStore,
    DiskWatch, Fetch, Fetched, Listed, Operation, Secret, Transfer,
};
pub use ram::{Evicted, RamIndex, RamStatistics};
