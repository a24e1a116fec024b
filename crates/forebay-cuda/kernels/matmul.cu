// Products of prompt rows on tensor cores: out[t, r] = sum over c of x[t, c] * w[r, c].
//
// A block computes TOKENS x ROWS outputs in steps of DEPTH * 64 columns. Activations are 16-bit numbers, and are copied
// ahead into one of two buffers. Each thread decodes groups of 32 weights from device memory to registers before a step's
// products, and stores them to the other buffer after them. So loads and arithmetic overlap. Time budget of a step of 64
// columns with 128 tokens and 128 rows: 2.1 MFLOP take 512 clocks of the tensor cores of an H100 (its full rate needs wgmma;
// mma reaches about 60 %). Decoding 8192 weights at 4 to 6 instructions takes 300 clocks. Reading weights takes longer
// than both if a block is alone on its multiprocessor, so tiles for few tokens read the weights of 256 columns at once.
// Sums are added along the columns in the same order for every tile.
//
// For F16 and BF16 weights, the activations are the sum of two numbers, high and low, which keeps 16 bits or more.
#include "decode.cuh"
#include "tiles.cuh"

#define THREADS 256
#define STEP 64

// Returns the swizzled offset of a 16-byte chunk in a row of 128 bytes. Each of 8 rows permutes its chunks differently,
// so loads use all banks.
__device__ __forceinline__ u32 swizzled(int row, int chunk) { return row * 128 + ((chunk ^ row & 7) << 4); }

template <class W, int TOKENS> struct Plan {
    static constexpr int PARTS = Is16Bits<W>::VALUE ? 2 : 1;
    // Rows of the output, and steps of 64 columns whose weights are read at once.
    static constexpr int ROWS = TOKENS == 128 ? 128 : 64, DEPTH = TOKENS == 128 ? 1 : 4 / PARTS;
    static constexpr int X_BYTES = TOKENS * STEP * 2;
    static constexpr int W_BYTES = ROWS * STEP * 2;
    static constexpr int STEP_BYTES = PARTS * X_BYTES + W_BYTES;
    static constexpr int BUFFER = DEPTH * STEP_BYTES;
    // Number of warps along tokens and along rows, and what one warp computes, in units of 16 tokens and 8 rows.
    static constexpr int ALONG_TOKENS = 2, ALONG_ROWS = 8 / ALONG_TOKENS;
    static constexpr int M = TOKENS / ALONG_TOKENS / 16, N = ROWS / ALONG_ROWS / 8;
    // Number of 16-byte pieces of one part of the activations that a thread copies for 64 columns.
    static constexpr int COPIES = TOKENS * 8 / THREADS;
    // Number of groups of 32 weights that a thread decodes, and that a row has.
    static constexpr int DECODED = ROWS * DEPTH * 2 / THREADS, IN_ROW = 2 * DEPTH;
};

