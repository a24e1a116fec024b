// Types without blocks: F64, F32, F16, BF16, F8_E4M3, F8_E5M2. `at` returns element i of a row.
#pragma once

struct F64 {
    static constexpr int ELEMENTS = 1, BYTES = 8, ALIGN = 8;
    static __device__ __forceinline__ float at(const u8 *row, size_t i) { return (float)((const double *)row)[i]; }
};

struct F32 {
    static constexpr int ELEMENTS = 1, BYTES = 4, ALIGN = 4;
    static __device__ __forceinline__ float at(const u8 *row, size_t i) { return ((const float *)row)[i]; }
};

struct F16 {
    static constexpr int ELEMENTS = 1, BYTES = 2, ALIGN = 2;
    static __device__ __forceinline__ float at(const u8 *row, size_t i) { return half_at(row + 2 * i); }
};

struct BF16 {
    static constexpr int ELEMENTS = 1, BYTES = 2, ALIGN = 2;
    static __device__ __forceinline__ float at(const u8 *row, size_t i) {
        return __uint_as_float((u32)((const u16 *)row)[i] << 16);
    }
};

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

struct F8_E5M2 {
    static constexpr int ELEMENTS = 1, BYTES = 1, ALIGN = 1;
    // The byte is the upper byte of a half.
    static __device__ __forceinline__ float at(const u8 *row, size_t i) { return half_of(row[i] << 8); }
};
