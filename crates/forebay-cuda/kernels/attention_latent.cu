// Attention over latent rows (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1). All query heads share one row of 576
// elements for each position. The row is the key, and its first 512 elements are the value.
//
// A block takes ROWS query rows, ordered by (token, head), through a share of the context. Of a prompt, they may be of
// several tokens. A generated token shares no block with others, because it may belong to another sequence. Each row it reads serves all
// of them twice, as key and as value. The sums for 64 rows of 512 values fill half the registers of a multiprocessor.
// That decides the rest:
// - Queries stay in shared memory.
// - For scores, the warps split the row of 576, so that few warps read each key.
// - For the softmax, they split the query rows.
// - For the values, they split the columns.
// - Three tiles are loaded or being loaded.
//
// For 16 heads, one token's work is bound by memory. The 1152 bytes of a position serve 2 * 16 * 1088 operations, a
// sixth of what tensor cores do in that time. A separate kernel joins the parts of a context. The sums of 128 parts are
// 4 MB, too much for the one block that ends last.
//
// ROWS is 64, or 16 for generated tokens with up to 16 heads and where shared memory is small.
//
// A row may see chosen positions only. Its tiles are then filled with the rows that a list names, and positions are counted
// through the list.
//
// As in attention_prompt.cu, tiles begin at absolute multiples of KEYS, and a tile that a row does not see changes nothing
// in it.
#include "attention.cuh"
#include "attention_tiles.cuh"

static constexpr int DIM_K = 576, DIM_V = 512;
static constexpr int WARPS = ROWS == 16 ? 4 : 8;
static constexpr int THREADS = WARPS * 32;
// Number of positions of a tile.
static constexpr int KEYS = 32;
// Smallest number of positions that is worth a part of a context.
static constexpr int STEP = 64;
static constexpr int STAGES = 3;
// Slices of a row of 576, each of nine products of 16, and the query rows of a warp while it multiplies keys, in tiles
// of 16.
static constexpr int SLICES = 4, SLICE_STEPS = DIM_K / 16 / SLICES;
static constexpr int KEY_ROWS = ROWS / (WARPS / SLICES), KEY_TILES = KEY_ROWS / 16;
// Query rows of a warp in the softmax, four at a time.
static constexpr int SOFT_ROWS = ROWS / WARPS, SOFT_PASSES = SOFT_ROWS / 4;
// Columns of a warp while it adds values.
static constexpr int COLUMNS = DIM_V / WARPS;
// Strides that put adjacent rows in different banks.
static constexpr int SCORE_STRIDE = KEYS + 4, WEIGHT_STRIDE = KEYS + 8;

// Returns the offset of a piece. A row of queries or of a tile is 72 pieces of eight halves. The pieces are swizzled,
// so that piece n of eight rows lies in eight different banks.
__device__ inline int piece_at(int row, int piece) { return row * DIM_K + ((piece ^ (row & 7)) << 3); }

struct Shared {
    __half queries[ROWS * DIM_K];
    __half tiles[STAGES][KEYS * DIM_K];
    // One plane of partial scores for each slice.
    float scores[SLICES][ROWS * SCORE_STRIDE];
    __half weights[ROWS * WEIGHT_STRIDE];
    // Factor by which the newest tile scales the sums before it; at the end, 1 / (sum of all weights).
    float factors[ROWS];
    // Where the rows of the next two tiles are, if a list names them: 16 times the block's number, plus the row in it.
    u32 listed[2][KEYS];
};

// The blocks of the tile that begins at `first`.
struct TileBlocks {
    u32 low, high;

    __device__ inline TileBlocks(u32 low, u32 high) : low(low), high(high) {}
    __device__ inline TileBlocks(const u32 *table, int first) {
        const uint2 x = *(const uint2 *)(table + first / KV_BLOCK);
        low = x.x, high = x.y;
    }
    template <class T> __device__ inline KvBlock<T> of_row(const KvHead<T> &head, int row) const {
        return head.block(row < KV_BLOCK ? low : high);
    }
    __device__ inline int in_block(int row) const { return row % KV_BLOCK; }
};

