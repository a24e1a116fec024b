// The steps of a head between its projection and attention: norm, rotation, and storing it in the cache.
#pragma once
#include "kv.cuh"

// Sets i and j to the elements of a head that rotate together.
__device__ inline void pair_of(int pair, int pairs, int interleaved, int &i, int &j) {
    i = interleaved ? 2 * pair : pair;
    j = interleaved ? 2 * pair + 1 : pair + pairs;
}

// Writes `row` [dim] to row `at` of a block, with all lanes of a warp.
template <class T>
__device__ inline void store_row(const KvBlock<T> &block, int at, const float *row, int dim, int lane) {
    for (int i = lane; i < block.stride; i += 32) {
        const float x = i < dim ? row[i] : 0.0f;
        if constexpr (T::BITS == 16) {
            block.row(at)[i] = __float2half_rn(x);
        } else if constexpr (T::BITS == 32) {
            block.row(at)[i] = x;
        } else {
            // The stride is a multiple of 32, so all lanes are active here, with one block of 32 in each iteration. The
            // CPU's cache rounds in the same way, step by step.
            const float largest = warp_max(fabsf(x));
            float scale;
            if constexpr (T::BITS == 8) {
                scale = largest / 127.0f;
                const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
                block.row(at)[i] = (i8)__float2int_rn(x * inverse);
            } else {
                // The element farthest from 0; the first one if there are several.
                const u32 farthest = __ballot_sync(~0u, fabsf(x) == largest);
                scale = __shfl_sync(~0u, x, farthest ? __ffs(farthest) - 1 : 0) / -8.0f;
                const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
                const u32 code = (u32)fminf(__fadd_rn(__fmul_rn(x, inverse), 8.5f), 15.0f);
                const u32 next = __shfl_down_sync(~0u, code, 1);
                if (lane % 2 == 0) block.row(at)[i / 2] = (u8)(code | next << 4);
            }
            if (lane == 0) block.row_scales(at)[i / 32] = __float2half_rn(scale);
        }
    }
}

// Multiplies every `mixed` adjacent elements of `row` [dim] by the Hadamard matrix of this size, divided by the square root of
// `mixed`, with all lanes of a warp. `mixed` is a power of two up to 64 that divides `dim`. The CPU takes the same steps in the
// same order.
__device__ inline void mix_row(float *row, int dim, int mixed) {
    const int lane = threadIdx.x & 31;
    const float factor = 1.0f / sqrtf((float)mixed);
    for (int first = 0; first < dim; first += 64) {
        const int i = first + lane, j = i + 32;
        float a = i < dim ? row[i] : 0.0f, b = j < dim ? row[j] : 0.0f;
        for (int distance = 1; distance < min(mixed, 32); distance *= 2) {
            const float c = __shfl_xor_sync(~0u, a, distance), d = __shfl_xor_sync(~0u, b, distance);
            const bool high = lane & distance;
            a = high ? __fsub_rn(c, a) : __fadd_rn(a, c);
            b = high ? __fsub_rn(d, b) : __fadd_rn(b, d);
        }
        if (mixed == 64) {
            const float low = a;
            a = __fadd_rn(low, b);
            b = __fsub_rn(low, b);
        }
        if (i < dim) row[i] = __fmul_rn(a, factor);
        if (j < dim) row[j] = __fmul_rn(b, factor);
    }
}

// Mixes a head in shared memory of one warp, if the cache rounds its elements.
__device__ inline void mix_head(float *row, int dim, int mixed) {
    if constexpr (KvType::BITS < 16) {
        if (mixed == 1) return;
        __syncwarp();
        mix_row(row, dim, mixed);
        __syncwarp();
    }
}

// Rotation and norm of the heads of one position.
struct HeadRules {
    // Cosines [rotary_dim / 2] of the position, then sines; null: no rotation.
    const float *angles;
    // Number of elements that rotate, the first of them, and 1 if pairs are interleaved (2i and 2i + 1).
    int rotary_dim, rotary_from, interleaved;
    float eps;
    // 1 if the norm follows the rotation.
    int norm_last;
};

// Norms the first `norm_dim` elements of the head in `row`, with all lanes of a warp.
__device__ inline void norm_head(float *row, int norm_dim, const float *norm, float eps) {
    const int lane = threadIdx.x & 31;
    float sum = 0.0f;
    for (int i = lane; i < norm_dim; i += 32) sum += row[i] * row[i];
    const float scale = 1.0f / sqrtf(warp_sum(sum) / (float)norm_dim + eps);
    for (int i = lane; i < norm_dim; i += 32) row[i] = row[i] * scale * norm[i];
}

// Finishes the head in `row`, which is shared memory of one warp. Norms its first `norm_dim` elements if `norm` is not
// null, and rotates it if `turns` is true.
__device__ inline void finish_head(float *row, int norm_dim, const float *norm, bool turns, const HeadRules &rules) {
    const int lane = threadIdx.x & 31;
    if (norm && !rules.norm_last) norm_head(row, norm_dim, norm, rules.eps);
    if (rules.angles && turns) {
        __syncwarp();
        const int pairs = rules.rotary_dim / 2;
        float *const turned = row + rules.rotary_from;
        for (int pair = lane; pair < pairs; pair += 32) {
            int i, j;
            pair_of(pair, pairs, rules.interleaved, i, j);
            const float a = turned[i], b = turned[j], c = rules.angles[pair], s = rules.angles[pairs + pair];
            // Each step is rounded, as on the CPU.
            turned[i] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
            turned[j] = __fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c));
        }
    }
    __syncwarp();
    if (norm && rules.norm_last) {
        norm_head(row, norm_dim, norm, rules.eps);
        __syncwarp();
    }
}
