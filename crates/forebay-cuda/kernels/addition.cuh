// Outputs of blocks that are added to the residual stream.
#pragma once
#include "experts.cuh"

// Terms that are added to row number `blockIdx.x` of the residual stream: the weighted outputs of k experts, in this order, each with its bias
// if it has one, and `add` if it is not null. Slots without an expert add nothing.
template <bool BIASED> struct Addition {
    const float *add;    // [rows, n]
    const float *parts;  // [pairs, n]
    const float *weights;  // [rows, k]
    const u32 *row_of_pair;  // [rows, k]: the row of `parts` of each expert
    const float *bias;  // [experts, n], if BIASED
    const u32 *ids;  // [rows, k]: the expert of each slot
    int k;

    __device__ __forceinline__ bool any() const { return add || k > 0; }

    // Returns the sum for element `i` of this block's row.
    __device__ __forceinline__ float at(int i, int n) const {
        float sum = 0.0f;
        for (int j = 0; j < k; j++) {
            const size_t pair = (size_t)blockIdx.x * k + j;
            const bool there = ids[pair] != NO_EXPERT;
            float part = parts[row_of_pair[pair] * (size_t)n + i];
            if constexpr (BIASED) part += bias[(there ? ids[pair] : 0) * (size_t)n + i];
            sum = __fadd_rn(sum, there ? __fmul_rn(weights[pair], part) : 0.0f);
        }
        return add ? sum + add[(size_t)blockIdx.x * n + i] : sum;
    }

    __device__ __forceinline__ float4 quad_at(int i, int n) const {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll(BIASED ? 2 : 4)
        for (int j = 0; j < k; j++) {
            const size_t pair = (size_t)blockIdx.x * k + j;
            // Without branches, which would keep the loads of several slots apart.
            const bool there = ids[pair] != NO_EXPERT;
            float4 part = *(const float4 *)(parts + row_of_pair[pair] * (size_t)n + i);
            const float weight = weights[pair];
            if constexpr (BIASED) {
                const float4 b = *(const float4 *)(bias + (there ? ids[pair] : 0) * (size_t)n + i);
                part = make_float4(part.x + b.x, part.y + b.y, part.z + b.z, part.w + b.w);
            }
            sum.x = __fadd_rn(sum.x, there ? __fmul_rn(weight, part.x) : 0.0f);
            sum.y = __fadd_rn(sum.y, there ? __fmul_rn(weight, part.y) : 0.0f);
            sum.z = __fadd_rn(sum.z, there ? __fmul_rn(weight, part.z) : 0.0f);
            sum.w = __fadd_rn(sum.w, there ? __fmul_rn(weight, part.w) : 0.0f);
        }
        if (add) {
            const float4 a = *(const float4 *)(add + (size_t)blockIdx.x * n + i);
            sum = make_float4(sum.x + a.x, sum.y + a.y, sum.z + a.z, sum.w + a.w);
        }
        return sum;
    }
};
