// Products of prompt rows on tensor cores: out[t, r] = sum over c of x[t, c] * w[r, c].
//
// A block computes TOKENS x ROWS outputs in steps of DEPTH * 64 columns. Activations are 16-bit numbers, and are copied
// ahead into one of two buffers. Each thread decodes groups of 32 weights from device memory to registers before a step's
// products, and stores them to the other buffer after them. So loads and arithmetic overlap. Time budget of a step of 64
// columns with 128 tokens and 128 rows: 2.1 MFLOP take 512 clocks of the tensor cores of an H100 (its full rate needs wgmma;
// mma reaches about 60 %). Decoding 8192 weights at 4 to 6 instructions takes 300 clocks. Reading weights takes longer
// than both if a block is alone on its multiprocessor. So tiles for few tokens read the weights of 256 columns at once.
// Those of block types are copied ahead, and other warps decode them than multiply (`matmul_ahead`).
// Sums are added along the columns in the same order for every tile.
//
// For F16 and BF16 weights, the activations are the sum of two numbers, high and low, which keeps 16 bits or more.
#include "decode.cuh"
#include "tiles.cuh"

#define STEP 64

// Returns the swizzled offset of a 16-byte chunk in a row of 128 bytes. Each of 8 rows permutes its chunks differently,
// so loads use all banks.
__device__ __forceinline__ u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ row & 7) << 4); }

template <class W, int TOKENS> struct Plan {
    static constexpr int PARTS = Is16Bits<W>::VALUE ? 2 : 1;
    // True if encoded weights are copied ahead to shared memory.
    static constexpr bool AHEAD = TOKENS == 32 && W::ELEMENTS > 1;
    // Rows of the output, and steps of 64 columns between two barriers.
    static constexpr int ROWS = TOKENS == 128 ? 128 : AHEAD ? 32 : 64, DEPTH = TOKENS == 128 ? 1 : 4 / PARTS;
    static constexpr int X_BYTES = TOKENS * STEP * 2;
    static constexpr int W_BYTES = ROWS * STEP * 2;
    // Number of threads that multiply, that copy, and of the block. If weights are copied ahead, 256 others decode.
    static constexpr int MULTIPLY = AHEAD ? 128 : 256, COPY = AHEAD ? 128 : 256;
    static constexpr int THREADS = AHEAD ? MULTIPLY + COPY + 256 : 256;
    // Number of multiplying warps along tokens and along rows, and what one computes, in units of 16 tokens and 8 rows.
    static constexpr int ALONG_TOKENS = 2, ALONG_ROWS = MULTIPLY / 32 / ALONG_TOKENS;
    static constexpr int M = TOKENS / ALONG_TOKENS / 16, N = ROWS / ALONG_ROWS / 8;
    // Number of 16-byte pieces of one part of the activations that a copying thread copies for 64 columns.
    static constexpr int COPIES = TOKENS * 8 / COPY;
    // Number of groups of 32 weights that a row has in a step, and that a thread decodes.
    static constexpr int IN_ROW = 2 * DEPTH, DECODED = ROWS * IN_ROW / 256;
    // Encoded weights of 256 columns of a row, and the 16-byte pieces that contain them wherever they begin.
    static constexpr int CHUNK = W::ELEMENTS > 1 ? 256 / W::ELEMENTS * W::BYTES : 0;
    static constexpr int PIECES = W::ALIGN >= 16 && CHUNK % 16 == 0 ? CHUNK / 16 : (CHUNK + 30) / 16;
    static constexpr int SLOT = 16 * PIECES;
};

template <class W, int TOKENS>
__device__ __forceinline__ void multiply_step(float (&sums)[Plan<W, TOKENS>::M][Plan<W, TOKENS>::N][4], u32 x_buffer,
                                              u32 w_buffer, int warp, int lane) {
    using P = Plan<W, TOKENS>;
    const int first_token = warp / P::ALONG_ROWS * P::M * 16, first_row = warp % P::ALONG_ROWS * P::N * 8;
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
        u32 b[P::N / 2][4];
#pragma unroll
        for (int n = 0; n < P::N / 2; n++) {
            const int row = first_row + n * 16 + (lane & 7) + (lane >> 4) * 8;
            load_matrices(b[n], w_buffer + swizzled(row, 2 * k + (lane >> 3 & 1)));
        }
#pragma unroll
        for (int part = 0; part < P::PARTS; part++)
#pragma unroll
            for (int m = 0; m < P::M; m++) {
                u32 a[4];
                const int row = first_token + m * 16 + (lane & 15);
                load_matrices(a, x_buffer + part * P::X_BYTES + swizzled(row, 2 * k + (lane >> 4)));
#pragma unroll
                for (int n = 0; n < P::N; n++) {
                    const u32 b0 = b[n / 2][n % 2 * 2], b1 = b[n / 2][n % 2 * 2 + 1];
                    if constexpr (Is16Bits<W>::BFLOAT) {
                        mma_bfloat(sums[m][n], a, b0, b1);
                    } else {
                        mma_half(sums[m][n], a, b0, b1);
                    }
                }
            }
    }
}

