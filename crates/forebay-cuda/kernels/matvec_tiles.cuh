// Products of many decode rows with a matrix of blocks, by tensor cores.
//
// The codes of weights and activations are small integers, so their products have the same bits in any order and by any
// unit. Everything else is done as by the kernels for few rows: the groups of a row belong to LANES sums, each sum takes its
// groups in ascending order, and the sums are added as a tree. Here, a sum is not that of a lane but of a fragment of a tile.
//
// Time budget. With `__dp4a`, 32 rows and a matrix of 5120x2048 take 57 us on an H100 (ncu), 1.6 us of which are needed to
// read the weights. A tensor core multiplies a group of 16 rows of weights and 8 of activations at once. What remains is scaling:
// five instructions for each group, row of weights and row of activations.
#pragma once

#include "matvec_arguments.cuh"
#include "matvec_dot.cuh"

static constexpr int TILE_WARPS = 8;
// Words of a decoded group in shared memory: its codes, scales and offsets.
static constexpr int GROUP_WORDS = 12;
// Words of the sums of one of a warp's four lanes: 16 rows of weights, 8 of activations, and some against bank conflicts.
static constexpr int SUM_WORDS = 16 * 8 + 8;

// Adds the products of 16 x 32 codes `a` and 32 x 8 codes `b` to `c`. The first 16 of the 32 are in a[0], a[1] and b[0].
__device__ __forceinline__ void mma_codes(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Adds the products of 16 x 16 and 16 x 8 codes to `c`.
__device__ __forceinline__ void mma_codes(int (&c)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// Activations are those of `tile_codes`. A tile is eight pairs of rows: the first rows of the pairs are its rows 0 to 7, the second ones its rows 8 to 15. LANES / 4
// warps share a tile; each of them has four of the LANES sums of a row. TOKENS is a multiple of 8. Blocks have TILE_WARPS
// warps and TILE_WARPS * REGION words of shared memory.
template <class W, int LANES, int TOKENS>
__device__ __forceinline__ void matvec_tiles(const i8 *codes, const ActivationScale *scales, MATVEC_PARAMETERS) {
    using U = Unit<W>;
    constexpr int GROUPS = W::ELEMENTS / 32, UNITS = GROUPS / U::RUN, SHARING = LANES / 4;
    constexpr int SEGMENT = LANES / UNITS * W::BYTES, GROUPS_OF_STEP = LANES * U::RUN;
    // Words of the groups of one of the four sums, and some against bank conflicts.
    constexpr int OF_SUM = U::RUN * 16 * GROUP_WORDS + 8, REGION = 4 * OF_SUM, TILES = TILE_WARPS / SHARING;
    static_assert(4 * SUM_WORDS <= REGION, "sums take the place of weights");
    extern __shared__ uint4 memory[];
    ids = nullptr;  // experts have few rows each
    RowPairs work;
    find_rows<TOKENS>(work, MATVEC_ARGUMENTS);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, part = warp % SHARING;
    u32 *const mine = (u32 *)memory + warp * REGION;
    const u32 *const first_of_tile = (const u32 *)memory + (warp - part) * REGION;
    const int groups = cols / 32, row = lane >> 2, quarter = lane & 3;

    // Decodes the groups of a step, two rows at a time. Adjacent lanes read adjacent units.
    const auto decode = [&](int tile, int base) {
        const int of_row = 4 * part + quarter, unit = of_row % UNITS, block = of_row / UNITS;
        if (base + block * GROUPS + U::first_of(unit) >= groups) return;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const u8 *from = row_of(work, 8 * tile + row, j) + base / GROUPS_OF_STEP * SEGMENT + block * W::BYTES;
            __builtin_assume(__isGlobal(from));
            Group w[U::RUN];
            U::unpack(from, unit, w);
#pragma unroll
            for (int r = 0; r < U::RUN; r++) {
                uint4 *const to = (uint4 *)(mine + quarter * OF_SUM + (r * 16 + 8 * j + row) * GROUP_WORDS);
                const u32 *const c = w[r].codes;
                to[0] = make_uint4(c[0], c[1], c[2], c[3]);
                to[1] = make_uint4(c[4], c[5], c[6], c[7]);
                float4 factors = {w[r].scale[0], 0.0f, 0.0f, 0.0f};
                if constexpr (W::HALVES) factors.y = w[r].scale[1];
                if constexpr (W::OFFSET) factors.z = w[r].offset[0];
                if constexpr (W::OFFSET && W::HALVES) factors.w = w[r].offset[1];
                *(float4 *)(to + 2) = factors;
            }
        }
    };

    // Fetches what `decode` would read to the L2 cache.
    const auto fetch_ahead = [&](int tile, int base) {
        const int of_row = 4 * part + quarter, unit = of_row % UNITS, block = of_row / UNITS;
        if (base + block * GROUPS + U::first_of(unit) >= groups) return;
#pragma unroll
        for (int j = 0; j < 2; j++)
            prefetch_l2(row_of(work, 8 * tile + row, j) + base / GROUPS_OF_STEP * SEGMENT + block * W::BYTES +
                        unit * (W::BYTES / UNITS));
    };

    int first = blockIdx.x * TILES;
    // Weights are no output of a kernel.
    if (8 * first < work.count) decode(first + warp / SHARING, 0);
    wait_for_previous();
    start_next(tokens <= FEW_ROWS);
    for (bool is_decoded = true; 8 * first < work.count; first += gridDim.x * TILES) {
        const int tile = first + warp / SHARING;
        float sums[4][TOKENS / 8][4] = {};
        for (int base = 0; base < groups; base += GROUPS_OF_STEP) {
            if (!is_decoded) decode(tile, base);
            is_decoded = false;
            if (base + GROUPS_OF_STEP < groups) {
                fetch_ahead(tile, base + GROUPS_OF_STEP);
            } else if (8 * (first + (int)gridDim.x * TILES) < work.count) {
                fetch_ahead(tile + gridDim.x * TILES, 0);
            }
            __syncwarp();
#pragma unroll
            for (int v = 0; v < 4; v++) {
                const int of_row = 4 * part + v, unit = of_row % UNITS, block = of_row / UNITS;
                const int group = base + block * GROUPS + U::first_of(unit);
                if (group >= groups) continue;
#pragma unroll
                for (int r = 0; r < U::RUN; r++) {
                    const int at = group + r * U::APART;
                    // All loads are issued before the first product. Rows that do not exist repeat the last tile.
                    uint2 x[TOKENS / 8];
                    float4 raw[TOKENS / 8];
#pragma unroll
                    for (int t = 0; t < TOKENS / 8; t++) {
                        const u32 tile_group = (u32)min(work.first_token / 8 + t, (tokens - 1) / 8) * groups + at;
                        x[t] = ((const uint2 *)codes)[tile_group * 32 + lane];
                        raw[t] = ((const float4 *)scales)[tile_group * 4 + quarter];
                    }
                    const u32 *const upper = mine + v * OF_SUM + (r * 16 + row) * GROUP_WORDS;
                    const u32 *const lower = upper + 8 * GROUP_WORDS;
                    const u32 a[4] = {upper[quarter], lower[quarter], upper[4 + quarter], lower[4 + quarter]};
                    const float4 factors[2] = {*(const float4 *)(upper + 8), *(const float4 *)(lower + 8)};
#pragma unroll
                    for (int t = 0; t < TOKENS / 8; t++) {
                        if (work.first_token + 8 * t >= tokens) continue;
                        const u32 b[2] = {x[t].x, x[t].y};
                        ActivationScale of_row[2];
                        // Products begin with what ZERO takes from them.
                        int dots[2][4];
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            const u32 bits = __float_as_uint(i ? raw[t].w : raw[t].y);
                            of_row[i] = {i ? raw[t].z : raw[t].x, {(short)bits, (short)(bits >> 16)}};
                            const int taken[2] = {-W::ZERO * of_row[i].sums[0], -W::ZERO * of_row[i].sums[1]};
#pragma unroll
                            for (int j = 0; j < 2; j++) {
                                dots[0][2 * j + i] = W::HALVES ? taken[0] : taken[0] + taken[1];
                                dots[1][2 * j + i] = W::HALVES ? taken[1] : 0;
                            }
                        }
                        if constexpr (W::HALVES) {
                            mma_codes(dots[0], a[0], a[1], b[0]);
                            mma_codes(dots[1], a[2], a[3], b[1]);
                        } else {
                            mma_codes(dots[0], a, b);
                        }
#pragma unroll
                        for (int i = 0; i < 2; i++)
#pragma unroll
                            for (int j = 0; j < 2; j++) {
                                const float of[2] = {factors[j].x, factors[j].y}, and_of[2] = {factors[j].z, factors[j].w};
                                float &sum = sums[v][t][2 * j + i];
                                sum = add_scaled<W>(sum, dots[0][2 * j + i], dots[1][2 * j + i], of, and_of, of_row[i]);
                            }
                    }
                }
            }
            __syncwarp();
        }
#pragma unroll
        for (int t = 0; t < TOKENS / 8; t++) {
            if (work.first_token + 8 * t >= tokens) break;
            if (t > 0) __syncthreads();
#pragma unroll
            for (int v = 0; v < 4; v++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    *(float2 *)(mine + v * SUM_WORDS + (8 * j + row) * 8 + 2 * quarter) =
                        make_float2(sums[v][t][2 * j], sums[v][t][2 * j + 1]);
            __syncthreads();
            // A lane adds the sums of one of four lanes, for one row of activations. The four are adjacent here.
            const int token = work.first_token + 8 * t + row;
#pragma unroll
            for (int i = 0; i < 8 / SHARING; i++) {
                const int of_tile = part + SHARING * i;
                float both[2];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    float of[SHARING];
#pragma unroll
                    for (int w = 0; w < SHARING; w++)
                        of[w] = __uint_as_float(
                            first_of_tile[w * REGION + quarter * SUM_WORDS + (8 * j + of_tile) * 8 + row]);
#pragma unroll
                    for (int distance = SHARING / 2; distance > 0; distance >>= 1)
#pragma unroll
                        for (int w = 0; w < distance; w++) of[w] += of[w + distance];
                    both[j] = of[0];
#pragma unroll
                    for (int distance = 2; distance > 0; distance >>= 1)
                        both[j] += __shfl_xor_sync(~0u, both[j], distance);
                }
                const int pair = 8 * tile + of_tile;
                if (quarter == 0 && pair < work.count && token < tokens)
                    store_pair(work, pair, token, both[0], both[1], MATVEC_ARGUMENTS);
            }
        }
        __syncthreads();
    }
}
