// Runs of consecutive rows of one sequence, and what a causal convolution keeps of the tokens before.
#pragma once
#include "common.cuh"

// `from` and `to` are numbers of states; NO_STATE stands for the empty state.
struct StateRun {
    u32 first, count, from, to;
};
static constexpr u32 NO_STATE = ~0u;

// Sets `run` to the run of a row of the pass. Returns false if the row is in none.
__device__ __forceinline__ bool find_run(const u32 *run_words, int runs, int row, StateRun &run) {
    const StateRun *const all = (const StateRun *)run_words;
    int index = 0;
    while (index < runs && (u32)row - all[index].first >= all[index].count) index++;
    if (index == runs) return false;
    run = all[index];
    return true;
}

// The inputs of one channel of a convolution that a state begins with: those of the last `kept` tokens [kept, channels], oldest
// first.
struct KeptInputs {
    const float *before;
    float *after;
    // Number of the row in its run, and number of rows of the run.
    int token, count, kept, channels;

    __device__ __forceinline__ KeptInputs(const StateRun &run, int row, float *states, u64 state_floats, int kept, int channels,
                                          int channel)
        : before(run.from == NO_STATE ? nullptr : states + run.from * state_floats + channel),
          after(states + run.to * state_floats + channel), token(row - (int)run.first), count((int)run.count), kept(kept),
          channels(channels) {}

    // The input of the token `back` before this one, which is before the run.
    __device__ __forceinline__ float input(int back) const {
        return before ? before[(size_t)(kept + token - back) * channels] : 0.0f;
    }

    // Keeps the inputs that later tokens need, of which `own` is this token's. If the run is short, some are of tokens before it.
    __device__ __forceinline__ void keep(float own) const {
        const int entry = token - (count - kept);
        if (entry >= 0) after[(size_t)entry * channels] = own;
        if (token == 0)
            for (int i = 0; i + count < kept; i++)
                after[(size_t)i * channels] = before ? before[(size_t)(i + count) * channels] : 0.0f;
    }
};
