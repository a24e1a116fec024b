// What a head lacks between its projection and attention: norm, rotation, and the way into the cache.
#pragma once
#include "kv.cuh"

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

// How heads of one position turn and are normed.
struct HeadRules {
    // Cosines [rotary_dim / 2], then sines, of the position; null: nothing turns.
    const float *angles;
    // How many elements turn, from which on.
    int rotary_dim, rotary_from, interleaved;
    float eps;
};

// Norms its first `norm_dim` elements, if `norm`, and turns, if `turns`, the head in `row`, shared memory of one warp.
__device__ inline void finish_head(float *row, int norm_dim, const float *norm, bool turns, const HeadRules &rules) {
    const int lane = threadIdx.x & 31;
    if (norm) {
        float sum = 0.0f;
        for (int i = lane; i < norm_dim; i += 32) sum += row[i] * row[i];
        const float scale = 1.0f / sqrtf(warp_sum(sum) / (float)norm_dim + rules.eps);
        for (int i = lane; i < norm_dim; i += 32) row[i] = row[i] * scale * norm[i];
    }
    if (rules.angles && turns) {
        __syncwarp();
        const int pairs = rules.rotary_dim / 2;
        row += rules.rotary_from;
        for (int pair = lane; pair < pairs; pair += 32) {
            int i, j;
            pair_of(pair, pairs, rules.interleaved, i, j);
            const float a = row[i], b = row[j], c = rules.angles[pair], s = rules.angles[pairs + pair];
            // Rounded step by step, as the processor does it.
            row[i] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
            row[j] = __fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c));
        }
    }
    __syncwarp();
}
