// Gates of the outputs of attention and of shared experts, and factors of rows.
#include "gating.cuh"
#include "reduce.cuh"

// x [rows, width] *= 1 / (1 + e^-g), where g of a row's head h and element i is gates[row, h, first + i]. The gates of a
// row's head are `stride` elements apart. Grid (elements of a row, rows).
extern "C" __global__ void __launch_bounds__(256)
    gate_heads(float *x, const float *gates, int heads, int dim, int first, int stride, int rows) {
    wait_for_previous();
    const int width = heads * dim;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    for (size_t row = blockIdx.y; row < (size_t)rows; row += gridDim.y) {
        const float gate = gates[(row * heads + i / dim) * stride + first + i % dim];
        x[row * width + i] = times_logistic(x[row * width + i], gate);
    }
}

// x [rows, heads, dim] *= 1 / (1 + e^-g), or log(1 + e^g), where `gates` [rows, heads] has g. Grid (elements of a row, rows).
extern "C" __global__ void __launch_bounds__(256)
    gate_whole_heads(float *x, const float *gates, int heads, int dim, int is_softplus, int rows) {
    wait_for_previous();
    const int width = heads * dim;
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    for (size_t row = blockIdx.y; row < (size_t)rows; row += gridDim.y) {
        const float gate = gates[row * heads + i / dim];
        const float logistic = 1.0f / __fadd_rn(1.0f, expf(-gate));
        const float softplus = gate > 20.0f ? gate : log1pf(expf(gate));
        x[row * width + i] *= is_softplus ? softplus : logistic;
    }
}

// out [rows, width] *= 1 / (1 + e^-s), where s is the product of a row of x [rows, cols] with `weight`. A block computes a
// row.
extern "C" __global__ void __launch_bounds__(256)
    gate_rows(float *out, const float *x, const float *weight, int cols, int width) {
    wait_for_previous();
    __shared__ float shared[32];
    const size_t row = blockIdx.x;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) sum = __fmaf_rn(x[row * cols + i], weight[i], sum);
    const float factor = 1.0f / __fadd_rn(1.0f, expf(-block_sum(sum, shared)));
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[row * width + i] *= factor;
}

// out [rows, width] = x times `factors` [rows], which become 1. A block computes a row.
extern "C" __global__ void __launch_bounds__(256) take_factors(const float *x, float *factors, float *out, int width) {
    wait_for_previous();
    const size_t row = blockIdx.x;
    const float factor = factors[row];
    // All threads must have read the factor.
    __syncthreads();
    if (threadIdx.x == 0) factors[row] = 1.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[row * width + i] = x[row * width + i] * factor;
}

// x [rows, width] *= 1 + rate * log(1 + floor(ratio)), where the ratio is (position + first) / step and `positions` are those of the
// rows. With `by_ratio`, the factor is 1 + rate * log(max(ratio, 1)). A block computes a row.
extern "C" __global__ void __launch_bounds__(256)
    temper_rows(float *x, const int *positions, float rate, float step, int first, int by_ratio, int width) {
    wait_for_previous();
    const size_t row = blockIdx.x;
    const float ratio = __fdiv_rn(__fadd_rn((float)positions[row], (float)first), step);
    const float factor = __fmaf_rn(by_ratio ? logf(fmaxf(ratio, 1.0f)) : log1pf(floorf(ratio)), rate, 1.0f);
    for (int i = threadIdx.x; i < width; i += blockDim.x) x[row * width + i] *= factor;
}
