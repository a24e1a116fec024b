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

// Eight adjacent codes of E4M3, and the scale of their block.
struct EightCodes {
    u32 words[2];
    float scale;

    // Loads the codes from column `col` on, a multiple of 8, of a row of blocks of type W.
    template <class W> __device__ __forceinline__ void load(const u8 *row, int col) {
        const u8 *block = row + (size_t)(col / W::COLUMNS) * W::BYTES;
        const u32 *from = (const u32 *)(block + col % W::COLUMNS);
        words[0] = __ldcs(from), words[1] = __ldcs(from + 1);
        scale = __ldcs((const float *)(block + W::COLUMNS));
    }
};

// Adds eight products for each row and token. The codes' products are added first, and then scaled.
template <int ROWS, int TOKENS>
__device__ __forceinline__ void add_eight_codes(const EightCodes (&w)[ROWS], const float *x, int cols, int tokens,
                                                float (&sums)[ROWS][TOKENS]) {
    float values[ROWS][8], scales[ROWS];
#pragma unroll
    for (int j = 0; j < ROWS; j++) {
        float four[2][4];
        e4m3_four(w[j].words[0], four[0]);
        e4m3_four(w[j].words[1], four[1]);
#pragma unroll
        for (int i = 0; i < 8; i++) values[j][i] = four[i >> 2][i & 3];
        const bool is_nan = (has_nan(w[j].words[0]) | has_nan(w[j].words[1])) != 0;
        scales[j] = is_nan ? __uint_as_float(0x7fc00000u) : 256.0f * w[j].scale;
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const float4 *at = (const float4 *)(x + (size_t)(TOKENS == 1 ? 0 : min(t, tokens - 1)) * cols);
        const float4 low = at[0], high = at[1];
        const float of_x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            float sum = __fmul_rn(values[j][0], of_x[0]);
#pragma unroll
            for (int i = 1; i < 8; i++) sum = __fmaf_rn(values[j][i], of_x[i], sum);
            sums[j][t] = __fmaf_rn(sum, scales[j], sums[j][t]);
        }
    }
}

// Computes the pairs of a warp from rows of blocks of E4M3. Rows are whole blocks, so columns come in eights, and activations are
// aligned.
template <class W, int TOKENS, class F>
__device__ __forceinline__ void add_f8_blocks(const RowPairs &work, const float *x, int cols, int tokens, int warp, int lane, F store) {
    constexpr int UNROLL = TOKENS == 1 ? 4 : TOKENS == 2 ? 2 : 1;
    for (int pair = blockIdx.x * WARPS + warp; pair < work.count; pair += gridDim.x * WARPS) {
        const u64 second_base = has_row(work, pair, 1) ? work.base[1] : work.base[0];
        const u8 *const rows[2] = {(const u8 *)(work.base[0] + (u64)pair * work.pitch),
                                   (const u8 *)(second_base + (u64)pair * work.pitch)};
        float sums[2][TOKENS] = {};
        int col = lane * 8;
        for (; col + (UNROLL - 1) * 256 < cols; col += UNROLL * 256) {
            EightCodes w[UNROLL][2];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
#pragma unroll
                for (int j = 0; j < 2; j++) w[u][j].template load<W>(rows[j], col + 256 * u);
#pragma unroll
            for (int u = 0; u < UNROLL; u++) add_eight_codes<2, TOKENS>(w[u], x + col + 256 * u, cols, tokens, sums);
        }
#pragma unroll 1
        for (; col < cols; col += 256) {
            EightCodes w[2];
#pragma unroll
            for (int j = 0; j < 2; j++) w[j].template load<W>(rows[j], col);
            add_eight_codes<2, TOKENS>(w, x + col, cols, tokens, sums);
        }
        store(pair, sums);
    }
}

