// Attention of prompts on tensor cores. A block takes 64 query rows through the keys they see, tile by tile (Dao 2023,
// "FlashAttention-2"). These are 16 rows of four heads that share a key/value head, 32 of two, or 64 of one, so that few
// tokens, too, fill a block. Operands are halves; sums and the softmax are f32.
//
// The bits of a row depend on its own position and sequence alone, wherever the prompt is cut into batches:
// - Tiles begin at absolute multiples of KEYS.
// - A tile that a row does not see changes nothing in the row: its weights are 0, and the factor for the sums is 1.
// - Long contexts are cut into parts, which begin at positions that follow from the row's own (`part_length`). Every part
//   is summed by itself, and then the parts are added from the first to the last.
//
// A pass of many rows has enough tiles for all multiprocessors, and a block takes all parts of its tile. It adds each to
// those before, which it keeps in the output. A pass of few rows has a block for every part, and another kernel adds them.
//
// HEAD_DIM is the capacity for elements of a head: 64, 96, 128 or 256. Shorter heads are padded with zeroes. Heads have an
// even number of elements, which are read and written in pairs.
#include "attention.cuh"
#include "attention_tiles.cuh"
#include "halves.cuh"

static constexpr int WARPS = 4;
// Keys of a tile: as many as let three blocks fit on a multiprocessor.
static constexpr int KEYS = HEAD_DIM > 128 ? 32 : 64;
// Halves from one row of a tile to the next. The padding puts eight rows in different banks.
static constexpr int STRIDE = HEAD_DIM + 8;

// Number of threads of a block.
static constexpr int THREADS = WARPS * 32;

// Blocks of the cache that a warp fetches to the L2 cache before the kernel's inputs are there.
static constexpr int FETCHED_AHEAD = 4;

// Largest number of parts of a context, and the least number of positions of one; the same as in attention.rs.
static constexpr int PARTS_MOST = 8;
static constexpr int PART_LEAST = 256;

// Returns the number of positions of a part of the context of a row at `position`. The host cuts tiles where it changes.
__device__ inline int part_length(int position) {
    const u32 capacity = 1u << (32 - __clz(position));
    return max((int)(capacity / PARTS_MOST), PART_LEAST);
}

// Returns the number of query heads that a block takes, of `group` heads that share a key/value head; the same as in prompts.rs.
__device__ inline int heads_of_block(int group) { return group % 4 == 0 ? 4 : group % 2 == 0 ? 2 : 1; }

// The blocks of a tile.
struct TileBlocks {
    u32 numbers[KEYS / KV_BLOCK];

    // Loads the numbers for the tile that begins at `first`, a multiple of KEYS, with one load.
    __device__ inline TileBlocks(const u32 *table, int first) {
        const u32 *const from = table + first / KV_BLOCK;
        if constexpr (KEYS == 64) {
            const uint4 x = *(const uint4 *)from;
            numbers[0] = x.x, numbers[1] = x.y, numbers[2] = x.z, numbers[3] = x.w;
        } else {
            const uint2 x = *(const uint2 *)from;
            numbers[0] = x.x, numbers[1] = x.y;
        }
    }
};

// Loads positions first .. first + KEYS into `tile`. Elements are zero outside the positions `seen` and beyond the end
// of a head. Halves are copied asynchronously until `wait_for_tiles`; other types are converted at once.
__device__ inline void load_tile(__half *tile, const KvHead<KvType> &head, const TileBlocks &blocks, int first, Span seen) {
    constexpr int EIGHTS = HEAD_DIM / 8, ROWS_AT_ONCE = THREADS / EIGHTS;
    // Hides the thread's number from the compiler, which would otherwise keep the offsets of all rows in registers from tile
    // to tile, and spill others.
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
#pragma unroll
    for (int n = 0; n < KEYS * EIGHTS / THREADS; n++) {
        // Most heads divide the threads evenly, and then a thread's rows are all at the same elements.
        const bool even = THREADS % EIGHTS == 0;
        const u32 at = thread + n * THREADS;
        const int row = even ? thread / EIGHTS + n * ROWS_AT_ONCE : at / EIGHTS;
        const int i = (even ? thread : at) % EIGHTS * 8;
        // All threads load from one block, or from two adjacent ones, so no number is looked up by a variable index.
        const int low = n * THREADS / EIGHTS / KV_BLOCK, high = (n * THREADS + THREADS - 1) / EIGHTS / KV_BLOCK;
        const u32 number = low == high || row < high * KV_BLOCK ? blocks.numbers[low] : blocks.numbers[high];
        const int own = even ? thread / EIGHTS + n * ROWS_AT_ONCE % KV_BLOCK : row % KV_BLOCK;
        const bool there = is_in(seen, first + row) && i < head.stride;
        load_eight_to(tile + row * STRIDE + i, head.block(number), own, there ? i : 0, there);
    }
    commit_tile();
}