// The rows of a tile that a list names.
struct ListedRows {
    const u32 *rows;

    template <class T> __device__ inline KvBlock<T> of_row(const KvHead<T> &head, int row) const {
        return head.block(rows[row] / KV_BLOCK);
    }
    __device__ inline int in_block(int row) const { return (int)(rows[row] % KV_BLOCK); }
};

// Looks up the rows of the tile that begins at entry `first` of a list of `count` positions. Entries behind the end repeat
// the last one.
__device__ inline void look_up(u32 *rows, const u32 *table, const u32 *list, int first, int count) {
    if (threadIdx.x >= KEYS) return;
    const u32 position = list[min(first + (int)threadIdx.x, count - 1)];
    rows[threadIdx.x] = table[position / KV_BLOCK] * KV_BLOCK + position % KV_BLOCK;
}
static_assert(KEYS == 2 * KV_BLOCK, "a tile is two blocks");

// A tile that is being loaded. Halves are copied asynchronously. Other types wait in registers until `finish` converts
// them.
template <class T> struct Fetch {
    static constexpr int PIECES = KEYS * (DIM_K / 8) / THREADS;
    Eight<T> pieces[PIECES];

    // Starts to load the positions from `first` on.
    template <class Blocks>
    __device__ inline void begin(__half *, const KvHead<T> &head, const Blocks &blocks, int, Span) {
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            const int at = threadIdx.x + n * THREADS, row = at / (DIM_K / 8), i = at % (DIM_K / 8) * 8;
            pieces[n].load(blocks.of_row(head, row), blocks.in_block(row), i);
        }
    }
    // Stores the converted tile. Rows outside `seen` become zeroes.
    __device__ inline void finish(__half *tile, int first, Span seen) {
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            const int at = threadIdx.x + n * THREADS, row = at / (DIM_K / 8), piece = at % (DIM_K / 8);
            *(uint4 *)(tile + piece_at(row, piece)) =
                is_in(seen, first + row) ? pieces[n].halves() : make_uint4(0, 0, 0, 0);
        }
    }
};

template <> struct Fetch<KvF16> {
    template <class Blocks>
    __device__ inline void begin(__half *tile, const KvHead<KvF16> &head, const Blocks &blocks, int first, Span seen) {
#pragma unroll
        for (int n = 0; n < KEYS * (DIM_K / 8) / THREADS; n++) {
            const int at = threadIdx.x + n * THREADS, row = at / (DIM_K / 8), piece = at % (DIM_K / 8);
            load_eight_to(tile + piece_at(row, piece), blocks.of_row(head, row), blocks.in_block(row), piece * 8,
                          is_in(seen, first + row));
        }
    }
    __device__ inline void finish(__half *, int, Span) {}
};

static_assert(KEYS * (DIM_K / 8) % THREADS == 0, "every thread brings as many pieces");

// Loads the queries, multiplied by `factor` and rounded to halves. Rows that do not exist are zero.
__device__ inline void load_queries(__half *queries, const float *q, int rows, float factor) {
    for (int at = threadIdx.x; at < ROWS * (DIM_K / 8); at += THREADS) {
        const int row = at / (DIM_K / 8), piece = at % (DIM_K / 8);
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (row < rows) {
            const float4 *const from = (const float4 *)(q + (size_t)row * DIM_K + piece * 8);
            const float4 a = from[0], b = from[1];
            packed = make_uint4(pack(a.x * factor, a.y * factor), pack(a.z * factor, a.w * factor),
                                pack(b.x * factor, b.y * factor), pack(b.z * factor, b.w * factor));
        }
        *(uint4 *)(queries + piece_at(row, piece)) = packed;
    }
}

// Computes this warp's share of the dot products of its query rows with a tile.
__device__ inline void multiply_keys(Shared &shared, const __half *tile) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int slice = warp % SLICES, first_row = warp / SLICES * KEY_ROWS;
    float sums[KEY_TILES][KEYS / 8][4];
#pragma unroll
    for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[t][n][i] = 0.0f;
