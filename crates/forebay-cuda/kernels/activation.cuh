// Activations rounded to 8 bits, as `quantize_q8` writes and the mat-vec kernels read them.
#pragma once

#include "common.cuh"

// Scale of 32 elements (value = scale * code), and the sums of the first and the last 16 codes.
struct __align__(8) ActivationScale {
    float scale;
    short sums[2];
};

// Rounds 4 adjacent elements of each lane, so that 8 lanes hold a group of 32, as `quantize_q8` does. All lanes of the
// warp must call this. `at` is the index of the lane's first element in row `row` of n elements. Nothing is stored if
// `stored` is false; the 8 lanes of a group must agree.
__device__ __forceinline__ void round_quad(float4 x, bool stored, int row, int at, int n, i8 *codes,
                                           ActivationScale *scales) {
    const int mask = 0x7fffffff;
    // Compares bits without the sign. As bits, a NaN is larger than every number, so it is not lost.
    int bits = max(max(__float_as_int(x.x) & mask, __float_as_int(x.y) & mask),
                   max(__float_as_int(x.z) & mask, __float_as_int(x.w) & mask));
#pragma unroll
    for (int distance = 4; distance > 0; distance >>= 1)
        bits = max(bits, __shfl_xor_sync(~0u, bits, distance));
    const float largest = __int_as_float(bits);
    const float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;
    const int code[4] = {__float2int_rn(x.x * inverse), __float2int_rn(x.y * inverse),
                         __float2int_rn(x.z * inverse), __float2int_rn(x.w * inverse)};
    int sum = code[0] + code[1] + code[2] + code[3];
    sum += __shfl_xor_sync(~0u, sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 1);
    const int upper_sum = __shfl_xor_sync(~0u, sum, 4);
    if (!stored) return;
    const int groups = n / 32, group = at / 32, half = at >> 4 & 1;
    const u32 packed = (code[0] & 255) | (code[1] & 255) << 8 | (code[2] & 255) << 16 | (u32)code[3] << 24;
    *(u32 *)(codes + ((size_t)row * 2 + half) * groups * 16 + group * 16 + (at & 15)) = packed;
    if (at % 32 == 0) scales[(size_t)row * groups + group] = {largest / 127.0f, (short)sum, (short)upper_sum};
}
