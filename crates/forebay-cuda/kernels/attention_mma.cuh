// Tensor-core products of halves with f32 sums, for attention.
#pragma once
#include "kv.cuh"

// Weights are scaled by 2^15, the largest power of two that a half holds; otherwise small weights would lose bits. The
// sums of weights and of values are larger by the same factor, as if the largest score were lower by WEIGHT_SHIFT.
static constexpr float WEIGHT_SHIFT = 15.0f;

// c [16, 8] += a [16, 16] b [16, 8]. With g = lane / 4 and p = 2 (lane % 4): a holds rows g, g + 8, g, g + 8 at columns
// p, p, p + 8, p + 8; b holds column g at rows p, p + 8; c holds row g at p, p + 1, then row g + 8 at p, p + 1.
__device__ inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ inline u32 pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *(const u32 *)&pair;
}

// Packs the rounding error of `pack`.
__device__ inline u32 pack_rest(float low, float high, u32 packed) {
    const float2 rounded = __half22float2(*(const __half2 *)&packed);
    return pack(low - rounded.x, high - rounded.y);
}

// Loads that the compiler does not move. Otherwise it would move them down to the first use, and expose their latency.
// They do not use the read-only path, because the decode kernel itself may write the newest row.
__device__ inline uint4 load_now(const uint4 *from) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

__device__ inline uint2 load_now(const uint2 *from) {
    uint2 x;
    asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
    return x;
}

__device__ inline u32 load_now(const u32 *from) {
    u32 x;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}

__device__ inline u16 load_now(const u16 *from) {
    u16 x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from));
    return x;
}

// Fetches the keys or the values of a head in one block to the L2 cache, with all lanes of a warp. Blocks in host memory
// are left out.
__device__ inline void fetch_ahead(const KvHead<KvType> &head, u32 number) {
    if (number >= head.places.own) return;
    const u8 *const from = head.block(number).rows;
    const int bytes = KV_BLOCK * head.stride * KvType::BITS / 8;
    for (int at = (threadIdx.x & 31) * 128; at < bytes; at += 32 * 128) prefetch_l2(from + at);
}

// Converts two bytes, each with BIAS added, to halves and subtracts BIAS: 0x6400 + n is the half 1024 + n.
template <int BIAS> __device__ inline __half2 bytes_to_halves(u32 biased, u32 selector) {
    const u32 bits = __byte_perm(biased, 0x64646464u, selector);
    return __hsub2(*(const __half2 *)&bits, __float2half2_rn(1024.0f + BIAS));
}

// Converts eight bytes, each with BIAS added, in two words, to halves and multiplies them by `scale`.
template <int BIAS> __device__ inline uint4 scaled_halves(u32 low, u32 high, u16 scale) {
    const __half2 factor = __half2half2(__ushort_as_half(scale));
    const __half2 x[4] = {__hmul2(bytes_to_halves<BIAS>(low, 0x4140), factor),
                          __hmul2(bytes_to_halves<BIAS>(low, 0x4342), factor),
                          __hmul2(bytes_to_halves<BIAS>(high, 0x4140), factor),
                          __hmul2(bytes_to_halves<BIAS>(high, 0x4342), factor)};
    return *(const uint4 *)x;
}

// Eight elements of a row, from element `i` on, as stored and as halves. `i` is a multiple of 8 and below the row's
// stride.
template <class T> struct Eight;

template <> struct Eight<KvF16> {
    uint4 raw;

    __device__ inline void load(const KvBlock<KvF16> &block, int row, int i) {
        raw = load_now((const uint4 *)(block.row(row) + i));
    }
    __device__ inline uint4 halves() const { return raw; }
};

template <> struct Eight<KvQ8> {
    uint2 codes;
    u16 scale;

    __device__ inline void load(const KvBlock<KvQ8> &block, int row, int i) {
        codes = load_now((const uint2 *)(block.row(row) + i));
        scale = load_now((const u16 *)(block.row_scales(row) + i / 32));
    }
    __device__ inline uint4 halves() const {
        return scaled_halves<128>(codes.x ^ 0x80808080u, codes.y ^ 0x80808080u, scale);
    }
};

template <> struct Eight<KvQ4> {
    u32 codes;
    u16 scale;

    __device__ inline void load(const KvBlock<KvQ4> &block, int row, int i) {
        codes = load_now((const u32 *)(block.row(row) + i / 2));
        scale = load_now((const u16 *)(block.row_scales(row) + i / 32));
    }
    __device__ inline uint4 halves() const {
        const u32 even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
        return scaled_halves<8>(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362), scale);
    }
};

// tanh to within a few units of 1e-7.
__device__ inline float tanh_fast(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + exp2f(x * 2.885390082f));
}
