// Integers of four bits, as quantised safetensors files become them: I4_BF16, I4_Z32, I4_Z128.
#pragma once

struct I4_BF16 {
    static constexpr int ELEMENTS = 32, BYTES = 18, ALIGN = 2, ZERO = 8;
    static constexpr bool SIGNED = false, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int, Group &out) {
        out.scale[0] = __uint_as_float((u32)*(const u16 *)block << 16);
        unpack_nibbles<2>(block + 2, out.codes);
    }
};

// Blocks of ELEMENTS with a word before them: a scale whose lowest five bits are the zero point.
template <int ELEMENTS_> struct Int4Zero {
    static constexpr int ELEMENTS = ELEMENTS_, BYTES = ELEMENTS / 2 + 4, ALIGN = 4, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        const u32 word = *(const u32 *)block;
        out.scale[0] = __uint_as_float(word & ~31u);
        unpack_nibbles<4>(block + 4 + 16 * g, out.codes);
        const u32 zero = (word & 31) * 0x01010101u;
#pragma unroll
        for (int i = 0; i < 8; i++) out.codes[i] = __vsub4(out.codes[i], zero);
    }
};

struct I4_Z32 : Int4Zero<32> {};
struct I4_Z128 : Int4Zero<128> {};
