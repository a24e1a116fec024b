// The router of a mixture-of-experts layer: from logits to each token's experts and their weights, then pairs of token
// and slot sorted by expert.
#include "router.cuh"

static constexpr int WARPS = 4;

// One warp for each token. Shared memory [WARPS][2][experts].
#define ROUTE(NAME, N)                                                                                         \
    extern "C" __global__ void __launch_bounds__(WARPS * 32) NAME(const float *logits, ROUTER_PARAMETERS) {    \
        wait_for_previous();                                                                                   \
        extern __shared__ float shared[];                                                                      \
        const int warp = threadIdx.x >> 5, token = blockIdx.x * WARPS + warp;                                  \
        if (token < tokens) route<N>(token, logits, shared + warp * 2 * experts, ROUTER_ARGUMENTS);            \
    }

ROUTE(route_128, 4)
ROUTE(route_256, 8)
ROUTE(route_512, 16)

// Sorts pairs (token * k + slot) by expert, tokens ascending within one: starts [experts + 1], then for each place its
// token and its pair, and for each pair its place. A warp counts for one expert, so that nothing has to be agreed on.
extern "C" __global__ void __launch_bounds__(256)
    sort_pairs(const u32 *ids, u32 *starts, u32 *pair_tokens, u32 *pairs, u32 *row_of_pair,
               int count, int experts, int k) {
    wait_for_previous();
    const u32 expert = blockIdx.x * 8 + (threadIdx.x >> 5);
    const int lane = threadIdx.x & 31;
    if (expert > (u32)experts) return;
    int below = 0;
    for (int pair = lane; pair < count; pair += 32) below += ids[pair] < expert;
    u32 place = (u32)warp_sum(below);
    if (lane == 0) starts[expert] = place;
    // The last start is the number of pairs; it belongs to no expert.
    if (expert == (u32)experts) return;
    for (int first = 0; first < count; first += 32) {
        const int pair = first + lane;
        const bool own = pair < count && ids[pair] == expert;
        const u32 all = __ballot_sync(~0u, own);
        if (own) {
            const u32 at = place + __popc(all & ((1u << lane) - 1));
            pair_tokens[at] = (u32)(pair / k);
            pairs[at] = (u32)pair;
            row_of_pair[pair] = at;
        }
        place += __popc(all);
    }
}
