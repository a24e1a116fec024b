// E4M3, alone and in blocks with a scale.
#pragma once

struct F8_E4M3 {
    static constexpr int ELEMENTS = 1, BYTES = 1, ALIGN = 1;
    static __device__ __forceinline__ float value(u32 bits) {
        const u32 exponent = bits >> 3 & 15, mantissa = bits & 7;
        float x = exponent == 0 ? (float)mantissa * (1.0f / 512.0f)
                                : __uint_as_float((exponent + 120) << 23 | mantissa << 20);
        if ((bits & 127) == 127) x = __uint_as_float(0x7fc00000u);
        return bits & 128 ? -x : x;
    }
    static __device__ __forceinline__ float at(const u8 *row, size_t i) { return value(row[i]); }
};

// Decodes four adjacent codes, less by the factor 2^8. An E4M3 is a narrower half, once the exponent's bias has grown by 8. So are
// subnormal ones. A NaN becomes 480 / 2^8: see `has_nan`.
__device__ __forceinline__ void e4m3_four(u32 codes, float (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        // Two codes, each in the upper byte of a half.
        const u32 pair = __byte_perm(codes, 0, i ? 0x3424 : 0x1404);
        const u32 halves = (pair & 0x80008000u) | (pair >> 1 & 0x3f803f80u);
        out[2 * i] = half_of(halves & 0xffff);
        out[2 * i + 1] = half_of(halves >> 16);
    }
}

// Returns bits that are set if one of four codes is NaN.
__device__ __forceinline__ u32 has_nan(u32 codes) { return (codes & 0x7f7f7f7fu) + 0x01010101u & 0x80808080u; }

// Blocks of COLUMNS codes and a scale. ELEMENTS is 1, because `at` takes any element.
template <int COLUMNS_> struct F8Blocks {
    static constexpr int COLUMNS = COLUMNS_, ELEMENTS = 1, BYTES = COLUMNS + 4, ALIGN = 4;

    static __device__ __forceinline__ float at(const u8 *row, size_t i) {
        const u8 *block = row + i / COLUMNS * BYTES;
        return __fmul_rn(F8_E4M3::value(block[i % COLUMNS]), *(const float *)(block + COLUMNS));
    }
};

struct F8_B128 : F8Blocks<128> {};
struct F8_B32 : F8Blocks<32> {};

template <class W> struct IsF8Blocks {
    static constexpr bool VALUE = false;
};
template <> struct IsF8Blocks<F8_B128> {
    static constexpr bool VALUE = true;
};
template <> struct IsF8Blocks<F8_B32> {
    static constexpr bool VALUE = true;
};
