// Super-blocks of 256 with quantised scales: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS.
#pragma once

struct Q2_K {
    static constexpr int ELEMENTS = 256, BYTES = 84, ALIGN = 4, ZERO = 0;
    static constexpr bool SIGNED = false, HALVES = true, OFFSET = true;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 words[8];
        load_words<4, 8>(block + 16 + 32 * (g >> 2), words);
#pragma unroll
        for (int i = 0; i < 8; i++) out.codes[i] = words[i] >> 2 * (g & 3) & 0x03030303u;
        const float d = half_at(block + 80), dmin = half_at(block + 82);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const u32 scale = block[2 * g + h];
            out.scale[h] = d * (float)(scale & 15);
            out.offset[h] = -(dmin * (float)(scale >> 4));
        }
    }
};

struct Q3_K {
    static constexpr int ELEMENTS = 256, BYTES = 110, ALIGN = 2, ZERO = 4;
    static constexpr bool SIGNED = false, HALVES = true, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 low[8], high[8];
        load_words<2, 8>(block + 32 + 32 * (g >> 2), low);
        load_words<2, 8>(block, high);
#pragma unroll
        for (int i = 0; i < 8; i++)
            out.codes[i] = low[i] >> 2 * (g & 3) & 0x03030303u | (high[i] >> g & 0x01010101u) << 2;
        const float d = half_at(block + 108);
        const u8 *scales = block + 96;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int s = 2 * g + h;
            const int scale = scales[s & 7] >> 4 * (s >> 3) & 15 | (scales[8 + (s & 3)] >> 2 * (s >> 2) & 3) << 4;
            out.scale[h] = d * (float)(scale - 32);
        }
    }
};

// Decodes the scale and the negative minimum of sub-block g from the 16 bytes at the start of Q4_K and Q5_K.
__device__ __forceinline__ void scale_and_minimum(const u8 *block, int g, Group &out) {
    u32 head[4];
    load_words<16, 4>(block, head);
    const int shift = 8 * (g & 3);
    const u32 a = head[1] >> shift, b = head[2] >> shift, c = head[3] >> shift;
    const u32 scale = g < 4 ? a & 63 : c & 15 | a >> 2 & 48;
    const u32 minimum = g < 4 ? b & 63 : c >> 4 & 15 | b >> 2 & 48;
    out.scale[0] = half_of(head[0]) * (float)scale;
    out.offset[0] = -(half_of(head[0] >> 16) * (float)minimum);
}

// Decodes those of sub-blocks 2 * pair and 2 * pair + 1, two bytes of each at once.
__device__ __forceinline__ void two_scales_and_minima(const u8 *block, int pair, Group (&out)[2]) {
    u32 head[4];
    load_words<16, 4>(block, head);
    const int shift = 16 * (pair & 1);
    const u32 a = head[1] >> shift, b = head[2] >> shift, c = head[3] >> shift;
    const u32 scales = pair < 2 ? a & 0x3f3f : c & 0x0f0f | a >> 2 & 0x3030;
    const u32 minima = pair < 2 ? b & 0x3f3f : c >> 4 & 0x0f0f | b >> 2 & 0x3030;
    const float d = half_of(head[0]), dmin = half_of(head[0] >> 16);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        out[i].scale[0] = d * (float)(scales >> 8 * i & 255);
        out[i].offset[0] = -(dmin * (float)(minima >> 8 * i & 255));
    }
}

struct Q4_K {
    static constexpr int ELEMENTS = 256, BYTES = 144, ALIGN = 16, ZERO = 0;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = true;
    static constexpr int APART = 1;
    static __device__ __forceinline__ int first_of(int pair) { return 2 * pair; }
    static __device__ __forceinline__ void unpack_two(const u8 *block, int pair, Group (&out)[2]) {
        u32 words[8];
        load_words<16, 8>(block + 16 + 32 * pair, words);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out[0].codes[i] = words[i] & 0x0f0f0f0fu;
            out[1].codes[i] = words[i] >> 4 & 0x0f0f0f0fu;
        }
        two_scales_and_minima(block, pair, out);
    }
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 words[8];
        load_words<16, 8>(block + 16 + 32 * (g >> 1), words);
