//! Giving memory back to the system.

/// Gives the memory that was freed, and that the allocator kept for later, back to the system. Does nothing unless the allocator
/// is that of glibc, which otherwise keeps what lies between parts that are in use.
pub fn give_back_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: glibc allows `malloc_trim` at any time and from any thread. It only touches memory that is free.
    unsafe {
        libc::malloc_trim(0);
    }
}
