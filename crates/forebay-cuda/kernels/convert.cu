// Converts weights to the layout in which other files hold the same values.
#include "common.cuh"

static constexpr int BLOCKS = 128;

// Converts blocks of 32 four-bit elements. In `blocks` [rows, row_blocks, 16], byte j holds elements 2j and 2j + 1;
// `scales` [rows, row_blocks] are separate. In the output, the scale comes first, and byte j holds elements j and j +
// 16. Row r becomes row r / 2 of `even` or `odd`. If `odd` is null, it becomes row r of `even`. Grid (shares of a row,
// rows).
extern "C" __global__ void __launch_bounds__(BLOCKS)
    mxfp4_blocks(const uint4 *blocks, const u8 *scales, u8 *even, u8 *odd, int rows, int row_blocks) {
    wait_for_previous();
    // Blocks of 17 bytes lie at odd addresses. They are ordered in shared memory first, so that adjacent threads write
    // adjacent bytes.
    __shared__ u8 ordered[BLOCKS * 17];
    const int first = blockIdx.x * BLOCKS, count = min(BLOCKS, row_blocks - first);
    for (int row = blockIdx.y; row < rows; row += gridDim.y) {
        if ((int)threadIdx.x < count) {
            const size_t at = (size_t)row * row_blocks + first + threadIdx.x;
            const uint4 in = blocks[at];
            const u32 low[2] = {in.x, in.y}, high[2] = {in.z, in.w};
            u8 *out = ordered + 17 * threadIdx.x;
            *out++ = scales[at];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 evens = (low[i] & 0x0f0f0f0fu) | (high[i] & 0x0f0f0f0fu) << 4;
                const u32 odds = (low[i] >> 4 & 0x0f0f0f0fu) | (high[i] & 0xf0f0f0f0u);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    *out++ = (u8)(evens >> 8 * j);
                    *out++ = (u8)(odds >> 8 * j);
                }
            }
        }
        __syncthreads();
        u8 *to = odd && row & 1 ? odd : even;
        to += ((size_t)(odd ? row >> 1 : row) * row_blocks + first) * 17;
        for (int i = threadIdx.x; i < 17 * count; i += BLOCKS) to[i] = ordered[i];
        __syncthreads();
    }
}

static constexpr int TILE = 32, TILE_ROWS = 8;

// Grid (tiles of columns, tiles of rows, matrices). Strides are from one matrix to the next, in elements.
template <class T>
__device__ __forceinline__ void transpose(const T *from, T *to, int rows, int cols, u64 from_stride, u64 to_stride) {
    __shared__ T tile[TILE][TILE + 1];
    from += blockIdx.z * from_stride;
    to += blockIdx.z * to_stride;
    const int row = blockIdx.y * TILE, col = blockIdx.x * TILE, x = threadIdx.x;
    for (int y = threadIdx.y; y < TILE; y += TILE_ROWS)
        if (row + y < rows && col + x < cols) tile[y][x] = from[(size_t)(row + y) * cols + col + x];
    __syncthreads();
    for (int y = threadIdx.y; y < TILE; y += TILE_ROWS)
        if (col + y < cols && row + x < rows) to[(size_t)(col + y) * rows + row + x] = tile[x][y];
}

extern "C" __global__ void __launch_bounds__(TILE *TILE_ROWS)
    transpose_2(const u16 *from, u16 *to, int rows, int cols, u64 from_stride, u64 to_stride) {
    wait_for_previous();
    transpose(from, to, rows, cols, from_stride, to_stride);
}

extern "C" __global__ void __launch_bounds__(TILE *TILE_ROWS)
    transpose_4(const u32 *from, u32 *to, int rows, int cols, u64 from_stride, u64 to_stride) {
    wait_for_previous();
    transpose(from, to, rows, cols, from_stride, to_stride);
}
