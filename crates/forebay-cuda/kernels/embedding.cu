// Decodes rows of the embedding table, and whole tensors. The table may lie in device memory or in host memory that the GPU can read.
#include <cuda_fp16.h>

#include "weight.cuh"

// Decodes the 32 elements of group `group` of a row. Each step is rounded, as in the exact decoders.
template <class W> __device__ inline void decode(const u8 *row, int group, int cols, float factor, float *out) {
    if constexpr (W::ELEMENTS > 1) {
        constexpr int GROUPS = W::ELEMENTS / 32;
        Group w;
        W::unpack(row + (size_t)(group / GROUPS) * W::BYTES, group % GROUPS, w);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int h = W::HALVES ? i / 16 : 0, byte = (int)(w.codes[i / 4] >> 8 * (i % 4) & 0xff);
            const int code = W::SIGNED ? (i8)byte : byte - W::ZERO;
            const float x = __fmul_rn(w.scale[h], (float)code);
            out[i] = __fmul_rn(W::OFFSET ? __fadd_rn(x, w.offset[h]) : x, factor);
        }
    } else {
        for (int i = 0; i < 32 && 32 * group + i < cols; i++) out[i] = __fmul_rn(W::at(row, 32 * group + i), factor);
    }
}

// One thread for every 32 elements: grid (groups / 64, tokens). Elements are multiplied by `factor`. A token outside
// the vocabulary gives NaN.
extern "C" __global__ void __launch_bounds__(64)
    embed(const u8 *table, const u32 *tokens, float *out, int hidden, int vocabulary, u64 row_bytes, float factor) {
    const int group = blockIdx.x * 64 + threadIdx.x;
    if (32 * group >= hidden) return;
    const u32 token = tokens[blockIdx.y];
    out += (size_t)blockIdx.y * hidden + 32 * group;
    if (token < (u32)vocabulary) {
        decode<WEIGHT>(table + token * row_bytes, group, hidden, factor, out);
    } else {
        for (int i = 0; i < 32 && 32 * group + i < hidden; i++) out[i] = __int_as_float(0x7fffffff);
    }
}

// Rounds to nearest, ties to even. NaN stays NaN.
__device__ inline u16 to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (u16)(bits >> 16 | 0x40);
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

__device__ inline u16 to_f16(float x) {
    const __half half = __float2half_rn(x);
    return *(const u16 *)&half;
}

__device__ inline u32 two(u16 low, u16 high) { return low | (u32)high << 16; }

// Decodes `elements` weights to floats of a type: 0 F32, 1 F16, 2 BF16. `out` is aligned to 16 bytes. One thread for every 32 elements: grid
// (groups / 64).
extern "C" __global__ void __launch_bounds__(64) expand(const u8 *weights, u8 *out, int elements, int type) {
    const int group = blockIdx.x * 64 + threadIdx.x, here = min(elements - 32 * group, 32);
    if (here <= 0) return;
    float values[32] = {};
    decode<WEIGHT>(weights, group, elements, 1.0f, values);
    out += (size_t)32 * group * (type == 0 ? 4 : 2);
    u32 words[32];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        if (type == 0) {
            words[i] = __float_as_uint(values[i]);
        } else if (i % 2 == 0) {
            words[i / 2] = type == 1 ? two(to_f16(values[i]), to_f16(values[i + 1])) : two(to_bf16(values[i]), to_bf16(values[i + 1]));
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (type != 0 && i >= 4) break;
        const int whole = type == 0 ? 4 * i + 4 : 8 * i + 8;
        if (whole <= here) {
            ((uint4 *)out)[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        } else {
            for (int k = whole - (type == 0 ? 4 : 8); k < here; k++) {
                if (type == 0)
                    ((u32 *)out)[k] = words[k];
                else
                    ((u16 *)out)[k] = (u16)(words[k / 2] >> 16 * (k % 2));
            }
        }
    }
}