// Does the same for a whole step of 256 columns and 16 tokens times 16 rows. Operands are loaded two products ahead: the
// products of a warp depend on each other, and no other warp hides the latency of the loads.
template <class W, int TOKENS>
__device__ __forceinline__ void multiply_whole_step(float (&sums)[1][2][4], u32 x_buffer, u32 w_buffer, int warp, int lane) {
    using P = Plan<W, TOKENS>;
    constexpr int IN_DEEP = STEP / 16, ALL = P::DEPTH * IN_DEEP, AHEAD = 2;
    const int token = warp / P::ALONG_ROWS * 16 + (lane & 15);
    const int row = warp % P::ALONG_ROWS * 16 + (lane & 7) + (lane >> 4) * 8;
    u32 a[AHEAD + 1][4], b[AHEAD + 1][4];
    const auto load = [&](int k) {
        const int deep = k / IN_DEEP, chunk = 2 * (k % IN_DEEP);
        load_matrices(b[k % (AHEAD + 1)], w_buffer + deep * P::W_BYTES + swizzled(row, chunk + (lane >> 3 & 1)));
        load_matrices(a[k % (AHEAD + 1)], x_buffer + deep * P::X_BYTES + swizzled(token, chunk + (lane >> 4)));
    };
#pragma unroll
    for (int k = 0; k < AHEAD; k++) load(k);
#pragma unroll
    for (int k = 0; k < ALL; k++) {
        if (k + AHEAD < ALL) load(k + AHEAD);
        const u32(&x)[4] = a[k % (AHEAD + 1)], (&w)[4] = b[k % (AHEAD + 1)];
#pragma unroll
        for (int n = 0; n < 2; n++) mma_half(sums[0][n], x, w[2 * n], w[2 * n + 1]);
    }
}

// Stores a decoded group of 32 weights as half a row of 128 bytes.
__device__ __forceinline__ void store_group(u8 *w_buffer, int row, int half, const u32 (&pairs)[16]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        *(uint4 *)(w_buffer + swizzled(row, 4 * half + i)) =
            make_uint4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
}

// Where the sums of one entry belong: a row of the output, or -1, and the factor that undoes scaling.
struct OutputRow {
    int row;
    float scale;
};

// Finds the output of the thread's entry in products of 16 tokens number `m`, in its first or second half.
template <class W, int TOKENS>
__device__ __forceinline__ OutputRow output_row(int m, int half, const float *__restrict__ scales, int warp, int lane,
                                                const Tile &tile, const u32 *token_rows, const u32 *out_rows,
                                                int tokens) {
    using P = Plan<W, TOKENS>;
    const int entry = tile.first + (warp / P::ALONG_ROWS * P::M + m) * 16 + half * 8 + lane / 4;
    if (entry >= tile.end) return OutputRow{-1, 0.0f};
    const float scale = (scales ? scales[tile.x_row(entry, token_rows)] : 1.0f) * (1.0f / HalfFactor<W>::VALUE);
    const int row = tile.x_row(entry, out_rows);
    return OutputRow{(u32)row < (u32)tokens ? row : -1, scale};
}

// Writes all sums of a thread. `output(m, half)` returns an OutputRow.
template <class W, int TOKENS, class F>
__device__ __forceinline__ void write_sums(const float (&sums)[Plan<W, TOKENS>::M][Plan<W, TOKENS>::N][4], F output,
                                           float *__restrict__ out, int rows, int warp, int lane, int first_row) {
    using P = Plan<W, TOKENS>;
    const int row0 = first_row + warp % P::ALONG_ROWS * P::N * 8 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < P::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const OutputRow at = output(m, half);
            if (at.row < 0) continue;
            float *to = out + (size_t)at.row * rows;
#pragma unroll
            for (int n = 0; n < P::N; n++) {
                const int row = row0 + n * 8;
                if (row < rows) to[row] = sums[m][n][2 * half] * at.scale;
                if (row + 1 < rows) to[row + 1] = sums[m][n][2 * half + 1] * at.scale;
            }
        }
}

