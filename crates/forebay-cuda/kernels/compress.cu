// Compressed entries (DeepSeek-AI 2026, "DeepSeek-V4"): an entry stands for `span` positions. It is a mean of their values,
// weighted for every element by the softmax of their gates, then normed and rotated as of its first position. With two parts, the
// first parts of values and gates belong to the next entry, and the second parts to the position's own.
//
// A block takes the entry that ends with a row of the pass, if there is one. Threads share the elements, so that rows of the cache
// are read side by side. All is f32.
#include "entries.cuh"
#include "head_inputs.cuh"

static constexpr int THREADS = 256;
// Most elements of an entry.
static constexpr int DIM_MAX = 512;
static constexpr int OWN = DIM_MAX / THREADS;

// What a thread has seen of one element: the largest gate, and sums of weights and of weighted values.
struct Mean {
    float largest, sum, value;

    __device__ inline void add(float gate, float x) {
        const float top = fmaxf(largest, gate);
        const float before = expf(largest - top), weight = expf(gate - top);
        largest = top;
        sum = __fadd_rn(__fmul_rn(sum, before), weight);
        value = __fmaf_rn(weight, x, __fmul_rn(value, before));
    }
};

// The first layer of the cache has values in place of keys, and gates in place of values, `parts` * `dim` of each. The second one
// gets the entries. bias [span, parts * dim], norm [dim]. angles [positions, 2, rotary_dim / 2] are cosines and sines; pairs
// are interleaved. Grid (rows).
extern "C" __global__ void __launch_bounds__(THREADS)
    compress(KV_PARAMETERS, SPANNED_PARAMETERS, const float *bias, const float *norm, const float *angles, int dim, int parts,
             int rotary_dim, int context, float eps) {
    __shared__ float row[DIM_MAX];
    __shared__ float squares[THREADS / 32];
    wait_for_previous();
    const u32 position = positions[blockIdx.x];
    if (position >= (u32)context || (position + 1) % span != 0) return;
    const KvLayer cache{KV_ARGUMENTS};
    const SpannedLayer entries{SPANNED_ARGUMENTS};
    const int width = parts * dim, first = (int)position + 1 - span;
    const u32 sequence = cache.table_of_row[blockIdx.x];
    const u32 *const table = cache.table_at(sequence);
    const KvHead<KvType> values = cache.keys_of(width, 0, 1), gates = cache.values_of(width, width, 0, 1);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    Mean means[OWN];
#pragma unroll
    for (int n = 0; n < OWN; n++) means[n] = Mean{-3.4e38f, 0.0f, 0.0f};
    // The first entry of a sequence has none before it.
    const int begin = parts == 2 && first > 0 ? first - span : first;
    for (int at = begin; at <= (int)position; at++) {
        const u32 number = table[at / KV_BLOCK];
        const KvBlock<KvType> value = values.block(number), gate = gates.block(number);
        const int part = at < first ? 0 : (parts - 1) * dim;
        const float *const own_bias = bias + (size_t)(at % span) * width + part;
#pragma unroll
        for (int n = 0; n < OWN; n++) {
            const int i = threadIdx.x + n * THREADS;
            if (i >= dim) continue;
            means[n].add(kv_element<KvType>(gate, at % KV_BLOCK, part + i) + own_bias[i],
                         kv_element<KvType>(value, at % KV_BLOCK, part + i));
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const int i = threadIdx.x + n * THREADS;
        const float x = i < dim ? means[n].value / means[n].sum : 0.0f;
        if (i < dim) row[i] = x;
        sum = __fmaf_rn(x, x, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) squares[warp] = sum;
    __syncthreads();
    if (warp != 0) return;
    sum = warp_sum(lane < THREADS / 32 ? squares[lane] : 0.0f);
    const float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (int i = lane; i < dim; i += 32) row[i] = row[i] * scale * norm[i];
    finish_head(row, 0, nullptr, true, HeadRules{angles + (size_t)first * rotary_dim, rotary_dim, dim - rotary_dim, 1, eps});
    const SpannedRow place((int)position / span, span);
    const u32 block = entries.tables[(size_t)sequence * cache.table_stride + place.index];
    if (block != 0) store_row(entries.rows(dim).block(block), place.row, row, dim, lane);
}
