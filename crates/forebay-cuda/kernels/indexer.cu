// The lightning indexer (DeepSeek-AI 2025, "DeepSeek-V3.2"): what its heads and keys need before scores, and the scores by
// which a row chooses the keys that it attends to. `indexer_choice.cu` chooses. All is f32.
//
// The heads of a row share one key of each position. A lane keeps a key in registers, and queries are broadcast from shared
// memory. The score of a key does not depend on the rows or the keys beside it.
//
// The keys may be those of compressed entries, which stand for several positions each. Then a row may choose the entries that end at
// its position or before it.
//
// Rows may choose among pools of consecutive positions (pools.cuh). Then a pool either has one key, which is in the cache at
// the pool's last position, or its score is the largest product of a query and a key.
#include "attention.cuh"
#include "entries.cuh"
#include "head_inputs.cuh"
#include "load_eight.cuh"
#include "pipeline.cuh"
#include "pools.cuh"

static constexpr int WARPS = 4;

// Finishes queries and keys, and stores the keys in the cache. q [rows, heads, dim] is changed in place. k [rows, dim].
// Queries get a norm if `q_norm` is not null. Keys get a layer norm if `bias` is not null, else a norm if `norm` is not null.
// Queries are rotated if `angles` is not null, and keys then too if `turns_keys`: angles [positions, 2, rotary_dim / 2] are
// cosines and sines of the elements from `rotary_from` on. If `gates` [rows, dim] is not null, they are stored behind the key. A
// position beyond the context, or without a block, is not written. One warp for each head and for the key of each row: grid
// (heads, rows).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    indexer_inputs(float *q, const float *k, const float *gates, const float *q_norm, const float *norm,
                   const float *bias, const float *angles, KV_PARAMETERS, int heads, int dim, int rotary_dim,
                   int rotary_from, int interleaved, int turns_keys, int context, float norm_eps, float layer_norm_eps) {
    extern __shared__ float shared[];
    wait_for_previous();
    const int lane = threadIdx.x & 31, head = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const size_t row_index = blockIdx.y;
    if (head > heads) return;
    const KvLayer cache{KV_ARGUMENTS};
    const u32 position = positions[row_index];
    if (position >= (u32)context) return;
    const int width = gates ? 2 * dim : dim;
    float *const row = shared + (threadIdx.x >> 5) * width;
    const bool query = head < heads;
    const float *const from = query ? q + (row_index * heads + head) * dim : k + row_index * dim;
    for (int i = lane; i < dim; i += 32) row[i] = from[i];
    if (!query && gates)
        for (int i = lane; i < dim; i += 32) row[dim + i] = gates[row_index * dim + i];
    __syncwarp();
    if (!query && bias) {
        float sum = 0.0f;
        for (int i = lane; i < dim; i += 32) sum += row[i];
        const float mean = warp_sum(sum) / (float)dim;
        float squares = 0.0f;
        for (int i = lane; i < dim; i += 32) squares += (row[i] - mean) * (row[i] - mean);
        const float scale = 1.0f / sqrtf(warp_sum(squares) / (float)dim + layer_norm_eps);
        for (int i = lane; i < dim; i += 32) row[i] = (row[i] - mean) * scale * norm[i] + bias[i];
    }
    const float *const plain_norm = query ? q_norm : bias ? nullptr : norm;
    const float *const turn = angles ? angles + (size_t)position * rotary_dim : nullptr;
    finish_head(row, dim, plain_norm, query || turns_keys, HeadRules{turn, rotary_dim, rotary_from, interleaved, norm_eps});
    if (query) {
        for (int i = lane; i < dim; i += 32) q[(row_index * heads + head) * dim + i] = row[i];
        return;
    }
    const u32 block = cache.table((int)row_index)[position / KV_BLOCK];
    if (block == 0) return;
    const KvHead<KvType> keys = kv_head<KvType>(key_plane, KV_PLACES, width, 0, 1);
    store_row(keys.block(block), position % KV_BLOCK, row, width, lane);
}

