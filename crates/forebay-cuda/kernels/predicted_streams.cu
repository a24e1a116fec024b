// Alternating updates (Baykal et al. 2023): layers compute one of STREAMS residual streams, and the others are predicted before the
// layer and corrected after it. A row has [STREAMS, width] elements. Widths are multiples of 4. A block computes a row, and the order
// of a row's sums depends only on its width.
#include "reduce.cuh"

static constexpr int STREAMS = 4;
// Least mean of squares of a stream that is brought to the magnitude of another.
static constexpr float LEAST_SQUARE = 1e-5f;

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, sum))));
}

__device__ __forceinline__ float4 plus_scaled(float4 sum, float4 x, float factor) {
    return make_float4(__fmaf_rn(x.x, factor, sum.x), __fmaf_rn(x.y, factor, sum.y), __fmaf_rn(x.z, factor, sum.z),
                       __fmaf_rn(x.w, factor, sum.w));
}

__device__ __forceinline__ float magnitudes(float4 x) { return fabsf(x.x) + fabsf(x.y) + fabsf(x.z) + fabsf(x.w); }

// Returns the sum of `x` over the block. Unlike block_sum, it may be called again with the same memory.
__device__ __forceinline__ float next_block_sum(float x, float *shared) {
    const float sum = block_sum(x, shared);
    __syncthreads();
    return sum;
}

// Writes coefficients of a row [width] to `out` [COUNT] in shared memory: products of `coefficients` [COUNT, STREAMS] with the
// hyperbolic tangents of the products of `router` [STREAMS, width] with the row, divided by its root mean square.
template <int COUNT>
__device__ __forceinline__ void coefficients_of(const float4 *row, const float *router, const float *coefficients, float epsilon,
                                                int width, float *shared, float *out) {
    const int quads = width / 4;
    const float4 *const weights = (const float4 *)router;
    float square = 0.0f, sums[STREAMS] = {};
    for (int i = threadIdx.x; i < quads; i += blockDim.x) {
        const float4 x = row[i];
        square = dot(x, x, square);
#pragma unroll
        for (int k = 0; k < STREAMS; k++) sums[k] = dot(x, weights[k * quads + i], sums[k]);
    }
    const float scale = 1.0f / sqrtf(next_block_sum(square, shared) / (float)width + epsilon);
    float numbers[STREAMS];
#pragma unroll
    for (int k = 0; k < STREAMS; k++) numbers[k] = tanhf(__fmul_rn(scale, next_block_sum(sums[k], shared)));
    if (threadIdx.x < COUNT) {
        const float *const own = coefficients + threadIdx.x * STREAMS;
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < STREAMS; k++) sum = __fmaf_rn(own[k], numbers[k], sum);
        out[threadIdx.x] = sum;
    }
    __syncthreads();
}

// Multiplies streams 1 and following of rows of x so that their root mean squares become that of stream 0.
extern "C" __global__ void __launch_bounds__(1024, 1) match_streams(float *x, int width) {
    wait_for_previous();
    __shared__ float shared[32];
    float4 *const row = (float4 *)(x + (size_t)blockIdx.x * STREAMS * width);
    const int quads = width / 4;
    float magnitude = 0.0f;
    for (int k = 0; k < STREAMS; k++) {
        float4 *const own = row + (size_t)k * quads;
        float sum = 0.0f;
        for (int i = threadIdx.x; i < quads; i += blockDim.x) sum = dot(own[i], own[i], sum);
        const float square = next_block_sum(sum, shared) / (float)width;
        if (k == 0) {
            magnitude = sqrtf(square);
            continue;
        }
        const float root = sqrtf(fmaxf(square, LEAST_SQUARE));
        for (int i = threadIdx.x; i < quads; i += blockDim.x) {
            const float4 v = own[i];
            own[i] = make_float4(v.x * magnitude / root, v.y * magnitude / root, v.z * magnitude / root, v.w * magnitude / root);
        }
    }
}