// x_high and x_low (only for F16 and BF16 weights) are [x rows, cols]. scales[row of x] undoes the scaling that kept
// the activations in range; null: they were not scaled.
template <class W, int TOKENS>
__device__ __forceinline__ void matmul(const u16 *x_high, const u16 *x_low, const float *scales, float *out, int rows,
                                       int cols, u64 row_bytes, TILE_PARAMETERS) {
    using P = Plan<W, TOKENS>;
    constexpr int STEP_BYTES = P::PARTS * P::X_BYTES + P::W_BYTES, BUFFER = P::DEPTH * STEP_BYTES;
    extern __shared__ uint4 shared[];
    wait_for_previous();
    Tile tile;
    // The grid has room for the matrix with the most rows.
    const int first_row = blockIdx.y * P::ROWS, groups = (cols + 31) / 32;
    if (first_row >= rows || !find_tile(tile, TOKENS, TILE_ARGUMENTS)) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 buffers = shared_address(shared);
    const int steps = (cols + P::DEPTH * STEP - 1) / (P::DEPTH * STEP);

    // The rows and chunks that this thread copies and decodes in every step.
    size_t x_rows[P::COPIES];
    bool has_x[P::COPIES];
    const int chunk = threadIdx.x & 7, copied_row = threadIdx.x >> 3;
#pragma unroll
    for (int i = 0; i < P::COPIES; i++) {
        const int entry = tile.first + copied_row + P::THREADS / 8 * i;
        has_x[i] = entry < tile.end;
        x_rows[i] = has_x[i] ? (size_t)tile.x_row(entry, token_rows) * cols : 0;
    }
    // This thread decodes adjacent groups of one row.
    const int decoded_row = threadIdx.x * P::DECODED / P::IN_ROW, first_group = threadIdx.x * P::DECODED % P::IN_ROW;
    const bool has_w = first_row + decoded_row < rows;
    const u8 *w = (const u8 *)(tile.weights + (u64)(first_row + decoded_row) * row_bytes);
    __builtin_assume(__isGlobal(w));

    auto copy_x = [&](int step, u32 buffer) {
#pragma unroll
        for (int deep = 0; deep < P::DEPTH; deep++)
#pragma unroll
            for (int part = 0; part < P::PARTS; part++) {
                const u16 *x = part == 0 ? x_high : x_low;
                const int col = (step * P::DEPTH + deep) * STEP + chunk * 8;
#pragma unroll
                for (int i = 0; i < P::COPIES; i++) {
                    const bool there = has_x[i] && col < cols;
                    const u32 to = buffer + deep * STEP_BYTES + part * P::X_BYTES +
                                   swizzled(copied_row + P::THREADS / 8 * i, chunk);
                    copy_async_zero(to, x + (there ? x_rows[i] + col : 0), there ? 16 : 0);
                }
            }
        copy_commit();
    };
    ComingGroup<W> coming[P::DECODED];
    auto load_w = [&](int step) {
#pragma unroll
        for (int i = 0; i < P::DECODED; i++) {
            const int group = step * P::IN_ROW + first_group + i;
            if (has_w && group < groups) {
                coming[i].load(w, group, cols);
            } else {
                coming[i].clear();
            }
        }
    };
    auto store_w = [&](int step, int buffer) {
#pragma unroll
        for (int i = 0; i < P::DECODED; i++) {
            const int deep = (first_group + i) / 2;
            u8 *to = (u8 *)shared + buffer * BUFFER + deep * STEP_BYTES + P::PARTS * P::X_BYTES;
            u32 pairs[16];
            coming[i].pairs(w, step * P::IN_ROW + first_group + i, pairs);
            store_group(to, decoded_row, (first_group + i) % 2, pairs);
        }
    };

    float sums[P::M][P::N][4] = {};
    copy_x(0, buffers);
    load_w(0);
    store_w(0, 0);
    for (int step = 0; step < steps; step++) {
        const int now = step & 1;
        copy_wait<0>();
        // This step's buffer is complete, and no warp reads the other one any more.
        __syncthreads();
        const bool more = step + 1 < steps;
        if (more) {
            copy_x(step + 1, buffers + (now ^ 1) * BUFFER);
            load_w(step + 1);
        }
#pragma unroll
        for (int deep = 0; deep < P::DEPTH; deep++) {
            const u32 x_buffer = buffers + now * BUFFER + deep * STEP_BYTES;
            // Columns beyond the end are left out, because adding 0 changes the sign of a sum that is -0.
            if ((step * P::DEPTH + deep) * STEP < cols)
                multiply_step<W, TOKENS>(sums, x_buffer, x_buffer + P::PARTS * P::X_BYTES, warp, lane);
        }
        if (more) store_w(step + 1, now ^ 1);
    }
    const auto output = [&](int m, int half) {
        return output_row<W, TOKENS>(m, half, scales, warp, lane, tile, token_rows, out_rows, tokens);
    };
    write_sums<W, TOKENS>(sums, output, out, rows, warp, lane, first_row);
}

