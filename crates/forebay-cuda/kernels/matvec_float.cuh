// Products of a few tokens with a matrix of floats. Weights and activations are converted to f32 and added in f32. The
// order of sums depends only on the number of columns.
//
// For the time budget see matvec.cu. A BF16 weight costs two instructions for its two bytes, so memory is the limit as
// long as enough bytes are in flight. Every lane loads 8 elements of two rows, four times, before it uses the first.
// For 16-bit weights that is 128 bytes, or 64 KB in a multiprocessor.
#pragma once

#include "activation.cuh"
#include "matvec_arguments.cuh"
#include "weight.cuh"

#define WARPS 4

template <int N> struct Constant {
    static constexpr int VALUE = N;
};

// Eight adjacent elements as stored.
template <class W> struct Eight {
    static constexpr int WORDS = 2 * W::BYTES;
    u32 words[WORDS];

    // Loads from `p`, a multiple of 16, or of the size of eight elements if that is less.
    __device__ __forceinline__ void load(const u8 *p) {
        if constexpr (WORDS >= 4) {
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++) {
                const uint4 four = __ldcs((const uint4 *)p + i);
                words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
            }
        } else {
            const uint2 two = __ldcs((const uint2 *)p);
            words[0] = two.x, words[1] = two.y;
        }
    }

    __device__ __forceinline__ float at(int i) const { return W::at((const u8 *)words, i); }
};

template <> __device__ __forceinline__ float Eight<BF16>::at(int i) const {
    const u32 word = words[i >> 1];
    return __uint_as_float(i & 1 ? word & 0xffff0000u : word << 16);
}

template <> __device__ __forceinline__ float Eight<F32>::at(int i) const { return __uint_as_float(words[i]); }

// Adds eight products for each row and token.
template <class W, int TOKENS>
__device__ __forceinline__ void add_eight(const Eight<W> (&w)[2], const float *x, int cols, int tokens,
                                          float (&sums)[2][TOKENS]) {
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const float4 *at = (const float4 *)(x + (size_t)(TOKENS == 1 ? 0 : min(t, tokens - 1)) * cols);
        const float4 low = at[0], high = at[1];
        const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) sums[j][t] = __fmaf_rn(w[j].at(i), values[i], sums[j][t]);
    }
}

// Adds the columns that come in eights, with vector loads.
template <class W, int TOKENS>
__device__ __forceinline__ void add_aligned(const u8 *const (&rows)[2], const float *x, int cols, int tokens, int lane,
                                            float (&sums)[2][TOKENS]) {
    constexpr int UNROLL = TOKENS == 1 ? 4 : TOKENS == 2 ? 2 : 1;
    int col = lane * 8;
    for (; col + (UNROLL - 1) * 256 < cols / 8 * 8; col += UNROLL * 256) {
        Eight<W> w[UNROLL][2];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int j = 0; j < 2; j++) w[u][j].load(rows[j] + (size_t)(col + 256 * u) * W::BYTES);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) add_eight<W, TOKENS>(w[u], x + col + 256 * u, cols, tokens, sums);
    }
#pragma unroll 1
    for (; col < cols / 8 * 8; col += 256) {
        Eight<W> w[2];
#pragma unroll
        for (int j = 0; j < 2; j++) w[j].load(rows[j] + (size_t)col * W::BYTES);
        add_eight<W, TOKENS>(w, x + col, cols, tokens, sums);
    }
}

// Loads 16 bytes that are read once, before any that follow in the program are waited for.
__device__ __forceinline__ uint4 load_once(const u8 *p) { return __ldcs((const uint4 *)p); }

