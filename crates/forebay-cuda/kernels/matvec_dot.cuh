// Shared code of the mat-vec kernels for block types: what a lane takes of a row at once, and its product with the
// activations.
#pragma once

#include "activation.cuh"
#include "weight.cuh"

// A unit is one group, or two groups if a type decodes two with one read of the bytes that they share.
template <class W, class = void> struct Unit {
    static constexpr int RUN = 1, APART = 0;
    static __device__ __forceinline__ int first_of(int unit) { return unit; }
    static __device__ __forceinline__ void unpack(const u8 *block, int unit, Group (&out)[1]) {
        W::unpack(block, unit, out[0]);
    }
};
template <class> struct Exists {
    typedef void Type;
};
template <class W> struct Unit<W, typename Exists<decltype(&W::unpack_two)>::Type> {
    static constexpr int RUN = 2, APART = W::APART;
    static __device__ __forceinline__ int first_of(int unit) { return W::first_of(unit); }
    static __device__ __forceinline__ void unpack(const u8 *block, int unit, Group (&out)[2]) {
        W::unpack_two(block, unit, out);
    }
};

// VALUE is true if a type separates reading from decoding: fetch(block, raw), decode(raw, out).
template <class W, class = void> struct HasRaw {
    static constexpr bool VALUE = false;
};
template <class W> struct HasRaw<W, typename Exists<decltype(W::RAW)>::Type> {
    static constexpr bool VALUE = true;
};

// Activations of one group.
struct Input {
    int4 low, high;
    ActivationScale scale;

    // Loads group `group` of row `row` of activations with `groups` groups each.
    __device__ __forceinline__ void load(const i8 *codes, const ActivationScale *scales, size_t row, int groups,
                                         int group) {
        const int4 *x = (const int4 *)(codes + row * groups * 32);
        low = x[group];
        high = x[groups + group];
        const float2 raw = ((const float2 *)scales)[row * groups + group];
        const u32 sums = __float_as_uint(raw.y);
        scale = {raw.x, {(short)sums, (short)(sums >> 16)}};
    }
};

// Returns `total` plus a product of one group of weights with one group of activations. `first` and `second` are the products
// of their codes, less ZERO times the sums of the activations' codes: of the first and last 16 codes if W::HALVES, else `first` of
// all. Roundings are explicit, so that all kernels give the same bits, whatever the compiler would fuse in each.
template <class W>
__device__ __forceinline__ float add_scaled(float total, int first, int second, const float (&scale)[2],
                                            const float (&offset)[2], const ActivationScale &x) {
    const int sum = x.sums[0] + x.sums[1];
    float value;
    if constexpr (W::HALVES) {
        value = __fmul_rn(scale[0], (float)first);
        value = __fmaf_rn(scale[1], (float)second, value);
        if constexpr (W::OFFSET) {
            value = __fmaf_rn(offset[0], (float)x.sums[0], value);
            value = __fmaf_rn(offset[1], (float)x.sums[1], value);
        }
    } else {
        value = __fmul_rn(scale[0], (float)first);
        if constexpr (W::OFFSET) value = __fmaf_rn(offset[0], (float)sum, value);
    }
    return __fmaf_rn(value, x.scale, total);
}

// Returns `total` plus the product of one group of weights with one group of activations.
template <class W> __device__ __forceinline__ float add_dot(float total, const Group &w, const Input &x) {
    int first = __dp4a((int)w.codes[0], x.low.x, __dp4a((int)w.codes[1], x.low.y, 0));
    first = __dp4a((int)w.codes[2], x.low.z, __dp4a((int)w.codes[3], x.low.w, first));
    int second = __dp4a((int)w.codes[4], x.high.x, __dp4a((int)w.codes[5], x.high.y, 0));
    second = __dp4a((int)w.codes[6], x.high.z, __dp4a((int)w.codes[7], x.high.w, second));
    if constexpr (W::HALVES) {
        first -= W::ZERO * x.scale.sums[0];
        second -= W::ZERO * x.scale.sums[1];
    } else {
        first += second - W::ZERO * (x.scale.sums[0] + x.scale.sums[1]);
    }
    return add_scaled<W>(total, first, second, w.scale, w.offset, x.scale);
}