#ifdef DECODE_APART
// Does the same as `matmul` for 128 tokens, with 256 more threads that decode, so that products need not wait for that. For
// products with so few tiles that a multiprocessor has one block: no other block's products run while its warps decode.
template <class W>
__device__ __forceinline__ void matmul_apart(const u16 *x_high, const u16 *x_low, const float *scales, float *out, int rows,
                                             int cols, u64 row_bytes, TILE_PARAMETERS) {
    constexpr int TOKENS = 128;
    using P = Plan<W, TOKENS>;
    static_assert(P::DECODED == 1 && P::DEPTH == 1, "a thread decodes one group of a step");
    constexpr int BUFFER = P::PARTS * P::X_BYTES + P::W_BYTES;
    extern __shared__ uint4 shared[];
    wait_for_previous();
    Tile tile;
    const int first_row = blockIdx.y * P::ROWS;
    if (first_row >= rows || !find_tile(tile, TOKENS, TILE_ARGUMENTS)) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int steps = (cols + STEP - 1) / STEP;

    // Both roles pass one barrier before the products of each step.
    if (warp >= P::THREADS / 32) {
        const int thread = threadIdx.x - P::THREADS, row = thread / P::IN_ROW, in_row = thread % P::IN_ROW;
        const int groups = (cols + 31) / 32;
        const bool has_w = first_row + row < rows;
        const u8 *w = (const u8 *)(tile.weights + (u64)(first_row + row) * row_bytes);
        __builtin_assume(__isGlobal(w));
        auto load = [&](ComingGroup<W> &coming, int step) {
            const int group = step * P::IN_ROW + in_row;
            if (has_w && group < groups) {
                coming.load(w, group, cols);
            } else {
                coming.clear();
            }
        };
        auto store = [&](const ComingGroup<W> &coming, int step) {
            u32 pairs[16];
            coming.pairs(w, step * P::IN_ROW + in_row, pairs);
            store_group((u8 *)shared + (step & 1) * BUFFER + P::PARTS * P::X_BYTES, row, in_row, pairs);
        };
        // Weights are loaded two steps before they are needed. Two steps at a time, so that registers have no index.
        ComingGroup<W> even, odd;
        load(even, 0);
        load(odd, 1);
        store(even, 0);
        for (int step = 0; step < steps; step += 2) {
            __syncthreads();
            load(even, step + 2);
            if (step + 1 >= steps) break;
            store(odd, step + 1);
            __syncthreads();
            load(odd, step + 3);
            if (step + 2 < steps) store(even, step + 2);
        }
        return;
    }

    const u32 buffers = shared_address(shared);
    size_t x_rows[P::COPIES];
    bool has_x[P::COPIES];
    const int chunk = threadIdx.x & 7, copied_row = threadIdx.x >> 3;
#pragma unroll
    for (int i = 0; i < P::COPIES; i++) {
        const int entry = tile.first + copied_row + P::THREADS / 8 * i;
        has_x[i] = entry < tile.end;
        x_rows[i] = has_x[i] ? (size_t)tile.x_row(entry, token_rows) * cols : 0;
    }
    auto copy_x = [&](int step) {
        const int col = step * STEP + chunk * 8;
#pragma unroll
        for (int part = 0; part < P::PARTS; part++) {
            const u16 *x = part == 0 ? x_high : x_low;
#pragma unroll
            for (int i = 0; i < P::COPIES; i++) {
                const bool there = has_x[i] && col < cols;
                const u32 to = buffers + (step & 1) * BUFFER + part * P::X_BYTES +
                               swizzled(copied_row + P::THREADS / 8 * i, chunk);
                copy_async_zero(to, x + (there ? x_rows[i] + col : 0), there ? 16 : 0);
            }
        }
        copy_commit();
    };
    float sums[P::M][P::N][4] = {};
    copy_x(0);
    for (int step = 0; step < steps; step++) {
        copy_wait<0>();
        // This step's buffer is complete, and no warp reads the other one any more.
        __syncthreads();
        if (step + 1 < steps) copy_x(step + 1);
        const u32 x_buffer = buffers + (step & 1) * BUFFER;
        multiply_step<W, TOKENS>(sums, x_buffer, x_buffer + P::PARTS * P::X_BYTES, warp, lane);
    }
    const auto output = [&](int m, int half) {
        return output_row<W, TOKENS>(m, half, scales, warp, lane, tile, token_rows, out_rows, tokens);
    };
    write_sums<W, TOKENS>(sums, output, out, rows, warp, lane, first_row);
}
#endif

