// The choice of the pools that a row attends to, which may be single positions: those with the largest scores, exactly as many
// as wanted. Of equal scores, the lower pool is taken first. NaN comes last.
//
// A score becomes a number whose order is that of the scores. Three passes over a row count how often each value of its
// next 11 or 10 bits occurs among the scores that begin like the limit, and so find the limit: the smallest score that is
// taken (radix select). Then every warp takes the chosen positions of a share of the row, in order.
#include "pools.cuh"

static constexpr int WARPS = 32, THREADS = WARPS * 32;
static constexpr int BINS = 2048, OWN_BINS = BINS / THREADS;

__device__ inline u32 key_of(float x) {
    if (isnan(x)) return 0;
    // Adding 0 turns -0 into 0, so both compare as equal.
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Adds one to the bin of every lane that has one. Often all lanes have the same, which would make them wait for each other.
__device__ inline void count(u32 *bins, bool has, u32 bin) {
    const u32 lanes = __ballot_sync(~0u, has);
    if (lanes == 0) return;
    const u32 first = __shfl_sync(~0u, bin, __ffs(lanes) - 1);
    const u32 same = __ballot_sync(~0u, has && bin == first);
    if (has && bin != first) atomicAdd(bins + bin, 1u);
    if ((threadIdx.x & 31) == 0) atomicAdd(bins + first, (u32)__popc(same));
}

// Returns the sum of the numbers of the lanes before this one.
__device__ inline u32 sum_before(u32 x) {
    const int lane = threadIdx.x & 31;
    u32 sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
    }
    return sum - x;
}

// Returns the sum of the numbers of the threads before this one. All threads of the block must call this.
__device__ inline u32 sum_before_of_block(u32 x, u32 *warps) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 before = sum_before(x);
    if (lane == 31) warps[warp] = before + x;
    __syncthreads();
    const u32 of_warps = sum_before(warps[lane]);
    const u32 sum = __shfl_sync(~0u, of_warps, warp) + before;
    __syncthreads();  // No warp reads the sums any more.
    return sum;
}

// Writes the ascending lists of each row to lists [rows, lists, most]; grid (rows, lists). scores [rows, lists, stride]. A list
// of a row that sees all positions gets all pools, and then zeroes. A key is that of `span` positions.
extern "C" __global__ void __launch_bounds__(THREADS)
    indexer_choice(const float *scores, const u32 *positions, u32 *lists, int stride, int context, int span,
                   POOL_PARAMETERS) {
    wait_for_previous();
    __shared__ u32 bins[BINS];
    __shared__ u32 warps[WARPS], equals[WARPS];
    __shared__ u32 found, left;
    const size_t row = (size_t)blockIdx.x * gridDim.y + blockIdx.y;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int seen = POOLS.candidates_of(min((int)positions[blockIdx.x] + 1, context) / span);
    u32 *const list = lists + row * most;
    if (seen <= most) {
        for (int i = threadIdx.x; i < most; i += THREADS) list[i] = i < seen ? i : 0;
        return;
    }
    scores += row * stride;
    // The last pools may have to be chosen.
    const int scored = seen - before_own;
    const auto key_at = [=](int at) { return at < scored ? key_of(scores[at]) : ~0u; };
    u32 limit = 0, wanted = (u32)most;
    for (int pass = 0; pass < 3; pass++) {
        const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, bits = pass == 2 ? 10 : 11;
        for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
        __syncthreads();
        for (int first = warp * 32; first < seen; first += THREADS) {
            const int at = first + lane;
            const u32 key = at < seen ? key_at(at) : 0;
            const bool alike = pass == 0 || key >> (shift + bits) == limit >> (shift + bits);
            count(bins, at < seen && alike, key >> shift & ((1u << bits) - 1));
        }
        __syncthreads();
        // Thread t has the bins that are t-th from the top.
        u32 own = 0;
        const int top = BINS - 1 - (int)threadIdx.x * OWN_BINS;
#pragma unroll
        for (int i = 0; i < OWN_BINS; i++) own += bins[top - i];
        u32 above = sum_before_of_block(own, warps);
        if (above < wanted && wanted <= above + own) {
            int bin = top;
            while (above + bins[bin] < wanted) above += bins[bin--];
            found = (u32)bin;
            left = wanted - above;
        }
        __syncthreads();
        limit |= found << shift;
        wanted = left;
    }
    // `wanted` of the scores that are equal to the limit are taken. Every warp counts in its share, and then takes.
    const int share = (seen + WARPS * 32 - 1) / (WARPS * 32) * 32, from = warp * share, to = min(from + share, seen);
    u32 above = 0, equal = 0;
    for (int first = from; first < to; first += 32) {
        const int at = first + lane;
        const u32 key = at < to ? key_at(at) : 0;
        above += (u32)__popc(__ballot_sync(~0u, at < to && key > limit));
        equal += (u32)__popc(__ballot_sync(~0u, at < to && key == limit));
    }
    if (lane == 0) warps[warp] = above, equals[warp] = equal;
    __syncthreads();
    const u32 equal_before = sum_before(equals[lane]);
    const u32 taken = warps[lane] + min(equals[lane], wanted - min(wanted, equal_before));
    u32 place = __shfl_sync(~0u, sum_before(taken), warp);
    u32 equals_seen = __shfl_sync(~0u, equal_before, warp);
    const u32 lanes_before = (1u << lane) - 1;
    for (int first = from; first < to; first += 32) {
        const int at = first + lane;
        const u32 key = at < to ? key_at(at) : 0;
        const u32 all_equal = __ballot_sync(~0u, at < to && key == limit);
        const u32 rank = equals_seen + (u32)__popc(all_equal & lanes_before);
        const bool takes = at < to && (key > limit || (key == limit && rank < wanted));
        const u32 all = __ballot_sync(~0u, takes);
        if (takes) list[place + (u32)__popc(all & lanes_before)] = (u32)at;
        place += (u32)__popc(all);
        equals_seen += (u32)__popc(all_equal);
    }
}
