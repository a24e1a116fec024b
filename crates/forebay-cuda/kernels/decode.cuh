// Decodes groups of 32 weights to 16-bit numbers for tensor cores, and to f32.
#pragma once

#include <cuda_fp16.h>
#include "mma.cuh"
#include "weight.cuh"

template <class W> struct Is16Bits {
    static constexpr bool VALUE = false, BFLOAT = false;
};
template <> struct Is16Bits<F16> {
    static constexpr bool VALUE = true, BFLOAT = false;
};
template <> struct Is16Bits<BF16> {
    static constexpr bool VALUE = true, BFLOAT = true;
};
template <> struct Is16Bits<BF16_C2048> : Is16Bits<BF16> {};
template <> struct Is16Bits<BF16_C256> : Is16Bits<BF16> {};

// Factor of the halves that hold weights of blocks, so that small weights keep their bits. The largest weight is then
// 4094.
template <class W> struct HalfFactor {
    static constexpr float VALUE = W::ELEMENTS > 1 || IsF8Blocks<W>::VALUE ? 16.0f : 1.0f;
};

template <class W> __device__ __forceinline__ float value_of(u32 codes, int k, float scale, float offset) {
    constexpr u32 FLIP = W::SIGNED ? 0x80808080u : 0;
    constexpr float BIAS = 8388608.0f + (W::SIGNED ? 128 : W::ZERO);
    // The float 2^23 + byte has the byte in its lowest bits. Conversion instructions would be four times as slow.
    const float shifted = __uint_as_float(__byte_perm(codes ^ FLIP, 0x4b000000u, 0x7440 | k));
    return W::OFFSET ? scale * (shifted - BIAS) + offset : scale * (shifted - BIAS);
}

// Decodes elements from 32 * group on, of a row of `cols` elements, to f32. Elements beyond the end are zero.
template <class W> __device__ __forceinline__ void decode_floats(const u8 *row, int group, int cols, float (&out)[32]) {
    if constexpr (W::ELEMENTS > 1) {
        constexpr int GROUPS = W::ELEMENTS / 32;
        Group w;
        W::unpack(row + (size_t)(group / GROUPS) * W::BYTES, group % GROUPS, w);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int h = W::HALVES ? i >> 4 : 0;
            out[i] = value_of<W>(w.codes[i >> 2], i & 3, w.scale[h], w.offset[h]);
        }
    } else if constexpr (IsF8Blocks<W>::VALUE) {
        // Rows are whole blocks, so a group has no columns beyond the end.
        const u8 *block = row + (size_t)(32 * group / W::COLUMNS) * W::BYTES;
        u32 codes[8];
        load_words<W::ALIGN, 8>(block + 32 * group % W::COLUMNS, codes);
        const float scale = *(const float *)(block + W::COLUMNS);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float four[4];
            e4m3_four(codes[i], four);
            const float all = has_nan(codes[i]) ? __uint_as_float(0x7fc00000u) : 256.0f;
#pragma unroll
            for (int k = 0; k < 4; k++) out[4 * i + k] = __fmul_rn(four[k] * all, scale);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 32; i++) out[i] = 32 * group + i < cols ? W::at(row, 32 * group + i) : 0.0f;
    }
}

// Decodes the same elements to pairs of 16-bit numbers: bfloats for BF16, halves times HalfFactor otherwise. Those of block
// types are computed in halves, two at a time: scales and offsets are rounded first, which adds errors of the size of
// those that rounding the weights makes, and takes half as many instructions as f32.
template <class W> __device__ __forceinline__ void decode_pairs(const u8 *row, int group, int cols, u32 (&out)[16]) {
    if constexpr (W::ELEMENTS > 1) {
        constexpr int GROUPS = W::ELEMENTS / 32;
        constexpr u32 FLIP = W::SIGNED ? 0x80808080u : 0;
        constexpr float BIAS = 1024.0f + (W::SIGNED ? 128 : W::ZERO);
        Group w;
        W::unpack(row + (size_t)(group / GROUPS) * W::BYTES, group % GROUPS, w);
        __half2 scales[2], offsets[2];
#pragma unroll
        for (int h = 0; h < (W::HALVES ? 2 : 1); h++) {
            scales[h] = __float2half2_rn(w.scale[h] * HalfFactor<W>::VALUE);
            if (W::OFFSET) offsets[h] = __float2half2_rn(w.offset[h] * HalfFactor<W>::VALUE);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int h = W::HALVES ? i >> 3 : 0;
            // The half 2^10 + byte has the byte in its lowest bits.
            const u32 bits = __byte_perm(w.codes[i >> 1] ^ FLIP, 0x64646464u, i & 1 ? 0x4342 : 0x4140);
            const __half2 codes = __hsub2(*(const __half2 *)&bits, __float2half2_rn(BIAS));
            const __half2 pair = W::OFFSET ? __hfma2(codes, scales[h], offsets[h]) : __hmul2(codes, scales[h]);
            out[i] = *(const u32 *)&pair;
        }
    } else if constexpr (Is16Bits<W>::VALUE) {
        const u8 *from = row + (size_t)group * 64;
        if (32 * group + 32 > cols) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int at = 32 * group + 2 * i;  // the number of columns is even
                out[i] = at < cols ? ((const u16 *)row)[at] | (u32)((const u16 *)row)[at + 1] << 16 : 0;
            }
        } else if (((size_t)from & 15) == 0) {
            load_words<16, 16>(from, out);
        } else {
            load_words<2, 16>(from, out);
        }
    } else {
        float values[32];
        decode_floats<W>(row, group, cols, values);
#pragma unroll
        for (int i = 0; i < 16; i++)
            out[i] = pack_halves(values[2 * i] * HalfFactor<W>::VALUE, values[2 * i + 1] * HalfFactor<W>::VALUE);
    }
}

// A group of 32 weights on its way from device memory to tensor cores. Compact weights are decoded when they are needed, so that
// products run while they come.
template <class W, bool COMPACT = IsCompact<W>::VALUE> struct ComingGroup {
    u32 words[16];

    __device__ __forceinline__ void load(const u8 *row, int group, int cols) { decode_pairs<W>(row, group, cols, words); }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < 16; i++) words[i] = 0;
    }
    // Decodes to pairs of 16-bit numbers. `row` and `group` are those of `load`; they are not used after `clear`.
    __device__ __forceinline__ void pairs(const u8 *, int, u32 (&out)[16]) const {
#pragma unroll
        for (int i = 0; i < 16; i++) out[i] = words[i];
    }
};

template <class W> struct ComingGroup<W, true> {
    CompactEights<W, 4> eights;

    // Rows are whole blocks, so a group has no columns beyond the end.
    __device__ __forceinline__ void load(const u8 *row, int group, int) { eights.load(row, 4 * group); }
    __device__ __forceinline__ void clear() { eights.clear(); }
    __device__ __forceinline__ void pairs(const u8 *row, int group, u32 (&out)[16]) const { eights.pairs(row, 4 * group, out); }
};
