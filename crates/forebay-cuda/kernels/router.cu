// The router of a mixture-of-experts layer: from logits to each token's experts and their weights.
//
// EXPERTS is the capacity: 128, 256 or 512.
#include "router.cuh"

static constexpr int WARPS = 4;

// One warp for each token. Shared memory [WARPS][2][experts].
extern "C" __global__ void __launch_bounds__(WARPS * 32) route(const float *logits, ROUTER_PARAMETERS) {
    wait_for_previous();
    start_next(tokens <= FEW_ROWS);
    extern __shared__ float shared[];
    const int warp = threadIdx.x >> 5, token = blockIdx.x * WARPS + warp;
    if (token < tokens) choose_experts<EXPERTS / 32>(token, logits, shared + warp * 2 * experts, ROUTER_ARGUMENTS);
}
