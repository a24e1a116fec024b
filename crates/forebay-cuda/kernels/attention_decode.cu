// Attention of generated tokens. Each token of the pass is a unit of its own, with its own position and table, so the
// tokens may belong to different sequences. Its context is read once, by warps that are independent of each other until
// the end.
//
// A block processes eight query heads of a token that share a key/value head. Scores are queries times keys. The 16
// rows of the query operand are the eight heads rounded to halves and their eight rounding errors. The sums are computed
// transposed, as values times weights, because a score is then already in the lane that needs its weight. Fragments are
// loaded directly from global memory. The order of a sum's terms does not matter, so each lane takes 8 adjacent
// elements where the instruction expects 2 and 2. Weights are also split into two halves. That gives f32 accuracy at
// little cost, because memory is the limit.
//
// A tile is one block of the cache. A warp looks up the numbers of 32 of its tiles at once. Its first tiles are fetched to
// the L2 cache before the kernel waits for the projections, because short contexts are read in the time of a few latencies.
//
// If all tokens belong to different sequences, the kernel can take the raw projections. Every block finishes the queries
// that it needs by itself. The block that has the token's own position also finishes and stores key and value first. That
// costs less than another launch. Several tokens of one sequence need `attention_inputs` before, because each of them
// reads the keys of those before it.
//
// HEAD_DIM is the capacity for elements of a head: 64, 96, 128 or 256.
#include "activation.cuh"
#include "attention.cuh"
#include "attention_mma.cuh"
#include "head_inputs.cuh"

static constexpr int WARPS = 4;
static constexpr int COLUMNS = 8;
static constexpr int TILE = KV_BLOCK;
// Positions that a block processes at once. A part of a context is worth at least as many.
static constexpr int STEP = WARPS * TILE;
// Contexts of up to this many positions are not cut, because joining the parts takes longer than a few steps.
static constexpr int ALONE = 256;
// Tiles of a warp that are fetched to the L2 cache before the kernel's inputs are there.
static constexpr int FETCHED_AHEAD = 4;
static constexpr int KEY_CHUNKS = (HEAD_DIM + 31) / 32;
static constexpr int VALUE_CHUNKS = (HEAD_DIM + 63) / 64;
static constexpr int PART_STRIDE = VALUE_CHUNKS * 64 + 2;

// Queries as operand fragments, [chunk of 32 elements][half of it][lane]: rounded values and rounding errors alternate.
typedef uint4 Queries[KEY_CHUNKS][2][32];

// Loads the queries. `row_at(column)` returns the row [dim_k] of a column that exists.
template <class F>
__device__ inline void load_queries(Queries &queries, F row_at, int dim_k, int columns) {
    for (int at = threadIdx.x; at < KEY_CHUNKS * 64; at += WARPS * 32) {
        const int chunk = at / 64, half = at / 32 % 2, lane = at % 32;
        const int column = lane / 4, first = chunk * 32 + lane % 4 * 8 + half * 4;
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (column < columns) {
            const float *from = row_at(column);
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (first + j < dim_k) x[j] = from[first + j];
        }
        const u32 low = pack(x[0], x[1]), high = pack(x[2], x[3]);
        queries[chunk][half][lane] =
            make_uint4(low, pack_rest(x[0], x[1], low), high, pack_rest(x[2], x[3], high));
    }
}

// The tokens' raw projections and the parameters of `attention_inputs` that finish them. If `k` is null, that kernel
// has already run.
struct Inputs {
    const float *k, *v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *angles;
    int rotary_dim, rotary_from, interleaved;
    float eps;
    int norm_last, mixed;
};

// Rows of `memory` while inputs are finished: queries, key, value, both norms, and angles.
enum InputRow { KEY = COLUMNS, VALUE, QUERY_NORM, KEY_NORM, ANGLES, INPUT_ROWS };

