// Four-bit floats with a shared scale: MXFP4, NVFP4. Codes are twice the values, scales half as large.
#pragma once

__device__ __forceinline__ Table16 fp4_doubled() {
    return {{0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}};
}

struct MXFP4 {
    static constexpr int ELEMENTS = 32, BYTES = 17, ALIGN = 1, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = false, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int, Group &out) {
        const u32 e = block[0];
        // 2^(e - 128); the lowest two are subnormal.
        out.scale[0] = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
        unpack_levels<1>(block + 1, fp4_doubled(), out.codes);
    }
};

// Half of an E4M3 scale without its sign; 0x7f, which is not a number, is 0.
__device__ __forceinline__ float half_of_e4m3(u32 bits) {
    const u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (bits == 0x7f) return 0.0f;
    if (exponent == 0) return (float)mantissa * (1.0f / 1024.0f);
    return __uint_as_float((exponent + 119) << 23 | mantissa << 20);
}

struct NVFP4 {
    static constexpr int ELEMENTS = 64, BYTES = 36, ALIGN = 4, ZERO = 0;
    static constexpr bool SIGNED = true, HALVES = true, OFFSET = false;
    static __device__ __forceinline__ void unpack(const u8 *block, int g, Group &out) {
        u32 words[4];
        load_words<4, 4>(block + 4 + 16 * g, words);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            out.scale[h] = half_of_e4m3(block[2 * g + h]);
            u32 *codes = out.codes + 4 * h;
            look_up(fp4_doubled(), words[2 * h], codes[0], codes[2]);
            look_up(fp4_doubled(), words[2 * h + 1], codes[1], codes[3]);
        }
    }
};