#pragma unroll
    for (int j = 0; j < SLICE_STEPS; j++) {
        const int piece = (slice * SLICE_STEPS + j) * 2;
        u32 q[KEY_TILES][4];
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
            load_matrices(q[t], shared.queries + piece_at(first_row + t * 16 + lane % 16, piece + lane / 16));
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 k[4];
            load_matrices(k, tile + piece_at(n * 16 + lane / 16 * 8 + lane % 8, piece + lane / 8 % 2));
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) {
                mma(sums[t][2 * n], q[t][0], q[t][1], q[t][2], q[t][3], k[0], k[1]);
                mma(sums[t][2 * n + 1], q[t][0], q[t][1], q[t][2], q[t][3], k[2], k[3]);
            }
        }
    }
    float *const scores = shared.scores[slice];
#pragma unroll
    for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = first_row + t * 16 + lane / 4 + half * 8;
                *(float2 *)(scores + row * SCORE_STRIDE + n * 8 + lane % 4 * 2) =
                    make_float2(sums[t][n][2 * half], sums[t][n][2 * half + 1]);
            }
}

// State of the query row that eight lanes share: the largest score, and the lane's own share of the sum of weights.
struct Running {
    float largest, sum;
};

// Turns the scores of `row` for the positions from `first` on into weights, four in each lane. The row sees the positions
// `seen`.
__device__ inline void weigh(Shared &shared, Running &running, float softcap, int row, int first, Span seen) {
    const int part = threadIdx.x % 8 * 4;
    float4 x = *(const float4 *)(shared.scores[0] + row * SCORE_STRIDE + part);
#pragma unroll
    for (int slice = 1; slice < SLICES; slice++) {
        const float4 y = *(const float4 *)(shared.scores[slice] + row * SCORE_STRIDE + part);
        x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
    float scores[4] = {x.x, x.y, x.z, x.w};
    float largest = running.largest;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (softcap > 0.0f) scores[i] = softcap * LOG2_E * tanh_fast(scores[i]);
        if (!is_in(seen, first + part + i)) scores[i] = -INFINITE;
        largest = fmaxf(largest, scores[i]);
    }
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    // While no position is visible yet, all scores are -inf, and their differences must not become NaN. The factor is
    // exactly 1 if the largest score stays.
    const float finite = fmaxf(largest, LOWEST), base = finite - WEIGHT_SHIFT;
    const float factor = exp2_fast(running.largest - finite);
    running.largest = largest;
#pragma unroll
    for (int i = 0; i < 4; i++) scores[i] = exp2_fast(scores[i] - base);
    running.sum = running.sum * factor + ((scores[0] + scores[1]) + (scores[2] + scores[3]));
    *(uint2 *)(shared.weights + row * WEIGHT_STRIDE + part) =
        make_uint2(pack(scores[0], scores[1]), pack(scores[2], scores[3]));
    if (part == 0) shared.factors[row] = factor;
}

// Sums of all query rows for this warp's columns.
typedef float Values[ROWS / 16][COLUMNS / 8][4];

__device__ inline void add_values(Values &values, const Shared &shared, const __half *tile) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float factors[ROWS / 16][2];
    bool changed = false;
#pragma unroll
    for (int t = 0; t < ROWS / 16; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            factors[t][half] = shared.factors[t * 16 + lane / 4 + half * 8];
            changed |= factors[t][half] != 1.0f;
        }
    // The largest scores are found early, so most tiles change no factor.
    if (__any_sync(~0u, changed)) {
#pragma unroll
        for (int t = 0; t < ROWS / 16; t++)
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) values[t][n][i] *= factors[t][i / 2];
    }
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
        u32 w[ROWS / 16][4];
#pragma unroll
        for (int t = 0; t < ROWS / 16; t++)
            load_matrices(w[t], shared.weights + (t * 16 + lane % 16) * WEIGHT_STRIDE + step * 16 + lane / 16 * 8);
