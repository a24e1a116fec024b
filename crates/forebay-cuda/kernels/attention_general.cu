// Attention for any number of elements of a head up to 1088 and for every type of cache, in f32 throughout. `--exact`
// and small models use it. A block takes one query row and one share of the context.
#include "attention.cuh"
#include "pools.cuh"

static constexpr int WARPS = 4;
// Number of positions that a warp takes at once, so that their loads overlap.
static constexpr int TILE = 4;
// Positions that a block processes at once: one block of the cache. A part of a context is worth at least as many.
static constexpr int STEP = WARPS * TILE;
static_assert(STEP == KV_BLOCK, "a tile lies in one block");

// State of one query row. A lane owns N elements: lane, lane + 32, ...
template <int N> struct Running {
    float largest, sum, values[N];
};

// The rows of a tile of neighbouring positions, which are in one block. Positions outside `seen` are not visible, and the
// nearest row that is seen is read for them, because theirs may hold anything.
struct Neighbours {
    KvBlock<KvType> keys, values;
    int first;
    Span seen;

    __device__ inline int row(int j) const { return min(max(first + j, seen.from), seen.to - 1) % KV_BLOCK; }
    __device__ inline const KvBlock<KvType> &keys_of(int) const { return keys; }
    __device__ inline const KvBlock<KvType> &values_of(int) const { return values; }
};

// The rows of a tile of positions that a list of pools names.
struct Listed {
    KvBlock<KvType> keys[TILE], values[TILE];
    int rows[TILE];

    // Entries outside `seen` repeat the nearest one.
    __device__ inline Listed(const KvHead<KvType> &key_head, const KvHead<KvType> &value_head, const u32 *table,
                             const u32 *list, const Pools &pools, int own, int first, Span seen) {
#pragma unroll
        for (int j = 0; j < TILE; j++) {
            const u32 position = pools.position_of(list, own, min(max(first + j, seen.from), seen.to - 1));
            const u32 number = table[position / KV_BLOCK];
            keys[j] = key_head.block(number);
            values[j] = value_head.block(number);
            rows[j] = (int)(position % KV_BLOCK);
        }
    }
    __device__ inline int row(int j) const { return rows[j]; }
    __device__ inline const KvBlock<KvType> &keys_of(int j) const { return keys[j]; }
    __device__ inline const KvBlock<KvType> &values_of(int j) const { return values[j]; }
};

// Biases of scores by the distance of the key (Inkling): what the row's head takes of each profile [rank], and profiles
// [rank, extent], from the farthest distance to the token itself. Keys farther away have no bias. The biases are those before
// the factor of scores.
struct Relative {
    const float *mixes, *profiles;
    int rank, extent, own;

    // Returns the lane's share of the bias of a key.
    __device__ inline float share(int lane, int position) const {
        const int back = own - position;
        float sum = 0.0f;
        if (back >= 0 && back < extent)
            for (int r = lane; r < rank; r += 32) sum += mixes[r] * profiles[(size_t)r * extent + extent - 1 - back];
        return sum;
    }
};

// Adds the tile of positions from `first` on. Positions outside `seen` get no weight.
template <int N, class Rows>
__device__ inline void tile(Running<N> &running, const float (&q)[N], const Rows &rows, const AttentionShape &shape,
                            int first, Span seen, const Relative &relative) {
    const int lane = threadIdx.x & 31;
    float scores[TILE];
#pragma unroll
    for (int j = 0; j < TILE; j++) {
        const int row = rows.row(j);
        const KvBlock<KvType> &keys = rows.keys_of(j);
        float dot = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++)
            if (lane + 32 * n < shape.dim_k) dot += q[n] * kv_element<KvType>(keys, row, lane + 32 * n);
        if (relative.mixes) dot += relative.share(lane, first + j);
        scores[j] = dot;
    }
    float largest = running.largest;
#pragma unroll
    for (int j = 0; j < TILE; j++) {
        const float dot = warp_sum(scores[j]);
        scores[j] = is_in(seen, first + j) ? score(dot, shape) : -INFINITE;
        largest = fmaxf(largest, scores[j]);
    }
    const float factor = weight(running.largest, largest);
    running.largest = largest;
    running.sum *= factor;
#pragma unroll
    for (int n = 0; n < N; n++) running.values[n] *= factor;
#pragma unroll
    for (int j = 0; j < TILE; j++) {
        const int row = rows.row(j);
        const KvBlock<KvType> &values = rows.values_of(j);
        const float w = weight(scores[j], largest);
        running.sum += w;
#pragma unroll
        for (int n = 0; n < N; n++)
            if (lane + 32 * n < shape.dim_v)
                running.values[n] += w * kv_element<KvType>(values, row, lane + 32 * n);
    }
}