// Loads the projections of one kv head and of `columns` query heads into shared memory. `first_head` is the first of
// these among the heads of all tokens, and `kv_head` is counted in the same way. `head` and `kv` are their numbers
// within the token. Then finishes the queries and the key. All loads are issued at once, so they cost one latency.
__device__ inline void finish_inputs(float *memory, const float *q, const Inputs &in, int dim_k, int dim_v,
                                     size_t first_head, int head, int columns, size_t kv_head, int kv, int position) {
    for (int at = threadIdx.x; at < INPUT_ROWS * HEAD_DIM; at += WARPS * 32) {
        const int row = at / HEAD_DIM, i = at % HEAD_DIM;
        const float *from = nullptr, *bias = nullptr;
        int dim = dim_k;
        if (row < COLUMNS) {
            if (row < columns) from = q + (first_head + row) * dim_k;
            if (in.q_bias) bias = in.q_bias + (head + row) * dim_k;
        } else if (row == KEY) {
            from = in.k + kv_head * dim_k;
            if (in.k_bias) bias = in.k_bias + kv * dim_k;
        } else if (row == VALUE) {
            dim = dim_v;
            from = in.v + kv_head * dim_v;
            if (in.v_bias) bias = in.v_bias + kv * dim_v;
        } else if (row == ANGLES) {
            dim = in.rotary_dim;
            if (in.angles) from = in.angles + (size_t)position * in.rotary_dim;
        } else {
            from = row == QUERY_NORM ? in.q_norm : in.k_norm;
        }
        if (from && i < dim) memory[at] = bias ? from[i] + bias[i] : from[i];
    }
    __syncthreads();
    const float *angles = in.angles ? memory + ANGLES * HEAD_DIM : nullptr;
    const HeadRules rules{angles, in.rotary_dim, in.rotary_from, in.interleaved, in.eps, in.norm_last};
    for (int row = threadIdx.x >> 5; row <= VALUE; row += WARPS) {
        if (row == VALUE) mix_head(memory + row * HEAD_DIM, dim_v, in.mixed);
        if (row >= columns && row != KEY) continue;
        const int norm = row == KEY ? KEY_NORM : QUERY_NORM;
        const bool normed = (row == KEY ? in.k_norm : in.q_norm) != nullptr;
        finish_head(memory + row * HEAD_DIM, dim_k, normed ? memory + norm * HEAD_DIM : nullptr, true, rules);
        mix_head(memory + row * HEAD_DIM, dim_k, in.mixed);
    }
    __syncthreads();
}

// Running sums of a lane, with g = lane / 4 and p = 2 (lane % 4). For query row g: the largest score and the lane's own
// share of the sum of weights. For query rows p and p + 1: elements 8g + 2t and 8g + 2t + 1, where t is the tile within
// a chunk of 64.
struct Running {
    float largest, sum;
    float values[VALUE_CHUNKS * 4][4];
};

// The tiles of a token, as a lane sees them.
struct Tiles {
    KvHead<KvType> keys, values;
    // Positions that the token sees of a split.
    Span seen;
    // First element of each chunk. Chunks beyond the end of a row repeat its last elements: queries are 0 there, and
    // those values are discarded.
    int key_at[KEY_CHUNKS], value_at[VALUE_CHUNKS];

