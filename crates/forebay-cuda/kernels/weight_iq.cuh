// Codebook types: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S. A group is four runs of 8 elements.
#pragma once

#include "grids.cuh"

// Returns seven stored signs and the eighth, which their parity implies.
__device__ __forceinline__ u32 signs_of(u32 stored) {
    stored &= 127;
    return stored | (__popc(stored) & 1) << 7;
}

// Maps eight 2-bit codes through four levels of a byte each.
__device__ __forceinline__ void look_up_pairs(u32 point, u32 levels, u32 *codes) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 pairs = point >> 8 * i & 255;
        const u32 two = (pairs | pairs << 4) & 0x0f0fu;
        codes[i] = __byte_perm(levels, 0, (two | two << 2) & 0x3333u);
    }
}

// Maps four 3-bit codes through eight levels.
__device__ __forceinline__ u32 look_up_triples(u32 point, u32 low, u32 high) {
    const u32 nibbles = point & 7 | (point & 0x38) << 1 | (point & 0x1c0) << 2 | (point & 0xe00) << 3;
    return __byte_perm(low, high, nibbles);
}

__device__ __forceinline__ void unpack_iq2_run(u32 point, u32 signs, u32 *codes) {
    look_up_pairs(point, 0x002b1908u, codes);  // 8, 25, 43
    codes[0] = negate_bytes(codes[0], signs);
    codes[1] = negate_bytes(codes[1], signs >> 4);
}

__device__ __forceinline__ float iq2_scale(float d, u32 scale) { return d * (0.5f + (float)scale) * 0.25f; }

struct IQ2_XXS {
    static constexpr int ELEMENTS = 256, BYTES = 66, ALIGN = 2, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 words[2];
        load_words<2, 2>(block + 2 + 8 * g, words);
        out.scale[0] = iq2_scale(half_at(block), words[1] >> 28);
#pragma unroll
        for (int r = 0; r < 4; r++)
            unpack_iq2_run(GRID_IQ2_XXS[words[0] >> 8 * r & 255], signs_of(words[1] >> 7 * r), out.codes + 2 * r);
    }
};

struct IQ2_XS {
    static constexpr int ELEMENTS = 256, BYTES = 74, ALIGN = 2, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = true, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        const float d = half_at(block);
        const u32 scales = block[66 + g];
        out.scale[0] = iq2_scale(d, scales & 15);
        out.scale[1] = iq2_scale(d, scales >> 4);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 word = *(const u16 *)(block + 2 + 8 * g + 2 * r);
            unpack_iq2_run(GRID_IQ2_XS[word & 511], signs_of(word >> 9), out.codes + 2 * r);
        }
    }
};

struct IQ2_S {
    static constexpr int ELEMENTS = 256, BYTES = 82, ALIGN = 2, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = true, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        const float d = half_at(block);
        const u32 scales = block[74 + g], high = block[66 + g];
        out.scale[0] = iq2_scale(d, scales & 15);
        out.scale[1] = iq2_scale(d, scales >> 4);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 index = (high >> 2 * r & 3) << 8 | block[2 + 4 * g + r];
            unpack_iq2_run(GRID_IQ2_S[index], block[34 + 4 * g + r], out.codes + 2 * r);
        }
    }
};

struct IQ3_XXS {
    static constexpr int ELEMENTS = 256, BYTES = 98, ALIGN = 2, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 word, indices[2];
        load_words<2, 1>(block + 66 + 4 * g, &word);
        load_words<2, 2>(block + 2 + 8 * g, indices);
        out.scale[0] = half_at(block) * (0.5f + (float)(word >> 28)) * 0.5f;
#pragma unroll
        for (int i = 0; i < 8; i++) {  // two points of 4 elements per run
            const u32 point = GRID_IQ3_XXS[indices[i >> 2] >> 8 * (i & 3) & 255];
            // 4, 12, 20, 28, 36, 44, 52, 62
            const u32 levels = look_up_triples(point, 0x1c140c04u, 0x3e342c24u);
            out.codes[i] = negate_bytes(levels, signs_of(word >> 7 * (i >> 1)) >> 4 * (i & 1));
        }
    }
};

struct IQ3_S {
    static constexpr int ELEMENTS = 256, BYTES = 110, ALIGN = 2, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 indices[2], signs;
        load_words<2, 2>(block + 2 + 8 * g, indices);
        load_words<2, 1>(block + 74 + 4 * g, &signs);
        const u32 high = block[66 + g], scale = block[106 + (g >> 1)] >> 4 * (g & 1) & 15;
        out.scale[0] = half_at(block) * (float)(1 + 2 * scale);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 index = (high >> i & 1) << 8 | indices[i >> 2] >> 8 * (i & 3) & 255;
            // 1, 3, 5 ... 15
            const u32 levels = look_up_triples(GRID_IQ3_S[index], 0x07050301u, 0x0f0d0b09u);
            out.codes[i] = negate_bytes(levels, signs >> 4 * i);
        }
    }
};

// Codes are eight times (point + delta), where the point is -1, 0 or 1 and delta is 1/8 or -1/8.
__device__ __forceinline__ void unpack_iq1_run(u32 index, bool negative, u32 *codes) {
    look_up_pairs(GRID_IQ1[index], negative ? 0xff07fff7u : 0x010901f9u, codes);
}

struct IQ1_S {
    static constexpr int ELEMENTS = 256, BYTES = 50, ALIGN = 2, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        const u32 word = *(const u16 *)(block + 34 + 2 * g);
        out.scale[0] = half_at(block) * (float)(2 * (word >> 12 & 7) + 1) * 0.125f;
#pragma unroll
        for (int r = 0; r < 4; r++)
            unpack_iq1_run((word >> 3 * r & 7) << 8 | block[2 + 4 * g + r], word >> 15, out.codes + 2 * r);
    }
};

struct IQ1_M {
    static constexpr int ELEMENTS = 256, BYTES = 56, ALIGN = 8, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = true, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        const uint2 all = *(const uint2 *)(block + 48);
        // The scale's bits are the top nibbles of four words.
        const u32 bits = all.x >> 12 & 15 | all.x >> 24 & 0xf0 | (all.y >> 12 & 15) << 8 | (all.y >> 28) << 12;
        const float d = half_of(bits);
        const u32 scales = (g < 4 ? all.x : all.y) >> 16 * (g >> 1 & 1);
#pragma unroll
        for (int h = 0; h < 2; h++)
            out.scale[h] = d * (float)(2 * (scales >> 3 * (2 * (g & 1) + h) & 7) + 1) * 0.125f;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 nibble = block[32 + 2 * g + (r >> 1)] >> 4 * (r & 1);
            unpack_iq1_run((nibble & 7) << 8 | block[4 * g + r], nibble & 8, out.codes + 2 * r);
        }
    }
};
