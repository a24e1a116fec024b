// The lightning indexer (DeepSeek-AI 2025, "DeepSeek-V3.2"): what its heads and keys need before scores, and the scores by
// which a row chooses the keys that it attends to. `indexer_choice.cu` chooses. All is f32.
//
// The heads of a row share one key of each position. A lane keeps a key in registers, and queries are broadcast from shared
// memory. The score of a key does not depend on the rows or the keys beside it.
#include "head_inputs.cuh"
#include "pipeline.cuh"

static constexpr int WARPS = 4;

// Finishes queries and keys: a key gets a layer norm, both are rotated, and keys are stored in the cache. q [rows, heads,
// dim] is changed in place. k [rows, dim]. angles [positions, 2, rotary_dim / 2] are cosines and sines. A position beyond the
// context, or without a block, is not written. One warp for each head and for the key of each row: grid (heads, rows).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    indexer_inputs(float *q, const float *k, const float *norm, const float *bias, const float *angles, KV_PARAMETERS,
                   int heads, int dim, int rotary_dim, int interleaved, int context, float eps) {
    extern __shared__ float shared[];
    wait_for_previous();
    const int lane = threadIdx.x & 31, head = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const size_t row_index = blockIdx.y;
    if (head > heads) return;
    const KvLayer cache{KV_ARGUMENTS};
    const u32 position = positions[row_index];
    if (position >= (u32)context) return;
    float *const row = shared + (threadIdx.x >> 5) * dim;
    const bool query = head < heads;
    const float *const from = query ? q + (row_index * heads + head) * dim : k + row_index * dim;
    for (int i = lane; i < dim; i += 32) row[i] = from[i];
    __syncwarp();
    if (!query) {
        float sum = 0.0f;
        for (int i = lane; i < dim; i += 32) sum += row[i];
        const float mean = warp_sum(sum) / (float)dim;
        float squares = 0.0f;
        for (int i = lane; i < dim; i += 32) squares += (row[i] - mean) * (row[i] - mean);
        const float scale = 1.0f / sqrtf(warp_sum(squares) / (float)dim + eps);
        for (int i = lane; i < dim; i += 32) row[i] = (row[i] - mean) * scale * norm[i] + bias[i];
    }
    finish_head(row, 0, nullptr, true,
                HeadRules{angles + (size_t)position * rotary_dim, rotary_dim, 0, interleaved, eps});
    if (query) {
        for (int i = lane; i < dim; i += 32) q[(row_index * heads + head) * dim + i] = row[i];
        return;
    }
    const u32 block = cache.table((int)row_index)[position / KV_BLOCK];
    if (block == 0) return;
    store_row(kv_head<KvType>(key_plane, KV_PLACES, dim, 0, 1).block(block), position % KV_BLOCK, row, dim, lane);
}

// Loads eight elements of a row from element `i` on, a multiple of 8.
__device__ inline void load_eight(float *to, const KvBlock<KvF32> &block, int row, int i) {
    const float4 *const from = (const float4 *)(block.row(row) + i);
    const float4 a = from[0], b = from[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

__device__ inline void load_eight(float *to, const KvBlock<KvF16> &block, int row, int i) {
    const uint4 raw = *(const uint4 *)(block.row(row) + i);
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 pair = __half22float2(*(const __half2 *)&words[n]);
        to[2 * n] = pair.x, to[2 * n + 1] = pair.y;
    }
}

__device__ inline void load_eight(float *to, const KvBlock<KvQ8> &block, int row, int i) {
    const uint2 raw = *(const uint2 *)(block.row(row) + i);
    const float scale = __half2float(block.row_scales(row)[i / 32]);
#pragma unroll
    for (int n = 0; n < 4; n++) {
        to[n] = scale * (float)(i8)(raw.x >> 8 * n);
        to[4 + n] = scale * (float)(i8)(raw.y >> 8 * n);
    }
}

__device__ inline void load_eight(float *to, const KvBlock<KvQ4> &block, int row, int i) {
    const u32 raw = *(const u32 *)(block.row(row) + i / 2);
    const float scale = __half2float(block.row_scales(row)[i / 32]);
#pragma unroll
    for (int n = 0; n < 8; n++) to[n] = scale * (float)((int)(raw >> 4 * n & 15) - 8);
}

// Loads four elements of shared memory. NVRTC gives this source one of several PTX texts at random if it merges plain loads.
__device__ __forceinline__ float4 load_four(u32 from) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from));
    return x;
}

