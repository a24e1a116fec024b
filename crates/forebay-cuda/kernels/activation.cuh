// Activations rounded to 8 bits: what `quantize_q8` writes and the mat-vec reads.
#pragma once

#include "common.cuh"

// Of 32 elements: value = scale * code; the sums of the first and the last 16 codes.
struct __align__(8) ActivationScale {
    float scale;
    short sums[2];
};

