// Attention of many tokens on tensor cores. A block takes 64 query rows of one head through the keys they see, tile by
// tile (Dao 2023, "FlashAttention-2"). Operands are halves; sums and the softmax are f32.
//
// HEAD_DIM is the capacity for elements of a head: 64, 96, 128 or 256. Shorter heads are padded with zeroes.
#include "attention.cuh"
#include "attention_tiles.cuh"

static constexpr int WARPS = 4;
static constexpr int ROWS = WARPS * 16;
// Keys of a tile: as many as let three blocks fit on a multiprocessor.
static constexpr int KEYS = HEAD_DIM > 128 ? 32 : 64;
// Halves from one row of a tile to the next. The padding puts eight rows in different banks.
static constexpr int STRIDE = HEAD_DIM + 8;

// Loads positions first .. first + KEYS into `tile`. Elements are zero from position `to` on and beyond the end of a
// head. Halves are copied asynchronously until `wait_for_tiles`; other types are converted at once.
__device__ inline void load_tile(__half *tile, const KvRows<KvType> &rows, int first, int to) {
    constexpr int EIGHTS = HEAD_DIM / 8;
#pragma unroll
    for (int at = threadIdx.x; at < KEYS * EIGHTS; at += WARPS * 32) {
        const int row = at / EIGHTS, i = at % EIGHTS * 8;
        const bool there = first + row < to && i < rows.stride;
        const int position = there ? first + row : to - 1;
        load_eight_to(tile + row * STRIDE + i, rows, position, there ? i : 0, there);
    }
    commit_tile();
}

// State of rows g and g + 8 of the warp's 16, with g = lane / 4.
struct Running {
    float largest[2], sum[2], values[HEAD_DIM / 8][4];
};

// Rules that turn a dot product with the scaled queries into a score.
struct Rule {
    int window;
    float softcap;
};

__device__ inline void multiply_keys(float (&scores)[KEYS / 8][4], const u32 (&q)[HEAD_DIM / 16][4],
                                     const __half *tile) {
    const int lane = threadIdx.x & 31;
    const __half *const from = tile + (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 k[4];
            load_matrices(k, from + n * 16 * STRIDE + step * 16);
            mma(scores[2 * n], q[step][0], q[step][1], q[step][2], q[step][3], k[0], k[1]);
            mma(scores[2 * n + 1], q[step][0], q[step][1], q[step][2], q[step][3], k[2], k[3]);
        }
    }
}

// Turns the scores for the keys from `first` on into weights. Row g is the query at `position`.
__device__ inline void weigh(float (&scores)[KEYS / 8][4], Running &running, const Rule &rule, int first,
                             int position) {
    const int lane = threadIdx.x & 31, warp_position = position - lane / 4;
    if (rule.softcap > 0.0f) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[n][i] = rule.softcap * LOG2_E * tanh_fast(scores[n][i]);
    }
    if (first + KEYS - 1 > warp_position || first < first_visible(warp_position + 15, rule.window)) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first + n * 8 + lane % 4 * 2 + i % 2, own = position + i / 2 * 8;
                if (key > own || key < first_visible(own, rule.window)) scores[n][i] = -INFINITE;
            }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float largest = running.largest[r];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            largest = fmaxf(largest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        // While no key is visible yet, all scores are -inf. The difference must not become NaN.
        const float base = largest == -INFINITE ? 0.0f : largest - WEIGHT_SHIFT;
        const float factor = exp2_fast(running.largest[r] - base - WEIGHT_SHIFT);
        running.largest[r] = largest;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                scores[n][i] = exp2_fast(scores[n][i] - base);
                sum += scores[n][i];
            }
        running.sum[r] = running.sum[r] * factor + sum;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            running.values[n][2 * r] *= factor;
            running.values[n][2 * r + 1] *= factor;
        }
    }
}

__device__ inline void add_values(Running &running, const float (&weights)[KEYS / 8][4], const __half *tile) {
    const int lane = threadIdx.x & 31;
    const __half *const from = tile + lane % 16 * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
        const float(&left)[4] = weights[2 * step], (&right)[4] = weights[2 * step + 1];
        const u32 a0 = pack(left[0], left[1]), a1 = pack(left[2], left[3]);
        const u32 a2 = pack(right[0], right[1]), a3 = pack(right[2], right[3]);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; n++) {
            u32 v[4];
            load_matrices_transposed(v, from + step * 16 * STRIDE + n * 16);
            mma(running.values[2 * n], a0, a1, a2, a3, v[0], v[1]);
            mma(running.values[2 * n + 1], a0, a1, a2, a3, v[2], v[3]);
        }
    }
}