// Positions of a block of threads, one for each.
static constexpr int TILE = WARPS * 32;
// Heads whose queries are in shared memory at once.
static constexpr int HEADS = 16;

// Sizes of a call.
struct Scores {
    int rows, rows_of_block, heads, dim, context, most, stride;
};

template <int DIM>
__device__ inline void score_keys(const float *q, const float *weights, const KvLayer &cache, float *scores,
                                  const Scores &of) {
    __shared__ __align__(16) float queries[HEADS * DIM];
    __shared__ float head_weights[HEADS];
    const int first_row = blockIdx.y * of.rows_of_block, last_row = min(first_row + of.rows_of_block, of.rows);
    // Rows that see all positions need no scores.
    int end = 0;
    for (int row = first_row; row < last_row; row++) {
        const int position = (int)cache.positions[row];
        if (position >= of.most && position < of.context) end = max(end, position + 1);
    }
    const KvHead<KvType> keys = kv_head<KvType>(cache.key_plane, cache.places, of.dim, 0, 1);
    for (int first = blockIdx.x * TILE; first < end; first += gridDim.x * TILE) {
        const int own = first + threadIdx.x;
        float key[DIM];
        u32 loaded = ~0u;
        for (int row = first_row; row < last_row; row++) {
            const int position = (int)cache.positions[row];
            if (position < of.most || position >= of.context || position < first) continue;
            const u32 table = cache.table_of_row[row];
            if (table != loaded) {
                loaded = table;
                // Positions behind the end repeat the last one. Their scores are not stored.
                const int at = min(own, end - 1);
                const KvBlock<KvType> block = keys.block(cache.table_at(table)[at / KV_BLOCK]);
#pragma unroll
                for (int i = 0; i < DIM; i += 8) {
                    if (i < block.stride) {
                        load_eight(key + i, block, at % KV_BLOCK, i);
                    } else {
#pragma unroll
                        for (int n = 0; n < 8; n++) key[i + n] = 0.0f;
                    }
                }
            }
            float score = 0.0f;
            for (int head = 0; head < of.heads; head += HEADS) {
                const int count = min(HEADS, of.heads - head);
                const size_t heads_before = (size_t)row * of.heads + head;
                __syncthreads();  // No warp reads the queries before any more.
                for (int i = threadIdx.x; i < count * DIM; i += TILE) {
                    const int element = i % DIM;
                    queries[i] = element < of.dim ? q[(heads_before + i / DIM) * of.dim + element] : 0.0f;
                }
                if ((int)threadIdx.x < count) head_weights[threadIdx.x] = weights[heads_before + threadIdx.x];
                __syncthreads();
                for (int h = 0; h < count; h++) {
                    const u32 query = shared_address(queries + h * DIM);
                    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                    for (int i = 0; i < DIM / 4; i++) {
                        const float4 x = load_four(query + i * sizeof(float4));
                        sums[0] += x.x * key[4 * i];
                        sums[1] += x.y * key[4 * i + 1];
                        sums[2] += x.z * key[4 * i + 2];
                        sums[3] += x.w * key[4 * i + 3];
                    }
                    score += head_weights[h] * fmaxf((sums[0] + sums[1]) + (sums[2] + sums[3]), 0.0f);
                }
            }
            if (own <= position) scores[(size_t)row * of.stride + own] = score;
        }
    }
}

// Computes scores [rows, stride] of the keys up to each row's own: the sum over heads of a weight times the positive part of
// the product of query and key. q [rows, heads, dim], weights [rows, heads]. Rows with at most `most` positions get none. A
// block takes `rows_of_block` rows, which share keys if they are of one sequence: grid (any number, blocks of rows).
#define INDEXER_SCORES(NAME, DIM)                                                                                    \
    extern "C" __global__ void __launch_bounds__(TILE)                                                               \
        NAME(const float *q, const float *weights, KV_PARAMETERS, float *scores, int rows, int rows_of_block,        \
             int heads, int dim, int context, int most, int stride) {                                                \
        wait_for_previous();                                                                                         \
        score_keys<DIM>(q, weights, KvLayer{KV_ARGUMENTS}, scores,                                                   \
                        Scores{rows, rows_of_block, heads, dim, context, most, stride});                             \
    }

INDEXER_SCORES(indexer_scores_64, 64)
INDEXER_SCORES(indexer_scores_128, 128)
