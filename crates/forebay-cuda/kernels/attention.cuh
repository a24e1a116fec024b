// Code that the attention kernels share: which positions a token sees, scores, and how parts of a context are joined.
//
// Scores are kept in units of log2, so that exp2f gives the weights. All is f32.
#pragma once
#include "kv.cuh"

// NVRTC has no <math.h>.
#define INFINITE __int_as_float(0x7f800000)
static constexpr float LOG2_E = 1.4426950408889634f;

// Sizes and rules of one call.
struct AttentionShape {
    // `context` is the number of positions of a table.
    int heads, kv_heads, dim_k, dim_v, context;
    // Number of positions that a token sees, itself included; 0: all up to itself.
    int window;
    float scale;
    // Scores become cap * tanh(score / cap); 0: scores are not capped.
    float softcap;
};

// Consecutive rows of one sequence in a pass of prompts, which one block of threads takes (PromptTile of the host).
struct PromptTile {
    // The first row and the number of rows. Attention of latent rows counts rows of heads.
    u32 first, rows;
    // The part of the context, or -1 for all of it.
    int part;
    // Position of the first row's token, and the number of the sequence's table.
    u32 position, table;

    // Loads a tile with one load. The number of rows is in the low byte of its word, and 1 + the part above.
    __device__ inline PromptTile(const uint4 *tiles, int index) {
        const uint4 x = tiles[index];
        first = x.x, rows = x.y & 255, part = (int)(x.y >> 8) - 1, position = x.z, table = x.w;
    }
};

// A range of positions.
struct Span {
    int from, to;
};

__device__ inline bool is_in(const Span &span, int position) { return position >= span.from && position < span.to; }

// Returns the first position that a token at `position` sees. A positive `window` slides, a negative one is the length of
// chunks that do not, and with 0 every token sees all before it. The result never decreases with the position.
__device__ inline int first_visible(int position, int window) {
    if (window < 0) return position - position % -window;
    return window > 0 ? max(0, position + 1 - window) : 0;
}

// Returns the positions that a token at `position` sees, with the first of them rounded down to a multiple of `step`.
// Parts and tiles then begin at absolute multiples, so a tile never crosses a block of the cache without need.
// Positions before the first visible one must be masked, and their rows may hold anything.
__device__ inline Span span_of_token(int position, int window, int context, int step) {
    return Span{first_visible(position, window) / step * step, min(position + 1, context)};
}

// Returns the number of parts into which the context of a row is cut that ends at position `end` - 1. It follows from
// the row's own position and from `limit`, which follows from the GPU and the model. So a row's bits do not depend on the
// other rows of the pass. The host computes the same (`row_splits` in attention.rs). A part is worth at least `step`
// positions, and contexts up to `alone` are not cut.
__device__ inline int splits_of(int end, int limit, int step, int alone) {
    const u32 capacity = max(256u, 1u << (32 - __clz(end - 1)));
    return capacity <= (u32)alone ? 1 : (int)min((u32)limit, capacity / step);
}

// Turns the dot product of a query and a key into a score.
__device__ inline float score(float dot, const AttentionShape &shape) {
    if (shape.softcap > 0.0f)
        return shape.softcap * LOG2_E * tanhf(dot * shape.scale / shape.softcap);
    return dot * (shape.scale * LOG2_E);
}

// exp2f(x - largest), or 0 if nothing was visible yet and both are -inf.
__device__ inline float weight(float x, float largest) {
    return exp2f(x - (largest == -INFINITE ? 0.0f : largest));
}

// Returns part number `split` of `splits` parts of `all`, in whole multiples of `step` positions. Sets `active` to the
// number of parts that are not empty.
__device__ inline Span share_of(Span all, int split, int splits, int step, int &active) {
    const int length = all.to - all.from;
    active = 0;
    if (length <= 0) return all;
    const int share = ((length + splits - 1) / splits + step - 1) / step * step;
    active = (length + share - 1) / share;
    const int from = all.from + split * share;
    return Span{from, min(from + share, all.to)};
}

// Partial results of one unit of work that are still to be joined. A unit has `columns` query rows. Each split stores
// an unnormalised sum of values, the largest score and the sum of weights. Every unit has room for `splits` splits, the
// limit for any row, and uses as many as its own row has.
struct Parts {
    float *values;  // [units, splits, columns, stride]
    float2 *stats;  // [units, splits, columns]: largest score, sum of weights
    u32 *tickets;   // [units], all 0 between launches
    int splits, columns, stride;

    // Lays the parts out in `memory`: first the values of all units, then the stats.
    __device__ inline Parts(float *memory, u32 *tickets, int units, int splits, int columns, int stride)
        : values(memory), stats((float2 *)(memory + (size_t)units * splits * columns * stride)),
          tickets(tickets), splits(splits), columns(columns), stride(stride) {}

    __device__ inline size_t index(int unit, int split, int column) const {
        return ((size_t)unit * splits + split) * columns + column;
    }
};

// Returns true if this block is the last of `active` blocks to finish its part of `unit`. The writes of the other
// blocks are then visible. All threads of the block must call this.
__device__ inline bool is_last(const Parts &parts, int unit, int active) {
    __shared__ u32 ticket;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        ticket = atomicAdd(parts.tickets + unit, 1u);
        if (ticket == (u32)active - 1) parts.tickets[unit] = 0;
    }
    __syncthreads();
    const bool last = ticket == (u32)active - 1;
    if (last) __threadfence();
    return last;
}

// Computes, with one warp, the factors of one column's splits. Returns 1 / (sum of all weights). `factors` [active] is
// shared memory.
__device__ inline float join_factors(const Parts &parts, int unit, int column, int active,
                                     const float *sink, float *factors) {
    const int lane = threadIdx.x & 31;
    float largest = -INFINITE;
    for (int split = lane; split < active; split += 32)
        largest = fmaxf(largest, __ldcg(parts.stats + parts.index(unit, split, column)).x);
    largest = warp_max(largest);
    if (sink) largest = fmaxf(largest, *sink * LOG2_E);
    float sum = 0.0f;
    for (int split = lane; split < active; split += 32) {
        const float2 stats = __ldcg(parts.stats + parts.index(unit, split, column));
        const float factor = weight(stats.x, largest);
        factors[split] = factor;
        sum += stats.y * factor;
    }
    sum = warp_sum(sum);
    if (sink) sum += weight(*sink * LOG2_E, largest);
    return 1.0f / sum;
}

// Returns four values of the joined row. Splits are added in order.
__device__ inline float4 join_values(const Parts &parts, int unit, int column, int active, int i,
                                     const float *factors) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int split = 0; split < active; split++) {
        const float4 x =
            __ldcg((const float4 *)(parts.values + parts.index(unit, split, column) * parts.stride + i));
        const float factor = factors[split];
        sum.x += x.x * factor;
        sum.y += x.y * factor;
        sum.z += x.z * factor;
        sum.w += x.w * factor;
    }
    return sum;
}

// Largest number of splits of a context. The launchers respect it.
static constexpr int SPLITS_MAX = 128;