static_assert(KEYS * (HEAD_DIM / 8) % THREADS == 0, "every thread loads as many elements");

// State of rows g and g + 8 of the warp's 16, with g = lane / 4.
struct Running {
    float largest[2], sum[2], values[HEAD_DIM / 8][4];
};

// Rules that turn a dot product with the scaled queries into a score.
struct Rule {
    int window;
    float softcap;
};

__device__ inline void multiply_keys(float (&scores)[KEYS / 8][4], const u32 (&q)[HEAD_DIM / 16][4],
                                     const __half *tile) {
    const int lane = threadIdx.x & 31;
    const __half *const from = tile + (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 k[4];
            load_matrices(k, from + n * 16 * STRIDE + step * 16);
            mma(scores[2 * n], q[step][0], q[step][1], q[step][2], q[step][3], k[0], k[1]);
            mma(scores[2 * n + 1], q[step][0], q[step][1], q[step][2], q[step][3], k[2], k[3]);
        }
    }
}

// Turns the scores for the keys from `first` on into weights. Row g is the query at `position`.
__device__ inline void weigh(float (&scores)[KEYS / 8][4], Running &running, const Rule &rule, int first,
                             int position) {
    const int lane = threadIdx.x & 31, warp_position = position - lane / 4;
    if (rule.softcap > 0.0f) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[n][i] = rule.softcap * LOG2_E * tanh_fast(scores[n][i]);
    }
    if (first + KEYS - 1 > warp_position || first < first_visible(warp_position + 15, rule.window)) {
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first + n * 8 + lane % 4 * 2 + i % 2, own = position + i / 2 * 8;
                if (key > own || key < first_visible(own, rule.window)) scores[n][i] = -INFINITE;
            }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float largest = running.largest[r];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            largest = fmaxf(largest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        // While no key is visible yet, all scores are -inf, and their differences must not become NaN. The factor is
        // exactly 1 if the largest score stays.
        const float finite = fmaxf(largest, LOWEST), base = finite - WEIGHT_SHIFT;
        const float factor = exp2_fast(running.largest[r] - finite);
        running.largest[r] = largest;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                scores[n][i] = exp2_fast(scores[n][i] - base);
                sum += scores[n][i];
            }
        running.sum[r] = running.sum[r] * factor + sum;
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++) {
            running.values[n][2 * r] *= factor;
            running.values[n][2 * r + 1] *= factor;
        }
    }
}

__device__ inline void add_values(Running &running, const float (&weights)[KEYS / 8][4], const __half *tile) {
    const int lane = threadIdx.x & 31;
    const __half *const from = tile + lane % 16 * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
        const float(&left)[4] = weights[2 * step], (&right)[4] = weights[2 * step + 1];
        const u32 a0 = pack(left[0], left[1]), a1 = pack(left[2], left[3]);
        const u32 a2 = pack(right[0], right[1]), a3 = pack(right[2], right[3]);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 16; n++) {
            u32 v[4];
            load_matrices_transposed(v, from + step * 16 * STRIDE + n * 16);
            mma(running.values[2 * n], a0, a1, a2, a3, v[0], v[1]);
            mma(running.values[2 * n + 1], a0, a1, a2, a3, v[2], v[3]);
        }
    }
}

__device__ inline void clear(Running &running) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        running.largest[r] = -INFINITE;
        running.sum[r] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) running.values[n][i] = 0.0f;
}

// Adds up the weights that the four lanes of a row have summed.
__device__ inline void finish_sums(Running &running) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        running.sum[r] += __shfl_xor_sync(~0u, running.sum[r], 1);
        running.sum[r] += __shfl_xor_sync(~0u, running.sum[r], 2);
    }
}

