// What kernels know about the experts of (token, slot) pairs.
#pragma once

#include "common.cuh"

// The expert id of a pair that has no expert, because its row only pads a CUDA graph.
static constexpr u32 NO_EXPERT = ~0u;