    __device__ inline Tiles(const KvHead<KvType> &keys, const KvHead<KvType> &values, Span seen)
        : keys(keys), values(values), seen(seen) {
        const int lane = threadIdx.x & 31;
#pragma unroll
        for (int chunk = 0; chunk < KEY_CHUNKS; chunk++)
            key_at[chunk] = min(chunk * 32 + lane % 4 * 8, keys.stride - 8);
#pragma unroll
        for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++)
            value_at[chunk] = min(chunk * 64 + lane / 4 * 8, values.stride - 8);
    }

    // Returns row i of the tile that begins at `first`. Rows before and after what is seen repeat the nearest row that
    // is, because theirs may hold anything; their weights are 0. Of a tile after the last one, any row will do: the
    // number of rows left is then negative, and large without its sign.
    __device__ inline int row(int i, int first) const {
        return (int)min((u32)max(i, seen.from - first), (u32)(seen.to - 1 - first));
    }

    // Loads keys g and g + 8 of the tile that begins at `first` and is block `number` of the pool.
    __device__ inline void load_keys(Eight<KvType> (&k)[KEY_CHUNKS][2], u32 number, int first) const {
        const int g = (threadIdx.x & 31) / 4;
        const KvBlock<KvType> block = keys.block(number);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int chunk = 0; chunk < KEY_CHUNKS; chunk++)
                k[chunk][half].load(block, row(g + 8 * half, first), key_at[chunk]);
    }

    // Loads values p, p + 1, p + 8 and p + 9.
    __device__ inline void load_values(Eight<KvType> (&v)[VALUE_CHUNKS][4], u32 number, int first) const {
        const int p = threadIdx.x % 4 * 2;
        const KvBlock<KvType> block = values.block(number);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++)
                v[chunk][j].load(block, row(p + (j & 1) + 8 * (j >> 1), first), value_at[chunk]);
    }
};

// The blocks of the tiles of a warp, which are STEP positions apart. Each lane has the number of one of 32 tiles.
struct WarpBlocks {
    const u32 *table;
    // Tiles after the last block repeat it.
    int last_block;
    u32 number;

    // Looks up 32 tiles, the first of which begins at position `first`. All lanes must call this.
    __device__ inline void look_up(int first) {
        const int lane = threadIdx.x & 31;
        number = load_now(table + min(first / TILE + lane * WARPS, last_block));
    }

    // Returns the block of tile `index` of the 32. All lanes must call this.
    __device__ inline u32 at(int index) const { return __shfl_sync(~0u, number, index); }
};

// Computes the dot products of query row g with keys p, p + 1, p + 8 and p + 9.
__device__ inline void multiply_keys(float (&dots)[4], const Queries &queries,
                                     const Eight<KvType> (&k)[KEY_CHUNKS][2]) {
    // Four separate sums shorten the chain of dependent products.
    float sums[2][2][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < KEY_CHUNKS; chunk++) {
        const uint4 left = queries[chunk][0][threadIdx.x & 31], right = queries[chunk][1][threadIdx.x & 31];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint4 key = k[chunk][half].halves();
            mma(sums[half][0], left.x, left.y, left.z, left.w, key.x, key.y);
            mma(sums[half][1], right.x, right.y, right.z, right.w, key.z, key.w);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            dots[2 * half + i] = (sums[half][0][i] + sums[half][1][i]) +
                                 (sums[half][0][i + 2] + sums[half][1][i + 2]);
}

// Turns the dot products of the sixteen positions from `first` on into weights, and adds the weighted values. Positions
// outside `seen` get no weight.
__device__ inline void add_tile(Running &running, float (&scores)[4],
                                const Eight<KvType> (&v)[VALUE_CHUNKS][4], const AttentionShape &shape,
                                int first, Span seen) {
    const int p = threadIdx.x % 4 * 2;
    if (shape.softcap > 0.0f) {
        const float inner = shape.scale / shape.softcap, outer = shape.softcap * LOG2_E;
#pragma unroll
        for (int i = 0; i < 4; i++) scores[i] = outer * tanh_fast(scores[i] * inner);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) scores[i] *= shape.scale * LOG2_E;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int position = first + p + i % 2 + 8 * (i / 2);
        if (!is_in(seen, position)) scores[i] = -INFINITE;
    }
    float largest = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    largest = fmaxf(largest, running.largest);
    const float own_factor = weight(running.largest, largest);
    running.largest = largest;
#pragma unroll
    for (int i = 0; i < 4; i++) scores[i] = weight(scores[i], largest - WEIGHT_SHIFT);
    running.sum = running.sum * own_factor + ((scores[0] + scores[1]) + (scores[2] + scores[3]));
    // The lanes from 4p on hold row p.
    const float factors[2] = {__shfl_sync(~0u, own_factor, p * 4), __shfl_sync(~0u, own_factor, p * 4 + 4)};
    const u32 near = pack(scores[0], scores[1]), far = pack(scores[2], scores[3]);
    const u32 near_rest = pack_rest(scores[0], scores[1], near);
    const u32 far_rest = pack_rest(scores[2], scores[3], far);
#pragma unroll
    for (int chunk = 0; chunk < VALUE_CHUNKS; chunk++) {
        uint4 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = v[chunk][j].halves();
#pragma unroll
        for (int t = 0; t < 4; t++) {
            float(&sums)[4] = running.values[chunk * 4 + t];
            u32 rows[4];
#pragma unroll
            for (int j = 0; j < 4; j++) rows[j] = (&x[j].x)[t];
            const u32 a0 = __byte_perm(rows[0], rows[1], 0x5410), a1 = __byte_perm(rows[0], rows[1], 0x7632);
            const u32 a2 = __byte_perm(rows[2], rows[3], 0x5410), a3 = __byte_perm(rows[2], rows[3], 0x7632);
#pragma unroll
            for (int i = 0; i < 4; i++) sums[i] *= factors[i % 2];
            mma(sums, a0, a1, a2, a3, near_rest, far_rest);
            mma(sums, a0, a1, a2, a3, near, far);
        }
    }
}