#pragma unroll
        for (int n = 0; n < COLUMNS / 16; n++) {
            u32 v[4];
            const int piece = warp * (COLUMNS / 8) + n * 2 + lane / 16;
            load_matrices_transposed(v, tile + piece_at(step * 16 + lane % 16, piece));
#pragma unroll
            for (int t = 0; t < ROWS / 16; t++) {
                mma(values[t][2 * n], w[t][0], w[t][1], w[t][2], w[t][3], v[0], v[1]);
                mma(values[t][2 * n + 1], w[t][0], w[t][1], w[t][2], w[t][3], v[2], v[3]);
            }
        }
    }
}

// Returns the parts of contexts that are to be joined: `Parts` without tickets, ROWS columns of 512.
__device__ inline Parts parts_of(float *memory, int units, int limit) {
    return Parts(memory, nullptr, units, limit, ROWS, DIM_V);
}

// The query rows of a block.
struct Unit {
    // First row and number of rows, counted through all tokens.
    int first, rows;
    // Row r is at `position + (offset + r) / heads`.
    int position, offset, heads;

    __device__ inline int position_of(int row) const { return position + (offset + row) / heads; }
};

// Returns unit number `unit` of generated tokens, or of tokens with lists of up to `most` positions. Each token has units of its
// own. `most` is 0 if there are no lists.
__device__ inline Unit unit_of(int unit, const u32 *positions, int heads, int most) {
    const int units = (heads + ROWS - 1) / ROWS, token = unit / units, offset = unit % units * ROWS;
    const int position = min((int)positions[token], most > 0 ? most - 1 : 0x7fffffff);
    return Unit{token * heads + offset, min(ROWS, heads - offset), position, offset, heads};
}

// Returns the share `split` of the positions that the query rows of `unit` see.
__device__ inline Span span_of(const Unit &unit, int split, int limit, int context, int window, int &active) {
    const Span all{first_visible(unit.position_of(0), window) / KEYS * KEYS,
                   min(unit.position_of(unit.rows - 1) + 1, context)};
    return share_of(all, split, splits_of(all.to, limit, STEP, 0), KEYS, active);
}

// `lists` [tokens, most] has the positions that each token sees, if LISTED.
template <bool LISTED>
__device__ inline void attend(const float *q, const KvLayer &cache, const float *sinks, float *out, float *memory, int limit,
                              const uint4 *tiles, const u32 *lists, int most, int heads, int context, int window,
                              float scale, float softcap) {
    extern __shared__ __align__(16) char dynamic_shared[];
    Shared &shared = *(Shared *)dynamic_shared;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int unit_index = blockIdx.y;
    Unit unit;
    const u32 *table;
    if (!LISTED && tiles) {
        const PromptTile tile(tiles, unit_index);
        unit = Unit{(int)tile.first, (int)tile.rows, (int)tile.position, (int)tile.first % heads, heads};
        table = cache.table_at(tile.table);
    } else {
        unit = unit_of(unit_index, cache.positions, heads, LISTED ? most : 0);
        table = cache.table(unit.first / heads);
    }
    const int first_row = unit.first, rows = unit.rows;
    int active;
    const Span span = span_of(unit, blockIdx.x, limit, context, window, active);
    if ((int)blockIdx.x >= active) return;
    // Rows before the first visible position may hold anything.
    const Span loaded{max(span.from, first_visible(unit.position_of(0), window)), span.to};
    const KvHead<KvType> keys = cache.keys_of(DIM_K, 0, 1);
    // Tiles after the last one have the blocks of the last one. They are not loaded.
    const int last_tile = (span.to - 1) / KEYS * KEYS;

    const u32 *const list = LISTED ? lists + (size_t)(first_row / heads) * most : nullptr;
    const int count = unit.position + 1;

    Fetch<KvType> fetch;
    if constexpr (LISTED) {
        look_up(shared.listed[0], table, list, span.from, count);
        look_up(shared.listed[1], table, list, span.from + KEYS, count);
        __syncthreads();
    }
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        const int first = span.from + stage * KEYS;
        if constexpr (LISTED)
            fetch.begin(shared.tiles[stage], keys, ListedRows{shared.listed[stage]}, first, loaded);
        else
            fetch.begin(shared.tiles[stage], keys, TileBlocks(table, min(first, last_tile)), first, loaded);
        fetch.finish(shared.tiles[stage], first, loaded);
        commit_tile();
    }
    // The numbers are loaded one tile before their use.
    TileBlocks blocks(0u, 0u);
    if constexpr (LISTED) {
        __syncthreads();  // No thread reads the rows of the first tile any more.
        look_up(shared.listed[0], table, list, span.from + (STAGES - 1) * KEYS, count);
    } else {
        blocks = TileBlocks(table, min(span.from + (STAGES - 1) * KEYS, last_tile));
    }
    load_queries(shared.queries, q + (size_t)first_row * DIM_K, rows,
                 softcap > 0.0f ? scale / softcap : scale * LOG2_E);
    Running running[SOFT_PASSES];
    Span seen[SOFT_PASSES];
