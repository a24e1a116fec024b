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
template <class W, int ROWS, int TOKENS>
__device__ __forceinline__ void add_eight(const Eight<W> (&w)[ROWS], const float *x, int cols, int tokens,
                                          float (&sums)[ROWS][TOKENS]) {
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const float4 *at = (const float4 *)(x + (size_t)(TOKENS == 1 ? 0 : min(t, tokens - 1)) * cols);
        const float4 low = at[0], high = at[1];
        const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < ROWS; j++) sums[j][t] = __fmaf_rn(w[j].at(i), values[i], sums[j][t]);
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
        for (int u = 0; u < UNROLL; u++) add_eight<W, 2, TOKENS>(w[u], x + col + 256 * u, cols, tokens, sums);
    }
#pragma unroll 1
    for (; col < cols / 8 * 8; col += 256) {
        Eight<W> w[2];
#pragma unroll
        for (int j = 0; j < 2; j++) w[j].load(rows[j] + (size_t)col * W::BYTES);
        add_eight<W, 2, TOKENS>(w, x + col, cols, tokens, sums);
    }
}

// Compact weights of a lane: U times eight columns of ROWS rows, 256 columns apart.
template <class W, int U, int ROWS> struct CompactChunk {
    static constexpr int IN_BLOCK = W::COLUMNS / 256, HEADERS = U > IN_BLOCK ? U / IN_BLOCK : 1;
    static_assert(U % IN_BLOCK == 0 || IN_BLOCK % U == 0, "chunks are parts of blocks, or blocks");
    uint2 low[U][ROWS];
    u32 words[U][ROWS];
    typename W::Header headers[HEADERS][ROWS];

    // Loads from column 256 * `first` on, a multiple of U. Rows may end before. The compiler must not move loads down to where they
    // are needed.
    __device__ __forceinline__ void load(const u8 *const (&rows)[ROWS], int first, int strides, int lane) {
        const int in_block = IN_BLOCK > U ? first % IN_BLOCK : 0;
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            const u8 *block = rows[j] + (size_t)(first / IN_BLOCK) * W::BYTES;
            const u8 *const bytes = block + in_block * 256 + 8 * lane, *const word = block + W::COLUMNS + in_block * 128 + 4 * lane;
#pragma unroll
            for (int u = 0; u < U; u++) {
                if (IN_BLOCK < U && first + u >= strides) break;
                // Offsets from the first block are constants.
                const int past = u / IN_BLOCK * W::BYTES, stride = u % IN_BLOCK;
                asm volatile("ld.global.cs.v2.u32 {%0,%1}, [%2];"
                             : "=r"(low[u][j].x), "=r"(low[u][j].y)
                             : "l"((const uint2 *)(bytes + past + 256 * stride)));
                asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(words[u][j]) : "l"((const u32 *)(word + past + 128 * stride)));
                if (stride == 0) headers[u / IN_BLOCK][j].load(block + past + W::HEADER);
            }
        }
    }

    // Adds the products of these columns. `x` is that of column 256 * `first` + 8 * lane.
    template <int TOKENS>
    __device__ __forceinline__ void add(const u8 *const (&rows)[ROWS], int first, int strides, int lane, const float *x, int cols,
                                        int tokens, float (&sums)[ROWS][TOKENS]) const {
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (IN_BLOCK < U && first + u >= strides) break;
            Eight<BF16> w[ROWS];
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                const auto &header = headers[u / IN_BLOCK][j];
                compact_pairs(low[u][j], words[u][j], header.base(), w[j].words);
                if (header.has_exceptions()) {
                    const u8 *block = rows[j] + (size_t)((first + u) / IN_BLOCK) * W::BYTES;
                    header.correct(block + W::HEADER, (first + u) % IN_BLOCK * 32 + lane, w[j].words);
                }
            }
            add_eight<BF16, ROWS, TOKENS>(w, x + 256 * u, cols, tokens, sums);
        }
    }
};

// Multiplies `rows`, of which `now` has the first chunk, and leaves the first chunk of the rows `after` in `now`. A chunk is loaded
// before the one in front of it is multiplied.
template <class W, int U, int ROWS, int TOKENS>
__device__ __forceinline__ void add_rows(CompactChunk<W, U, ROWS> &now, const u8 *const (&rows)[ROWS], const u8 *const (&after)[ROWS],
                                         bool has_more, const float *x, int cols, int tokens, int lane, float (&sums)[ROWS][TOKENS]) {
    const int strides = cols / 256;
#pragma unroll 2
    for (int first = 0; first < strides; first += U) {
        CompactChunk<W, U, ROWS> next;
        if (first + U < strides) {
            next.load(rows, first + U, strides, lane);
        } else if (has_more) {
            next.load(after, 0, strides, lane);
        }
        now.template add<TOKENS>(rows, first, strides, lane, x + 256 * first, cols, tokens, sums);
        now = next;
    }
}

