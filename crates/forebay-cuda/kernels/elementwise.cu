// Biases, gated activations, soft caps, a check for values that are not finite, and a copy of words from the host.
#include "experts.cuh"
#include "gating.cuh"
#include "halves.cuh"

// x [rows, width] += bias [width]. The grid's second dimension counts rows.
extern "C" __global__ void __launch_bounds__(256)
    add_bias_rows(float *x, const float *bias, int width, int rows) {
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    for (size_t row = blockIdx.y; row < (size_t)rows; row += gridDim.y) x[row * width + i] += bias[i];
}

// x [rows, width] *= factors [width]. The grid's second dimension counts rows.
extern "C" __global__ void __launch_bounds__(256)
    multiply_columns(float *x, const float *factors, int width, int rows) {
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    const float factor = factors[i];
    for (size_t row = blockIdx.y; row < (size_t)rows; row += gridDim.y) x[row * width + i] = __fmul_rn(x[row * width + i], factor);
}

// x += factor * y, count elements.
extern "C" __global__ void __launch_bounds__(256) add_scaled(float *x, const float *y, u64 count, float factor) {
    wait_for_previous();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = __fadd_rn(x[i], __fmul_rn(factor, y[i]));
}

// x = factor * y, count elements.
extern "C" __global__ void __launch_bounds__(256) copy_scaled(float *x, const float *y, u64 count, float factor) {
    wait_for_previous();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = __fmul_rn(factor, y[i]);
}

enum Activation { SQUARED_RELU_ALONE = 0, GELU_ALONE = 1, GELU_TANH_ALONE = 2, XIELU_ALONE = 3 };

// x [rows, width] = activation(x + bias), without a gate; `bias` [width] may be null. The grid's second dimension counts rows. The
// last four numbers are those of xIELU. Its comparisons propagate NaN.
extern "C" __global__ void __launch_bounds__(256)
    activate_rows(float *x, const float *bias, int width, int rows, int activation, float positive, float negative, float slope,
                  float floor) {
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width) return;
    const float add = bias ? bias[i] : 0.0f;
    for (size_t row = blockIdx.y; row < (size_t)rows; row += gridDim.y) {
        const float v = x[row * width + i] + add;
        float y;
        if (activation == GELU_ALONE)
            y = 0.5f * v * erfcf(v * -0.70710678f);
        else if (activation == GELU_TANH_ALONE)
            y = gated(GELU_TANH, v, 1.0f, 0.0f, 0.0f);
        else if (activation == XIELU_ALONE) {
            const float low = v > floor ? floor : v;
            const float bent = v > 0.0f ? __fmul_rn(__fmul_rn(v, v), positive) : __fmul_rn(__fsub_rn(expm1f(low), v), negative);
            y = __fmaf_rn(v, slope, bent);
        } else
            y = gated(SQUARED_RELU, v, v, 0.0f, 0.0f);
        x[row * width + i] = y;
    }
}

// out [rows, width] = gating(gate, up); `out` may be `gate`. If `ids` is not null, row r belongs to expert
// ids[pairs[r]], or ids[r] if `pairs` is null, and its biases [experts, width] are added first. If `ids` is null, the
// launcher passes all rows as one, so that quads of elements are aligned for any width. With `ids`, quads are aligned
// only if the width is a multiple of 4. Rows without an expert get values that mean nothing.
extern "C" __global__ void __launch_bounds__(256)
    gate(const float *gates, const float *ups, float *out, u64 width, int rows, int gating, float alpha, float limit,
         const float *gate_bias, const float *up_bias, const u32 *ids, const u32 *pairs) {
    wait_for_previous();
    const u64 i = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    const bool quad = i + 4 <= width && (!ids || width % 4 == 0);
    for (u64 row = blockIdx.y; row < (u64)rows; row += gridDim.y) {
        const u64 at = row * width + i;
        const u32 id = ids ? ids[pairs ? pairs[row] : row] : NO_EXPERT;
        const u64 bias = id == NO_EXPERT ? 0 : id * width + i;
        if (quad) {
            float4 g = *(const float4 *)(gates + at), u = *(const float4 *)(ups + at);
            if (ids) {
                const float4 b = *(const float4 *)(gate_bias + bias), c = *(const float4 *)(up_bias + bias);
                g = make_float4(g.x + b.x, g.y + b.y, g.z + b.z, g.w + b.w);
                u = make_float4(u.x + c.x, u.y + c.y, u.z + c.z, u.w + c.w);
            }
            *(float4 *)(out + at) =
                make_float4(gated(gating, g.x, u.x, alpha, limit), gated(gating, g.y, u.y, alpha, limit),
                            gated(gating, g.z, u.z, alpha, limit), gated(gating, g.w, u.w, alpha, limit));
            continue;
        }
        for (int j = 0; j < 4 && i + j < width; j++) {
            const float g = ids ? gates[at + j] + gate_bias[bias + j] : gates[at + j];
            const float u = ids ? ups[at + j] + up_bias[bias + j] : ups[at + j];
            out[at + j] = gated(gating, g, u, alpha, limit);
        }
    }
}

