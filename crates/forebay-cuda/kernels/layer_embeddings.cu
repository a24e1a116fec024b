// Embeddings of tokens for a layer.
#include "gating.cuh"
#include "reduce.cuh"

// gates [rows, width] = gating(gates, e), where e is the norm of a row of `projected` [rows, width] plus the row's embedding for the
// layer: `width` elements of `embeddings` [rows, stride] from `first` on. A block computes a row. The order in which a row is summed
// depends only on its width.
extern "C" __global__ void __launch_bounds__(256)
    gate_layer_embeddings(float *gates, const float *projected, const float *weight, const float *embeddings, int width,
                          int stride, int first, float eps, int gating, float alpha, float limit) {
    wait_for_previous();
    __shared__ float shared[32];
    const size_t row = blockIdx.x;
    projected += row * width;
    gates += row * width;
    embeddings += row * stride + first;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum = __fmaf_rn(projected[i], projected[i], sum);
    const float scale = 1.0f / sqrtf(block_sum(sum, shared) / (float)width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float own = __fmul_rn(__fmul_rn(projected[i], scale), weight[i]);
        gates[i] = gated(gating, gates[i], __fadd_rn(own, embeddings[i]), alpha, limit);
    }
}