// If `lists` is not null, a row sees the pools of its list [rows, lists of a row, most], and the positions behind the last pool
// that it may choose. A row has one list, or one for each kv head.
template <int N>
__device__ inline void attention(const float *q, const KvLayer &cache, const float *sinks, float *out, float *memory,
                                 u32 *tickets, int limit, const AttentionShape &shape, const u32 *lists, int lists_of_row,
                                 const Pools &pools, Relative relative) {
    __shared__ float warp_values[WARPS][32 * N];
    __shared__ float warp_largest[WARPS], warp_sums[WARPS], factors[SPLITS_MAX];
    __shared__ float inverse;
    const int head = blockIdx.y, token = blockIdx.z, unit = token * shape.heads + head;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // Listed positions are counted through.
    const int own = (int)cache.positions[token], position = lists ? pools.seen(own) - 1 : own;
    const Span all = span_of_token(position, shape.window, shape.context, STEP);
    const int splits = splits_of(all.to, limit, STEP, 0);
    int active;
    const Span span = share_of(all, blockIdx.x, splits, STEP, active);
    if ((int)blockIdx.x >= active) return;

    const u32 *const table = cache.table(token);
    const int kv_head_index = head / (shape.heads / shape.kv_heads);
    const KvHead<KvType> keys = cache.keys_of(shape.dim_k, kv_head_index, shape.kv_heads);
    const KvHead<KvType> values = cache.values_of(shape.dim_k, shape.dim_v, kv_head_index, shape.kv_heads);
    float queries[N];
    Running<N> running;
    running.largest = -INFINITE;
    running.sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int i = lane + 32 * n;
        queries[n] = i < shape.dim_k ? q[(size_t)unit * shape.dim_k + i] : 0.0f;
        running.values[n] = 0.0f;
    }
    relative.own = position;
    if (relative.mixes) relative.mixes += (size_t)unit * relative.rank;
    const Span seen{max(span.from, first_visible(position, shape.window)), span.to};
    if (lists) {
        const size_t number = (size_t)token * lists_of_row + (lists_of_row > 1 ? kv_head_index : 0);
        const u32 *const list = lists + number * pools.most;
        for (int first = span.from + warp * TILE; first < span.to; first += STEP)
            tile<N>(running, queries, Listed(keys, values, table, list, pools, own, first, seen), shape, first,
                    seen, relative);
    } else {
        const int last_block = (span.to - 1) / KV_BLOCK;
        u32 next = table[span.from / KV_BLOCK];
        for (int first = span.from + warp * TILE; first < span.to; first += STEP) {
            const u32 block = next;
            next = table[min(first / KV_BLOCK + 1, last_block)];
            const Neighbours rows{keys.block(block), values.block(block), first, seen};
            tile<N>(running, queries, rows, shape, first, seen, relative);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) warp_values[warp][lane + 32 * n] = running.values[n];
    if (lane == 0) {
        warp_largest[warp] = running.largest;
        warp_sums[warp] = running.sum;
    }
    __syncthreads();

    float largest = -INFINITE, sum = 0.0f;
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, warp_largest[w]);
    for (int w = 0; w < WARPS; w++) sum += warp_sums[w] * weight(warp_largest[w], largest);
    const float *sink = sinks ? sinks + head : nullptr;
    out += (size_t)unit * shape.dim_v;
    if (active == 1) {
        // There is only one part, so no memory for parts is needed. That matters for long prompts.
        const float top = sink ? fmaxf(largest, *sink * LOG2_E) : largest;
        const float all_weights =
            sum * weight(largest, top) + (sink ? weight(*sink * LOG2_E, top) : 0.0f);
        for (int i = threadIdx.x; i < shape.dim_v; i += WARPS * 32) {
            float x = 0.0f;
            for (int w = 0; w < WARPS; w++) x += warp_values[w][i] * weight(warp_largest[w], top);
            out[i] = x / all_weights;
        }
        return;
    }

    const int stride = (shape.dim_v + 3) / 4 * 4;
    const Parts parts(memory, tickets, gridDim.y * gridDim.z, limit, 1, stride);
    const size_t index = parts.index(unit, blockIdx.x, 0);
    for (int i = threadIdx.x; i < stride; i += WARPS * 32) {
        float x = 0.0f;
        for (int w = 0; w < WARPS; w++) x += warp_values[w][i] * weight(warp_largest[w], largest);
        parts.values[index * stride + i] = x;
    }
    if (threadIdx.x == 0) parts.stats[index] = make_float2(largest, sum);
    if (!is_last(parts, unit, active)) return;

    if (warp == 0) {
        const float x = join_factors(parts, unit, 0, active, sink, factors);
        if (lane == 0) inverse = x;
    }
    __syncthreads();
    for (int i = threadIdx.x * 4; i < stride; i += WARPS * 32 * 4) {
        const float4 joined = join_values(parts, unit, 0, active, i, factors);
        const float x[4] = {joined.x, joined.y, joined.z, joined.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j < shape.dim_v) out[i + j] = x[j] * inverse;
    }
}

// Grid (largest number of splits of a token, heads, tokens). q [tokens, heads, dim_k], out [tokens, heads, dim_v]. The
// tokens may belong to different sequences. A token has up to `limit` splits (`splits_of`). If that is more than one,
// `memory` is that of Parts for one column and `limit` splits, with stride `dim_v` rounded up to 4. `lists` [tokens, lists of a
// row, most] has the pools that each token sees, if it is not null. `mixes` [tokens, heads, rank] and `profiles` [rank, extent]
// give biases by distance, if they are not null.
#define ATTENTION_GENERAL(NAME, N)                                                                              \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                    \
        NAME(const float *q, KV_PARAMETERS, const float *sinks, float *out, float *memory, u32 *tickets,        \
             int limit, int heads, int kv_heads, int dim_k, int dim_v, int context, int window, float scale,    \
             float softcap, const u32 *lists, int lists_of_row, POOL_PARAMETERS, const float *mixes,            \
             const float *profiles, int rank, int extent) {                                                     \
        const AttentionShape shape{heads, kv_heads, dim_k, dim_v, context, window, scale, softcap};             \
        attention<N>(q, KvLayer{KV_ARGUMENTS}, sinks, out, memory, tickets, limit, shape, lists, lists_of_row,  \
                     POOLS, Relative{mixes, profiles, rank, extent, 0});                                        \
    }

ATTENTION_GENERAL(attention_general_128, 4)
ATTENTION_GENERAL(attention_general_256, 8)
ATTENTION_GENERAL(attention_general_576, 18)
ATTENTION_GENERAL(attention_general_1088, 34)
