// Activations [tokens, cols] to 8 bits with a scale for every 32 elements, for the integer mat-vec.
//
// As forebay-compute's small form, but the scale stays f32: a half would only cost accuracy here.
#include "common.cuh"

// One warp per 32 elements, a lane each. scales[i] = (scale, scale * sum of the codes).
extern "C" __global__ void __launch_bounds__(256)
    quantize_q8(const float *__restrict__ x, i8 *__restrict__ codes, float2 *__restrict__ scales,
                int groups) {
    const int group = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (group >= groups) return;
    const size_t at = (size_t)group * 32 + lane;
    const float value = x[at];
    // Compared as bits without the sign, where a NaN is larger than every number and is not lost.
    int bits = __float_as_int(value) & 0x7fffffff;
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1)
        bits = max(bits, __shfl_xor_sync(~0u, bits, distance));
    const float largest = __int_as_float(bits);
    const float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;
    const int code = __float2int_rn(value * inverse);
    const float scale = largest / 127.0f;
    codes[at] = (i8)code;
    const int sum = warp_sum(code);
    if (lane == 0) scales[group] = make_float2(scale, scale * (float)sum);
}
