// Attention whose heads share one key of each position, which is its value too, over a window and compressed entries in one
// softmax (DeepSeek-AI 2026, "DeepSeek-V4"). The output is rotated back at the row's position.
//
// A row sees a list: the positions of its window, then entries, all that end at its position or before it, or chosen ones. A
// block takes up to HEADS heads of one row through a share of the list. Tiles of KEYS rows of the cache lie in shared memory as
// f32, and the next one waits in registers. For scores, a thread has one head and one key. For values, it has pairs of columns
// of all heads. All is f32.
#include "attention.cuh"
#include "entries.cuh"
#include "load_eight.cuh"

static constexpr int THREADS = 256, HEADS = 16, KEYS = 16;
static_assert(HEADS * KEYS == THREADS, "a thread computes one score of a tile");
// Smallest number of keys that is worth a part of the list.
static constexpr int STEP = 64;

// What a row sees.
struct List {
    int first, window, count;
    const u32 *chosen;

    __device__ inline List(int position, int length, int span, const u32 *lists, int most, int row) {
        first = max(0, position + 1 - length);
        window = position + 1 - first;
        const int entries = span > 0 ? (position + 1) / span : 0;
        chosen = lists ? lists + (size_t)row * most : nullptr;
        count = window + (lists ? min(entries, most) : entries);
    }
};

// Number of parts into which a row's list is cut, and the length of each. They follow from the row alone.
struct Share {
    int length, parts;

    __device__ inline Share(int count, int limit) {
        const int most = max(1, min(limit, count / STEP));
        length = ((count + most - 1) / most + KEYS - 1) / KEYS * KEYS;
        parts = (count + length - 1) / length;
    }
};

// Rotates pairs of elements of a row back. `i` is that of the first of `N` elements.
template <int N>
__device__ inline void turn_back(float (&x)[N], int i, int dim, const float *angles, int rotary_dim) {
    const int pairs = rotary_dim / 2;
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        const int pair = (i + n - (dim - rotary_dim)) / 2;
        if (i + n < dim - rotary_dim) continue;
        const float a = x[n], b = x[n + 1], c = angles[pair], s = -angles[pairs + pair];
        x[n] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
        x[n + 1] = __fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c));
    }
}

template <int DIM> struct Shared {
    static constexpr int STRIDE = DIM + 4;  // puts the keys of a tile in different banks
    float queries[HEADS * STRIDE];
    float keys[KEYS * STRIDE];
    // Weights [keys, heads], so that four heads are one load.
    float weights[KEYS * HEADS];
    float factors[HEADS];
    float joined[SPLITS_MAX];
    float inverse[HEADS];
};

// Rows of a tile on their way to shared memory.
template <int DIM> struct Fetch {
    static constexpr int PIECES = KEYS * (DIM / 8) / THREADS > 0 ? KEYS * (DIM / 8) / THREADS : 1;
    float x[PIECES][8];

    // Starts to load the keys with the numbers from `from` on. Those from `to` on repeat the last one.
    __device__ inline void begin(const KvHead<KvType> &keys, const KvHead<KvType> &entries, const List &list,
                                 const u32 *table, const u32 *entry_table, int span, int from, int to) {
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            const int at = threadIdx.x + n * THREADS, i = at % (DIM / 8) * 8;
            const int number = min(from + min(at / (DIM / 8), KEYS - 1), to - 1);
            KvBlock<KvType> block;
            int row;
            if (number < list.window) {
                const int position = list.first + number;
                block = keys.block(table[position / KV_BLOCK]);
                row = position % KV_BLOCK;
            } else {
                const int entry = number - list.window;
                const SpannedRow place(list.chosen ? (int)list.chosen[entry] : entry, span);
                block = entries.block(entry_table[place.index]);
                row = place.row;
            }
            if (i < block.stride) {
                load_eight(x[n], block, row, i);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) x[n][j] = 0.0f;
            }
        }
    }

    __device__ inline void finish(float *to) const {
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            const int at = threadIdx.x + n * THREADS, row = at / (DIM / 8), i = at % (DIM / 8) * 8;
            if (row >= KEYS) continue;
            float4 *const out = (float4 *)(to + row * Shared<DIM>::STRIDE + i);
            out[0] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
            out[1] = make_float4(x[n][4], x[n][5], x[n][6], x[n][7]);
        }
    }
};

// Sizes and rules of a call.
struct Call {
    int limit, heads, dim, context, window, rotary_dim;
    float scale;
    const u32 *lists;
    int most;
};

