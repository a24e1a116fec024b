// What every family shares: warp reductions and plain types. NVRTC has no <stdint.h>.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

// Kernels that begin with this are started while the kernel before ends, on GPUs of compute capability 9.0 and up: it waits
// until all that was queued before has ended and what that wrote is there. Only what no kernel writes, such as weights, may
// be read before it; pointers to anything else must not be __restrict__, or reads may move up here. Every kernel of a module
// does so or none. That kernels ask for the next one's start as soon as they run (launch_dependents) was tried: blocks that
// wait take the places of blocks that work, and tokens come 14 % slower.
//
// The code for 8.0 holds the instruction as a comment, which `module.rs` uncovers where it exists.
__device__ __forceinline__ void wait_for_previous() { asm volatile("// 90: griddepcontrol.wait;" ::: "memory"); }

// The sum over the 32 lanes, the same bits in each: pairs are added in an order that does not depend on the lane.
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

__device__ inline int warp_sum(int x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) x += __shfl_xor_sync(~0u, x, distance);
    return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}
