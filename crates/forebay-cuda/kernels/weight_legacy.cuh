// Blocks of 32 with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL.
#pragma once

// Unpacks 16 bytes of nibbles: the low nibbles are elements 0 to 15, the high ones 16 to 31.
template <int ALIGN> __device__ __forceinline__ void unpack_nibbles(const u8 *p, u32 *codes) {
    u32 words[4];
    load_words<ALIGN, 4>(p, words);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        codes[i] = words[i] & 0x0f0f0f0fu;
        codes[i + 4] = words[i] >> 4 & 0x0f0f0f0fu;
    }
}

__device__ __forceinline__ void add_fifth_bits(u32 bits, u32 *codes) {
#pragma unroll
    for (int i = 0; i < 8; i++) codes[i] |= spread_bits(bits >> 4 * i) << 4;
}

struct Q4_0 {
    static constexpr int ELEMENTS = 32, BYTES = 18, ALIGN = 2, ZERO = 8;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int, Group &out) {
        out.scale[0] = half_at(block);
        unpack_nibbles<2>(block + 2, out.codes);
    }
};

struct Q4_1 {
    static constexpr int ELEMENTS = 32, BYTES = 20, ALIGN = 4, ZERO = 0;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = true;
    static __device__ __forceinline__ void unpack(const u8 *block, int, Group &out) {
        out.scale[0] = half_at(block);
        out.offset[0] = half_at(block + 2);
        unpack_nibbles<4>(block + 4, out.codes);
    }
};

struct Q5_0 {
    static constexpr int ELEMENTS = 32, BYTES = 22, ALIGN = 2, ZERO = 16;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int, Group &out) {
        out.scale[0] = half_at(block);
        unpack_nibbles<2>(block + 6, out.codes);
        u32 bits;
        load_words<2, 1>(block + 2, &bits);
        add_fifth_bits(bits, out.codes);
    }
};

struct Q5_1 {
    static constexpr int ELEMENTS = 32, BYTES = 24, ALIGN = 8, ZERO = 0;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = true;
    static __device__ __forceinline__ void unpack(const u8 *block, int, Group &out) {
        out.scale[0] = half_at(block);
        out.offset[0] = half_at(block + 2);
        unpack_nibbles<8>(block + 8, out.codes);
        add_fifth_bits(*(const u32 *)(block + 4), out.codes);
    }
};

struct Q8_0 {
    static constexpr int ELEMENTS = 32, BYTES = 34, ALIGN = 2, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = false, OFFSET = false;
    // Nine aligned words hold all 34 bytes.
    static constexpr int RAW = 9;
    static __device__ __forceinline__ void fetch(const u8 *block, RawBlock<Q8_0> &raw) {
        raw.past = (u32)(size_t)block & 2;
        load_words<4, RAW>(block - raw.past, raw.words);
    }
    static __device__ __forceinline__ void decode(const RawBlock<Q8_0> &raw, Group &out) {
        out.scale[0] = half_of(raw.words[0] >> 8 * raw.past);
#pragma unroll
        for (int i = 0; i < 8; i++)
            out.codes[i] = __funnelshift_rc(raw.words[i], raw.words[i + 1], 8 * raw.past + 16);
    }
    static __device__ __forceinline__ void unpack(const u8 *block, int, Group &out) {
        RawBlock<Q8_0> raw;
        fetch(block, raw);
        decode(raw, out);
    }
};

// The 16 levels of IQ4_NL and IQ4_XS: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113.
__device__ __forceinline__ Table16 iq4_levels() {
    return {{0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}};
}

template <int ALIGN> __device__ __forceinline__ void unpack_levels(const u8 *p, Table16 table, u32 *codes) {
    u32 words[4];
    load_words<ALIGN, 4>(p, words);
#pragma unroll
    for (int i = 0; i < 4; i++) look_up(table, words[i], codes[i], codes[i + 4]);
}

struct IQ4_NL {
    static constexpr int ELEMENTS = 32, BYTES = 18, ALIGN = 2, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int, Group &out) {
        out.scale[0] = half_at(block);
        unpack_levels<2>(block + 2, iq4_levels(), out.codes);
    }
};
