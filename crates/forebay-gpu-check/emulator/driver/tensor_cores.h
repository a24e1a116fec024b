// Tensor-core products of a warp's fragments.
#pragma once

#include "../device/runtime.h"

namespace emulated {

// Computes m16n8k16 with row-major A and column-major B, laid out over the lanes as in the PTX manual. Words 0 ... 3 of
// a slot are A's, 4 and 5 B's, and 6 ... 9 the sums, which are replaced. Products are added in f32, in order.
void multiply_tiles(Slot *slots, bool bfloat);

// Computes m16n8k32 of signed 8-bit codes, laid out in the same words. Words 6 ... 9 are integers.
void multiply_codes(Slot *slots);

// Loads four matrices of 8 x 8 halves. Lane l gives the address of row l % 8 of matrix l / 8, and whether matrices are
// transposed.
void load_tiles(Slot *slots);

}  // namespace emulated
