// Products of a few tokens with a matrix of blocks: out[t, r] = sum over c of x[t, c] * w[r, c].
//
// Time budget. Weights are read once, at the speed of device memory. That is 20 bytes per clock and multiprocessor on
// an H200 (4.8 TB/s, 132 of them, 1.8 GHz) and 12 on an H100 (3.1 TB/s, 1.96 GHz). A multiprocessor issues four
// instructions for 32 lanes each in a clock, so a byte may cost 6 (H200) or 10 (H100) lane instructions. Measured for
// 14336x4096, start and sums included: Q4_K 5, Q6_K 5, MXFP4 7. A latency of about 800 ns needs 20 KB in flight in each
// multiprocessor. This kernel has 40 to 80 KB in flight; more made it slower.
//
// A launch reads for 10 us only, so its start and end matter: 1 us until the first bytes arrive, 1 us for the last
// sums. Therefore the ring is filled before the kernel waits for the previous one. Where kernels overlap, memory is
// never idle.
//
// Blocks of odd sizes lie at odd addresses, so bytes go through shared memory. Every warp has its own ring of STAGES
// stages, which it fills with 16-byte copies. No barrier is wider than the warp. A stage is one step along the columns
// of a pair of rows. A lane takes one unit of both rows and multiplies both with the same activations. Small matrices,
// and types that are faster that way, are loaded directly to registers: see matvec_direct.cuh.
//
// The order in which the sums of a row are added depends only on the type and the number of columns. It is the same in
// all kernels with 32 lanes for each row. Those with fewer lanes serve rows of less than 2048 columns, for any number of
// tokens. So a token's bits do not depend on the tokens beside it.
#include "matvec_direct.cuh"
#include "matvec_tiles.cuh"
#include "pipeline.cuh"

#define WARPS 4

template <class W> struct Shape {
    static constexpr int RUN = Unit<W>::RUN, GROUPS = W::ELEMENTS / 32, UNITS = GROUPS / RUN;
    static constexpr int SEGMENT = 32 / UNITS * W::BYTES;
    // A segment may begin in the middle of a 16-byte word.
    static constexpr int CHUNKS = (SEGMENT + 16 - W::ALIGN + 15) / 16;
    static constexpr int REGION = CHUNKS * 16;
    static constexpr int STAGE = 2 * REGION;
    static constexpr int FITTING = 28672 / (WARPS * STAGE);
    static constexpr int STAGES = RUN == 2 || FITTING < 2 ? 2 : FITTING > 4 ? 4 : FITTING;
    static constexpr int COPIES = (2 * CHUNKS + 31) / 32;
    // Blocks per multiprocessor, limited so that registers suffice: for one token, for two, and for more.
    static constexpr int BLOCKS = HasRaw<W>::VALUE ? 4 : RUN == 1 ? 6 : W::ALIGN == 16 ? 5 : 4;
    static constexpr int BLOCKS_2 = RUN == 1 ? 6 : 4;
    static constexpr int BLOCKS_4 = RUN == 1 ? 4 : 3;
    // Blocks per multiprocessor, and steps, for kernels that load weights directly to registers.
    static constexpr int DIRECT_BLOCKS = RUN == 2 && W::ALIGN < 16 ? 4 : 6;
    static constexpr int DIRECT_STEPS = RUN == 2 && W::ALIGN == 16 ? 1 : 2;
};

// Sources of a lane's copies, one pair of rows after the other.
template <class W> struct Filling {
    using S = Shape<W>;
    u64 from[S::COPIES];
    int limit[S::COPIES];  // bound of `at`: no bytes to copy from there on
    int pair, at, last;    // `at` counts bytes of a row; the last segment begins at `last`

    // Starts row pair `pair`. If a row does not exist, the last one is copied.
    __device__ __forceinline__ void aim(const RowPairs &work, int lane) {
#pragma unroll
        for (int k = 0; k < S::COPIES; k++) {
            const int i = lane + 32 * k, j = i / S::CHUNKS & 1, chunk = i % S::CHUNKS;
            const int existing = min(pair, j ? work.last[1] : work.last[0]);
            const u64 row = (j ? work.base[1] : work.base[0]) + (u64)(u32)existing * (u32)work.pitch;
            from[k] = row + 16 * chunk;
            limit[k] = (int)work.row_bytes - 16 * chunk;
            if (W::ALIGN < 16) limit[k] += (u32)row + last & 15;
            if (i >= 2 * S::CHUNKS) limit[k] = 0;
        }
        at = 0;
    }

    // Copies the next segment, if there is one.
    __device__ __forceinline__ void step(const RowPairs &work, u32 stage, int lane, int stride) {
        if (pair < work.count) {
#pragma unroll
            for (int k = 0; k < S::COPIES; k++) {
                if (at < limit[k]) copy_async(stage + 16 * lane + 512 * k, W::ALIGN < 16 ? from[k] & ~15ull : from[k]);
                from[k] += S::SEGMENT;
            }
            at += S::SEGMENT;
            if (at > last) {
                pair += stride;
                aim(work, lane);
            }
        }
        copy_commit();
    }
};

