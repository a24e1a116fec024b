// Converts activations [rows, cols] to 16-bit numbers for tensor cores.
#include "halves.cuh"

__device__ __forceinline__ float half_value(u32 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
}

__device__ __forceinline__ u32 bfloat_bits(float x) {
    u32 bits;
    asm("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b32 %0, {h, h};}" : "=r"(bits) : "f"(x));
    return bits & 0xffff;
}

// Converts a row per block to halves of x * 2^k and sets scales[row] = 2^-k. `low`, unless null, receives the rounding errors
// of the halves.
__device__ __forceinline__ void to_halves(const float *__restrict__ x, u16 *__restrict__ high, u16 *__restrict__ low,
                                          float *__restrict__ scales, int cols) {
    const size_t row = (size_t)blockIdx.x * cols;
    int largest = 0;
    for (int i = threadIdx.x; i < cols; i += 256) largest = larger_bits(largest, x[row + i]);
    float scale;
    const float factor = half_row_factor(block_largest(largest), scale);
    for (int i = threadIdx.x; i < cols; i += 256) {
        const float value = x[row + i] * factor;
        const u32 bits = pack_halves(value, 0.0f) & 0xffff;
        high[row + i] = (u16)bits;
        if (low) low[row + i] = (u16)pack_halves(value - half_value(bits), 0.0f);
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

extern "C" __global__ void __launch_bounds__(256)
    narrow_half(const float *x, u16 *high, u16 *low, float *scales, int cols) {
    wait_for_previous();
    to_halves(x, high, low, scales, cols);
}

// Converts each number to two bfloats whose sum is within 2^-17 of it.
extern "C" __global__ void __launch_bounds__(256)
    narrow_bfloat(const float *x, u16 *high, u16 *low, size_t count) {
    wait_for_previous();
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    const u32 bits = bfloat_bits(x[i]);
    high[i] = (u16)bits;
    low[i] = (u16)bfloat_bits(x[i] - __uint_as_float(bits << 16));
}
