// Gated activation functions, applied to the outputs of the gate and up matrices. Roundings are explicit, so that all
// kernels give the same bits.
#pragma once

#include "common.cuh"

enum Gating { SILU = 0, GELU_TANH = 1, CLAMPED = 2, SQUARED_RELU = 3, CLAMPED_SILU = 4, SILU_CLAMPED = 5, SITU = 6 };

// x / (1 + e^-s)
__device__ __forceinline__ float times_logistic(float x, float s) { return x / __fadd_rn(1.0f, expf(-s)); }

// `limit` applies to CLAMPED, CLAMPED_SILU and SILU_CLAMPED. `alpha` applies to the first two of these, and is 1 for the second.
// SQUARED_RELU has no gate: `gate` and `up` are the same. The comparisons propagate NaN, which fminf would not. SITU takes `limit`
// for the gate and `alpha` for `up`.
__device__ __forceinline__ float gated(int gating, float gate, float up, float alpha, float limit) {
    if (gating == SILU) return times_logistic(gate, gate) * up;
    if (gating == GELU_TANH) {
        // (1 + tanh(y)) / 2 is the logistic function of 2y, which keeps precision below zero. 1.59... is sqrt(8/pi).
        return times_logistic(gate, 1.5957691f * __fmaf_rn(0.044715f * gate * gate, gate, gate)) * up;
    }
    if (gating == SQUARED_RELU) return (gate < 0.0f ? 0.0f : gate) * up;
    if (gating == SITU) {
        const float inner = times_logistic(__fmul_rn(limit, tanhf(__fdiv_rn(gate, limit))), gate);
        return __fmul_rn(inner, __fmul_rn(alpha, tanhf(__fdiv_rn(up, alpha))));
    }
    up = up > limit ? limit : up < -limit ? -limit : up;
    if (gating == SILU_CLAMPED) {
        const float inner = times_logistic(gate, gate);
        return (inner > limit ? limit : inner) * up;
    }
    gate = gate > limit ? limit : gate;
    return (gating == CLAMPED ? __fadd_rn(up, 1.0f) : up) * times_logistic(gate, alpha * gate);
}