// Adds all columns of rows of compact blocks. A lane adds the same columns in the same order as with BF16.
template <class W, int TOKENS>
__device__ __forceinline__ void add_compact(const u8 *const (&rows)[2], const float *x, int cols, int tokens, int lane,
                                            float (&sums)[2][TOKENS]) {
    x += lane * 8;
    if constexpr (W::COLUMNS == 2048) {
        // So many groups of a block are loaded before the first products.
        constexpr int GROUPS = TOKENS == 1 ? 2 : 1;
#pragma unroll 1
        for (int first = 0; first < cols / 1024; first += GROUPS) {
            typename W::Header headers[2];
            const u8 *ends[2];
            uint4 low[2][GROUPS][2], words[2][GROUPS];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u8 *block = rows[j] + (size_t)(first / 2) * W::BYTES;
                const u8 *of_lane = block + first % 2 * W::GROUP + 16 * lane;
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    low[j][group][0] = load_once(of_lane + group * W::GROUP);
                    low[j][group][1] = load_once(of_lane + group * W::GROUP + 512);
                    words[j][group] = load_once(of_lane + group * W::GROUP + 1024);
                }
                ends[j] = block + W::HEADER;
                headers[j].load(ends[j]);
            }
#pragma unroll
            for (int stride = 0; stride < 4 * GROUPS; stride++) {
                Eight<BF16> w[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const uint4 bytes = low[j][stride / 4][stride / 2 % 2], four = words[j][stride / 4];
                    const uint2 eight = stride % 2 ? make_uint2(bytes.z, bytes.w) : make_uint2(bytes.x, bytes.y);
                    const u32 word = stride % 4 == 0 ? four.x : stride % 4 == 1 ? four.y : stride % 4 == 2 ? four.z : four.w;
                    compact_pairs(eight, word, headers[j].base, w[j].words);
                    headers[j].correct(ends[j], 128 * (first % 2) + 32 * stride + lane, w[j].words);
                }
                add_eight<BF16, TOKENS>(w, x + 1024 * first + 256 * stride, cols, tokens, sums);
            }
        }
    } else {
        constexpr int UNROLL = TOKENS == 1 ? 3 : 1;
        const auto add = [&](int first, auto count) {
            constexpr int COUNT = decltype(count)::VALUE;
            typename W::Header headers[COUNT][2];
            uint2 low[COUNT][2];
            u32 words[COUNT][2];
#pragma unroll
            for (int u = 0; u < COUNT; u++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u8 *from = rows[j] + (size_t)(first + u) * W::BYTES;
                    low[u][j] = __ldcs((const uint2 *)(from + 8 * lane));
                    words[u][j] = __ldcs((const u32 *)(from + 256 + 4 * lane));
                    headers[u][j].load(from + W::HEADER);
                }
#pragma unroll
            for (int u = 0; u < COUNT; u++) {
                Eight<BF16> w[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    compact_pairs(low[u][j], words[u][j], headers[u][j].base, w[j].words);
                    headers[u][j].correct(rows[j] + (size_t)(first + u) * W::BYTES + W::HEADER, lane, w[j].words);
                }
                add_eight<BF16, TOKENS>(w, x + 256 * (first + u), cols, tokens, sums);
            }
        };
        int block = 0;
#pragma unroll 1
        for (; block + UNROLL <= cols / 256; block += UNROLL) add(block, Constant<UNROLL>{});
#pragma unroll 1
        for (; block < cols / 256; block++) add(block, Constant<1>{});
    }
}

// Adds columns from `col` on, `run` adjacent ones for each lane. With `run` 8, every lane gets the same columns as from
// `add_aligned`, in the same order, so results do not depend on the alignment of weights. With `run` 1, it adds the
// rest of a row.
template <class W, int TOKENS>
__device__ __forceinline__ void add_singly(const u8 *const (&rows)[2], const float *x, int cols, int tokens, int col,
                                           int end, int run, float (&sums)[2][TOKENS]) {
#pragma unroll 1
    for (; col < end; col += 32 * run)
#pragma unroll 1
        for (int i = col; i < col + run; i++) {
            const float first = W::at(rows[0], i), second = W::at(rows[1], i);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                const float value = x[(size_t)min(t, tokens - 1) * cols + i];
                sums[0][t] = __fmaf_rn(first, value, sums[0][t]);
                sums[1][t] = __fmaf_rn(second, value, sums[1][t]);
            }
        }
}

template <class W, int TOKENS> __device__ __forceinline__ void matvec(const float *x, MATVEC_PARAMETERS) {
    RowPairs work;
    if (!find_rows<TOKENS>(work, MATVEC_ARGUMENTS)) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    x += work.x_row * cols;
    const int present = tokens - work.first_token;
    for (int pair = blockIdx.x * WARPS + warp; pair < work.count; pair += gridDim.x * WARPS) {
        // With an odd number of rows, the last pair has no second row: the first is computed twice.
        const u64 second_base = has_row(work, pair, 1) ? work.base[1] : work.base[0];
        const u8 *const rows[2] = {(const u8 *)(work.base[0] + (u64)pair * work.pitch),
                                   (const u8 *)(second_base + (u64)pair * work.pitch)};
        const u64 together = (u64)rows[0] | (u64)rows[1];
        const bool aligned = (together & (W::ALIGN == 1 || W::ALIGN == 8 && IsCompact<W>::VALUE ? 7 : 15)) == 0 && ((u64)x & 15) == 0 && cols % 4 == 0;
        const int end = cols / 8 * 8;
        float sums[2][TOKENS] = {};
        if (aligned) {
            if constexpr (IsCompact<W>::VALUE) {
                add_compact<W, TOKENS>(rows, x, cols, present, lane, sums);
            } else {
                add_aligned<W, TOKENS>(rows, x, cols, present, lane, sums);
            }
        } else {
            add_singly<W, TOKENS>(rows, x, cols, present, lane * 8, end, 8, sums);
        }
        add_singly<W, TOKENS>(rows, x, cols, present, end + lane, cols, 1, sums);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float first = warp_sum(sums[0][t]), second = warp_sum(sums[1][t]);
            if (lane == 0 && t < present)
                store_pair(work, pair, work.first_token + t, first, second, MATVEC_ARGUMENTS);
        }
    }
}