// Makes one key of the keys of a pool of `length` positions, for every row whose position completes a pool. It replaces the key
// of that position. The keys are read from the cache, and the kernel that stored them must have ended. Without
// `gate_bias` [length, dim], the key is their mean, and then normed and rotated like a key at the pool's first position.
// With it, rows have gates behind the keys, and an element is the average of that element of the keys, weighted by the softmax
// of gate and bias over the positions. One warp for each row: grid (rows / WARPS).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    indexer_pool(const float *gate_bias, const float *norm, const float *angles, KV_PARAMETERS, int rows, int length,
                 int dim, int rotary_dim, int interleaved, int context, float norm_eps) {
    extern __shared__ float shared[];
    wait_for_previous();
    const int lane = threadIdx.x & 31, row_index = blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (row_index >= rows) return;
    const KvLayer cache{KV_ARGUMENTS};
    const u32 position = positions[row_index];
    if (position >= (u32)context || (position + 1) % length != 0) return;
    const int width = gate_bias ? 2 * dim : dim;
    float *const row = shared + (threadIdx.x >> 5) * width;
    const KvHead<KvType> keys = kv_head<KvType>(key_plane, KV_PLACES, width, 0, 1);
    const u32 *const table = cache.table(row_index);
    const u32 first = position + 1 - length;
    for (int i = lane; i < dim; i += 32) {
        float largest = -INFINITE, weights = 0.0f, sum = 0.0f;
        for (int at = 0; at < length; at++) {
            const u32 from = first + at;
            const KvBlock<KvType> block = keys.block(table[from / KV_BLOCK]);
            const float key = kv_element<KvType>(block, from % KV_BLOCK, i);
            if (!gate_bias) {
                sum += key;
                weights += 1.0f;
                continue;
            }
            const float gate = kv_element<KvType>(block, from % KV_BLOCK, dim + i) + gate_bias[at * dim + i];
            const float top = fmaxf(gate, largest);
            const float before = expf(largest - top), own = expf(gate - top);
            sum = sum * before + own * key;
            weights = weights * before + own;
            largest = top;
        }
        row[i] = sum / weights;
        if (gate_bias) row[dim + i] = 0.0f;
    }
    __syncwarp();
    const float *const turn = angles && !gate_bias ? angles + (size_t)first * rotary_dim : nullptr;
    finish_head(row, dim, gate_bias ? nullptr : norm, true, HeadRules{turn, rotary_dim, 0, interleaved, norm_eps});
    const u32 block = table[position / KV_BLOCK];
    if (block == 0) return;
    store_row(keys.block(block), position % KV_BLOCK, row, width, lane);
}

// Positions of a block of threads, one for each.
static constexpr int TILE = WARPS * 32;
// Heads whose queries are in shared memory at once.
static constexpr int HEADS = 16;

// Sizes of a call. `width` is the number of elements of a row of the cache, which stands for `span` positions.
struct Scores {
    int rows, rows_of_block, heads, dim, width, context, stride, span;
    Pools pools;

    // Returns the number of pools that a row must choose from. It is 0 for a row that sees all positions.
    __device__ inline int candidates(int position) const {
        const int candidates = position < context ? pools.candidates_of((position + 1) / span) : 0;
        return candidates > pools.most ? candidates : 0;
    }
};

// Loads the key in a row. Elements behind it are 0, or what its row has there.
template <int DIM>
__device__ inline void load_key(float (&key)[DIM], const KvHead<KvType> &keys, const u32 *table, const SpannedRow &at) {
    const KvBlock<KvType> block = keys.block(table[at.index]);
#pragma unroll
    for (int i = 0; i < DIM; i += 8) {
        if (i < block.stride) {
            load_eight(key + i, block, at.row, i);
        } else {
#pragma unroll
            for (int n = 0; n < 8; n++) key[i + n] = 0.0f;
        }
    }
}

// Brings the queries of `count` heads to shared memory, from head `head` of a row on. Elements behind a query are 0.
template <int DIM>
__device__ inline void load_queries(float *queries, const float *q, size_t head, int count, int dim) {
    for (int i = threadIdx.x; i < count * DIM; i += TILE) {
        const int element = i % DIM;
        queries[i] = element < dim ? q[(head + i / DIM) * dim + element] : 0.0f;
    }
}