template <class W, int TOKENS>
__device__ __forceinline__ void matvec(const i8 *codes, const ActivationScale *scales, MATVEC_PARAMETERS) {
    using S = Shape<W>;
    using U = Unit<W>;
    extern __shared__ uint4 ring[];
    RowPairs work;
    ids = nullptr;  // this kernel never serves experts: their ids are known too late for the early copies
    find_rows<TOKENS>(work, MATVEC_ARGUMENTS);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int groups = cols / 32, stride = gridDim.x * WARPS;
    const u8 *const mine = (const u8 *)ring + warp * S::STAGES * S::STAGE;
    const u32 filled = shared_address(mine);
    int pair = blockIdx.x * WARPS + warp;
    Filling<W> filling;
    filling.pair = pair;
    filling.last = ((int)row_bytes - 1) / S::SEGMENT * S::SEGMENT;
    filling.aim(work, lane);
#pragma unroll 1
    for (int s = 0; s < S::STAGES - 1; s++) filling.step(work, filled + s * S::STAGE, lane, stride);
    wait_for_previous();
    start_next(tokens <= FEW_ROWS);
    if (pair >= work.count) return;

    const int unit = lane % S::UNITS, block = lane / S::UNITS;
    const int first_group = block * S::GROUPS + U::first_of(unit);
    const u8 *own = mine + block * W::BYTES;
    const u8 *const end = own + S::STAGES * S::STAGE;
    u32 to_fill = filled + (S::STAGES - 1) * S::STAGE;
    float sums[2][TOKENS] = {};
    for (; pair < work.count; pair += stride) {
        int at = 0;
        for (int group = first_group; at < (int)row_bytes; group += 32 * U::RUN, at += S::SEGMENT) {
            // The first token's activations load while the stage does.
            Input first[U::RUN];
            if (group < groups) {
#pragma unroll
                for (int r = 0; r < U::RUN; r++)
                    first[r].load(codes, scales, work.first_token, groups, group + r * U::APART);
            }
            copy_wait<S::STAGES - 2>();
            // The stage is loaded for all lanes, and no lane reads the one before it any more.
            __syncwarp();
            filling.step(work, to_fill, lane, stride);
            if (group < groups) {
                Group w[2][U::RUN];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const u8 *region = own + j * S::REGION;
                    if constexpr (W::ALIGN < 16) {
                        region += (u32)(size_t)row_of(work, pair, j) + at & 15;
                    }
                    U::unpack(region, unit, w[j]);
                }
#pragma unroll
                for (int t = 0; t < TOKENS; t++)
#pragma unroll
                    for (int r = 0; r < U::RUN; r++) {
                        // Tokens that do not exist repeat the last one, and are not stored.
                        const int token = min(work.first_token + t, tokens - 1);
                        Input x = first[r];
                        if (t > 0) x.load(codes, scales, token, groups, group + r * U::APART);
#pragma unroll
                        for (int j = 0; j < 2; j++) sums[j][t] = add_dot<W>(sums[j][t], w[j][r], x);
                    }
            }
            to_fill += S::STAGE;
            if (to_fill == filled + S::STAGES * S::STAGE) to_fill = filled;
            own += S::STAGE;
            if (own == end) own -= S::STAGES * S::STAGE;
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float first = warp_sum(sums[0][t]), second = warp_sum(sums[1][t]);
            const int token = work.first_token + t;
            if (lane == 0 && token < tokens) store_pair(work, pair, token, first, second, MATVEC_ARGUMENTS);
            sums[0][t] = sums[1][t] = 0.0f;
        }
    }
}

template <class W>
__device__ __forceinline__ void matvec_one(const i8 *codes, const ActivationScale *scales, MATVEC_PARAMETERS) {
    if constexpr (HasRaw<W>::VALUE) {
        matvec_ahead<W, 2>(codes, scales, MATVEC_ARGUMENTS);
    } else {
        matvec<W, 1>(codes, scales, MATVEC_ARGUMENTS);
    }
}

#define KERNEL(NAME, BLOCKS, MATVEC)                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                           \
        NAME(const i8 *codes, const ActivationScale *scales, MATVEC_PARAMETERS) {                              \
        MATVEC(codes, scales, MATVEC_ARGUMENTS);                                                               \
    }

#define TILE_KERNEL(NAME, MATVEC)                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * TILE_WARPS, 2)                                           \
        NAME(const i8 *codes, const ActivationScale *scales, MATVEC_PARAMETERS) {                              \
        MATVEC(codes, scales, MATVEC_ARGUMENTS);                                                               \
    }

typedef Shape<WEIGHT> S;
// Rows of less than 2048 columns: 32 lanes for each row would be too many.
static constexpr int SHORT_LANES = 8 / S::RUN, SHORT_STEPS = S::RUN == 2 ? 1 : 3;
// One module for one token at once, another for two to four, and a third for more. Most sessions need only the first, so the
// driver need not compile the others.
#ifdef FEW
KERNEL(matvec_2, S::BLOCKS_2, (matvec<WEIGHT, 2>))
KERNEL(matvec_4, S::BLOCKS_4, (matvec<WEIGHT, 4>))
KERNEL(matvec_short_4, 4, (matvec_direct<WEIGHT, SHORT_LANES, SHORT_STEPS, 4>))
#elif defined(MANY)
TILE_KERNEL(matvec_8, (matvec_tiles<WEIGHT, 32, 8>))
TILE_KERNEL(matvec_16, (matvec_tiles<WEIGHT, 32, 16>))
TILE_KERNEL(matvec_32, (matvec_tiles<WEIGHT, 32, 32>))
TILE_KERNEL(matvec_short_8, (matvec_tiles<WEIGHT, SHORT_LANES, 8>))
TILE_KERNEL(matvec_short_16, (matvec_tiles<WEIGHT, SHORT_LANES, 16>))
#else
KERNEL(matvec_1, S::BLOCKS, matvec_one<WEIGHT>)
// Experts, one token each.
KERNEL(matvec_experts, S::DIRECT_BLOCKS, (matvec_direct<WEIGHT, 32, S::DIRECT_STEPS, 1>))
KERNEL(matvec_short, 4, (matvec_direct<WEIGHT, SHORT_LANES, SHORT_STEPS, 1>))
#endif