template <int DIM>
__device__ inline void attend(const float *q, const KvLayer &cache, const SpannedLayer &spanned, const float *sinks, float *out,
                              float *memory, u32 *tickets, const float *angles, const Call &of) {
    extern __shared__ __align__(16) char dynamic_shared[];
    Shared<DIM> &shared = *(Shared<DIM> *)dynamic_shared;
    constexpr int STRIDE = Shared<DIM>::STRIDE;
    // Pairs of columns of a thread.
    constexpr int PAIRS = DIM / (2 * THREADS) > 0 ? DIM / (2 * THREADS) : 1;
    const int token = blockIdx.z, first_head = blockIdx.y * HEADS, members = min(HEADS, of.heads - first_head);
    const int position = min((int)cache.positions[token], of.context - 1);
    const List list(position, of.window, spanned.span, of.lists, of.most, token);
    const Share share(list.count, of.limit);
    if ((int)blockIdx.x >= share.parts) return;
    const int from = blockIdx.x * share.length, to = min(from + share.length, list.count);
    const u32 sequence = cache.table_of_row[token];
    const u32 *const table = cache.table_at(sequence);
    const u32 *const entry_table = spanned.tables + (size_t)sequence * cache.table_stride;
    const KvHead<KvType> keys = cache.keys_of(of.dim, 0, 1);
    const KvHead<KvType> entries = spanned.rows(of.dim);

    const size_t first_row = (size_t)token * of.heads + first_head;
    for (int at = threadIdx.x; at < HEADS * DIM; at += THREADS) {
        const int head = at / DIM, i = at % DIM;
        const bool there = head < members && i < of.dim;
        shared.queries[head * STRIDE + i] = there ? q[(first_row + head) * of.dim + i] * (of.scale * LOG2_E) : 0.0f;
    }
    float sums[PAIRS][2][HEADS];
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int h = 0; h < HEADS; h++) sums[p][n][h] = 0.0f;
    // A thread's head and key of a tile. The threads of a head are half a warp.
    const int head = threadIdx.x / KEYS, key = threadIdx.x % KEYS;
    float largest = -INFINITE, sum = 0.0f;
    Fetch<DIM> fetch;
    fetch.begin(keys, entries, list, table, entry_table, max(spanned.span, 1), from, to);
    for (int tile = from; tile < to; tile += KEYS) {
        __syncthreads();  // No thread reads the tile before any more.
        fetch.finish(shared.keys);
        __syncthreads();
        if (tile + KEYS < to)
            fetch.begin(keys, entries, list, table, entry_table, max(spanned.span, 1), tile + KEYS, to);
        const u32 own_query = shared_address(shared.queries + head * STRIDE);
        const u32 own_key = shared_address(shared.keys + key * STRIDE);
        float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (int i = 0; i < DIM; i += 4) {
            const float4 a = load_four(own_query + i * sizeof(float)), b = load_four(own_key + i * sizeof(float));
            dots[0] = __fmaf_rn(a.x, b.x, dots[0]);
            dots[1] = __fmaf_rn(a.y, b.y, dots[1]);
            dots[2] = __fmaf_rn(a.z, b.z, dots[2]);
            dots[3] = __fmaf_rn(a.w, b.w, dots[3]);
        }
        const float score = tile + key < to ? (dots[0] + dots[1]) + (dots[2] + dots[3]) : -INFINITE;
        float top = fmaxf(largest, score);
#pragma unroll
        for (int distance = 1; distance < KEYS; distance *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
        const float factor = weight(largest, top), own = weight(score, top);
        largest = top;
        sum = __fmaf_rn(sum, factor, own);
        shared.weights[key * HEADS + head] = own;
        if (key == 0) shared.factors[head] = factor;
        __syncthreads();
        const u32 weights = shared_address(shared.weights), factors = shared_address(shared.factors);
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const int column = 2 * (threadIdx.x + p * THREADS);
            if (column >= DIM) continue;
#pragma unroll
            for (int h = 0; h < HEADS; h += 4) {
                const float4 f = load_four(factors + h * sizeof(float));
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    sums[p][n][h] *= f.x;
                    sums[p][n][h + 1] *= f.y;
                    sums[p][n][h + 2] *= f.z;
                    sums[p][n][h + 3] *= f.w;
                }
            }
#pragma unroll 4
            for (int k = 0; k < KEYS; k++) {
                const float2 x = load_two(shared_address(shared.keys + k * STRIDE + column));
#pragma unroll
                for (int h = 0; h < HEADS; h += 4) {
                    const float4 w = load_four(weights + (k * HEADS + h) * sizeof(float));
                    const float four[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        sums[p][0][h + n] = __fmaf_rn(four[n], x.x, sums[p][0][h + n]);
                        sums[p][1][h + n] = __fmaf_rn(four[n], x.y, sums[p][1][h + n]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int distance = 1; distance < KEYS; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    angles += (size_t)position * of.rotary_dim;
    out += first_row * of.dim;

    if (share.parts == 1) {
        if (key == 0 && head < members) {
            const float sink = sinks ? sinks[first_head + head] * LOG2_E : -INFINITE;
            const float top = fmaxf(largest, sink), own = weight(largest, top);
            shared.inverse[head] = own / (sum * own + (sinks ? weight(sink, top) : 0.0f));
        }
        __syncthreads();
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const int column = 2 * (threadIdx.x + p * THREADS);
            if (column >= of.dim) continue;
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (h >= members) continue;
                const float inverse = shared.inverse[h];
                float x[2] = {sums[p][0][h] * inverse, sums[p][1][h] * inverse};
                turn_back(x, column, of.dim, angles, of.rotary_dim);
                *(float2 *)(out + (size_t)h * of.dim + column) = make_float2(x[0], x[1]);
            }
        }
        return;
    }
    const int unit = token * gridDim.y + blockIdx.y;
    const Parts parts(memory, tickets, gridDim.y * gridDim.z, of.limit, HEADS, of.dim);
    const size_t index = parts.index(unit, blockIdx.x, 0);
#pragma unroll
    for (int p = 0; p < PAIRS; p++) {
        const int column = 2 * (threadIdx.x + p * THREADS);
        if (column >= of.dim) continue;
#pragma unroll
        for (int h = 0; h < HEADS; h++)
            if (h < members)
                *(float2 *)(parts.values + (index + h) * of.dim + column) = make_float2(sums[p][0][h], sums[p][1][h]);
    }
    if (key == 0 && head < members) parts.stats[index + head] = make_float2(largest, sum);
    if (!is_last(parts, unit, share.parts)) return;
    for (int h = 0; h < members; h++) {
        if (threadIdx.x < 32) {
            const float *const sink = sinks ? sinks + first_head + h : nullptr;
            const float inverse = join_factors(parts, unit, h, share.parts, sink, shared.joined);
            if (threadIdx.x == 0) shared.inverse[0] = inverse;
        }
        __syncthreads();
        for (int i = threadIdx.x * 4; i < of.dim; i += THREADS * 4) {
            const float4 joined = join_values(parts, unit, h, share.parts, i, shared.joined);
            const float inverse = shared.inverse[0];
            float x[4] = {joined.x * inverse, joined.y * inverse, joined.z * inverse, joined.w * inverse};
            turn_back(x, i, of.dim, angles, of.rotary_dim);
            *(float4 *)(out + (size_t)h * of.dim + i) = make_float4(x[0], x[1], x[2], x[3]);
        }
        __syncthreads();  // No thread reads the factors any more.
    }
}

// Grid (largest number of parts, groups of heads, rows). q and out [rows, heads, dim]. The first layer of the cache has keys of
// positions, of which a row sees `window`. The second one has entries; its `span` is 0 if there are none. `lists` [rows, most]
// has the entries that rows see, if it is not null. A list is cut into up to `limit` parts; if that is more than one,
// `memory` is that of Parts for HEADS columns. angles [positions, 2, rotary_dim / 2].
#define ATTENTION_ENTRIES(NAME, DIM)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                               \
        NAME(const float *q, KV_PARAMETERS, SPANNED_PARAMETERS, const float *sinks, float *out, float *memory,          \
             u32 *tickets, const float *angles, int limit, int heads, int dim, int context, int window, int rotary_dim, \
             float scale, const u32 *lists, int most) {                                                                 \
        wait_for_previous();                                                                                            \
        attend<DIM>(q, KvLayer{KV_ARGUMENTS}, SpannedLayer{SPANNED_ARGUMENTS}, sinks, out, memory, tickets, angles,     \
                    Call{limit, heads, dim, context, window, rotary_dim, scale, lists, most});                          \
    }

ATTENTION_ENTRIES(attention_entries_128, 128)
ATTENTION_ENTRIES(attention_entries_512, 512)
