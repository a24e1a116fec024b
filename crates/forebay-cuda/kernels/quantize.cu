// Rounds activations [tokens, cols] to 8 bits, with a scale for every 32 elements, for the integer mat-vec.
//
// Codes are those of forebay-compute's small form, but the scale is f32: a half would only lose accuracy. The first 16
// codes of all groups come first, then the last 16 of all groups. So the 32 lanes of a warp, with one group each, read
// 512 adjacent bytes at once.
#include "activation.cuh"

// One warp per group of 32 elements, one element per lane. groups_per_token = cols / 32.
extern "C" __global__ void __launch_bounds__(256)
    quantize_q8(const float *x, i8 *codes, ActivationScale *scales, int groups, int groups_per_token) {
    wait_for_previous();
    const int group = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (group >= groups) return;
    const float value = x[(size_t)group * 32 + lane];
    // Compares bits without the sign. As bits, a NaN is larger than every number, so it is not lost.
    int bits = __float_as_int(value) & 0x7fffffff;
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1)
        bits = max(bits, __shfl_xor_sync(~0u, bits, distance));
    const float largest = __int_as_float(bits);
    const float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;
    const int code = __float2int_rn(value * inverse);
    int sum = code;
#pragma unroll
    for (int distance = 8; distance > 0; distance >>= 1) sum += __shfl_xor_sync(~0u, sum, distance);
    const int upper_sum = __shfl_sync(~0u, sum, 16);
    const int token = group / groups_per_token, at = group % groups_per_token, half = lane >> 4;
    codes[((size_t)token * 2 + half) * groups_per_token * 16 + at * 16 + (lane & 15)] = (i8)code;
    if (lane == 0) scales[group] = {largest / 127.0f, (short)sum, (short)upper_sum};
}

// Copies codes and scales of quantize_q8 to the order in which tensor cores take them: for every eight tokens and every group,
// 32 lanes with 8 codes each, then a scale for each of the eight tokens. Lane 4 * i + q has codes 4q .. 4q + 3 and 16 + 4q .. 16 + 4q + 3
// of token i. Tokens that do not exist are 0. One warp per eight tokens and group.
extern "C" __global__ void __launch_bounds__(256)
    tile_codes(const i8 *codes, const ActivationScale *scales, uint2 *tile_codes, ActivationScale *tile_scales, int tokens,
               int groups) {
    wait_for_previous();
    const int item = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (item >= (tokens + 7) / 8 * groups) return;
    const int token = item / groups * 8 + (lane >> 2), group = item % groups, quarter = lane & 3;
    uint2 out = make_uint2(0, 0);
    ActivationScale scale = {0.0f, {0, 0}};
    if (token < tokens) {
        const u32 *const from = (const u32 *)codes + (size_t)token * 8 * groups + 4 * group + quarter;
        out = make_uint2(from[0], from[4 * groups]);
        scale = scales[(size_t)token * groups + group];
    }
    tile_codes[item * 32 + lane] = out;
    if (quarter == 0) tile_scales[item * 8 + (lane >> 2)] = scale;
}
