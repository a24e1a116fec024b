// Products of a few tokens with a matrix of floats.
#include "matvec_float.cuh"

#define KERNEL(NAME, TOKENS, U, AHEAD, BLOCKS)                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) NAME(const float *x, MATVEC_PARAMETERS) { \
        if (!IsCompact<WEIGHT>::VALUE) begin_matvec(ids, tokens);                                              \
        matvec<WEIGHT, TOKENS, U, AHEAD>(x, MATVEC_ARGUMENTS);                                                 \
    }

// See matvec.cu for why there are two modules.
#ifdef FEW
KERNEL(matvec_2, 2, 2, false, 4)
KERNEL(matvec_4, 4, 2, false, 4)
KERNEL(matvec_8, 8, 1, false, 3)
#elif defined(COMPACT)
KERNEL(matvec_1, 1, 2, false, 8)
// Matrices of fewer rows have no work for so many warps, so a warp has more bytes on the way.
KERNEL(matvec_1_some_rows, 1, 2, true, 6)
KERNEL(matvec_1_few_rows, 1, 4, true, 4)
#else
KERNEL(matvec_1, 1, 1, false, 4)
#endif
