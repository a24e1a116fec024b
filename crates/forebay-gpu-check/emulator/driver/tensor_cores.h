// Products of a warp's fragments.
#pragma once

#include "../device/runtime.h"

namespace emulated {

// m16n8k16 with rows of A and columns of B, as the PTX manual lays them out over the lanes: words 0 ... 3 of a slot are
// A's, 4 and 5 B's, 6 ... 9 the sums, which are replaced. Products are added in f32 in their order.
void multiply_tiles(Slot *slots, bool bfloat);

}  // namespace emulated