#pragma unroll
    for (int pass = 0; pass < SOFT_PASSES; pass++) {
        const int row = warp * SOFT_ROWS + pass * 4 + lane / 8;
        running[pass].largest = -INFINITE;
        running[pass].sum = 0.0f;
        const int own = unit.position_of(min(row, rows - 1));
        // Positions outside the share are not visible.
        seen[pass] = Span{first_visible(own, window), min(own + 1, span.to)};
    }
    Values values;
#pragma unroll
    for (int t = 0; t < ROWS / 16; t++)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[t][n][i] = 0.0f;

    int stage = 0, listed = 0;
    for (int first = span.from; first < span.to; first += KEYS) {
        wait_for_tiles<STAGES - 2>();
        __syncthreads();  // The tile is loaded, and no warp reads the one before any more.
        const int next = first + (STAGES - 1) * KEYS;
        __half *const free = shared.tiles[stage == 0 ? STAGES - 1 : stage - 1];
        if constexpr (LISTED) {
            if (next < span.to) fetch.begin(free, keys, ListedRows{shared.listed[listed]}, next, loaded);
            commit_tile();
            // The other rows were read before the last barrier.
            listed ^= 1;
            look_up(shared.listed[listed], table, list, next + KEYS, count);
        } else {
            if (next < span.to) fetch.begin(free, keys, blocks, next, loaded);
            commit_tile();
            blocks = TileBlocks(table, min(next + KEYS, last_tile));
        }
        const __half *const tile = shared.tiles[stage];
        multiply_keys(shared, tile);
        __syncthreads();  // The scores of all slices are stored.
#pragma unroll
        for (int pass = 0; pass < SOFT_PASSES; pass++)
            weigh(shared, running[pass], softcap, warp * SOFT_ROWS + pass * 4 + lane / 8, first, seen[pass]);
        __syncthreads();  // The weights are stored.
        add_values(values, shared, tile);
        if (next < span.to) fetch.finish(free, next, loaded);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    wait_for_tiles<0>();
    __syncthreads();  // No warp reads the factors any more.

    const bool alone = active == 1;
    const Parts parts = parts_of(memory, gridDim.y, limit);
#pragma unroll
    for (int pass = 0; pass < SOFT_PASSES; pass++) {
        const int row = warp * SOFT_ROWS + pass * 4 + lane / 8;
        float sum = running[pass].sum;
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        const float base = running[pass].largest - WEIGHT_SHIFT;
        if (lane % 8 != 0) continue;
        if (alone) {
            const float sink = sinks ? sinks[(first_row + min(row, rows - 1)) % heads] * LOG2_E : -INFINITE;
            const float largest = fmaxf(base, sink), shrink = exp2_fast(base - largest);
            shared.factors[row] = shrink / (sum * shrink + exp2_fast(sink - largest));
        } else {
            parts.stats[parts.index(unit_index, blockIdx.x, row)] = make_float2(base, sum);
        }
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < ROWS / 16; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = t * 16 + lane / 4 + half * 8;
            if (row >= rows) continue;
            const float factor = alone ? shared.factors[row] : 1.0f;
            float *const to = alone ? out + (size_t)(first_row + row) * DIM_V
                                    : parts.values + parts.index(unit_index, blockIdx.x, row) * DIM_V;
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                *(float2 *)(to + warp * COLUMNS + n * 8 + lane % 4 * 2) =
                    make_float2(values[t][n][2 * half] * factor, values[t][n][2 * half + 1] * factor);
        }
}

