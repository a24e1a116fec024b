// Sorts pairs of token and slot by expert.
#include "experts.cuh"

// Sorts pairs (token * k + slot) by expert, with tokens ascending within an expert. Pairs without an expert come last.
// Writes starts [experts + 1]; for each sorted row its token and its pair; and for each pair its row. One warp counts for
// one expert, or for all pairs without one, so warps need not synchronise.
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
    for (int first = 0; first < count; first += 32) {
        const int pair = first + lane;
        const u32 id = pair < count ? ids[pair] : 0;
        const bool own = pair < count && (id == NO_EXPERT ? experts : id) == expert;
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
