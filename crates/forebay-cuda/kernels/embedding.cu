// Decodes rows of the embedding table. The table may lie in device memory or in host memory that the GPU can read.
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
