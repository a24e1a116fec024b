// Root-mean-square norms and layer norms. The order in which a row is summed depends only on its length.
#include "activation.cuh"
#include "addition.cuh"
#include "halves.cuh"
#include "reduce.cuh"

// Elements that a thread keeps in registers between the two passes.
static constexpr int KEPT = 16;

// Computes out = weight * x / sqrt(mean(x^2) + eps) for one row of n elements per block, or out = x if `weight` is null. A layer
// norm subtracts the mean of x before, and adds the biases that follow the n weights.
// Before that, `addition` is added to x, and the sum times `factor` written back. `out` may be `x`; if it is null, only the sum
// is computed. `codes` and `scales`, if not null, receive `out` rounded; n is
// then a multiple of 32 and at most KEPT times the number of threads. `halves` and `half_scales` receive it as halves; n is
// then a multiple of 4 within the same limit. `flag`, if not null, receives the smallest `tag + row` whose sum is not finite.
template <bool BIASED, bool LAYER>
__device__ __forceinline__ void norm(float *x, const Addition<BIASED> &addition, const float *weight, float *out, i8 *codes,
                                     ActivationScale *scales, u16 *halves, float *half_scales, int n, float eps,
                                     u32 *flag, int tag, float factor) {
    wait_for_previous();
    start_next(gridDim.x <= FEW_ROWS);
    __shared__ float shared[32];
    const size_t first = (size_t)blockIdx.x * n;
    x += first;
    const bool normed = out != nullptr;
    if (normed) out += first;
    float kept[KEPT];
    float4 weights[KEPT / 4];
    float sum = 0.0f;
    const bool quads = n % 4 == 0 && n <= (int)blockDim.x * KEPT;
    if (quads) {
#pragma unroll
        for (int i = 0; i < KEPT / 4; i++) {
            const int at = 4 * (threadIdx.x + i * blockDim.x);
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (at < n) {
                v = *(const float4 *)(x + at);
                // The weights are needed only after the sum, but loading them there would expose the latency.
                weights[i] = weight ? *(const float4 *)(weight + at) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
                if (addition.any()) {
                    const float4 a = addition.quad_at(at, n);
                    v = make_float4(__fmul_rn(__fadd_rn(v.x, a.x), factor), __fmul_rn(__fadd_rn(v.y, a.y), factor),
                                    __fmul_rn(__fadd_rn(v.z, a.z), factor), __fmul_rn(__fadd_rn(v.w, a.w), factor));
                    *(float4 *)(x + at) = v;
                }
            }
            kept[4 * i] = v.x;
            kept[4 * i + 1] = v.y;
            kept[4 * i + 2] = v.z;
            kept[4 * i + 3] = v.w;
            sum += LAYER ? v.x + v.y + v.z + v.w : v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
    } else {
        for (int at = threadIdx.x; at < n; at += blockDim.x) {
            float v = x[at];
            if (addition.any()) x[at] = v = __fmul_rn(__fadd_rn(v, addition.at(at, n)), factor);
            sum += LAYER ? v : v * v;
        }
    }
    sum = block_sum(sum, shared);
    float mean = 0.0f;
    if (LAYER) {
        mean = sum / (float)n;
        sum = 0.0f;
        if (quads) {
#pragma unroll
            for (int i = 0; i < KEPT; i++) {
                if (4 * (threadIdx.x + i / 4 * blockDim.x) >= n) break;
                kept[i] -= mean;
                sum += kept[i] * kept[i];
            }
        } else {
            for (int at = threadIdx.x; at < n; at += blockDim.x) sum += (x[at] - mean) * (x[at] - mean);
        }
        // Other warps may still read the first sums.
        __syncthreads();
        sum = block_sum(sum, shared);
    }
    if (flag && threadIdx.x == 0 && !isfinite(sum)) atomicMin(flag, (u32)tag + blockIdx.x);
    if (!normed) return;
    const float scale = weight ? 1.0f / sqrtf(sum / (float)n + eps) : 1.0f;
    if (quads) {
#pragma unroll
        for (int i = 0; i < KEPT / 4; i++) {
            // If any lane of a warp is within the row, all its lanes must stay for the shuffles of `round_quad`.
            const int at = 4 * (threadIdx.x + i * blockDim.x);
            if (4 * ((threadIdx.x & ~31) + i * blockDim.x) >= n) break;
            float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (at < n) {
                const float4 w = weights[i];
                y = make_float4(kept[4 * i] * scale * w.x, kept[4 * i + 1] * scale * w.y,
                                kept[4 * i + 2] * scale * w.z, kept[4 * i + 3] * scale * w.w);
                if (LAYER) {
                    const float4 b = *(const float4 *)(weight + n + at);
                    y = make_float4(y.x + b.x, y.y + b.y, y.z + b.z, y.w + b.w);
                }
                *(float4 *)(out + at) = y;
            }
            if (codes) round_quad(y, at < n, blockIdx.x, at, n, codes, scales);
            kept[4 * i] = y.x;
            kept[4 * i + 1] = y.y;
            kept[4 * i + 2] = y.z;
            kept[4 * i + 3] = y.w;
        }
        if (!halves) return;
        int largest = 0;
#pragma unroll
        for (int i = 0; i < KEPT; i++)
            if (4 * (threadIdx.x + i / 4 * blockDim.x) < n) largest = larger_bits(largest, kept[i]);
        float half_scale;
        const float half_factor = half_row_factor(block_largest(largest), half_scale);
#pragma unroll
        for (int i = 0; i < KEPT / 4; i++) {
            const int at = 4 * (threadIdx.x + i * blockDim.x);
            const float4 y = make_float4(kept[4 * i], kept[4 * i + 1], kept[4 * i + 2], kept[4 * i + 3]);
            if (at < n) *(uint2 *)(halves + first + at) = four_halves(y, half_factor);
        }
        if (threadIdx.x == 0) half_scales[blockIdx.x] = half_scale;
    } else {
        // A thread reads only elements that it has written itself, so `out` may be `x` here, too.
        for (int at = threadIdx.x; at < n; at += blockDim.x) {
            if (LAYER)
                out[at] = (x[at] - mean) * scale * weight[at] + weight[n + at];
            else
                out[at] = x[at] * scale * (weight ? weight[at] : 1.0f);
        }
    }
}

// Biases have a separate kernel, because there are not enough registers for both variants in one.
#define KERNEL(NAME, BIASED, LAYER)                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024, 1)                                                             \
        NAME(float *x, const float *add, const float *parts, const float *part_weights, const u32 *row_of_pair,       \
             const float *bias, const u32 *ids, int k, const float *weight, float *out, i8 *codes,                    \
             ActivationScale *scales, u16 *halves, float *half_scales, int n, float eps, u32 *flag, int tag,          \
             float factor) {                                                                                          \
        const Addition<BIASED> addition{add, parts, part_weights, row_of_pair, bias, ids, k};                         \
        norm<BIASED, LAYER>(x, addition, weight, out, codes, scales, halves, half_scales, n, eps, flag, tag, factor); \
    }
KERNEL(rms_norm, false, false)
KERNEL(rms_norm_biased, true, false)
KERNEL(layer_norm, false, true)
