// Products whose weights are loaded directly from device memory to registers.
#pragma once

#include "matvec_arguments.cuh"
#include "matvec_dot.cuh"

// For small matrices, above all those of experts. Such a launch reads for 2 to 5 us. That is less time than it takes to
// set up a ring in shared memory for each warp. Also, the addresses are not known before the router has chosen. So this
// kernel is short: 170 instructions up to the first read instead of 300. Bytes that adjacent lanes also need come from
// the L1 cache.
//
// LANES lanes share a row: 32, or fewer where rows are short. STEPS steps along the columns are loaded before the first
// is used. A block multiplies them with TOKENS tokens.
template <class W, int LANES, int STEPS, int TOKENS>
__device__ __forceinline__ void matvec_direct(const i8 *codes, const ActivationScale *scales, MATVEC_PARAMETERS) {
    using U = Unit<W>;
    constexpr int GROUPS = W::ELEMENTS / 32, UNITS = GROUPS / U::RUN, SLOTS = 32 / LANES;
    constexpr int SEGMENT = LANES / UNITS * W::BYTES, GROUPS_OF_STEP = LANES * U::RUN;
    static_assert(LANES >= UNITS, "a row's lanes take whole blocks");
    wait_for_previous();
    // A token has up to eight experts in most models.
    start_next(ids ? gridDim.y <= 8 * FEW_ROWS : tokens <= FEW_ROWS);
    RowPairs work;
    if (!find_rows<TOKENS>(work, MATVEC_ARGUMENTS)) return;
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5, warp = threadIdx.x >> 5;
    const int of_row = lane % LANES, slot = lane / LANES;
    const int unit = of_row % UNITS, block = of_row / UNITS;
    const int groups = cols / 32, first_group = block * GROUPS + U::first_of(unit);
    const int stride = gridDim.x * warps * SLOTS, present = tokens - work.first_token;
    codes += work.x_row * cols;
    scales += work.x_row * groups;
    for (int first = (blockIdx.x * warps + warp) * SLOTS; first < work.count; first += stride) {
        const int pair = first + slot;
        const u8 *rows[2];
#pragma unroll
        for (int j = 0; j < 2; j++) rows[j] = row_of(work, pair, j) + block * W::BYTES;
        float sums[2][TOKENS] = {};
        for (int group = first_group; group < groups; group += STEPS * GROUPS_OF_STEP) {
            Group w[STEPS][2][U::RUN];
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u8 *from = rows[j] + s * SEGMENT;
                    __builtin_assume(__isGlobal(from));
                    if (group + s * GROUPS_OF_STEP < groups) U::unpack(from, unit, w[s][j]);
                }
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                if (group + s * GROUPS_OF_STEP < groups)
#pragma unroll
                    for (int t = 0; t < TOKENS; t++)
#pragma unroll
                        for (int r = 0; r < U::RUN; r++) {
                            // Tokens that do not exist repeat the last one, and are not stored.
                            const int row = t == 0 ? 0 : min(t, present - 1);
                            Input x;
                            x.load(codes, scales, row, groups, group + s * GROUPS_OF_STEP + r * U::APART);
#pragma unroll
                            for (int j = 0; j < 2; j++) sums[j][t] = add_dot<W>(sums[j][t], w[s][j][r], x);
                        }
            rows[0] += STEPS * SEGMENT;
            rows[1] += STEPS * SEGMENT;
        }
        __syncwarp();
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
#pragma unroll
            for (int distance = LANES / 2; distance > 0; distance >>= 1) {
                sums[0][t] += __shfl_xor_sync(~0u, sums[0][t], distance);
                sums[1][t] += __shfl_xor_sync(~0u, sums[1][t], distance);
            }
            if (of_row == 0 && pair < work.count && (t == 0 || t < present))
                store_pair(work, pair, work.first_token + t, sums[0][t], sums[1][t], MATVEC_ARGUMENTS);
        }
    }
}

// For one token and large matrices of blocks of 32, whose type separates fetching from decoding. Weights are loaded STEPS
// steps ahead into registers; the first load comes before the kernel waits for the previous one. MXFP4's blocks of 17 bytes are
// badly aligned in shared memory. Registers allow four blocks per multiprocessor, and most matrices fill those evenly.
// If more blocks fitted, those of the next launch would occupy the rest, and some multiprocessors would finish late.
template <class W, int STEPS>
__device__ __forceinline__ void matvec_ahead(const i8 *codes, const ActivationScale *scales, MATVEC_PARAMETERS) {
    static_assert(W::ELEMENTS == 32, "a lane takes a block");
    constexpr int SEGMENT = 32 * W::BYTES;
    ids = nullptr;  // this kernel never serves experts: they are known only after the wait
    RowPairs work;
    find_rows<1>(work, MATVEC_ARGUMENTS);
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int groups = cols / 32, stride = gridDim.x * warps;
    int pair = blockIdx.x * warps + (threadIdx.x >> 5);
    if (pair >= work.count) return;

    RawBlock<W> next[STEPS][2];
    const u8 *rows[2];
    int pair_ahead = pair, ahead = lane;
    const auto aim = [&] {
#pragma unroll
        for (int j = 0; j < 2; j++) rows[j] = row_of(work, pair_ahead, j) + lane * W::BYTES;
    };
    const auto read = [&] {
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            if (ahead + 32 * s < groups)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u8 *from = rows[j] + s * SEGMENT;
                    __builtin_assume(__isGlobal(from));
                    W::fetch(from, next[s][j]);
                }
        ahead += 32 * STEPS;
        rows[0] += STEPS * SEGMENT;
        rows[1] += STEPS * SEGMENT;
        if (ahead - lane >= groups) {
            ahead = lane;
            pair_ahead += stride;
            aim();
        }
    };
    codes += work.x_row * cols;
    scales += work.x_row * groups;
    aim();
    read();
    wait_for_previous();
    start_next(tokens <= FEW_ROWS);
    float sums[2] = {};
    int group = lane;
    while (true) {
        RawBlock<W> now[STEPS][2];
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int j = 0; j < 2; j++) now[s][j] = next[s][j];
        if (pair_ahead < work.count) read();
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            if (group + 32 * s < groups) {
                Input x;
                x.load(codes, scales, 0, groups, group + 32 * s);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    Group w;
                    W::decode(now[s][j], w);
                    sums[j] = add_dot<W>(sums[j], w, x);
                }
            }
        group += 32 * STEPS;
        if (group - lane < groups) continue;
        const float first = warp_sum(sums[0]), second = warp_sum(sums[1]);
        if (lane == 0) store_pair(work, pair, work.first_token, first, second, MATVEC_ARGUMENTS);
        pair += stride;
        if (pair >= work.count) break;
        group = lane;
        sums[0] = sums[1] = 0.0f;
    }
}