// A lane's place in a row of compact blocks: its first eight bytes and word in a block, and the block's end.
template <class W> struct CompactPlace {
    static constexpr int STRIDES = W::COLUMNS / COMPACT_PIECE;
    const u8 *bytes, *word, *end;

    __device__ __forceinline__ CompactPlace(const u8 *row, int lane)
        : bytes(row + 8 * lane), word(row + COMPACT_PIECE + 4 * lane), end(row + W::HEADER) {}
    __device__ __forceinline__ void advance(int blocks) { bytes += blocks * W::BYTES, word += blocks * W::BYTES, end += blocks * W::BYTES; }

    // Offsets of stride number `stride`, counted from this block on. They are constants in unrolled loops.
    static __device__ __forceinline__ int block_at(int stride) { return stride / STRIDES * W::BYTES; }
    __device__ __forceinline__ const uint2 *bytes_at(int stride) const {
        return (const uint2 *)(bytes + block_at(stride) + stride % STRIDES * COMPACT_PIECE_BYTES);
    }
    __device__ __forceinline__ const u32 *word_at(int stride) const {
        return (const u32 *)(word + block_at(stride) + stride % STRIDES * COMPACT_PIECE_BYTES);
    }
    __device__ __forceinline__ const u8 *end_at(int stride) const { return end + block_at(stride); }
};

// Compact weights of a lane: U times eight columns of two rows, 256 columns apart.
template <class W, int U> struct CompactChunk {
    typedef CompactPlace<W> Place;
    static constexpr int IN_BLOCK = Place::STRIDES, HEADERS = U > IN_BLOCK ? U / IN_BLOCK : 1;
    static_assert(U % IN_BLOCK == 0 || IN_BLOCK % U == 0, "chunks are parts of blocks, or blocks");
    uint2 low[U][2];
    u32 words[U][2];
    u32 headers[HEADERS][2];

    // Loads `present` strides of both rows, from stride `first` on. The compiler must not move loads down to where they are needed.
    __device__ __forceinline__ void load(const Place (&rows)[2], int first, int present) {
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int u = 0; u < U; u++) {
                if (IN_BLOCK < U && u >= present) break;
                asm volatile("ld.global.cs.v2.u32 {%0,%1}, [%2];"
                             : "=r"(low[u][j].x), "=r"(low[u][j].y)
                             : "l"(rows[j].bytes_at(first + u)));
                asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(words[u][j]) : "l"(rows[j].word_at(first + u)));
                if (u % IN_BLOCK == 0)
                    asm volatile("ld.global.cs.u32 %0, [%1];"
                                 : "=r"(headers[u / IN_BLOCK][j])
                                 : "l"((const u32 *)rows[j].end_at(first + u)));
            }
    }

    // Returns true if columns of the chunk are exceptions, and sometimes if only others of their blocks are. All lanes have the same
    // headers.
    __device__ __forceinline__ bool may_have_exceptions(int first, int present) const {
        bool may_have = false;
#pragma unroll
        for (int u = 0; u < HEADERS; u++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const u32 header = headers[u][j], count = header >> 8 & 255;
                // The only exception of a block is in the header's word.
                const bool is_elsewhere = count == 1 && (header >> 16 & 2047) / (256 * U) != first % IN_BLOCK / U;
                const bool is_there = HEADERS == 1 || u * IN_BLOCK < present;
                may_have |= is_there && count > 0 && !(IN_BLOCK > U && is_elsewhere);
            }
        return may_have;
    }

    // Adds the products of these columns if none are exceptions. `x` is that of this lane's first column.
    template <int TOKENS>
    __device__ __forceinline__ void add(int present, const float *x, int cols, int tokens, float (&sums)[2][TOKENS]) const {
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (IN_BLOCK < U && u >= present) break;
            Eight<BF16> w[2];
#pragma unroll
            for (int j = 0; j < 2; j++) compact_pairs(low[u][j], words[u][j], headers[u / IN_BLOCK][j] & 255, w[j].words);
            add_eight<BF16, 2, TOKENS>(w, x + 256 * u, cols, tokens, sums);
        }
    }

    // Does the same if some may be exceptions. They are few, so this is a short loop, for which every stride moves to the front.
    template <int TOKENS>
    __device__ __forceinline__ void add_with_exceptions(const Place (&rows)[2], int first, int present, const float *x, int lane,
                                                        int cols, int tokens, float (&sums)[2][TOKENS]) {
#pragma unroll 1
        for (int stride = first; stride < first + present; stride++) {
            Eight<BF16> w[2];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                typename W::Header header;
                header.words[0] = headers[0][j];
                compact_pairs(low[0][j], words[0][j], header.base(), w[j].words);
                header.correct(rows[j].end_at(stride), stride % IN_BLOCK * 32 + lane, w[j].words);
#pragma unroll
                for (int u = 0; u + 1 < U; u++) low[u][j] = low[u + 1][j], words[u][j] = words[u + 1][j];
#pragma unroll
                for (int u = 0; u + 1 < HEADERS; u++) headers[u][j] = headers[u + 1][j];
            }
            add_eight<BF16, 2, TOKENS>(w, x, cols, tokens, sums);
            x += 256;
        }
    }
};

