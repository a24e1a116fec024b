// Residual streams beside each other. A row has STREAMS of them, [STREAMS, width] elements. Widths are multiples of 4.
#include "addition.cuh"
#include "gating.cuh"
#include "reduce.cuh"

static constexpr int STREAMS = 4;
// Coefficients of a row of mixed streams: a factor of each for the input of a block, one for its output, and a matrix
// [streams before, streams after].
static constexpr int COEFFICIENTS = STREAMS * (2 + STREAMS);

__device__ __forceinline__ float4 scaled(float4 x, float factor) {
    return make_float4(__fmul_rn(x.x, factor), __fmul_rn(x.y, factor), __fmul_rn(x.z, factor), __fmul_rn(x.w, factor));
}

__device__ __forceinline__ float4 plus_scaled(float4 sum, float4 x, float factor) {
    return make_float4(__fmaf_rn(x.x, factor, sum.x), __fmaf_rn(x.y, factor, sum.y), __fmaf_rn(x.z, factor, sum.z),
                       __fmaf_rn(x.w, factor, sum.w));
}

__device__ __forceinline__ float sum_of_squares(float4 x, float sum) {
    return __fmaf_rn(x.w, x.w, __fmaf_rn(x.z, x.z, __fmaf_rn(x.y, x.y, __fmaf_rn(x.x, x.x, sum))));
}

__device__ __forceinline__ float magnitudes(float4 x) { return fabsf(x.x) + fabsf(x.y) + fabsf(x.z) + fabsf(x.w); }

__device__ __forceinline__ float logistic(float x) { return 1.0f / __fadd_rn(1.0f, expf(-x)); }

// Returns the first of the four elements of this thread, which may lie behind the row.
__device__ __forceinline__ int first_element() { return 4 * (blockIdx.y * blockDim.x + threadIdx.x); }

// Writes rows of `from` [rows, width] to every stream of the rows of x. Grid (rows, elements of a stream).
extern "C" __global__ void __launch_bounds__(256) spread_streams(const float *from, float *x, int width) {
    wait_for_previous();
    const int at = first_element();
    if (at >= width) return;
    const float4 value = *(const float4 *)(from + (size_t)blockIdx.x * width + at);
    float *const to = x + (size_t)blockIdx.x * STREAMS * width + at;
    for (int stream = 0; stream < STREAMS; stream++) *(float4 *)(to + (size_t)stream * width) = value;
}

// Adds `addition` to the streams of rows of x, by `coefficients` [rows, count]. With all COEFFICIENTS, stream k becomes the addition
// times its factor, plus the sum over the streams before, each times an element of column k of the matrix. Otherwise, the last
// STREAMS coefficients of a row are factors, and the addition times its factor is added. `flag`, if not null, receives the smallest
// `tag + row` with a sum that is not finite. Grid (rows, elements of a stream).
template <bool BIASED>
__device__ __forceinline__ void add(float *x, const Addition<BIASED> &addition, const float *coefficients, int count,
                                    int width, u32 *flag, int tag) {
    wait_for_previous();
    start_next(gridDim.x <= FEW_ROWS);
    const int at = first_element();
    if (at >= width) return;
    float *const own = x + (size_t)blockIdx.x * STREAMS * width + at;
    float4 *const first = (float4 *)own;
    float4 *const second = (float4 *)(own + width);
    float4 *const third = (float4 *)(own + 2 * (size_t)width);
    float4 *const fourth = (float4 *)(own + 3 * (size_t)width);
    const float4 a = *first, b = *second, c = *third, d = *fourth;
    const float4 added = addition.quad_at(at, width);
    float4 w, y, z, v;
    if (count == COEFFICIENTS) {
        const float4 *const of = (const float4 *)(coefficients + (size_t)blockIdx.x * COEFFICIENTS);
        const float4 factors = of[1], from_a = of[2], from_b = of[3], from_c = of[4], from_d = of[5];
        w = plus_scaled(scaled(added, factors.x), a, from_a.x);
        w = plus_scaled(plus_scaled(plus_scaled(w, b, from_b.x), c, from_c.x), d, from_d.x);
        y = plus_scaled(scaled(added, factors.y), a, from_a.y);
        y = plus_scaled(plus_scaled(plus_scaled(y, b, from_b.y), c, from_c.y), d, from_d.y);
        z = plus_scaled(scaled(added, factors.z), a, from_a.z);
        z = plus_scaled(plus_scaled(plus_scaled(z, b, from_b.z), c, from_c.z), d, from_d.z);
        v = plus_scaled(scaled(added, factors.w), a, from_a.w);
        v = plus_scaled(plus_scaled(plus_scaled(v, b, from_b.w), c, from_c.w), d, from_d.w);
    } else {
        const float4 factors = *(const float4 *)(coefficients + (size_t)(blockIdx.x + 1) * count - STREAMS);
        w = plus_scaled(a, added, factors.x);
        y = plus_scaled(b, added, factors.y);
        z = plus_scaled(c, added, factors.z);
        v = plus_scaled(d, added, factors.w);
    }
    *first = w;
    *second = y;
    *third = z;
    *fourth = v;
    const float sum = magnitudes(w) + magnitudes(y) + magnitudes(z) + magnitudes(v);
    if (flag && !isfinite(sum)) atomicMin(flag, (u32)tag + blockIdx.x);
}

