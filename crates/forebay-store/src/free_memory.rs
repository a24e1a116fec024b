//! Giving memory back to the system.

/// Size from which an allocation is a mapping of its own, which goes back to the system as soon as it is freed.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES: libc::c_int = 1 << 20;

/// Makes large allocations mappings of their own, and ends of other areas go back to the system, for the whole process. Does
/// nothing unless the allocator is that of glibc, which otherwise raises its limits with the sizes that it sees, up to 32 and 64 MiB in each
/// thread's area.
pub fn keep_little_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc allows `mallopt` at any time and from any thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 4 * MAPPED_BYTES);
    }
}

/// Gives the memory that was freed, and that the allocator kept for later, back to the system. Does nothing unless the allocator
/// is that of glibc, which otherwise keeps what lies between parts that are in use.
pub fn give_back_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc allows `malloc_trim` at any time and from any thread. It only touches memory that is free.
    unsafe {
        libc::malloc_trim(0);
    }
}