// Shared memory in which the warps of a block leave their results. Later it holds the factors of the splits.
struct Shared {
    float values[WARPS][COLUMNS][PART_STRIDE];
    float largest[WARPS][COLUMNS], sum[WARPS][COLUMNS];
};

static_assert(INPUT_ROWS * HEAD_DIM <= WARPS * COLUMNS * PART_STRIDE, "inputs are finished where values are left later");

__device__ inline void leave(Shared &shared, const Running &running) {
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) / 4, p = threadIdx.x % 4 * 2;
    float sum = running.sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (p == 0) {
        shared.largest[warp][g] = running.largest - WEIGHT_SHIFT;
        shared.sum[warp][g] = sum;
    }
#pragma unroll
    for (int c = 0; c < 2; c++)
#pragma unroll
        for (int t = 0; t < VALUE_CHUNKS * 4; t++)
            *(float2 *)&shared.values[warp][p + c][t / 4 * 64 + g * 8 + t % 4 * 2] =
                make_float2(running.values[t][c], running.values[t][c + 2]);
}

// Joins the warps' parts of `column`. Returns elements i and i + 1, and sets the column's `stats`.
__device__ inline float2 join_warps(const Shared &shared, int column, int i, float2 &stats) {
    float largest = -INFINITE;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) largest = fmaxf(largest, shared.largest[warp][column]);
    float sum = 0.0f;
    float2 values = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        const float factor = weight(shared.largest[warp][column], largest);
        const float2 x = *(const float2 *)&shared.values[warp][column][i];
        sum += shared.sum[warp][column] * factor;
        values.x += x.x * factor;
        values.y += x.y * factor;
    }
    stats = make_float2(largest, sum);
    return values;
}

// Destination of the results.
struct Output {
    float *rows;  // [tokens, heads, dim_v]
    // The same values, rounded, if not null. dim_v is then a multiple of 32.
    i8 *codes;
    ActivationScale *scales;

    // Stores elements at .. at + 3 of a token's head. All lanes must call this; nothing is stored if `there` is false.
    __device__ inline void store(float4 x, bool there, int token, int head, int at, const AttentionShape &shape) const {
        if (there) {
            float *to = rows + ((size_t)token * shape.heads + head) * shape.dim_v + at;
            const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (at + j < shape.dim_v) to[j] = values[j];
        }
        if (codes)
            round_quad(x, there, token, head * shape.dim_v + at, shape.heads * shape.dim_v, codes, scales);
    }
};

