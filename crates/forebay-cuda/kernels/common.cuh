// Warp reductions and plain types, for all kernels. NVRTC has no <stdint.h>.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

// Waits until all work queued before has ended and its writes are visible. On GPUs of compute capability 9.0 and up, a
// kernel that begins with this starts while the previous kernel is ending. Before the call, a kernel may read only data
// that no kernel writes, such as weights, or that a kernel before the previous one wrote, such as the positions of a pass:
// a kernel starts when all blocks of the previous one have ended, and these have waited for the kernels before. Pointers
// to anything else must not be __restrict__, or the compiler may move reads up here. Either every kernel of a module calls
// this or none.
//
// Kernels do not trigger the start of the next one early (launch_dependents). That was tried: waiting blocks occupy the
// places of working blocks, and tokens come 14 % slower.
//
// The code for 8.0 holds the instruction as a comment, which `module.rs` uncovers where the instruction exists.
__device__ __forceinline__ void wait_for_previous() { asm volatile("// 90: griddepcontrol.wait;" ::: "memory"); }

// Returns the sum over the 32 lanes, with the same bits in each lane: the order of additions does not depend on the
// lane.
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
