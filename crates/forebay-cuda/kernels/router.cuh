// Chooses experts from one token's logits.
#pragma once

#include "common.cuh"

// Maps a float to bits whose order is that of the numbers. The result is never 0 for a number.
__device__ inline u32 ordered(float x) {
    const u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Returns the index of the largest key of all lanes; the lowest index among equal keys. Each lane passes its best.
__device__ inline u32 best_of_warp(u32 key, u32 index) {
    const u32 most = __reduce_max_sync(~0u, key);
    return __reduce_min_sync(~0u, key == most ? index : ~0u);
}

// Returns the sum of the `count` largest of `group`, added from the largest down, as on the CPU.
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

// Returns the groups that remain candidates: bit g for group g. `choice` [experts] is in shared memory.
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

// With SIGMOID_OF_CHOSEN, the logits choose, and their sigmoids are weights only. With SPARSE_MIXER, the logits choose, and a weight is a
// share of a softmax over the experts that are left and whose logits are near that of the best.
enum Scoring { SOFTMAX = 0, SIGMOID = 1, SQRT_SOFTPLUS = 2, SIGMOID_OF_CHOSEN = 3, SPARSE_MIXER = 4 };
// Relative distance up to which logits are near.
static constexpr float NEAR_LOGITS = 0.02f;

// Parameters of the router kernels.
// - logits [tokens, experts]; `logit_bias` [experts], if not null, is added to them.
// - bias [experts], if not null, is added to the scores for the choice only.
// - expert_scales [experts], if not null, are factors of the experts' weights.
// - table [vocabulary, k], if not null, gives the experts of the token `numbers` [tokens]: then there is no choice.
// - scoring: how logits become scores, one of those below.
// - ids and weights [tokens, k]: the chosen experts, best first, or in the order of the table.
// - flag: receives the smallest token that has a logit which is not finite.
// - groups: 0 if experts are not grouped.
// - always: number of experts, the last ones, that every token uses. They take the last places.
#define ROUTER_PARAMETERS                                                                                      \
    const float *logit_bias, const float *bias, const float *expert_scales, const u32 *table, const u32 *numbers,   \
        u32 *ids, float *weights, u32 *flag, int tokens, int experts, int k, int scoring, int renormalise, float factor, int groups, int groups_kept, int experts_scored, int always
#define ROUTER_ARGUMENTS                                                                                       \
    logit_bias, bias, expert_scales, table, numbers, ids, weights, flag, tokens, experts, k, scoring, renormalise, factor, groups,            \
        groups_kept, experts_scored, always

// Chooses the experts of one token with one warp. A lane owns N experts: lane, lane + 32, ... `scores` [2][experts] is
// shared memory of the warp.
template <int N>
__device__ inline void choose_experts(int token, const float *logits, float *scores, ROUTER_PARAMETERS) {
    const int lane = threadIdx.x & 31;
    float *const choices = scores + experts;
    logits += (size_t)token * experts;
    float x[N];
    float largest = -__int_as_float(0x7f800000);
    bool broken = false;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int expert = lane + 32 * n;
        // Other blocks of this launch may have written the logits.
        x[n] = expert < experts ? __ldcg(logits + expert) : 0.0f;
        if (logit_bias && expert < experts) x[n] += logit_bias[expert];
        if (!isfinite(x[n])) {
            // The host will discard this token because of the flag. Until then every id must be that of an expert that
            // exists.
            broken = true;
            x[n] = 0.0f;
        }
        if (expert < experts) largest = fmaxf(largest, x[n]);
    }
    if (__any_sync(~0u, broken) && lane == 0) atomicMin(flag, (u32)token);
    largest = warp_max(largest);
    // Exponentials are computed in f64 and rounded once. The CPU's are equally exact, so equal logits give equal
    // choices.
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (scoring == SIGMOID) {
            x[n] = 1.0f / (1.0f + (float)exp((double)-x[n]));
        } else if (scoring == SQRT_SOFTPLUS) {
            const double logit = x[n];
            x[n] = (float)sqrt(fmax(logit, 0.0) + log1p(exp(-fabs(logit))));
        } else if (scoring == SOFTMAX) {
            x[n] = (float)exp((double)(x[n] - largest));
            if (lane + 32 * n < experts) sum += x[n];
        }
    }
    sum = warp_sum(sum);
    u32 keys[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int expert = lane + 32 * n;
        if (scoring == SOFTMAX) x[n] /= sum;
        keys[n] = 0;
        if (expert < experts) {
            const float choice = bias ? x[n] + bias[expert] : x[n];
            if (scoring == SIGMOID_OF_CHOSEN) x[n] = 1.0f / (1.0f + (float)exp((double)-x[n]));
            scores[expert] = x[n];
            choices[expert] = choice;
            keys[n] = expert < experts - always ? ordered(choice) : 0;
        }
    }
    __syncwarp();
    u32 id = 0;
    float weight = 0.0f;
    if (table) {
        if (lane < k) {
            id = table[(size_t)numbers[token] * k + lane];
            weight = scores[id];
        }
    } else {
        if (groups > 0) {
            const u32 chosen = best_groups(choices, experts, groups, groups_kept, experts_scored);
            const int size = experts / groups;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const int expert = lane + 32 * n;
                if (expert < experts && !(chosen >> expert / size & 1)) keys[n] = 0;
            }
        }
        for (int slot = 0; slot < k; slot++) {
            u32 key = 0, index = ~0u;
#pragma unroll
            for (int n = 0; n < N; n++)
                if (keys[n] > key) {
                    key = keys[n];
                    index = lane + 32 * n;
                }
            u32 best = best_of_warp(key, index);
            if (slot >= k - always) best = (u32)(experts - k + slot);
            float own = scores[best];
            if (scoring == SPARSE_MIXER) {
                float part = 0.0f;
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (keys[n] && !((own - x[n]) / fmaxf(fabsf(x[n]), own) > NEAR_LOGITS))
                        part += (float)exp((double)(x[n] - own));
                own = 1.0f / warp_sum(part);
            }
#pragma unroll
            for (int n = 0; n < N; n++)
                if (best == (u32)(lane + 32 * n)) keys[n] = 0;
            if (lane == slot) {
                id = best;
                weight = own;
            }
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
        const float scaled = __fmul_rn(weight, factor);
        weights[(size_t)token * k + lane] = expert_scales ? __fmul_rn(scaled, expert_scales[id]) : scaled;
    }
}
