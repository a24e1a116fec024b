// The largest logits of a row, with their ids. Among equal logits the lower id comes first; NaN is never chosen.
//
// A candidate is one 64-bit number, which is larger for the better candidate. Its high word is the logit's bits, mapped
// so that their order is that of the numbers. Its low word is the inverted id. Every pass keeps the best of each slice,
// until one slice is left.
#include "common.cuh"

// Candidates of a slice. The launcher has the same constant.
static constexpr int SLICE = 2048;
static constexpr int THREADS = 512;

__device__ inline u64 candidate(float x, u32 id) {
    if (isnan(x)) return 0;
    // Adding 0 turns -0 into 0, so both compare as equal.
    const u32 bits = __float_as_uint(x + 0.0f);
    const u32 key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)key << 32 | ~id;
}

__device__ inline u32 id_of(u64 candidate) { return ~(u32)candidate; }

__device__ inline float value_of(u64 candidate) {
    const u32 key = (u32)(candidate >> 32);
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Loads this block's slice of a row of `count` logits, or of candidates of an earlier pass. 0 is no candidate.
__device__ inline void load_slice(u64 *slice, const float *logits, const u64 *before, int count) {
    const size_t row = blockIdx.y;
    for (int i = threadIdx.x; i < SLICE; i += THREADS) {
        const int at = blockIdx.x * SLICE + i;
        u64 x = 0;
        if (at < count) x = logits ? candidate(logits[row * count + at], (u32)at) : before[row * count + at];
        slice[i] = x;
    }
    __syncthreads();
}

// Sorts the slice in descending order (Batcher's bitonic network).
__device__ inline void sort_slice(u64 *slice) {
    for (int size = 2; size <= SLICE; size *= 2) {
        for (int distance = size / 2; distance > 0; distance /= 2) {
            for (int i = threadIdx.x; i < SLICE / 2; i += THREADS) {
                const int low = 2 * i - (i & (distance - 1)), high = low + distance;
                const bool descending = (low & size) == 0;
                const u64 a = slice[low], b = slice[high];
                if ((a < b) == descending) {
                    slice[low] = b;
                    slice[high] = a;
                }
            }
            __syncthreads();
        }
    }
}

// Runs one pass; grid (slices, rows). The best k of each slice go to after [rows, slices, k]. With one slice, ids and
// values [rows, k] are written instead; a row of fewer than k numbers is padded with id 2^32 - 1 and NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
    top_k(const float *logits, const u64 *before, u64 *after, u32 *ids, float *values, int count, int k) {
    wait_for_previous();
    __shared__ u64 slice[SLICE];
    load_slice(slice, logits, before, count);
    sort_slice(slice);
    const size_t row = blockIdx.y;
    for (int i = threadIdx.x; i < k; i += THREADS) {
        if (gridDim.x > 1) {
            after[(row * gridDim.x + blockIdx.x) * k + i] = slice[i];
        } else {
            ids[row * k + i] = id_of(slice[i]);
            values[row * k + i] = value_of(slice[i]);
        }
    }
}

// Does what top_k does for k = 1, without sorting.
extern "C" __global__ void __launch_bounds__(THREADS)
    argmax(const float *logits, const u64 *before, u64 *after, u32 *ids, float *values, int count) {
    wait_for_previous();
    __shared__ u64 warps[THREADS / 32];
    const size_t row = blockIdx.y;
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < SLICE / THREADS; i++) {
        const int at = blockIdx.x * SLICE + i * THREADS + threadIdx.x;
        if (at >= count) break;
        const u64 x = logits ? candidate(logits[row * count + at], (u32)at) : before[row * count + at];
        best = max(best, x);
    }
    for (int distance = 16; distance > 0; distance /= 2)
        best = max(best, __shfl_xor_sync(~0u, best, distance));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < THREADS / 32; warp++) best = max(best, warps[warp]);
    if (gridDim.x > 1) {
        after[row * gridDim.x + blockIdx.x] = best;
    } else {
        ids[row] = id_of(best);
        values[row] = value_of(best);
    }
}
