// Products of one to eight tokens with a matrix of blocks: out[t, r] = sum over c of x[t, c] * w[r, c].
//
// Budget. Weights are read once, at the speed of device memory: 21 bytes per clock and multiprocessor on an H200 (4.8
// TB/s, 132 of them, 1.75 GHz), 15 on an H100. Four instructions for 32 lanes each are issued in a clock, so a byte may
// cost 6 (H200) or 8 (H100) lane instructions, copies and loops included; Q4_K takes about 3, Q6_K 4, MXFP4 5, Q8_0 2.
// Latency of about 700 ns asks for 25 KB under way in each multiprocessor; here it is 80 to 120.
//
// Blocks of odd sizes lie at odd addresses, so bytes come through shared memory: every warp has a ring of STAGES stages of
// its own, filled with 16-byte copies, and no barrier wider than the warp. A stage is one step along the columns for 2
// * SLOTS rows; a lane takes one group of 32 elements of two of these rows and meets both with the same activations.
// Sums of a row are added in an order that type and columns alone decide.
#include "activation.cuh"
#include "matvec_arguments.cuh"
#include "pipeline.cuh"
#include "weight.cuh"

#define WARPS 4

// LANES lanes share a row: 32, or 8 where rows are short. All blocks have at most 8 groups.
template <class W, int LANES> struct Shape {
    static constexpr int GROUPS = W::ELEMENTS / 32;
    static constexpr int SLOTS = 32 / LANES;
    static constexpr int SEGMENT = LANES / GROUPS * W::BYTES;
    // A segment may begin in the middle of 16 bytes.
    static constexpr int CHUNKS = (SEGMENT + 16 - W::ALIGN + 15) / 16;
    static constexpr int REGION = CHUNKS * 16;
    static constexpr int STAGE = 2 * SLOTS * REGION;
    static constexpr int FITTING = 28672 / (WARPS * STAGE);
    static constexpr int STAGES = FITTING < 2 ? 2 : FITTING > 4 ? 4 : FITTING;
    static constexpr int COPIES = (2 * SLOTS * CHUNKS + 31) / 32;
};

// A place in the sequence of stages that a warp goes through: steps of a tile, tile after tile.
struct Place {
    int tile, step;
    __device__ __forceinline__ void advance(int steps, int stride) {
        if (++step == steps) step = 0, tile += stride;
    }
};

template <class W, int LANES>
__device__ __forceinline__ void fill_stage(const RowPairs &work, Place place, u32 stage, int lane) {
    using S = Shape<W, LANES>;
#pragma unroll
    for (int k = 0; k < S::COPIES; k++) {
        const int i = lane + 32 * k;
        const int region = i / S::CHUNKS, chunk = i % S::CHUNKS;
        const int pair = place.tile * S::SLOTS + (region >> 1), j = region & 1;
        const u64 row = work.base[0] + (j ? work.base[1] - work.base[0] : 0) + (u64)pair * work.pitch;
        const u64 from = (row + (u64)place.step * S::SEGMENT & ~15ull) + 16 * chunk;
        if (i < 2 * S::SLOTS * S::CHUNKS && has_row(work, pair, j) && from < row + work.row_bytes)
            copy_async(stage + 16 * i, from);
    }
}

// One group of weights times one group of activations.
template <class W>
__device__ __forceinline__ float dot(const Group &w, int4 low, int4 high, ActivationScale x) {
    int first = __dp4a((int)w.codes[0], low.x, __dp4a((int)w.codes[1], low.y, 0));
    first = __dp4a((int)w.codes[2], low.z, __dp4a((int)w.codes[3], low.w, first));
    int second = __dp4a((int)w.codes[4], high.x, __dp4a((int)w.codes[5], high.y, 0));
    second = __dp4a((int)w.codes[6], high.z, __dp4a((int)w.codes[7], high.w, second));
    const int sum = x.sums[0] + x.sums[1];
    float value;
    if constexpr (W::HALVES) {
        value = w.scale[0] * (float)(first - W::ZERO * x.sums[0]);
        value += w.scale[1] * (float)(second - W::ZERO * x.sums[1]);
        if constexpr (W::OFFSET)
            value += w.offset[0] * (float)x.sums[0] + w.offset[1] * (float)x.sums[1];
    } else {
        value = w.scale[0] * (float)(first + second - W::ZERO * sum);
        if constexpr (W::OFFSET) value += w.offset[0] * (float)sum;
    }
    return value * x.scale;
}

