// Several elements at once: eight of a row of the cache as f32, and f32 elements of shared memory.
#pragma once
#include "kv.cuh"
#include "pipeline.cuh"

// Loads eight elements of a row from element `i` on, a multiple of 8.
__device__ inline void load_eight(float *to, const KvBlock<KvF32> &block, int row, int i) {
    const float4 *const from = (const float4 *)(block.row(row) + i);
    const float4 a = from[0], b = from[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

__device__ inline void load_eight(float *to, const KvBlock<KvF16> &block, int row, int i) {
    const uint4 raw = *(const uint4 *)(block.row(row) + i);
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 pair = __half22float2(*(const __half2 *)&words[n]);
        to[2 * n] = pair.x, to[2 * n + 1] = pair.y;
    }
}

__device__ inline void load_eight(float *to, const KvBlock<KvQ8> &block, int row, int i) {
    const uint2 raw = *(const uint2 *)(block.row(row) + i);
    const float scale = __half2float(block.row_scales(row)[i / 32]);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        to[n] = scale * (float)(i8)(raw.x >> 8 * n);
        to[4 + n] = scale * (float)(i8)(raw.y >> 8 * n);
    }
}

__device__ inline void load_eight(float *to, const KvBlock<KvQ4> &block, int row, int i) {
    const u32 raw = *(const u32 *)(block.row(row) + i / 2);
    const float scale = __half2float(block.row_scales(row)[i / 32]);
#pragma unroll
    for (int n = 0; n < 8; n++) to[n] = scale * (float)((int)(raw >> 4 * n & 15) - 8);
}

// Loads four elements of shared memory. NVRTC gives this source one of several PTX texts at random if it merges plain loads.
__device__ __forceinline__ float4 load_four(u32 from) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from));
    return x;
}

__device__ __forceinline__ float2 load_two(u32 from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from));
    return x;
}
