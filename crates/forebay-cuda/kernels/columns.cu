// Joins columns of two matrices: splits heads into the part that rotates and the part that does not, and joins them
// again.
#include "common.cuh"

// Row of out [rows, a_cols + b_cols]: the first `a_cols` elements of the row of `a`, then the first `b_cols` of the row
// of `b`. Rows of `a` and `b` are `a_stride` and `b_stride` elements apart.
extern "C" __global__ void __launch_bounds__(256)
    join_columns(const float *a, int a_stride, int a_cols, const float *b, int b_stride, int b_cols, float *out,
                 int rows) {
    wait_for_previous();
    const int cols = a_cols + b_cols;
    const size_t count = (size_t)rows * cols;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (size_t)gridDim.x * blockDim.x) {
        const size_t row = i / cols;
        const int col = (int)(i - row * cols);
        out[i] = col < a_cols ? a[row * a_stride + col] : b[row * b_stride + (col - a_cols)];
    }
}