// Loads two adjacent elements of a query row, scaled. Elements beyond the end of the row, and rows that do not exist,
// are zero.
__device__ inline u32 load_query(const float *row, int i, int dim, bool there, float scale) {
    const float low = there && i < dim ? row[i] * scale : 0.0f;
    const float high = there && i + 1 < dim ? row[i + 1] * scale : 0.0f;
    return pack(low, high);
}

// Grid (rows of 64 tokens, heads). q [tokens, heads, dim_k], out [tokens, heads, dim_v]. The tokens are at positions
// from positions[0] on, and their own keys and values are already in the cache.
extern "C" __global__ void __launch_bounds__(WARPS * 32, HEAD_DIM > 128 ? 2 : 3)
    attention_prompt(const float *q, void *key_plane, void *value_plane, const u32 *positions,
                     const float *sinks, float *out, int tokens, int heads, int kv_heads, int dim_k,
                     int dim_v, int context, int rows, int window, float scale, float softcap) {
    __shared__ __align__(16) __half key_tile[KEYS * STRIDE];
    __shared__ __align__(16) __half value_tile[KEYS * STRIDE];
    const int head = blockIdx.y, kv_head_index = head / (heads / kv_heads);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    // The last rows see the most keys, so they begin first.
    const int first_row = (int)(gridDim.x - 1 - blockIdx.x) * ROWS;
    int start = (int)positions[0];
    const int token = first_row + warp * 16 + lane / 4;
    const KvRows<KvType> keys = kv_head<KvType>(key_plane, dim_k, kv_head_index, kv_heads, rows);
    const KvRows<KvType> values =
        kv_values<KvType>(key_plane, value_plane, dim_k, dim_v, kv_head_index, kv_heads, rows);
    const Rule rule{window, softcap};
    Span span{first_visible(start + first_row, window), min(start + min(first_row + ROWS, tokens), context)};
    // The cache is a ring of `rows` rows. From here on, positions count from the start of the turn of the first visible
    // position.
    const int turns = turns_before(span.from, rows);
    span.from -= turns;
    span.to -= turns;
    start -= turns;

    load_tile(key_tile, keys, span.from, span.to);
    u32 queries[HEAD_DIM / 16][4];
    const float factor = softcap > 0.0f ? scale / softcap : scale * LOG2_E;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int own = token + j % 2 * 8;
        const float *const row = q + ((size_t)own * heads + head) * dim_k;
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; step++)
            queries[step][j] =
                load_query(row, step * 16 + j / 2 * 8 + lane % 4 * 2, dim_k, own < tokens, factor);
    }
    Running running;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        running.largest[r] = -INFINITE;
        running.sum[r] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) running.values[n][i] = 0.0f;

    for (int first = span.from; first < span.to; first += KEYS) {
        wait_for_tiles<0>();
        __syncthreads();  // The keys are loaded, and no warp reads the old values any more.
        load_tile(value_tile, values, first, span.to);
        float scores[KEYS / 8][4];
        multiply_keys(scores, queries, key_tile);
        __syncthreads();  // No warp reads the keys any more.
        load_tile(key_tile, keys, first + KEYS, span.to);
        weigh(scores, running, rule, first, start + token);
        wait_for_tiles<1>();
        __syncthreads();  // The values are loaded.
        add_values(running, scores, value_tile);
    }
    wait_for_tiles<0>();

    const float sink = sinks ? sinks[head] * LOG2_E : -INFINITE;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int own = token + r * 8;
        float sum = running.sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float base = running.largest[r] - WEIGHT_SHIFT, largest = fmaxf(base, sink);
        const float shrink = exp2_fast(base - largest);
        const float inverse = shrink / (sum * shrink + exp2_fast(sink - largest));
        if (own >= tokens) continue;
        float *const row = out + ((size_t)own * heads + head) * dim_v;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = n * 8 + lane % 4 * 2 + i;
                if (at < dim_v) row[at] = running.values[n][2 * r + i] * inverse;
            }
    }
}
