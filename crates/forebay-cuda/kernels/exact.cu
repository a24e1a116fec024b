// Products in f32 throughout, for any type and any number of tokens: for `--exact`, and for F32 and F64 weights.
//
// `exact_matmul` is simple rather than fast. A block computes 64 rows for 64 tokens in steps of 32 columns, a thread 4 x 4
// of them. `exact_narrow` is for matrices with few rows, such as routers: with `exact_matmul`, their few blocks took 323 us
// for 128 rows of 2048 columns, whatever the number of tokens.
#include "decode.cuh"
#include "tiles.cuh"

#define SIZE 64
#define PITCH 68

template <class W>
__device__ __forceinline__ void exact(const float *x, float *out, int rows, int cols, u64 row_bytes, TILE_PARAMETERS) {
    // [column of the step][token or row]
    __shared__ __align__(16) float xs[32][PITCH], ws[32][PITCH];
    wait_for_previous();
    Tile tile;
    if (!find_tile(tile, SIZE, TILE_ARGUMENTS)) return;
    const int first_row = blockIdx.y * SIZE, steps = (cols + 31) / 32;
    const int across = threadIdx.x % 16 * 4, down = threadIdx.x / 16 * 4;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float sums[4][4] = {};
    for (int step = 0; step < steps; step++) {
        for (int i = warp; i < SIZE; i += 8) {
            const int entry = tile.first + i, col = 32 * step + lane;
            const bool there = entry < tile.end && col < cols;
            xs[lane][i] = there ? x[(size_t)tile.x_row(entry, token_rows) * cols + col] : 0.0f;
        }
        if constexpr (W::ELEMENTS == 1) {
            for (int i = warp; i < SIZE; i += 8) {
                const int row = first_row + i, col = 32 * step + lane;
                const u8 *from = (const u8 *)(tile.weights + (u64)row * row_bytes);
                ws[lane][i] = row < rows && col < cols ? W::at(from, col) : 0.0f;
            }
        } else if (threadIdx.x < SIZE) {
            float values[32] = {};
            const int row = first_row + threadIdx.x;
            if (row < rows) decode_floats<W>((const u8 *)(tile.weights + (u64)row * row_bytes), step, cols, values);
#pragma unroll
            for (int i = 0; i < 32; i++) ws[i][threadIdx.x] = values[i];
        }
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < 32; k++) {
            const float4 a = *(const float4 *)&xs[k][down], b = *(const float4 *)&ws[k][across];
            const float tokens_[4] = {a.x, a.y, a.z, a.w}, rows_[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int r = 0; r < 4; r++) sums[t][r] += tokens_[t] * rows_[r];
        }
        __syncthreads();
    }
#pragma unroll
    for (int t = 0; t < 4; t++) {
        const int entry = tile.first + down + t;
        if (entry >= tile.end) continue;
        const int out_row = tile.x_row(entry, out_rows);
        if ((u32)out_row >= (u32)tokens) continue;
        float *to = out + (size_t)out_row * rows;
#pragma unroll
        for (int r = 0; r < 4; r++)
            if (first_row + across + r < rows) to[first_row + across + r] = sums[t][r];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    exact_matmul(const float *x, float *out, int rows, int cols, u64 row_bytes, TILE_PARAMETERS) {
    exact<WEIGHT>(x, out, rows, cols, row_bytes, TILE_ARGUMENTS);
}

// Warps of a block. Blocks are small, because few rows make few blocks.
static constexpr int NARROW_WARPS = 2;

// A load that the compiler does not move down to its first use, where its latency would show.
__device__ __forceinline__ float4 load_early(const float *from) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"((const uint4 *)from));
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
}

// Every warp computes ROWS rows for 4 tokens. Its lanes share the columns. All numbers of rows give the same bits.
template <int ROWS>
__device__ __forceinline__ void narrow(const float *__restrict__ x, const float *__restrict__ weights,
                                       float *__restrict__ out, int rows, int cols, int tokens) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int first_token = blockIdx.x * 4, first_row = (blockIdx.y * NARROW_WARPS + warp) * ROWS;
    if (first_row >= rows) return;
    const float *xs[4];
    const float *ws[ROWS];
    // Rows and tokens beyond the end repeat the last ones.
#pragma unroll
    for (int i = 0; i < 4; i++) xs[i] = x + (size_t)min(first_token + i, tokens - 1) * cols;
#pragma unroll
    for (int i = 0; i < ROWS; i++) ws[i] = weights + (size_t)min(first_row + i, rows - 1) * cols;
    // A lane takes 4 adjacent columns of 128, also where they are not aligned and must be read one by one.
    const bool aligned = (((size_t)x | (size_t)weights | (size_t)cols * 4) & 15) == 0;
    float sums[4][ROWS] = {};
    if (aligned) {
        const auto add = [&](const float4 (&a)[4], const float4 (&b)[ROWS]) {
#pragma unroll
            for (int t = 0; t < 4; t++)
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    sums[t][r] = __fmaf_rn(a[t].x, b[r].x, sums[t][r]);
                    sums[t][r] = __fmaf_rn(a[t].y, b[r].y, sums[t][r]);
                    sums[t][r] = __fmaf_rn(a[t].z, b[r].z, sums[t][r]);
                    sums[t][r] = __fmaf_rn(a[t].w, b[r].w, sums[t][r]);
                }
        };
        // The loads of a batch do not wait for each other. A branch among them would let the compiler move them down.
        constexpr int BATCH = ROWS == 1 ? 4 : 1;
        int first = 4 * lane;
        for (; first + (BATCH - 1) * 128 < cols; first += BATCH * 128) {
            float4 a[BATCH][4], b[BATCH][ROWS];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[k][i] = load_early(xs[i] + first + k * 128);
#pragma unroll
                for (int i = 0; i < ROWS; i++) b[k][i] = load_early(ws[i] + first + k * 128);
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) add(a[k], b[k]);
        }
        for (; first < cols; first += 128) {
            float4 a[4], b[ROWS];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = load_early(xs[i] + first);
#pragma unroll
            for (int i = 0; i < ROWS; i++) b[i] = load_early(ws[i] + first);
            add(a, b);
        }
    } else {
        for (int first = 4 * lane; first < cols; first += 128)
            for (int col = first; col < min(first + 4, cols); col++)
#pragma unroll
                for (int t = 0; t < 4; t++)
#pragma unroll
                    for (int r = 0; r < ROWS; r++) sums[t][r] = __fmaf_rn(xs[t][col], ws[r][col], sums[t][r]);
    }
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float sum = warp_sum(sums[t][r]);
            if (lane == 0 && first_token + t < tokens && first_row + r < rows)
                out[(size_t)(first_token + t) * rows + first_row + r] = sum;
        }
}

// For F32 weights. The second kernel is for few tokens: more warps, each of which reads less.
extern "C" __global__ void __launch_bounds__(32 * NARROW_WARPS)
    exact_narrow(const float *x, const float *weights, float *out, int rows, int cols, int tokens) {
    wait_for_previous();
    narrow<4>(x, weights, out, rows, cols, tokens);
}
extern "C" __global__ void __launch_bounds__(32 * NARROW_WARPS)
    exact_narrow_few(const float *x, const float *weights, float *out, int rows, int cols, int tokens) {
    wait_for_previous();
    narrow<1>(x, weights, out, rows, cols, tokens);
}
