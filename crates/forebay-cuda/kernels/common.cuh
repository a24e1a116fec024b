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
// The code for 8.0 holds the instruction as a comment, which `module.rs` uncovers where the instruction exists.
__device__ __forceinline__ void wait_for_previous() { asm volatile("// 90: griddepcontrol.wait;" ::: "memory"); }

// Most rows of a pass for which kernels call `start_next`. Measured on an H100 with llama-8b and qwen3moe-30b: tokens of one
// sequence come 7 % faster, of two 5 %, of eight as fast, of 32 3 % slower. Prompts of 16 tokens become up to 8 % slower.
static constexpr int FEW_ROWS = 8;

// Lets the next kernel start as soon as all blocks of this one have called this or ended. Until this kernel has ended, the
// next one does only what it may do before `wait_for_previous`: it loads weights, for example. Must be called after
// `wait_for_previous`, which then still keeps its promise: what the kernel before this one wrote can be read before the next
// kernel's wait. The next kernel's blocks take places on the GPU, so a kernel that waits for another stream must not call this.
__device__ __forceinline__ void start_next(bool few_rows) {
    if (few_rows) asm volatile("// 90: griddepcontrol.launch_dependents;" ::: "memory");
}

// Fetches the 128 bytes around an address to the L2 cache.
__device__ inline void prefetch_l2(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

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