// Matrices with the same columns that multiply the same entries: each one's weights (a dense matrix's address, or the offset
// in an expert's slot), output and rows.
static constexpr int TOGETHER = 3;
struct Matrices {
    u64 weights[TOGETHER];
    float *out[TOGETHER];
    int rows[TOGETHER];
};

// Some rows of one matrix, and the entries that they multiply.
struct Item {
    u64 weights;  // of the first row
    float *out;
    int first, end;  // entries
    int row, rows;   // the first row; rows of the matrix
};

// Largest number of items of a block; the same as in matmul.rs.
static constexpr int ITEMS = 32;

// Finds the items of this block, and returns their number. All blocks take equal shares of all items, one after the other:
// the rows of a tile's matrices, then those of the next tile. So no multiprocessor waits for others at the end, and
// surplus blocks end at once. All threads of a block must call this.
template <int TOKENS, int ROWS>
__device__ __forceinline__ int find_items(Item (&items)[ITEMS], const Matrices &matrices, u64 row_bytes,
                                          const u64 *table, const u32 *starts, int experts, int tokens) {
    // A lane looks at this many experts at a time. Their loads do not wait for each other.
    constexpr int EACH = 4;
    __shared__ int found;
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x;
        // Numbers of tiles of the EACH experts that this lane looks at, from `first` on. Experts are often computed in several
        // launches, as they arrive: those without a slot have no tiles.
        int tiles_of[EACH];
        const auto look = [&](int first) {
            int sum = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                // Loads do not depend on each other. What is read for an expert that does not exist is not used.
                const int expert = min(first + i, experts - 1);
                const bool has_slot = table[expert] != 0;
                const int entries = (int)(starts[expert + 1] - starts[expert]);
                tiles_of[i] = has_slot && first + i < experts ? (entries + TOKENS - 1) / TOKENS : 0;
                sum += tiles_of[i];
            }
            return sum;
        };
        int tiles = table ? 0 : (tokens + TOKENS - 1) / TOKENS, in_tile = 0;
        if (table) {
            // From the last experts to the first, which the loop below looks at first.
            for (int base = (experts - 1) / (32 * EACH) * 32 * EACH; base >= 0; base -= 32 * EACH)
                tiles += look(base + lane * EACH);
#pragma unroll
            for (int distance = 16; distance > 0; distance >>= 1) tiles += __shfl_xor_sync(~0u, tiles, distance);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) in_tile += (matrices.rows[i] + ROWS - 1) / ROWS;
        const u64 all = (u64)max(tiles, 0) * in_tile;
        const u64 from = all * blockIdx.x / gridDim.x, to = all * (blockIdx.x + 1) / gridDim.x;
        const int count = min((int)(to - from), ITEMS);
        const int own_tile = (int)((from + lane) / in_tile);
        int row_tile = (int)((from + lane) % in_tile);
        Item item{0, nullptr, own_tile * TOKENS, min(tokens, (own_tile + 1) * TOKENS), 0, 0};
        u64 slot = 0;
        if (table && count > 0) {
            const int last = (int)((from + count - 1) / in_tile);
            int tile = (int)(from / in_tile), before = 0;
            for (int base = 0; base < experts && tile <= last; base += 32 * EACH) {
                if (base > 0) look(base + lane * EACH);
                int own = 0;
#pragma unroll
                for (int i = 0; i < EACH; i++) own += tiles_of[i];
                int sum = own;  // over the experts of this lane and those of the lower lanes
#pragma unroll
                for (int distance = 1; distance < 32; distance <<= 1) {
                    const int other = __shfl_up_sync(~0u, sum, distance);
                    if (lane >= distance) sum += other;
                }
                for (; tile <= last; tile++) {
                    const u32 past = __ballot_sync(~0u, tile < before + sum);
                    if (past == 0) break;
                    const int source = __ffs((int)past) - 1;
                    int within = tile - before - (sum - own), expert = base + lane * EACH;
#pragma unroll
                    for (int i = 0; i < EACH - 1; i++) {
                        const bool is_past = expert == base + lane * EACH + i && within >= tiles_of[i];
                        within -= is_past ? tiles_of[i] : 0;
                        expert += is_past;
                    }
                    expert = __shfl_sync(~0u, expert, source);
                    within = __shfl_sync(~0u, within, source);
                    if (own_tile == tile) {
                        const u32 first = min(starts[expert] + (u32)(within * TOKENS), (u32)tokens);
                        item.first = (int)first;
                        item.end = (int)min(min(starts[expert + 1], (u32)tokens), first + TOKENS);
                        slot = table[expert];
                    }
                }
                before += __shfl_sync(~0u, sum, 31);
            }
        }
        if (lane < count) {
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                const int row_tiles = (matrices.rows[i] + ROWS - 1) / ROWS;
                if (row_tile >= 0 && row_tile < row_tiles) {
                    item.row = row_tile * ROWS;
                    item.rows = matrices.rows[i];
                    item.out = matrices.out[i];
                    item.weights = slot + matrices.weights[i] + (u64)item.row * row_bytes;
                }
                row_tile -= row_tiles;
            }
            items[lane] = item;
        }
        if (lane == 0) found = count;
    }
    __syncthreads();
    return found;
}

