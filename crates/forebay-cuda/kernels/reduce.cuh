// Sums over a block, with the same bits in every thread.
#pragma once
#include "common.cuh"

// Returns the sum of `x` over the block. `shared` has room for one float per warp.
__device__ inline float block_sum(float x, float *shared) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    x = warp_sum(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return warp_sum(lane < (int)(blockDim.x >> 5) ? shared[lane] : 0.0f);
}