template <class W, int LANES, int TOKENS>
__device__ __forceinline__ void take_stage(const RowPairs &work, Place place, const u8 *stage, int lane,
                                           const i8 *codes, const ActivationScale *scales, int groups,
                                           int tokens, float (&sums)[2][TOKENS]) {
    using S = Shape<W, LANES>;
    const int in_segment = lane % LANES, group = place.step * LANES + in_segment, slot = lane / LANES;
    if (group >= groups) return;
    Group w[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const u8 *region = stage + (2 * slot + j) * S::REGION;
        if constexpr (W::ALIGN < 16) {
            const u64 row = work.base[j] + (u64)(place.tile * S::SLOTS + slot) * work.pitch;
            region += (u32)row + place.step * S::SEGMENT & 15;
        }
        W::unpack(region + in_segment / S::GROUPS * W::BYTES, in_segment % S::GROUPS, w[j]);
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        // Missing tokens are computed as copies of the last, and not stored.
        const size_t row = work.x_row + (TOKENS == 1 ? 0 : min(t, tokens - 1));
        const int4 *x = (const int4 *)(codes + row * groups * 32);
        const int4 low = x[group], high = x[groups + group];
        const float2 raw = ((const float2 *)scales)[row * groups + group];
        const u32 packed = __float_as_uint(raw.y);
        const ActivationScale scale = {raw.x, {(short)packed, (short)(packed >> 16)}};
#pragma unroll
        for (int j = 0; j < 2; j++) sums[j][t] += dot<W>(w[j], low, high, scale);
    }
}

template <class W, int LANES, int TOKENS>
__device__ __forceinline__ void matvec(const i8 *codes, const ActivationScale *scales, MATVEC_PARAMETERS) {
    using S = Shape<W, LANES>;
    extern __shared__ uint4 ring[];
    RowPairs work;
    if (!find_rows(work, MATVEC_ARGUMENTS)) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int tiles = (work.count + S::SLOTS - 1) / S::SLOTS, stride = gridDim.x * WARPS;
    const int first = blockIdx.x * WARPS + warp;
    if (first >= tiles) return;
    const int groups = cols / 32, steps = (groups + LANES - 1) / LANES;
    const int total = (tiles - first + stride - 1) / stride * steps;
    const u8 *mine = (const u8 *)ring + warp * S::STAGES * S::STAGE;
    const u32 filled = shared_address(mine);
    Place fill = {first, 0}, take = {first, 0};
    int filling = 0;
    for (; filling < S::STAGES - 1; filling++) {
        if (filling < total) fill_stage<W, LANES>(work, fill, filled + filling * S::STAGE, lane);
        copy_commit();
        fill.advance(steps, stride);
    }
    float sums[2][TOKENS] = {};
    int taking = 0, to_fill = S::STAGES - 1;
    for (int stage = 0; stage < total; stage++) {
        copy_wait<S::STAGES - 2>();
        // The stage is there for all lanes, and all have left the one before it.
        __syncwarp();
        if (stage + S::STAGES - 1 < total) fill_stage<W, LANES>(work, fill, filled + to_fill * S::STAGE, lane);
        copy_commit();
        fill.advance(steps, stride);
        take_stage<W, LANES, TOKENS>(work, take, mine + taking * S::STAGE, lane, codes, scales, groups, tokens, sums);
        if (take.step == steps - 1) {
            const int pair = take.tile * S::SLOTS + lane / LANES;
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
#pragma unroll
                for (int distance = LANES / 2; distance > 0; distance >>= 1) {
                    sums[0][t] += __shfl_xor_sync(~0u, sums[0][t], distance);
                    sums[1][t] += __shfl_xor_sync(~0u, sums[1][t], distance);
                }
                if (lane % LANES == 0 && pair < work.count && t < tokens)
                    store_pair(work, pair, t, sums[0][t], sums[1][t]);
                sums[0][t] = sums[1][t] = 0.0f;
            }
        }
        take.advance(steps, stride);
        if (++taking == S::STAGES) taking = 0;
        if (++to_fill == S::STAGES) to_fill = 0;
    }
}

#define KERNEL(NAME, LANES, TOKENS, BLOCKS)                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                           \
        NAME(const i8 *codes, const ActivationScale *scales, MATVEC_PARAMETERS) {                              \
        wait_for_previous();                                                                                   \
        matvec<WEIGHT, LANES, TOKENS>(codes, scales, MATVEC_ARGUMENTS);                                        \
    }

KERNEL(matvec_1_short, 8, 1, 6)
KERNEL(matvec_1, 32, 1, 6)
KERNEL(matvec_2, 32, 2, 6)
KERNEL(matvec_4, 32, 4, 4)
KERNEL(matvec_8, 32, 8, 4)
