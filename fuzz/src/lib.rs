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
    within(data.len() + ALLOWANCE_BYTES, || work(data));
}

/// Runs `work`. If it allocates more than so many bytes, it aborts, and the fuzzer reports that.
pub fn within(bytes: usize, work: impl FnOnce()) {
    ALLOCATOR
        .set_limit(ALLOCATOR.allocated() + bytes)
        .expect("the limit lies above what is in use");
    work();
    ALLOCATOR.set_limit(usize::MAX).expect("no limit is always possible");
}