#define KERNEL(NAME, BIASED)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        NAME(float *x, const float *added, const float *parts, const float *part_weights, const u32 *row_of_pair,    \
             const float *bias, const u32 *ids, int k, const float *coefficients, int count, int width, u32 *flag,    \
             int tag) {                                                                                              \
        const Addition<BIASED> addition{added, parts, part_weights, row_of_pair, bias, ids, k};                      \
        add(x, addition, coefficients, count, width, flag, tag);                                                     \
    }
KERNEL(add_to_streams, false)
KERNEL(add_to_streams_biased, true)

// Divides an element of the matrix of a row by the sum of its column. The lanes of half a warp have the matrix, row by row.
__device__ __forceinline__ float divided_by_column(float element, float epsilon) {
    float sum = element + __shfl_xor_sync(~0u, element, STREAMS);
    sum = sum + __shfl_xor_sync(~0u, sum, 2 * STREAMS);
    return __fdiv_rn(element, sum + epsilon);
}

// Returns the sum of the elements of a row of the matrix.
__device__ __forceinline__ float sum_of_matrix_row(float element) {
    const float sum = element + __shfl_xor_sync(~0u, element, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

// Writes the sum of the streams of rows of x, each times a factor, to `out` [rows, width]. A block computes a row.
//
// The factors come from `products` [rows, count] of the row with a matrix, which are divided by the row's root mean square,
// multiplied by `scales`, one for each kind of coefficient, and added to `base` [count]. If there are products for other
// coefficients than these factors, the coefficients replace the products. Factors for outputs are `output_scale` times the logistic
// function, plus `output_epsilon`. Without products, `out` is the mean.
extern "C" __global__ void __launch_bounds__(1024, 1)
    collapse_streams(const float *x, float *products, int count, const float *scales, const float *base, int iterations,
                     float epsilon, float output_scale, float output_epsilon, float norm_epsilon, float *out,
                     int width) {
    wait_for_previous();
    start_next(gridDim.x <= FEW_ROWS);
    __shared__ float shared[32];
    __shared__ float4 factor;
    float *const factors = (float *)&factor;
    const float4 *const row = (const float4 *)(x + (size_t)blockIdx.x * STREAMS * width);
    const int quads = width / 4;
    if (products) {
        float sum = 0.0f;
        for (int i = threadIdx.x; i < STREAMS * quads; i += blockDim.x) sum = sum_of_squares(row[i], sum);
        const float scale = 1.0f / sqrtf(block_sum(sum, shared) / (float)(STREAMS * width) + norm_epsilon);
        if (threadIdx.x < 32) {
            const int lane = threadIdx.x;
            products += (size_t)blockIdx.x * count;
            float value = 0.0f;
            if (lane < count) {
                const int kind = lane / STREAMS < 2 ? lane / STREAMS : 2;
                value = __fadd_rn(__fmul_rn(__fmul_rn(products[lane], scale), scales[kind]), base[lane]);
            }
            if (lane < STREAMS) factors[lane] = __fadd_rn(logistic(value), epsilon);
            if (count > STREAMS && lane >= STREAMS && lane < 2 * STREAMS)
                products[lane] = __fadd_rn(__fmul_rn(output_scale, logistic(value)), output_epsilon);
            if (count == COEFFICIENTS) {
                float element = __shfl_sync(~0u, value, 2 * STREAMS + (lane & 15));
                float largest = fmaxf(element, __shfl_xor_sync(~0u, element, 1));
                largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
                element = expf(element - largest);
                element = __fadd_rn(__fdiv_rn(element, sum_of_matrix_row(element)), epsilon);
                element = divided_by_column(element, epsilon);
#pragma unroll 1
                for (int i = 1; i < iterations; i++) {
                    element = __fdiv_rn(element, sum_of_matrix_row(element) + epsilon);
                    element = divided_by_column(element, epsilon);
                }
                if (lane < 16) products[2 * STREAMS + lane] = element;
            }
        }
    } else if (threadIdx.x < STREAMS) {
        factors[threadIdx.x] = 1.0f / (float)STREAMS;
    }
    __syncthreads();
    const float4 of = factor;
    for (int i = threadIdx.x; i < quads; i += blockDim.x) {
        float4 sum = scaled(row[i], of.x);
        sum = plus_scaled(sum, row[i + quads], of.y);
        sum = plus_scaled(sum, row[i + 2 * quads], of.z);
        sum = plus_scaled(sum, row[i + 3 * quads], of.w);
        ((float4 *)(out + (size_t)blockIdx.x * width))[i] = sum;
    }
}

// out = weight [STREAMS, width] * x / sqrt(mean(x^2) + epsilon) for every stream. A block computes a stream. Grid (rows,
// STREAMS).
extern "C" __global__ void __launch_bounds__(256)
    norm_streams(const float *x, const float *weight, float epsilon, float *out, int width) {
    wait_for_previous();
    start_next(gridDim.x <= FEW_ROWS);
    __shared__ float shared[32];
    const size_t first = ((size_t)blockIdx.x * STREAMS + blockIdx.y) * width;
    const float4 *const from = (const float4 *)(x + first);
    const float4 *const weights = (const float4 *)(weight + (size_t)blockIdx.y * width);
    float4 *const to = (float4 *)(out + first);
    const int quads = width / 4;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < quads; i += blockDim.x) sum = sum_of_squares(from[i], sum);
    const float scale = 1.0f / sqrtf(block_sum(sum, shared) / (float)width + epsilon);
    for (int i = threadIdx.x; i < quads; i += blockDim.x) {
        const float4 own = from[i], w = weights[i];
        to[i] = make_float4(own.x * scale * w.x, own.y * scale * w.y, own.z * scale * w.z, own.w * scale * w.w);
    }
}

// low = silu(low / STREAMS), and factors = 2 / (1 + e^-(factors / STREAMS)), if they are not null.
extern "C" __global__ void __launch_bounds__(256)
    activate_streams(float *low, int low_count, float *factors, int factor_count) {
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < low_count) {
        const float value = low[i] / (float)STREAMS;
        low[i] = times_logistic(value, value);
    }
    if (factors && i < factor_count) factors[i] = __fmul_rn(2.0f, logistic(factors[i] / (float)STREAMS));
}

