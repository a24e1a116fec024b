// The router of a mixture-of-experts layer: from logits to each token's experts and their weights, then pairs of token
// and slot sorted by expert.
#include "common.cuh"

static constexpr int WARPS = 4;

// Bits in the order of the numbers; never 0 for a number.
__device__ inline u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The index of the largest of all lanes' keys, the lowest index of equals. Each lane brings its best.
__device__ inline u32 best_of_warp(u32 key, u32 index) {
    const u32 most = __reduce_max_sync(~0u, key);
    return __reduce_min_sync(~0u, key == most ? index : ~0u);
}

// The sum of the `count` largest of `group`, largest first, as the processor adds them.
__device__ inline float sum_of_best(const float *group, int size, int count) {
    float sum = 0.0f, last = __int_as_float(0x7f800000);
    for (int taken = 0; taken < count;) {
        float best = -__int_as_float(0x7f800000);
        int equal = 0;
        for (int i = 0; i < size; i++) {
            const float x = group[i];
            if (x >= last) continue;
            equal = x > best ? 1 : equal + (x == best);
            best = fmaxf(best, x);
        }
        const int used = min(max(equal, 1), count - taken);
        sum = __fadd_rn(sum, __fmul_rn(best, (float)used));
        taken += used;
        last = best;
    }
    return sum;
}

// Which groups stay in the choice: bit g for group g. `choice` [experts] is in shared memory.
__device__ inline u32 best_groups(const float *choice, int experts, int groups, int kept, int scored) {
    const int lane = threadIdx.x & 31, size = experts / groups;
    u32 key = lane < groups ? ordered(sum_of_best(choice + lane * size, size, scored)) : 0;
    u32 chosen = 0;
    for (int i = 0; i < kept; i++) {
        const u32 best = best_of_warp(key, (u32)lane);
        chosen |= 1u << best;
        if (lane == (int)best) key = 0;
    }
    return chosen;
}

// One warp for each token; lanes own experts lane, lane + 32, ...; N of them. Shared memory [WARPS][2][experts].
template <int N>
__device__ inline void route(const float *logits, const float *bias, u32 *ids, float *weights,
                             u32 *flag, int tokens, int experts, int k, int sigmoid, int renormalise,
                             float factor, int groups, int groups_kept, int experts_scored) {
    wait_for_previous();
    extern __shared__ float shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = blockIdx.x * WARPS + warp;
    if (token >= tokens) return;
    float *const scores = shared + warp * 2 * experts, *const choices = scores + experts;
    logits += (size_t)token * experts;
    float x[N];
    float largest = -__int_as_float(0x7f800000);
    bool broken = false;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int expert = lane + 32 * n;
        x[n] = expert < experts ? logits[expert] : 0.0f;
        if (!isfinite(x[n])) {
            // The flag ends the token's life; until then every id has to be one that exists.
            broken = true;
            x[n] = 0.0f;
        }
        if (expert < experts) largest = fmaxf(largest, x[n]);
    }
    if (__any_sync(~0u, broken) && lane == 0) atomicMin(flag, (u32)token);
    largest = warp_max(largest);
    // Exponentials in f64, rounded once: the processor's are as exact, so that equal logits give equal choices.
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (sigmoid) {
            x[n] = 1.0f / (1.0f + (float)exp((double)-x[n]));
        } else {
            x[n] = (float)exp((double)(x[n] - largest));
            if (lane + 32 * n < experts) sum += x[n];
        }
    }
    sum = warp_sum(sum);
    u32 keys[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int expert = lane + 32 * n;
        if (!sigmoid) x[n] /= sum;
        keys[n] = 0;
        if (expert < experts) {
            const float choice = bias ? x[n] + bias[expert] : x[n];
            scores[expert] = x[n];
            choices[expert] = choice;
            keys[n] = ordered(choice);
        }
    }
    __syncwarp();
    if (groups > 0) {
        const u32 chosen = best_groups(choices, experts, groups, groups_kept, experts_scored);
        const int size = experts / groups;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int expert = lane + 32 * n;
            if (expert < experts && !(chosen >> expert / size & 1)) keys[n] = 0;
        }
    }
    u32 id = 0;
    float weight = 0.0f;
    for (int slot = 0; slot < k; slot++) {
        u32 key = 0, index = ~0u;
#pragma unroll
        for (int n = 0; n < N; n++)
            if (keys[n] > key) {
                key = keys[n];
                index = lane + 32 * n;
            }
        const u32 best = best_of_warp(key, index);
#pragma unroll
        for (int n = 0; n < N; n++)
            if (best == (u32)(lane + 32 * n)) keys[n] = 0;
        if (lane == slot) {
            id = best;
            weight = scores[best];
        }
    }
    if (renormalise) {
        float all = 0.0f;
        for (int slot = 0; slot < k; slot++) all += __shfl_sync(~0u, weight, slot);
        // Sigmoid scores may all underflow; their weights are then 0.
        factor /= fmaxf(all, 1e-20f);
    }
    if (lane < k) {
        ids[(size_t)token * k + lane] = id;
        weights[(size_t)token * k + lane] = weight * factor;
    }
}

// logits [tokens, experts], bias [experts] or none, ids and weights [tokens, k], best first; `flag` gets the smallest
// token that has a logit which is not finite. groups 0: no groups.
#define ROUTE(NAME, N)                                                                                          \
    extern "C" __global__ void __launch_bounds__(WARPS * 32)                                                    \
        NAME(const float *logits, const float *bias, u32 *ids, float *weights, u32 *flag, int tokens,          \
             int experts, int k, int sigmoid, int renormalise, float factor, int groups, int groups_kept,      \
             int experts_scored) {                                                                              \
        route<N>(logits, bias, ids, weights, flag, tokens, experts, k, sigmoid, renormalise, factor, groups,   \
                 groups_kept, experts_scored);                                                                  \
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