template <class W, int TOKENS>
__device__ __forceinline__ void multiply_step(float (&sums)[Plan<W, TOKENS>::M][Plan<W, TOKENS>::N][4], u32 buffer,
                                              int warp, int lane) {
    using P = Plan<W, TOKENS>;
    const int first_token = warp / P::ALONG_ROWS * P::M * 16, first_row = warp % P::ALONG_ROWS * P::N * 8;
    const u32 w_buffer = buffer + P::PARTS * P::X_BYTES;
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
                load_matrices(a, buffer + part * P::X_BYTES + swizzled(row, 2 * k + (lane >> 4)));
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

// x_high and x_low (only for F16 and BF16 weights) are [x rows, cols]. scales[row of x] undoes the scaling that kept
// the activations in range; null: they were not scaled.
template <class W, int TOKENS>
__device__ __forceinline__ void matmul(const u16 *x_high, const u16 *x_low, const float *scales, float *out, int rows,
                                       int cols, u64 row_bytes, TILE_PARAMETERS) {
    using P = Plan<W, TOKENS>;
    extern __shared__ uint4 shared[];
    Tile tile;
    if (!find_tile(tile, TOKENS, TILE_ARGUMENTS)) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const u32 buffers = shared_address(shared);
    const int first_row = blockIdx.y * P::ROWS, groups = (cols + 31) / 32;
    const int steps = (cols + P::DEPTH * STEP - 1) / (P::DEPTH * STEP);

    // The rows and chunks that this thread copies and decodes in every step.
    size_t x_rows[P::COPIES];
    bool has_x[P::COPIES];
    const int chunk = threadIdx.x & 7, copied_row = threadIdx.x >> 3;
#pragma unroll
    for (int i = 0; i < P::COPIES; i++) {
        const int entry = tile.first + copied_row + THREADS / 8 * i;
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
                    const u32 to = buffer + deep * P::STEP_BYTES + part * P::X_BYTES +
                                   swizzled(copied_row + THREADS / 8 * i, chunk);
                    copy_async_zero(to, x + (there ? x_rows[i] + col : 0), there ? 16 : 0);
                }
            }
        copy_commit();
    };
    auto decode = [&](int step, u32(&pairs)[P::DECODED][16]) {
#pragma unroll
        for (int i = 0; i < P::DECODED; i++) {
            const int group = step * P::IN_ROW + first_group + i;
            if (has_w && group < groups) {
                decode_pairs<W>(w, group, cols, pairs[i]);
            } else {
#pragma unroll
                for (int j = 0; j < 16; j++) pairs[i][j] = 0;
            }
        }
    };
    auto store_w = [&](const u32(&pairs)[P::DECODED][16], int buffer) {
#pragma unroll
        for (int i = 0; i < P::DECODED; i++) {
            const int deep = (first_group + i) / 2, first_chunk = (first_group + i) % 2 * 4;
            u8 *to = (u8 *)shared + buffer * P::BUFFER + deep * P::STEP_BYTES + P::PARTS * P::X_BYTES;
#pragma unroll
            for (int j = 0; j < 4; j++)
                *(uint4 *)(to + swizzled(decoded_row, first_chunk + j)) =
                    make_uint4(pairs[i][4 * j], pairs[i][4 * j + 1], pairs[i][4 * j + 2], pairs[i][4 * j + 3]);
        }
    };

    float sums[P::M][P::N][4] = {};
    u32 pairs[P::DECODED][16];
    copy_x(0, buffers);
    decode(0, pairs);
    store_w(pairs, 0);
    for (int step = 0; step < steps; step++) {
        const int now = step & 1;
        copy_wait<0>();
        // This step's buffer is complete, and no warp reads the other one any more.
        __syncthreads();
        const bool more = step + 1 < steps;
        if (more) {
            copy_x(step + 1, buffers + (now ^ 1) * P::BUFFER);
            decode(step + 1, pairs);
        }
#pragma unroll
        for (int deep = 0; deep < P::DEPTH; deep++) {
            // Columns beyond the end are left out, because adding 0 changes the sign of a sum that is -0.
            if ((step * P::DEPTH + deep) * STEP < cols)
                multiply_step<W, TOKENS>(sums, buffers + now * P::BUFFER + deep * P::STEP_BYTES, warp, lane);
        }
        if (more) store_w(pairs, now ^ 1);
    }

    const int token0 = warp / P::ALONG_ROWS * P::M * 16 + lane / 4;
    const int row0 = first_row + warp % P::ALONG_ROWS * P::N * 8 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < P::M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int entry = tile.first + token0 + m * 16 + half * 8;
            if (entry >= tile.end) continue;
            const float scale =
                (scales ? scales[tile.x_row(entry, token_rows)] : 1.0f) * (1.0f / HalfFactor<W>::VALUE);
            const int out_row = tile.x_row(entry, out_rows);
            if ((u32)out_row >= (u32)tokens) continue;
            float *to = out + (size_t)out_row * rows;
#pragma unroll
            for (int n = 0; n < P::N; n++) {
                const int row = row0 + n * 8;
                if (row < rows) to[row] = sums[m][n][2 * half] * scale;
                if (row + 1 < rows) to[row + 1] = sums[m][n][2 * half + 1] * scale;
            }
        }
}

#define KERNEL(NAME, TOKENS, BLOCKS)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                                              \
        NAME(const u16 *__restrict__ x_high, const u16 *__restrict__ x_low, const float *__restrict__ scales,  \
             float *__restrict__ out, int rows, int cols, u64 row_bytes, TILE_PARAMETERS) {                    \
        matmul<WEIGHT, TOKENS>(x_high, x_low, scales, out, rows, cols, row_bytes, TILE_ARGUMENTS);             \
    }

KERNEL(matmul_32, 32, 2)
KERNEL(matmul_128, 128, 2)