// Does the same with encoded weights that are copied ahead. A step has 256 columns. While 4 warps multiply those of step
// `s`, 8 others decode the weights of step `s + 1`, and 4 others copy the activations of step `s + x_ahead` and the
// weights of step `s + 1 + w_ahead`. So a step takes as long as the longest of three chains of instructions, not as their
// sum: for few tokens, there are no other blocks that hide their latencies. A block computes its items one after the other
// without a pause, because experts have few columns.
template <class W>
__device__ __forceinline__ void matmul_ahead(const u16 *x, const float *scales, int cols, u64 row_bytes,
                                             const Matrices &matrices, const u64 *table, const u32 *starts,
                                             const u32 *token_rows, const u32 *out_rows, int experts, int tokens,
                                             int x_ahead) {
    constexpr int TOKENS = 32;
    using P = Plan<W, TOKENS>;
    constexpr int X_STEP = P::DEPTH * P::X_BYTES, W_STEP = P::DEPTH * P::W_BYTES, ENCODED = P::ROWS * P::SLOT;
    static_assert(P::DECODED == 1 && P::PARTS == 1 && P::ROWS == 32 && P::DEPTH == 4 && P::M == 1 && P::N == 2);
    // x_ahead is 1, 2 or 3.
    const int w_ahead = max(x_ahead, 2), x_slots = x_ahead + 1, w_slots = w_ahead + 1;
    // [2][W_STEP] decoded weights, [x_slots][X_STEP] activations, [w_slots][ENCODED] encoded weights.
    extern __shared__ uint4 shared[];
    __shared__ Item items[ITEMS];
    u8 *const decoded = (u8 *)shared, *const encoded = decoded + 2 * W_STEP + x_slots * X_STEP;
    // Kernels have written which entries belong to an expert. Dense matrices are read before the previous kernel has ended.
    if (table) wait_for_previous();
    const int count = find_items<TOKENS, P::ROWS>(items, matrices, row_bytes, table, starts, experts, tokens);
    if (count == 0) return;
    const u32 w_buffers = shared_address(shared), x_buffers = w_buffers + 2 * W_STEP;
    const u32 encoded_buffers = x_buffers + x_slots * X_STEP;
    const int steps = (cols + 255) / 256, all_steps = count * steps;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

    // Every role passes the same barriers: one that starts the first decoding, and one before each step's products.
    if (warp < P::MULTIPLY / 32) {
        wait_for_previous();
        __syncthreads();
        int w_slot = 0, x_slot = 0;
        for (int i = 0; i < count; i++) {
            const Item item = items[i];
            // Experts often have fewer entries than a tile has room for. A warp without entries only passes the barriers.
            const bool has_tokens = item.first + warp / P::ALONG_ROWS * P::M * 16 < item.end;
            const Tile tile{0, item.first, item.end};
            // Looked up before the products, which hide the latency.
            OutputRow outputs[2];
#pragma unroll
            for (int half = 0; half < 2; half++)
                outputs[half] = output_row<W, TOKENS>(0, half, scales, warp, lane, tile, token_rows, out_rows, tokens);
            float sums[P::M][P::N][4] = {};
            for (int step = 0; step < steps; step++) {
                __syncthreads();
                const u32 x_buffer = x_buffers + x_slot * X_STEP, w_buffer = w_buffers + w_slot * W_STEP;
                w_slot ^= 1;
                if (++x_slot == x_slots) x_slot = 0;
                if (!has_tokens) continue;
                // Columns beyond the end are left out, because adding 0 changes the sign of a sum that is -0.
                const int deeps = (cols - step * 256 + STEP - 1) / STEP;
                if (deeps >= P::DEPTH) {
                    multiply_whole_step<W, TOKENS>(sums, x_buffer, w_buffer, warp, lane);
                } else {
#pragma unroll 1
                    for (int deep = 0; deep < deeps; deep++)
                        multiply_step<W, TOKENS>(sums, x_buffer + deep * P::X_BYTES, w_buffer + deep * P::W_BYTES, warp,
                                                 lane);
                }
            }
            const auto output = [&](int, int half) { return outputs[half]; };
            write_sums<W, TOKENS>(sums, output, item.out, item.rows, warp, lane, item.row);
        }
        return;
    }
    if (warp < (P::MULTIPLY + 256) / 32) {
        // A warp decodes the same group of 32 rows, so that its stores use all banks.
        const int in_step = warp - P::MULTIPLY / 32, groups = (cols + 31) / 32;
        int w_slot = 0, encoded_slot = 0;
        for (int i = 0; i < count; i++) {
            const bool there = items[i].row + lane < items[i].rows;
            // Low bits of the address of the row's weights.
            const u32 start = (u32)(items[i].weights + lane * row_bytes);
            for (int step = 0; step < steps; step++) {
                __syncthreads();
                u32 pairs[16];
                if (there && step * P::IN_ROW + in_step < groups) {
                    const u32 from = start + step * P::CHUNK;
                    decode_pairs<W>(encoded + encoded_slot * ENCODED + lane * P::SLOT + (from & 15), in_step, cols, pairs);
                } else {
#pragma unroll
                    for (int j = 0; j < 16; j++) pairs[j] = 0;
                }
                store_group(decoded + w_slot * W_STEP + in_step / 2 * P::W_BYTES, lane, in_step % 2, pairs);
                w_slot ^= 1;
                if (++encoded_slot == w_slots) encoded_slot = 0;
            }
        }
        __syncthreads();
        return;
    }

    // Copying takes the longest chain of instructions of the three, so addresses are added up from step to step.
    const int thread = threadIdx.x - P::MULTIPLY - 256, piece = thread & 7, copied_row = thread >> 3;
    const u32 x_to = x_buffers + swizzled(copied_row, piece);
    u64 row_x[P::COPIES], from_x[P::COPIES];
    bool has_x[P::COPIES];
    int x_at = 0, x_step = 0, x_slot = 0, known = -1;
    auto copy_x = [&]() {
        if (x_at < count) {
            if (x_step == 0) {
                // Items of the same entries follow each other.
                if (items[x_at].first != known) {
                    const Tile tile{0, items[x_at].first, items[x_at].end};
                    known = tile.first;
#pragma unroll
                    for (int i = 0; i < P::COPIES; i++) {
                        const int entry = tile.first + copied_row + P::COPY / 8 * i;
                        has_x[i] = entry < tile.end;
                        row_x[i] = (u64)(x + (has_x[i] ? (size_t)tile.x_row(entry, token_rows) * cols + piece * 8 : 0));
                    }
                }
#pragma unroll
                for (int i = 0; i < P::COPIES; i++) from_x[i] = row_x[i];
            }
            const u32 to = x_to + x_slot * X_STEP;
            // Sums of a row that does not exist are never used, so what is there may be anything. Rows of 8 are swizzled alike.
            constexpr u32 APART = P::COPY / 8 * 128;
            if ((x_step + 1) * 256 <= cols) {
#pragma unroll
                for (int i = 0; i < P::COPIES; i++)
                    if (has_x[i]) {
#pragma unroll
                        for (int deep = 0; deep < P::DEPTH; deep++)
                            copy_async(to + deep * P::X_BYTES + APART * i, from_x[i] + deep * STEP * 2);
                    }
            } else {
#pragma unroll 1
                for (int deep = 0; deep < P::DEPTH; deep++) {
                    const bool there = x_step * 256 + deep * STEP + piece * 8 < cols;
#pragma unroll
                    for (int i = 0; i < P::COPIES; i++) {
                        const u16 *const from = there ? (const u16 *)from_x[i] + deep * STEP : x;
                        if (has_x[i]) copy_async_zero(to + deep * P::X_BYTES + APART * i, from, there ? 16 : 0);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < P::COPIES; i++) from_x[i] += 256 * 2;
            if (++x_slot == x_slots) x_slot = 0;
            if (++x_step == steps) x_step = 0, x_at++;
        }
        copy_commit();
    };
    // 4 threads copy a row.
    const u32 row_to = encoded_buffers + (thread >> 2) * P::SLOT + 16 * (thread & 3);
    int w_at = 0, w_step = 0, w_slot = 0;
    u64 from_w = 0;
    u32 left = 0;  // bytes of the row
    bool has_w = false;
    auto copy_encoded = [&]() {
        if (w_at < count) {
            if (w_step == 0) {
                has_w = items[w_at].row + (thread >> 2) < items[w_at].rows;
                from_w = items[w_at].weights + (thread >> 2) * row_bytes;
                left = (u32)row_bytes;
            }
            if (has_w) {
                const u32 to = row_to + w_slot * ENCODED, past = (u32)from_w & 15, end = past + min((u32)P::CHUNK, left);
                const u64 aligned = from_w - past + 16 * (thread & 3);
#pragma unroll
                for (int i = 0; i < (P::PIECES + 3) / 4; i++) {
                    // Every piece has at least one byte of the row, so it lies in memory that exists.
                    if (64 * i + 16 * (thread & 3) < end) copy_async(to + 64 * i, aligned + 64 * i);
                }
            }
            from_w += P::CHUNK;
            left -= P::CHUNK;
            if (++w_slot == w_slots) w_slot = 0;
            if (++w_step == steps) w_step = 0, w_at++;
        }
        copy_commit();
    };
    // Copies are committed in the order of the steps that need them: x of step s, then the weights of step s + 1.
    for (int i = 0; i <= w_ahead - x_ahead; i++) copy_encoded();
    wait_for_previous();
    for (int i = 0; i < x_ahead; i++) {
        copy_x();
        copy_encoded();
    }
    // Waits for the weights of step 0, behind which at least three groups were committed.
    copy_wait<3>();
    __syncthreads();
    for (int at = 0; at < all_steps; at++) {
        // Of what was copied ahead, the activations of this step and the weights of the next must be there.
        if (x_ahead == 1) {
            copy_wait<1>();
        } else if (x_ahead == 2) {
            copy_wait<2>();
        } else {
            copy_wait<4>();
        }
        __syncthreads();
        copy_x();
        copy_encoded();
    }
}

// Multiplies up to three matrices with the same columns and entries. The products of few tokens with block types take
// blocks along x alone. For others, blockIdx.z chooses a matrix.
#define KERNEL(NAME, TOKENS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(Plan<WEIGHT, TOKENS>::THREADS, 2)                             \
        NAME(const u16 *x_high, const u16 *x_low, const float *scales, float *out, int rows, int cols,         \
             u64 row_bytes, TILE_PARAMETERS, u64 weights1, float *out1, int rows1, u64 weights2, float *out2,  \
             int rows2, int x_ahead) {                                                                         \
        if constexpr (Plan<WEIGHT, TOKENS>::AHEAD) {                                                           \
            const Matrices matrices{{weights, weights1, weights2}, {out, out1, out2}, {rows, rows1, rows2}};   \
            matmul_ahead<WEIGHT>(x_high, scales, cols, row_bytes, matrices, table, starts, token_rows,         \
                                 out_rows, experts, tokens, x_ahead);                                          \
        } else {                                                                                               \
            if (blockIdx.z == 1) weights = weights1, out = out1, rows = rows1;                                 \
            if (blockIdx.z == 2) weights = weights2, out = out2, rows = rows2;                                 \
            matmul<WEIGHT, TOKENS>(x_high, x_low, scales, out, rows, cols, row_bytes, TILE_ARGUMENTS);         \
        }                                                                                                      \
    }

KERNEL(matmul_32, 32)
KERNEL(matmul_128, 128)

#ifdef DECODE_APART
extern "C" __global__ void __launch_bounds__(2 * Plan<WEIGHT, 128>::THREADS, 1)
    matmul_128_apart(const u16 *x_high, const u16 *x_low, const float *scales, float *out, int rows, int cols,
                     u64 row_bytes, TILE_PARAMETERS, u64 weights1, float *out1, int rows1, u64 weights2, float *out2,
                     int rows2, int) {
    if (blockIdx.z == 1) weights = weights1, out = out1, rows = rows1;
    if (blockIdx.z == 2) weights = weights2, out = out2, rows = rows2;
    matmul_apart<WEIGHT>(x_high, x_low, scales, out, rows, cols, row_bytes, TILE_ARGUMENTS);
}
#endif
