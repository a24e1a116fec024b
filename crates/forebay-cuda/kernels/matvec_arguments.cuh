// Arguments of all mat-vec kernels: which matrices to multiply, and where results go.
#pragma once

#include "experts.cuh"
#include "gating.cuh"

// Two adjacent rows of one matrix, or one row each of two matrices, are computed together: a "pair of rows".
struct RowPairs {
    u64 base[2];   // of pair 0
    u64 pitch;     // from one pair to the next
    u64 row_bytes;
    int count;     // pairs
    int last[2];   // the last pair that has a first row, and a second
    int rows;      // of a matrix
    bool two;      // two matrices
    bool gated;    // out[0] gets gating(row of the first matrix, row of the second)
    float *out[2];
    u32 item;          // the (token, slot) pair, for experts
    size_t x_row;      // of the block's first token
    int first_token;   // of the block; `tokens` counts all tokens of the launch
};

enum Mode { SEPARATE = 0, PAIRED = 1, GATED = 2, ACTIVATED = 3 };

// Kernel parameters.
// - Without `ids`, the matrices are at w0 ..., and blockIdx.y selects one (SEPARATE) or is 0. blockIdx.z counts groups of
//   as many tokens as the kernel takes at once. All groups progress through a matrix together, so that most of them find
//   its bytes in the L2 cache.
// - With `ids`, a (token, slot) pair takes the place of blockIdx.y: order[blockIdx.y], or blockIdx.y if `order` is null.
//   Pairs of one expert that are adjacent in `order` read its bytes at about the same time. The expert is at
//   table[ids[pair]], and w0, w1 are offsets in the slot. A pair with the id NO_EXPERT writes nothing. blockIdx.z is 0.
// - GATED joins two matrices by `gating`. With `ids`, rows bias_ids[pair] of bias0 and bias1 [experts, rows], if not
//   null, are added before.
// - ACTIVATED is SEPARATE with one matrix, whose outputs pass through `gating` without a gate.
#define MATVEC_PARAMETERS                                                                                      \
    const u64 *table, const u32 *ids, const u32 *order, u64 w0, u64 w1, u64 w2, u64 w3, int rows0, int rows1,  \
        int rows2, int rows3, float *out0, float *out1, float *out2, float *out3, int cols, u64 row_bytes,     \
        int tokens, int pairs_per_x, int mode, int gating, float alpha, float limit, const float *bias0,       \
        const float *bias1, const u32 *bias_ids
#define MATVEC_ARGUMENTS                                                                                       \
    table, ids, order, w0, w1, w2, w3, rows0, rows1, rows2, rows3, out0, out1, out2, out3, cols, row_bytes,    \
        tokens, pairs_per_x, mode, gating, alpha, limit, bias0, bias1, bias_ids

// Fills `work` for a kernel that takes TOKENS tokens at once. Returns false if there is nothing to do: the pair has no
// expert, or the expert has no slot.
template <int TOKENS> __device__ __forceinline__ bool find_rows(RowPairs &work, MATVEC_PARAMETERS) {
    u32 item = blockIdx.y;
    work.rows = rows0;
    work.out[0] = out0;
    work.out[1] = out1;
    work.x_row = work.first_token = blockIdx.z * TOKENS;
    work.row_bytes = row_bytes;
    work.two = mode == PAIRED || mode == GATED;
    work.gated = mode == GATED;
    u64 first = w0, second = w1;
    if (ids) {
        if (order) item = order[item];
        const u32 id = ids[item];
        if (id == NO_EXPERT) return false;
        const u64 slot = table[id];
        if (slot == 0) return false;
        first += slot;
        second += slot;
        work.out[0] += (size_t)item * rows0;
        if (work.two && !work.gated) work.out[1] += (size_t)item * rows0;
        work.x_row = item / pairs_per_x;
    } else if (!work.two && item > 0) {
        first = item == 1 ? w1 : item == 2 ? w2 : w3;
        work.rows = item == 1 ? rows1 : item == 2 ? rows2 : rows3;
        work.out[0] = item == 1 ? out1 : item == 2 ? out2 : out3;
    }
    work.item = item;
    work.base[0] = first;
    work.base[1] = work.two ? second : first + row_bytes;
    work.pitch = work.two ? row_bytes : 2 * row_bytes;
    work.count = work.two ? work.rows : (work.rows + 1) / 2;
    work.last[0] = work.count - 1;
    work.last[1] = work.two ? work.count - 1 : work.rows / 2 - 1;
    if (work.last[1] < 0) {  // one row in all: it is its own second
        work.last[1] = 0;
        work.base[1] = work.base[0];
    }
    return true;
}

// Returns row j of a pair. A pair beyond the last one gives the last one's row.
__device__ __forceinline__ const u8 *row_of(const RowPairs &work, int pair, int j) {
    return (const u8 *)(work.base[j] + (u64)(u32)min(pair, work.last[j]) * (u32)work.pitch);
}

// Returns true if row j of pair `pair` exists.
__device__ __forceinline__ bool has_row(const RowPairs &work, int pair, int j) {
    return work.two ? pair < work.rows : 2 * pair + j < work.rows;
}

// Stores the two results of a pair of rows for one token.
__device__ __forceinline__ void store_pair(const RowPairs &work, int pair, int token, float first, float second,
                                           MATVEC_PARAMETERS) {
    const size_t at = (size_t)token * work.rows;
    if (work.gated) {
        if (ids && bias0) {
            const size_t bias = bias_ids[work.item] * (size_t)work.rows + pair;
            first += bias0[bias];
            second += bias1[bias];
        }
        work.out[0][at + pair] = gated(gating, first, second, alpha, limit);
    } else if (work.two) {
        work.out[0][at + pair] = first;
        work.out[1][at + pair] = second;
    } else {
        if (mode == ACTIVATED) {
            first = gated(gating, first, first, alpha, limit);
            second = gated(gating, second, second, alpha, limit);
        }
        work.out[0][at + 2 * pair] = first;
        if (2 * pair + 1 < work.rows) work.out[0][at + 2 * pair + 1] = second;
    }
}