// Sums of parts of a row's context that are added up from the first part to the last: the largest score, and the sum of
// weights. Sums of values are scaled alike.
struct Joined {
    float largest, sum;

    // Returns true if the row has seen nothing. The weight of the largest score is not 0.
    __device__ inline bool is_empty() const { return sum == 0.0f; }
};

// The factors that sums so far and those of the next part get.
struct JoinFactors {
    float before, next;

    // Adds a part to `joined`.
    __device__ inline JoinFactors(Joined &joined, const Joined &part) {
        const float largest = fmaxf(joined.largest, part.largest);
        before = exp2_fast(joined.largest - largest);
        next = exp2_fast(part.largest - largest);
        joined = Joined{largest, add(joined.sum, part.sum)};
    }

    __device__ inline float add(float sum, float part) const { return __fmaf_rn(sum, before, __fmul_rn(part, next)); }
};

// Adds `running`, a later part, to what is joined already, whose sums of values are at `row`. A part in which the row sees
// nothing changes nothing.
__device__ inline void join(Running &running, int r, const Joined &joined, const float *row, int dim_v) {
    const Joined part{running.largest[r], running.sum[r]};
    if (joined.is_empty()) return;
    const bool sees = !part.is_empty();
    Joined all = joined;
    const JoinFactors factors(all, part);
    running.largest[r] = sees ? all.largest : joined.largest;
    running.sum[r] = sees ? all.sum : joined.sum;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
        const int at = n * 8 + (threadIdx.x & 3) * 2;
        if (at >= dim_v) continue;
        const float2 before = *(const float2 *)(row + at);
        float &x = running.values[n][2 * r], &y = running.values[n][2 * r + 1];
        x = sees ? factors.add(before.x, x) : before.x;
        y = sees ? factors.add(before.y, y) : before.y;
    }
}

// Returns the factor that turns sums of values into results. A head's sink takes its share of the weights.
__device__ inline float inverse_of(float largest_score, float sum, const float *sinks, int head) {
    const float sink = sinks ? sinks[head] * LOG2_E : -INFINITE;
    const float base = largest_score - WEIGHT_SHIFT, largest = fmaxf(base, sink);
    const float shrink = exp2_fast(base - largest);
    return shrink / __fmaf_rn(sum, shrink, exp2_fast(sink - largest));
}

__device__ inline void scale_values(Running &running, int r, float factor) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
        running.values[n][2 * r] *= factor;
        running.values[n][2 * r + 1] *= factor;
    }
}

// Stores a row's sums of values.
__device__ inline void store_values(const Running &running, int r, float *row, int dim_v) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++) {
        const int at = n * 8 + (threadIdx.x & 3) * 2;
        if (at < dim_v) *(float2 *)(row + at) = make_float2(running.values[n][2 * r], running.values[n][2 * r + 1]);
    }
}

// Sums of parts that blocks of their own have computed, for [tokens, heads] units.
struct PromptParts {
    float *values;  // [units, PARTS_MOST, stride]
    Joined *stats;  // [units, PARTS_MOST]
    int stride;

    __device__ inline PromptParts(float *memory, size_t units, int dim_v) : values(memory), stride((dim_v + 3) / 4 * 4) {
        stats = (Joined *)(memory + units * PARTS_MOST * stride);
    }
};

// Loads two adjacent elements of a query row, scaled. Elements beyond the end of the row, and rows that do not exist,
// are zero.
__device__ inline u32 load_query(const float *row, int i, int dim, bool there, float scale) {
    if (!there || i >= dim) return 0;
    const float2 x = *(const float2 *)(row + i);
    return pack(x.x * scale, x.y * scale);
}

