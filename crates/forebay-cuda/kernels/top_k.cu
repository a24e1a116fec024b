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

// How the logits of a row are selected. The host writes the same words.
struct Selection {
    // Index of the first word of the row's mask in `words`: bit id % 32 of word id / 32 is set if the token may be
    // selected. 0 if every token may.
    u32 mask;
    // Index of the first change in `words`, and the number of changes.
    u32 changes, change_count;
    // Divisor of the logits in the row's total; 0 if the total is not wanted.
    float divisor;
};

// Changes logits in place; grid (rows). A change is a token id, a divisor of positive logits (a factor of others), what is
// subtracted, and what is added. Ids outside the vocabulary are skipped.
extern "C" __global__ void change_logits(float *logits, const u32 *words, int vocabulary) {
    wait_for_previous();
    const size_t row = blockIdx.x;
    const Selection of = ((const Selection *)words)[row];
    for (u32 i = threadIdx.x; i < of.change_count; i += blockDim.x) {
        const u32 *change = words + of.changes + 4 * i;
        if (change[0] >= (u32)vocabulary) continue;
        float *logit = logits + row * vocabulary + change[0];
        const float divisor = __uint_as_float(change[1]);
        float x = *logit;
        x = x > 0.0f ? __fdiv_rn(x, divisor) : __fmul_rn(x, divisor);
        *logit = __fadd_rn(__fsub_rn(x, __uint_as_float(change[2])), __uint_as_float(change[3]));
    }
}

// Returns candidate `at` of a row of `count` logits, or of candidates of an earlier pass. 0 is no candidate.
__device__ inline u64 input(const float *logits, const u64 *before, const u32 *mask, int count, int at) {
    const size_t i = (size_t)blockIdx.y * count + at;
    if (!logits) return before[i];
    if (mask && !(mask[at / 32] >> at % 32 & 1)) return 0;
    return candidate(logits[i], (u32)at);
}

// Returns the mask of this block's row, or null.
__device__ inline const u32 *mask_of(const u32 *words) {
    const u32 mask = words ? ((const Selection *)words)[blockIdx.y].mask : 0;
    return mask ? words + mask : nullptr;
}

// Loads this block's slice of a row.
__device__ inline void load_slice(u64 *slice, const float *logits, const u64 *before, const u32 *words, int count) {
    const u32 *mask = mask_of(words);
    for (int i = threadIdx.x; i < SLICE; i += THREADS) {
        const int at = blockIdx.x * SLICE + i;
        slice[i] = at < count ? input(logits, before, mask, count, at) : 0;
    }
    __syncthreads();
}

// Adds the numbers of all threads in a fixed order. Thread 0 gets the sum.
__device__ inline float sum_of_block(float x) {
    __shared__ float warps[THREADS / 32];
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x > 0) return x;
    for (int warp = 1; warp < THREADS / 32; warp++) x += warps[warp];
    return x;
}

// Writes the sum of exp((logit - largest) / divisor) over a sorted slice, behind its largest logit, to `part`.
__device__ inline void sum_slice(const u64 *slice, float divisor, float2 *part) {
    const float largest = value_of(slice[0]);
    float sum = 0;
    for (int i = threadIdx.x; i < SLICE; i += THREADS)
        if (slice[i]) sum += expf((value_of(slice[i]) - largest) / divisor);
    sum = sum_of_block(sum);
    if (threadIdx.x == 0) *part = make_float2(largest, sum);
}

// Returns a row's total to thread 0: the sum over its slices' sums, with the largest logit of the row. A slice without
// candidates has the sum 0.
__device__ inline float sum_parts(const float2 *parts, int count, float largest, float divisor) {
    float sum = 0;
    for (int i = threadIdx.x; i < count; i += THREADS)
        if (parts[i].y > 0) sum += parts[i].y * expf((parts[i].x - largest) / divisor);
    return sum_of_block(sum);
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
// values [rows, k] are written instead; a row of fewer than k numbers is padded with id 2^32 - 1 and NaN. `words` has the
// rows' selections, or is null. Rows that want a total get one: the first pass writes parts [rows, part_count], the last
// one totals [rows].
extern "C" __global__ void __launch_bounds__(THREADS)
    top_k(const float *logits, const u64 *before, u64 *after, u32 *ids, float *values, const u32 *words, float2 *parts,
          float *totals, int count, int k, int part_count) {
    wait_for_previous();
    __shared__ u64 slice[SLICE];
    load_slice(slice, logits, before, words, count);
    sort_slice(slice);
    const size_t row = blockIdx.y;
    const float divisor = words ? ((const Selection *)words)[row].divisor : 0;
    if (logits && divisor > 0) sum_slice(slice, divisor, parts + row * part_count + blockIdx.x);
    for (int i = threadIdx.x; i < k; i += THREADS) {
        if (gridDim.x > 1) {
            after[(row * gridDim.x + blockIdx.x) * k + i] = slice[i];
        } else {
            ids[row * k + i] = id_of(slice[i]);
            values[row * k + i] = value_of(slice[i]);
        }
    }
    if (gridDim.x == 1 && divisor > 0) {
        __syncthreads();
        const float total = sum_parts(parts + row * part_count, part_count, value_of(slice[0]), divisor);
        if (threadIdx.x == 0) totals[row] = total;
    }
}

// Does what top_k does for k = 1, without sorting and without totals.
extern "C" __global__ void __launch_bounds__(THREADS)
    argmax(const float *logits, const u64 *before, u64 *after, u32 *ids, float *values, const u32 *words, int count) {
    wait_for_previous();
    __shared__ u64 warps[THREADS / 32];
    const size_t row = blockIdx.y;
    const u32 *mask = mask_of(words);
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < SLICE / THREADS; i++) {
        const int at = blockIdx.x * SLICE + i * THREADS + threadIdx.x;
        if (at >= count) break;
        best = max(best, input(logits, before, mask, count, at));
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