__device__ __forceinline__ float4 plus_gated(float4 sum, float4 x, float4 gate) {
    return make_float4(__fadd_rn(sum.x, times_logistic(x.x, gate.x)), __fadd_rn(sum.y, times_logistic(x.y, gate.y)),
                       __fadd_rn(sum.z, times_logistic(x.z, gate.z)), __fadd_rn(sum.w, times_logistic(x.w, gate.w)));
}

// Writes the mean of the streams of rows of x, each element times the logistic function of its gate, to `out` [rows, width].
// `gates` has the shape of x. Grid (rows, elements of a stream).
extern "C" __global__ void __launch_bounds__(256)
    collapse_gated_streams(const float *x, const float *gates, float *out, int width) {
    wait_for_previous();
    start_next(gridDim.x <= FEW_ROWS);
    const int at = first_element();
    if (at >= width) return;
    const size_t first = (size_t)blockIdx.x * STREAMS * width + at;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int stream = 0; stream < STREAMS; stream++) {
        const size_t from = first + (size_t)stream * width;
        sum = plus_gated(sum, *(const float4 *)(x + from), *(const float4 *)(gates + from));
    }
    *(float4 *)(out + (size_t)blockIdx.x * width + at) = scaled(sum, 1.0f / (float)STREAMS);
}
