// One and two bits with one scale: Q1_0, Q2_0; ternary: TQ1_0, TQ2_0.
#pragma once

struct Q1_0 {
    static constexpr int ELEMENTS = 128, BYTES = 18, ALIGN = 2, ZERO = 1;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        out.scale[0] = half_at(block);
        u32 bits;
        load_words<2, 1>(block + 2 + 4 * g, &bits);
#pragma unroll
        for (int i = 0; i < 8; i++) out.codes[i] = spread_bits(bits >> 4 * i) << 1;
    }
};

struct Q2_0 {
    static constexpr int ELEMENTS = 64, BYTES = 18, ALIGN = 2, ZERO = 1;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        out.scale[0] = half_at(block);
        u32 words[2];
        load_words<2, 2>(block + 2 + 8 * g, words);
#pragma unroll
        for (int i = 0; i < 8; i++) out.codes[i] = spread_pairs(words[i >> 2] >> 8 * (i & 3));
    }
};

struct TQ2_0 {
    static constexpr int ELEMENTS = 256, BYTES = 66, ALIGN = 2, ZERO = 1;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        out.scale[0] = half_at(block + 64);
        load_words<2, 8>(block + 32 * (g >> 2), out.codes);
#pragma unroll
        for (int i = 0; i < 8; i++) out.codes[i] = out.codes[i] >> 2 * (g & 3) & 0x03030303u;
    }
};

struct TQ1_0 {
    static constexpr int ELEMENTS = 256, BYTES = 54, ALIGN = 2, ZERO = 1;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = false;
    // Returns digit k of a byte, which is a fraction in base 3.
    static __device__ __forceinline__ u32 digit(u32 byte, int k) {
        const u32 powers = k < 4 ? 0x1b090301u >> 8 * k & 255 : 81;
        return (byte * powers & 255) * 3 >> 8;
    }
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        out.scale[0] = half_at(block + 52);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 word = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int e = 4 * i + j;
                int at, k;
                if (g < 5) {
                    at = e, k = g;
                } else if (g < 7 || e < 16) {
                    at = 32 + (e & 15), k = 2 * (g - 5) + (e >> 4);
                } else {
                    at = 48 + (e & 3), k = (e - 16) >> 2;
                }
                word |= digit(block[at], k) << 8 * j;
            }
            out.codes[i] = word;
        }
    }
};
