// Attention for any number of elements of a head up to 576 and for every type of cache, in f32 throughout. `--exact`
// and small models use it. A block takes one query row and one share of the context.
#include "attention.cuh"

static constexpr int WARPS = 4;
// Number of positions that a warp takes at once, so that their loads overlap.
static constexpr int TILE = 4;

// State of one query row. A lane owns N elements: lane, lane + 32, ...
template <int N> struct Running {
    float largest, sum, values[N];
};

template <int N>
__device__ inline void tile(Running<N> &running, const float (&q)[N], const KvRows<KvType> &keys,
                            const KvRows<KvType> &values, const AttentionShape &shape, int first, int to) {
    const int lane = threadIdx.x & 31;
    float scores[TILE];
#pragma unroll
    for (int j = 0; j < TILE; j++) {
        const int row = min(first + j, to - 1);
        float dot = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++)
            if (lane + 32 * n < shape.dim_k) dot += q[n] * kv_element<KvType>(keys, row, lane + 32 * n);
        scores[j] = dot;
    }
    float largest = running.largest;
#pragma unroll
    for (int j = 0; j < TILE; j++) {
        const float dot = warp_sum(scores[j]);
        scores[j] = first + j < to ? score(dot, shape) : -INFINITE;
        largest = fmaxf(largest, scores[j]);
    }
    const float factor = weight(running.largest, largest);
    running.largest = largest;
    running.sum *= factor;
#pragma unroll
    for (int n = 0; n < N; n++) running.values[n] *= factor;
#pragma unroll
    for (int j = 0; j < TILE; j++) {
        const int row = min(first + j, to - 1);
        const float w = weight(scores[j], largest);
        running.sum += w;
#pragma unroll
        for (int n = 0; n < N; n++)
            if (lane + 32 * n < shape.dim_v)
                running.values[n] += w * kv_element<KvType>(values, row, lane + 32 * n);
    }
}

template <int N>
__device__ inline void attention(const float *q, void *key_plane, void *value_plane,
                                 const u32 *positions, const float *sinks, float *out, float *memory,
                                 u32 *tickets, const AttentionShape &shape, int rows) {
    __shared__ float warp_values[WARPS][32 * N];
    __shared__ float warp_largest[WARPS], warp_sums[WARPS], factors[SPLITS_MAX];
    __shared__ float inverse;
    const int head = blockIdx.y, token = blockIdx.z, unit = token * shape.heads + head;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int position = (int)positions[0] + token;
    const Span all{first_visible(position, shape.window), min(position + 1, shape.context)};
    int active;
    Span span = share_of(all, blockIdx.x, gridDim.x, WARPS * TILE, active);
    if ((int)blockIdx.x >= active) return;
    // The cache is a ring of `rows` rows. From here on, positions count from the start of the turn of the first visible
    // position.
    const int turns = turns_before(all.from, rows);
    span.from -= turns;
    span.to -= turns;

    const int kv_head_index = head / (shape.heads / shape.kv_heads);
    const KvRows<KvType> keys =
        kv_head<KvType>(key_plane, shape.dim_k, kv_head_index, shape.kv_heads, rows);
    const KvRows<KvType> values =
        kv_values<KvType>(key_plane, value_plane, shape.dim_k, shape.dim_v, kv_head_index, shape.kv_heads,
                          rows);
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
    for (int first = span.from + warp * TILE; first < span.to; first += WARPS * TILE)
        tile<N>(running, queries, keys, values, shape, first, span.to);
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
    if (gridDim.x == 1) {
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
    const Parts parts(memory, tickets, gridDim.y * gridDim.z, gridDim.x, 1, stride);
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

// Grid (splits, heads, tokens). q [tokens, heads, dim_k], out [tokens, heads, dim_v]. The tokens are at positions from
// positions[0] on. With more than one split, `memory` is that of Parts for one column, with stride `dim_v` rounded up
// to 4.
#define ATTENTION_GENERAL(NAME, N)                                                                                \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                    \
        NAME(const float *q, void *keys, void *values, const u32 *positions, const float *sinks, float *out,    \
             float *memory, u32 *tickets, int tokens, int heads, int kv_heads, int dim_k, int dim_v,            \
             int context, int rows, int window, float scale, float softcap) {                                   \
        const AttentionShape shape{tokens, heads, kv_heads, dim_k, dim_v, context, window, scale, softcap};    \
        attention<N>(q, keys, values, positions, sinks, out, memory, tickets, shape, rows);                     \
    }

ATTENTION_GENERAL(attention_general_128, 4)
ATTENTION_GENERAL(attention_general_256, 8)
ATTENTION_GENERAL(attention_general_576, 18)
