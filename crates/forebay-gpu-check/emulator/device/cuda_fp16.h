// Half floats: their bits, and conversions that round to nearest, ties to even.
#pragma once

#include "device.h"

namespace emulated {

inline float half_to_float(uint16_t bits) {
#ifdef __F16C__
    typedef short Eight __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps((Eight){(short)bits})[0];
#else
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) {
        const float value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t high = exponent == 31 ? 0xff : exponent + 112;
    return __uint_as_float(sign | high << 23 | fraction << 13);
#endif
}

inline uint16_t float_to_half(float x) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;  // like the GPU's conversion, for every NaN
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) {
        // After adding 0.5, the low bits of the sum are the value in units of 2^-24, rounded.
        const uint32_t sum = __float_as_uint(__uint_as_float(magnitude) + 0.5f);
        return (uint16_t)(sign | (sum - 0x3f000000));
    }
    return (uint16_t)(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline uint16_t float_to_bfloat(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Converts with a single rounding. The intermediate f32 is rounded to odd, which keeps enough information for the
// second step.
inline uint16_t double_to_half(double x) {
    float f = (float)x;
    if ((double)f != x && f - f == 0.0f) {
        uint32_t bits = __float_as_uint(f);
        if (fabs((double)f) > fabs(x)) bits -= 1;
        f = __uint_as_float(bits | 1);
    }
    return float_to_half(f);
}

}  // namespace emulated

struct __half {
    uint16_t bits;
};
struct __align__(4) __half2 {
    __half x, y;
};

inline __half __float2half_rn(float x) { return {emulated::float_to_half(x)}; }
inline float __half2float(__half x) { return emulated::half_to_float(x.bits); }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __float2half2_rn(float x) { return __half2half2(__float2half_rn(x)); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) {
    // The product of two halves is exact in f32.
    return __floats2half2_rn(__half2float(a.x) * __half2float(b.x), __half2float(a.y) * __half2float(b.y));
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    const auto less = [](__half x, __half y) {
        return __half{emulated::double_to_half((double)__half2float(x) - (double)__half2float(y))};
    };
    return {less(a.x, b.x), less(a.y, b.y)};
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    // The product is exact in f64, and the sum has so many more bits than a half that rounding it twice makes no difference
    // unless a term is 2^30 times as large as the other.
    const auto add = [](__half x, __half y, __half z) {
        return __half{emulated::double_to_half((double)__half2float(x) * (double)__half2float(y) + (double)__half2float(z))};
    };
    return {add(a.x, b.x, c.x), add(a.y, b.y, c.y)};
}