// Grid (largest number of splits of a token, tokens * kv_heads * chunks of 8 query heads). q [tokens, heads, dim_k]. A
// token has up to `limit` splits (`splits_of`), and `memory` is that of Parts for `limit` splits, with stride `dim_v`
// rounded up to 4.
extern "C" __global__ void __launch_bounds__(WARPS * 32, HEAD_DIM > 128 ? 2 : 3)
    attention_decode(const float *q, KV_PARAMETERS, const float *sinks, float *out, float *memory, u32 *tickets,
                     int limit, int heads, int kv_heads, int dim_k, int dim_v, int context, int window, float scale,
                     float softcap, i8 *codes, ActivationScale *scales, const float *k_input, const float *v_input,
                     const float *q_bias, const float *k_bias, const float *v_bias, const float *q_norm,
                     const float *k_norm, const float *angles, int rotary_dim, int rotary_from, int interleaved,
                     float eps, int norm_last, int mixed) {
    __shared__ Queries queries;
    __shared__ __align__(16) Shared shared;
    const KvLayer cache{KV_ARGUMENTS};
    const AttentionShape shape{heads, kv_heads, dim_k, dim_v, context, window, scale, softcap};
    const Inputs inputs{k_input, v_input, q_bias,     k_bias,      v_bias,      q_norm,
                        k_norm,  angles,  rotary_dim, rotary_from, interleaved, eps,
                        norm_last, mixed};
    const Output output{out, codes, scales};
    const int group = heads / kv_heads, chunks = (group + COLUMNS - 1) / COLUMNS;
    const int unit = blockIdx.y, token = unit / (kv_heads * chunks), kv_head_index = unit / chunks % kv_heads;
    const int first_column = unit % chunks * COLUMNS, first_head = kv_head_index * group + first_column;
    const int own_columns = min(COLUMNS, group - first_column);
    const int position = (int)positions[token];
    const u32 *const table = cache.table(token);
    const Span all = span_of_token(position, window, context, TILE);
    const int splits = splits_of(all.to, limit, STEP, ALONE);
    int active;
    const Span span = share_of(all, blockIdx.x, splits, STEP, active);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int first = span.from + warp * TILE;
    const KvHead<KvType> keys = cache.keys_of(dim_k, kv_head_index, kv_heads);
    const KvHead<KvType> values = cache.values_of(dim_k, dim_v, kv_head_index, kv_heads);
    // A part that is not active lies behind the positions of the row, but in the table.
    WarpBlocks blocks{table, min(max(span.to - 1, 0), context - 1) / TILE};
    blocks.look_up(first);
#pragma unroll
    for (int tile = 0; tile < FETCHED_AHEAD; tile++) {
        const u32 number = blocks.at(tile);
        if (first + tile * STEP >= span.to) continue;
        fetch_ahead(keys, number);
        fetch_ahead(values, number);
    }
    // Positions, tables and the tokens before were written before the pass's first kernel ended, so they are read before
    // this.
    wait_for_previous();
    start_next(gridDim.y <= FEW_ROWS * kv_heads * chunks);
    if ((int)blockIdx.x >= active) return;

    if (k_input) {
        float *inputs_at = &shared.values[0][0][0];
        finish_inputs(inputs_at, q, inputs, dim_k, dim_v, (size_t)token * heads + first_head, first_head, own_columns,
                      (size_t)token * kv_heads + kv_head_index, kv_head_index, position);
        load_queries(queries, [=](int column) { return inputs_at + column * HEAD_DIM; }, dim_k, own_columns);
        // Blocks with the same kv head and the same split store the same bytes.
        if ((int)blockIdx.x == active - 1 && position < context && warp < 2) {
            const u32 own = table[position / KV_BLOCK];
            const int at = position % KV_BLOCK;
            if (own != 0 && warp == 0) store_row(keys.block(own), at, inputs_at + KEY * HEAD_DIM, dim_k, lane);
            if (own != 0 && warp == 1) store_row(values.block(own), at, inputs_at + VALUE * HEAD_DIM, dim_v, lane);
        }
    } else {
        const float *const from = q + ((size_t)token * heads + first_head) * dim_k;
        load_queries(queries, [=](int column) { return from + column * dim_k; }, dim_k, own_columns);
    }
    __syncthreads();
    const Tiles tiles(keys, values, Span{max(span.from, first_visible(position, window)), span.to});
    Running running;
    running.largest = -INFINITE;
    running.sum = 0.0f;
#pragma unroll
    for (int t = 0; t < VALUE_CHUNKS * 4; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) running.values[t][i] = 0.0f;
    Eight<KvType> k[KEY_CHUNKS][2];
    u32 block = blocks.at(0);
    if (first < span.to) tiles.load_keys(k, block, first);
    for (int tile = 1; first < span.to; first += STEP, tile++) {
        Eight<KvType> v[VALUE_CHUNKS][4];
        tiles.load_values(v, block, first);
        if (tile % 32 == 0) blocks.look_up(first + STEP);
        block = blocks.at(tile % 32);
        float scores[4];
        multiply_keys(scores, queries, k);
        // Loads the next tile's keys while this tile is processed. After the last tile they are not used.
        tiles.load_keys(k, block, first + STEP);
        add_tile(running, scores, v, shape, first, tiles.seen);
    }
    leave(shared, running);
    __syncthreads();

    const int stride = (dim_v + 3) / 4 * 4, quads = stride / 4;
    if (active == 1) {
        // There is no other part to join with.
        for (int base = 0; base < COLUMNS * quads; base += WARPS * 32) {
            const int i = base + threadIdx.x, column = min(i / quads, COLUMNS - 1), at = i % quads * 4;
            const bool there = i < COLUMNS * quads && column < own_columns;
            const int head = first_head + min(column, own_columns - 1);
            float2 stats;
            const float2 low = join_warps(shared, column, at, stats), high = join_warps(shared, column, at + 2, stats);
            float factor = 1.0f, sum = stats.y;
            if (sinks) {
                const float sink = sinks[head] * LOG2_E, largest = fmaxf(stats.x, sink);
                factor = weight(stats.x, largest);
                sum = sum * factor + weight(sink, largest);
            }
            factor /= sum;
            output.store(make_float4(low.x * factor, low.y * factor, high.x * factor, high.y * factor), there, token,
                         head, at, shape);
        }
        return;
    }
    const Parts parts(memory, tickets, gridDim.y, limit, COLUMNS, stride);
    const int pairs = stride / 2;
    for (int i = threadIdx.x; i < COLUMNS * pairs; i += WARPS * 32) {
        const int column = i / pairs, at = i % pairs * 2;
        float2 stats;
        const float2 x = join_warps(shared, column, at, stats);
        const size_t index = parts.index(unit, blockIdx.x, column);
        *(float2 *)(parts.values + index * stride + at) = x;
        if (at == 0) parts.stats[index] = stats;
    }
    if (!is_last(parts, unit, active)) return;

    float(*factors)[SPLITS_MAX] = (float(*)[SPLITS_MAX])shared.values;
    float *inverse = &shared.sum[0][0];
    for (int column = warp; column < own_columns; column += WARPS) {
        const float *sink = sinks ? sinks + first_head + column : nullptr;
        const float x = join_factors(parts, unit, column, active, sink, factors[column]);
        if (lane == 0) inverse[column] = x;
    }
    __syncthreads();
    for (int base = 0; base < own_columns * quads; base += WARPS * 32) {
        const int i = base + threadIdx.x, column = min(i / quads, own_columns - 1), at = i % quads * 4;
        const float4 sum = join_values(parts, unit, column, active, at, factors[column]);
        const float factor = inverse[column];
        output.store(make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor),
                     i < own_columns * quads, token, first_head + column, at, shape);
    }
}
