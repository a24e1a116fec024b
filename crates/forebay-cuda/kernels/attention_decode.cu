// Attention of a few tokens: the context is read once, by warps that need nothing of each other until the end.
//
// The products are turned around: keys and transposed values are the 16-row operand, and the 8 columns are query rows
// (token, head) that share a key/value head. Fragments come straight from global memory: a sum does not care for the
// order of its terms, so each lane takes 8 neighbouring elements wherever the instruction wants 2 and 2. Queries and
// weights are split into two halves each, which leaves f32 accuracy for little, as memory is what limits.
//
// HEAD_DIM is the capacity for elements of a head, 64, 96, 128 or 256.
#include "attention.cuh"
#include "attention_mma.cuh"

static constexpr int WARPS = 4;
static constexpr int COLUMNS = 8;
static constexpr int TILE = 16;
static constexpr int KEY_CHUNKS = (HEAD_DIM + 31) / 32;
static constexpr int VALUE_CHUNKS = (HEAD_DIM + 63) / 64;
static constexpr int PART_STRIDE = VALUE_CHUNKS * 64 + 2;

// A query row of this kv head: columns count on through the tokens' groups.
struct Row {
    int token, head;
};

__device__ inline Row row_of(int column, int group, int kv_head) {
    return Row{column / group, kv_head * group + column % group};
}

// Queries as operand fragments, [chunk][rounded or rest][lane].
__device__ inline void load_queries(uint4 (*queries)[2][32], const float *q, const AttentionShape &shape,
                                    int first_column, int columns, int group, int kv_head) {
    for (int i = threadIdx.x; i < KEY_CHUNKS * 32; i += WARPS * 32) {
        const int chunk = i / 32, lane = i % 32;
        const int column = first_column + lane / 4, first = chunk * 32 + lane % 4 * 8;
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = 0.0f;
        if (column < columns) {
            const Row row = row_of(column, group, kv_head);
            const float *from = q + ((size_t)row.token * shape.heads + row.head) * shape.dim_k;
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (first + j < shape.dim_k) x[j] = from[first + j];
        }
        u32 rounded[4], rest[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            rounded[j] = pack(x[2 * j], x[2 * j + 1]);
            rest[j] = pack_rest(x[2 * j], x[2 * j + 1], rounded[j]);
        }
        queries[chunk][0][lane] = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
        queries[chunk][1][lane] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    }
}

// What a warp, or a lane of it, has summed up: columns p and p + 1 of the eight, p = 2 (lane % 4).
struct Running {
    float largest[2], sum[2];
    // Rows of the 16: dims 8 (lane / 4) + 2t and the next, t the tile within a chunk of 64.
    float values[VALUE_CHUNKS * 4][4];
};

