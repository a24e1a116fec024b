// Weight types: how 32 adjacent elements of a row are decoded from its blocks.
//
// Every block type stores small integers with scales. Element e of a group of 32 is
//     scale[e / 16] * (code[e] - ZERO) + offset[e / 16].
// A type defines:
// - ELEMENTS and BYTES of a block.
// - ALIGN: the power of two that divides every block's address, at most 16.
// - ZERO, as above.
// - SIGNED: codes are i8, otherwise u8 below 128.
// - HALVES: the two scales differ.
// - OFFSET: there are offsets.
// - unpack(block, group of the block, out). It does not fill in fields that a false flag rules out.
//
// If two groups share bytes, a type may also decode both with one read: unpack_two(block, pair, out) gives groups
// first_of(pair) and first_of(pair) + APART. Types with blocks of 32 may separate reading (RAW words, fetch) from
// decoding (decode), so that a kernel can read long before it needs the values. Layouts are described in
// forebay-format's `quant`.
#pragma once

#include "common.cuh"

// The aligned words that hold a block of type W. The block begins `past` bytes after their start.
template <class W> struct RawBlock {
    u32 words[W::RAW];
    u32 past;
};

struct Group {
    u32 codes[8];  // four per word, the first in the low byte
    float scale[2];
    float offset[2];
};

__device__ __forceinline__ float half_of(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
}

__device__ __forceinline__ float half_at(const u8 *p) { return half_of(*(const u16 *)p); }  // p is even

// Loads N words from an address that is a multiple of ALIGN. If ALIGN is below 4, the words are cut out of aligned
// words. That also reads up to 3 bytes before and after, but no aligned word without any requested byte, because memory
// may end there.
template <int ALIGN, int N> __device__ __forceinline__ void load_words(const u8 *p, u32 *words) {
    if constexpr (ALIGN >= 16 && N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const uint4 four = ((const uint4 *)p)[i];
            words[4 * i] = four.x;
            words[4 * i + 1] = four.y;
            words[4 * i + 2] = four.z;
            words[4 * i + 3] = four.w;
        }
    } else if constexpr (ALIGN >= 8 && N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const uint2 two = ((const uint2 *)p)[i];
            words[2 * i] = two.x;
            words[2 * i + 1] = two.y;
        }
    } else if constexpr (ALIGN >= 4) {
#pragma unroll
        for (int i = 0; i < N; i++) words[i] = ((const u32 *)p)[i];
    } else {
        const u32 past = (u32)(size_t)p & 3;
        const u32 *aligned = (const u32 *)(p - past);
        u32 low = aligned[0];
        const u32 last = aligned[past ? N : N - 1];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const u32 high = i + 1 < N ? aligned[i + 1] : last;
            words[i] = __funnelshift_r(low, high, 8 * past);
            low = high;
        }
    }
}

// Spreads four bits to the lowest bits of four bytes. The bits of the partial products never overlap, so nothing
// carries.
__device__ __forceinline__ u32 spread_bits(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// Spreads four pairs of bits to four bytes.
__device__ __forceinline__ u32 spread_pairs(u32 pairs) {
    const u32 two = (pairs & 0xff | pairs << 12) & 0x000f000fu;
    return (two | two << 6) & 0x03030303u;
}

// A table of 16 bytes. `look_up` maps eight nibbles through it: the low nibbles of bytes to `low`, the high nibbles to
// `high`.
struct Table16 {
    u32 words[4];
};
__device__ __forceinline__ u32 look_up_four(Table16 t, u32 nibbles) {
    const u32 index = nibbles & 0x7777;
    const u32 first = __byte_perm(t.words[0], t.words[1], index);
    const u32 second = __byte_perm(t.words[2], t.words[3], index);
    // Takes byte k of `second` where the nibble's top bit is set.
    return __byte_perm(first, second, 0x3210 | (nibbles & 0x8888) >> 1);
}
__device__ __forceinline__ void look_up(Table16 t, u32 nibbles, u32 &low, u32 &high) {
    const u32 first = look_up_four(t, nibbles), second = look_up_four(t, nibbles >> 16);
    low = __byte_perm(first, second, 0x6420);
    high = __byte_perm(first, second, 0x7531);
}

// Negates the bytes whose bit is set in the low four bits of `signs`.
__device__ __forceinline__ u32 negate_bytes(u32 bytes, u32 signs) {
    const u32 mask = spread_bits(signs) * 0xff;
    return __vsub4(bytes ^ mask, mask);
}

#include "weight_f8.cuh"
#include "weight_legacy.cuh"
#include "weight_int4.cuh"
#include "weight_k.cuh"
#include "weight_fp4.cuh"
#include "weight_low.cuh"
#include "weight_iq.cuh"
#include "weight_float.cuh"
