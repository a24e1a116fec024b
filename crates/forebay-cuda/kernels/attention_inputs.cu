// Between the projections and attention, in one launch: bias, norm of every head, rotation of queries and keys, and the
// way of keys and values into the cache.
#include "kv.cuh"

static constexpr int WARPS = 4;

// Elements i and j of a head that turn together.
__device__ inline void pair_of(int pair, int pairs, int interleaved, int &i, int &j) {
    i = interleaved ? 2 * pair : pair;
    j = interleaved ? 2 * pair + 1 : pair + pairs;
}

// Writes `row` [dim] to the cache; the warp's lanes share the work.
template <class T>
__device__ inline void store_row(const KvRows<T> &rows, int position, const float *row, int dim,
                                 int lane) {
    for (int i = lane; i < rows.stride; i += 32) {
        const float x = i < dim ? row[i] : 0.0f;
        if constexpr (sizeof(typename T::Element) == 2) {
            rows.row(position)[i] = __float2half_rn(x);
        } else if constexpr (sizeof(typename T::Element) == 4) {
            rows.row(position)[i] = x;
        } else {
            // The stride is a multiple of 32, so all lanes are here: a block of 32 each time.
            const float largest = warp_max(fabsf(x));
            const float scale = largest / 127.0f;
            const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
            rows.row(position)[i] = (i8)__float2int_rn(x * inverse);
            if (lane == 0) rows.row_scales(position)[i / 32] = __float2half_rn(scale);
        }
    }
}

// q [tokens, heads, dim_k] is changed in place, or stays where bias, norm and angles are all missing; k [tokens,
// kv_heads, dim_k] and v [tokens, kv_heads, dim_v] go to the cache. angles [positions, 2, rotary_dim / 2] are cosines and
// sines. A position beyond the context is not written. One warp for each head of each token: grid (heads, tokens).
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attention_inputs(float *q, const float *k, const float *v, const float *q_bias,
                     const float *k_bias, const float *v_bias, const float *q_norm,
                     const float *k_norm, const float *angles, const u32 *positions, void *keys,
                     void *values, int heads, int kv_heads, int dim_k, int dim_v, int rotary_dim,
                     int interleaved, int context, float eps) {
    wait_for_previous();
    extern __shared__ float shared[];
    const int lane = threadIdx.x & 31;
    float *row = shared + (threadIdx.x >> 5) * max(dim_k, dim_v);
    const int head = blockIdx.x * WARPS + (threadIdx.x >> 5);
    const size_t token = blockIdx.y;
    if (head >= heads + 2 * kv_heads) return;
    const u32 position = positions[token];
    if (position >= (u32)context) return;

    const bool query = head < heads, value = head >= heads + kv_heads;
    const int dim = value ? dim_v : dim_k;
    const int member = query ? head : value ? head - heads - kv_heads : head - heads;
    const size_t first = (token * (query ? heads : kv_heads) + member) * dim;
    const float *from = (query ? q : value ? v : k) + first;
    const float *bias = query ? q_bias : value ? v_bias : k_bias;
    const float *norm = query ? q_norm : value ? nullptr : k_norm;

    float sum = 0.0f;
    for (int i = lane; i < dim; i += 32) {
        const float x = bias ? from[i] + bias[(size_t)member * dim + i] : from[i];
        row[i] = x;
        sum += x * x;
    }
    if (norm) {
        const float scale = 1.0f / sqrtf(warp_sum(sum) / (float)dim + eps);
        for (int i = lane; i < dim; i += 32) row[i] = row[i] * scale * norm[i];
    }
    if (angles && !value) {
        __syncwarp();
        const float *cosines = angles + (size_t)position * rotary_dim;
        const int pairs = rotary_dim / 2;
        for (int pair = lane; pair < pairs; pair += 32) {
            int i, j;
            pair_of(pair, pairs, interleaved, i, j);
            const float a = row[i], b = row[j], c = cosines[pair], s = cosines[pairs + pair];
            // Rounded step by step, as the processor does it.
            row[i] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
            row[j] = __fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c));
        }
    }
    __syncwarp();
    if (query) {
        for (int i = lane; i < dim; i += 32) q[first + i] = row[i];
    } else {
        const KvRows<KvType> rows =
            kv_head<KvType>(value ? values : keys, dim, member, kv_heads, context);
        store_row(rows, (int)position, row, dim, lane);
    }
}