// Sixteen positions from `first`, of which those below `to` count.
__device__ inline void tile(Running &running, const uint4 (*queries)[2][32], const KvRows<KvType> &keys,
                            const KvRows<KvType> &values, const AttentionShape &shape, int first,
                            int to, const int (&positions)[2]) {
    const int lane = threadIdx.x & 31, g = lane / 4, p = lane % 4;
    const uint4 none = make_uint4(0, 0, 0, 0);
    // Rows past the end repeat the last one, which is there; their weights are 0.
    uint4 k[KEY_CHUNKS][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = min(first + g + 8 * half, to - 1);
#pragma unroll
        for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) {
            const int i = chunk * 32 + p * 8;
            k[chunk][half] = i < keys.stride ? load_eight(keys, row, i) : none;
        }
    }
    uint4 v[VALUE_CHUNKS][4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int row = min(first + 2 * p + (j & 1) + 8 * (j >> 1), to - 1);
#pragma unroll
        for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++) {
            const int i = chunk * 64 + g * 8;
            v[chunk][j] = i < values.stride ? load_eight(values, row, i) : none;
        }
    }
    float scores[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) {
        const uint4 a = k[chunk][0], b = k[chunk][1];
#pragma unroll
        for (int part = 1; part >= 0; part--) {
            const uint4 q = queries[chunk][part][lane];
            mma(scores, a.x, b.x, a.y, b.y, q.x, q.y);
            mma(scores, a.z, b.z, a.w, b.w, q.z, q.w);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int position = first + g + 8 * (i / 2), own = positions[i % 2];
        const bool visible =
            position < to && position <= own && position >= first_visible(own, shape.window);
        scores[i] = visible ? score(scores[i], shape) : -INFINITE;
    }
    float factors[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float largest = fmaxf(scores[c], scores[c + 2]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        largest = fmaxf(largest, running.largest[c]);
        factors[c] = weight(running.largest[c], largest);
        running.largest[c] = largest;
        scores[c] = weight(scores[c], largest - WEIGHT_SHIFT);
        scores[c + 2] = weight(scores[c + 2], largest - WEIGHT_SHIFT);
        running.sum[c] = running.sum[c] * factors[c] + (scores[c] + scores[c + 2]);
    }
    const u32 low = pack(scores[0], scores[1]), high = pack(scores[2], scores[3]);
    const u32 weights[2] = {transpose(low), transpose(high)};
    const u32 rests[2] = {transpose(pack_rest(scores[0], scores[1], low)),
                          transpose(pack_rest(scores[2], scores[3], high))};
#pragma unroll
    for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            float(&sums)[4] = running.values[chunk * 4 + t];
            u32 rows[4];
#pragma unroll
            for (int j = 0; j < 4; j++) rows[j] = (&v[chunk][j].x)[t];
            const u32 a0 = __byte_perm(rows[0], rows[1], 0x5410), a1 = __byte_perm(rows[0], rows[1], 0x7632);
            const u32 a2 = __byte_perm(rows[2], rows[3], 0x5410), a3 = __byte_perm(rows[2], rows[3], 0x7632);
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i] *= factors[i % 2];
            mma(sums, a0, a1, a2, a3, rests[0], rests[1]);
            mma(sums, a0, a1, a2, a3, weights[0], weights[1]);
        }
    }
}

// What the warps of a block leave for each other, and later the factors of the splits.
struct Shared {
    float values[WARPS][COLUMNS][PART_STRIDE];
    float largest[WARPS][COLUMNS], sum[WARPS][COLUMNS];
};

__device__ inline void leave(Shared &shared, const Running &running) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane / 4, p = lane % 4;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float sum = running.sum[c];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
            sum += __shfl_xor_sync(~0u, sum, distance);
        if (g == 0) {
            shared.largest[warp][2 * p + c] = running.largest[c] - WEIGHT_SHIFT;
            shared.sum[warp][2 * p + c] = sum;
        }
#pragma unroll
        for (int t = 0; t < VALUE_CHUNKS * 4; t++)
            *(float2 *)&shared.values[warp][2 * p + c][t / 4 * 64 + g * 8 + t % 4 * 2] =
                make_float2(running.values[t][c], running.values[t][c + 2]);
    }
}

// Joins the warps' parts of `column`: elements i and i + 1, and the column's stats.
__device__ inline float2 join_warps(const Shared &shared, int column, int i, float2 &stats) {
    float largest = -INFINITE;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) largest = fmaxf(largest, shared.largest[warp][column]);
    float sum = 0.0f;
    float2 values = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        const float factor = weight(shared.largest[warp][column], largest);
        const float2 x = *(const float2 *)&shared.values[warp][column][i];
        sum += shared.sum[warp][column] * factor;
        values.x += x.x * factor;
        values.y += x.y * factor;
    }
    stats = make_float2(largest, sum);
    return values;
}

