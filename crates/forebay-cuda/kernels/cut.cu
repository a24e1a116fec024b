// Sparse activations (Gemma 3n).
#include "reduce.cuh"

// Subtracts a number from the values of rows of x [rows, width], and sets those that become negative to 0. The number is the mean of
// the row and `deviations` times its standard deviation. A block computes a row. The order in which a row is summed depends only on
// its width.
extern "C" __global__ void __launch_bounds__(1024, 1) cut_rows(float *x, int width, float deviations) {
    wait_for_previous();
    __shared__ float shared[32];
    float *const row = x + (size_t)blockIdx.x * width;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum = __fadd_rn(sum, row[i]);
    const float mean = block_sum(sum, shared) / (float)width;
    // Nobody may still read the sums of the warps.
    __syncthreads();
    float square = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float difference = row[i] - mean;
        square = __fmaf_rn(difference, difference, square);
    }
    const float cut = __fmaf_rn(sqrtf(block_sum(square, shared) / (float)width), deviations, mean);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float above = row[i] - cut;
        // Values that are no numbers must stay, so that they are noticed.
        row[i] = above < 0.0f ? 0.0f : above;
    }
}
