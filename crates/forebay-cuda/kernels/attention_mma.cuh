// Tensor-core products of halves with f32 sums, for attention.
#pragma once
#include "kv.cuh"

// Weights are 2^15 times what they would be, the largest that a half holds: small ones would lose bits otherwise. Sums
// of weights and of values are larger by as much, as if the largest score were lower by this.
static constexpr float WEIGHT_SHIFT = 15.0f;

// c [16, 8] += a [16, 16] b [16, 8]. With g = lane / 4 and p = 2 (lane % 4): a holds rows g, g + 8, g, g + 8 at columns
// p, p, p + 8, p + 8; b holds column g at rows p, p + 8; c holds row g at p, p + 1, then row g + 8 at p, p + 1.
__device__ inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The transpose of an 8 x 8 matrix of halves: this lane has two neighbours of row lane / 4, at columns 2 (lane % 4) and
// the next, before and after.
__device__ inline u32 transpose(u32 pair) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

__device__ inline u32 pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *(const u32 *)&pair;
}

// What `pack` rounded away.
__device__ inline u32 pack_rest(float low, float high, u32 packed) {
    const float2 rounded = __half22float2(*(const __half2 *)&packed);
    return pack(low - rounded.x, high - rounded.y);
}

// Eight elements of a row as halves, from element `i`, a multiple of 8 below the row's stride.
__device__ inline uint4 load_eight(const KvRows<KvF16> &rows, int position, int i) {
    return __ldg((const uint4 *)(rows.row(position) + i));
}

// Two bytes with 128 added, as halves, less the 128: 0x6400 + n is the half 1024 + n.
__device__ inline __half2 bytes_to_halves(u32 biased, u32 selector) {
    const u32 bits = __byte_perm(biased, 0x64646464u, selector);
    return __hsub2(*(const __half2 *)&bits, __float2half2_rn(1152.0f));
}

__device__ inline uint4 load_eight(const KvRows<KvQ8> &rows, int position, int i) {
    const uint2 codes = __ldg((const uint2 *)(rows.row(position) + i));
    const __half2 scale = __half2half2(__ldg(rows.row_scales(position) + i / 32));
    const u32 low = codes.x ^ 0x80808080u, high = codes.y ^ 0x80808080u;
    const __half2 x[4] = {__hmul2(bytes_to_halves(low, 0x4140), scale),
                          __hmul2(bytes_to_halves(low, 0x4342), scale),
                          __hmul2(bytes_to_halves(high, 0x4140), scale),
                          __hmul2(bytes_to_halves(high, 0x4342), scale)};
    return *(const uint4 *)x;
}
