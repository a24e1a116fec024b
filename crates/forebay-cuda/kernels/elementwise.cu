// Biases, the gated activation, a look for values that are not finite, and some words from the host. Sums and products are rounded one by one,
// not fused, so that they equal the processor's.
#include "common.cuh"

// Element index of this thread in a one-dimensional grid.
__device__ inline size_t element() { return (size_t)blockIdx.x * blockDim.x + threadIdx.x; }

// x [rows, width] += bias [width]; the grid's second dimension counts rows.
extern "C" __global__ void __launch_bounds__(256)
    add_bias_rows(float *x, const float *bias, int width, int rows) {
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    for (size_t row = blockIdx.y; row < (size_t)rows; row += gridDim.y) x[row * width + i] += bias[i];
}

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }

// out = silu(gate) * up; `out` may be `gate`.
extern "C" __global__ void __launch_bounds__(256)
    silu_mul(const float *gate, const float *up, float *out, u64 n) {
    wait_for_previous();
    const size_t i = element() * 4;
    if (i + 4 <= n) {
        const float4 g = *(const float4 *)(gate + i), u = *(const float4 *)(up + i);
        *(float4 *)(out + i) =
            make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w);
        return;
    }
    for (size_t j = i; j < n; j++) out[j] = silu(gate[j]) * up[j];
}

// Words of host memory, of which the host may have written others since the kernel before.
extern "C" __global__ void __launch_bounds__(256) copy_words(const u32 *from, u32 *to, int count) {
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = __ldcv(from + i);
}

// Grid (shares of a row, rows): `flag` gets the smallest `tag + row` of the rows with an infinite or a NaN.
extern "C" __global__ void __launch_bounds__(256) check_finite(const float *x, int n, u32 *flag, int tag) {
    wait_for_previous();
    x += (size_t)blockIdx.y * n;
    bool bad = false;
    for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < n; at += gridDim.x * blockDim.x) bad |= !isfinite(x[at]);
    if (__syncthreads_or(bad) && threadIdx.x == 0) atomicMin(flag, (u32)tag + blockIdx.y);
}