// Computes the pairs of a warp from rows of compact blocks. A lane adds the same columns in the same order as with BF16. A warp waits
// for its whole chunk of U strides, so kernels leave registers for many warps, which have theirs on the way meanwhile. `begin` is called
// once, behind the first loads, and waits for the activations.
template <class W, int TOKENS, int U, class F, class G>
__device__ __forceinline__ void add_compact(const RowPairs &work, const float *x, int cols, int tokens, int warp, int lane, G begin,
                                            F store) {
    constexpr int IN_BLOCK = W::COLUMNS / 256;
    // Strides of one turn of the loop: a block, or several.
    constexpr int TURN = U > IN_BLOCK ? U : IN_BLOCK;
    const int strides = cols / 256;
    const auto present_of = [&](int left) { return IN_BLOCK < U ? min(left, U) : U; };
    x += lane * 8;
    int pair = blockIdx.x * WARPS + warp;
    CompactChunk<W, U> chunk;
    bool is_loaded = pair < work.count;
    if (is_loaded) {
        const CompactPlace<W> rows[2] = {{row_of(work, pair, 0), lane}, {row_of(work, pair, 1), lane}};
        chunk.load(rows, 0, present_of(strides));
    }
    begin();
    for (; pair < work.count; pair += gridDim.x * WARPS) {
        CompactPlace<W> rows[2] = {{row_of(work, pair, 0), lane}, {row_of(work, pair, 1), lane}};
        float sums[2][TOKENS] = {};
        const float *at = x;
#pragma unroll 1
        for (int left = strides; left > 0; left -= TURN) {
#pragma unroll
            for (int first = 0; first < TURN; first += U) {
                const int present = present_of(left);
                if (first > 0 || !is_loaded) chunk.load(rows, first, present);
                is_loaded = false;
                if (chunk.may_have_exceptions(first, present)) {
                    chunk.template add_with_exceptions<TOKENS>(rows, first, present, at + 256 * first, lane, cols, tokens, sums);
                } else {
                    chunk.template add<TOKENS>(present, at + 256 * first, cols, tokens, sums);
                }
            }
            rows[0].advance(TURN / IN_BLOCK), rows[1].advance(TURN / IN_BLOCK);
            at += 256 * TURN;
        }
        store(pair, sums);
    }
}

