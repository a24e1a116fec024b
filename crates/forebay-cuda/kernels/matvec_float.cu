// Products of a few tokens with a matrix of floats.
#include "matvec_float.cuh"

#define KERNEL(NAME, TOKENS, BLOCKS)                                                                           \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                           \
        NAME(const float *x, MATVEC_PARAMETERS) {                                                              \
        wait_for_previous();                                                                                   \
        start_next(ids ? gridDim.y <= 8 * FEW_ROWS : tokens <= FEW_ROWS);                                      \
        matvec<WEIGHT, TOKENS>(x, MATVEC_ARGUMENTS);                                                           \
    }

// See matvec.cu for why there are two modules.
#ifdef FEW
KERNEL(matvec_2, 2, 4)
KERNEL(matvec_4, 4, 4)
KERNEL(matvec_8, 8, 3)
#else
KERNEL(matvec_1, 1, IsCompact<WEIGHT>::VALUE ? 8 : 4)
#endif
