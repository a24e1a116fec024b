// What the kernels of recurrent layers share.
#pragma once
#include "gating.cuh"

// A product of some row length, and its columns: the first one of key head 0, and the distance to the next key head.
#define PRODUCT(name) const float *name, int name##_row, int name##_first, int name##_step

// ln(1 + e^x)
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ __forceinline__ float silu(float x) { return times_logistic(x, x); }