#pragma unroll
        for (int i = 0; i < 8; i++) out.codes[i] = words[i] >> 4 * (g & 1) & 0x0f0f0f0fu;
        scale_and_minimum(block, g, out);
    }
};

struct Q5_K {
    static constexpr int ELEMENTS = 256, BYTES = 176, ALIGN = 16, ZERO = 0;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = true;
    static constexpr int APART = 1;
    static __device__ __forceinline__ int first_of(int pair) { return 2 * pair; }
    static __device__ __forceinline__ void unpack_two(const u8 *block, int pair, Group (&out)[2]) {
        u32 words[8], fifth[8];
        load_words<16, 8>(block + 48 + 32 * pair, words);
        load_words<16, 8>(block + 16, fifth);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 bits = fifth[i] >> 2 * pair;
            out[0].codes[i] = words[i] & 0x0f0f0f0fu | (bits & 0x01010101u) << 4;
            out[1].codes[i] = words[i] >> 4 & 0x0f0f0f0fu | (bits & 0x02020202u) << 3;
        }
        two_scales_and_minima(block, pair, out);
    }
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 words[8], fifth[8];
        load_words<16, 8>(block + 48 + 32 * (g >> 1), words);
        load_words<16, 8>(block + 16, fifth);
#pragma unroll
        for (int i = 0; i < 8; i++)
            out.codes[i] = words[i] >> 4 * (g & 1) & 0x0f0f0f0fu | (fifth[i] >> g & 0x01010101u) << 4;
        scale_and_minimum(block, g, out);
    }
};

struct Q6_K {
    static constexpr int ELEMENTS = 256, BYTES = 210, ALIGN = 2, ZERO = 32;
    static constexpr bool SIGNED = false, HALVES = true, OFFSET = false;
    static constexpr int APART = 2;
    static __device__ __forceinline__ int first_of(int pair) { return (pair & 1) + 4 * (pair >> 1); }
    static __device__ __forceinline__ void unpack_two(const u8 *block, int pair, Group (&out)[2]) {
        u32 low[8], high[8];
        load_words<2, 8>(block + 32 * pair, low);
        load_words<2, 8>(block + 128 + 32 * (pair >> 1), high);
        const int shift = 2 * (pair & 1);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 bits = high[i] >> shift;
            out[0].codes[i] = low[i] & 0x0f0f0f0fu | bits << 4 & 0x30303030u;
            out[1].codes[i] = low[i] >> 4 & 0x0f0f0f0fu | bits & 0x30303030u;
        }
        const float d = half_at(block + 208);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 scales = *(const u16 *)(block + 192 + 2 * first_of(pair) + 4 * i);
            out[i].scale[0] = d * (float)(i8)scales;
            out[i].scale[1] = d * (float)(i8)(scales >> 8);
        }
    }
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 low[8], high[8];
        load_words<2, 8>(block + 64 * (g >> 2) + 32 * (g & 1), low);
        load_words<2, 8>(block + 128 + 32 * (g >> 2), high);
        const int low_shift = 4 * (g >> 1 & 1), high_shift = 2 * (g & 3);
#pragma unroll
        for (int i = 0; i < 8; i++)
            out.codes[i] = low[i] >> low_shift & 0x0f0f0f0fu | (high[i] >> high_shift & 0x03030303u) << 4;
        const float d = half_at(block + 208);
        const u32 scales = *(const u16 *)(block + 192 + 2 * g);
        out.scale[0] = d * (float)(i8)scales;
        out.scale[1] = d * (float)(i8)(scales >> 8);
    }
};

struct IQ4_XS {
    static constexpr int ELEMENTS = 256, BYTES = 136, ALIGN = 8, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        unpack_levels<8>(block + 8 + 16 * g, iq4_levels(), out.codes);
        const u32 head = *(const u32 *)block, low = *(const u32 *)(block + 4);
        const int scale = low >> 4 * g & 15 | (head >> (16 + 2 * g) & 3) << 4;
        out.scale[0] = half_at(block) * (float)(scale - 32);
    }
};
