// The lightning indexer (DeepSeek-AI 2025, "DeepSeek-V3.2"): what its heads and keys need before scores, and the scores by
// which a row chooses the keys that it attends to. `indexer_choice.cu` chooses. All is f32.
//
// The keys may be those of compressed entries, which stand for several positions each. Then a row may choose the entries that end at
// its position or before it.
//
// The heads of a row share one key of each position. A lane keeps a key in registers, and queries are broadcast from shared
// memory. The score of a key does not depend on the rows or the keys beside it.
#include "entries.cuh"
#include "head_inputs.cuh"
#include "load_eight.cuh"
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

// Positions of a block of threads, one for each.
static constexpr int TILE = WARPS * 32;
// Heads whose queries are in shared memory at once.
static constexpr int HEADS = 16;

// Sizes of a call.
struct Scores {
    int rows, rows_of_block, heads, dim, context, most, stride, span;

    // Returns the number of keys that a row at `position` may choose from, or 0 if it sees all of them.
    __device__ inline int keys(int position) const {
        const int count = (position + 1) / span;
        return count > most && position < context ? count : 0;
    }
};

template <int DIM>
__device__ inline void score_keys(const float *q, const float *weights, const KvLayer &cache, float *scores,
                                  const Scores &of) {
    __shared__ __align__(16) float queries[HEADS * DIM];
    __shared__ float head_weights[HEADS];
    const int first_row = blockIdx.y * of.rows_of_block, last_row = min(first_row + of.rows_of_block, of.rows);
    // Rows that see all positions need no scores.
    int end = 0;
    for (int row = first_row; row < last_row; row++) end = max(end, of.keys((int)cache.positions[row]));
    const KvHead<KvType> keys = spanned_head<KvType>(cache.key_plane, cache.places, of.dim, of.span);
    for (int first = blockIdx.x * TILE; first < end; first += gridDim.x * TILE) {
        const int own = first + threadIdx.x;
        float key[DIM];
        u32 loaded = ~0u;
        for (int row = first_row; row < last_row; row++) {
            const int count = of.keys((int)cache.positions[row]);
            if (count <= first) continue;
            const u32 table = cache.table_of_row[row];
            if (table != loaded) {
                loaded = table;
                // Positions behind the end repeat the last one. Their scores are not stored.
                const SpannedRow at(min(own, end - 1), of.span);
                const KvBlock<KvType> block = keys.block(cache.table_at(table)[at.index]);
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
            float score = 0.0f;
            for (int head = 0; head < of.heads; head += HEADS) {
                const int members = min(HEADS, of.heads - head);
                const size_t heads_before = (size_t)row * of.heads + head;
                __syncthreads();  // No warp reads the queries before any more.
                for (int i = threadIdx.x; i < members * DIM; i += TILE) {
                    const int element = i % DIM;
                    queries[i] = element < of.dim ? q[(heads_before + i / DIM) * of.dim + element] : 0.0f;
                }
                if ((int)threadIdx.x < members) head_weights[threadIdx.x] = weights[heads_before + threadIdx.x];
                __syncthreads();
                for (int h = 0; h < members; h++) {
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
            if (own < count) scores[(size_t)row * of.stride + own] = score;
        }
    }
}

// Computes scores [rows, stride] of the keys up to each row's own: the sum over heads of a weight times the positive part of
// the product of query and key. q [rows, heads, dim], weights [rows, heads]. Rows with at most `most` positions get none. A
// block takes `rows_of_block` rows, which share keys if they are of one sequence: grid (any number, blocks of rows).
#define INDEXER_SCORES(NAME, DIM)                                                                                    \
    extern "C" __global__ void __launch_bounds__(TILE)                                                               \
        NAME(const float *q, const float *weights, KV_PARAMETERS, float *scores, int rows, int rows_of_block,        \
             int heads, int dim, int context, int most, int stride, int span) {                                      \
        wait_for_previous();                                                                                         \
        score_keys<DIM>(q, weights, KvLayer{KV_ARGUMENTS}, scores,                                                   \
                        Scores{rows, rows_of_block, heads, dim, context, most, stride, span});                       \
    }

INDEXER_SCORES(indexer_scores_64, 64)
INDEXER_SCORES(indexer_scores_128, 128)
