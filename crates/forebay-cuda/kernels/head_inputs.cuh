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
        if constexpr (T::BITS == 16) {
            rows.row(position)[i] = __float2half_rn(x);
        } else if constexpr (T::BITS == 32) {
            rows.row(position)[i] = x;
        } else {
            // The stride is a multiple of 32, so all lanes are here: a block of 32 each time. The processor's cache rounds
            // the same way, step by step.
            const float largest = warp_max(fabsf(x));
            float scale;
            if constexpr (T::BITS == 8) {
                scale = largest / 127.0f;
                const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
                rows.row(position)[i] = (i8)__float2int_rn(x * inverse);
            } else {
                // The element farthest from 0, the first if there are several.
                const u32 farthest = __ballot_sync(~0u, fabsf(x) == largest);
                scale = __shfl_sync(~0u, x, farthest ? __ffs(farthest) - 1 : 0) / -8.0f;
                const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
                const u32 code = (u32)fminf(__fadd_rn(__fmul_rn(x, inverse), 8.5f), 15.0f);
                const u32 next = __shfl_down_sync(~0u, code, 1);
                if (lane % 2 == 0) rows.row(position)[i / 2] = (u8)(code | next << 4);
            }
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