// Grid (tiles, heads / heads of a block). q [tokens, heads, dim_k], out [tokens, heads, dim_v]. A tile has up to
// 64 / (heads of a block) tokens, and all parts of their contexts or one of them. In the second case, the sums go to `memory`
// (PromptParts). The tokens' own keys and values are already in the cache.
extern "C" __global__ void __launch_bounds__(THREADS, HEAD_DIM > 128 ? 2 : 3)
    attention_prompt(const float *q, KV_PARAMETERS, const float *sinks, float *out, const uint4 *tiles, float *memory,
                     int tokens, int heads, int kv_heads, int dim_k, int dim_v, int context, int window,
                     float scale, float softcap) {
    __shared__ __align__(16) __half key_tile[KEYS * STRIDE];
    __shared__ __align__(16) __half value_tile[KEYS * STRIDE];
    const KvLayer cache{KV_ARGUMENTS};
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int group = heads / kv_heads, of_block = heads_of_block(group), warps_of_head = WARPS / of_block;
    const int kv_head_index = blockIdx.y * of_block / group, head = blockIdx.y * of_block + warp / warps_of_head;
    const PromptTile tile(tiles, blockIdx.x);
    const int start = (int)tile.position, rows = (int)tile.rows, length = part_length(start);
    const u32 *const table = cache.table_at(tile.table);
    // The first of the thread's two rows, counted from the first row of the tile.
    const int row = warp % warps_of_head * 16 + lane / 4;
    const KvHead<KvType> keys = cache.keys_of(dim_k, kv_head_index, kv_heads);
    const KvHead<KvType> values = cache.values_of(dim_k, dim_v, kv_head_index, kv_heads);
    const Rule rule{window, softcap};
    const Span all{first_visible(start, window), min(start + rows, context)};
    const Span span = tile.part < 0 ? all
                                    : Span{max(all.from, tile.part * length), min(all.to, (tile.part + 1) * length)};
    if (tile.part >= 0) {
        // A block of a part reads little, in the time of a few latencies. So its first tiles are fetched to the L2 cache while
        // the previous kernel ends.
        const int block = span.from / KV_BLOCK + warp + lane % FETCHED_AHEAD * WARPS;
        const u32 number = table[min(block, max(span.to - 1, 0) / KV_BLOCK)];
#pragma unroll
        for (int i = 0; i < FETCHED_AHEAD; i++) {
            const u32 own = __shfl_sync(~0u, number, i);
            if ((span.from / KV_BLOCK + warp + i * WARPS) * KV_BLOCK >= span.to) continue;
            fetch_ahead(keys, own);
            fetch_ahead(values, own);
        }
    }
    // Tiles, tables and the tokens before were written before the pass's first kernel ended, so they are read before this.
    wait_for_previous();
    if (tile.part >= 0 && span.from >= span.to) return;
    const int last_tile = (span.to - 1) / KEYS * KEYS, first_tile = min(span.from / KEYS * KEYS, last_tile);

    load_tile(key_tile, keys, TileBlocks(table, first_tile), first_tile, span);
    const float factor = softcap > 0.0f ? scale / softcap : scale * LOG2_E;
    // The thread's rows among all rows of heads.
    const u32 first_unit = (tile.first + row) * heads + head;
    const auto unit = [&](int r) { return (size_t)(first_unit + r * 8 * heads); };
    // The parts before this one, whose sums of values are in the output.
    Joined joined[2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};

    for (int first = first_tile; first < span.to;) {
        // Queries are loaded anew for every part, because registers are short where parts are joined.
        u32 queries[HEAD_DIM / 16][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int own = row + j % 2 * 8;
            const float *const from = q + unit(j % 2) * dim_k;
#pragma unroll
            for (int step = 0; step < HEAD_DIM / 16; step++)
                queries[step][j] = load_query(from, step * 16 + j / 2 * 8 + lane % 4 * 2, dim_k, own < rows, factor);
        }
        Running running;
        clear(running);
        const int end = min((first / length + 1) * length, span.to);
        for (; first < end; first += KEYS) {
            const TileBlocks own(table, first);
            wait_for_tiles<0>();
            __syncthreads();  // The keys are loaded, and no warp reads the old values any more.
            load_tile(value_tile, values, own, first, span);
            float scores[KEYS / 8][4];
            multiply_keys(scores, queries, key_tile);
            // Numbers are loaded as late as possible, because registers are short.
            __syncthreads();  // No warp reads the keys any more.
            load_tile(key_tile, keys, TileBlocks(table, min(first + KEYS, (span.to - 1) / KEYS * KEYS)), first + KEYS, span);
            weigh(scores, running, rule, first, start + row);
            wait_for_tiles<1>();
            __syncthreads();  // The values are loaded.
            add_values(running, scores, value_tile);
        }
        finish_sums(running);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (row + r * 8 >= rows) continue;
            float *to = out + unit(r) * dim_v;
            if (tile.part >= 0) {
                const PromptParts parts(memory, (size_t)tokens * heads, dim_v);
                const size_t at = unit(r) * PARTS_MOST + tile.part;
                to = parts.values + at * parts.stride;
                if (lane % 4 == 0) parts.stats[at] = Joined{running.largest[r], running.sum[r]};
            } else {
                join(running, r, joined[r], to, dim_v);
                joined[r] = Joined{running.largest[r], running.sum[r]};
                if (end == span.to)
                    scale_values(running, r, inverse_of(running.largest[r], running.sum[r], sinks, first_unit % heads));
            }
            store_values(running, r, to, dim_v);
        }
    }
    wait_for_tiles<0>();
}

