// Asynchronous copies from device memory to shared memory, which continue while a thread computes.
#pragma once

#include "common.cuh"

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 bytes; both addresses are multiples of 16. The copy bypasses the L1 cache, because weights are read once.
__device__ __forceinline__ void copy_async(u32 to, u64 from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copies 4 bytes; both addresses are multiples of 4.
__device__ __forceinline__ void copy_async_4(u32 to, u64 from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// Copies like `copy_async`, but reads only the first `bytes` bytes and sets the others to zero.
__device__ __forceinline__ void copy_async_zero(u32 to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's latest groups are in flight.
template <int N> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