// Does the same for matrices of so few rows that a warp has one pair, or few: it always has its next chunk on the way while it decodes
// one. Both have registers of their own, because moving the registers of loads would wait for them.
template <class W, int TOKENS, int U, class F, class G>
__device__ __forceinline__ void add_compact_ahead(const RowPairs &work, const float *x, int cols, int tokens, int warp, int lane, G begin,
                                            F store) {
    // Strides of one turn of the loop: a large block, or small ones.
    constexpr int TURN = 8, CHUNKS = TURN / U, IN_BLOCK = W::COLUMNS / 256;
    static_assert(CHUNKS % 2 == 0, "a turn ends with the second chunk");
    const int strides = cols / 256, apart = gridDim.x * WARPS;
    // Strides of chunk `chunk` of a turn, of which `left` strides are left.
    const auto present_of = [&](int left, int chunk) { return IN_BLOCK == TURN ? U : max(min(left - chunk * U, U), 0); };
    x += lane * 8;
    int pair = blockIdx.x * WARPS + warp;
    CompactChunk<W, U> chunks[2];
    CompactPlace<W> rows[2] = {{row_of(work, pair, 0), lane}, {row_of(work, pair, 1), lane}};
    if (pair < work.count) chunks[0].load(rows, 0, present_of(strides, 0));
    begin();
    for (; pair < work.count; pair += apart) {
        float sums[2][TOKENS] = {};
        const float *at = x;
#pragma unroll 1
        for (int left = strides; left > 0; left -= TURN) {
            const CompactPlace<W> current[2] = {rows[0], rows[1]};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk++) {
                if (chunk + 1 < CHUNKS) {
                    chunks[(chunk + 1) % 2].load(rows, (chunk + 1) * U, present_of(left, chunk + 1));
                } else {
                    const bool goes_on = left > TURN;
                    if (goes_on) {
                        rows[0].advance(TURN / IN_BLOCK), rows[1].advance(TURN / IN_BLOCK);
                    } else {
                        rows[0] = {row_of(work, pair + apart, 0), lane}, rows[1] = {row_of(work, pair + apart, 1), lane};
                    }
                    if (goes_on || pair + apart < work.count) chunks[0].load(rows, 0, present_of(goes_on ? left - TURN : strides, 0));
                }
                const int first = chunk * U, present = present_of(left, chunk);
                CompactChunk<W, U> &own = chunks[chunk % 2];
                if (own.may_have_exceptions(first, present)) {
                    own.template add_with_exceptions<TOKENS>(current, first, present, at + 256 * first, lane, cols, tokens, sums);
                } else {
                    own.template add<TOKENS>(present, at + 256 * first, cols, tokens, sums);
                }
            }
            at += 256 * TURN;
        }
        store(pair, sums);
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

// Waits for the kernel before, unless this was done, and lets the next one begin.
__device__ __forceinline__ void begin_matvec(const u32 *ids, int tokens) {
    wait_for_previous();
    start_next(ids ? gridDim.y <= 8 * FEW_ROWS : tokens <= FEW_ROWS);
}

// U: strides of 256 columns that a warp loads at once, for compact types. AHEAD: whether it loads the next ones before it uses them.
// With compact types, this waits for the kernel before; with others, the caller has done so.
template <class W, int TOKENS, int U, bool AHEAD> __device__ __forceinline__ void matvec(const float *x, MATVEC_PARAMETERS) {
    // The kernel before writes activations and ids, but no weights. Without ids, the first weights may be read earlier.
    constexpr bool EARLY = IsCompact<W>::VALUE;
    if (EARLY && ids) begin_matvec(ids, tokens);
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
    if constexpr (EARLY) {
        const auto begin = [&] {
            if (!ids) begin_matvec(ids, tokens);
        };
        if constexpr (AHEAD) {
            add_compact_ahead<W, TOKENS, U>(work, x, cols, present, warp, lane, begin, store);
        } else {
            add_compact<W, TOKENS, U>(work, x, cols, present, warp, lane, begin, store);
        }
    } else if constexpr (IsF8Blocks<W>::VALUE) {
        add_f8_blocks<W, TOKENS>(work, x, cols, present, warp, lane, store);
    } else {
        add_plain<W, TOKENS>(work, x, cols, present, warp, lane, store);
    }
}
