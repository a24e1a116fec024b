// A bank of earlier states of the residual stream. A row has `streams` of them, [streams, width] elements: the state, then the bank.
// Widths are multiples of 4.
#include "addition.cuh"
#include "reduce.cuh"

// Most streams of a row.
static constexpr int STREAMS_MAX = 16;

__device__ __forceinline__ float4 plus_scaled(float4 sum, float4 x, float factor) {
    return make_float4(__fmaf_rn(x.x, factor, sum.x), __fmaf_rn(x.y, factor, sum.y), __fmaf_rn(x.z, factor, sum.z),
                       __fmaf_rn(x.w, factor, sum.w));
}

__device__ __forceinline__ float plus_product(float sum, float4 x, float4 y) {
    return __fmaf_rn(x.w, y.w, __fmaf_rn(x.z, y.z, __fmaf_rn(x.y, y.y, __fmaf_rn(x.x, y.x, sum))));
}

// Returns the first of the four elements of this thread, which may lie behind the row.
__device__ __forceinline__ int first_element() { return 4 * (blockIdx.y * blockDim.x + threadIdx.x); }

// Writes rows of `from` [rows, width] to the first stream of the rows of x. Grid (rows, elements of a stream).
extern "C" __global__ void __launch_bounds__(256) begin_bank(const float *from, float *x, int streams, int width) {
    wait_for_previous();
    const int at = first_element();
    if (at >= width) return;
    *(float4 *)(x + (size_t)blockIdx.x * streams * width + at) = *(const float4 *)(from + (size_t)blockIdx.x * width + at);
}

// Adds `addition` to the first stream of rows of x. If `place` is not 0, the first stream moves to the stream of this number
// instead, and the addition replaces it. `flag`, if not null, receives the smallest `tag + row` with a result that is not finite.
// Grid (rows, elements of a stream).
template <bool BIASED>
__device__ __forceinline__ void add(float *x, const Addition<BIASED> &addition, int streams, int place, int width,
                                    u32 *flag, int tag) {
    wait_for_previous();
    start_next(gridDim.x <= FEW_ROWS);
    const int at = first_element();
    if (at >= width) return;
    float *const own = x + (size_t)blockIdx.x * streams * width + at;
    const float4 before = *(const float4 *)own;
    float4 after = addition.quad_at(at, width);
    if (place > 0) {
        *(float4 *)(own + (size_t)place * width) = before;
    } else {
        after = make_float4(__fadd_rn(before.x, after.x), __fadd_rn(before.y, after.y), __fadd_rn(before.z, after.z),
                            __fadd_rn(before.w, after.w));
    }
    *(float4 *)own = after;
    const float sum = fabsf(after.x) + fabsf(after.y) + fabsf(after.z) + fabsf(after.w);
    if (flag && !isfinite(sum)) atomicMin(flag, (u32)tag + blockIdx.x);
}

#define KERNEL(NAME, BIASED)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256)                                                                \
        NAME(float *x, const float *added, const float *parts, const float *part_weights, const u32 *row_of_pair,    \
             const float *bias, const u32 *ids, int k, int streams, int place, int width, u32 *flag, int tag) {      \
        const Addition<BIASED> addition{added, parts, part_weights, row_of_pair, bias, ids, k};                      \
        add(x, addition, streams, place, width, flag, tag);                                                          \
    }
KERNEL(add_to_bank, false)
KERNEL(add_to_bank_biased, true)

// Writes a mixture of the first `seen` streams of rows of x to `out` [rows, width]. The weights are the softmax of the products of
// `scores` [width] with the streams, each stream divided by its root mean square. A block computes a row.
extern "C" __global__ void __launch_bounds__(256)
    mix_bank(const float *x, int streams, int seen, const float *scores, float epsilon, float *out, int width) {
    wait_for_previous();
    start_next(gridDim.x <= FEW_ROWS);
    __shared__ float squares_shared[32], products_shared[32], shared_weights[STREAMS_MAX];
    const float4 *const row = (const float4 *)(x + (size_t)blockIdx.x * streams * width);
    const int quads = width / 4;
    for (int stream = 0; stream < seen; stream++) {
        float squares = 0.0f, product = 0.0f;
        for (int i = threadIdx.x; i < quads; i += blockDim.x) {
            const float4 own = row[(size_t)stream * quads + i];
            squares = plus_product(squares, own, own);
            product = plus_product(product, own, ((const float4 *)scores)[i]);
        }
        squares = block_sum(squares, squares_shared);
        product = block_sum(product, products_shared);
        if (threadIdx.x == 0)
            shared_weights[stream] = __fmul_rn(product, 1.0f / sqrtf(squares / (float)width + epsilon));
        // The next sums use the same memory.
        __syncthreads();
    }
    float largest = shared_weights[0], weights[STREAMS_MAX], sum = 0.0f;
    for (int stream = 1; stream < seen; stream++) largest = fmaxf(largest, shared_weights[stream]);
#pragma unroll
    for (int stream = 0; stream < STREAMS_MAX; stream++) {
        weights[stream] = stream < seen ? expf(shared_weights[stream] - largest) : 0.0f;
        sum = __fadd_rn(sum, weights[stream]);
    }
    for (int i = threadIdx.x; i < quads; i += blockDim.x) {
        float4 mixed = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int stream = 0; stream < STREAMS_MAX; stream++)
            if (stream < seen)
                mixed = plus_scaled(mixed, row[(size_t)stream * quads + i], __fdiv_rn(weights[stream], sum));
        ((float4 *)(out + (size_t)blockIdx.x * width))[i] = mixed;
    }
}