// Threads of a block of `attention_prompt_join`.
static constexpr int JOIN_THREADS = 1024;

// Adds the parts that attention_prompt has left in `memory`. A block takes a token, and each of its warps 128 elements of a head
// at a time. `halves` and `scales`, unless null, receive the results of each token as `narrow_half` writes them. dim_v is then a
// multiple of 4.
extern "C" __global__ void __launch_bounds__(JOIN_THREADS)
    attention_prompt_join(const u32 *positions, const float *sinks, float *out, float *memory, u16 *halves, float *scales,
                          int tokens, int heads, int dim_v, int context, int window) {
    const int token = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const PromptParts parts(memory, (size_t)tokens * heads, dim_v);
    const int position = (int)positions[token], length = part_length(position);
    const int from = first_visible(position, window) / length, to = min(position, context - 1) / length;
    constexpr int IN_HEAD = (HEAD_DIM + 127) / 128;
    wait_for_previous();
    int largest = 0;
    float values[4];
    for (int item = warp; item < heads * IN_HEAD; item += JOIN_THREADS / 32) {
        const int head = item / IN_HEAD, first = item % IN_HEAD * 128 + lane * 4;
        const size_t unit = (size_t)token * heads + head, parts_of = unit * PARTS_MOST;
        // All loads are issued before the first sum. Each lane loads the sums of one part.
        const bool has_stats = lane >= from && lane <= to && lane < PARTS_MOST;
        const Joined own = has_stats ? parts.stats[parts_of + lane] : Joined{0.0f, 0.0f};
        float4 loaded[PARTS_MOST];
#pragma unroll
        for (int part = 0; part < PARTS_MOST; part++)
            if (part >= from && part <= to && first < parts.stride)
                loaded[part] = *(const float4 *)(parts.values + (parts_of + part) * parts.stride + first);
        Joined joined{0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = 0.0f;
#pragma unroll
        for (int part = 0; part < PARTS_MOST; part++) {
            if (part < from || part > to) continue;
            const Joined next{__shfl_sync(~0u, own.largest, part), __shfl_sync(~0u, own.sum, part)};
            const float4 x = loaded[part];
            const float added[4] = {x.x, x.y, x.z, x.w};
            const bool begins = part == from;
            Joined all = joined;
            const JoinFactors factors(all, next);
            joined = begins ? next : all;
#pragma unroll
            for (int i = 0; i < 4; i++) values[i] = begins ? added[i] : factors.add(values[i], added[i]);
        }
        const float inverse = inverse_of(joined.largest, joined.sum, sinks, head);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (first + i >= dim_v) continue;
            values[i] *= inverse;
            out[unit * dim_v + first + i] = values[i];
            largest = larger_bits(largest, values[i]);
        }
    }
    if (!halves) return;
    float scale;
    const float factor = half_row_factor(block_largest(largest), scale);
    const bool is_kept = heads * IN_HEAD <= JOIN_THREADS / 32;
    for (int item = warp; item < heads * IN_HEAD; item += JOIN_THREADS / 32) {
        const int at = item % IN_HEAD * 128 + lane * 4;
        const size_t first = ((size_t)token * heads + item / IN_HEAD) * dim_v + at;
        if (at >= dim_v) continue;
        float4 x = make_float4(values[0], values[1], values[2], values[3]);
        // A thread reads only elements that it has written itself.
        if (!is_kept) x = *(const float4 *)(out + first);
        *(uint2 *)(halves + first) = four_halves(x, factor);
    }
    if (threadIdx.x == 0) scales[token] = scale;
}