// Returns the product of a query in shared memory and a key.
template <int DIM> __device__ inline float multiply(const float *query_at, const float (&key)[DIM]) {
    const u32 query = shared_address(query_at);
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < DIM / 4; i++) {
        const float4 x = load_four(query + i * sizeof(float4));
        sums[0] += x.x * key[4 * i];
        sums[1] += x.y * key[4 * i + 1];
        sums[2] += x.z * key[4 * i + 2];
        sums[3] += x.w * key[4 * i + 3];
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <int DIM>
__device__ inline void score_keys(const float *q, const float *weights, const KvLayer &cache, float *scores,
                                  const Scores &of) {
    __shared__ __align__(16) float queries[HEADS * DIM];
    __shared__ float head_weights[HEADS];
    const int first_row = blockIdx.y * of.rows_of_block, last_row = min(first_row + of.rows_of_block, of.rows);
    int end = 0;
    for (int row = first_row; row < last_row; row++) end = max(end, of.candidates((int)cache.positions[row]));
    const KvHead<KvType> keys = spanned_head<KvType>(cache.key_plane, cache.places, of.width, of.span);
    for (int first = blockIdx.x * TILE; first < end; first += gridDim.x * TILE) {
        const int own = first + threadIdx.x;
        float key[DIM];
        u32 loaded = ~0u;
        for (int row = first_row; row < last_row; row++) {
            const int candidates = of.candidates((int)cache.positions[row]);
            if (candidates <= first) continue;
            const u32 table = cache.table_of_row[row];
            if (table != loaded) {
                loaded = table;
                // Pools behind the end repeat the last one. Their scores are not stored.
                const int at = (min(own, end - 1) + 1) * of.pools.length - 1;
                load_key(key, keys, cache.table_at(table), SpannedRow(at, of.span));
            }
            float score = 0.0f;
            for (int head = 0; head < of.heads; head += HEADS) {
                const int count = min(HEADS, of.heads - head);
                const size_t heads_before = (size_t)row * of.heads + head;
                __syncthreads();  // No warp reads the queries before any more.
                load_queries<DIM>(queries, q, heads_before, count, of.dim);
                if ((int)threadIdx.x < count)
                    head_weights[threadIdx.x] = weights ? weights[heads_before + threadIdx.x] : 1.0f;
                __syncthreads();
                for (int h = 0; h < count; h++)
                    score += head_weights[h] * fmaxf(multiply(queries + h * DIM, key), 0.0f);
            }
            if (own < candidates) scores[(size_t)row * of.stride + own] = score;
        }
    }
}

// Computes the largest products of each head's query with the keys of a pool, whose length is a power of two up to TILE.
template <int DIM>
__device__ inline void score_pools(const float *q, const KvLayer &cache, float *scores, const Scores &of) {
    __shared__ __align__(16) float queries[HEADS * DIM];
    __shared__ float of_warps[WARPS][HEADS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, length = of.pools.length;
    const int first_row = blockIdx.y * of.rows_of_block, last_row = min(first_row + of.rows_of_block, of.rows);
    int end = 0;
    for (int row = first_row; row < last_row; row++) end = max(end, of.candidates((int)cache.positions[row]));
    // Positions of the pools. Whole pools are in a tile.
    end *= length;
    const KvHead<KvType> keys = spanned_head<KvType>(cache.key_plane, cache.places, of.width, of.span);
    for (int first = blockIdx.x * TILE; first < end; first += gridDim.x * TILE) {
        const int own = first + threadIdx.x, pool = own / length;
        float key[DIM];
        u32 loaded = ~0u;
        for (int row = first_row; row < last_row; row++) {
            const int candidates = of.candidates((int)cache.positions[row]);
            if (candidates * length <= first) continue;
            const u32 table = cache.table_of_row[row];
            if (table != loaded) {
                loaded = table;
                // Positions behind the end repeat the last one. Their pools are not stored.
                load_key(key, keys, cache.table_at(table), SpannedRow(min(own, end - 1), 1));
            }
            for (int head = 0; head < of.heads; head += HEADS) {
                const int count = min(HEADS, of.heads - head);
                const size_t heads_before = (size_t)row * of.heads + head;
                __syncthreads();  // No warp reads the queries before, or the results of warps, any more.
                load_queries<DIM>(queries, q, heads_before, count, of.dim);
                __syncthreads();
                for (int h = 0; h < count; h++) {
                    // NaN is never the largest.
                    float largest = fmaxf(multiply(queries + h * DIM, key), -INFINITE);
                    for (int distance = 1; distance < min(length, 32); distance *= 2)
                        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
                    if (length <= 32) {
                        if (own % length == 0 && pool < candidates)
                            scores[(heads_before + h) * of.stride + pool] = largest;
                    } else if (lane == 0) {
                        of_warps[warp][h] = largest;
                    }
                }
                if (length <= 32) continue;
                __syncthreads();
                const int h = lane;
                if (h >= count || own % length >= 32 || pool >= candidates) continue;
                float largest = of_warps[warp][h];
                for (int other = 1; other < length / 32; other++) largest = fmaxf(largest, of_warps[warp + other][h]);
                scores[(heads_before + h) * of.stride + pool] = largest;
            }
        }
    }
}

// Computes scores [rows, stride] of the pools that each row may choose: the sum over heads of a weight times the positive part
// of the product of query and key. q [rows, heads, dim], weights [rows, heads], or null if all are 1. Rows that see all
// positions get none. A block takes `rows_of_block` rows, which share keys if they are of one sequence: grid (any number,
// blocks of rows).
#define INDEXER_SCORES(NAME, DIM)                                                                                    \
    extern "C" __global__ void __launch_bounds__(TILE)                                                               \
        NAME(const float *q, const float *weights, KV_PARAMETERS, float *scores, int rows, int rows_of_block,        \
             int heads, int dim, int width, int context, int stride, int span, POOL_PARAMETERS) {                    \
        wait_for_previous();                                                                                         \
        score_keys<DIM>(q, weights, KvLayer{KV_ARGUMENTS}, scores,                                                   \
                        Scores{rows, rows_of_block, heads, dim, width, context, stride, span, POOLS});               \
    }

// Computes scores [rows, heads, stride] in the same way, but those of each head by itself: the largest product of its query
// and a key of the pool.
#define INDEXER_POOLS(NAME, DIM)                                                                                     \
    extern "C" __global__ void __launch_bounds__(TILE)                                                               \
        NAME(const float *q, KV_PARAMETERS, float *scores, int rows, int rows_of_block, int heads, int dim,          \
             int width, int context, int stride, POOL_PARAMETERS) {                                                  \
        wait_for_previous();                                                                                         \
        score_pools<DIM>(q, KvLayer{KV_ARGUMENTS}, scores,                                                           \
                         Scores{rows, rows_of_block, heads, dim, width, context, stride, 1, POOLS});                 \
    }

INDEXER_SCORES(indexer_scores_64, 64)
INDEXER_SCORES(indexer_scores_128, 128)
INDEXER_POOLS(indexer_pools_64, 64)
INDEXER_POOLS(indexer_pools_128, 128)
