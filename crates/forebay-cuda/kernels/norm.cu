// Root-mean-square norms. A row's sum is added up in an order that its length alone decides.
#include "reduce.cuh"

// Elements that a thread keeps in registers between the two passes.
static constexpr int KEPT = 16;

// out = weight * x / sqrt(mean(x^2) + eps) for one row of n elements per block. With `add` the row becomes x + add first
// and is written back. `out` may be `x`. `flag`, if there, gets the smallest `tag + row` whose sum is not finite.
template <bool ADD>
__device__ inline void norm_row(float *x, const float *add, const float *weight, float *out, int n,
                                float eps, u32 *flag, u32 tag) {
    __shared__ float shared[32];
    const size_t first = (size_t)blockIdx.x * n;
    x += first;
    out += first;
    if (ADD) add += first;
    float kept[KEPT];
    float sum = 0.0f;
    const bool quads = n % 4 == 0 && n <= (int)blockDim.x * KEPT;
    if (quads) {
#pragma unroll
        for (int i = 0; i < KEPT / 4; i++) {
            const int at = 4 * (threadIdx.x + i * blockDim.x);
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (at < n) {
                v = *(const float4 *)(x + at);
                if (ADD) {
                    const float4 a = *(const float4 *)(add + at);
                    v = make_float4(v.x + a.x, v.y + a.y, v.z + a.z, v.w + a.w);
                    *(float4 *)(x + at) = v;
                }
            }
            kept[4 * i] = v.x;
            kept[4 * i + 1] = v.y;
            kept[4 * i + 2] = v.z;
            kept[4 * i + 3] = v.w;
            sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
    } else {
        for (int at = threadIdx.x; at < n; at += blockDim.x) {
            float v = x[at];
            if (ADD) x[at] = v = v + add[at];
            sum += v * v;
        }
    }
    sum = block_sum(sum, shared);
    if (flag && threadIdx.x == 0 && !isfinite(sum)) atomicMin(flag, tag + blockIdx.x);
    const float scale = 1.0f / sqrtf(sum / (float)n + eps);
    if (quads) {
#pragma unroll
        for (int i = 0; i < KEPT / 4; i++) {
            const int at = 4 * (threadIdx.x + i * blockDim.x);
            if (at >= n) break;
            const float4 w = *(const float4 *)(weight + at);
            *(float4 *)(out + at) =
                make_float4(kept[4 * i] * scale * w.x, kept[4 * i + 1] * scale * w.y,
                            kept[4 * i + 2] * scale * w.z, kept[4 * i + 3] * scale * w.w);
        }
    } else {
        // A thread reads again what it alone has written, so `out` may be `x` here, too.
        for (int at = threadIdx.x; at < n; at += blockDim.x) out[at] = x[at] * scale * weight[at];
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    rms_norm(float *x, const float *weight, float *out, int n, float eps, u32 *flag, int tag) {
    norm_row<false>(x, nullptr, weight, out, n, eps, flag, (u32)tag);
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    add_rms_norm(float *x, const float *add, const float *weight, float *out, int n, float eps,
                 u32 *flag, int tag) {
    norm_row<true>(x, add, weight, out, n, eps, flag, (u32)tag);
}

// Short rows in place, a warp each: the norm of every head of queries or keys.
extern "C" __global__ void __launch_bounds__(256)
    rms_norm_heads(float *x, const float *__restrict__ weight, int rows, int n, float eps) {
    const int row = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (row >= rows) return;
    x += (size_t)row * n;
    float sum = 0.0f;
    for (int at = lane; at < n; at += 32) sum += x[at] * x[at];
    sum = warp_sum(sum);
    const float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (int at = lane; at < n; at += 32) x[at] = x[at] * scale * weight[at];
}
