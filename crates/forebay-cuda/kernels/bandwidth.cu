// Measures the read speed of device memory, the upper bound for products with weights.
#include "common.cuh"

// Every block writes one word, so that the compiler cannot remove the reads. `x` has `count` times 16 bytes.
extern "C" __global__ void __launch_bounds__(512)
    bandwidth_read(const uint4 *__restrict__ x, u32 *__restrict__ out, size_t count) {
    u32 all = 0;
    const size_t stride = (size_t)gridDim.x * blockDim.x;
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        uint4 words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) words[k] = __ldcs(x + i + k * stride);
#pragma unroll
        for (int k = 0; k < 4; k++) all ^= words[k].x ^ words[k].y ^ words[k].z ^ words[k].w;
    }
    for (; i < count; i += stride) {
        const uint4 word = __ldcs(x + i);
        all ^= word.x ^ word.y ^ word.z ^ word.w;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) all ^= __shfl_xor_sync(~0u, all, distance);
    __shared__ u32 warps[16];
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = all;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < 16; warp++) all ^= warps[warp];
        out[blockIdx.x] = all;
    }
}
