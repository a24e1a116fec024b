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

// Every warp computes 4 rows for 4 tokens. Its lanes share the columns.
__device__ __forceinline__ void narrow(const float *__restrict__ x, const float *__restrict__ weights,
                                       float *__restrict__ out, int rows, int cols, int tokens) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int first_token = blockIdx.x * 4, first_row = (blockIdx.y * NARROW_WARPS + warp) * 4;
    if (first_row >= rows) return;
    const float *xs[4];
    const float *ws[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // Rows and tokens beyond the end repeat the last ones.
        xs[i] = x + (size_t)min(first_token + i, tokens - 1) * cols;
        ws[i] = weights + (size_t)min(first_row + i, rows - 1) * cols;
    }
    // A lane takes 4 adjacent columns of 128, also where they are not aligned and must be read one by one.
    const bool aligned = (((size_t)x | (size_t)weights | (size_t)cols * 4) & 15) == 0;
    float sums[4][4] = {};
    auto add = [&](const float (&a)[4], const float (&b)[4]) {
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int r = 0; r < 4; r++) sums[t][r] += a[t] * b[r];
    };
    if (aligned) {
#pragma unroll 4
        for (int col = 4 * lane; col < cols; col += 128) {
            float4 a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[i] = *(const float4 *)(xs[i] + col);
                b[i] = *(const float4 *)(ws[i] + col);
            }
            add({a[0].x, a[1].x, a[2].x, a[3].x}, {b[0].x, b[1].x, b[2].x, b[3].x});
            add({a[0].y, a[1].y, a[2].y, a[3].y}, {b[0].y, b[1].y, b[2].y, b[3].y});
            add({a[0].z, a[1].z, a[2].z, a[3].z}, {b[0].z, b[1].z, b[2].z, b[3].z});
            add({a[0].w, a[1].w, a[2].w, a[3].w}, {b[0].w, b[1].w, b[2].w, b[3].w});
        }
    } else {
        for (int first = 4 * lane; first < cols; first += 128)
            for (int col = first; col < min(first + 4, cols); col++)
                add({xs[0][col], xs[1][col], xs[2][col], xs[3][col]},
                    {ws[0][col], ws[1][col], ws[2][col], ws[3][col]});
    }
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float sum = warp_sum(sums[t][r]);
            if (lane == 0 && first_token + t < tokens && first_row + r < rows)
                out[(size_t)(first_token + t) * rows + first_row + r] = sum;
        }
}

// For F32 weights.
extern "C" __global__ void __launch_bounds__(32 * NARROW_WARPS)
    exact_narrow(const float *x, const float *weights, float *out, int rows, int cols, int tokens) {
    wait_for_previous();
    narrow(x, weights, out, rows, cols, tokens);
}