// Does the same for rows of a multiple of 4 elements, and writes them also as halves. A block computes a row.
extern "C" __global__ void __launch_bounds__(256)
    gate_halves(const float *gates, const float *ups, float *out, u16 *halves, float *scales, int width, int gating,
                float alpha, float limit, const float *gate_bias, const float *up_bias, const u32 *ids,
                const u32 *pairs) {
    wait_for_previous();
    const u64 row = blockIdx.x, first = row * width;
    const u32 id = ids ? ids[pairs ? pairs[row] : row] : NO_EXPERT;
    const u64 bias = id == NO_EXPERT ? 0 : (u64)id * width;
    int largest = 0;
    for (int i = 4 * threadIdx.x; i < width; i += 4 * blockDim.x) {
        float4 g = *(const float4 *)(gates + first + i), u = *(const float4 *)(ups + first + i);
        if (ids) {
            const float4 b = *(const float4 *)(gate_bias + bias + i), c = *(const float4 *)(up_bias + bias + i);
            g = make_float4(g.x + b.x, g.y + b.y, g.z + b.z, g.w + b.w);
            u = make_float4(u.x + c.x, u.y + c.y, u.z + c.z, u.w + c.w);
        }
        const float4 y = make_float4(gated(gating, g.x, u.x, alpha, limit), gated(gating, g.y, u.y, alpha, limit),
                                     gated(gating, g.z, u.z, alpha, limit), gated(gating, g.w, u.w, alpha, limit));
        *(float4 *)(out + first + i) = y;
        largest = larger_bits(larger_bits(larger_bits(larger_bits(largest, y.x), y.y), y.z), y.w);
    }
    float scale;
    const float factor = half_row_factor(block_largest(largest), scale);
    // A thread reads only what it has written itself.
    for (int i = 4 * threadIdx.x; i < width; i += 4 * blockDim.x)
        *(uint2 *)(halves + first + i) = four_halves(*(const float4 *)(out + first + i), factor);
    if (threadIdx.x == 0) scales[row] = scale;
}

// x = min(max(x, -limit), limit), count elements. The comparisons propagate NaN, which fminf would not.
extern "C" __global__ void __launch_bounds__(256) clamp_values(float *x, u64 count, float limit) {
    wait_for_previous();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
}

// x *= factor, count elements.
extern "C" __global__ void __launch_bounds__(256) scale(float *x, u64 count, float factor) {
    wait_for_previous();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = __fmul_rn(x[i], factor);
}

// x = cap * tanh(x / cap), count elements.
extern "C" __global__ void __launch_bounds__(256) softcap(float *x, u64 count, float cap) {
    wait_for_previous();
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = cap * tanhf(x[i] / cap);
}

// Copies words of host memory. The read bypasses caches, because the host may have changed the words since the previous
// kernel.
extern "C" __global__ void __launch_bounds__(256) copy_words(const u32 *from, u32 *to, int count) {
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = __ldcv(from + i);
}

// Grid (shares of a row, rows). `flag` receives the smallest `tag + row` of the rows that contain an infinity or a NaN.
extern "C" __global__ void __launch_bounds__(256) check_finite(const float *x, int n, u32 *flag, int tag) {
    wait_for_previous();
    x += (size_t)blockIdx.y * n;
    bool bad = false;
    for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < n; at += gridDim.x * blockDim.x) bad |= !isfinite(x[at]);
    if (__syncthreads_or(bad) && threadIdx.x == 0) atomicMin(flag, (u32)tag + blockIdx.y);
}