// Computes the pairs of a warp from rows of compact blocks. A lane adds the same columns in the same order as with BF16.
template <class W, int TOKENS, class F>
__device__ __forceinline__ void add_compact(const RowPairs &work, const float *x, int cols, int tokens, int warp, int lane, F store) {
    constexpr int U = TOKENS > 4 ? 1 : 2;
    const int apart = gridDim.x * WARPS;
    int pair = blockIdx.x * WARPS + warp;
    if (pair >= work.count) return;
    const u8 *rows[2] = {row_of(work, pair, 0), row_of(work, pair, 1)};
    x += lane * 8;
    CompactChunk<W, U, 2> now;
    now.load(rows, 0, cols / 256, lane);
    for (; pair < work.count; pair += apart) {
        const u8 *const after[2] = {row_of(work, pair + apart, 0), row_of(work, pair + apart, 1)};
        float sums[2][TOKENS] = {};
        add_rows<W, U, 2, TOKENS>(now, rows, after, pair + apart < work.count, x, cols, tokens, lane, sums);
        store(pair, sums);
        rows[0] = after[0], rows[1] = after[1];
    }
}

// Does the same for one token, row by row: there are twice as many rows as pairs, so warps have more even shares. The rows of two
// matrices follow each other. `store(item, first, second)` gets both, or one row twice.
template <class W, class F>
__device__ __forceinline__ void add_compact_singly(const RowPairs &work, const float *x, int cols, int warp, int lane, F store) {
    constexpr int U = W::COLUMNS == 256 ? 3 : 8;
    const int apart = gridDim.x * WARPS, items = work.two ? work.count : work.rows;
    int item = blockIdx.x * WARPS + warp;
    if (item >= items) return;
    const u64 bases[2] = {work.base[0], work.base[1]};
    const auto row_at = [&](int at, bool is_second) {
        return (const u8 *)((is_second ? bases[1] : bases[0]) + (u64)(u32)min(at, items - 1) * (u32)work.row_bytes);
    };
    const u8 *row[1] = {row_at(item, false)};
    x += lane * 8;
    CompactChunk<W, U, 1> now;
    now.load(row, 0, cols / 256, lane);
    float first = 0.0f;
    for (bool is_second = false; item < items;) {
        const bool is_first = work.two && !is_second;
        const int next = is_first ? item : item + apart;
        const u8 *const after[1] = {row_at(next, is_first)};
        float sums[1][1] = {};
        add_rows<W, U, 1, 1>(now, row, after, next < items, x, cols, 1, lane, sums);
        const float sum = warp_sum(sums[0][0]);
        if (is_first) {
            first = sum;
        } else if (lane == 0) {
            store(item, work.two ? first : sum, sum);
        }
        row[0] = after[0], item = next, is_second = is_first;
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

// Computes the pairs of a warp from rows of numbers without blocks.
template <class W, int TOKENS, class F>
__device__ __forceinline__ void add_plain(const RowPairs &work, const float *x, int cols, int tokens, int warp, int lane, F store) {
    for (int pair = blockIdx.x * WARPS + warp; pair < work.count; pair += gridDim.x * WARPS) {
        // With an odd number of rows, the last pair has no second row: the first is computed twice.
        const u64 second_base = has_row(work, pair, 1) ? work.base[1] : work.base[0];
        const u8 *const rows[2] = {(const u8 *)(work.base[0] + (u64)pair * work.pitch),
                                   (const u8 *)(second_base + (u64)pair * work.pitch)};
        const u64 together = (u64)rows[0] | (u64)rows[1];
        const bool aligned = (together & (W::BYTES == 1 ? 7 : 15)) == 0 && ((u64)x & 15) == 0 && cols % 4 == 0;
        const int end = cols / 8 * 8;
        float sums[2][TOKENS] = {};
        if (aligned) {
            add_aligned<W, TOKENS>(rows, x, cols, tokens, lane, sums);
        } else {
            add_singly<W, TOKENS>(rows, x, cols, tokens, lane * 8, end, 8, sums);
        }
        add_singly<W, TOKENS>(rows, x, cols, tokens, end + lane, cols, 1, sums);
        store(pair, sums);
    }
}

template <class W, int TOKENS> __device__ __forceinline__ void matvec(const float *x, MATVEC_PARAMETERS) {
    RowPairs work;
    if (!find_rows<TOKENS>(work, MATVEC_ARGUMENTS)) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    x += work.x_row * cols;
    const int present = tokens - work.first_token;
    const auto store = [&](int pair, const float (&sums)[2][TOKENS]) {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float first = warp_sum(sums[0][t]), second = warp_sum(sums[1][t]);
            if (lane == 0 && t < present)
                store_pair(work, pair, work.first_token + t, first, second, MATVEC_ARGUMENTS);
        }
    };
    if constexpr (IsCompact<W>::VALUE && TOKENS == 1) {
        add_compact_singly<W>(work, x, cols, warp, lane, [&](int item, float first, float second) {
            if (work.two) {
                store_pair(work, item, work.first_token, first, second, MATVEC_ARGUMENTS);
            } else {
                work.out[0][(size_t)work.first_token * work.rows + item] = first;
            }
        });
    } else if constexpr (IsCompact<W>::VALUE) {
        add_compact<W, TOKENS>(work, x, cols, present, warp, lane, store);
    } else {
        add_plain<W, TOKENS>(work, x, cols, present, warp, lane, store);
    }
}
