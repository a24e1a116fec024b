//! Memory limit that all fuzz targets share.

use std::alloc::System;

use cap::Cap;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Number of bytes that reading a hostile input may allocate in addition to the input's own size.
const ALLOWANCE_BYTES: usize = 64 << 20;

/// Runs `work` on `data`. If it allocates more than the size of `data` and the allowance, it aborts, and the fuzzer
/// reports that.
pub fn bounded(data: &[u8], work: impl FnOnce(&[u8])) {
    let limit = ALLOCATOR.allocated() + data.len() + ALLOWANCE_BYTES;
    ALLOCATOR.set_limit(limit).expect("the limit lies above what is in use");
    work(data);
    ALLOCATOR.set_limit(usize::MAX).expect("no limit is always possible");
}
