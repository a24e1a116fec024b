//! What all fuzz targets share: a bound on memory.

use std::alloc::System;

use cap::Cap;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// What reading a hostile input may allocate beyond the input's own size, in bytes.
const ALLOWANCE_BYTES: usize = 64 << 20;

/// Runs `work` on `data`; it dies, and the fuzzer reports it, if it allocates more than the size of `data` and the
/// allowance.
pub fn bounded(data: &[u8], work: impl FnOnce(&[u8])) {
    let limit = ALLOCATOR.allocated() + data.len() + ALLOWANCE_BYTES;
    ALLOCATOR.set_limit(limit).expect("the limit lies above what is in use");
    work(data);
    ALLOCATOR.set_limit(usize::MAX).expect("no limit is always possible");
}