// Grid (largest number of splits of a token, units). q [tokens, heads, 576], out [tokens, heads, 512]. The tokens' own
// rows are already in the cache. For prompts, `tiles` gives the rows of each unit, and `limit` is 1. Otherwise `tiles` is null,
// and a token has up to `limit` splits (`splits_of`). `memory` is that of `parts_of`. Results of a token with one part go to
// `out`; for others, `attention_latent_join` must follow.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_latent(const float *q, KV_PARAMETERS, const float *sinks, float *out, float *memory, int limit,
                     const uint4 *tiles, int heads, int context, int window, float scale, float softcap) {
    wait_for_previous();
    attend<false>(q, KvLayer{KV_ARGUMENTS}, sinks, out, memory, limit, tiles, nullptr, 0, heads, context, window, scale,
                  softcap);
}

// Does the same for rows that see the positions of lists [tokens, most]: `most` of them, or as many as there are up to the
// row's own. The rows of a unit are of one token, also for prompts.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention_latent_listed(const float *q, KV_PARAMETERS, const float *sinks, float *out, float *memory, int limit,
                            const u32 *lists, int most, int heads, int context, float scale, float softcap) {
    wait_for_previous();
    attend<true>(q, KvLayer{KV_ARGUMENTS}, sinks, out, memory, limit, nullptr, lists, most, heads, context, 0, scale,
                 softcap);
}

static constexpr int JOIN_WARPS = 8, JOIN_COLUMNS = 128;
// Number of parts that a warp loads at once.
static constexpr int JOIN_BATCH = 8;

// Joins the parts of generated tokens that `attention_latent` computed with the same `limit`, or `attention_latent_listed` with
// the same `most`, which is 0 otherwise. Grid (quarters of 512, tokens * heads). Each warp adds up every eighth part, four columns in each lane.
extern "C" __global__ void __launch_bounds__(JOIN_WARPS * 32)
    attention_latent_join(const u32 *positions, const float *sinks, float *out, float *memory, int limit, int tokens,
                          int heads, int context, int window, int most) {
    wait_for_previous();
    __shared__ float factors[SPLITS_MAX];
    __shared__ float4 sums[JOIN_WARPS][32];
    __shared__ float inverse;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int row = blockIdx.y, head = row % heads, units = (heads + ROWS - 1) / ROWS;
    const int unit = row / heads * units + head / ROWS, column = head % ROWS;
    int active;
    span_of(unit_of(unit, positions, heads, most), 0, limit, context, window, active);
    // A single part has already gone to `out`.
    if (active <= 1) return;
    const Parts parts = parts_of(memory, tokens * units, limit);
    if (warp == 0) {
        const float *const sink = sinks ? sinks + head : nullptr;
        const float x = join_factors(parts, unit, column, active, sink, factors);
        if (lane == 0) inverse = x;
    }
    __syncthreads();
    const int at = blockIdx.x * JOIN_COLUMNS + lane * 4;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = warp; first < active; first += JOIN_BATCH * JOIN_WARPS) {
        float4 x[JOIN_BATCH];
#pragma unroll
        for (int j = 0; j < JOIN_BATCH; j++) {
            const int split = min(first + j * JOIN_WARPS, active - 1);
            x[j] = __ldcg((const float4 *)(parts.values + parts.index(unit, split, column) * DIM_V + at));
        }
#pragma unroll
        for (int j = 0; j < JOIN_BATCH; j++) {
            const int split = first + j * JOIN_WARPS;
            const float factor = split < active ? factors[split] : 0.0f;
            sum = make_float4(sum.x + x[j].x * factor, sum.y + x[j].y * factor, sum.z + x[j].z * factor,
                              sum.w + x[j].w * factor);
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0) return;
#pragma unroll
    for (int other = 1; other < JOIN_WARPS; other++) {
        const float4 x = sums[other][lane];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    *(float4 *)(out + (size_t)row * DIM_V + at) =
        make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse);
}