// Adds to every stream of rows of x the sum of all streams, each times a coefficient of stream `active`: those of stream k are
// products with rows k * STREAMS and following ones of `coefficients` [STREAMS * STREAMS, STREAMS]. Also writes stream `active`
// to `out` [rows, width].
extern "C" __global__ void __launch_bounds__(1024, 1)
    predict_streams(float *x, const float *router, const float *coefficients, int active, float epsilon, float *out, int width) {
    wait_for_previous();
    __shared__ float shared[32], factors[STREAMS * STREAMS];
    float4 *const row = (float4 *)(x + (size_t)blockIdx.x * STREAMS * width);
    float4 *const to = (float4 *)(out + (size_t)blockIdx.x * width);
    const int quads = width / 4;
    coefficients_of<STREAMS * STREAMS>(row + (size_t)active * quads, router, coefficients, epsilon, width, shared, factors);
    for (int i = threadIdx.x; i < quads; i += blockDim.x) {
        float4 before[STREAMS];
#pragma unroll
        for (int k = 0; k < STREAMS; k++) before[k] = row[(size_t)k * quads + i];
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
            float4 sum = before[k];
#pragma unroll
            for (int from = 0; from < STREAMS; from++) sum = plus_scaled(sum, before[from], factors[k * STREAMS + from]);
            row[(size_t)k * quads + i] = sum;
            if (k == active) to[i] = sum;
        }
    }
}

// Adds to every stream of rows of x the difference of `activated` [rows, width] and stream `active`, times one more than the
// stream's coefficient of the row of `activated`. Also writes the new stream `active`, times `scale` [width] if it is not null, to
// `out` [rows, width].
extern "C" __global__ void __launch_bounds__(1024, 1)
    correct_streams(float *x, const float *activated, const float *router, const float *coefficients, int active, float epsilon,
                    const float *scale, float *out, int width) {
    wait_for_previous();
    __shared__ float shared[32], factors[STREAMS];
    float4 *const row = (float4 *)(x + (size_t)blockIdx.x * STREAMS * width);
    const float4 *const from = (const float4 *)(activated + (size_t)blockIdx.x * width);
    float4 *const to = (float4 *)(out + (size_t)blockIdx.x * width);
    const int quads = width / 4;
    coefficients_of<STREAMS>(from, router, coefficients, epsilon, width, shared, factors);
    for (int i = threadIdx.x; i < quads; i += blockDim.x) {
        const float4 a = from[i], before = row[(size_t)active * quads + i];
        const float4 difference = make_float4(a.x - before.x, a.y - before.y, a.z - before.z, a.w - before.w);
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
            const float4 sum = plus_scaled(row[(size_t)k * quads + i], difference, __fadd_rn(factors[k], 1.0f));
            row[(size_t)k * quads + i] = sum;
            if (k != active) continue;
            const float4 w = scale ? ((const float4 *)scale)[i] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            to[i] = make_float4(sum.x * w.x, sum.y * w.y, sum.z * w.z, sum.w * w.w);
        }
    }
}

// Adds `added` [rows, width] to streams 1 and following of rows of x. `flag`, if not null, receives the smallest `tag + row` with a
// sum that is not finite.
extern "C" __global__ void __launch_bounds__(1024, 1)
    add_to_other_streams(float *x, const float *added, int width, u32 *flag, int tag) {
    wait_for_previous();
    float4 *const row = (float4 *)(x + (size_t)blockIdx.x * STREAMS * width);
    const float4 *const from = (const float4 *)(added + (size_t)blockIdx.x * width);
    const int quads = width / 4;
    for (int i = threadIdx.x; i < quads; i += blockDim.x) {
        const float4 a = from[i];
        float all = magnitudes(row[i]);
        for (int k = 1; k < STREAMS; k++) {
            const float4 v = row[(size_t)k * quads + i];
            const float4 sum = make_float4(v.x + a.x, v.y + a.y, v.z + a.z, v.w + a.w);
            row[(size_t)k * quads + i] = sum;
            all += magnitudes(sum);
        }
        if (flag && !isfinite(all)) atomicMin(flag, (u32)tag + blockIdx.x);
    }
}

// Copies stream `stream` of rows of x to rows [rows, width], or such rows to the stream if `puts`.
extern "C" __global__ void __launch_bounds__(1024, 1) copy_stream(float *x, float *rows, int stream, int puts, int width) {
    wait_for_previous();
    float4 *const own = (float4 *)(x + ((size_t)blockIdx.x * STREAMS + stream) * width);
    float4 *const other = (float4 *)(rows + (size_t)blockIdx.x * width);
    for (int i = threadIdx.x; i < width / 4; i += blockDim.x) {
        if (puts)
            own[i] = other[i];
        else
            other[i] = own[i];
    }
}
