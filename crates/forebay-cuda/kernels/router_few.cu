// The router of a few tokens in one launch. All blocks compute logits, and the block that ends last chooses the
// experts. As separate launches, each of the two takes longer to start and end than to compute.
//
// EXPERTS is the capacity: 128, 256 or 512.
#include "matvec_float.cuh"
#include "router.cuh"

// Grid (shares of the experts, 1, tokens). x [tokens, cols], logits [tokens, experts]; `tickets` [tokens] are 0 before and
// after. Shared memory [2][experts].
template <class W, int N>
__device__ inline void choose(const float *x, u64 matrix, int cols, u64 row_bytes, float *logits, u32 *tickets,
                                 ROUTER_PARAMETERS) {
    __shared__ u32 ticket;
    const int token = blockIdx.z;
    matvec<W, 1, 1, false>(x, nullptr, nullptr, nullptr, matrix, 0, 0, 0, experts, 0, 0, 0, logits, nullptr, nullptr, nullptr, cols,
                 row_bytes, tokens, 1, SEPARATE, SILU, 0, 0, nullptr, nullptr, nullptr);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        ticket = atomicAdd(tickets + token, 1u);
        if (ticket == gridDim.x - 1) tickets[token] = 0;
    }
    __syncthreads();
    if (ticket != gridDim.x - 1 || threadIdx.x >= 32) return;
    __threadfence();
    extern __shared__ float shared[];
    choose_experts<N>(token, logits, shared, ROUTER_ARGUMENTS);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4)
    route_few(const float *x, u64 matrix, int cols, u64 row_bytes, float *logits, u32 *tickets, ROUTER_PARAMETERS) {
    wait_for_previous();
    start_next(tokens <= FEW_ROWS);
    choose<WEIGHT, EXPERTS / 32>(x, matrix, cols, row_bytes, logits, tickets, ROUTER_ARGUMENTS);
}