// Grid (splits, kv_heads * chunks of 8 query rows). q [tokens, heads, dim_k], out [tokens, heads, dim_v]; the tokens stand
// at positions[0] and after it. `memory` is that of Parts with stride `dim_v` rounded up to 4.
extern "C" __global__ void __launch_bounds__(WARPS * 32, HEAD_DIM > 128 ? 2 : 3)
    attention_decode(const float *q, void *key_plane, void *value_plane, const u32 *positions,
                     const float *sinks, float *out, float *memory, u32 *tickets, int tokens, int heads,
                     int kv_heads, int dim_k, int dim_v, int context, int window, float scale,
                     float softcap) {
    __shared__ uint4 queries[KEY_CHUNKS][2][32];
    __shared__ __align__(16) Shared shared;
    const AttentionShape shape{tokens, heads, kv_heads, dim_k, dim_v, context, window, scale, softcap};
    const int group = heads / kv_heads, columns = tokens * group;
    const int chunks = (columns + COLUMNS - 1) / COLUMNS;
    const int unit = blockIdx.y, kv_head_index = unit / chunks, first_column = unit % chunks * COLUMNS;
    const int start = (int)positions[0];
    const Span all{first_visible(start, window), min(start + tokens, context)};
    int active;
    const Span span = share_of(all, blockIdx.x, gridDim.x, WARPS * TILE, active);
    if ((int)blockIdx.x >= active) return;

    load_queries(queries, q, shape, first_column, columns, group, kv_head_index);
    __syncthreads();
    const KvRows<KvType> keys = kv_head<KvType>(key_plane, dim_k, kv_head_index, kv_heads, context);
    const KvRows<KvType> values = kv_head<KvType>(value_plane, dim_v, kv_head_index, kv_heads, context);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int own[2];
#pragma unroll
    for (int c = 0; c < 2; c++)
        own[c] = start + min(first_column + lane % 4 * 2 + c, columns - 1) / group;
    Running running;
#pragma unroll
    for (int c = 0; c < 2; c++) {
        running.largest[c] = -INFINITE;
        running.sum[c] = 0.0f;
    }
#pragma unroll
    for (int t = 0; t < VALUE_CHUNKS * 4; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) running.values[t][i] = 0.0f;
    for (int first = span.from + warp * TILE; first < span.to; first += WARPS * TILE)
        tile(running, queries, keys, values, shape, first, span.to, own);
    leave(shared, running);
    __syncthreads();

    const int stride = (dim_v + 3) / 4 * 4;
    const Parts parts(memory, tickets, gridDim.y, gridDim.x, COLUMNS, stride);
    const int pairs = stride / 2;
    for (int i = threadIdx.x; i < COLUMNS * pairs; i += WARPS * 32) {
        const int column = i / pairs, at = i % pairs * 2;
        float2 stats;
        const float2 x = join_warps(shared, column, at, stats);
        const size_t index = parts.index(unit, blockIdx.x, column);
        *(float2 *)(parts.values + index * stride + at) = x;
        if (at == 0) parts.stats[index] = stats;
    }
    if (!is_last(parts, unit, active)) return;

    float(*factors)[SPLITS_MAX] = (float(*)[SPLITS_MAX])shared.values;
    float *inverse = &shared.sum[0][0];
    for (int column = warp; column < COLUMNS && first_column + column < columns; column += WARPS) {
        const Row row = row_of(first_column + column, group, kv_head_index);
        const float *sink = sinks ? sinks + row.head : nullptr;
        const float x = join_factors(parts, unit, column, active, sink, factors[column]);
        if (lane == 0) inverse[column] = x;
    }
    __syncthreads();
    const int quads = stride / 4;
    for (int i = threadIdx.x; i < COLUMNS * quads; i += WARPS * 32) {
        const int column = i / quads, at = i % quads * 4;
        if (first_column + column >= columns) break;
        const Row row = row_of(first_column + column, group, kv_head_index);
        const float4 sum = join_values(parts, unit, column, active, at, factors[column]);
        float *to = out + ((size_t)row.token * heads + row.head) * dim_v + at;
        const float x[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (at + j < dim_v) to[j] = x[j] * inverse[column];
    }
}
