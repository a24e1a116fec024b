// The steps between the projections and attention, in one launch: biases, the norm of every head, rotation of queries
// and keys, and storing keys and values in the cache.
#include "head_inputs.cuh"

static constexpr int WARPS = 4;

// Copies `from` [dim], plus `bias` if that is not null, to shared memory, with all lanes of a warp. The loads of 128 elements
// are issued before the first is stored, so they cost one latency.
__device__ inline void copy_row(float *to, const float *from, const float *bias, int dim, int lane) {
    for (int first = lane; first < dim; first += 4 * 32) {
        float x[4], b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int i = min(first + 32 * j, dim - 1);
            x[j] = from[i];
            b[j] = bias ? bias[i] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (first + 32 * j < dim) to[first + 32 * j] = bias ? x[j] + b[j] : x[j];
    }
}

// q [tokens, heads, dim_k] is changed in place. It keeps its values if bias, norm and angles are all null, and it may
// be null if `heads` is 0. k [tokens, kv_heads, dim_k] and v [tokens, kv_heads, dim_v] go to the cache; k is null if the
// layer uses the keys and values of another, and v is null if
// the values are a part of the keys. The first `key_norm_dim` elements of a key are normed, and apart from them the `key_rest_dim`
// elements behind them; k_norm has the weights of both. Norms come behind the rotation if `norm_last` is 1. angles [positions, 2,
// rotary_dim / 2] are cosines and sines. The tokens may belong to different sequences. A position beyond the `context`
// positions of a table, or without a block, is not written. Caches that round get heads of which `mixed` adjacent elements are
// mixed, queries too. One warp for each head of each token: grid (heads, tokens).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attention_inputs(float *q, const float *k, const float *v, const float *q_bias,
                     const float *k_bias, const float *v_bias, const float *q_norm,
                     const float *k_norm, const float *angles, KV_PARAMETERS, int heads, int kv_heads, int dim_k,
                     int dim_v, int key_norm_dim, int key_rest_dim, int rotary_dim, int rotary_from, int interleaved, int context,
                     float eps, int norm_last, int mixed) {
    extern __shared__ float shared[];
    const int lane = threadIdx.x & 31;
    // The warp's row, the weight of its norm, and the angles of its position, one behind the other.
    const int size = max(dim_k, dim_v);
    float *const row = shared + (threadIdx.x >> 5) * (2 * size + rotary_dim);
    float *const own_norm = row + size, *const own_angles = own_norm + size;
    const int head = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const size_t token = blockIdx.y;
    if (head >= heads + (k ? (v ? 2 : 1) * kv_heads : 0)) return;
    const KvLayer cache{KV_ARGUMENTS};
    const u32 position = positions[token];
    if (position >= (u32)context) return;

    const bool query = head < heads, value = head >= heads + kv_heads;
    const int dim = value ? dim_v : dim_k, norm_dim = query ? dim : key_norm_dim, rest_dim = query ? 0 : key_rest_dim;
    const int member = query ? head : value ? head - heads - kv_heads : head - heads;
    const size_t first = (token * (query ? heads : kv_heads) + member) * dim;
    const float *const from = (query ? q : value ? v : k) + first;
    const float *const biases = query ? q_bias : value ? v_bias : k_bias;
    const float *const norm = query ? q_norm : value ? nullptr : k_norm;
    const u32 block = query ? 0 : cache.table(token)[position / KV_BLOCK];
    if (norm) copy_row(own_norm, norm, nullptr, norm_dim + rest_dim, lane);
    if (angles && !value) copy_row(own_angles, angles + (size_t)position * rotary_dim, nullptr, rotary_dim, lane);
    // What no kernel of the pass writes is loaded before this.
    wait_for_previous();
    copy_row(row, from, biases ? biases + (size_t)member * dim : nullptr, dim, lane);
    __syncwarp();
    if (norm && rest_dim) norm_head(row + norm_dim, rest_dim, own_norm + norm_dim, eps);
    finish_head(row, norm_dim, norm ? own_norm : nullptr, !value,
                HeadRules{angles ? own_angles : nullptr, rotary_dim, rotary_from, interleaved, eps, norm_last});
    mix_head(row, dim, mixed);
    if (query) {
        for (int i = lane; i < dim; i += 32) q[first + i] = row[i];
    } else {
        if (block == 0) return;
        const KvHead<KvType> plane = kv_head<KvType>(value ? value_plane : key_plane, KV_PLACES, dim, member, kv_heads);
        store_row(plane.block(block), position % KV_BLOCK, row, dim, lane);
    }
}

#if defined(KV_Q8_0) || defined(KV_Q4_0)
// Mixes every `mixed` adjacent elements of x [count] in place, which undoes the mixing of values in their sums. One warp for
// each 64 elements.
extern "C" __global__ void __launch_bounds__(WARPS * 32) mix_sums(float *x, int count, int mixed) {
    const int first = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * 64;
    wait_for_previous();
    if (first < count) mix_row(x + first, min(64, count - first), mixed);
}
#endif
