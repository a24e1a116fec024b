// Single elements of weights by type, the same bits as the processor's exact decoders. For looking up rows; products
// read whole blocks in ways of their own. The layouts are described where forebay-format decodes them.
//
// Each type: elements and bytes of a block, and element `i` of one. Blocks lie at even addresses, MXFP4's anywhere.
#pragma once
#include <cuda_fp16.h>
#include "common.cuh"

__device__ inline float half_at(const u8 *at) {
    return __half2float(__ushort_as_half(*(const u16 *)at));
}

// Low nibble of byte i % n for the first n elements, high nibble for the other n.
__device__ inline int nibble(const u8 *bytes, int i, int n) {
    return bytes[i % n] >> (i / n * 4) & 15;
}

__device__ inline float scaled(float scale, int q) { return __fmul_rn(scale, (float)q); }

struct F32 {
    static constexpr int ELEMENTS = 1, BYTES = 4;
    __device__ static float element(const u8 *block, int) { return *(const float *)block; }
};

struct F16 {
    static constexpr int ELEMENTS = 1, BYTES = 2;
    __device__ static float element(const u8 *block, int) { return half_at(block); }
};

struct Bf16 {
    static constexpr int ELEMENTS = 1, BYTES = 2;
    __device__ static float element(const u8 *block, int) {
        return __uint_as_float((u32) * (const u16 *)block << 16);
    }
};

struct Q4_0 {
    static constexpr int ELEMENTS = 32, BYTES = 18;
    __device__ static float element(const u8 *block, int i) {
        return scaled(half_at(block), nibble(block + 2, i, 16) - 8);
    }
};

struct Q4_1 {
    static constexpr int ELEMENTS = 32, BYTES = 20;
    __device__ static float element(const u8 *block, int i) {
        return __fadd_rn(scaled(half_at(block), nibble(block + 4, i, 16)), half_at(block + 2));
    }
};

// Bit `i` of a run of bytes.
__device__ inline int bit(const u8 *bytes, int i) { return bytes[i / 8] >> (i % 8) & 1; }

struct Q5_0 {
    static constexpr int ELEMENTS = 32, BYTES = 22;
    __device__ static float element(const u8 *block, int i) {
        const int q = nibble(block + 6, i, 16) | bit(block + 2, i) << 4;
        return scaled(half_at(block), q - 16);
    }
};

struct Q5_1 {
    static constexpr int ELEMENTS = 32, BYTES = 24;
    __device__ static float element(const u8 *block, int i) {
        const int q = nibble(block + 8, i, 16) | bit(block + 4, i) << 4;
        return __fadd_rn(scaled(half_at(block), q), half_at(block + 2));
    }
};

struct Q8_0 {
    static constexpr int ELEMENTS = 32, BYTES = 34;
    __device__ static float element(const u8 *block, int i) {
        return scaled(half_at(block), (i8)block[2 + i]);
    }
};

// Two bits of element `i` of 256 in 64 bytes.
__device__ inline int two_bits(const u8 *bytes, int i) {
    return bytes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
}

struct Q2_K {
    static constexpr int ELEMENTS = 256, BYTES = 84;
    __device__ static float element(const u8 *block, int i) {
        const int scales = block[i / 16];
        const float scale = scaled(half_at(block + 80), scales & 15);
        const float minimum = scaled(half_at(block + 82), scales >> 4);
        return __fsub_rn(scaled(scale, two_bits(block + 16, i)), minimum);
    }
};

struct Q3_K {
    static constexpr int ELEMENTS = 256, BYTES = 110;
    __device__ static float element(const u8 *block, int i) {
        const u8 *const scales = block + 96;
        const int s = i / 16;
        const int low = scales[s % 8] >> (s / 8 * 4) & 15, high = scales[8 + s % 4] >> (s / 4 * 2) & 3;
        const float scale = scaled(half_at(block + 108), (high << 4 | low) - 32);
        const int top = block[i % 32] >> (i / 32) & 1;
        return scaled(scale, (top << 2 | two_bits(block + 32, i)) - 4);
    }
};

// Scale and minimum `s` of 8 in the 12 bytes of Q4_K and Q5_K.
__device__ inline int2 scale_and_minimum(const u8 *scales, int s) {
    if (s < 4) return make_int2(scales[s] & 63, scales[s + 4] & 63);
    return make_int2((scales[s - 4] >> 6) << 4 | (scales[s + 4] & 15),
                     (scales[s] >> 6) << 4 | scales[s + 4] >> 4);
}

// Element with code `q` of sub-block `s` of Q4_K and Q5_K.
__device__ inline float between(const u8 *block, int s, int q) {
    const int2 of = scale_and_minimum(block + 4, s);
    const float scale = scaled(half_at(block), of.x), minimum = scaled(half_at(block + 2), of.y);
    return __fsub_rn(scaled(scale, q), minimum);
}

struct Q4_K {
    static constexpr int ELEMENTS = 256, BYTES = 144;
    __device__ static float element(const u8 *block, int i) {
        return between(block, i / 32, nibble(block + 16 + i / 64 * 32, i % 64, 32));
    }
};

struct Q5_K {
    static constexpr int ELEMENTS = 256, BYTES = 176;
    __device__ static float element(const u8 *block, int i) {
        const int high = block[16 + i % 32] >> (i / 32) & 1;
        return between(block, i / 32, nibble(block + 48 + i / 64 * 32, i % 64, 32) | high << 4);
    }
};

struct Q6_K {
    static constexpr int ELEMENTS = 256, BYTES = 210;
    __device__ static float element(const u8 *block, int i) {
        const float scale = scaled(half_at(block + 208), (i8)block[192 + i / 16]);
        const int low = nibble(block + i / 128 * 64, i % 128, 64);
        return scaled(scale, (two_bits(block + 128, i) << 4 | low) - 32);
    }
};

__constant__ const i8 IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                        1,    13,   25,  38,  53,  69,  89,  113};

struct Iq4Nl {
    static constexpr int ELEMENTS = 32, BYTES = 18;
    __device__ static float element(const u8 *block, int i) {
        return scaled(half_at(block), IQ4_LEVELS[nibble(block + 2, i, 16)]);
    }
};

struct Iq4Xs {
    static constexpr int ELEMENTS = 256, BYTES = 136;
    __device__ static float element(const u8 *block, int i) {
        const int g = i / 32;
        const int low = block[4 + g / 2] >> (g % 2 * 4) & 15;
        const int high = block[2 + g / 4] >> (g % 4 * 2) & 3;
        const float scale = scaled(half_at(block), (high << 4 | low) - 32);
        return scaled(scale, IQ4_LEVELS[nibble(block + 8 + g * 16, i % 32, 16)]);
    }
};

// Twice the magnitudes of E2M1, which makes them whole; the scale is halved in turn.
__constant__ const i8 E2M1_DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Mxfp4 {
    static constexpr int ELEMENTS = 32, BYTES = 17;
    __device__ static float element(const u8 *block, int i) {
        // 2^(e - 128), subnormal for the lowest two.
        const u32 e = block[0], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
        return scaled(__uint_as_float(bits), E2M1_DOUBLED[nibble(block + 1, i, 16)]);
    }
};
