// Rows of activations as halves, as `narrow_half` writes and the products of prompts read them.
#pragma once

#include "mma.cuh"

// Returns the larger of `largest` and the magnitude of x, as bits. Without the sign, bits are ordered like magnitudes, with
// NaN above all.
__device__ __forceinline__ int larger_bits(int largest, float x) { return max(largest, __float_as_int(x) & 0x7fffffff); }

// Returns the largest of a block's bits. All threads must call this, at most once in a kernel.
__device__ __forceinline__ int block_largest(int largest) {
    __shared__ int warps[32];
    largest = __reduce_max_sync(~0u, largest);
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = largest;
    __syncthreads();
    return __reduce_max_sync(~0u, (threadIdx.x & 31) < blockDim.x >> 5 ? warps[threadIdx.x & 31] : 0);
}

// Returns the power of two by which a row is multiplied so that its largest magnitude is between 2^13 and 2^14. Then neither
// the largest number nor the sums of products overflow, and the others keep their bits. Sets `scale` to the inverse.
__device__ __forceinline__ float half_row_factor(int largest, float &scale) {
    // The exponent is at most 120, so that the inverse of 2^120 is not subnormal.
    const int k = min(13 - ((largest >> 23) - 127), 120);
    scale = __int_as_float((127 - k) << 23);
    return __int_as_float((k + 127) << 23);
}

// Four adjacent numbers times `factor` as halves.
__device__ __forceinline__ uint2 four_halves(float4 x, float factor) {
    return make_uint2(pack_halves(x.x * factor, x.y * factor), pack_halves(x.z * factor, x.w * factor));
}
